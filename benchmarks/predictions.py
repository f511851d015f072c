"""How near the planner's predictions come to runs, and whether its choices are the best ones.

    python -m benchmarks.predictions [--points 64] [--small] [--json FILE]

Tries anew a causal language model (6 blocks of 384, batches of 32 x 64 tokens: steps of a
second; --small: 6 of 256, 8 x 64: a fifth of one), then runs points of split x micro-batches x
schedule x compressor x line x strategy, in random order: two ranks of one thread over an emulated
line, through run.py's own launch and wiring (ranks are forked from a process that has imported
torch). 8 timed steps each, after 2 (of local updates 4). Half of the points are "held out", by a
digest of their names: whoever works on the prediction looks at the others (--half open).
benchmarks/crossings.py checks the bandwidths below which a compressor is said to pay.

Before the points one trial run (planner/trial.py) records what work takes, as for a user. A shared
machine changes its speed from one minute to the next. So before and after each point the same
small work is timed (`reference_s`), in as many processes at once as there are ranks, as it was
during the trial. Errors are told twice: "as predicted", which is what a user gets; and "at its
speed", predicted with all seconds of work multiplied by (reference around the point) / (reference
around the trial). Where the references before and after differ by more than a tenth, the point is
measured again, at most twice: whatever its error is, which that rule does not know.

Run it alone on the machine, and without chrt: beside other work, ranks then computed undisturbed
while their messages came 20 to 30 ms late. 64 points take 20 minutes, --small 11; more
where the machine is restless.
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
import struct
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.machine import ran_on
from tests import warm_ranks
from tests.configs import composed
from xcloud.base.settings import as_settings
from xcloud.job.config import Settings
from xcloud.launch import processes as launch
from xcloud.launch.local import run
from xcloud.net.link_profile import LinkProfile
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, ZeroBubble
from xcloud.pipeline.schedule import GPipe, Schedule
from xcloud.planner.planning import Planner
from xcloud.record.events import EVENTS_FILE
from xcloud.record.summary import read_run
from xcloud.simulator.costs import Profile, from_table
from xcloud.simulator.plan import Arranged, Plan, Priced
from xcloud.simulator.pricing import Pricer

BLOCKS, EVERY = 6, 4
WARM_UP, TIMED = 2, 8  # steps; TIMED is a multiple of EVERY
WARM_UP_LOCAL = EVERY  # the first merge makes buffers
AS_PREDICTED, AT_SPEED = "as predicted", "at its speed"
OFF_SPEED = 0.1  # share by which the machine's speed may differ around a point
REFERENCE_S = 0.7  # how long each reference is measured
MAX_ATTEMPTS = 3  # at a point
COMPRESSORS = ("none", "fp16_int8", "int8", "int4_int8", "int4")
SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    "gpipe": GPipe,
    "1f1b, 2 in flight": lambda m: OneForwardOneBackward(m, 2),
    "1f1b, 3 in flight": lambda m: OneForwardOneBackward(m, 3),
    "zero bubble, 3 in flight": lambda m: ZeroBubble(m, 3, 3),
}
LINES = {
    "1 Gbit/s": LinkProfile(1e9), "100 Mbit/s": LinkProfile(1e8), "30 Mbit/s": LinkProfile(3e7),
    "10 Mbit/s": LinkProfile(1e7), "100 Mbit/s, 50 ms": LinkProfile(1e8, 0.025),
    "30 Mbit/s, 150 ms": LinkProfile(3e7, 0.075),
}  # fmt: skip
BASE = (
    "+exp=lora_clm", "plan=show", "tracker=none",
    "model.lora=null", "model.own.num_texts=2000", f"model.own.num_layers={BLOCKS}",
    "model.own.num_heads=8", "model.own.num_kv_heads=4", "model.own.pretraining.steps=0",
    "task.max_length=64", "task.data.num_train=400", "task.data.num_dev=8", "task.data.num_test=8",
    "training.checkpoint.every_steps=0", "training.checkpoint.every_minutes=0", "compression=none",
)  # fmt: skip


class Size(NamedTuple):
    hidden: int
    feed_forward: int
    batch: int
    longest_s: float  # of a predicted step

    @property
    def settings(self) -> list[str]:
        return [f"model.own.hidden={self.hidden}", f"model.own.feed_forward={self.feed_forward}",
                f"training.batch_size={self.batch}"]  # fmt: skip


LARGE, SMALL = Size(384, 1024, 32, 2.0), Size(256, 512, 8, 0.5)


class Point(NamedTuple):
    line: str
    plan: Plan

    @property
    def name(self) -> str:
        plan, ends = self.plan, self.plan.ends
        cut = "whole" if len(ends) == 1 else f"{ends[0]}|{ends[1] - ends[0]}"
        m = plan.micro_batches
        label = next(name for name, make in SCHEDULES.items() if make(m) == plan.schedule)
        settings = f"m={m} {label} {plan.compression}"
        return f"{plan.strategy} {cut} {settings}, {self.line}"

    @property
    def half(self) -> str:
        odd = hashlib.sha256(self.name.encode()).digest()[0] % 2
        return "held out" if odd else "open"


class Result(NamedTuple):
    """at_speed_s: predicted at the machine's speed during the point. references_s: before the
    first attempt and after each."""

    point: Point
    predicted: Priced
    at_speed_s: float
    step_s: float
    references_s: list[float]

    def error(self, sort: str) -> float:
        return self.predicted_s(sort) / self.step_s - 1

    def predicted_s(self, sort: str) -> float:
        return self.at_speed_s if sort == AT_SPEED else self.predicted.step_s

    @property
    def is_steady(self) -> bool:
        return are_alike(*self.references_s[-2:])

    @property
    def steady_step_s(self) -> float:
        """What it would have taken at the trial's speed, so that plans can be compared."""
        return self.step_s * self.predicted.step_s / self.at_speed_s


