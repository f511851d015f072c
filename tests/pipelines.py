"""A toy split model and its pipelines in threads of one process, for tests without networks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from xcloud.comm.channel import Boundary, BoundaryField, Message, ReceiveChannel
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import PerBoundary, Phased, Selectable
from xcloud.comm.compressor import Chain, Compressor
from xcloud.comm.memory import Memory, NoMemory
from xcloud.comm.step_clock import StepClock
from xcloud.contracts.model import Batch, Stage, StageOutput
from xcloud.experiment import Experiment
from xcloud.features.activation_cache.cache import (
    ActivationCaches,
    CachingPipeline,
    activation_caches,
)
from xcloud.job.job import PipelineJob, Roster
from xcloud.layout import ClusterLayout
from xcloud.net.frame import Frame
from xcloud.net.memory_transport import MemoryWorld
from xcloud.pipeline.ends import Ends
from xcloud.pipeline.pipeline import Pipeline
from xcloud.pipeline.schedule import GPipe, Schedule
from xcloud.pipeline.wiring import Wiring, wire
from xcloud.security.defences import Defence
from xcloud.security.policy import Visibility

D = 8
CPU = torch.device("cpu")
BORDER = Boundary(
    (
        BoundaryField("counts", (), torch.int16),
        BoundaryField("hidden", (D,), torch.float32, "counted"),
    ),
    max_rows_per_sample=5,
)


class ToyStage(Stage):
    """Stage 0 embeds "x" [B, D] once per row, the last one compares with "y" [B, D]."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(stage)
            self.layer = nn.Linear(D, D)

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        if self.is_first:
            counts = (batch["ids"] % 4 + 1).to(torch.int16)
            rows = batch["x"].repeat_interleave(counts.long(), 0)
        else:
            assert received is not None
            counts, rows = received["counts"], received["hidden"]
        hidden = torch.tanh(self.layer(rows))
        if not self.is_last:
            return StageOutput(send={"counts": counts, "hidden": hidden})
        target = batch["y"].repeat_interleave(counts.long(), 0)
        return StageOutput(loss=((hidden - target) ** 2).sum())

    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        assert received is not None
        return [[int(n)] for n in received["counts"]]


def samples(ids: Tensor) -> Batch:
    """x and y of a sample depend on its id alone."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(2, 100, D, generator=generator)
    return {"ids": ids, "x": table[0, ids], "y": table[1, ids]}


@dataclass
class Wired:
    """One rank: what joins it to the others, and its clock."""

    wiring: Wiring
    clock: StepClock
    caches: ActivationCaches


def wired_job(
    layout: ClusterLayout,
    boundaries: Mapping[int, Boundary],
    compression: Compression | Phased | PerBoundary | Selectable,
    schedule: Schedule,
    max_samples: int,
    seed: int = 1,
    **more: Any,
) -> Experiment:
    """What `wire` reads of an experiment."""
    known = {
        "cluster": layout, "boundaries": dict(boundaries), "compression": compression,
        "schedules": [schedule], "max_micro_batch": max_samples, "seed": seed,
        "security": Visibility(),
        "roster": Roster(frozenset(), frozenset()),
    }  # fmt: skip
    job = SimpleNamespace(**(known | more))
    job.defences_at = partial(PipelineJob.defences_at, job)
    return cast(Experiment, job)


def wired(
    layout: ClusterLayout,
    boundaries: Mapping[int, Boundary],
    compression: Compression | Phased | PerBoundary | Selectable,
    *,
    schedule: Schedule = GPipe(16),  # noqa: B008
    defences: Mapping[str, Defence] | None = None,
    max_samples: int = 100,
    record_from: int | None = None,
    seed: int = 7,
    on_report: Callable[[int, Frame], None] = lambda peer, frame: None,
    run_dir: Path = Path("no file is written"),
    kept_bytes: int = 0,
) -> list[Wired]:
    """Every rank of a job, as `wire` joins it, over links in memory. schedule: its bounds hold for
    any with as many micro-batches under way. record_from: as of StepClock."""
    world = MemoryWorld()
    job = wired_job(
        layout, boundaries, compression, schedule, max_samples, seed,
        security=Visibility(defences=cast(Any, defences or {})),
    )  # fmt: skip

    def one(rank: int) -> Wired:
        clock = StepClock(record_from)
        ends = Ends(world.transport(rank), layout, run_dir, clock.messages)
        caches = activation_caches(layout, boundaries, rank, kept_bytes)
        wiring = wire(job, ends, clock, CPU, on_report, partial(caches.receiver, ReceiveChannel))
        return Wired(wiring, clock, caches)

    return in_threads([lambda r=rank: one(r) for rank in range(layout.num_ranks)])


def pipelines(
    layout: ClusterLayout,
    forward: Compressor | None = None,
    backward: Compressor | None = None,
    boundary: Boundary = BORDER,
    record_from: int | None = None,
    *,
    boundaries: Mapping[int, Boundary] | None = None,
    stages: Mapping[int, Stage] | None = None,
    memory: Memory | None = None,
    defences: Mapping[str, Defence] | None = None,
) -> list[Pipeline]:
    """One pipeline per rank, joined by in-process links. record_from: as of StepClock.
    stages, with the boundaries behind them: instead of the toy's (one boundary for all).
    memory: of both directions.
    """
    if boundaries is None:
        boundaries = dict.fromkeys(range(layout.num_stages - 1), boundary)
    memory = memory or NoMemory()
    compression = Compression(forward or Chain(), backward or Chain(), memory, memory)
    ranks = wired(layout, boundaries, compression, record_from=record_from, defences=defences)
    return [pipeline(one, layout, stages) for one in ranks]


def pipeline(
    one: Wired, layout: ClusterLayout, stages: Mapping[int, Stage] | None = None
) -> Pipeline:
    """Of one rank, with the toy's stages or others."""
    rank = one.wiring.ends.rank
    held = layout.placement(rank).stages
    modules = {s: stages[s] if stages else ToyStage(s, layout.num_stages) for s in held}
    boundaries = one.wiring.boundaries
    return CachingPipeline(one.caches, rank, layout, modules, boundaries.ports, CPU, 7, one.clock)


@contextmanager
def heartbeat(interval_s: float, beat: Callable[[], object]) -> Iterator[None]:
    """Call beat() in the background every interval_s seconds while the block lasts."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(interval_s):
            beat()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run all at once, as ranks do; the first failure is raised."""
    results: list[Any] = [RuntimeError("did not end")] * len(calls)

    def work(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class TiedToy(ToyStage):
    """The same matrix stands before the first stage and behind the last."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage, num_stages)
        draw = torch.Generator().manual_seed(9)
        self.words = None
        if self.is_first or self.is_last:
            self.words = nn.Parameter(torch.randn(D, D, generator=draw) / 3)

    def tied(self) -> nn.Parameter | None:
        return self.words

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        if self.is_first:
            assert self.words is not None
            batch = {**batch, "x": batch["x"] @ self.words}
        if self.is_last:
            assert self.words is not None and received is not None
            received = {**received, "hidden": received["hidden"] @ self.words.T}
        return super().forward(received, batch)
