"""How far the simulator is from real runs, and how fast it is.

    python -m benchmarks.bench_simulator [--steps 24] [--json FILE] [--speed-only] [key=value ...]

Real runs of a small pipeline (stages that mostly sleep, so that a busy machine changes little)
over emulated links. Each run's recorded step is read back as costs and simulated (replay), and is
predicted from the averaged costs of the first run, over a free line, with the layout's own link
(forecast). Errors are of the recorded step's time. key=value are overrides of every run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.machine import say_where
from benchmarks.paper_step import UniformCosts, simulate
from tests.toy import toy_config
from xcloud.job.config import EXPERIMENT_FILE, Settings
from xcloud.job.given import read_settings
from xcloud.job.strategy import Strategy
from xcloud.launch.local import run
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.link_profile import LinkProfile
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, ZeroBubble
from xcloud.pipeline.schedule import GPipe
from xcloud.planner.search import Space, search, splits_of
from xcloud.record.events import EVENTS_FILE, EventReader
from xcloud.record.timeline import timeline_of
from xcloud.simulator.costs import (
    BoundaryCodec,
    CompressorCosts,
    Costs,
    Curve,
    DirectionCurves,
    ModelPiece,
    Profile,
)
from xcloud.simulator.measured import measured_costs
from xcloud.simulator.plan import NO_COMPRESSION, Arranged, Plan
from xcloud.simulator.prediction import Prediction, Simulator
from xcloud.simulator.pricing import Pricer

FREE_LINE = ("free", 1e10, 0.0)
LINES = [FREE_LINE, ("30 Mbit/s", 30e6, 0.0), ("10 Mbit/s, 20 ms", 10e6, 0.01),
         ("100 Mbit/s, 100 ms", 100e6, 0.05)]  # fmt: skip
SCHEDULES = ("gpipe", "one_forward_one_backward")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--speed-only", action="store_true")
    parser.add_argument("override", nargs="*", help="key=value")
    a = parser.parse_args()
    say_where()
    results: dict[str, Any] = {"speed": speed()}
    if not a.speed_only:
        results["runs"] = compare(a.steps, a.override)
    if a.json:
        a.json.write_text(json.dumps(results, indent=2) + "\n")


def compare(steps: int, overrides: list[str]) -> list[dict[str, Any]]:
    print(f"\n{'line':>20} {'schedule':>26} | step s | replay | forecast | bound")
    rows, known = [], None
    for name, rate, latency_s in LINES:
        for schedule in SCHEDULES:
            found = measure(schedule, rate, latency_s, steps, overrides)
            if known is None:
                known = found["costs"]
            forecast = predict(found, known)
            errors = [p.step_s / found["step_s"] - 1 for p in (found["replay"], forecast)]
            print(
                f"{name:>20} {schedule:>26} | {found['step_s']:.4f} | {100 * errors[0]:+5.1f} % | "
                f"{100 * errors[1]:+6.1f} % | {next(iter(found['replay'].critical_s))}",
                flush=True,
            )
            rows.append({"line": name, "schedule": schedule, "step_s": found["step_s"],
                         "replay_error": errors[0], "forecast_error": errors[1]})  # fmt: skip
    return rows


def measure(
    schedule: str, rate: float, latency_s: float, steps: int, overrides: list[str]
) -> dict[str, Any]:
    config = toy_config(
        "two_clouds",
        ["cluster/wan=office_100m", f"cluster.wan.bandwidth_bits_per_s={rate}",
         f"cluster.wan.latency_s={latency_s}", f"schedule={schedule}",
         "schedule.num_micro_batches=8", f"training.max_steps={steps}", "training.batch_size=32",
         "training.evaluate_every=0", *overrides],
    )  # fmt: skip
    config["model"] |= {"hidden": 128, "step_s": 0.01}  # type: ignore[operator]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        run_dir = Path(folder) / "run"
        run(Settings.of(config), run_dir)
        timeline = timeline_of(EventReader(run_dir / EVENTS_FILE))
        assert timeline is not None
        experiment = read_settings(run_dir / EXPERIMENT_FILE).job
    costs = measured_costs(timeline)
    found = {
        "step_s": 1e-6 * max(lane.until_us - lane.from_us for lane in timeline.lanes),
        "experiment": experiment,
        "costs": costs,
    }
    return found | {"replay": predict(found, costs)}


def predict(found: dict[str, Any], costs: Costs) -> Prediction:
    experiment = found["experiment"]
    return simulate(
        experiment.schedule, experiment.cluster, costs, agrees=True,
        num_passes=experiment.training.accumulate_steps, num_steps=3,
    )  # fmt: skip


def speed(is_quick: bool = False) -> dict[str, float]:
    """Simulations a second by stages and micro-batches, seconds of large clusters and of a search.
    is_quick: the smallest of each."""
    costs = UniformCosts(1.0, 2.0, 0.5, 0.1)
    found = {}
    print(f"\n{'stages':>7} {'m':>4} {'schedule':>10} | simulations a second | from scratch")
    sizes = [(2, 16)] if is_quick else list(product((2, 4, 8, 16), (4, 16, 64)))
    schedules: tuple[type[GPipe] | type[OneForwardOneBackward], ...]
    schedules = (GPipe, OneForwardOneBackward)
    for (p, m), kind in product(sizes, schedules):
        layout, schedule = _clouds(p, 1), kind(m)
        simulator = Simulator(schedule, layout)
        again = _per_s(lambda s=simulator: s.run(costs).step_s)  # type: ignore[misc]
        anew = _per_s(lambda a=layout, b=schedule: simulate(b, a, costs).step_s)  # type: ignore[misc]
        name = "GPipe" if kind is GPipe else "1F1B"
        print(f"{p:>7} {m:>4} {name:>10} | {again:>20,.0f} | {anew:>12,.0f}", flush=True)
        found |= {f"{p} stages, m={m}, {name}": again, f"{p} stages, m={m}, {name} anew": anew}
    for clouds, ranks, m in ((64, 1, 256), (64, 32, 256), (64, 64, 256))[: 1 if is_quick else 3]:
        started_s = time.perf_counter()
        built = Simulator(OneForwardOneBackward(m), _clouds(clouds, ranks))
        built_s = time.perf_counter() - started_s
        built.run(costs).step_s  # noqa: B018
        took_s = time.perf_counter() - started_s - built_s
        name = f"{clouds} clouds x {ranks} ranks, m={m}"
        print(f"{name}: {built_s:.2f} s to build, {took_s:.2f} s to simulate, "
              f"{len(built.transfers):,} messages", flush=True)  # fmt: skip
        found[name] = took_s
    for blocks, rate in ((12, 1e9),) if is_quick else ((22, 1e9), (48, 1e9), (12, 3e7)):
        found |= search_speed(blocks, rate)
    return found


def search_speed(blocks: int, rate: float) -> dict[str, float]:
    """Of all plans of a model of so many blocks in four clouds, with 0.03 s a block and sample,
    and 1 MB a sample and boundary, or an eighth of it in INT4. rate: bits per second of each line;
    of 1e9 computing bounds a step, of 3e7 the line, where INT4 is not used."""
    piece = ModelPiece(
        "block", Curve([(1, 0.01)]), Curve([(1, 0.02)]), 0, 4000, 4000, Curve([(1, 1e6)]), 0.001, 1
    )
    way = DirectionCurves(Curve([(1, 1e6)]))
    small = DirectionCurves(Curve([(1, 1.3e5)]), Curve([(1, 1e-3)]), Curve([(1, 1e-3)]))
    compressors = {
        NO_COMPRESSION: CompressorCosts("none", [BoundaryCodec(way, way)]),
        "int4": CompressorCosts("int4", [BoundaryCodec(small, small)]),
    }
    pieces = [*[piece] * (blocks - 1), replace(piece, boundary=None)]
    clouds = replace(_clouds(4, 1), wan=LinkProfile(rate, 0.01))
    arranged = {"pipeline": Arranged(Strategy(), clouds)}
    counts = (4, 8, 16, 32, 64)
    pricer = Pricer(Profile(pieces, compressors), arranged, 64)
    splits = splits_of(pieces, 4, max_splits=100_000)
    space = Space(
        Plan("pipeline", splits[0], GPipe(8), NO_COMPRESSION), {"pipeline": splits}, counts,
        [*compressors], ("split", "micro_batches", "schedule", "compression"),
        [GPipe(), OneForwardOneBackward(), ZeroBubble()],
    )  # fmt: skip
    started_s = time.perf_counter()
    ranked = search(pricer, space, 5)
    took_s = time.perf_counter() - started_s
    line = f"{rate / 1e6:g} Mbit/s"
    print(f"search over {ranked.num_plans:,} plans of {blocks} blocks in 4 clouds, {line}: "
          f"{took_s:.2f} s, {ranked.num_simulated:,} simulated", flush=True)  # fmt: skip
    return {f"search over {ranked.num_plans} plans, {line}": took_s}


def _clouds(count: int, ranks: int) -> ClusterLayout:
    return ClusterLayout({f"c{i}": Cloud(ranks) for i in range(count)}, "free")


def _per_s(once: Any, at_least_s: float = 0.5) -> float:
    started_s, num = time.perf_counter(), 0
    while time.perf_counter() - started_s < at_least_s:
        once()
        num += 1
    return num / (time.perf_counter() - started_s)


if __name__ == "__main__":
    main()
