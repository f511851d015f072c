"""A run of real processes that loses a cloud and gets it back."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.runs import no_workers, read, start, wait_for
from tests.toy import toy_config
from xcloud.run import launch

ELASTIC = (
    "strategy=local_updates", "strategy.averaging.every=5", "strategy.averaging.leave=go_on",
    "strategy.averaging.wait_s=20", "strategy.averaging.restart_s=0", "compression=int4",
    "training.max_steps=60",
)  # fmt: skip


@pytest.mark.slow
def test_a_cloud_is_killed_and_comes_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other one makes all of its steps, merges alone meanwhile and takes it in again."""
    started: list[tuple[str, Any]] = []
    real = launch.start_process

    def recording(command: list[str], environment: dict[str, str], log: Path) -> Any:
        process = real(command, environment, log)
        started.append((environment["LOCAL_RANK"], process))
        return process

    monkeypatch.setattr(launch, "start_process", recording)

    def kill() -> None:
        wait_for(lambda: '"event":"merge"' in read(tmp_path / "events.jsonl"))
        (pid,) = (process.pid for rank, process in started if rank == "1")
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    config = toy_config("two_clouds", list(ELASTIC))
    config["model"] = {"_target_": "tests.toy.ToyModel", "step_s": 0.03}
    summary = start(tmp_path, config)
    killer.join()

    assert [rank for rank, _ in started] == ["0", "1", "1"]
    merges = summary["merges"]
    assert merges["whole"] + merges["partial"] == 12 and merges["partial"] >= 1
    assert (merges["clouds_lost"], merges["clouds_back"]) == (1, 1)
    assert summary["num_steps"] == 60 and summary["final_loss"] < 1.5
    assert summary["compression_ratio"]["averaging"] > 1.5
    assert "cloud cloud_b is back" in read(tmp_path / "events.jsonl")
    assert no_workers(tmp_path)
