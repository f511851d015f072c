"""Robust merges bound what one bad replica can do, and are right if all are honest."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tests.trainers
from tests.combinations import experiment
from tests.nightly import each_once
from tests.pipelines import D
from tests.replicas import averagers, connected, exchange, same_bits
from tests.trainers import Rank, clouds, ranks, spoil, update, values
from xcloud.base.errors import ConfigError, FrameError
from xcloud.comm.compression import Compression
from xcloud.comm.compressor import Chain
from xcloud.comm.sparsify import TopK
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.contracts.model import Batch
from xcloud.features.replicas.averaging import AllToAll, Averager, Terms, averager_for
from xcloud.features.replicas.feature import replicas_exchange
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.features.replicas.late import LatePolicy, Skip, Wait
from xcloud.features.replicas.local_updates import LocalRounds, LocalUpdates
from xcloud.features.replicas.merging import (
    Contribution,
    Median,
    Merge,
    NormBound,
    Robust,
    TrimmedMean,
    by_rows,
    joined,
    weighted_mean,
    weighted_sum,
)
from xcloud.features.replicas.outer_optimizer import OuterOptimizer
from xcloud.features.replicas.replicas import Replicas
from xcloud.job.strategy import Averaging, Strategy
from xcloud.layout import ClusterLayout
from xcloud.net.frame import MessageKey, Tensors
from xcloud.pipeline.batch_plan import BatchPlan, cut, samples_of_replica
from xcloud.pipeline.hook import StepReport
from xcloud.pipeline.schedule import GPipe
from xcloud.pipeline.settings import Optimizer, Training
from xcloud.record.reporter import Reporter

ROBUST = [Median(), TrimmedMean(), TrimmedMean(0.4), NormBound(1.5)]
TRUTH = torch.randn(4000, generator=torch.Generator().manual_seed(0))


def honest(seed: int) -> list[Tensor]:
    """What a good replica tells: the truth and some noise."""
    generator = torch.Generator().manual_seed(seed)
    values = TRUTH + 0.3 * torch.randn(4000, generator=generator)
    return [values[:1000].view(50, 20), values[1000:]]


def bad(kind: str) -> list[Tensor]:
    tensors = honest(9)
    if kind == "NaN":
        tensors[0][3, 3] = math.nan
        return tensors
    return [t * {"huge": 1e6, "flipped": -10.0}[kind] for t in tensors]


def distance(tensors: list[Tensor]) -> float:
    """From the truth, relative."""
    return float((torch.cat([t.flatten() for t in tensors]) - TRUTH).norm() / TRUTH.norm())


@pytest.mark.parametrize("merge", ROBUST, ids=repr)
def test_one_bad_replica_does_not_move_a_robust_merge_far(merge: Robust) -> None:
    for num_replicas in (3, 5):
        good = [Contribution(honest(r), 1.0) for r in range(num_replicas - 1)]
        without = distance(weighted_mean(good))
        for kind in ("huge", "flipped", "NaN"):
            for place in (0, num_replicas - 1):
                everybody = [*good[:place], Contribution(bad(kind), 1.0), *good[place:]]
                # A bound on the norm lets the bad one pull with 1.5 norms of R.
                most = without + (2.6 / num_replicas if isinstance(merge, NormBound) else 0.4)
                assert distance(merge(everybody)) < most, (num_replicas, kind)
                assert not distance(weighted_mean(everybody)) < 1.5 * most


def test_where_all_are_good_the_cost_is_the_variance_that_is_stated() -> None:
    for num_replicas, median, trimmed in ((3, 1.35, 1.35), (5, 1.43, 1.14)):
        noise = [honest(r) for r in range(num_replicas)]
        good = [Contribution(tensors, 1.0) for tensors in noise]
        mean = distance(weighted_mean(good)) ** 2
        assert distance(Median()(good)) ** 2 / mean == pytest.approx(median, rel=0.05)
        assert distance(TrimmedMean()(good)) ** 2 / mean == pytest.approx(trimmed, rel=0.05)
        assert distance(NormBound(1.5)(good)) ** 2 == pytest.approx(mean)


def test_robust_merges_of_few_values_are_what_they_say() -> None:
    def of(merge: Robust, *values: float, weights: tuple[float, ...] = ()) -> float:
        (found,) = merge(
            [
                Contribution([torch.tensor([value])], weight)
                for value, weight in zip(values, weights or (1.0,) * len(values), strict=True)
            ]
        )
        return float(found)

    assert of(Median(), 5.0, 1.0, 2.0) == 2.0
    assert of(Median(), 5.0, 1.0, 2.0, 4.0) == 3.0
    assert of(Median(), 5.0, math.inf, 2.0) == 3.5
    assert of(Median(), 5.0, 1.0, 2.0, weights=(1.0, 0.0, 1.0)) == 3.5
    assert of(TrimmedMean(0.2), 5.0, 1.0, 2.0, 100.0, 3.0) == pytest.approx(10 / 3)
    assert of(NormBound(1.0), 3.0, -3.0, 300.0, weights=(1.0, 1.0, 2.0)) == pytest.approx(
        1.5, rel=1e-3
    )
    assert math.isnan(of(Median(), math.nan, 1.0, math.nan))
    assert math.isnan(of(Median(), math.nan, 1.0))
    assert of(NormBound(), 0.0, 0.0, 0.0) == 0.0


def test_sum_and_mean_hide_nothing_and_use_weights() -> None:
    contributions = [Contribution([torch.tensor([2.0])], 1.0), Contribution([torch.ones(1)], 3.0)]
    assert float(weighted_sum(contributions)[0]) == 5.0
    assert float(weighted_mean(contributions)[0]) == 1.25
    assert math.isnan(float(weighted_mean([Contribution([torch.ones(1)], 0.0)])[0]))
    contributions.append(Contribution([torch.tensor([math.nan])], 1.0))
    assert math.isnan(float(weighted_mean(contributions)[0]))


def test_replicas_with_a_robust_merge_are_equal_and_two_are_too_few() -> None:
    shapes = {str(i): tensor.shape for i, tensor in enumerate(honest(0))}

    def codec() -> TensorCodec:
        return TensorCodec(shapes, lambda name, shape: Chain(), 1, True)

    for merge in ROBUST:
        tensors = [honest(0), bad("NaN"), honest(2)]
        replicas = averagers(3, lambda mail, m=merge: AllToAll(mail, codec(), Terms(m)))
        found = exchange(replicas, 1, tensors)
        assert same_bits(found) and distance(found[0]) < 1.0
    with pytest.raises(ConfigError, match=r"Median\(\) needs 3 replicas or more.*got 2"):
        Median().check(2)
    with pytest.raises(ConfigError, match=r"TrimmedMean.share must be a number in \[0, 0.5\]"):
        TrimmedMean(0.6)
    with pytest.raises(ConfigError, match=r"NormBound.factor must be a number in \[1, inf\)"):
        NormBound(0.5)


@settings(max_examples=80, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=6),
    num_parts=st.integers(1, 7),
)
def test_parts_are_about_equal_and_make_the_whole(shapes: list[list[int]], num_parts: int) -> None:
    named = {f"t{i}": torch.Size(shape) for i, shape in enumerate(shapes)}
    tensors = [torch.randn(shape) for shape in named.values()]
    parts = by_rows(named, num_parts)
    found = [(piece, piece.of(tensors)) for part in parts for piece in part]

    assert all(piece.shape == tensor.shape for piece, tensor in found)
    assert len({piece.name for piece, _ in found}) == len(found)
    again = joined(found, len(named))
    assert all(torch.equal(a, b) for a, b in zip(again, tensors, strict=True))
    total = sum(t.numel() for t in tensors)
    widest = max(t.numel() // max(1, t.shape[0] if t.dim() else 1) for t in tensors)
    for part in parts:
        assert sum(piece.shape.numel() for piece in part) <= total / num_parts + 2 * widest


BOUNDED: list[Robust] = [Median(), TrimmedMean(0.2), NormBound(2.0)]
MEAN = OuterOptimizer(1.0, 0.0, False)
STILL = Training(9, batch_size=24, optimizer=Optimizer(1e-9, 1))  # nothing moves


def reports_of(job: Sequence[Rank], step: int) -> list[StepReport]:
    found = update(job, step)
    assert all(isinstance(report, StepReport) for report in found), found
    return [report for report in found if isinstance(report, StepReport)]


def gradient(rank: Rank) -> Tensor:
    return torch.cat([buffer.gradients for buffer in rank.trainer.buffers.values()]).clone()


def strategy_of(averaging: Averaging, num_replicas: int | None = None) -> Strategy:
    return Strategy("robust", num_replicas, averaging)


# --- a bad cloud


def averagers_of(rank: Rank) -> list[Averager]:
    held = rank.trainer.exchange
    if isinstance(held, LocalRounds):
        return [fragment.averager for fragment in held.fragments]
    return [held.averager]  # type: ignore[attr-defined]


@dataclass
class Merges:
    """What an honest rank gave to its averagers and got of them, in order, as vectors."""

    given: list[Tensor] = field(default_factory=list)
    got: list[Tensor] = field(default_factory=list)

    def watch(self, averager: Averager) -> None:
        start, finish = averager.start, averager.finish

        def started(step: int, tensors: Sequence[Tensor], weight: float = 1.0) -> None:
            self.given.append(torch.cat([tensor.reshape(-1) for tensor in tensors]).clone())
            start(step, tensors, weight)

        def finished(step: int) -> Any:
            merged = finish(step)
            self.got.append(torch.cat([tensor.reshape(-1) for tensor in merged.changes[0]]))
            return merged

        averager.start = started  # type: ignore[method-assign]
        averager.finish = finished  # type: ignore[method-assign]


def corrupt(rank: Rank, value: Callable[[Tensor], Tensor]) -> list[int]:
    """From now on all that this rank sends to other replicas is nonsense, except its weight and
    the digests of its parameters. Returns a list that gets the number of parts of each message."""
    links: Any
    (links,) = rank.wiring.averaging
    post, sent = links.post, list[int]()

    def posted(
        replica: int, key: MessageKey, parts: Tensors, carries: Sequence[str], raw_bytes: int
    ) -> None:
        first, *others = parts
        sent.append(len(parts))
        post(replica, key, (first, *map(value, others)), carries, raw_bytes)

    links.post = posted
    return sent


STRATEGIES: dict[str, tuple[Callable[[Robust], Averaging], ClusterLayout, int | None]] = {
    "gradients": (lambda merge: GradientAveraging(merge=merge), clouds(3), None),
    "late gradients": (lambda merge: GradientAveraging(delay=1, merge=merge), clouds(3), None),
    "gradients, two ranks a cloud": (
        lambda merge: GradientAveraging(merge=merge), clouds(3, 2), None,
    ),
    "gradients of pipelines": (lambda merge: GradientAveraging(merge=merge), clouds(6), 3),
    "local updates": (lambda merge: LocalUpdates(2, MEAN, merge=merge), clouds(3), None),
    "local updates of five": (lambda merge: LocalUpdates(2, MEAN, merge=merge), clouds(5), None),
    "streaming": (
        lambda merge: LocalUpdates(2, MEAN, fragments=2, overlap=1, merge=merge), clouds(3), None,
    ),
    "local updates of pipelines": (
        lambda merge: LocalUpdates(2, MEAN, merge=merge), clouds(6), 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "merge"), each_once([*STRATEGIES], BOUNDED, count=5))
def test_nothing_that_one_cloud_sends_moves_a_merge_beyond_the_others(
    name: str, merge: Robust
) -> None:
    """Contributions and, where there were any, results alike: every message is nonsense."""
    averaging, layout, num_replicas = STRATEGIES[name]
    training = Training(9, batch_size=30, optimizer=Optimizer(0.01, 1))  # no digests at step 4
    job = ranks(
        layout, training, schedule=GPipe(5 if name.endswith("five") else 6),
        strategy=strategy_of(averaging(merge), num_replicas),
    )  # fmt: skip
    by_place: dict[tuple[int, ...], list[Merges]] = {}  # of ranks that merge the same values
    bad_replica = max(rank.wiring.ends.layout.placement(rank.number).replica for rank in job)
    sent = []
    for rank in job:
        place = rank.wiring.ends.layout.placement(rank.number)
        group_rank = rank.wiring.groups[min(place.stages)].group_rank
        if place.replica == bad_replica:
            sent.append(corrupt(rank, lambda part: torch.full_like(part, 1e6)))
            continue
        for number, averager in enumerate(averagers_of(rank)):
            merges = Merges()
            merges.watch(averager)
            by_place.setdefault((min(place.stages), group_rank, number), []).append(merges)
    for step in range(1, 5):
        reports_of(job, step)

    assert any(num_parts > 1 for parts in sent for num_parts in parts)
    for merges_of_place in by_place.values():
        for number, got in enumerate(merges_of_place[0].got):
            given = torch.stack([merges.given[number] for merges in merges_of_place])
            assert all(torch.equal(got, merges.got[number]) for merges in merges_of_place)
            if isinstance(merge, NormBound):
                assert got.norm() <= 1.001 * merge.factor * given.norm(dim=1).max()
            else:
                slack = 1e-5 * given.abs().amax(0)
                assert (got >= given.amin(0) - slack).all()
                assert (got <= given.amax(0) + slack).all()


def own_merge(contributions: Sequence[Contribution]) -> list[Tensor]:
    return Median()(contributions)


@pytest.mark.parametrize(
    "merge", [*BOUNDED, own_merge], ids=lambda merge: getattr(merge, "__name__", repr(merge))
)
def test_only_merges_that_bound_nothing_are_left_to_one_replica_each(merge: Merge) -> None:
    shapes = {"w": torch.Size((4, 3))}

    def made(of: Merge) -> Averager:
        def new_codec(some: Any) -> TensorCodec:
            return TensorCodec(some, lambda *_: Chain(), 7, False)

        return averager_for(connected(3)[0], shapes, new_codec, Terms(of))

    assert type(made(merge)) is AllToAll
    assert all(type(made(of)) is not AllToAll for of in (weighted_sum, weighted_mean))


# --- where all are good


def alike(ids: Tensor) -> Batch:
    """Every sample is the same one, but for its id, by which the toy repeats it."""
    x = torch.linspace(-1.0, 1.0, D).expand(len(ids), D)
    return {"ids": ids, "x": x, "y": -x}


class EqualRows(BatchPlan):
    """Ids that all stand for as many rows of the toy."""

    def ids(self, step: int) -> Tensor:
        return 4 * torch.arange(self.batch_size)


@pytest.mark.parametrize(
    ("num_micro_batches", "merge"), each_once([3, 4, 5, 8], [*BOUNDED, NormBound(1.0)], count=2)
)
def test_equal_samples_give_the_gradient_and_the_loss_of_the_sum(
    merge: Robust, num_micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any number of micro-batches, whose replicas then have unequal numbers of samples."""
    monkeypatch.setattr(tests.trainers, "samples", alike)
    found = {}
    for one in (None, merge):
        job = ranks(
            clouds(3), STILL, schedule=GPipe(num_micro_batches), plan=EqualRows(99, 24, 1),
            strategy=strategy_of(GradientAveraging(merge=one)),
        )  # fmt: skip
        (loss,) = (report.loss for report in reports_of(job, 1) if report.loss is not None)
        found[one] = gradient(job[0]), loss
    (robust, loss), (summed, expected) = found[merge], found[None]

    torch.testing.assert_close(robust, summed, rtol=1e-3, atol=1e-4)  # NormBound rounds down
    assert loss == pytest.approx(expected, rel=1e-3)


