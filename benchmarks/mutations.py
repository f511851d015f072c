"""Do the tests see a wrong token? Changes one at a time in a copy of the tree, and runs the tests
that are nearest to it.

    python -m benchmarks.mutations [--count 24] [--seed 1] [--rooms comm plan ...] [--limit-s 120]

A mutation turns a comparison, a sum, a condition, a constant, a returned value or a min into a
neighbour of it (CHANGES). As many are drawn from each room as its share of all that could be.
For each the test files run that import its module, itself or over a helper of tests/: the quick
tests first, the golden table, then the slow ones, until one fails. It is killed if a test fails
that passes without it, has survived if all pass, and is undecided where the time limit ends them,
as on a busy machine or where a change makes a test wait for ever. A survivor is a line that no
such test sees, or one where both tokens mean the same; tests further away may see it.

One process at a time. Linux: each turn is forked from a process that has imported torch.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.import_walk import FILES, MODULES, PACKAGE, imports, module_of, own_imports

ROOT = PACKAGE.parent
COPIED = ("xcloud", "tests", "conf", "benchmarks", "experiments", "docs", "records", "run.py",
          "claims.toml", "pyproject.toml", "README.md", "constraints.txt")  # fmt: skip
GOLDEN = "tests/test_golden.py"
FEW = 8  # test files of a module, before those of its importers count
CHANGES: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "sum": "max"}
IMPORTED_FIRST = ("torch", "pandas", "numpy", "pytest", "matplotlib", "pydantic", "omegaconf")


@dataclass(frozen=True, order=True)
class Mutation:
    """A piece of one line of a file of the package, and what stands there instead."""

    file: str
    line: int
    start: int
    end: int
    new: str

    def applied(self, text: str) -> str:
        lines = text.splitlines(keepends=True)
        old = lines[self.line - 1]
        lines[self.line - 1] = old[: self.start] + self.new + old[self.end :]
        return "".join(lines)

    def describe(self, text: str) -> str:
        old = text.splitlines()[self.line - 1]
        change = f"{old[self.start : self.end]!r} -> {self.new!r}"
        return f"{self.file}:{self.line}  {change}  in {old.strip()}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", nargs="+", help="default: all")
    parser.add_argument("--limit-s", type=float, default=120.0, help="of the tests of a mutation")
    given = parser.parse_args()
    for name in IMPORTED_FIRST:
        __import__(name)
    fates = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        for mutation in drawn(given.count, given.seed, given.rooms):
            started_s = time.monotonic()
            text = (tree / mutation.file).read_text(encoding="utf-8")
            fate, by = judged(mutation, text, tree, given.limit_s)
            fates[fate] += 1
            took_s = time.monotonic() - started_s
            print(f"{fate:9}{took_s:5.0f} s  {mutation.describe(text)}  {by}", flush=True)
    killed, judged_ones = fates["killed"], fates["killed"] + fates["survived"]
    share = killed / max(1, judged_ones)
    print(f"{killed} of {judged_ones} killed: {share:.0%}; {fates['undecided']} undecided")
    return 0


def copy_tree(tree: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)


# Which tokens.


def drawn(count: int, seed: int, rooms: Sequence[str] | None = None) -> list[Mutation]:
    """Return so many mutations of these rooms, in equal shares of what could be drawn."""
    files = [path for path in FILES if rooms is None or room_of(path) in rooms]
    every = sorted(mutation for path in files for mutation in mutations_of(path))
    return random.Random(seed).sample(every, min(count, len(every)))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def mutations_of(path: Path) -> Iterator[Mutation]:
    text = path.read_text(encoding="utf-8")
    file, lines = str(path.relative_to(ROOT)), text.splitlines()
    for node in _computing(ast.parse(text)):
        for line, start, end, new in _changes(node, lines):
            if lines[line - 1].isascii():  # columns are bytes
                yield Mutation(file, line, start, end, new)


def _computing(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is computed: no annotation, no decorator, no text."""
    skipped = {"annotation", "returns", "decorator_list"}
    if isinstance(node, ast.JoinedStr):  # Python 3.11 has no columns in it
        return
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in skipped:
                yield from _computing(child)


