"""Local updates: against the published algorithms, and in the real trainer and wiring."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.channels import stored
from tests.configs import build
from tests.local_replicas import (
    DILOCO,
    MEAN,
    Replica,
    equal,
    furthest,
    groups,
    inner,
    loss_of,
    model,
    reference,
    replicas,
    run_together,
)
from tests.nightly import first_daily
from tests.pipelines import in_threads
from tests.replicas import Post
from tests.trainers import Rank, clouds, ranks, spoil, update, values
from xcloud.base.errors import ConfigError
from xcloud.base.settings import settings
from xcloud.comm.compression import Compression
from xcloud.comm.compressor import Chain
from xcloud.comm.precision import BlockInt
from xcloud.features.replicas.late import Skip
from xcloud.features.replicas.links import peers_of, replica_links
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.features.replicas.merging import by_tensor, contiguous
from xcloud.features.replicas.outer_optimizer import OuterOptimizer
from xcloud.job.strategy import Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.frame import Kind, MessageKey
from xcloud.net.link_profile import LinkProfile
from xcloud.net.memory_transport import MemoryWorld
from xcloud.pipeline.batch_plan import BatchPlan
from xcloud.pipeline.ends import Ends
from xcloud.pipeline.exchange import Work
from xcloud.pipeline.schedule import GPipe
from xcloud.pipeline.settings import Optimizer, Training


def trained(
    settings: LocalUpdates, last_step: int, count: int = 2, **options: Any
) -> list[Tensor]:
    """Of one replica, after all have been found equal."""
    job = replicas(settings, last_step, count, **options)
    run_together(job, last_step)
    assert all(equal(job[0].values, other.values) for other in job[1:])
    return job[0].values


@pytest.mark.parametrize("count", first_daily([2, 3], count=1))
def test_three_rounds_of_diloco_are_those_of_the_paper(count: int) -> None:
    found = trained(LocalUpdates(4, DILOCO), 12, count)
    expected = reference(
        count, [range(1, 5), range(5, 9), range(9, 13)], (0.7, 0.9, True), [1.0] * count
    )

    assert furthest(found, expected) < 1e-6
    assert furthest(found, [p.detach() for p in model().parameters()]) > 0.01


def test_plain_momentum_is_that_of_torch() -> None:
    outer = OuterOptimizer(0.5, 0.8, False)
    found = trained(LocalUpdates(4, outer), 8)

    rounds = [range(1, 5), range(5, 9)]
    assert furthest(found, reference(2, rounds, (0.5, 0.8, False), [1, 1])) < 1e-6


@settings("strategy.averaging.outer")
class Decaying(OuterOptimizer):
    """Gradient descent whose rate falls with the round: docs/strategies.md says how to add one."""

    learning_rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def step(
        self,
        outer: Sequence[Tensor],
        velocities: Sequence[Tensor],
        gradients: Sequence[Tensor],
        round_number: int,
    ) -> None:
        for parameter, gradient in zip(outer, gradients, strict=True):
            parameter.sub_(gradient * (self.learning_rate / round_number))


@pytest.mark.parametrize("fragments", [1, 2])
def test_another_outer_optimizer_is_a_class_that_is_given_the_round(fragments: int) -> None:
    """Its rate is a share of the move: the same as a fixed one with shares of the moves."""
    plain, rounds = OuterOptimizer(1.0, 0.0, False), []

    def noted(self: Decaying, outer: Any, velocities: Any, moves: Any, number: int) -> None:
        rounds.append(number)
        plain.step(outer, velocities, [move / number for move in moves], round_number=1)

    found = trained(LocalUpdates(4, Decaying(), fragments=fragments), 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decaying, "step", noted)
        wanted = trained(LocalUpdates(4, Decaying(), fragments=fragments), 10)
    assert rounds == sorted([1, 2, 3] * 2 * fragments), "of two replicas, the last one cut short"
    assert furthest(found, wanted) < 1e-6
    assert furthest(found, trained(LocalUpdates(4, plain, fragments=fragments), 10)) > 1e-3


def test_an_outer_optimizer_that_may_ask_for_the_round_is_refused_where_clouds_may_be_late() -> (
    None
):
    with pytest.raises(ConfigError, match=r"late=skip.*leave .*_target_ out, or"):
        LocalUpdates(4, Decaying(), late=Skip(5.0))


def test_a_last_round_that_is_cut_short_ends_in_the_mean_and_without_velocity() -> None:
    """The outer momentum would move as far as after a whole round, and no step would follow. Nor
    does it where the run is resumed and its next round is short."""
    job = replicas(LocalUpdates(4, DILOCO), 10)
    run_together(job, 10)

    rounds = [range(1, 5), range(5, 9)]
    expected = reference(2, rounds, (0.7, 0.9, True), [1, 1], cut_short=range(9, 11))
    assert furthest(job[0].values, expected) < 1e-6
    assert equal(job[0].values, job[1].values)
    (fragment,) = job[0].exchange.fragments
    assert not any(velocity.any() for velocity in fragment.values.velocity)

    without = OuterOptimizer(1.5, 0.0, False)  # its step is as short as the round
    rounds = [range(1, 5), range(5, 9), range(9, 11)]
    expected = reference(2, rounds, (1.5, 0.0, False), [1, 1])
    assert furthest(trained(LocalUpdates(4, without), 10), expected) < 1e-6


def test_fedavg_weighs_replicas_by_their_samples() -> None:
    """arXiv:1602.05629: w = sum n_k / n w_k."""
    settings = LocalUpdates(3, MEAN)
    job = replicas(settings, 6)
    job[1].work = lambda step: Work(4, 1.0)
    run_together(job, 6)

    expected = reference(2, [range(1, 4), range(4, 7)], (1.0, 0.0, False), (1.0, 4.0))
    assert furthest(job[0].values, expected) < 1e-6
    assert equal(job[0].values, job[1].values)
    equally = trained(LocalUpdates(3, MEAN, weigh="equal"), 6)
    assert furthest(equally, expected) > 1e-3


def test_weighed_by_tokens_a_replica_counts_as_much_as_its_loss_does() -> None:
    """Of as many samples each, of which the second replica's are four times as long."""
    job = replicas(LocalUpdates(3, MEAN, weigh="tokens"), 6)
    job[0].work = lambda step: Work(5, 10.0)
    job[1].work = lambda step: Work(5, 40.0)
    run_together(job, 6)

    expected = reference(2, [range(1, 4), range(4, 7)], (1.0, 0.0, False), (1.0, 4.0))
    assert furthest(job[0].values, expected) < 1e-6
    assert furthest(trained(LocalUpdates(3, MEAN), 6), expected) > 1e-3