def test_three_equal_clouds_make_one_update_with_the_median_as_with_the_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the gradient nor the loss that is reported is a third, or three times."""
    monkeypatch.setattr(tests.trainers, "samples", alike)
    found = []
    for merge in (None, Median()):
        training = Training(9, batch_size=24, optimizer=Optimizer(0.05, 1, clip_norm=1e6))
        job = ranks(
            clouds(3), training, schedule=GPipe(3), plan=EqualRows(99, 24, 1),
            strategy=strategy_of(GradientAveraging(merge=merge)),
        )  # fmt: skip
        (told,) = (r for r in reports_of(job, 1) if r.loss is not None)
        found.append((told.loss, told.grad_norm, torch.cat([*values(job, 0), *values(job, 1)])))
    (loss, norm, moved), (robust_loss, robust_norm, robust_moved) = found

    assert robust_loss == pytest.approx(loss, rel=1e-5)
    assert robust_norm == pytest.approx(norm, rel=1e-5)
    torch.testing.assert_close(robust_moved, moved, rtol=1e-5, atol=1e-6)


# --- a cloud that has nothing to give


@pytest.mark.parametrize(("value", "merge"), each_once([math.nan, math.inf], BOUNDED, count=3))
def test_a_gradient_that_is_not_finite_counts_for_nothing_in_all_of_the_merge(
    merge: Robust, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clouds with the same samples: without one of them the merge is what it was, everywhere."""
    monkeypatch.setattr(tests.trainers, "samples", alike)
    for layout, num_replicas in ((clouds(3), None), (clouds(3, 2), None), (clouds(6), 3)):
        found = []
        for is_bad in (False, True):
            job = ranks(
                layout, STILL, schedule=GPipe(6), plan=EqualRows(99, 24, 1),
                strategy=strategy_of(GradientAveraging(merge=merge), num_replicas),
            )  # fmt: skip
            if is_bad:
                place = job[-1].wiring.ends.layout.placement
                bad = [r for r in job if place(r.number).replica == 2]
                spoil(bad, 0, value)
            (loss,) = (r.loss for r in reports_of(job, 1) if r.loss is not None)
            by_rank = {rank.number: gradient(rank) for rank in job}
            found.append((by_rank, loss))
        (whole, loss), (rest, rest_loss) = found
        for number, expected in whole.items():
            torch.testing.assert_close(rest[number], expected, rtol=1e-3, atol=1e-4)
        assert rest_loss == pytest.approx(loss, rel=1e-3)


