"""Replicas of a pipeline over clouds, joined by the real wiring over links in memory."""

import math
from collections.abc import Sequence

import pytest
import torch

from tests.nightly import first_daily
from tests.trainers import Rank, clouds, ranks, spoil, update, values
from xcloud.base.errors import ReplicasDiffer
from xcloud.comm.compression import Compression
from xcloud.comm.compressor import Compressor
from xcloud.comm.low_rank import Svd
from xcloud.comm.precision import BlockInt, Cast
from xcloud.comm.sparsify import RandomK, TopK
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.features.replicas.merging import Median, TrimmedMean
from xcloud.features.replicas.outer_optimizer import OuterOptimizer
from xcloud.job.strategy import Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.frame import Kind
from xcloud.pipeline.batch_plan import BatchPlan
from xcloud.pipeline.schedule import GPipe
from xcloud.pipeline.settings import Optimizer, Training

DATA_PARALLEL = Strategy("data_parallel", None, GradientAveraging(check_every=1))
HYBRID = Strategy("hybrid", 2, GradientAveraging(check_every=1))
TRAINING = Training(9, batch_size=16, optimizer=Optimizer(0.05, 1, clip_norm=1.0))
ONE_BATCH = BatchPlan(16, 16, 1)
LOCAL = ClusterLayout({"local": Cloud(1, [0, 1])}, "free")


def train(job: Sequence[Rank], until_step: int = 4) -> list[list[float]]:
    """By update, the loss and the gradient's norm as the rank that tells the loss has them."""
    told = []
    for step in range(job[0].trainer.num_updates + 1, until_step + 1):
        reports = update(job, step)
        assert all(not isinstance(report, str) for report in reports), reports
        (one,) = (r for r in reports if r.loss is not None)
        told.append([one.loss or 0.0, one.grad_norm or 0.0])
    return told


def sent(job: Sequence[Rank], kind: Kind) -> list[tuple[int, int]]:
    """By rank: messages and bytes of this kind that it sent to other clouds."""
    stats = [rank.wiring.ends.records for rank in job]
    return [
        (sum(s.num_messages[kind] for s in own), sum(s.num_bytes[kind] for s in own))
        for own in stats
    ]


