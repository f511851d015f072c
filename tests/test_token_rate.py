"""Tokens of a step are all that its ranks compute, each counted once, whoever computes it."""

from pathlib import Path

import pytest

from tests.runs import in_threads
from tests.toy import toy_config
from tests.toy_text import PAD, ToyTextTask, text_config
from xcloud.record.events import EVENTS_FILE, EventReader

FIELDS = frozenset({"text", "types", "label"})
NUM_SAMPLES = ToyTextTask().num_samples  # a whole epoch in eight updates of sixteen
LAYOUTS = {
    "one process": ("local", []),
    "two clouds": ("two_clouds", []),
    "two ranks a cloud": ("two_clouds_dp", []),
    "U-shape": ("u_shape", []),
    "replicas": ("two_clouds", ["strategy=data_parallel"]),
    "replicas apart": ("two_clouds", ["strategy=local_updates"]),
    "passes": ("two_clouds", ["training.accumulate_steps=2"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_of_an_epoch_is_counted_once(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, overrides = LAYOUTS[layout]
    in_threads(tmp_path, text_config(cluster, ["training.max_steps=8", *overrides]), monkeypatch)

    texts = ToyTextTask().load(FIELDS, 1).texts
    assert texts is not None
    steps = [event for event in EventReader(tmp_path / EVENTS_FILE) if event["event"] == "step"]
    assert sum(step["tokens"] for step in steps) == int((texts != PAD).sum())
    assert sum(step["samples"] for step in steps) == NUM_SAMPLES


def test_of_a_translation_both_sides_are_computed_and_the_target_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = in_threads(tmp_path, toy_config("two_clouds"), monkeypatch)

    steps = [event for event in EventReader(tmp_path / EVENTS_FILE) if event["event"] == "step"]
    by_rank = [sum(step["tokens"] for step in steps if step["rank"] == rank) for rank in (0, 1)]
    learned = sum(step["learned"] for step in steps)
    assert all(by_rank) and 0 < learned <= by_rank[1] < sum(by_rank)
    assert summary["tokens_per_s"] > summary["learned_tokens_per_s"] > 0
