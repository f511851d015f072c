"""A run of a benchmark, and on which machine and commit it ran, to stand beside its figures."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from xcloud.base.project import commit
from xcloud.job.config import Settings
from xcloud.launch.local import run
from xcloud.planner.trial import processor


def ran_on() -> dict[str, str]:
    cores = f"{len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads"
    return {
        "machine": f"{processor()}, {cores}", "commit": commit(), "torch": torch.__version__,
    }  # fmt: skip


def run_quietly(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Anew, in place of one there that was interrupted; what it says goes to run.log. Returns the
    summary. Raises SystemExit at Ctrl+C."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with open(folder / "run.log", "w") as said, contextlib.redirect_stdout(said):
            return run(Settings.of(config), folder)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def say_where() -> None:
    print(", ".join(f"{name} {value}" for name, value in ran_on().items()), flush=True)
