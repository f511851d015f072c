"""What the rank that scores writes down of single samples."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from xcloud.contracts.model import Scores
from xcloud.rank.task_data import write_scores

SCORES = Scores({"bleu": 50.0}, {}, {4: {"prediction": "Él duerme.", "bleu": 50.0, "counts": [2]}})


@pytest.mark.parametrize("shows_text", [True, False])
def test_a_text_that_may_not_leave_its_cloud_is_written_as_a_digest(
    shows_text: bool, tmp_path: Path
) -> None:
    write_scores(tmp_path / "scores.jsonl", SCORES, shows_text)

    (line,) = (tmp_path / "scores.jsonl").read_text("utf-8").splitlines()
    digest = hashlib.sha256("Él duerme.".encode()).hexdigest()
    text = {"prediction": "Él duerme."} if shows_text else {"prediction_sha256": digest}
    assert json.loads(line) == {"id": 4, **text, "bleu": 50.0, "counts": [2]}