def streaming_reference(
    steps: int, every: int, parts: Sequence[Sequence[int]], overlap: int, mix: float
) -> list[list[Tensor]]:
    """Streaming DiLoCo (arXiv:2501.18512, algorithm 2) of two replicas in one process; the last
    step merges everything and keeps nothing, and rounds that it cuts short end in the mean."""
    workers = [model() for _ in range(2)]
    optimizers = [inner(worker) for worker in workers]
    values = [list(worker.parameters()) for worker in workers]
    shared_values = [nn.Parameter(p.detach().clone()) for p in values[0]]
    outers = [
        torch.optim.SGD([shared_values[i] for i in part], 0.7, momentum=0.9, nesterov=True)
        for part in parts
    ]
    sent: dict[int, tuple[int, list[Tensor]]] = {}

    def is_due(p: int, step: int) -> bool:
        return step % every == ((p + 1) * every // len(parts)) % every

    def send(p: int, step: int) -> None:
        changes = [
            (
                (shared_values[i].detach() - values[0][i].detach())
                + (shared_values[i].detach() - values[1][i].detach())
            )
            / 2
            for i in parts[p]
        ]
        sent[p] = (step, changes)

    def receive(p: int, share: float) -> None:
        sent_at, changes = sent.pop(p)
        for i, change in zip(parts[p], changes, strict=True):
            shared_values[i].grad = change
            if not is_due(p, sent_at):
                shared_values[i].data -= change
        if is_due(p, sent_at):
            outers[p].step()
        for own in values:
            for i in parts[p]:
                own[i].data = share * own[i].data + (1 - share) * shared_values[i].data

    for step in range(1, steps + 1):
        for replica, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(worker, replica, step).backward()
            optimizer.step()
        for p in sorted(sent, key=lambda p: sent[p][0]):
            if step - sent[p][0] >= overlap or step == steps:
                receive(p, mix)
        for p in range(len(parts)):
            if step == steps or is_due(p, step):
                send(p, step)
                if overlap == 0 or step == steps:
                    receive(p, 0.0 if step == steps else mix)
    return [[p.detach() for p in own] for own in values]


@pytest.mark.parametrize(
    ("fragments", "overlap", "mix"),
    first_daily([(1, 2, 0.3), (3, 0, 0.0), (3, 2, 0.3), (2, 3, 0.0)], count=2),
)
def test_streaming_with_overlap_is_that_of_the_paper(
    fragments: int, overlap: int, mix: float
) -> None:
    settings = LocalUpdates(6, DILOCO, fragments=fragments, overlap=overlap, mix=mix)
    job = replicas(settings, 20)
    run_together(job, 19)
    before_the_end = [replica.values for replica in job]
    run_together(job, 20, 20)

    parts = contiguous([p.numel() for p in model().parameters()], fragments)
    cut_short = streaming_reference(20, 6, parts, overlap, mix)
    assert furthest(job[0].values, cut_short[0]) < 1e-6
    assert equal(job[0].values, job[1].values)
    assert not equal(*before_the_end)


def test_fragments_are_sent_in_turn_and_never_twice_in_a_round() -> None:
    job = replicas(LocalUpdates(6, DILOCO, fragments=3), 12)
    sent: list[list[int]] = []
    for replica in job:
        seen: list[int] = []
        sent.append(seen)
        send = replica.exchange.start_round
        replica.exchange.start_round = lambda f, step, seen=seen, send=send: (  # type: ignore[method-assign]
            seen.append(step),
            send(f, step),
        )
    run_together(job, 12)

    assert sent[0] == [2, 4, 6, 8, 10, 12, 12, 12] and sent[1] == sent[0]


def test_four_bits_with_feedback_end_equal_and_near_the_exact_result() -> None:
    """Every replica has the bits of every other one, and what a message lost is in the next."""
    exact = trained(LocalUpdates(4, DILOCO), 24)
    coarse = {}
    for feedback in (True, False):
        int4 = Chain(int4=BlockInt(4, 64))
        job = replicas(LocalUpdates(4, DILOCO, feedback=feedback), 24, compressor=int4)
        run_together(job, 24)
        assert equal(job[0].values, job[1].values)
        coarse[feedback] = furthest(job[0].values, exact)
    assert 0 < coarse[True] < 0.2


def test_ranks_of_a_cloud_carry_their_own_shares_and_stay_equal() -> None:
    """Replicas of two and three ranks against two of one rank: the same values, and together the
    same bytes, but for a weight in each message. The third rank carries nothing."""
    settings = LocalUpdates(3, DILOCO, fragments=2)
    alone = replicas(settings, 6)
    posts = [Post(2), Post(2), Post(2)]  # one for each rank of a cloud
    job = in_threads(
        [
            lambda r=r, n=n, group=group: Replica(
                r, posts[n].links(r, num_shares=2), settings, 6, group=group
            )
            for r in range(2)
            for n, group in enumerate(groups(2 + r))
        ]
    )
    for rank in [*alone, *job]:
        rank.links.num_bytes = 0  # digests
        if rank in job:
            # All ranks of a toy replica compute the same batch.
            rank.exchange.before_update = lambda step, buffers, losses: losses  # type: ignore
        rank.exchange.compare = lambda step: None  # type: ignore[method-assign]
    run_together(alone, 6)
    run_together(job, 6)

    assert all(equal(alone[0].values, other.values) for other in job)
    sent = [rank.links.num_bytes for rank in job]
    assert min(sent[:4]) > 0 and sent[4] == 0 and sent[:2] == sent[2:4]
    assert (
        sent[0] + sent[1] == alone[0].links.num_bytes + 5 * 8
    )  # merges at 1, 3, 4 and twice at 6


RESUMED = {
    "diloco": (LocalUpdates(4, DILOCO), 6),
    "in the middle, before the first merge": (LocalUpdates(4, DILOCO), 2),
    "fragments under way": (LocalUpdates(6, DILOCO, fragments=3, overlap=3, mix=0.5), 7),
}


@pytest.mark.parametrize(("settings", "saved_at"), RESUMED.values(), ids=list(RESUMED))
def test_a_run_goes_on_from_its_state_bit_for_bit(settings: LocalUpdates, saved_at: int) -> None:
    int4 = Chain(int4=BlockInt(4, 16, stochastic=True))

    whole, first, second = (replicas(settings, 14, compressor=int4) for _ in range(3))
    run_together(whole, 14)
    run_together(first, saved_at)
    for old, new in zip(first, second, strict=True):
        new.module.load_state_dict(old.module.state_dict())
        new.optimizer.load_state_dict(old.optimizer.state_dict())
        new.exchange.load_state_dict(stored(old.exchange.state_dict()))
    run_together(second, 14, saved_at + 1)

    assert equal(whole[0].values, second[0].values)
    assert equal(second[0].values, second[1].values)


def test_a_state_of_other_settings_is_refused() -> None:
    job = replicas(LocalUpdates(4, DILOCO), 8)
    run_together(job, 2)
    other = replicas(LocalUpdates(4, MEAN, fragments=2), 8)[0]
    with pytest.raises(ValueError, match="other settings"):
        other.exchange.load_state_dict(job[0].exchange.state_dict())


class Seconds:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_slow_cloud_makes_fewer_steps_and_counts_for_them() -> None:
    """Replica 1 has time for two steps in four: it leaves out the rest, and merges what it has."""
    settings = LocalUpdates(4, MEAN, max_s=10.0)
    clock, made = Seconds(), {0: list[int](), 1: list[int]()}
    job = replicas(settings, 8)
    for r, replica in enumerate(job):
        replica.exchange.budget.clock = clock if r else lambda: 0.0
        replica.work = lambda s, note=made[r].append: note(s) or Work(1, 1.0)
    slow = job[1].optimizer.step

    def slowly() -> None:
        slow()
        clock.now += 6.0

    job[1].optimizer.step = slowly  # type: ignore[method-assign]
    run_together(job, 8)

    assert made == {0: [1, 2, 3, 4, 5, 6, 7, 8], 1: [1, 2, 3, 5, 6]}  # the first is not timed
    assert equal(job[0].values, job[1].values)


def test_tokens_end_a_round_too() -> None:
    settings = LocalUpdates(5, MEAN, max_tokens=30)
    job = replicas(settings, 10)
    for r, replica in enumerate(job):
        replica.work = lambda step, r=r: Work(1, 10.0 * (1 + r))
    run_together(job, 10)

    assert [replica.num_made for replica in job] == [6, 4]
    assert equal(job[0].values, job[1].values)


def test_cuts_are_whole_balanced_and_in_order() -> None:
    sizes = [100, 1, 1, 50, 50, 2, 96]
    for count in range(1, 8):
        runs = contiguous(sizes, count)
        assert [p for run in runs for p in run] == list(range(7))
        assert len(runs) == count and all(runs)
        shares = by_tensor({str(i): torch.Size([size]) for i, size in enumerate(sizes)}, count)
        assert sorted(piece.index for share in shares for piece in share) == list(range(7))
        if count == 3:
            assert [sum(p.shape.numel() for p in share) for share in shares] == [100] * 3
    assert [sum(sizes[p] for p in run) for run in contiguous(sizes, 3)] == [100, 102, 98]
    for every, count, offsets in ((6, 3, [2, 4, 0]), (5, 1, [0]), (2, 2, [1, 0])):
        settings = LocalUpdates(every, fragments=count)
        assert [settings.offset(number) for number in range(count)] == offsets
    with pytest.raises(ConfigError, match=r"fragments is 7.* at most 6"):
        replicas(LocalUpdates(8, fragments=7), 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "strategy.averaging.every"),
        (
            {"every": 4, "fragments": 5},
            r"fragments must be at most .*every \(4\).* got fragments=5",
        ),
        ({"every": 4, "overlap": 4}, r"every \(4\), and .*overlap less than it; got .*overlap=4"),
        ({"weigh": "bytes"}, "strategy.averaging.weigh must be one of samples"),
        ({"mix": 1.0}, "strategy.averaging.mix"),
        ({"max_s": 0}, "strategy.averaging.max_s"),
    ],
)
def test_bad_settings_are_named(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalUpdates(**settings)


def test_nesterov_without_momentum_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"outer\.nesterov needs a momentum"):
        OuterOptimizer(1.0, 0.0)


