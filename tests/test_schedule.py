import pytest

from xcloud.errors import ConfigError
from xcloud.parallel.schedule import (
    Action,
    GPipe,
    OneForwardOneBackward,
    Schedule,
    ideal_order,
    rank_actions,
)
from xcloud.parallel.simulate import simulate

SCHEDULES = [
    GPipe(1),
    GPipe(5),
    OneForwardOneBackward(1),
    OneForwardOneBackward(6),
    OneForwardOneBackward(6, 4),
    OneForwardOneBackward(6, 99),
    OneForwardOneBackward(6, 1),
]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_every_micro_batch_goes_forward_then_backward_once(
    schedule: Schedule, num_stages: int
) -> None:
    for stage in range(num_stages):
        actions = schedule.actions(stage, num_stages)
        for i in range(schedule.num_micro_batches):
            forward = actions.index(Action("forward", stage, i))
            assert forward < actions.index(Action("backward", stage, i))
        assert len(actions) == 2 * schedule.num_micro_batches
        for kind in ("forward", "backward"):
            order = [a.micro_batch for a in actions if a.kind == kind]
            assert order == sorted(order)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_no_schedule_waits_for_itself(schedule: Schedule, num_stages: int) -> None:
    found = simulate(schedule, num_stages, 1.0, 2.0, 0.5, 0.1)

    assert len(found.start_s) == 2 * schedule.num_micro_batches * num_stages


def test_textbook_1f1b_for_four_stages() -> None:
    order = OneForwardOneBackward(8).actions(1, 4)

    assert "".join(f"{a.kind[0]}{a.micro_batch}" for a in order) == (
        "f0f1f2b0f3b1f4b2f5b3f6b4f7b5b6b7"
    )


def test_bubble_of_a_free_link_is_the_papers_formula_1() -> None:
    for p, m in [(2, 4), (4, 8), (3, 7)]:
        assert simulate(GPipe(m), p, 1.0, 2.0).bubble_ratio == pytest.approx((p - 1) / m)


def test_bubble_of_blocking_transfers_is_the_papers_formula_2() -> None:
    tf, tb, tt = 1.0, 2.0, 0.3
    for p, m in [(2, 4), (2, 9)]:
        expected = ((p - 1) * (tf + tb + 2 * tt) + 2 * (m - 1) * tt) / (m * (tf + tb))
        found = simulate(GPipe(m), p, tf, tb, tt, transfers_block=True)
        assert found.bubble_ratio == pytest.approx(expected)


def test_overlapped_transfers_take_the_derived_formula_2_prime() -> None:
    tf, tb, latency = 1.0, 2.0, 0.2
    for p, m, tt in [(2, 4, 0.5), (3, 6, 0.5), (2, 4, 1.5), (2, 4, 5.0)]:
        expected = (
            p * (tf + tb) + 2 * (p - 1) * (tt + latency) + (m - 1) * (max(tf, tt) + max(tb, tt))
        )
        found = simulate(GPipe(m), p, tf, tb, tt, latency)
        assert found.step_s == pytest.approx(expected)


def test_more_in_flight_repairs_1f1b_on_a_slow_link() -> None:
    """Facts of the design: p=2, m=16, tf=1, tb=2 (bubble ratios)."""

    def bubble(schedule: Schedule, tt: float) -> float:
        return round(simulate(schedule, 2, 1.0, 2.0, tt).bubble_ratio, 3)

    assert bubble(OneForwardOneBackward(16), 0.5) == 0.229
    assert bubble(GPipe(16), 0.5) == 0.083
    assert bubble(OneForwardOneBackward(16, 4), 0.5) < 0.1


def test_lanes_take_their_own_micro_batches() -> None:
    actions = rank_actions(GPipe(5), [1], 2, {1: (1, 2)})

    assert [a.micro_batch for a in actions] == [1, 3, 1, 3]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_rank_with_several_stages_respects_every_dependency(schedule: Schedule) -> None:
    both = rank_actions(schedule, [0, 1, 2], 3, {s: (0, 1) for s in range(3)})
    position = {action: i for i, action in enumerate(both)}

    for action, at in position.items():
        if action.kind == "forward" and action.stage > 0:
            assert position[action._replace(stage=action.stage - 1)] < at
        if action.kind == "backward" and action.stage < 2:
            assert position[action._replace(stage=action.stage + 1)] < at
    for stage in range(3):
        assert [a for a in both if a.stage == stage] == schedule.actions(stage, 3)


@pytest.mark.parametrize("num_stages", [2, 3, 5])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_the_ideal_order_is_that_of_equal_stages_on_a_free_line(
    schedule: Schedule, num_stages: int
) -> None:
    at = simulate(schedule, num_stages, 1.0, 1.0).start_s

    assert ideal_order(schedule, num_stages) == sorted(at, key=lambda a: (at[a], a.stage))


@pytest.mark.parametrize("value", [0, -1, "lots", 2.5, True])
def test_a_bad_number_of_micro_batches_dies_at_once(value: object) -> None:
    for kind in (GPipe, OneForwardOneBackward):
        with pytest.raises(ConfigError, match="num_micro_batches"):
            kind(value)
