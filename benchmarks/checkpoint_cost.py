"""What checkpoints cost: python -m benchmarks.checkpoint_cost [--parameters N] [--folder DIR]

1. Step time of a small pipeline with and without a checkpoint every few steps, side by side in
   turns, so that what else the machine does falls on both.
2. The pause of the training thread and the time to write, for a simulated state: a model of
   --parameters FP32 values with two moments each, copied as a rank copies its own. It is scaled
   down to what fits into memory twice and into the folder once, and says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.pipelines import in_threads
from tests.test_resume import CODECS, SHAPES, job
from tests.trainers import Rank
from xcloud.comm.memory import State
from xcloud.record.checkpoints import CheckpointFolder
from xcloud.record.reporter import Reporter
from xcloud.run.checkpointing import Checkpointer
from xcloud.run.launch import _MEMORY
from xcloud.training.settings import Checkpoints

STEPS, TURNS, EVERY = 40, 6, 20
BYTES_PER_PARAMETER = 12  # value, two moments
ABOUT = {"release": "", "attempt": 1, "stages": [], "settings": {}, "facts": {}}


class Simulated:
    """The state of a model in tensors of 64 MB."""

    def __init__(self, num_parameters: int) -> None:
        size = 1 << 24
        sizes = [min(size, num_parameters - at) for at in range(0, num_parameters, size)]
        self.tensors = {
            f"{kind}.{number}": torch.ones(n)
            for kind in ("values", "moments.exp_avg", "moments.exp_avg_sq")
            for number, n in enumerate(sizes)
        }

    def state_dict(self) -> State:
        return {name: value.clone() for name, value in self.tensors.items()}

    def load_state_dict(self, state: State) -> None:
        raise NotImplementedError


def largest(wanted: int, folder: Path) -> int:
    """Parameters whose state fits twice into free memory, with a tenth to spare, and into the
    folder: there memory too, if it is a tmpfs."""
    free = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        free[name] = 1024 * int(value.split()[0])
    is_memory = str(folder).startswith("/dev/shm")
    copies = 3 if is_memory else 2
    fits = min(
        0.9 * free["MemAvailable"] / copies, 0.9 * shutil.disk_usage(folder).free
    ) / BYTES_PER_PARAMETER  # fmt: skip
    return min(wanted, int(fits))


def pause(num_parameters: int, folder: Path) -> dict[str, object]:
    simulated = Simulated(num_parameters)
    events: list[bytes] = []
    made = Checkpointer(
        Checkpoints(1, 0), CheckpointFolder(folder), 0, None, {"model": simulated}, ABOUT,
        Reporter(0, "a", events.append),
    )  # fmt: skip
    pauses = []
    for step in (1, 2, 3):  # the first one touches new memory, as in a run
        started_s = time.perf_counter()
        made.save(step)
        pauses.append(time.perf_counter() - started_s)
        made.wait()
    made.close()
    made._reporter.flush()
    told = [json.loads(line) for lines in events for line in lines.splitlines()]
    return {
        "parameters": num_parameters,
        "state_GB": round(num_parameters * BYTES_PER_PARAMETER / 1e9, 2),
        "pause_s": [round(seconds, 2) for seconds in pauses],
        "write_s": [event["write_s"] for event in told if event["event"] == "checkpoint"],
    }


def checkpointers(ranks: list[Rank], folder: Path, settings: Checkpoints) -> list[Checkpointer]:
    made = []
    for rank in ranks:
        made.append(
            Checkpointer(
                settings, CheckpointFolder(folder), rank.trainer.rank, rank.wiring.control,
                {"trainer": rank.trainer, "channels": rank.wiring}, ABOUT,
                Reporter(rank.trainer.rank, "a", lambda lines: None),
            )
        )  # fmt: skip
        rank.trainer.decide = made[-1].decide
    return made


def seconds_of(ranks: list[Rank], made: list[Checkpointer], begin: int) -> float:
    """Of STEPS steps of the first rank, with what follows each."""

    def one(rank: Rank, checkpoints: Checkpointer) -> float:
        started_s = time.perf_counter()
        for step in range(begin, begin + STEPS):
            checkpoints.after(step, rank.trainer.update(step).word)
        return time.perf_counter() - started_s

    both = zip(ranks, made, strict=True)
    return float(in_threads([lambda r=rank, c=c: one(r, c) for rank, c in both])[0])


def side_by_side(folder: Path) -> dict[str, object]:
    shape, codec = SHAPES["two clouds, GPipe"], CODECS["int4, delta"]
    settings = {"without": Checkpoints(0, 0), "with": Checkpoints(EVERY, 0)}
    jobs = {name: job(shape, codec) for name in settings}
    made = {name: checkpointers(jobs[name], folder / name, settings[name]) for name in settings}
    times: dict[str, list[float]] = {name: [] for name in settings}
    for turn in range(TURNS):
        for name in settings:
            found = seconds_of(jobs[name], made[name], 1 + turn * STEPS)
            times[name].append(found / STEPS)
    for one in [*made["with"], *made["without"]]:
        one.close()
    median = {name: statistics.median(found[1:]) for name, found in times.items()}
    cost = median["with"] / median["without"] - 1
    return {
        "step_ms": {name: round(1e3 * value, 3) for name, value in median.items()},
        "every_steps": EVERY,
        "cost_percent": round(100 * cost, 2),
        "cost_percent_at_500_steps": round(100 * cost * EVERY / 500, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    arguments = parser.parse_args()
    if not _MEMORY.items() <= os.environ.items():  # as the launcher has it: freed memory is kept
        os.execve(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]],
                  {**os.environ, **_MEMORY})  # fmt: skip
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        print(json.dumps(side_by_side(folder)), flush=True)
        wanted = int(arguments.parameters)
        num_parameters = largest(wanted, folder)
        if num_parameters < wanted:
            print(f"scaled down from {wanted:,} to {num_parameters:,} parameters", flush=True)
        print(json.dumps(pause(num_parameters, folder)), flush=True)


if __name__ == "__main__":
    main()
