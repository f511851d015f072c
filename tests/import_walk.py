"""What the modules of the package import, by reading them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "xcloud"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "_hydra" not in path.parts)
SCRIPTS = sorted(
    path
    for folder in ("benchmarks", "experiments")
    for path in (PACKAGE.parent / folder).rglob("*.py")
)
"""Files that are only run, so that nothing else would notice an import that is broken."""


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_of(path): path for path in FILES}


@cache
def parsed(path: Path) -> ast.Module:
    """Parse each file once for all tests of a process."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> frozenset[str]:
    """Absolute names of everything imported anywhere in a file, functions included."""
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            name = node.module or ""
            for alias in node.names:
                inner = f"{name}.{alias.name}"
                yield inner if inner.removeprefix("xcloud.") in MODULES else name
        elif isinstance(node, ast.Call):
            yield from _imported_by_call(node)


def _imported_by_call(call: ast.Call) -> Iterator[str]:
    """The module that `importlib.import_module("NAME")` imports, where the name is written out."""
    function = call.func
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if called in ("import_module", "__import__") and call.args:
        name = call.args[0]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield name.value


def own_imports(path: Path) -> set[str]:
    """Modules of this package that a file imports, without `xcloud.`."""
    names = {n.removeprefix("xcloud.") for n in imports(path) if n.startswith("xcloud.")}
    return {name for name in names if name in MODULES}


def missing_imports(path: Path) -> list[str]:
    """What a file imports of this repository, inside functions too, that does not exist."""
    return [
        f"{path.name}:{node.lineno}: {name}"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in _imported_by(node)
        if name.startswith(("xcloud.", "benchmarks.", "tests.")) and not _exists(name)
    ]


def _imported_by(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    within = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    yield from (f"{within}{alias.name}" for alias in node.names)


def _exists(name: str) -> bool:
    """A module, or a name in one."""
    module, _, attribute = name.rpartition(".")
    try:
        return hasattr(import_module(module), attribute) or bool(find_spec(name))
    except ModuleNotFoundError:
        return False