class Bench:
    """sleeps: the blocks do (benchmarks/sleeping_blocks.py), so that a busy machine takes as long
    as a quiet one but for messages, compressors and the norm."""

    def __init__(self, size: Size, sleeps: bool = False) -> None:
        self.size, self.config = size, composed(*BASE, *size.settings)
        if sleeps:
            self.config.task = {"_target_": "tests.toy.ToyTask", "num_samples": 400}
            self.config.model = {
                "_target_": "benchmarks.sleeping_blocks.SleepingBlocks", "blocks": BLOCKS,
                "blocks_per_stage": None,
            }  # fmt: skip
        self.config.plan.strategies.local_updates.averaging.every = EVERY
        self.planner = Planner(Settings.of(self.config))
        self.cluster, self.strategies = self.planner.cluster, self.planner.arranged
        self.sleeps = sleeps
        before_s = self.reference_now_s()
        self.profile = self.planner.trial.measured()
        self.reference_s = (before_s + self.reference_now_s()) / 2

    def reference_now_s(self) -> float:
        return 1.0 if self.sleeps else reference_of_both_s()

    def pricer(self, line: LinkProfile, factor: float = 1.0) -> Pricer:
        """factor: of all seconds of work in the profile."""
        cluster = replace(self.cluster, wan=line)
        arranged = {
            name: Arranged(found.strategy, found.strategy.arrange(cluster))
            for name, found in self.strategies.items()
        }
        return Pricer(stretched(self.profile, factor), arranged, self.size.batch)

    def step_s(self, plan: Plan, line: LinkProfile) -> float:
        """Of a run: the median step, of ranks the mean (see steps_of_run). Where replicas average
        now and then, the mean over the places of a round."""
        config = self.config.copy()
        config.compression = config.plan.compressors[plan.compression]
        config.strategy = config.plan.strategies[plan.strategy]
        config.plan = None
        is_local = plan.strategy == "local_updates"
        warm_up = WARM_UP_LOCAL if is_local else WARM_UP
        config.training.max_steps = warm_up + TIMED
        config.cluster.wan.bandwidth_bits_per_s = line.bandwidth_bits_per_s
        config.cluster.wan.latency_s = line.latency_s
        config.schedule = as_settings(plan.schedule)
        if len(plan.ends) > 1:
            config.model.blocks_per_stage = [plan.ends[0]]
        with tempfile.TemporaryDirectory() as folder:
            steps_s = steps_of_run(config, Path(folder))
        every = EVERY if is_local else 1
        places = defaultdict[int, list[float]](list)
        for step, took_s in steps_s.items():
            if step > warm_up:
                places[step % every].append(took_s)
        return statistics.mean(map(statistics.median, places.values()))


