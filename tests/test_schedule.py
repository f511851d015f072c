import pytest

from xcloud.errors import ConfigError
from xcloud.parallel.schedule import (
    Action,
    GPipe,
    OneForwardOneBackward,
    Schedule,
    ideal_ticks,
    rank_actions,
)

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
    found = [action for tick in ideal_ticks(schedule, num_stages) for action in tick]

    assert len(set(found)) == len(found) == 2 * schedule.num_micro_batches * num_stages


def test_textbook_1f1b_for_four_stages() -> None:
    order = OneForwardOneBackward(8).actions(1, 4)

    assert "".join(f"{a.kind[0]}{a.micro_batch}" for a in order) == (
        "f0f1f2b0f3b1f4b2f5b3f6b4f7b5b6b7"
    )


def test_a_schedule_that_waits_for_itself_is_refused() -> None:
    class BackwardFirst(GPipe):
        def actions(self, stage: int, num_stages: int) -> list[Action]:
            return super().actions(stage, num_stages)[::-1]

    with pytest.raises(ValueError, match="2 stages waits for itself"):
        rank_actions(BackwardFirst(2), [0, 1], 2, {0: (0, 1), 1: (0, 1)})


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


@pytest.mark.parametrize("value", [0, -1, "lots", 2.5, True])
def test_a_bad_number_of_micro_batches_dies_at_once(value: object) -> None:
    for kind in (GPipe, OneForwardOneBackward):
        with pytest.raises(ConfigError, match="num_micro_batches"):
            kind(value)
