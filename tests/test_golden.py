"""The golden table (golden.py) on any machine: bytes exactly, losses as processors agree."""

import json
from pathlib import Path

import pytest

from tests.golden import jobs, measured

KEPT = json.loads((Path(__file__).parent / "golden.json").read_text())
SOME = ("pipeline", "tied ends, svd", "hybrid, svd, max norm", "clipped samples")


def check(names: tuple[str, ...], folder: Path, patch: pytest.MonkeyPatch) -> None:
    table = measured(folder, patch, names)
    for name, entry in table.items():
        assert entry["bytes"] == KEPT[name]["bytes"], name
        assert '"resume"' not in (folder / name / "events.jsonl").read_text(), "a fresh run"
        assert entry["losses"] == pytest.approx(KEPT[name]["losses"], rel=1e-4), name


def test_some_runs_come_to_the_losses_and_bytes_of_the_golden_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(SOME, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.nightly
def test_every_run_comes_to_the_losses_and_bytes_of_the_golden_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tuple(jobs()), tmp_path, monkeypatch)
    again = {name for name in KEPT if name.endswith(", gone on")}
    assert KEPT.keys() - again == jobs().keys()
