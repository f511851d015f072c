"""A run of real processes that loses a cloud and gets it back."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs import no_workers, read, start, wait_for
from tests.toy import toy_config
from xcloud.launch import processes as launch
from xcloud.record.checkpoint_files import CheckpointFolder
from xcloud.record.events import EVENTS_FILE

LONG = {"_target_": "tests.toy.ToyModel", "step_s": 0.03}
ELASTIC = (
    "strategy=local_updates", "strategy.averaging.every=5", "+strategy/averaging/late=go_on",
    "strategy.averaging.late.wait_s=20", "strategy.averaging.late.restart_s=0", "compression=int4",
    "training.max_steps=60",
)  # fmt: skip


def killing(
    monkeypatch: pytest.MonkeyPatch, victim: str, when: Callable[[], bool]
) -> list[tuple[str, Any]]:
    """Kills a rank once. Returns all ranks that are started, which grows."""
    started: list[tuple[str, Any]] = []
    real = launch.start_process

    def recording(command: list[str], environment: dict[str, str], log: Path) -> Any:
        process = real(command, environment, log)
        started.append((environment["LOCAL_RANK"], process))
        return process

    monkeypatch.setattr(launch, "start_process", recording)

    def kill() -> None:
        wait_for(when)
        (pid,) = (process.pid for rank, process in started if rank == victim)
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    return started


@pytest.mark.slow
@pytest.mark.nightly
def test_a_cloud_is_killed_and_comes_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other one makes all of its steps, merges alone meanwhile and takes it in again."""
    started = killing(monkeypatch, "1", lambda: '"event":"merge"' in read(tmp_path / EVENTS_FILE))
    config = toy_config("two_clouds", list(ELASTIC))
    config["model"] = LONG
    summary = start(tmp_path, config)

    assert [rank for rank, _ in started] == ["0", "1", "1"]
    merges = summary["merges"]
    assert merges["whole"] + merges["partial"] == 12 and merges["partial"] >= 1
    assert (merges["clouds_lost"], merges["clouds_back"]) == (1, 1)
    assert summary["num_steps"] == 60 and summary["final_loss"] < 1.5
    assert summary["compression_ratio"]["averaging"] > 1.5
    assert "cloud cloud_b is back" in read(tmp_path / EVENTS_FILE)
    assert no_workers(tmp_path)


@pytest.mark.slow
@pytest.mark.nightly
def test_the_loss_of_the_first_cloud_costs_what_it_did_since_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its two ranks save for all; the other cloud begins again with what they merged."""
    folder = CheckpointFolder(tmp_path)
    started = killing(monkeypatch, "0", lambda: bool(folder.agreed_steps()))
    checkpoints = ["training.checkpoint.every_steps=8", "launch.max_restarts=1"]
    config = toy_config("two_clouds", [*ELASTIC, *checkpoints, "training.max_steps=40"])
    config["cluster"]["clouds"]["cloud_a"]["num_ranks"] = 2  # type: ignore[index]
    summary = start(tmp_path, config | {"model": LONG})

    assert [rank for rank, _ in started] == ["0", "1", "2"] * 2
    assert summary["num_steps"] == 40 and summary["num_resumes"] == 1
    assert summary["num_steps_done_twice"] <= 40 - 8
    assert summary["merges"]["whole"] == 8 and summary["merges"]["clouds_lost"] == 0
    assert folder.agreed_steps() == [40] and folder.ranks(40) == [0, 1]
    assert summary["final_loss"] < 1.5 and no_workers(tmp_path)
