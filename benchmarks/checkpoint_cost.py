"""What checkpoints and heartbeats cost: python -m benchmarks.checkpoint_cost [--turns N]

Step time of a small pipeline with neither, with a checkpoint every few steps, with a heartbeat
every few milliseconds, and with both, side by side in turns, so that what else the machine does
falls on all. Both are far more frequent than by default, which is calculated from that.
The pause that a large state makes: benchmarks/checkpoint_pause.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.machine import ran_on
from tests.features.test_resume import CODECS, SHAPES, job
from tests.pipelines import in_threads
from tests.trainers import Rank
from xcloud.features.checkpoints.checkpointing import Checkpointer
from xcloud.features.checkpoints.saving import CheckpointWriter, Timing
from xcloud.launch.processes import LIBRARY_SETTINGS
from xcloud.net.link_profile import DEFAULT_LIVENESS, Liveness
from xcloud.pipeline.settings import Checkpoints
from xcloud.record.checkpoint_files import CheckpointFolder
from xcloud.record.reporter import Reporter

STEPS, EVERY, BEAT_S = 40, 20, 0.02
SETTINGS = {  # checkpoints every so many steps, heartbeats
    "neither": (0, False), "checkpoints": (EVERY, False), "heartbeats": (0, True),
    "both": (EVERY, True),
}  # fmt: skip
ABOUT = {"release": "", "attempt": 1, "stages": [], "settings": {}, "facts": {}}


def checkpointers(ranks: list[Rank], folder: Path, settings: Checkpoints) -> list[Checkpointer]:
    made = []
    for rank in ranks:
        made.append(
            Checkpointer(
                Timing(settings), CheckpointWriter(CheckpointFolder(folder), rank.number, ABOUT),
                rank.wiring.control, rank.stateful,
                Reporter(rank.number, "a", lambda lines: None),
            )
        )  # fmt: skip
        rank.hooks.append(made[-1])
    return made


def seconds_of(
    ranks: list[Rank], made: list[Checkpointer], begin: int, beats: bool
) -> dict[str, float]:
    """Of a step of the first rank, with what follows it, mean over STEPS. cpu: of all ranks and
    threads; it hardly depends on what else the machine does."""

    def one(rank: Rank, checkpoints: Checkpointer) -> float:
        control = rank.wiring.control
        assert control is not None
        control.detector.liveness = Liveness(BEAT_S)
        alive = control.detector.running() if beats else contextlib.nullcontext()
        with alive:
            started_s = time.perf_counter()
            for step in range(begin, begin + STEPS):
                checkpoints.after(step, rank.update(step).signal)
            return time.perf_counter() - started_s

    cpu_s, both = time.process_time(), zip(ranks, made, strict=True)
    wall_s = float(in_threads([lambda r=rank, c=c: one(r, c) for rank, c in both])[0])
    for checkpoints in made:
        checkpoints.settle()
    return {"wall": wall_s / STEPS, "cpu": (time.process_time() - cpu_s) / STEPS}


def side_by_side(folder: Path, turns: int) -> dict[str, object]:
    shape, codec = SHAPES["two clouds, GPipe"], CODECS["int4, delta"]
    jobs = {name: job(shape, codec) for name in SETTINGS}
    made = {
        name: checkpointers(jobs[name], folder / name, Checkpoints(every, 0))
        for name, (every, _) in SETTINGS.items()
    }
    times: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    for turn in range(1 + turns):  # the first one warms up
        for name, (_, beats) in SETTINGS.items():
            found = seconds_of(jobs[name], made[name], 1 + turn * STEPS, beats)
            times[name].append(found)
    for checkpoints in [one for ours in made.values() for one in ours]:
        checkpoints.close()
    told: dict[str, object] = {"every_steps": EVERY, "beat_s": BEAT_S, "turns": turns}
    for clock in ("wall", "cpu"):
        series = {name: [found[clock] for found in times[name][1:]] for name in SETTINGS}
        told[clock] = {
            "step_ms": {n: round(1e3 * statistics.median(one), 3) for n, one in series.items()},
            **costs(series),
        }
    return told


def costs(series: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """In percent, with standard errors: of each turn its ratio to the neighbour with neither. The
    median does not see a turn with a hiccup."""
    cost, error = {}, {}
    for name in list(SETTINGS)[1:]:
        pairs = zip(series[name], series["neither"], strict=True)
        low, middle, high = statistics.quantiles([100 * (a / b - 1) for a, b in pairs], n=4)
        cost[name] = round(middle, 2)
        error[name] = round((high - low) / 1.35 / len(series[name]) ** 0.5, 2)  # from quartiles
    by_default = {
        "checkpoints every 500 steps": cost["checkpoints"] * EVERY / 500,
        "heartbeats every 5 s": cost["heartbeats"] * BEAT_S / DEFAULT_LIVENESS.interval_s,
    }
    return {
        "cost_percent": cost, "standard_error": error,
        "cost_percent_by_default": {n: round(value, 3) for n, value in by_default.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    arguments = parser.parse_args()
    # As the launcher has it: freed memory is kept.
    if not LIBRARY_SETTINGS.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]],
                  {**os.environ, **LIBRARY_SETTINGS})  # fmt: skip
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        found = side_by_side(Path(name), arguments.turns)
    print(json.dumps({**ran_on(), **found}), flush=True)


if __name__ == "__main__":
    main()
