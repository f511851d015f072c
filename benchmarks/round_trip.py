"""Step time over the round trip of the line, by schedule: GPipe, 1F1B and two-buffered.

    python -m benchmarks.round_trip [--stages 2 4] [--rtt-ms 0 50 150 300]
        [--micro-batches 8] [--steps 12] [--json FILE]

Real runs, one rank a stage, over emulated lines of 100 Mbit/s. Stages sleep as long as they would
compute (64 samples of 5 ms forward and 10 ms backward: 0.96 s an update), so that four of them fit
two cores and a busy machine disturbs little. So it shows what the schedule leaves of the round
trip, not what codecs and computing take. Times are medians of the run's own step times. About
4 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.emulator_rank import HIDDEN, LENGTH
from benchmarks.machine import ran_on, say_where
from benchmarks.sleeping_job import Job
from benchmarks.sleeping_model import SleepingModel
from tests.toy import LENGTH as TOY_LENGTH
from xcloud.base.settings import as_settings
from xcloud.comm.channel import Message
from xcloud.contracts.model import Batch, BuildContext, Stage, StageOutput
from xcloud.features.two_buffered.schedule import TwoBuffered
from xcloud.job.config import Settings
from xcloud.launch.local import run
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward
from xcloud.pipeline.schedule import GPipe, Schedule

BATCH, SAMPLE_S = 64, 5e-3
COMPUTE_S = 3 * BATCH * SAMPLE_S


class Asleep(torch.autograd.Function):
    """An identity that takes as long as a layer would: twice as long backward as forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor) -> Tensor:
        time.sleep(SAMPLE_S * len(x))
        return x + shift

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        time.sleep(2 * SAMPLE_S * len(gradient))
        return gradient, gradient.sum(dim=(0, 1))


class AsleepStage(Stage):
    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self._is_last = is_last
        self.shift = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        rows = torch.ones(len(batch["ids"]), LENGTH, HIDDEN)
        found = Asleep.apply(rows if received is None else received["hidden"], self.shift)  # type: ignore[no-untyped-call]
        if self._is_last:
            return StageOutput(loss=(0.5 * found).sum())
        return StageOutput(send={"hidden": found})

    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        return [[0] * TOY_LENGTH for _ in batch["ids"]]


@dataclass(frozen=True)
class AsleepModel(SleepingModel):
    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        return AsleepStage(stage == num_stages - 1)


def step_s(schedule: Schedule, num_stages: int, round_trip_s: float, steps: int) -> float:
    """Return the median step time of a run, in seconds."""
    line = {
        "_target_": "xcloud.net.link_profile.LinkProfile",
        "bandwidth_bits_per_s": 1e8,
        "latency_s": round_trip_s / 2,
    }
    job = Job([1] * num_stages, schedule.num_micro_batches, BATCH, line=line)
    config = job.config(steps)
    config["schedule"] = as_settings(schedule)
    config["model"] = {"_target_": "benchmarks.round_trip.AsleepModel"}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        summary = run(Settings.of(config), Path(folder) / "run")
    return float(summary["step_time_s"]["median"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--rtt-ms",
        "--round-trip-ms",
        dest="round_trip_ms",
        type=float,
        nargs="+",
        default=[0.0, 50, 150, 300],
    )
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    m = asked.micro_batches
    schedules = {
        "gpipe": GPipe(m),
        "1f1b": OneForwardOneBackward(m, m),
        "two_buffered": TwoBuffered(m),
    }
    say_where()
    print(f"an update computes {COMPUTE_S:.2f} s in each stage; {m} micro-batches")
    print(f"{'stages':>6} {'round trip':>11} " + " ".join(f"{name:>14}" for name in schedules))
    rows = []
    for num_stages, trip_ms in product(asked.stages, asked.round_trip_ms):
        found = {
            name: step_s(schedule, num_stages, trip_ms / 1e3, asked.steps)
            for name, schedule in schedules.items()
        }
        rows.append({"stages": num_stages, "round_trip_ms": trip_ms, **found})
        times = " ".join(f"{seconds:>12.3f} s" for seconds in found.values())
        print(f"{num_stages:>6} {trip_ms:>8.0f} ms {times}", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps({"ran_on": ran_on(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