@pytest.mark.parametrize(
    ("fragments", "overlap"), first_daily([(5, 0), (5, 1), (5, 4), (4, 4), (2, 5)], count=3)
)
def test_no_more_fragments_are_under_way_than_links_have_room_for(
    fragments: int, overlap: int
) -> None:
    """At the last step too, at which all of them are merged: a replica that sent them all before
    it read one would wait for room on the link, and so would its peer."""
    settings = LocalUpdates(6, DILOCO, fragments=fragments, overlap=overlap)
    job = replicas(settings, 19)
    most = 0
    for replica in job:
        start = replica.exchange.start_round

        def counted(fragment: Any, step: int, own: Replica = replica, start: Any = start) -> None:
            nonlocal most
            start(fragment, step)
            most = max(most, sum(bool(f.under_way) for f in own.exchange.fragments))

        replica.exchange.start_round = counted  # type: ignore[method-assign]
    run_together(job, 19)

    assert most == settings.max_under_way
    assert equal(job[0].values, job[1].values)


def test_links_have_room_for_all_fragments_under_way(tmp_path: Path) -> None:
    """With 13 overlapping fragments each replica sends 13 before it reads the first."""
    settings = LocalUpdates(14, MEAN, fragments=14, overlap=13)
    clouds = {"a": Cloud(1, (0,), replica=0), "b": Cloud(1, (0,), replica=1)}
    layout = ClusterLayout(clouds, "free", link_budget_bytes=1)
    world, part = MemoryWorld(), torch.zeros(100_000, dtype=torch.uint8)
    ends = [Ends(world.transport(rank), layout, tmp_path) for rank in range(2)]
    links = [replica_links(own, layout, torch.device("cpu")) for own in ends]
    for own in links:
        own.open(100_100, under_way=settings.max_under_way)
    room = links[1]._in[0].settings.window.max_queued_bytes

    links[0].send(1, MessageKey(Kind.AVERAGING, 1), (part,), ("zeros",), 0)
    assert room >= 13 * links[0]._out[1].record.num_bytes[Kind.AVERAGING]


