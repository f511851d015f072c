"""The plan of a one-way job: shares, bounds, lost producers; no processes."""

from collections import Counter

import pytest

from tests.one_way_toy import feeding
from xcloud.base.errors import ConfigError
from xcloud.features.one_way.feed import ConsumptionPlan, Feed, Order, Presence
from xcloud.features.one_way.layout import OneWayCloud, OneWayLayout
from xcloud.net.link_profile import FREE, LinkProfile
from xcloud.pipeline.settings import Optimizer


def plan_of(shares, lanes, consumers=1, batches=2, num_batches=0, **feed) -> ConsumptionPlan:
    plan = ConsumptionPlan(feeding(shares, lanes, consumers), batches, Feed(**feed), num_batches)
    end(plan, ready=range(len(shares)))
    return plan


def end(plan: ConsumptionPlan, consumed=(), skipped=(), ready=(), dead=()):
    """consumed, skipped: pairs. The others: producers of which all ranks say so."""
    agreed = plan.round()
    for some, pairs in ((agreed.consumed, consumed), (agreed.skipped, skipped)):
        for pair in pairs:
            some[pair] += 1
    for flags, producers in ((agreed.ready, ready), (agreed.dead, dead)):
        flags[list(producers)] = plan.num_consumers
    return plan.end_step(agreed)


def run_steps(plan: ConsumptionPlan, num_steps: int) -> tuple[list[Order], list[list[list[int]]]]:
    """All orders, and what each rank of the consumer takes in each step."""
    orders, taken = [], []
    for _ in range(num_steps):
        orders += plan.orders()
        slots = [plan.step_slots(c) for c in range(plan.num_consumers)]
        taken.append(slots)
        end(plan, consumed=[(s, c) for c, some in enumerate(slots) for s in some])
    return orders, taken


def test_shares_are_kept_in_every_stretch() -> None:
    _, taken = run_steps(plan_of([0.5, 0.3, 0.2], [1, 1, 1]), 50)
    order = [slot for (slots,) in taken for slot in slots]

    assert Counter(order) == {0: 50, 1: 30, 2: 20}
    for first in range(0, 90, 10):
        assert 4 <= order[first : first + 10].count(0) <= 6


def test_numbers_go_up_by_one_for_every_source_and_are_dealt_to_ranks_in_turn() -> None:
    orders, taken = run_steps(plan_of([0.5, 0.5], [2, 1], consumers=2, batches=4), 20)

    for source in (0, 1, 2):
        numbers = [order.number for order in orders if order.source == source]
        assert numbers == list(range(1, len(numbers) + 1))
    for c in (0, 1):
        sent = [order.source for order in orders if order.consumer == c]
        used = [source for step in taken for source in step[c]]
        assert sent[: len(used)] == used
        assert all(len(step[c]) == 2 for step in taken)


def test_nobody_runs_further_ahead_than_allowed() -> None:
    plan = plan_of([0.7, 0.3], [1, 2], consumers=2, batches=4, run_ahead=5)
    orders = plan.orders()
    counts = Counter(order.source for order in orders)

    assert max(counts.values()) == 5
    assert plan.orders() == []
    assert len({order.consumer for order in orders}) == 2


def test_nothing_is_ordered_before_all_are_ready() -> None:
    layout = feeding([0.5, 0.5], [1, 1])
    plan = ConsumptionPlan(layout, 2, Feed())
    end(plan, ready=[0])
    assert plan.orders() == [] and not plan.has_started
    end(plan, ready=[1])
    assert {order.source for order in plan.orders()} == {0, 1}


def test_a_dead_producer_gets_no_slot_any_more_and_what_was_ordered_may_be_missed() -> None:
    plan = plan_of([0.5, 0.5], [1, 1], run_ahead=4)
    plan.orders()
    assert end(plan, dead=[1])[1] == (Presence.ACTIVE, Presence.DEAD)
    _, taken = run_steps(plan, 20)

    producers = [slot for (slots,) in taken for slot in slots]
    assert producers.count(1) <= 4 and set(producers[10:]) == {0}
    assert all(len(slots) == 2 for (slots,) in taken)
    assert end(plan, dead=[0])[0][1] is Presence.DEAD
    assert set(plan.state) == {Presence.DEAD}


def test_a_lost_producer_comes_back_with_its_ranks_at_one_number_and_owes_nothing() -> None:
    plan = plan_of([0.5, 0.5], [2, 1], batches=3)
    run_steps(plan, 4)
    end(plan, dead=[0])
    numbers = plan.numbers.tolist()
    assert numbers[0] != numbers[1], "or there is nothing to level"
    other = plan.ordered[2].tolist(), plan.consumed[2].tolist()

    assert plan.readmit_lost() == [0]

    assert plan.state[0] is Presence.ABSENT
    assert plan.numbers.tolist() == [max(numbers[:2])] * 2 + numbers[2:]
    assert plan.ordered.sum(1).tolist() == plan.numbers.tolist()
    assert plan.consumed[:2].tolist() == plan.ordered[:2].tolist()
    assert (plan.ordered[2].tolist(), plan.consumed[2].tolist()) == other
    assert not plan.readmit_lost()
    end(plan, ready=[0])
    orders, _ = run_steps(plan, 3)
    for source, number in enumerate(numbers[:2]):
        firsts = [order.number for order in orders if order.source == source]
        assert firsts[0] == max(numbers[:2]) + 1, f"source {source} stood at {number}"


