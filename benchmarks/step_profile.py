"""Where a step's time goes in a rank: by kind of work, by group of functions, and which items of
our own code are the largest.

    python -m benchmarks.step_profile [--job lora_clm sleeping] [--steps 16] [KEY=VALUE ...]

Real runs of two ranks of one thread: lora_clm in INT4 both ways over 100 Mbit/s, m = 4; and stages
that only sleep, m = 16, uncompressed, so that all that is left is ours. The first half of the
steps is not profiled: kinds of work and the processor time of each thread are of those. In the
second half cProfile counts the main thread's processor time, so that waiting is not in it. It
makes calls of Python longer: its shares are of what it counted. A function's time is its own, with
what it calls in C directly (a tensor's copy, a checksum) and without what it calls in Python.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import io
import json
import os
import pstats
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from omegaconf import DictConfig, OmegaConf

from benchmarks.machine import ran_on, say_where
from benchmarks.sleeping_job import Job
from tests.configs import composed
from xcloud.job.config import Settings
from xcloud.launch import processes as launch
from xcloud.launch.local import run

OUT = "XCLOUD_STEP_PROFILE"  # in a rank's environment: the folder that it writes to, and steps
WARM_UP = 3  # steps
TOP = 8  # items of our own code that are shown
TORCH, MODEL, OTHER = "torch", "model and data", "other Python"
OWN = {"comm": "codecs", "net": "frames and links"}
LOOP = "our loop"  # pipeline, trainer, roles, records
ROOMS = OWN | {"models": MODEL, "tasks": MODEL}
SMALL = ["model.own.pretraining.steps=0", "task.data.num_dev=8", "task.data.num_test=8",
         "tracker=none",
         "training.evaluate_every=0"]  # fmt: skip


def lora_clm(steps: int) -> DictConfig:
    return composed("+exp=lora_clm", *SMALL, "compression=int4", "cluster=two_clouds",
                    f"training.max_steps={steps}")  # fmt: skip


def sleeping(steps: int) -> DictConfig:
    return OmegaConf.create(Job((1, 1), 16, 64, sample_s=1e-3).config(steps))


JOBS: dict[str, Callable[[int], DictConfig]] = {"lora_clm": lora_clm, "sleeping": sleeping}

Function = tuple[str, int, str]  # file, line, name: as pstats has it
Stats = Mapping[Function, tuple[int, int, float, float, Mapping[Function, tuple[Any, ...]]]]


def group_of(function: Function) -> str:
    file = function[0]
    if file == "~":
        return TORCH
    parts = Path(file).parts
    if "xcloud" in parts:
        room = parts[len(parts) - parts[::-1].index("xcloud")]
        return ROOMS.get(room, LOOP)
    if {"transformers", "peft"} & set(parts):
        return MODEL
    return TORCH if "torch" in parts else OTHER


def own_s(stats: Stats) -> dict[Function, float]:
    """Of each function of Python its own seconds, with those of the functions in C it calls."""
    found: Counter[Function] = Counter()
    for function, (_, _, seconds, _, callers) in stats.items():
        if function[0] != "~" or not callers:
            found[function] += seconds  # type: ignore[assignment]
            continue
        for caller, (*_, by_caller_s, _) in callers.items():
            found[caller] += by_caller_s
    return dict(found)


def by_group(stats: Stats) -> dict[str, float]:
    found: Counter[str] = Counter()
    for function, seconds in own_s(stats).items():
        found[group_of(function)] += seconds  # type: ignore[assignment]
    return dict(found.most_common())


def largest(stats: Stats, count: int) -> list[tuple[str, float]]:
    """Of our own code, without models and data."""
    ours = {f: s for f, s in own_s(stats).items() if group_of(f) in (*OWN.values(), LOOP)}
    top = sorted(ours.items(), key=lambda item: -item[1])[:count]
    return [(f"{file.rpartition('xcloud/')[2]} {name}", s) for (file, _, name), s in top]


# In a rank.


def threads_s() -> Counter[str]:
    """Seconds of processor of each thread so far, by the first word of its name. Linux."""
    found: Counter[str] = Counter()
    for thread in threading.enumerate():
        file = Path(f"/proc/self/task/{thread.native_id}/schedstat")
        name = thread.name.replace("-", " ").split()[0]
        found[name] += 1e-9 * int(file.read_text().split()[0])  # type: ignore[assignment]
    return found


def be_rank(folder: Path, steps: int) -> None:
    """`python -m xcloud WORDS` with its updates watched."""
    from xcloud.__main__ import main as command
    from xcloud.pipeline.trainer import Trainer

    update, profiler = Trainer.update, cProfile.Profile(time.thread_time)
    half = (steps + WARM_UP) // 2
    kinds: list[dict[str, float]] = []
    threads: list[Counter[str]] = []

    def watched(self: Trainer, step: int) -> Any:
        if step == half:
            threads.append(threads_s())
        if step < half:
            report = update(self, step)
            if step == WARM_UP:
                threads.append(threads_s())
            if step > WARM_UP:
                sums = dict(report.clock.seconds)
                kinds.append({"step_s": report.step_s, **sums})
            return report
        report = profiler.runcall(update, self, step)
        if step == steps:
            name = f"rank{os.environ['LOCAL_RANK']}"
            profiler.dump_stats(folder / f"{name}.prof")
            per_step = {k: v / len(kinds) for k, v in (threads[1] - threads[0]).items()}
            found = {"kinds": kinds, "threads_s": per_step, "steps": steps - half + 1}
            (folder / f"{name}.json").write_text(json.dumps(found))
        return report

    with mock.patch.object(Trainer, "update", watched):
        command(sys.argv[1:])


# Around the run.


def profile(is_quick: bool = False) -> dict[str, Any]:
    if is_quick:
        return {"sleeping": profile_of("sleeping", 8, [])}
    return {name: profile_of(name, 24, []) for name in JOBS}


def profile_of(job: str, steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    config = JOBS[job](steps)
    OmegaConf.set_struct(config, False)
    config.merge_with_dotlist(list(overrides))
    start = launch.start_process

    def start_watched(command: list[str], environment: dict[str, str], log: Path) -> Any:
        words = ["benchmarks.step_profile" if word == "xcloud" else word for word in command]
        return start(words, environment, log)

    with tempfile.TemporaryDirectory() as folder:
        with (
            mock.patch.object(launch, "start_process", start_watched),
            mock.patch.dict(os.environ, {OUT: f"{folder} {steps}", "OMP_NUM_THREADS": "1"}),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            run(Settings.of(config), Path(folder) / "run")
        return {f"rank {rank}": tell(job, Path(folder), rank) for rank in range(2)}


def tell(job: str, folder: Path, rank: int) -> dict[str, Any]:
    found = json.loads((folder / f"rank{rank}.json").read_text())
    stats: Stats = pstats.Stats(str(folder / f"rank{rank}.prof")).stats  # type: ignore[attr-defined]
    kinds = {k: statistics.median(one[k] for one in found["kinds"]) for k in found["kinds"][0]}
    step_s = kinds["step_s"]
    kinds["rest_s"] = step_s - sum(s for k, s in kinds.items() if k != "step_s")
    groups = {name: s / found["steps"] for name, s in by_group(stats).items()}
    items = [(name, s / found["steps"]) for name, s in largest(stats, TOP)]
    profiled_s = sum(groups.values())
    print(f"\n{job}, rank {rank}: a step takes {1e3 * step_s:.1f} ms: "
          + ", ".join(f"{k.removesuffix('_s')} {1e3 * s:.1f}" for k, s in kinds.items()
                      if k != "step_s"))  # fmt: skip
    print("  processor of threads, ms a step: "
          + ", ".join(f"{k} {1e3 * s:.2f}" for k, s in found["threads_s"].items()))  # fmt: skip
    print(f"  profiled, {1e3 * profiled_s:.1f} ms a step: "
          + ", ".join(f"{k} {1e3 * s:.2f}" for k, s in groups.items()))  # fmt: skip
    for name, s in items:
        print(f"  {1e3 * s:8.2f} ms {s / profiled_s:6.1%}  {name}", flush=True)
    threads = {"threads_s": found["threads_s"]}
    return {"kinds_s": kinds, **threads, "groups_s": groups, "largest": items}


def main() -> None:
    if OUT in os.environ:
        folder, steps = os.environ[OUT].rsplit(" ", 1)
        return be_rank(Path(folder), int(steps))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", type=Path)
    parser.add_argument("override", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    say_where()
    found = {name: profile_of(name, given.steps, given.override) for name in given.job}
    if given.json:
        given.json.write_text(json.dumps(ran_on() | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
