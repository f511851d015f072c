"""A task and a model for real runs in which only the framework works: stages sleep as long as they
would compute. Each rank says at the end of its training, as a line of JSON in its log, what it
took (`Usage`).
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.emulator_rank import HIDDEN, LENGTH, SleepingLayers
from tests.toy import LENGTH as TOY_LENGTH
from tests.toy import ToyModel
from xcloud.comm.channel import Boundary, BoundaryField, Message
from xcloud.contracts.model import Batch, BuildContext, Stage, StageOutput

SAMPLE_BYTES = 4 * LENGTH * HIDDEN  # of a message, and of what a stage keeps for its backward
STAGE_BYTES = 4 * (HIDDEN * HIDDEN + 2 * HIDDEN)  # of a stage's weights


class Usage(NamedTuple):
    """Of one rank. begin_s, cpu_s: at the beginning of each forward, the moment and the seconds of
    processor that the process, all of its threads, had taken. num_threads, num_sockets: open at
    the end of training."""

    stage: int
    begin_s: Sequence[float]
    cpu_s: Sequence[float]
    num_threads: int
    num_sockets: int

    def step_s(self, forwards: int, warm_up: int) -> float:
        """Median time from one step to the next. forwards: of this rank in a step."""
        return _median_of_steps(self.begin_s, forwards, warm_up)

    def cpu_of_step_s(self, forwards: int, warm_up: int) -> float:
        return _median_of_steps(self.cpu_s, forwards, warm_up)


def _median_of_steps(counter: Sequence[float], forwards: int, warm_up: int) -> float:
    starts = counter[::forwards][warm_up:]
    return statistics.median(b - a for a, b in pairwise(starts))


def read_usage(run_dir: Path, rank: int) -> Usage:
    """What the rank's first stage said."""
    for line in (run_dir / f"rank{rank}.log").read_text().splitlines():
        if line.startswith('{"stage"'):
            return Usage(**json.loads(line))
    raise RuntimeError(f"rank {rank} of {run_dir} did not say what it took")


@dataclass(frozen=True)
class SleepingModel(ToyModel):
    """sample_s: of a forward of a sample; a backward takes twice that, half of it for weights."""

    sample_s: float = 5e-3

    def describe(self) -> str:
        return "stages that sleep"

    def boundary(self, stage: int, num_stages: int, max_length: int) -> Boundary:
        return Boundary((BoundaryField("hidden", (LENGTH, HIDDEN), torch.float32),), 1)

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        return SleepingStage(self.sample_s, stage, stage == num_stages - 1)


class SleepingStage(Stage):
    def __init__(self, sample_s: float, stage: int, is_last: bool) -> None:
        super().__init__()
        self._stage, self._is_last = stage, is_last
        self.layers = SleepingLayers(sample_s)
        self._begin_s: list[float] = []
        self._cpu_s: list[float] = []

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        self._begin_s.append(time.monotonic())
        self._cpu_s.append(time.process_time())
        rows = torch.ones(len(batch["ids"]), LENGTH, HIDDEN)
        found = self.layers(rows if received is None else received["hidden"])
        if self._is_last:
            return StageOutput(loss=(0.5 * found).sum())  # a gradient of full size
        return StageOutput(send={"hidden": found})

    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        return [[0] * TOY_LENGTH for _ in batch["ids"]]

    def exported(self) -> dict[str, torch.Tensor]:
        """Every rank comes here once, after its training."""
        files = [os.readlink(file) for file in _open_files()]
        usage = Usage(
            self._stage, self._begin_s, self._cpu_s, threading.active_count(),
            sum(name.startswith("socket:") for name in files),
        )  # fmt: skip
        print(json.dumps(usage._asdict()), flush=True)
        return self.state_dict()


def _open_files() -> list[Path]:
    return [file for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
