"""A checkpoint of a one-way job is of one moment in all of its ranks."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.combinations import STEPS, interrupted, run, state
from tests.golden import one_way
from xcloud.features.checkpoints.saving import CheckpointWriter
from xcloud.features.one_way.layout import OneWayCloud, OneWayLayout


def test_a_batch_ordered_after_a_checkpoint_is_not_in_it_however_late_a_rank_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(own: Any, *rest: Any, of: Any = CheckpointWriter.copy) -> Any:
        time.sleep(0.3 if own.rank == 1 else 0.0)  # of the consumer
        return of(own, *rest)

    clouds = {"a": OneWayCloud(2), "b": OneWayCloud(1, 1.0), "c": OneWayCloud(1, 2.0)}
    job = replace(one_way("clouds"), cluster=OneWayLayout(clouds, "free"))
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "copy", copy)
        run(job, tmp_path / "first", monkeypatch)
    interrupted(tmp_path / "first", tmp_path / "second")
    run(job, tmp_path / "second", monkeypatch)

    first, second = (state(tmp_path / name, STEPS) for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert not [key for key in first if not torch.equal(first[key], second[key])]
