"""What the framework itself costs as a job grows: step time and memory over micro-batches, clouds
and ranks, and how fast plans are simulated and searched.

    python -m benchmarks.cost_over_scale [--parts m memory clouds ranks replicas speed profile]
        [--steps 6] [--quick] [--json FILE]

Runs through run.py's own launch, wiring and trainer, whose stages sleep as long as they would
compute (5 ms a sample forward, twice that backward, 64 samples a rank and update: 0.96 s), so that
16 ranks fit two cores; links of 100 Mbit/s and 10 ms one way are emulated, nothing is compressed.
The ideal is the planner's step for the same sleeping, bytes and lines, without any other cost.
What a step takes beyond it is the framework's, and what sleeping takes longer than asked. A step
is timed in rank 0 from its first forward to that of the next one. Seconds of processor are those
of a rank's process with all of its threads.

- m: the work of a step stays, cut into more and more micro-batches, in two clouds
- memory: micro-batches of 16 samples that take no time, over a free line
- clouds: a stage in each; ranks: data parallel inside two clouds, with as much work for each rank;
  replicas: the whole model in each cloud, averaged over all of them
- speed: of simulator and search (bench_simulator.py); profile: of a real model (step_profile.py)
9 minutes on two quiet cores; --quick, a part of each, about one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import bench_simulator, step_profile
from benchmarks.machine import ran_on, say_where
from benchmarks.sleeping_job import Job, Measured, measure
from benchmarks.sleeping_model import SAMPLE_BYTES
from tests import warm_ranks
from xcloud.launch import processes as launch

MB = 1e6
HELD = ("parameters", "gradients", "optimizer", "activations")


def per_unit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The straight line through points (x, y) with the least squares: y at 0, and by how much y
    grows with x."""
    mean_x, mean_y = (sum(of) / len(points) for of in zip(*points, strict=True))
    square = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / square if square else 0.0
    return mean_y - slope * mean_x, slope


# The parts. Each prints its table and gives its rows.


def over_micro_batches(steps: int, is_quick: bool) -> list[dict[str, Any]]:
    counts = (2, 16) if is_quick else (1, 2, 4, 8, 16, 32, 64)
    rows = []
    for name, in_flight in (("GPipe", None), ("zero bubble", "all"))[: 1 if is_quick else 2]:
        print(f"\n{name}, 2 clouds, 64 samples a step\n{'m':>4} {HEAD}")
        points = []
        for m in counts:
            held = m if in_flight else None
            found = measure(Job((1, 1), m, 64, held, held), steps)
            points.append((m, found.step_s - found.ideal_s))
            rows.append({"schedule": name, "m": m, **told(f"{m:>4}", found)})
        fixed_s, each_s = per_unit(points)
        busy = [(row["m"], max(row["cpu_s"])) for row in rows if row["schedule"] == name]
        of_step_s, of_each_s = per_unit(busy)
        print(f"beyond ideal: {1e3 * fixed_s:.1f} ms a step, {1e3 * each_s:.2f} ms a micro-batch; "
              f"processor of the busiest rank: {1e3 * of_step_s:.1f} ms a step, "
              f"{1e3 * of_each_s:.2f} ms a micro-batch")  # fmt: skip
    return rows


def over_kept(steps: int, is_quick: bool) -> list[dict[str, Any]]:
    counts = (4, 32) if is_quick else (4, 16, 64)
    print(f"\nmemory, 2 clouds, 16 samples ({16 * SAMPLE_BYTES / MB:.3f} MB) a micro-batch\n"
          f"{'schedule':>26} {'m':>3} | held by rank 0, MB (planned) | by rank 1 | "
          "peaks, MB")  # fmt: skip
    rows = []
    schedules: dict[str, Callable[[int], tuple[int | None, int | None]]] = {
        "GPipe": lambda m: (None, None),
        "1F1B, 2 in flight": lambda m: (2, None),
        "zero bubble, 3 in flight": lambda m: (3, 3),
    }
    for (name, of), m in product(list(schedules.items())[-1 if is_quick else 0 :], counts):
        job = Job((1, 1), m, 16 * m, *of(m), sample_s=0.0, line="free")
        found = measure(job, 3)
        held = [sum(rank[kind] for kind in HELD) for rank in found.memory]
        pairs = list(zip(held, found.predicted_bytes, strict=True))
        cells = " | ".join(f"{one / MB:7.3f} ({planned / MB:7.3f})" for one, planned in pairs)
        peaks = ", ".join(f"{peak / MB:.1f}" for peak in found.peaks)
        print(f"{name:>26} {m:>3} | {cells} | {peaks}", flush=True)
        rows.append({"schedule": name, "m": m, "held": held, "planned": found.predicted_bytes,
                     "peak": found.peaks})  # fmt: skip
    return rows