@pytest.mark.parametrize("merge", BOUNDED, ids=repr)
def test_a_replica_that_is_left_out_keeps_what_its_message_carried(merge: Robust) -> None:
    lossy = Compression(averaging=TopK(0.1))
    job = ranks(
        clouds(3), STILL, lossy, GPipe(3), strategy=strategy_of(GradientAveraging(merge=merge))
    )
    reports_of(job, 1)
    before = job[2].state_dict()
    hook = spoil([job[2]], 0, math.nan)
    assert not any(report.skipped for report in reports_of(job, 2))
    hook.remove()
    after = job[2].state_dict()

    kept = [key for key in before if key.endswith("residual")]
    assert kept and same_bits([[state[key] for key in kept] for state in (before, after)])  # type: ignore[misc]


# --- what a cloud says that it weighs


def tokens(ids: Tensor) -> float:
    """The tokens of some samples, of which each has another number."""
    return float((1 + ids**2 % 7).sum())


def test_a_job_believes_each_replica_its_own_samples_of_an_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four micro-batches over three clouds, which the first and the fourth are of the first."""
    joined = list[Replicas]()

    def join(averaging: GradientAveraging, replicas: Replicas) -> None:
        joined.append(replicas)

    monkeypatch.setattr(GradientAveraging, "join", join)
    job = experiment({"clouds": "three", "strategy": "median", "micro_batches": "4"})
    links: Any = "links"
    group: Any = "group"
    stages: Any = {0: None}
    data: Any = SimpleNamespace(num_samples={"train": 40}.__getitem__, weight=tokens)
    reporter = Reporter(0, "a", lambda lines: None)
    replicas_exchange(job, data, links, group, stages, reporter, None, None)

    (replicas,) = joined
    first, *others = replicas.num_samples
    assert job.schedule.num_micro_batches == 4 and first + sum(others) == job.training.batch_size
    assert first > max(others) and len(others) == 2
    for step in (1, 4):
        ids = job.batch_plan(40).ids(step)
        weights = [replicas.weight(replica, step) for replica in range(3)]
        assert sum(weights) == tokens(ids)
        whole = zip(torch.tensor_split(ids, 4), (0, 1, 2, 0), strict=True)
        assert weights[0] == sum(tokens(piece) for piece, replica in whole if replica == 0)


def test_what_replicas_tell_each_other_is_counted_from_nothing() -> None:
    training = Training(9, batch_size=30, optimizer=Optimizer(0.01, 1))
    strategy = strategy_of(GradientAveraging())
    job = ranks(clouds(3), training, schedule=GPipe(3), strategy=strategy)

    def told() -> list[int]:
        return [links.raw_bytes for rank in job for links in rank.wiring.averaging]

    counts = [told()]
    for step in (1, 2):
        reports_of(job, step)
        counts.append(told())
    before, first, second = counts
    assert before == [0, 0, 0] and min(first) > 0
    assert second == [2 * num_bytes for num_bytes in first], "an update is as long as another"


def test_the_samples_of_each_replica_are_those_that_its_ranks_compute() -> None:
    """Counted in the trainers, whose ranks take micro-batches in turn."""
    for num_replicas, m, passes, size in (
        (3, 4, 1, 30),
        (2, 5, 2, 23),
        (4, 6, 1, 24),
        (3, 3, 2, 7),
    ):
        training = Training(9, batch_size=size, accumulate_steps=passes)
        job = ranks(
            clouds(num_replicas), training, schedule=GPipe(m),
            strategy=strategy_of(GradientAveraging()),
        )  # fmt: skip
        reports_of(job, 1)
        computed = [rank.trainer.feed.work.num_own for rank in job]

        pieces = cut(BatchPlan(40, size, 1).ids(1), m * passes)
        own = [samples_of_replica(pieces, m, r, num_replicas) for r in range(num_replicas)]
        assert computed == [len(ids) for ids in own]
        assert sum(computed) == size
    pieces = cut(torch.arange(30), 4)
    assert [len(samples_of_replica(pieces, 4, r, 3)) for r in range(3)] == [15, 8, 7]


CLAIMS: dict[str, tuple[Averaging, list[float]]] = {
    # 30 samples in four micro-batches over three clouds: 15, 8 and 7 an update, a token each
    "robust gradients": (GradientAveraging(merge=NormBound()), [15.0, 8.0, 7.0]),
    "summed gradients": (GradientAveraging(), [1.0, 1.0, 1.0]),
    "samples": (LocalUpdates(2, MEAN), [30.0, 16.0, 14.0]),
    "samples, robust": (LocalUpdates(2, MEAN, merge=NormBound()), [30.0, 16.0, 14.0]),
    "tokens": (LocalUpdates(2, MEAN, weigh="tokens", merge=NormBound()), [30.0, 16.0, 14.0]),
    "equal": (LocalUpdates(2, MEAN, weigh="equal", merge=Median()), [1.0, 1.0, 1.0]),
    "late": (LocalUpdates(2, MEAN, late=Skip(5.0)), [30.0, 16.0, 14.0]),
}  # fmt: skip


def weighed(
    averaging: Averaging,
    is_restarted: bool,
    patch: pytest.MonkeyPatch,
    weigh: Callable[[Tensor], float] = len,
) -> set[tuple[int, float, float]]:
    """What honest clouds say that they weigh in two updates, and what others would believe: by
    replica. is_restarted: after four updates all begin again from their states."""
    found = set[tuple[int, float, float]]()
    own = Terms.contribution

    def contribution(
        terms: Terms, step: int, replica: int, weight: float, *, max_weight: float, **rest: Any
    ) -> Contribution:
        found.add((replica, weight, max_weight))
        return own(terms, step, replica, weight=weight, max_weight=max_weight, **rest)

    patch.setattr(Terms, "contribution", contribution)
    training = Training(99, batch_size=30, optimizer=Optimizer(0.01, 1))

    def joined() -> list[Rank]:
        return ranks(
            clouds(3),
            training,
            schedule=GPipe(4),
            strategy=strategy_of(averaging),
            weigh=weigh,
        )

    job, first = joined(), 1
    if is_restarted:
        for step in range(1, 6):
            reports_of(job, step)
        states = [rank.state_dict() for rank in job]
        job, first = joined(), 6
        for rank, state in zip(job, states, strict=True):
            rank.load_state_dict(state)
        found.clear()
    for step in range(first, first + 2):
        reports_of(job, step)
    return found


@pytest.mark.parametrize(
    ("name", "is_restarted"),
    each_once([name for name in CLAIMS if name != "late"], [False, True], count=6),
)
def test_a_cloud_is_believed_to_weigh_what_follows_from_the_seed_and_no_more(
    name: str, is_restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a merge of which one of the two updates was made before the restart."""
    averaging, allowed = CLAIMS[name]
    found = weighed(averaging, is_restarted, monkeypatch)
    assert found == {(r, weight, weight) for r, weight in enumerate(allowed)}