TRAINING = Training(8, batch_size=16, optimizer=Optimizer(0.05, 1, clip_norm=1.0))
INT4 = Compression(Chain(), Chain(), averaging=BlockInt(4))


def local(replicas: int | None = None, **settings: Any) -> Strategy:
    return Strategy("local_updates", replicas, LocalUpdates(**{"every": 4, **settings}))


def train(job: list[Rank], last: int = 8, first: int = 1) -> list[list[float | None]]:
    """The loss that each rank tells, by step. Ranks go their own pace."""

    def one(rank: Rank) -> list[float | None]:
        return [rank.update(step).loss for step in range(first, last + 1)]

    return in_threads([lambda r=rank: one(r) for rank in job])


def averaging_bytes(job: list[Rank]) -> list[int]:
    return [
        sum(link.num_bytes[Kind.AVERAGING] for link in rank.wiring.ends.records) for rank in job
    ]


STRATEGIES = {
    "diloco": (local(), clouds(2)),
    "three clouds": (local(), clouds(3)),
    "unequal clouds": (local(), clouds(2, (3, 2))),
    "pipelines": (local(2), clouds(4)),
    "streaming": (local(fragments=2, overlap=1, mix=0.5), clouds(2)),
    "a late one is skipped": (local(late=Skip()), clouds(3)),
    "late, with lanes": (local(late=Skip()), clouds(2, 2)),
}


