"""Whole runs of real processes: start one, wait for it, read what it left."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from tests import warm_ranks
from xcloud.launch.local import run
from xcloud.record.events import EVENTS_FILE

ROOT = Path(__file__).parent.parent


def cloud(num_ranks: int, stages: list[int] | None = None) -> dict[str, object]:
    return {"_target_": "xcloud.cluster.layout.Cloud", "num_ranks": num_ranks, "stages": stages}


def layout(**clouds: dict[str, object]) -> dict[str, object]:
    return {"_target_": "xcloud.cluster.layout.ClusterLayout", "clouds": clouds, "wan": "free"}


def start(run_dir: Path, config: dict[str, object]) -> dict[str, Any]:
    summary = run(OmegaConf.create(config), run_dir)
    assert "refused_reports" not in summary, read(run_dir / EVENTS_FILE)
    return summary


def completed(words: list[str], log: Path) -> subprocess.CompletedProcess[str]:
    """`python run.py …` from start to end, started warm where that can be. Its stdout and stderr
    are one text, given as both."""
    if sys.platform != "linux":
        with open(log, "w") as file:
            code = subprocess.run(
                words, cwd=ROOT, stdout=file, stderr=file, timeout=200
            ).returncode
    else:
        code = warm_ranks.command(*words[1:], log=log).wait(200)
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
    listed = subprocess.run(["pgrep", "-f", str(run_dir)], capture_output=True, text=True)
    others = [pid for pid in listed.stdout.split() if pid != str(os.getpid())]
    return not others and not warm_ranks.alive(run_dir)


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
