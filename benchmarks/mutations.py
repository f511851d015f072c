"""Do the tests see a wrong token? Changes one at a time in a copy of the tree, and runs the tests
that run its line.

    python -m benchmarks.mutations [--count 24] [--seed 1] [--rooms comm plan ...] [--limit-s 60]

A mutation turns a comparison, a sum, a condition, a constant, a returned value or a min into a
neighbour of it (CHANGES). As many are drawn from each room as its share of all that could be.
One pass over the fast tests records which of them run a drawn line and how long each takes. Then
each mutation gets its tests, the quickest first, until one fails; those that survive are given the
slow tests in the same way. A mutation is killed if a test fails or does not end. A survivor is a
line that no test sees, or one where both tokens mean the same. A line that is only run by an
import, such as a default, is given the tests that call a function of its module or of one that
imports it.

One process at a time. Linux: each turn is forked from a process that has imported torch.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from benchmarks import line_recorder
from tests.import_walk import FILES, PACKAGE, module_of, own_imports

ROOT = PACKAGE.parent
COPIED = ("xcloud", "tests", "conf", "benchmarks", "experiments", "docs", "records", "run.py",
          "claims.toml", "pyproject.toml", "README.md", "constraints.txt")  # fmt: skip
QUIETLY = ("-q", "-n", "0", "-p", "no:cacheprovider", "--tb=no")
TIERS = ("not slow and not gpu", "slow and not nightly and not gpu")
TEST_TIMEOUT_S = 60
NO_END_S = 600
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
    parser.add_argument("--limit-s", type=float, default=60.0, help="of the tests of a mutation")
    given = parser.parse_args()
    for name in IMPORTED_FIRST:
        __import__(name)
    mutations = drawn(given.count, given.seed, given.rooms)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve()
        copy_tree(tree)
        for tier in TIERS:
            mutations = judge_all(mutations, tree, tier, limit_s=given.limit_s)
    print(f"{given.count - len(mutations)} of {given.count} killed")
    return 0


def judge_all(
    mutations: Sequence[Mutation], tree: Path, tier: str, *, limit_s: float
) -> list[Mutation]:
    """Judge mutations by the tests with these marks, print each, and return the survivors."""
    texts = {m.file: (tree / m.file).read_text(encoding="utf-8") for m in mutations}
    targets = set[tuple[str, int]]().union(*(targets_of(m, texts[m.file]) for m in mutations))
    started_s = time.monotonic()
    tests = run_all_tests(tree, tier, targets)
    took_s = time.monotonic() - started_s
    print(f"{len(tests.seconds)} tests ({tier}) pass in {took_s:.0f} s", flush=True)
    survivors = list[Mutation]()
    for mutation in mutations:
        started_s = time.monotonic()
        killed, by = judged(mutation, texts[mutation.file], tree, tests=tests, limit_s=limit_s)
        if not killed:
            survivors.append(mutation)
        fate = "killed" if killed else "survived"
        took_s = time.monotonic() - started_s
        print(
            f"{fate:9}{took_s:4.0f} s  {mutation.describe(texts[mutation.file])}  {by}", flush=True
        )
    return survivors


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


def targets_of(mutation: Mutation, text: str) -> set[tuple[str, int]]:
    """Return the lines of which a test is to run one: file and number, 0 for any call in it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.body[0].lineno <= mutation.line <= (node.body[-1].end_lineno or 0):
                return {(mutation.file, mutation.line)}
    module = module_of(ROOT / mutation.file)
    users = [path for path in FILES if module in own_imports(path)]
    return {(str(path.relative_to(ROOT)), 0) for path in [ROOT / mutation.file, *users]}


@dataclass
class TestPass:
    """What one pass over the tests shows: seconds of each that passed, and who runs which line."""

    __test__ = False

    seconds: dict[str, float]
    reaching: dict[tuple[str, int], set[str]]

    def quickest(
        self, targets: Iterable[tuple[str, int]], limit_s: float
    ) -> tuple[list[str], int]:
        """Return tests that run one of these lines, so many as take `limit_s` in all, and how many
        there are."""
        reaching = set[str]().union(*(self.reaching.get(target, ()) for target in targets))
        tests = sorted(reaching & self.seconds.keys(), key=lambda test: (self.seconds[test], test))
        until_s = accumulate(self.seconds[test] for test in tests)
        return [test for test, s in zip(tests, until_s, strict=True) if s < limit_s], len(tests)


