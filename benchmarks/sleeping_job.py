"""Jobs of stages that sleep, as real runs and as the planner sees them."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from benchmarks.sleeping_model import SAMPLE_BYTES, STAGE_BYTES, read_usage
from tests.toy import toy_config
from xcloud.base.settings import as_settings
from xcloud.job import config as configs
from xcloud.launch.local import run
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, ZeroBubble
from xcloud.pipeline.schedule import GPipe, Schedule
from xcloud.simulator.costs import (
    AveragingCodec,
    BoundaryCodec,
    CompressorCosts,
    Curve,
    DirectionCurves,
    ModelPiece,
    Profile,
)
from xcloud.simulator.plan import NO_COMPRESSION, Arranged, Plan, Priced
from xcloud.simulator.pricing import Pricer

WARM_UP, EVERY = 2, 3  # steps not counted; of local updates between merges
LINE = {
    "_target_": "xcloud.net.link_profile.LinkProfile",
    "bandwidth_bits_per_s": 1e8, "latency_s": 0.01,
}  # fmt: skip


class Job(NamedTuple):
    """clouds: ranks of each. in_flight: None = GPipe; in_memory: of zero bubble, None = 1F1B.
    batch: samples of an update."""

    clouds: Sequence[int]
    micro_batches: int
    batch: int
    in_flight: int | None = None
    in_memory: int | None = None
    strategy: str = "pipeline"
    sample_s: float = 5e-3
    line: Any = LINE

    @property
    def is_whole(self) -> bool:
        return self.strategy != "pipeline"

    @property
    def plan(self) -> Plan:
        num_stages = 2 if self.is_whole else len(self.clouds)
        ends = (num_stages,) if self.is_whole else tuple(range(1, num_stages + 1))
        return Plan(self.strategy, ends, self.schedule, NO_COMPRESSION)

    @property
    def schedule(self) -> Schedule:
        if self.in_flight is None:
            return GPipe(self.micro_batches)
        if self.in_memory is None:
            return OneForwardOneBackward(self.micro_batches, self.in_flight)
        return ZeroBubble(self.micro_batches, self.in_flight, self.in_memory)

    def config(self, steps: int) -> dict[str, Any]:
        cloud = "xcloud.layout.Cloud"
        clouds = {f"c{i}": {"_target_": cloud, "num_ranks": n} for i, n in enumerate(self.clouds)}
        cluster = {
            "_target_": "xcloud.layout.ClusterLayout", "clouds": clouds, "wan": self.line,
        }  # fmt: skip
        found = toy_config(
            cluster,
            [f"training.max_steps={steps}", f"training.batch_size={self.batch}",
             "training.evaluate_every=0", "training.checkpoint.every_steps=0",
             "training.checkpoint.every_minutes=0", "compression=none",
             f"strategy={self.strategy}"],
        )  # fmt: skip
        found["schedule"] = as_settings(self.schedule)
        found["task"] = {"_target_": "tests.toy.ToyTask", "num_samples": 4 * self.batch}
        found["model"] = {
            "_target_": "benchmarks.sleeping_model.SleepingModel", "sample_s": self.sample_s,
        }  # fmt: skip
        if self.strategy == "local_updates":
            found["strategy"]["averaging"]["every"] = EVERY  # type: ignore[index]
        return found

    def predicted(self) -> Priced:
        config = OmegaConf.create(self.config(1))
        job: Any = configs.Settings.of(config).job
        arranged = Arranged(job.strategy, job.cluster)
        profile = profile_of(self.plan.ends[-1], self.sample_s)
        return Pricer(profile, {self.strategy: arranged}, self.batch).price(self.plan)


def profile_of(num_stages: int, sample_s: float) -> Profile:
    """Of stages that sleep: nothing else takes time."""
    forward, backward = Curve([(1, sample_s)]), Curve([(1, 2 * sample_s)])
    num_bytes = Curve([(1, SAMPLE_BYTES)])
    deferred = Curve([(1, 2 * SAMPLE_BYTES)])
    pieces = [
        ModelPiece(
            f"stage {i}", forward, backward, 0 if i < num_stages - 1 else None, STAGE_BYTES,
            STAGE_BYTES, num_bytes, weights_s=forward, deferred_bytes=deferred,
        )
        for i in range(num_stages)
    ]  # fmt: skip
    boundary = BoundaryCodec(DirectionCurves(num_bytes), DirectionCurves(num_bytes))
    averaging = AveragingCodec(num_stages * STAGE_BYTES)
    return Profile(pieces, {NO_COMPRESSION: CompressorCosts("none", [boundary], averaging)})


class Measured(NamedTuple):
    """step_s: in rank 0. cpu_s: of a step, by rank. memory: of each rank, as the summary has it.
    threads, sockets: of rank 0 and of the last rank."""

    step_s: float
    ideal_s: float
    cpu_s: list[float]
    memory: list[dict[str, int]]
    predicted_bytes: list[int]
    threads: tuple[int, int]
    sockets: tuple[int, int]

    @property
    def peaks(self) -> list[int]:
        return [rank["peak"] for rank in self.memory]


def measure(job: Job, steps: int) -> Measured:
    priced = job.predicted()
    steps += WARM_UP + 1
    if job.strategy == "local_updates":  # whole rounds
        steps += -(steps - WARM_UP - 1) % EVERY
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        run_dir = Path(folder) / "run"
        summary = run(configs.Settings.of(job.config(steps)), run_dir)
        usages = [read_usage(run_dir, rank) for rank in range(sum(job.clouds))]
    # Micro-batches are dealt evenly to the ranks that hold a stage.
    holders = [sum(job.clouds)] * sum(job.clouds) if job.is_whole else [
        n for n in job.clouds for _ in range(n)
    ]  # fmt: skip
    own = [job.micro_batches // n for n in holders]
    return Measured(
        usages[0].step_s(own[0], WARM_UP),
        priced.step_s,
        [usage.cpu_of_step_s(n, WARM_UP) for usage, n in zip(usages, own, strict=True)],
        summary["memory"],
        list(priced.memory.values()),
        (usages[0].num_threads, usages[-1].num_threads),
        (usages[0].num_sockets, usages[-1].num_sockets),
    )