def _changes(node: ast.AST, lines: Sequence[str]) -> Iterator[tuple[int, int, int, str]]:
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
            yield from _between(left, right, op, lines)
    elif isinstance(node, ast.BinOp):
        yield from _between(node.left, node.right, node.op, lines)
    elif isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from _between(left, right, node.op, lines)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.lineno, node.col_offset, node.col_offset + len("not "), ""
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        new = str(not node.value) if isinstance(node.value, bool) else f"({node.value!r} + 1)"
        if node.end_col_offset is not None:
            yield node.lineno, node.col_offset, node.end_col_offset, new
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
        name = node.func
        yield name.lineno, name.col_offset, name.col_offset + len(name.id), NAMES[name.id]
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        if node.value.end_lineno == node.lineno and node.value.end_col_offset is not None:
            yield node.lineno, node.value.col_offset, node.value.end_col_offset, "None"


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _between(
    left: ast.expr, right: ast.expr, op: ast.AST, lines: Sequence[str]
) -> Iterator[tuple[int, int, int, str]]:
    """Find the operator between two operands, if all three are on one line."""
    old, new = CHANGES.get(type(op), ("", ""))
    if old and left.end_lineno == right.lineno and left.end_col_offset is not None:
        first = left.end_col_offset
        found = lines[right.lineno - 1][first : right.col_offset].find(old)
        if found >= 0:
            yield right.lineno, first + found, first + found + len(old), new


# Which tests, and what they say.


def nearest_tests(file: str) -> list[str]:
    """Return the test files that import the module, themselves or over helpers of tests/; where
    there are few also those of the modules that import it. First come those that are named after
    it, then those that import least, as they are about it most."""
    module = module_of(ROOT / file)
    tests = {path: _with_helpers(path) for path in sorted((ROOT / "tests").glob("test_*.py"))}
    seen, level, found = {module}, {module}, list[str]()
    while level and len(found) < FEW:
        reached = [
            (path.stem.removeprefix("test_") not in module.split("."), len(mods), path.name)
            for path, mods in tests.items()
            if level & mods and f"tests/{path.name}" not in found
        ]
        found += [f"tests/{name}" for *_, name in sorted(reached)]
        level = {name for name, path in MODULES.items() if own_imports(path) & level} - seen
        seen |= level
    return found


def _with_helpers(path: Path) -> set[str]:
    """Return the modules of the package that a test file imports, and those of its helpers."""
    seen, todo, reached = set[Path](), [path], set[str]()
    while todo:
        one = todo.pop()
        if one not in seen:
            seen.add(one)
            reached |= own_imports(one)
            names = {name.split(".")[1] for name in imports(one) if name.startswith("tests.")}
            todo += [ROOT / "tests" / f"{name}.py" for name in names]
    return reached


def judged(mutation: Mutation, text: str, tree: Path, limit_s: float) -> tuple[str, str]:
    """Return whether it is killed, and by what."""
    nearest = nearest_tests(mutation.file)
    stages = [
        ("not slow", nearest[:12]), ("not slow", [GOLDEN]), ("slow", nearest[:6]),
        ("not slow", nearest[12:30]),
    ]  # fmt: skip
    target = tree / mutation.file
    until_s = time.monotonic() + limit_s
    for marks, files in stages:
        while files:
            left_s = max(1.0, until_s - time.monotonic())
            target.write_text(mutation.applied(text), encoding="utf-8")
            failed, said = _tested(tree, files, marks, left_s)
            target.write_text(text, encoding="utf-8")
            if failed is None:
                return "undecided", f"after {limit_s:.0f} s"
            if not failed:
                break
            if not said or not _tested(tree, [said], marks, limit_s)[0]:
                return "killed", f"by {said or 'an import'}"
            _FAIL_ANYWAY.append(said)
    return "survived", f"({len(nearest)} test files)"


_FAIL_ANYWAY: list[str] = []
"""Tests that fail in the copy without any change, such as those that need a git history."""


def _tested(
    tree: Path, files: Sequence[str], marks: str, limit_s: float
) -> tuple[bool | None, str]:
    """Run pytest in a child that has the copy's modules and no other; return whether a test failed
    and which; None where the time was over."""
    log = tree / "pytest.log"
    child = os.fork()
    if not child:
        _run_pytest(tree, files, marks, log)
    until_s = time.monotonic() + limit_s
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            found = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", log.read_text(), re.M)
            if code not in (0, 1, 2, 5):  # 2: a file could not be imported; 5: no such test
                raise RuntimeError(f"pytest ended with {code}: {log.read_text()[-2000:]}")
            return code in (1, 2), found[0] if found else ""
        if time.monotonic() > until_s:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None, ""
        time.sleep(0.05)


def _run_pytest(tree: Path, files: Sequence[str], marks: str, log: Path) -> None:
    os.setsid()
    output = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "xcloud")]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    import pytest

    words = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--tb=no"]
    words += [word for name in _FAIL_ANYWAY for word in ("--deselect", name)]
    code = 3
    try:
        code = int(pytest.main([*words, "-m", f"{marks} and not nightly and not gpu", *files]))
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