def over_clouds(steps: int, is_quick: bool) -> list[dict[str, Any]]:
    print(f"\npipeline, GPipe, m = 16\n{'clouds':>6} {HEAD}")
    return [
        {"clouds": n, **told(f"{n:>6}", measure(Job((1,) * n, 16, 64), steps))}
        for n in ((3,) if is_quick else (2, 3, 4, 6, 8))
    ]


def over_ranks(steps: int, is_quick: bool) -> list[dict[str, Any]]:
    print(f"\n2 clouds, data parallel inside, GPipe, 8 micro-batches a rank\n{'ranks':>6} {HEAD}")
    return [
        {"ranks": n, **told(f"{n:>6}", measure(Job((n, n), 8 * n, 64 * n), steps))}
        for n in ((2,) if is_quick else (1, 2, 4, 8))
    ]


def over_replicas(steps: int, is_quick: bool) -> list[dict[str, Any]]:
    rows = []
    for strategy in ("data_parallel", "local_updates")[: 1 if is_quick else 2]:
        print(f"\n{strategy}, a replica in each cloud, 4 micro-batches each"
              f"\n{'clouds':>6} {HEAD}")  # fmt: skip
        for n in (2,) if is_quick else (2, 4, 8):
            found = measure(Job((1,) * n, 4 * n, 32 * n, strategy=strategy), steps)
            rows.append({"strategy": strategy, "clouds": n, **told(f"{n:>6}", found)})
    return rows


HEAD = ("|  step s | ideal s | ratio | processor of a step, ms: mean, most | peak MB: most | "
        "threads | sockets (rank 0, last)")  # fmt: skip


def told(name: str, found: Measured) -> dict[str, Any]:
    mean_ms, max_ms = (1e3 * of(found.cpu_s) for of in (_mean, max))
    threads, sockets = (f"{a:>3} {b:>3}" for a, b in (found.threads, found.sockets))
    print(f"{name} | {found.step_s:7.3f} | {found.ideal_s:7.3f} | "
          f"{found.step_s / found.ideal_s:5.3f} | {mean_ms:8.1f} {max_ms:8.1f} | "
          f"{max(found.peaks) / MB:7.1f} | {threads} | {sockets}", flush=True)  # fmt: skip
    return found._asdict()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def sleeping_longer_s(asked_s: float = 5e-3, times: int = 100) -> float:
    """By how much a sleep is longer than asked."""
    started_s = time.perf_counter()
    for _ in range(times):
        time.sleep(asked_s)
    return (time.perf_counter() - started_s) / times - asked_s


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    try:
        with mock.patch.object(launch, "start_process", warm_ranks.start):
            warm_ranks.import_first("benchmarks.sleeping_model")
            yield
    finally:
        warm_ranks.close()


PARTS = {
    "m": over_micro_batches, "memory": over_kept, "clouds": over_clouds, "ranks": over_ranks,
    "replicas": over_replicas,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*PARTS, "speed", "profile"]
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--steps", type=int, default=6, help="counted, of each run")
    parser.add_argument("--quick", action="store_true", help="the smallest form of each part")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    say_where()
    found: dict[str, Any] = {**ran_on(), "sleeping_longer_s": sleeping_longer_s()}
    print(f"a sleep of 5 ms takes {1e3 * found['sleeping_longer_s']:.2f} ms longer")
    steps = 2 if given.quick else given.steps
    with forked_ranks():
        for name, part in PARTS.items():
            if name in given.parts:
                found[name] = part(steps, given.quick)
    others: dict[str, Callable[[], Any]] = {
        "speed": partial(bench_simulator.speed, given.quick),
        "profile": partial(step_profile.profile, given.quick),
    }
    for name, other in others.items():
        if name in given.parts:
            found[name] = other()
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
