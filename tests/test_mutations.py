"""benchmarks/mutations.py: which tokens it changes, and which tests it takes for them."""

from pathlib import Path

import pytest

from benchmarks import mutations
from benchmarks.mutations import ROOT, drawn, mutations_of, nearest_tests

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


def test_mutations_are_drawn_by_seed_and_room_and_can_be_compiled() -> None:
    chosen = drawn(40, 3, ["comm", "net"])
    assert chosen == drawn(40, 3, ["comm", "net"]) != drawn(40, 4, ["comm", "net"])
    assert {mutation.file.split("/")[1] for mutation in chosen} == {"comm", "net"}
    for mutation in chosen:
        text = (ROOT / mutation.file).read_text(encoding="utf-8")
        changed = mutation.applied(text)
        assert changed != text and len(changed.splitlines()) == len(text.splitlines())
        compile(changed, mutation.file, "exec")


def test_the_nearest_tests_come_first() -> None:
    assert nearest_tests("xcloud/comm/ids.py")[0] == "tests/test_id_packing.py"
    assert "tests/test_pipeline.py" in nearest_tests("xcloud/pipeline/pipeline.py")[:2]
    assert len(nearest_tests("xcloud/job/needs.py")) >= mutations.FEW, "over those that import it"