def run_all_tests(tree: Path, tier: str, targets: Iterable[tuple[str, int]]) -> TestPass:
    """Run the tests with these marks in the copy, and record in every process who runs which of
    these lines."""
    lines: dict[str, list[int]] = {}
    for file, line in targets:
        lines.setdefault(str(tree / file), []).append(line)
    wanted = tree / "lines.json"
    wanted.write_text(json.dumps(lines), encoding="utf-8")
    hook = tree / "sitecustomize.py"
    hook.write_text("from benchmarks import line_recorder\n\nline_recorder.start()\n")
    environment = {"PYTHONPATH": str(tree), line_recorder.LINES: str(wanted)}
    with (tree / "pytest.log").open("w") as log:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                *QUIETLY,
                "-m",
                tier,
                "-p",
                line_recorder.__name__,
                "tests",
            ],
            cwd=tree,
            env=os.environ | environment,
            stdout=log,
            stderr=log,
        )
    hook.unlink()
    rows = line_recorder.output_of(wanted).read_text(encoding="utf-8").splitlines()
    return read_pass([json.loads(row) for row in rows], tree)


def read_pass(rows: Iterable[Sequence[Any]], tree: Path) -> TestPass:
    """Read the rows of the recorders."""
    seconds = Counter[str]()
    failed = set[str]()
    reaching: dict[tuple[str, int], set[str]] = {}
    tests_of_file: dict[str, set[str]] = {}
    fixtures: list[tuple[tuple[str, int], str]] = []
    for test, kind, *values in rows:
        if kind == "took":
            seconds[test] += values[0]
            tests_of_file.setdefault(test.partition("::")[0], set()).add(test)
        elif kind == "failed":
            failed.add(test)
        else:
            name, _, phase = test.rpartition(" ")
            target = (str(Path(values[0]).relative_to(tree)), values[1])
            reaching.setdefault(target, set()).add(name)
            if phase == "(setup)":
                fixtures.append((target, name.partition("::")[0]))
    for target, file in fixtures:  # a module's fixture is set up by the first of its tests only
        reaching[target] |= tests_of_file.get(file, set())
    return TestPass({test: seconds[test] for test in seconds if test not in failed}, reaching)


def judged(
    mutation: Mutation, text: str, tree: Path, tests: TestPass, limit_s: float
) -> tuple[bool, str]:
    """Return whether it is killed, and by what."""
    chosen, num_reaching = tests.quickest(targets_of(mutation, text), limit_s)
    left = chosen
    while left:
        target = tree / mutation.file
        target.write_text(mutation.applied(text), encoding="utf-8")
        failed = first_failure(tree, left)
        target.write_text(text, encoding="utf-8")
        if failed is None:
            break
        if failed not in left or first_failure(tree, [failed]) is None:
            return True, f"by {failed}"
        left = left[left.index(failed) + 1 :]  # it fails without the change too
    return False, f"({len(chosen)} of {num_reaching} tests that reach it)"


def first_failure(tree: Path, tests: Sequence[str]) -> str | None:
    """Run these tests in this order in a child that has the copy's modules and no other, and
    return the first that fails; where none can be named, how pytest ended."""
    failures = tree / "failures.txt"
    failures.write_text("")
    child = os.fork()
    if not child:
        _run_pytest(tree, tests, failures)
    until_s = time.monotonic() + NO_END_S
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return (
                (failures.read_text().splitlines() or [f"pytest's code {code}"])[0]
                if code
                else None
            )
        if time.monotonic() > until_s:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"no end within {NO_END_S} s"
        time.sleep(0.05)


class ChosenTests:
    """A plugin of pytest: keeps some tests, in this order, and writes down which fail."""

    def __init__(self, tests: Sequence[str], failures: Path) -> None:
        self.ranks = {test: rank for rank, test in enumerate(tests)}
        self.failures = failures

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self.ranks]
        items.sort(key=lambda item: self.ranks[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self.failures.open("a") as output:
                output.write(f"{report.nodeid}\n")


def _run_pytest(tree: Path, tests: Sequence[str], failures: Path) -> None:
    os.setsid()
    output = os.open(tree / "pytest.log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "xcloud")]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    words = [*QUIETLY, "-x", "-m", "", f"--timeout={TEST_TIMEOUT_S}", *files]
    code = 3
    try:
        code = int(pytest.main(words, plugins=[ChosenTests(tests, failures)]))
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
