"""How near the planner's predictions come to runs, and whether its choices are the best ones.

    python -m benchmarks.predictions [--points 64] [--crossings] [--json FILE]

Profiles once a causal language model of 4.6 million weights, then runs points of split x
micro-batches x schedule x compressor x line x strategy, in random order: two ranks of one thread
over an emulated line, through run.py's own launch and wiring (ranks are forked from a process that
has imported torch). 12 timed steps each, after 4. Half of the points are "held out", by a digest
of their names: whoever works on the prediction looks at the others (--half open). --crossings runs
both sides of each bandwidth below which a compressor is said to pay, at 0.7 and 1.4 of it.

On a quiet machine a point takes 5 to 8 seconds: 64 points 8 minutes, crossings 4.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests import warm_ranks
from tests.configs import composed
from xcloud.cluster.link_profile import LinkProfile
from xcloud.job import config as configs
from xcloud.plan.plans import NO_COMPRESSION, Arranged, Plan, Priced
from xcloud.plan.pricing import Pricer
from xcloud.plan.profile import Profile
from xcloud.plan.search import crossings, step_at
from xcloud.project import commit
from xcloud.record.events import EVENTS_FILE, EventReader
from xcloud.run import launch
from xcloud.run.local import run
from xcloud.run.planning import Planner

BLOCKS, BATCH, EVERY = 6, 8, 4
WARM_UP, TIMED = 4, 12  # steps; TIMED is a multiple of EVERY
COMPRESSORS = ("none", "fp16_int8", "int8", "int4_int8", "int4")
SCHEDULES = ((None, None), (2, None), (3, None), (3, 3))  # in flight, in memory: GPipe, 1F1B, ZB
LINES = {
    "1 Gbit/s": LinkProfile(1e9), "100 Mbit/s": LinkProfile(1e8), "30 Mbit/s": LinkProfile(3e7),
    "10 Mbit/s": LinkProfile(1e7), "100 Mbit/s, 50 ms": LinkProfile(1e8, 0.025),
    "30 Mbit/s, 150 ms": LinkProfile(3e7, 0.075),
}  # fmt: skip
BASE = (
    "+exp=lora_clm", "plan=show", "tracker=none", "model.lora=null", "model.own.num_texts=2000",
    "model.own.hidden=256", f"model.own.num_layers={BLOCKS}", "model.own.num_heads=8",
    "model.own.num_kv_heads=4", "model.own.feed_forward=512", "model.own.pretraining.steps=0",
    "task.max_length=64", "task.num_train=400",
    "task.num_dev=8", "task.num_test=8", f"training.batch_size={BATCH}",
    f"training.max_steps={WARM_UP + TIMED}", "training.checkpoint.every_steps=0",
    "training.checkpoint.every_minutes=0",
)  # fmt: skip


class Point(NamedTuple):
    line: str
    plan: Plan

    @property
    def name(self) -> str:
        plan, ends = self.plan, self.plan.ends
        cut = "whole" if len(ends) == 1 else f"{ends[0]}|{ends[1] - ends[0]}"
        settings = f"m={plan.micro_batches} {plan.schedule_label} {plan.compression}"
        return f"{plan.strategy} {cut} {settings}, {self.line}"

    @property
    def half(self) -> str:
        odd = hashlib.sha256(self.name.encode()).digest()[0] % 2
        return "held out" if odd else "open"


class Result(NamedTuple):
    point: Point
    predicted: Priced
    step_s: float

    @property
    def error(self) -> float:
        return self.predicted.step_s / self.step_s - 1


class Bench:
    def __init__(self) -> None:
        self.config = composed(*BASE)
        self.config.plan.strategies.local_updates.averaging.every = EVERY
        job = configs.job_from_config(self.config)
        assert job.plan is not None
        planner = Planner(job, job.plan, configs.built(self.config, "cluster"))  # type: ignore[arg-type]
        self.cluster, self.strategies = planner.cluster, planner.arranged
        self.profile: Profile = planner.profile()[0]

    def pricer(self, line: LinkProfile) -> Pricer:
        cluster = replace(self.cluster, wan=line)
        arranged = {
            name: Arranged(found.strategy, found.strategy.arrange(cluster))
            for name, found in self.strategies.items()
        }
        return Pricer(self.profile, arranged, BATCH)

    def step_s(self, plan: Plan, line: LinkProfile) -> float:
        """Of a run: the slowest rank's median step. Where replicas average now and then, the mean
        over the places of a round."""
        config = self.config.copy()
        config.compression = config.plan.compressors[plan.compression]
        config.strategy = config.plan.strategies[plan.strategy]
        config.plan = None
        config.cluster.wan.bandwidth_bits_per_s = line.bandwidth_bits_per_s
        config.cluster.wan.latency_s = line.latency_s
        kind = type(plan.schedule)
        target = {"_target_": f"{kind.__module__}.{kind.__qualname__}"}
        config.schedule = target | asdict(plan.schedule)  # type: ignore[call-overload]
        if len(plan.ends) > 1:
            config.model.blocks_per_stage = [plan.ends[0]]
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            run(config, Path(folder) / "run")
            events = EventReader(Path(folder) / "run" / EVENTS_FILE).poll()
        slowest: dict[int, float] = defaultdict(float)
        for event in events:
            if event["event"] == "step" and event["step"] > WARM_UP:
                slowest[event["step"]] = max(slowest[event["step"]], event["step_s"])
        every = EVERY if plan.strategy == "local_updates" else 1
        places = [[s for step, s in slowest.items() if step % every == k] for k in range(every)]
        return statistics.mean(statistics.median(found) for found in places)


def all_points() -> list[Point]:
    """In an order drawn once for all. Every fifth is without a pipeline."""
    pipelines = [
        Point(line, Plan("pipeline", (cut, BLOCKS), m, in_flight, compression, in_memory))
        for line, cut, m, (in_flight, in_memory), compression in product(
            LINES, (2, 3, 4), (1, 2, 4, 8), SCHEDULES, COMPRESSORS
        )
        if in_flight is None or in_flight < m
    ]
    others = [
        Point(line, Plan(strategy, (BLOCKS,), m, None, compression))
        for line, strategy, m, compression in product(
            LINES, ("data_parallel", "local_updates"), (2, 4), COMPRESSORS
        )
    ]
    draw = random.Random(2026)
    draw.shuffle(pipelines)
    draw.shuffle(others)
    found: list[Point] = []
    while pipelines:
        found += [*pipelines[:4], *others[:1]]
        del pipelines[:4], others[:1]
    return found


def measure(bench: Bench, number: int, half: str, longest_s: float) -> list[Result]:
    pricers = {name: bench.pricer(line) for name, line in LINES.items()}
    chosen: list[tuple[Point, Priced]] = []
    for point in all_points():
        priced = pricers[point.line].price(point.plan)
        if priced.step_s <= longest_s and half in ("both", point.half.replace(" ", "-")):
            chosen.append((point, priced))
    if len(chosen) < number:
        print(f"{len(chosen)} points whose step is to take at most {longest_s:g} s", flush=True)
    del chosen[number:]
    random.shuffle(chosen)
    found = []
    for point, priced in chosen:
        found.append(Result(point, priced, bench.step_s(point.plan, LINES[point.line])))
        print(f"{found[-1].error:+7.1%}  {found[-1].step_s:.3f} s  {point.name}"
              f"  ({point.half}; {priced.bound})", flush=True)  # fmt: skip
    return found


def tell(results: Sequence[Result]) -> Iterator[str]:
    for half in ("open", "held out", ""):
        errors = [r.error for r in results if half in ("", r.point.half)]
        if errors:
            sizes = [abs(error) for error in errors]
            yield (
                f"{half or 'all':>8}: {len(errors)} points, median error "
                f"{statistics.median(sizes):.1%}, worst {max(sizes, key=abs):.1%}, "
                f"median with its sign {statistics.median(errors):+.1%}"
            )
    for line in LINES:
        mine = [r for r in results if r.point.line == line]
        if len(mine) > 1:
            chosen = min(mine, key=lambda r: r.predicted.step_s)
            best = min(r.step_s for r in mine)
            yield (
                f"{line}: of {len(mine)} measured the planner's choice takes "
                f"{chosen.step_s / best:.3f} of the best"
            )


def cross(bench: Bench, rounds: int) -> Iterator[dict[str, Any]]:
    """Both sides of each crossing, in alternation."""
    line = LinkProfile(1e8)
    for m in (2, 4):
        plan = Plan("pipeline", (BLOCKS // 2, BLOCKS), m, None, NO_COMPRESSION)
        found = crossings(step_at(bench.pricer(line), plan), COMPRESSORS)
        for name, rate in found:
            if not 5e6 < rate < 5e9:
                print(f"m={m} {name}: pays below {rate:g} bit/s, which is not run", flush=True)
                continue
            for factor in (0.7, 1.4):
                there = replace(line, bandwidth_bits_per_s=factor * rate)
                pricer = bench.pricer(there)
                both = [plan, plan._replace(compression=name)]
                times: list[list[float]] = [[], []]
                for _ in range(rounds):
                    for own, one in zip(times, both, strict=True):
                        own.append(bench.step_s(one, there))
                measured, foreseen = (
                    pair[1] / pair[0] - 1
                    for pair in (
                        [statistics.median(own) for own in times],
                        [pricer.step_s(one) for one in both],
                    )
                )
                print(f"m={m} {name} at {factor} x {rate / 1e6:.3g} Mbit/s: {foreseen:+.1%} "
                      f"foreseen, {measured:+.1%} measured: "
                      f"{'as' if (measured < 0) == (foreseen < 0) else 'NOT as'} predicted",
                      flush=True)  # fmt: skip
                yield {"m": m, "compression": name, "bits_per_s": factor * rate,
                       "predicted": foreseen, "measured": measured}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--points", type=int, default=64)
    parser.add_argument("--half", choices=("both", "open", "held-out"), default="both")
    parser.add_argument(
        "--longest", type=float, default=0.5, metavar="SECONDS",
        help="leave slower steps out, so that no point takes more than 8 seconds",
    )  # fmt: skip
    parser.add_argument("--crossings", action="store_true", help="run these in place of points")
    parser.add_argument("--rounds", type=int, default=2, help="of each side of a crossing")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    written: dict[str, Any] = {"commit": commit()}
    with mock.patch.object(launch, "start_process", warm_ranks.start):
        warm_ranks.import_first("transformers")
        try:
            bench = Bench()
            written["profile"] = dict(bench.profile.of)
            if given.crossings:
                written["crossings"] = list(cross(bench, given.rounds))
            else:
                results = measure(bench, given.points, given.half, given.longest)
                written["points"] = [
                    {"name": r.point.name, "half": r.point.half, "error": r.error,
                     "predicted_s": r.predicted.step_s, "measured_s": r.step_s,
                     "spent_s": dict(r.predicted.spent_s)}
                    for r in results
                ]  # fmt: skip
                written["said"] = list(tell(results))
                print("\n".join(written["said"]))
        finally:
            warm_ranks.close()
    if given.json:
        given.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
