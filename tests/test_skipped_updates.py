"""An update that all ranks skip leaves nothing behind in what compression remembers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategy_jobs import clouds
from tests.tied_toy import TiedToy
from tests.trainers import Rank, ranks, spoil, update
from xcloud.comm.compression import Compression
from xcloud.comm.compressor import Chain, Compressor
from xcloud.comm.low_rank import PowerSgd
from xcloud.comm.memory import DeltaCache, ErrorFeedback
from xcloud.comm.precision import BlockInt, Cast
from xcloud.comm.sparsify import TopK
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.features.replicas.merging import Median
from xcloud.job.strategy import Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.pipeline.hook import StepReport
from xcloud.pipeline.schedule import GPipe
from xcloud.pipeline.settings import Optimizer, Training

SKIP = Training(
    40, batch_size=12, optimizer=Optimizer(0.01, 1, clip_norm=1.0), on_divergence="skip"
)
COMPRESSORS: list[Compressor] = [
    TopK(0.1), BlockInt(8), Chain(powersgd=PowerSgd(2), fp16=Cast("bfloat16"))
]  # fmt: skip
PIPELINE = ClusterLayout({"a": Cloud(), "b": Cloud(), "c": Cloud()})


def averaged(delay: Any = 0, merge: Any = None) -> tuple[ClusterLayout, dict[str, Any]]:
    strategy = Strategy("hybrid", 3, GradientAveraging(delay=delay, merge=merge))
    return clouds(6), {"strategy": strategy}


JOBS: dict[str, tuple[ClusterLayout, dict[str, Any]]] = {
    "two stages, three replicas": averaged(),
    "two stages, three replicas, robust": averaged(merge=Median()),
    "tied ends": (PIPELINE, {"toy": TiedToy}),
}


def job_of(name: str, compression: Compression) -> list[Rank]:
    layout, options = JOBS[name]
    return ranks(layout, SKIP, compression, GPipe(3), **options)


def explode(job: list[Rank], step: int) -> list[StepReport]:
    """An update whose last stage has an infinite gradient in every replica, and whose first an
    enormous one in one of them."""
    last = max(stage for rank in job for stage in rank.trainer.pipeline.stages)
    first = next(r.trainer.pipeline.stages[0] for r in job if 0 in r.trainer.pipeline.stages)
    holders = [rank for rank in job if last in rank.trainer.pipeline.stages]
    hooks = [spoil([rank], last, math.inf) for rank in holders]
    for parameter in first.parameters():
        hooks.append(parameter.register_hook(lambda gradient: gradient * 1e20))
    reports = update(job, step)
    for hook in hooks:
        hook.remove()
    assert all(isinstance(report, StepReport) for report in reports), reports
    return [report for report in reports if isinstance(report, StepReport)]


def remembered(job: list[Rank]) -> dict[tuple[int, str], Tensor]:
    """Of all ranks, residuals and what memories keep of samples."""
    wanted = ("residual", "before", "after", "ids", "counts", "rows")
    return {
        (rank.number, key): value.clone()
        for rank in job
        for key, value in rank.state_dict().items()
        if isinstance(value, Tensor) and any(part in key.split(".") for part in wanted)
    }


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@pytest.mark.parametrize("name", JOBS)
def test_a_skipped_update_leaves_all_residuals_as_they_were(
    name: str, compressor: Compressor
) -> None:
    """Of the stage that is not finite, of the others, and of tied ends."""
    job = job_of(name, Compression(averaging=compressor))
    for step in (1, 2):
        update(job, step)
    before = remembered(job)
    assert before and all(report.skipped for report in explode(job, 3))
    after = remembered(job)

    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], kept) for key, kept in before.items())
    update(job, 4)
    assert any(not torch.equal(kept, before[key]) for key, kept in remembered(job).items())


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@pytest.mark.parametrize("merge", [None, Median()], ids=repr)
def test_no_later_message_carries_what_a_skipped_late_gradient_left_out(
    merge: Any, compressor: Compressor
) -> None:
    """The next gradient has been sent before all know that this one is skipped."""
    layout, options = averaged(delay=1, merge=merge)
    job = ranks(layout, SKIP, Compression(averaging=compressor), GPipe(3), **options)
    norms = []
    for step in range(1, 13):
        reports = explode(job, step) if step == 5 else update(job, step)
        (report, *_) = (r for r in reports if isinstance(r, StepReport))
        norms.append(math.inf if report.skipped else report.grad_norm or 0.0)

    assert [number for number, norm in enumerate(norms, 1) if norm == math.inf] == [6]
    assert max(norms[6:]) < 10 * max(norms[1:5])


def test_late_gradients_lose_nothing_on_their_way() -> None:
    """What was meant is what arrived and what is kept, though feedback comes an update later."""
    layout, options = averaged(delay=1)
    still = Training(20, batch_size=12, optimizer=Optimizer(1e-12, 1))
    lossy = ranks(layout, still, Compression(averaging=TopK(0.1)), GPipe(3), **options)
    exact = ranks(layout, still, schedule=GPipe(3), **options)

    def gradients(job: list[Rank]) -> Tensor:
        (rank, *_) = job
        return torch.cat([buffer.gradients for buffer in rank.trainer.buffers.values()]).double()

    arrived = meant = torch.zeros(1, dtype=torch.float64)
    for step in range(1, 21):
        update(lossy, step)
        update(exact, step)
        arrived = arrived + gradients(lossy)
        meant = meant + gradients(exact)
    assert float((arrived - meant).norm()) < 0.5 * float(meant.norm())


@pytest.mark.parametrize("memory", [ErrorFeedback, DeltaCache])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_skipped_update_leaves_the_memories_of_boundaries_as_they_were(
    direction: str, memory: Any
) -> None:
    """At both ends: a sample's exploding gradient would be in its next message else."""
    lossy: dict[str, Any] = {direction: BlockInt(4), f"{direction}_memory": memory()}
    job = ranks(PIPELINE, SKIP, Compression(**lossy, averaging=Chain()))
    for step in range(1, 5):
        update(job, step)
    before = remembered(job)
    assert before and all(report.skipped for report in explode(job, 5))
    after = remembered(job)

    assert before.keys() == after.keys()
    by_sample = [_by_sample(found) for found in (before, after)]
    assert by_sample[0].keys() == by_sample[1].keys()
    assert all(torch.equal(by_sample[1][key], kept) for key, kept in by_sample[0].items())


def _by_sample(found: dict[tuple[int, str], Tensor]) -> dict[tuple[int, str, int], Tensor]:
    """Samples may stand in another order."""
    rows = {}
    for (rank, key), ids in found.items():
        if key.endswith(".ids"):
            place = key.removesuffix(".ids")
            pieces = found[rank, f"{place}.rows"].split(found[rank, f"{place}.counts"].tolist())
            for sample, piece in zip(ids.tolist(), pieces, strict=True):
                rows[rank, place, sample] = piece
    return rows