@pytest.mark.parametrize("name", first_daily(STRATEGIES, count=4))
def test_replicas_train_alone_and_end_equal(name: str) -> None:
    strategy, layout = STRATEGIES[name]
    job = ranks(layout, TRAINING, INT4, GPipe(8), BatchPlan(16, 16, 1), strategy)
    train(job, 7)
    for stage in (0, 1):
        found = values(job, stage)
        assert not all(torch.equal(found[0], other) for other in found)
    train(job, 8, 8)
    for stage in (0, 1):
        found = values(job, stage)
        assert all(torch.equal(found[0], other) for other in found)
    reports = [r for r in update(job, 9) if not isinstance(r, str)]
    assert sum(report.loss is not None for report in reports) >= 2  # each replica has its own


@pytest.mark.slow
@pytest.mark.nightly
def test_the_loss_falls_as_far_as_with_averaged_gradients() -> None:
    strategy = local(outer=OuterOptimizer(1.0, 0.0, False))
    long = Training(40, batch_size=16, optimizer=Optimizer(0.02, 1, "constant"))
    job = ranks(clouds(2), long, schedule=GPipe(8), plan=BatchPlan(16, 16, 1), strategy=strategy)
    found = train(job, 40)
    alone = ranks(
        ClusterLayout({"local": Cloud(1, [0, 1])}, "free"), long, plan=BatchPlan(16, 16, 1)
    )
    (expected,) = train(alone, 40)

    means = [sum(x for x in losses if x is not None) / 2 for losses in zip(*found, strict=True)]
    assert means[0] == pytest.approx(expected[0], rel=1e-3)
    assert means[-1] < 1.15 * float(expected[-1] or 0) and means[-1] < 0.7 * means[0]


