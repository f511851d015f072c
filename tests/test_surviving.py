"""Whole runs of real processes that are interrupted and go on: the same weights in the end."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.runs import (
    command,
    in_threads,
    losses,
    no_workers,
    rank_pid,
    wait_for,
    weights,
)
from tests.toy import toy_config
from xcloud.record.checkpoint_files import CheckpointFolder

pytestmark = pytest.mark.slow


def config() -> dict[str, object]:
    made = toy_config(
        "two_clouds",
        ["training.max_steps=40", "training.checkpoint.every_steps=5", "compression=delta_int4"],
    )
    made["model"] |= {"step_s": 0.01}  # type: ignore[operator]
    return made


@pytest.mark.nightly
def test_a_run_whose_rank_and_then_launcher_is_killed_ends_as_if_they_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher starts the ranks again; after its own end the run is gone on with by hand."""
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    in_threads(whole, config(), monkeypatch)
    run_dir.mkdir()
    (run_dir / "experiment.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config())))
    (run_dir / "events.jsonl").touch()  # of an attempt that told nothing
    folder = CheckpointFolder(run_dir)

    def agreed(step: int) -> bool:
        return any(found >= step for found in folder.agreed_steps())

    log = tmp_path / "log"
    first = command("run.py", f"resume={run_dir}", "resume_anew=true", log=log)
    wait_for(lambda: agreed(5))
    os.kill(rank_pid(run_dir, 1), signal.SIGKILL)
    wait_for(lambda: agreed(15))
    first.kill()
    first.wait()
    assert "restart 1 of at most 3" in log.read_text()
    wait_for(lambda: no_workers(run_dir), 60)
    assert (run_dir / "rendezvous").exists()  # nobody was left to remove it

    second = command("run.py", f"resume={run_dir}", log=log)
    assert second.wait(180) == 0, log.read_text()
    ours, theirs = weights(run_dir), weights(whole)
    assert ours.keys() == theirs.keys() and ours
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert losses(run_dir) == losses(whole)
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    assert summary["num_resumes"] == 3 and summary["num_steps"] == 40  # first from step 0
    assert 0 < summary["goodput"] < 1
    assert folder.agreed_steps() == [40]
