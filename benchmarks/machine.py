"""On which machine and commit a benchmark ran, to stand beside its figures."""

from __future__ import annotations

import os

import torch

from xcloud.base.project import commit
from xcloud.planner.trial import processor


def ran_on() -> dict[str, str]:
    cores = f"{len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads"
    return {
        "machine": f"{processor()}, {cores}", "commit": commit(), "torch": torch.__version__,
    }  # fmt: skip


def say_where() -> None:
    print(", ".join(f"{name} {value}" for name, value in ran_on().items()), flush=True)
