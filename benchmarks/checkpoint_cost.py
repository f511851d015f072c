"""What checkpoints and signs of life cost: python -m benchmarks.checkpoint_cost [--turns N]
[--parameters N] [--folder DIR]

1. Step time of a small pipeline with neither, with a checkpoint every few steps, with a sign of
   life every few milliseconds, and with both, side by side in turns, so that what else the machine
   does falls on all. Both are far more frequent than by default, which is calculated from that.
2. The pause of the training thread and the time to write, for a simulated state: a model of
   --parameters FP32 values with two moments each, copied as a rank copies its own. It is scaled
   down to what fits into memory twice and into the folder once, and says so.
"""

from __future__ import annotations

import argparse
import contextlib
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
from xcloud.cluster.liveness import DEFAULT_LIVENESS, Heartbeat
from xcloud.comm.memory import State
from xcloud.record.checkpoints import CheckpointFolder
from xcloud.record.reporter import Reporter
from xcloud.run.checkpointing import Checkpointer
from xcloud.run.launch import _MEMORY
from xcloud.training.settings import Checkpoints

STEPS, EVERY, BEAT_S = 40, 20, 0.02
SETTINGS = {  # checkpoints every so many steps, signs of life
    "neither": (0, False), "checkpoints": (EVERY, False), "signs of life": (0, True),
    "both": (EVERY, True),
}  # fmt: skip
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
        self.tensors = {name: state[name].clone() for name in self.tensors}


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


def seconds_of(
    ranks: list[Rank], made: list[Checkpointer], begin: int, beats: bool
) -> dict[str, float]:
    """Of a step of the first rank, with what follows it, mean over STEPS. cpu: of all ranks and
    threads; it hardly depends on what else the machine does."""

    def one(rank: Rank, checkpoints: Checkpointer) -> float:
        control = rank.wiring.control
        assert control is not None
        alive = Heartbeat(BEAT_S, control.say_alive) if beats else contextlib.nullcontext()
        with alive:
            started_s = time.perf_counter()
            for step in range(begin, begin + STEPS):
                checkpoints.after(step, rank.trainer.update(step).word)
            return time.perf_counter() - started_s

    cpu_s, both = time.process_time(), zip(ranks, made, strict=True)
    wall_s = float(in_threads([lambda r=rank, c=c: one(r, c) for rank, c in both])[0])
    for checkpoints in made:
        checkpoints.wait()
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
        "signs of life every 5 s": cost["signs of life"] * BEAT_S / DEFAULT_LIVENESS.interval_s,
    }
    return {
        "cost_percent": cost, "standard_error": error,
        "cost_percent_by_default": {n: round(value, 3) for n, value in by_default.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    arguments = parser.parse_args()
    if not _MEMORY.items() <= os.environ.items():  # as the launcher has it: freed memory is kept
        os.execve(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]],
                  {**os.environ, **_MEMORY})  # fmt: skip
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        print(json.dumps(side_by_side(folder, arguments.turns)), flush=True)
        wanted = int(arguments.parameters)
        num_parameters = largest(wanted, folder)
        if num_parameters < wanted:
            print(f"scaled down from {wanted:,} to {num_parameters:,} parameters", flush=True)
        print(json.dumps(pause(num_parameters, folder)), flush=True)


if __name__ == "__main__":
    main()