def test_the_consumer_comes_first_whatever_the_order() -> None:
    layout = OneWayLayout(
        {"a": OneWayCloud(2, 3.0), "d": OneWayCloud(2), "b": OneWayCloud(1, 1.0)}, "free"
    )

    assert [layout.placement(rank).cloud for rank in range(5)] == ["d", "d", "a", "a", "b"]
    assert layout.placement(3).producer == 0 and layout.placement(3).group_rank == 1
    assert layout.shares == (0.75, 0.25) and layout.sources == (range(2), range(2, 3))
    assert "a (2 ranks, 75 %), b (1 rank, 25 %) feed d (2 ranks)" in layout.describe()
    assert layout.wan_between(0, 2) is FREE and layout.wan_between(0, 1) is None
    alone = OneWayLayout(layout.clouds, "free", form="one_cloud")
    assert alone.wan_between(0, 2) is None and not alone.crosses_clouds


@pytest.mark.parametrize(
    ("clouds", "more", "named"),
    [
        ({"a": OneWayCloud(1, 1.0)}, {}, "exactly one cloud that is fed"),
        ({"a": OneWayCloud(), "b": OneWayCloud()}, {}, "got a, b of a, b"),
        ({"a": OneWayCloud()}, {}, "no cloud that feeds"),
        ({"a": OneWayCloud(), "b": OneWayCloud(2, 1.0)}, {"form": "local"}, "num_ranks of every"),
        (
            {"a": OneWayCloud(), "b": OneWayCloud(1, 1.0)},
            {"form": "x"},
            "cluster.form must be one of",
        ),
        (
            {"a": OneWayCloud(), "b": OneWayCloud(1, 1.0)},
            {"wan": "x"},
            "cluster.wan must be .* got 'x'",
        ),
        ({"a": OneWayCloud(), "b": OneWayCloud(1, 1.0)}, {"links": {"b-c": "free"}}, "one of a-b"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(clouds, more, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        OneWayLayout(clouds, **more)


def test_a_link_of_its_own_is_named_either_way_round() -> None:
    clouds = {"en-us": OneWayCloud(1, 1.0), "disc": OneWayCloud()}

    for key in ("en-us-disc", "disc-en-us"):
        assert OneWayLayout(clouds, links={key: "free"}).wan_between(0, 1) is FREE


def test_each_producer_is_told_its_share_of_the_batches_as_long_as_all_feed() -> None:
    plan = plan_of([0.5, 0.3, 0.2], [2, 1, 1], num_batches=100)
    orders, _ = run_steps(plan, 50)

    of = [{0, 1}, {2}, {3}]
    told = {p: {o.num_planned for o in orders if o.source in of[p]} for p in range(3)}
    assert told == {0: {25}, 1: {30}, 2: {20}}


def test_who_takes_over_a_share_is_told_how_much_longer_it_goes_on() -> None:
    plan = plan_of([0.5, 0.5], [1, 1], num_batches=100, run_ahead=4)
    run_steps(plan, 20)
    end(plan, dead=[1])
    orders, taken = run_steps(plan, 30)

    assert {order.num_planned for order in orders} == {80}
    made = sum(slot == 0 for (slots,) in taken for slot in slots)
    assert 20 + made <= 80
    by_end = max(order.number for order in orders)
    assert Optimizer(1.0, 5, "linear").learning_rate_at(20 + made, 80) > 0 and by_end <= 84


@pytest.mark.parametrize("lost_at", range(20, 28))
def test_all_ranks_of_a_cloud_hear_the_same_of_the_same_batch(lost_at: int) -> None:
    """Also of one that was ordered of some of them before the plan changed."""
    plan = plan_of([0.5, 0.5], [2, 2], num_batches=100, run_ahead=3, batches=1)
    orders = []
    for step in range(60):
        orders += plan.orders()
        (slot,) = plan.step_slots(0)
        end(plan, consumed=[(slot, 0)], dead=[1] if step == lost_at else [])
    told: dict[tuple[int, int], set[int]] = {}
    for order in orders:
        told.setdefault((order.source // 2, order.number), set()).add(order.num_planned)

    assert all(len(plans) == 1 for plans in told.values())
    assert len({n for plans in told.values() for n in plans}) == 2


def test_links_of_their_own_are_described() -> None:
    clouds = {"a": OneWayCloud(1, 1.0), "b": OneWayCloud(1, 1.0), "d": OneWayCloud()}
    layout = OneWayLayout(clouds, links={"a-d": LinkProfile(1e9)})

    assert layout.describe_link() == (f"the network as it is; a-d {LinkProfile(1e9).describe()}")


def test_producers_may_run_ahead_by_twice_what_one_alone_would_have_to_give() -> None:
    layout = feeding([0.5, 0.5], [2, 4], 1)
    # One rank of the smaller producer may have to give 21 of 41 batches, one of them by rounding.
    assert Feed().fitted(layout, 40).run_ahead == 42
    assert Feed().fitted(layout, 2).run_ahead == 8
    assert Feed(run_ahead=33).fitted(layout, 40).run_ahead == 33


def test_a_promise_that_does_not_divide_is_rounded_up() -> None:
    """Else the rate of the last batches would already be that of the end."""
    plan = plan_of([0.5, 0.5], [3, 1], num_batches=10)
    orders, _ = run_steps(plan, 5)
    told = {order.source: order.num_planned for order in orders}

    assert told == {0: 2, 1: 2, 2: 2, 3: 5}  # 5 batches of three ranks, 5 of one
