"""What holds of every price and every simulation, whatever the model, the clouds and the line."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.plan_pieces import drawn
from xcloud.cluster.layout import Cloud, ClusterLayout
from xcloud.cluster.link_profile import LinkProfile
from xcloud.parallel.one_forward_one_backward import OneForwardOneBackward, ZeroBubble
from xcloud.parallel.schedule import GPipe, Schedule
from xcloud.plan.costs import Costs, Direction, Update
from xcloud.plan.plans import Plan
from xcloud.plan.prediction import Simulator
from xcloud.plan.pricing import Pricer
from xcloud.plan.profile import Curve
from xcloud.plan.search import Space

SEEDS = range(8)


def some_plans(pricer: Pricer, space: Space, seed: int, most: int = 12) -> list[Plan]:
    groups = [plan for group in space.groups(pricer.arranged)
              for plan in space.with_schedules(group)]  # fmt: skip
    return random.Random(seed).sample(groups, min(most, len(groups)))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_step_goes_into_adds_up_and_a_price_is_its_step(seed: int) -> None:
    pricer, space = drawn(seed)
    for plan in some_plans(pricer, space, seed):
        price = pricer.price(plan)
        assert price.step_s == pricer.step_s(plan)
        assert sum(price.spent_s.values()) == pytest.approx(price.step_s)
        assert list(price.spent_s.values()) == sorted(price.spent_s.values(), reverse=True)
        assert price.bubble_ratio > -1e-9 and price.compute_s > 0
        assert min(price.bytes_between.values()) > 0 and price.bytes_per_step > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slower_line_makes_no_step_shorter_and_carries_as_many_bytes(seed: int) -> None:
    pricer, space = drawn(seed)
    slow, fast = pricer.at_bandwidth(3e6), pricer.at_bandwidth(3e9)
    for plan in some_plans(pricer, space, seed):
        assert slow.step_s(plan) >= fast.step_s(plan) - 1e-9
        both = (priced.price(plan).bytes_between for priced in (slow, fast))
        assert next(both) == next(both)


@pytest.mark.parametrize("seed", SEEDS)
def test_dearer_pieces_and_calls_make_no_step_shorter(seed: int) -> None:
    pricer, space = drawn(seed)
    profile, draw = pricer.profile, random.Random(seed)
    which = draw.randrange(len(profile.pieces))
    one = profile.pieces[which]
    longer = Curve([(b, 1.5 * s) for b, s in one.backward_s.points])
    pieces = [*profile.pieces[:which], replace(one, backward_s=longer),
              *profile.pieces[which + 1 :]]  # fmt: skip
    call = Curve([(1, 0.003), (2, 0.003)])
    dearer = replace(pricer, profile=replace(profile, pieces=pieces))
    called = replace(pricer, profile=replace(profile, stage_forward_s=call))
    for plan in some_plans(pricer, space, seed):
        if isinstance(plan.schedule, ZeroBubble):
            continue  # its order is fixed, and a longer backward may well fill a gap of another
        assert dearer.step_s(plan) >= pricer.step_s(plan) - 1e-9
        assert called.step_s(plan) >= pricer.step_s(plan) - 1e-9
        calls_s = 0.003 * plan.micro_batches * len(plan.ends)  # of ranks up to twice as slow
        more_s = called.price(plan).compute_s - pricer.price(plan).compute_s
        assert calls_s - 1e-9 <= more_s <= 2 * calls_s + 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_a_share_of_the_samples_that_crosses_lies_between_all_and_none(seed: int) -> None:
    pricer, space = drawn(seed)
    shares = [replace(pricer, crossing={0: share}) for share in (0.0, 0.5, 1.0)]
    for plan in some_plans(pricer, space, seed):
        if plan.strategy != "pipeline" or isinstance(plan.schedule, ZeroBubble):
            continue
        none_s, half_s, all_s = (priced.step_s(plan) for priced in shares)
        assert none_s <= half_s + 1e-9 and half_s <= all_s + 1e-9
        assert all_s == pytest.approx(pricer.step_s(plan))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_of_several_steps_is_a_step_that_stands_alone(seed: int) -> None:
    """A program is repeated with tokens and parcels of its own, so nothing comes too early."""
    draw = random.Random(seed)
    p, m = draw.choice([2, 3, 4]), draw.choice([1, 2, 5, 8])
    clouds = {f"c{i}": Cloud() for i in range(p)}
    layout = ClusterLayout(clouds, LinkProfile(10 ** draw.uniform(5, 7), draw.uniform(0, 0.05)))
    ways = [
        [Direction(draw.randrange(100, 9000), 1e-3, 2e-3) for _ in range(p - 1)] for _ in range(2)
    ]
    costs = Costs(
        [draw.uniform(0.01, 0.04) for _ in range(p)], [draw.uniform(0.02, 0.08) for _ in range(p)],
        *ways, [Update(1e-3, 0.0, 2e-3, 3e-3)] * p, weights_s=[0.01] * p,
    )  # fmt: skip
    schedules: list[Schedule] = [GPipe(m), OneForwardOneBackward(m), ZeroBubble(m)]
    for schedule in schedules:
        alone, several = (
            Simulator(schedule, layout, agrees=True, num_steps=n).run(costs) for n in (1, 3)
        )
        for first, mine in zip(alone.moments.begin_s, several.moments.begin_s, strict=True):
            assert len(mine) == 3 * len(first)
            assert mine[: len(first)] == pytest.approx(first)
            assert mine == sorted(mine), "in order"
        assert len(several.moments.passages) == 3 * len(alone.moments.passages)
        assert several.step_s <= alone.step_s + 1e-9, "what is hidden behind the next step"