def test_only_merges_cross_between_replicas() -> None:
    job = ranks(clouds(2), TRAINING, INT4, GPipe(8), strategy=local())
    after = []
    for step in range(1, 9):
        train(job, step, step)
        after.append(averaging_bytes(job)[0])

    assert after[0] == after[1] == after[2] < after[3] == after[6] < after[7]
    assert all(not link.num_bytes[Kind.NORM] for r in job for link in r.wiring.ends.records)
    num_values = sum(v[0].numel() for v in (values(job, 0), values(job, 1)))
    assert after[6] - after[2] < 2 * num_values  # 4 bits, scales and a header; 4 bytes without


def test_a_job_goes_on_from_its_state_bit_for_bit() -> None:
    strategy = local(fragments=2, overlap=3, mix=0.5)

    def job() -> list[Rank]:
        return ranks(clouds(2), TRAINING, INT4, GPipe(8), BatchPlan(16, 16, 1), strategy)

    whole, first, second = job(), job(), job()
    train(whole)
    train(first, 5)
    for old, new in zip(first, second, strict=True):
        new.load_state_dict(stored(old.state_dict()))
    train(second, 8, 6)

    for stage in (0, 1):
        assert all(
            torch.equal(a, b)
            for a, b in zip(values(whole, stage), values(second, stage), strict=True)
        )