SHAPES = {
    "two clouds": (DATA_PARALLEL, clouds(2)),
    "three clouds": (DATA_PARALLEL, clouds(3)),
    "clouds of two ranks": (DATA_PARALLEL, clouds(2, 2)),
    "unequal clouds": (DATA_PARALLEL, clouds(2, (3, 2))),
    "two pipelines": (HYBRID, clouds(4)),
    "two pipelines of two lanes": (HYBRID, clouds(4, 2)),
    "U-shape twice": (
        HYBRID,
        ClusterLayout(
            {
                "a": Cloud(1, [0, 2]), "b": Cloud(1, [1]),
                "c": Cloud(1, [0, 2], replica=1), "d": Cloud(1, [1], replica=1),
            }
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_replicas_train_what_one_process_trains(shape: str) -> None:
    strategy, layout = SHAPES[shape]
    schedule = GPipe(8)
    stages = strategy.arrange(layout).num_stages
    local = ClusterLayout({"local": Cloud(1, list(range(stages)))}, "free")
    expected_job = ranks(local, TRAINING, schedule=schedule)
    expected = train(expected_job)
    job = ranks(layout, TRAINING, schedule=schedule, strategy=strategy)

    torch.testing.assert_close(train(job), expected, rtol=1e-5, atol=1e-6)
    for stage in range(stages):
        (reference,) = values(expected_job, stage)
        for found in values(job, stage):
            torch.testing.assert_close(found, reference, rtol=1e-5, atol=1e-5)
    if strategy is DATA_PARALLEL:
        assert all(count == 0 for count, _ in sent(job, Kind.NORM))


def test_two_micro_batches_on_two_clouds_give_the_same_bits_as_in_one_process() -> None:
    """More are added in another order."""
    expected_job = ranks(LOCAL, TRAINING)
    job = ranks(clouds(2), TRAINING, strategy=DATA_PARALLEL)

    assert train(job) == train(expected_job)
    for stage in (0, 1):
        (reference,) = values(expected_job, stage)
        assert all(torch.equal(found, reference) for found in values(job, stage))


COMPRESSORS: list[Compressor] = [
    Cast("bfloat16"), BlockInt(4), BlockInt(8, stochastic=True), TopK(0.1), RandomK(0.3), Svd(0.4)
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "shape", first_daily(["two pipelines of two lanes", "three clouds"], count=1)
)
def test_replicas_stay_equal_bit_for_bit_with_any_compressor(shape: str) -> None:
    strategy, layout = SHAPES[shape]
    for compressor in COMPRESSORS:
        compression = Compression(backward=BlockInt(8), averaging=compressor)
        job = ranks(layout, TRAINING, compression, GPipe(8), ONE_BATCH, strategy)
        first, *_, last = train(job, 4)  # compares digests after every update

        assert last[0] < first[0]
        for stage in (0, 1):
            found = values(job, stage)
            assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_difference_between_replicas_names_stage_and_rank() -> None:
    job = ranks(clouds(3), TRAINING, schedule=GPipe(3), strategy=DATA_PARALLEL)
    train(job, 1)
    bias = next(iter(job[2].trainer.pipeline.stages[1].parameters()))
    bias.data[0] += 1e-7

    with pytest.raises(ReplicasDiffer, match=r"after update 2 .* stage 1 differ .* of cloud 'c"):
        train(job, 2)


def test_bytes_across_are_per_cloud_and_messages_per_update() -> None:
    counted = {}
    for name, (lanes, passes) in {"alone": (1, 1), "two": (2, 1), "accumulated": (2, 3)}.items():
        training = Training(9, batch_size=24, accumulate_steps=passes)
        quiet = Strategy("data_parallel", None, GradientAveraging(check_every=0))
        job = ranks(clouds(2, lanes), training, schedule=GPipe(4), strategy=quiet)
        before = sent(job, Kind.AVERAGING)  # digests
        train(job, 2)
        after = sent(job, Kind.AVERAGING)
        counted[name] = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(after, before, strict=True)]

    assert [num for num, _ in counted["alone"]] == [2, 2]  # one for each update, of all stages
    assert [num for num, _ in counted["two"]] == [2] * 4
    assert counted["two"] == counted["accumulated"]
    alone, two = (sum(size for _, size in counted[name]) for name in ("alone", "two"))
    assert (
        two - alone < 2 * 2 * 2 * 200
    )  # frames' headers and a second loss; the values are shared
    per_rank = [size for _, size in counted["two"]]
    assert max(per_rank) < 1.2 * min(per_rank)


def test_a_late_gradient_is_that_of_the_update_before() -> None:
    late = Strategy("data_parallel", None, GradientAveraging(delay=1, check_every=2))
    plain = Training(9, batch_size=16, optimizer=Optimizer(1e-30, 1))  # nothing moves
    expected = train(ranks(clouds(2), plain, strategy=DATA_PARALLEL), 5)
    job = ranks(clouds(2), plain, strategy=late)
    assert train(job, 5)[1:] == expected[:-1]

    moving = ranks(clouds(2), TRAINING, TOPK, plan=ONE_BATCH, strategy=late)
    told = train(moving, 8)
    assert told[-1][0] < told[1][0] and told[0][1] == 0.0
    assert all(torch.equal(*values(moving, stage)) for stage in (0, 1))


TOPK = Compression(averaging=TopK(0.1))


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_is_left_out_by_all_replicas_and_spoils_no_feedback(
    clip_norm: float,
) -> None:
    optimizer = Optimizer(0.05, 1, clip_norm=clip_norm)
    training = Training(9, batch_size=16, optimizer=optimizer, on_divergence="skip")
    job = ranks(clouds(2), training, TOPK, strategy=DATA_PARALLEL)
    train(job, 1)
    before = values(job, 0)
    hook = spoil([job[1]], 0, math.inf)
    reports = update(job, 2)
    hook.remove()

    assert all(not isinstance(r, str) and r.skipped is not None for r in reports)
    assert all(torch.equal(a, b) for a, b in zip(before, values(job, 0), strict=True))
    told = [update(job, step) for step in range(3, 9)]
    assert all(not isinstance(r, str) and r.skipped is None for reports in told for r in reports)
    assert torch.equal(*values(job, 0))


def test_one_local_step_with_plain_sgd_would_be_an_averaged_gradient() -> None:
    """Each replica's loss is divided by the weight of its own samples."""
    outer = OuterOptimizer(1.0, 0.0, False)
    job = ranks(
        clouds(2), TRAINING, plan=ONE_BATCH, strategy=Strategy("local_updates", None,
        LocalUpdates(every=1, outer=outer)),
    )  # fmt: skip
    told = update(job, 1)
    (expected,) = update(ranks(LOCAL, TRAINING, plan=ONE_BATCH), 1)

    losses = [r.loss for r in told if not isinstance(r, str) and r.loss is not None]
    assert not isinstance(expected, str) and expected.loss is not None
    assert sum(losses) / len(losses) == pytest.approx(expected.loss, rel=1e-5)


def test_a_cloud_whose_gradients_are_wrong_is_outvoted() -> None:
    moved_up = {}
    for merge in (None, Median(), TrimmedMean()):
        strategy = Strategy("data_parallel", None, GradientAveraging(merge=merge))
        job = ranks(clouds(3), PLAIN, None, GPipe(3), BatchPlan(18, 18, 1), strategy)
        bias = [rank.trainer.pipeline.stages[0].layer.bias for rank in job]  # type: ignore
        before = bias[0].detach().clone()
        spoil([job[2]], 0, -1e3)
        train(job, 5)
        moved_up[repr(merge)] = float((bias[0] > before).float().mean())
        assert all(torch.equal(bias[0], other) for other in bias[1:])

    led, *outvoted = moved_up.values()
    assert led == 1.0 > max(outvoted)


PLAIN = Training(12, batch_size=18, optimizer=Optimizer(0.05, 1))


def test_a_strategy_says_its_settings_and_its_replicas() -> None:
    averaging = GradientAveraging(delay=1, feedback=False)
    assert averaging.label == "one update late, without feedback"
    said = "data_parallel (one update late, without feedback)"
    strategy = Strategy("data_parallel", None, averaging)
    two = ClusterLayout({name: Cloud(1, [0], replica=k) for k, name in enumerate("ab")}, "free")
    assert strategy.describe(two) == f"{said}, 2 replicas"
    one = ClusterLayout({"a": Cloud(1, [0])}, "free")
    assert strategy.describe(one) == f"{said} (one replica, so nothing is averaged)"
    assert Strategy("pipeline").describe(one) == "pipeline"
