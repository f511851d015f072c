"""What the rank that scores writes down of single samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xcloud.contracts.model import Scores
from xcloud.rank.task_data import write_scores

SCORES = Scores({"bleu": 50.0}, {}, {4: {"prediction": "Él duerme.", "bleu": 50.0, "counts": [2]}})


@pytest.mark.parametrize("shows_text", [True, False])
def test_a_text_that_may_not_leave_its_cloud_is_not_written_beside_its_figures(
    shows_text: bool, tmp_path: Path
) -> None:
    write_scores(tmp_path / "scores.jsonl", SCORES, shows_text)

    (line,) = (tmp_path / "scores.jsonl").read_text("utf-8").splitlines()
    text = {"prediction": "Él duerme."} if shows_text else {}
    assert json.loads(line) == {"id": 4, **text, "bleu": 50.0, "counts": [2]}


def test_nothing_that_is_written_without_texts_tells_samples_of_one_label_from_others(
    tmp_path: Path,
) -> None:
    samples = {n: {"label": "ab"[n % 2], "prediction": "a", "loss": 1.5} for n in range(6)}
    write_scores(tmp_path / "scores.jsonl", Scores({}, {}, samples), shows_text=False)
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [line.pop("id") for line in lines] == list(range(6))
    assert all(line == lines[0] for line in lines)
