"""Programs of steps against the orders of their schedules, and simulated steps against closed
formulas and against what a small change of a cost does to them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from benchmarks.paper_step import UniformCosts, simulate
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.link_profile import LinkProfile
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, ZeroBubble
from xcloud.pipeline.schedule import GPipe, Schedule
from xcloud.simulator.costs import Costs, Direction, Update
from xcloud.simulator.measured import measured_costs
from xcloud.simulator.prediction import Prediction, Simulator

SEEDS = range(10)


def chain(num_stages: int) -> ClusterLayout:
    return ClusterLayout({f"c{i}": Cloud() for i in range(num_stages)}, "free")


def some_schedules(draw: random.Random) -> list[Schedule]:
    m, flight = draw.choice([1, 2, 3, 6, 9]), draw.choice([None, 1, 2, 5])
    return [
        GPipe(m), OneForwardOneBackward(m, flight), ZeroBubble(m, flight),
        ZeroBubble(m, flight, draw.choice([1, 2, 7])),
    ]  # fmt: skip


def some_layout(draw: random.Random) -> ClusterLayout:
    """Up to five stages on up to three clouds of one to three ranks, over a line of its own for
    each pair. A cloud may hold several stages, also ones that do not follow each other."""
    num_stages = draw.randint(1, 5)
    num_clouds = draw.randint(1, min(3, num_stages))
    dealt = [*range(num_clouds), *(draw.randrange(num_clouds) for _ in range(num_stages))]
    dealt = dealt[:num_stages]
    draw.shuffle(dealt)
    clouds = {
        f"c{cloud}": Cloud(
            draw.choice([1, 1, 2, 3]), [s for s, c in enumerate(dealt) if c == cloud]
        )
        for cloud in range(num_clouds)
    }
    return ClusterLayout(clouds, LinkProfile(10 ** draw.uniform(5, 7), draw.uniform(0, 0.03)))


def some_costs(draw: random.Random, num_stages: int, codecs: bool = True) -> Costs:
    def way() -> Direction:
        compress_s, decompress_s = (draw.uniform(1e-4, 3e-3) * codecs for _ in range(2))
        return Direction(draw.randrange(200, 9000), compress_s, decompress_s)

    forward_s = [draw.uniform(0.01, 0.04) for _ in range(num_stages)]
    backward_s = [draw.uniform(0.02, 0.08) for _ in range(num_stages)]
    return Costs(
        forward_s, backward_s, [way() for _ in range(num_stages - 1)],
        [way() for _ in range(num_stages - 1)],
        [Update(*(draw.uniform(1e-3, 5e-3) for _ in range(4))) for _ in range(num_stages)],
        weights_s=[draw.uniform(0.2, 0.6) * s for s in backward_s],
    )  # fmt: skip


# Programs.


@pytest.mark.parametrize("seed", SEEDS)
def test_every_rank_does_its_share_of_its_stages_in_the_order_of_the_schedule(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(6):
        layout, num_passes = some_layout(draw), draw.choice([1, 2])
        for schedule in some_schedules(draw):
            program = Simulator(schedule, layout, agrees=True, num_passes=num_passes)
            m = schedule.num_micro_batches
            fitted = schedule.for_lanes(layout.num_stages, layout.num_lanes)
            for rank, stage in product(range(layout.num_ranks), range(layout.num_stages)):
                done = [
                    o.action for o in program.ops[rank] if o.action and o.action.stage == stage
                ]
                order = [
                    action._replace(micro_batch=first + action.micro_batch)
                    for first in range(0, num_passes * m, m)
                    for action in fitted.actions(stage, layout.num_stages)
                    if layout.owner(stage, action.micro_batch) == rank
                ]
                assert done == order


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_sent_is_received_once_by_who_needs_it_and_not_before_it_came(seed: int) -> None:
    draw = random.Random(seed)
    layout = some_layout(draw)
    for schedule in some_schedules(draw):
        step = simulate(schedule, layout, some_costs(draw, layout.num_stages), agrees=True)
        program, moments = step.step, step.moments
        sent = [(op.sent, rank) for rank, ops in enumerate(program.ops) for op in ops if op.sent]
        received = [
            (op.received, rank, moments.begin_s[rank][index])
            for rank, ops in enumerate(program.ops)
            for index, op in enumerate(ops)
            if op.received
        ]
        assert sorted(message for message, _ in sent) == sorted(m for m, *_ in received)
        assert all(message.sender == rank for message, rank in sent)
        arrived_s = dict(zip(program.transfers, moments.passages, strict=True))
        for message, rank, began_s in received:
            assert message.receiver == rank != message.sender
            assert began_s >= arrived_s[message].arrived_s - 1e-12
            assert message.boundary < layout.num_stages - 1
        for use in step.links:  # a line carries one message at a time
            assert use.busy_s <= step.step_s + 1e-9 and use.here != use.there


@pytest.mark.parametrize("seed", SEEDS)
def test_a_recorded_step_gives_back_the_costs_that_it_was_simulated_with(seed: int) -> None:
    """With one rank for a stage; costs of ranks that share one are means."""
    draw = random.Random(seed)
    num_stages = draw.randint(2, 4)
    line = LinkProfile(10 ** draw.uniform(5, 7), draw.uniform(0, 0.03))
    layout = replace(chain(num_stages), wan=line)
    given = some_costs(draw, num_stages)
    given = replace(given, updates=[replace(u, average_s=0.0) for u in given.updates])
    for schedule in (GPipe(4), OneForwardOneBackward(5), ZeroBubble(6, 3)):
        step = simulate(schedule, layout, given, agrees=True, num_passes=2, num_steps=2)

        found = measured_costs(step.timeline)

        us = 2e-6  # in which a record is kept
        assert found.forward_s == pytest.approx(given.forward_s, abs=us)
        assert found.backward_s == pytest.approx(given.backward_s, abs=us)
        late_s = [0.0, *given.weights_s[1:]] if isinstance(schedule, ZeroBubble) else 0.0
        assert found.weights_s == pytest.approx(late_s or [0.0] * num_stages, abs=us)
        for mine, meant in ((found.forward, given.forward), (found.backward, given.backward)):
            assert [way.num_bytes for way in mine] == [way.num_bytes for way in meant]
            for name in ("compress_s", "decompress_s"):
                seen = [getattr(way, name) for way in mine]
                assert seen == pytest.approx([getattr(way, name) for way in meant], abs=us)
        for mine, meant in zip(found.updates, given.updates, strict=True):
            assert mine.fetch_s == pytest.approx(meant.fetch_s, abs=us)
            assert mine.norm_s == pytest.approx(meant.norm_s, abs=us)
            assert mine.optimizer_s == pytest.approx(meant.optimizer_s, abs=us)
        assert found.control_bytes == given.control_bytes


# Closed formulas.


@pytest.mark.parametrize("seed", SEEDS)
def test_equal_stages_on_a_free_line_take_what_the_formulas_say(seed: int) -> None:
    """tf, tb and of it tw for the weights, p stages, m >= p micro-batches: GPipe and 1F1B take
    (m + p - 1)(tf + tb), zero bubble with weights of tf m(tf + tb) + (p - 1)(tf + tb - 2 tw); and
    so the critical path goes through as many actions, and nothing else."""
    draw = random.Random(seed)
    p, tf = draw.randint(2, 6), draw.uniform(0.5, 2.0)
    m, tw = p * draw.randint(2, 4), tf
    tb = 2 * tf
    costs = UniformCosts(tf, tb, weights_s=tw)
    for schedule, bubble_s in (
        (GPipe(m), (p - 1) * (tf + tb)),
        (OneForwardOneBackward(m), (p - 1) * (tf + tb)),
        (ZeroBubble(m), (p - 1) * (tf + tb - 2 * tw)),
    ):
        step = simulate(schedule, chain(p), costs)
        assert step.step_s == pytest.approx(m * (tf + tb) + bubble_s)
        assert step.bubble_ratio == pytest.approx(bubble_s / (m * (tf + tb)))
        assert sum(step.critical_s.values()) == pytest.approx(step.step_s)
        work_s = sum(s for cause, s in step.critical_s.items() if cause.startswith("compute"))
        assert work_s == pytest.approx(step.step_s)


@pytest.mark.parametrize("seed", SEEDS)
def test_on_a_long_line_a_step_of_gpipe_has_each_latency_twice_on_its_critical_path(
    seed: int,
) -> None:
    draw = random.Random(seed)
    p, m, latency_s = draw.randint(2, 5), draw.randint(1, 9), draw.uniform(0.0, 20.0)
    tf, tb = draw.uniform(0.5, 2.0), draw.uniform(0.5, 4.0)

    step = simulate(GPipe(m), chain(p), UniformCosts(tf, tb, 0.0, latency_s))

    waits_s = sum(s for cause, s in step.critical_s.items() if cause.startswith("latency"))
    assert waits_s == pytest.approx(2 * (p - 1) * latency_s, abs=1e-9)
    assert step.step_s == pytest.approx((m + p - 1) * (tf + tb) + waits_s)


@pytest.mark.parametrize("seed", SEEDS)
def test_1f1b_on_a_long_line_waits_for_the_way_there_and_back_once_a_flight(seed: int) -> None:
    """Two stages, k in flight: from the first backward on, k micro-batches go round in the time of
    one round trip, unless computing takes longer."""
    draw = random.Random(seed)
    k, tf, tb = draw.randint(1, 4), draw.uniform(0.5, 2.0), draw.uniform(0.5, 4.0)
    m, latency_s = k * draw.randint(2, 5), draw.uniform(0.0, 20.0)

    step = simulate(OneForwardOneBackward(m, k), chain(2), UniformCosts(tf, tb, 0.0, latency_s))

    round_s = 2 * (tf + tb) + 2 * latency_s  # of one micro-batch alone
    rounds_s = round_s * (m // k) + (k - 1) * (tf + tb)
    busy_s = (m + 1) * (tf + tb) + 2 * latency_s
    min_s = max(busy_s, round_s * (m // k))
    assert min_s - 1e-9 <= step.step_s <= max(rounds_s, busy_s + (k - 1) * (tf + tb)) + 1e-9
    if k == 1:
        assert step.step_s == pytest.approx(m * round_s)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_share_of_the_critical_path_is_what_a_step_gains_by_it(seed: int) -> None:
    """If a stage computed a millionth longer, the step would take a millionth of that share
    longer: the critical path is the derivative of the step, where no message queues."""
    draw = random.Random(seed)
    layout, more = replace(some_layout(draw), wan=LinkProfile(1e12, 0.02)), 1e-6
    p = layout.num_stages
    costs = some_costs(draw, p)
    for schedule in some_schedules(draw):
        step = simulate(schedule, layout, costs, agrees=True)
        stage = draw.randrange(p)

        def longer(seconds: list[float], stage: int = stage) -> list[float]:
            return [s * (1 + more * (n == stage)) for n, s in enumerate(seconds)]

        slower = replace(
            costs, forward_s=longer([*costs.forward_s]), backward_s=longer([*costs.backward_s]),
            weights_s=longer([*costs.weights_s]),
        )  # fmt: skip
        gained_s = simulate(schedule, layout, slower, agrees=True).step_s - step.step_s
        share_s = step.critical_s.get(f"compute of stage {stage}", 0.0)
        assert gained_s / more == pytest.approx(share_s, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_step_is_shorter_than_its_busiest_rank_or_line(seed: int) -> None:
    draw = random.Random(seed)
    layout = some_layout(draw)
    for schedule in some_schedules(draw):
        step: Prediction = simulate(schedule, layout, some_costs(draw, layout.num_stages))
        for use in step.ranks:
            assert use.compute_s + use.codec_s + use.average_s <= step.step_s + 1e-9
            whole_s = use.compute_s + use.codec_s + use.average_s + use.idle_s
            assert whole_s == pytest.approx(step.step_s), "a step that stands alone"
        assert max((use.busy_s for use in step.links), default=0.0) <= step.step_s + 1e-9
        computed = step.timeline.total_us("forward", "backward", "weights")
        assert 1e-6 * computed == pytest.approx(
            sum(use.compute_s for use in step.ranks)
            - 1e-6 * step.timeline.total_us("fetch", "clip", "optimizer"), abs=1e-3
        )  # fmt: skip