def test_a_slow_cloud_leaves_out_steps_and_says_so() -> None:
    """16 tokens (here samples) a step over two clouds: 8 each."""
    job = ranks(clouds(2), TRAINING, INT4, GPipe(8), strategy=local(max_tokens=16))
    losses = train(job)

    assert [loss is None for loss in losses[0]] == [False, False, True, True] * 2
    assert torch.equal(*values(job, 0))


def test_the_hub_tells_of_every_merge() -> None:
    job = ranks(clouds(3), TRAINING, INT4, GPipe(9), strategy=local(late=Skip()))
    train(job)
    for rank in job:
        rank.reporter.flush()
    events = [json.loads(line) for line in b"".join(job[0].told).splitlines()]

    assert [(e["event"], e["step"]) for e in events] == [("merge", 4), ("merge", 8)]
    assert list(events[0]["weights"]) == ["c0", "c1", "c2"]
    assert sum(events[0]["weights"].values()) == 4 * 16
    assert not any(rank.told for rank in job[1:])


def test_updates_that_a_cloud_skipped_do_not_count_for_it() -> None:
    skipping = replace(TRAINING, on_divergence="skip")
    job = ranks(clouds(3), skipping, INT4, GPipe(9), strategy=local(late=Skip()))
    hook = spoil(job, 0, math.nan)  # in the first cloud
    train(job, 1)
    hook.remove()
    train(job, 4, 2)
    job[0].reporter.flush()
    (merge,) = [json.loads(line) for line in b"".join(job[0].told).splitlines()]

    assert merge["weights"] == {"c0": 3 * 6, "c1": 4 * 5, "c2": 4 * 5}


@pytest.mark.parametrize("settings", [{"late": Skip()}, {"max_s": 3.0}, {"weigh": "tokens"}])
def test_what_needs_whole_replicas_is_refused_for_pipelines(settings: Any) -> None:
    with pytest.raises(ConfigError, match="each rank must hold the full model"):
        local(2, **settings).arrange(clouds(4))


def test_every_kind_of_local_updates_is_a_word() -> None:
    labels = {
        name: build("+exp=abnet_iwslt", f"strategy={name}").strategy.label
        for name in ("local_updates", "fedavg", "streaming")
    }
    assert labels["local_updates"] == "local_updates (every 50, nesterov(0.7, 0.9))"
    assert labels["fedavg"] == "fedavg (every 50, mean)"
    assert labels["streaming"].endswith("4 fragments, overlap 5, mix 0.5)")
    mean = OuterOptimizer(1.0, 0.0, False)
    said = LocalUpdates(9, mean, fragments=2, overlap=1, mix=0.25).label
    assert said == "every 9, mean, 2 fragments, overlap 1, mix 0.25"
    kept = build(
        "+exp=abnet_iwslt", "strategy=local_updates", "+strategy/averaging/late=go_on",
        "strategy.averaging.late.restart_s=2",
    )  # fmt: skip
    roster = kept.roster
    assert roster.may_report == {"loss": frozenset({0, 1}), "quality": frozenset({0})}
    assert roster.is_elastic and roster.essential == frozenset({0}) and roster.restart_s == 2


def test_peers_are_ranks_with_their_clouds_and_all_ranks_of_these() -> None:
    layout = ClusterLayout({"a": Cloud(2), "b": Cloud(1)}, LinkProfile(1e8, 0.0))
    found = peers_of(layout, [2, 0])
    assert [(peer.rank, peer.cloud, [*peer.ranks]) for peer in found] == [
        (2, "b", [2]),
        (0, "a", [0, 1]),
    ]
