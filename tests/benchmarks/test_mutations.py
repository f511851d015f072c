"""benchmarks/mutations.py: which tokens it changes, and which tests it takes for them."""

import faulthandler
import shutil
from pathlib import Path

import pytest

from benchmarks import mutations
from benchmarks.mutations import (
    ROOT,
    Mutation,
    drawn,
    judged,
    mutations_of,
    run_all_tests,
)

CODE = '''
"""Says 1 + 1."""
def f(a: int | None = 0, *b: float) -> bool:
    if a < 3 and not b:
        return a + 1 == min(b)
    return f"{a + 1}"
'''


def test_what_is_computed_is_changed_and_annotations_and_texts_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "f.py"
    file.write_text(CODE)
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    found = {m.describe(CODE).split("  ")[1] for m in mutations_of(file)}

    assert found == {
        "'0' -> '(0 + 1)'", "'<' -> '<='", "'3' -> '(3 + 1)'", "'and' -> 'or'", "'not ' -> ''",
        "'+' -> '-'", "'1' -> '(1 + 1)'", "'==' -> '!='", "'min' -> 'max'",
        "'a + 1 == min(b)' -> 'None'", "'f\"{a + 1}\"' -> 'None'",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.nightly
def test_mutations_are_drawn_by_seed_and_room_and_can_be_compiled() -> None:
    chosen = drawn(40, 3, ["comm", "net"])
    assert chosen == drawn(40, 3, ["comm", "net"]) != drawn(40, 4, ["comm", "net"])
    assert {mutation.file.split("/")[1] for mutation in chosen} == {"comm", "net"}
    for mutation in chosen:
        text = (ROOT / mutation.file).read_text(encoding="utf-8")
        changed = mutation.applied(text)
        assert changed != text and len(changed.splitlines()) == len(text.splitlines())
        compile(changed, mutation.file, "exec")


SUMS = """import dataclasses

def add(a, b):
    print("a line of its own")
    return a + b

@dataclasses.dataclass
class One:
    one: int = 1
"""
TESTS = """
import subprocess
import sys
import time
import pytest
import sums

@pytest.fixture(scope="module")
def three():
    return sums.add(1, 2)

def test_slowly():
    time.sleep(0.5)
    assert sums.add(1, 1) == 2

def test_quickly():
    assert sums.add(0, 1) == 1

def test_of_a_fixture(three):
    assert three == 3

def test_of_the_same_fixture(three):
    assert three > 2

def test_in_a_process():
    subprocess.run([sys.executable, "-c", "import sums; assert sums.add(2, 2) == 4"], check=True)

def test_that_fails():
    assert sums.add(1, 1) == 3
"""

FURTHER_TESTS = """
import sums

def test_of_nothing():
    pass

def test_of_a_class():
    assert sums.One().one == 1
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_mutation_gets_the_tests_that_run_its_line_and_the_quickest_first(
    tmp_path: Path,
) -> None:
    # A fork would wait for this thread, which it does not have.
    faulthandler.cancel_dump_traceback_later()
    for name in ("benchmarks/__init__.py", "benchmarks/line_recorder.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "sums.py").write_text(SUMS)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_sums.py").write_text(TESTS)
    (tmp_path / "tests/test_class.py").write_text(FURTHER_TESTS)
    tests = run_all_tests(tmp_path, "not gpu", [("sums.py", 5), ("sums.py", 0)])

    def quickest(line: int, limit_s: float = 60.0) -> tuple[set[str], int]:
        chosen, number = tests.quickest([("sums.py", line)], limit_s)
        return {test.partition("::test_")[2] for test in chosen}, number

    own = {"quickly", "of_a_fixture", "of_the_same_fixture"}
    assert quickest(5) == (own | {"slowly", "in_a_process"}, 5), "and not the one that fails"
    assert "quickly" in quickest(5, limit_s=0.5)[0] and "slowly" not in quickest(5, limit_s=0.5)[0]
    assert quickest(0) == (own | {"slowly", "in_a_process", "of_a_class"}, 6)

    swapped = Mutation("sums.py", line=5, start=13, end=14, new="-")
    assert swapped.applied(SUMS).splitlines()[4] == "    return a - b"
    killed, by = judged(swapped, SUMS, tmp_path, tests=tests, limit_s=60)
    assert killed and by.startswith("by tests/test_sums.py::test_")
    same = Mutation("sums.py", line=5, start=4, end=10, new="return")
    assert judged(same, SUMS, tmp_path, tests=tests, limit_s=60)[0] is False
