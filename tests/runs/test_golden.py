"""The golden table (golden.py) on any machine: bytes exactly, losses as processors agree."""

import json
from pathlib import Path

import pytest

from tests.golden import RESUMED, jobs, measured

KEPT = json.loads((Path(__file__).parents[1] / "golden.json").read_text())


@pytest.mark.parametrize("name", jobs())
def test_a_run_comes_to_the_losses_and_bytes_of_the_golden_table(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = measured(tmp_path, monkeypatch, [name])

    assert len(table) == 1 + (name in RESUMED)
    for row, entry in table.items():
        assert entry["bytes"] == KEPT[row]["bytes"], row
        assert '"resume"' not in (tmp_path / row / "events.jsonl").read_text(), "a fresh run"
        assert entry["losses"] == pytest.approx(KEPT[row]["losses"], rel=1e-4), row


def test_the_golden_table_has_a_row_for_every_job_and_no_other() -> None:
    assert KEPT.keys() == {*jobs(), *(f"{name}, gone on" for name in RESUMED)}