def stretched(profile: Profile, factor: float) -> Profile:
    """With all seconds of work multiplied; lines stay."""

    def multiplied(value: Any, name: str = "") -> Any:
        is_time = name.endswith("_s") and name != "measured_at_s"
        if isinstance(value, dict) and "points" in value:
            return {"points": [[b, y * factor if is_time else y] for b, y in value["points"]]}
        if isinstance(value, dict):
            return {k: v if k == "lines" else multiplied(v, k) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [multiplied(entry) for entry in value]
        return value * factor if is_time else value

    return from_table("profile", Profile, multiplied(asdict(profile)))  # type: ignore[call-overload]


def reference_s(lasting_s: float = REFERENCE_S) -> float:
    """Median seconds of forward, backward and update of a small Transformer layer on one thread:
    how fast this machine is just now."""
    torch.set_num_threads(1)
    layer = torch.nn.TransformerEncoderLayer(256, 8, 512, dropout=0.0, batch_first=True)
    optimizer = torch.optim.AdamW(layer.parameters())
    hidden, found = torch.ones(4, 64, 256), list[float]()
    until_s = time.perf_counter() + lasting_s
    while time.perf_counter() < until_s:
        started_s = time.perf_counter()
        layer.zero_grad()
        layer(hidden).square().mean().backward()
        optimizer.step()
        found.append(time.perf_counter() - started_s)
    return statistics.median(found)


def steps_of_run(config: Any, run_dir: Path) -> dict[int, float]:
    """Run it without a word on stdout. Seconds of each step, as its summary counts them."""
    with contextlib.redirect_stdout(io.StringIO()):
        run(Settings.of(config), run_dir, more_follows=True)
    steps = read_run(run_dir / EVENTS_FILE).steps
    return dict(zip(steps.step, steps["step_s"], strict=True))


def reference_of_both_s() -> float:
    """`reference_s` in two processes at once, the mean."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(theirs, struct.pack("d", reference_s()))
        finally:
            os._exit(0)
    os.close(theirs)
    own_s = reference_s()
    with open(ours, "rb") as answer:
        (other_s,) = struct.unpack("d", answer.read())
    os.waitpid(child, 0)
    return (own_s + other_s) / 2


def are_alike(before_s: float, after_s: float) -> bool:
    return abs(after_s / before_s - 1) <= OFF_SPEED


def all_points() -> list[Point]:
    """In an order drawn once for all. Every fifth is without a pipeline."""
    pipelines = [
        Point(line, Plan("pipeline", (cut, BLOCKS), make(m), compression))
        for line, cut, m, (name, make), compression in product(
            LINES, (2, 3, 4), (1, 2, 4, 8), SCHEDULES.items(), COMPRESSORS
        )
        if name == "gpipe" or getattr(make(m), "num_in_flight", 0) < m
    ]
    others = [
        Point(line, Plan(strategy, (BLOCKS,), GPipe(m), compression))
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


def measure(bench: Bench, number: int, half: str) -> list[Result]:
    predicting = {name: bench.pricer(line) for name, line in LINES.items()}
    chosen: list[Point] = []
    for point in all_points():
        foreseen_s = predicting[point.line].step_s(point.plan)
        if foreseen_s <= bench.size.longest_s and half in ("both", point.half.replace(" ", "-")):
            chosen.append(point)
    if len(chosen) < number:
        print(
            f"{len(chosen)} points whose step is to take at most {bench.size.longest_s:g} s",
            flush=True,
        )
    del chosen[number:]
    random.shuffle(chosen)
    found = []
    reference = bench.reference_now_s()
    for point in chosen:
        priced = predicting[point.line].price(point.plan)
        line, references_s = LINES[point.line], [reference]
        while True:
            step_s = bench.step_s(point.plan, line)
            references_s.append(bench.reference_now_s())
            if are_alike(*references_s[-2:]) or len(references_s) > MAX_ATTEMPTS:
                break
        reference = references_s[-1]
        factor = statistics.mean(references_s[-2:]) / bench.reference_s
        at_speed_s = bench.pricer(line, factor).step_s(point.plan)
        found.append(Result(point, priced, at_speed_s, step_s, references_s))
        print(f"{found[-1].error(AS_PREDICTED):+7.1%} {found[-1].error(AT_SPEED):+7.1%} at x "
              f"{factor:.2f}  {step_s:.3f} s  {point.name}  ({point.half}; {priced.bound})"
              f"{'' if len(references_s) == 2 else f' attempt {len(references_s) - 1}'}",
              flush=True)  # fmt: skip
    return found


def tell(results: Sequence[Result]) -> Iterator[str]:
    for sort, half in product((AS_PREDICTED, AT_SPEED), ("open", "held out", "")):
        errors = [r.error(sort) for r in results if half in ("", r.point.half)]
        if errors:
            sizes = [abs(error) for error in errors]
            yield (
                f"{sort}, {half or 'all'}: {len(errors)} points, median error "
                f"{statistics.median(sizes):.1%}, worst {max(sizes):.1%}, "
                f"median with its sign {statistics.median(errors):+.1%}"
            )
    again = [r for r in results if len(r.references_s) > 2]
    yield (
        f"measured again because the machine changed its speed: {len(again)} points, of which "
        f"{sum(not r.is_steady for r in again)} were never steady"
    )
    for line in LINES:
        mine = [r for r in results if r.point.line == line]
        if len(mine) > 1:
            chosen = min(mine, key=lambda r: r.predicted.step_s)
            best, steady = (min(r.step_s for r in mine), min(r.steady_step_s for r in mine))
            yield (
                f"{line}: of {len(mine)} measured the planner's choice takes "
                f"{chosen.step_s / best:.3f} of the best, and "
                f"{chosen.steady_step_s / steady:.3f} with the drift of the machine taken out"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--points", type=int, default=64)
    parser.add_argument("--half", choices=("both", "open", "held-out"), default="both")
    parser.add_argument("--small", action="store_true", help="steps of a fifth of a second")
    parser.add_argument("--sleeping", action="store_true", help="on a busy machine, see Bench")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    written: dict[str, Any] = dict(ran_on())
    with mock.patch.object(launch, "start_process", warm_ranks.start):
        warm_ranks.import_first("transformers")
        try:
            bench = Bench(SMALL if given.small or given.sleeping else LARGE, given.sleeping)
            written["profile"] = dict(bench.profile.of)
            written["trial_reference_s"] = bench.reference_s
            results = measure(bench, given.points, given.half)
            written["points"] = [
                {"name": r.point.name, "half": r.point.half,
                 "error_as_predicted": r.error(AS_PREDICTED),
                 "error_at_speed": r.error(AT_SPEED),
                 "predicted_s": r.predicted.step_s, "predicted_at_speed_s": r.at_speed_s,
                 "measured_s": r.step_s, "references_s": r.references_s,
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
