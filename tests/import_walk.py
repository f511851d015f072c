"""What the modules of the package import, by reading them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "xcloud"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "_hydra" not in path.parts)


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_of(path): path for path in FILES}


@cache
def imports(path: Path) -> frozenset[str]:
    """Absolute names of everything imported anywhere in a file, functions included."""
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            name = node.module or ""
            for alias in node.names:
                inner = f"{name}.{alias.name}"
                yield inner if inner.removeprefix("xcloud.") in MODULES else name


def own_imports(path: Path) -> set[str]:
    """Modules of this package that a file imports, without `xcloud.`."""
    names = {n.removeprefix("xcloud.") for n in imports(path) if n.startswith("xcloud.")}
    return {name for name in names if name in MODULES}
