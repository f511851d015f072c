"""Whole runs, of real processes or of threads: start one, wait for it, read what it left."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file

from tests import warm_ranks
from tests.combinations import run as run_ranks
from tests.warm_ranks import Child
from xcloud.job.config import Settings
from xcloud.launch.local import run
from xcloud.pipeline.pipeline import Pipeline
from xcloud.planner import trial
from xcloud.record.events import EVENTS_FILE
from xcloud.record.files import rank_file
from xcloud.show.monitor import Monitor
from xcloud.train import building

ROOT = Path(__file__).parents[2]


def cloud(num_ranks: int, stages: list[int] | None = None) -> dict[str, object]:
    return {"_target_": "xcloud.layout.Cloud", "num_ranks": num_ranks, "stages": stages}


def layout(**clouds: dict[str, object]) -> dict[str, object]:
    return {"_target_": "xcloud.layout.ClusterLayout", "clouds": clouds, "wan": "free"}


def start(run_dir: Path, config: dict[str, object]) -> dict[str, Any]:
    summary = run(Settings.of(config), run_dir)
    assert "refused_reports" not in summary, read(run_dir / EVENTS_FILE)
    return summary


def in_threads(
    run_dir: Path, config: dict[str, object] | DictConfig, patch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """As `start`, with the ranks in threads of this process, over links in memory."""
    for of, name in ((Pipeline, "_forward"), (building, "build_stage")):
        patch.setattr(of, name, one_at_a_time(getattr(of, name)))
    job = Settings.of(config).job
    monitor = Monitor(Settings(job, {}), run_dir)
    run_ranks(job, run_dir, patch)
    summary = monitor.finish(None)
    assert "refused_reports" not in summary, read(run_dir / EVENTS_FILE)
    return summary


def trials_in_threads(patch: pytest.MonkeyPatch) -> list[Any]:
    """Have trials run with their ranks in threads, over links in memory. Return the list that
    their jobs are added to."""
    made: list[Any] = []

    def run_trial(settings: Settings, run_dir: Path, more_follows: bool) -> None:
        made.append(settings.job)
        run_ranks(settings.job, run_dir, patch)

    patch.setattr(trial, "run", run_trial)
    return made


_DRAWING = threading.RLock()


def one_at_a_time(call: Callable[..., Any]) -> Callable[..., Any]:
    """torch's random generator is one for all threads."""

    @functools.wraps(call)
    def alone(*arguments: Any, **more: Any) -> Any:
        with _DRAWING:
            return call(*arguments, **more)

    return alone


def command(*words: str, log: Path, **more: str) -> Child | subprocess.Popen[bytes]:
    """`python WORDS` in the project's folder, with its output in `log`; started warm where that
    can be. more: of its environment."""
    if sys.platform == "linux":
        return warm_ranks.command(*words, log=log, **more)
    with open(log, "w") as file:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **more}
        return subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment, stdout=file, stderr=file
        )


def started(run_dir: Path, config: dict[str, Any]) -> Child | subprocess.Popen[bytes]:
    """As `start`, in a process of its own that runs beside the test."""
    OmegaConf.save(OmegaConf.create(config), run_dir / "config.yaml")
    script = (
        "import sys; from pathlib import Path; from xcloud.job.config import Settings;"
        "from xcloud.launch.local import run; folder = Path(sys.argv[1]);"
        "run(Settings.load(folder / 'config.yaml'), folder)"
    )
    return command("-c", script, str(run_dir), log=run_dir / "log")


def completed(*words: str, log: Path) -> subprocess.CompletedProcess[str]:
    """A command from start to end. Its stdout and stderr are one text, given as both."""
    code = command(*words, log=log).wait(200)
    said = log.read_text()
    return subprocess.CompletedProcess(words, code, said, said)


def losses(run_dir: Path) -> list[float]:
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    found = {e["step"]: e["loss"] for e in events if e["event"] == "step" and "loss" in e}
    return [found[step] for step in sorted(found)]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return {
        f"{path.stem}.{name}": value
        for path in (run_dir / "model").glob("*.safetensors")
        for name, value in load_file(path).items()
    }


def no_workers(run_dir: Path) -> bool:
    """No process of this run is left: none writes a log into its folder."""
    return not any(_writes_into(process, run_dir) for process in psutil.process_iter())


def _writes_into(process: psutil.Process, run_dir: Path) -> bool:
    try:
        logs = [Path(file.path) for file in process.open_files() if file.path.endswith("log")]
    except psutil.Error:  # it has ended, or is another user's
        return False
    return process.pid != os.getpid() and any(run_dir.resolve() in log.parents for log in logs)


def rank_pid(run_dir: Path, rank: int) -> int:
    return int(json.loads(rank_file(run_dir, rank, "state.json").read_text())["pid"])


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wait_for(condition: Callable[[], bool], seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