def test_the_first_cloud_believes_the_others_what_follows_from_the_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    averaging, allowed = CLAIMS["late"]
    found = weighed(averaging, False, monkeypatch)
    assert found == {(r, weight, weight) for r, weight in enumerate(allowed) if r}


@pytest.mark.parametrize(
    ("late", "is_restarted"), [(Wait(), False), (Wait(), True), (Skip(5.0), False)]
)
def test_a_cloud_is_believed_the_tokens_of_its_own_samples(
    late: LatePolicy, is_restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a replica has not is no room for a larger claim."""
    averaging = LocalUpdates(2, MEAN, weigh="tokens", late=late)
    found = weighed(averaging, is_restarted, monkeypatch, weigh=tokens)
    assert all(weight == most for _, weight, most in found)
    plan = BatchPlan(40, 30, 1)
    steps = (5, 6) if is_restarted else (1, 2)
    pieces = [cut(plan.ids(step), 4) for step in steps]
    expected = [sum(tokens(samples_of_replica(p, 4, r, 3)) for p in pieces) for r in range(3)]
    assert {(r, weight) for r, weight, _ in found} == {
        (r, weight) for r, weight in enumerate(expected) if r or not late.is_elastic
    }


@pytest.mark.parametrize("weight", [7.5, -1.0, math.nan, math.inf])
def test_a_weight_beyond_that_ends_the_run_and_names_the_replica(weight: float) -> None:
    codec = TensorCodec({"w": torch.Size((2,))}, lambda *_: Chain(), 7, False)
    parts, _ = codec.encode([torch.ones(2)])
    with pytest.raises(FrameError, match=r"replica 2 sent a weight of .* allows 7\.0"):
        Terms().contribution(1, 2, weight, 7.0, codec, parts)


@pytest.mark.parametrize("weigh", ["equal", "samples"])
@pytest.mark.parametrize("num_replicas", [3, 6])
def test_one_cloud_moves_a_norm_bound_by_its_share_of_the_weight(
    num_replicas: int, weigh: Any
) -> None:
    """By at most factor * w / sum(w) usual norms, in a direction of its own."""
    tensors = [[torch.zeros(16)] for _ in range(num_replicas)]
    for own in tensors:
        own[0][0] = 1.0
    tensors[-1][0][:] = 0.0
    tensors[-1][0][1] = 1e6
    shapes = {"w": torch.Size((16,))}
    weights = [1.0 if weigh == "equal" else 5.0] * num_replicas
    terms = Terms(NormBound(2.0), max_weight=lambda replica: weights[replica])
    found = exchange(
        averagers(
            num_replicas,
            lambda mail: AllToAll(mail, TensorCodec(shapes, lambda *_: Chain(), 7, False), terms),
        ),
        1, tensors, weights,
    )  # fmt: skip

    assert same_bits(found)
    assert float(found[0][0][1]) == pytest.approx(2.0 / num_replicas, rel=1e-3)
