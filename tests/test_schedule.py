import textwrap
from pathlib import Path

import pytest

from xcloud.base.errors import ConfigError
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, ZeroBubble
from xcloud.pipeline.schedule import (
    Action,
    GPipe,
    Schedule,
    ideal_ticks,
    max_in_flight,
    rank_actions,
    split_backwards,
)

SCHEDULES = [
    GPipe(1),
    GPipe(5),
    OneForwardOneBackward(1),
    OneForwardOneBackward(6),
    OneForwardOneBackward(6, 4),
    OneForwardOneBackward(6, 99),
    OneForwardOneBackward(6, 1),
    ZeroBubble(1),
    ZeroBubble(6),
    ZeroBubble(6, 4),
    ZeroBubble(6, 99),
    ZeroBubble(6, 3, 1),
    ZeroBubble(6, 1, 99),
]
# The example of docs/add-a-schedule.md, as a newcomer would copy it.
PAGE = Path(__file__).parent.parent / "docs" / "add-a-schedule.md"
exec(textwrap.dedent(PAGE.read_text().split("```python\n")[1].split("```")[0]), globals())
SCHEDULES.append(OneAtATime(6))  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_every_micro_batch_goes_forward_then_backward_once(
    schedule: Schedule, num_stages: int
) -> None:
    for stage in range(num_stages):
        actions = schedule.actions(stage, num_stages)
        for i in range(schedule.num_micro_batches):
            forward = actions.index(Action("forward", stage, i))
            backward = actions.index(Action("backward", stage, i))
            assert forward < backward
            if split_backwards(actions):
                assert backward < actions.index(Action("weights", stage, i))
        num_kinds = 3 if split_backwards(actions) else 2
        assert len(actions) == num_kinds * schedule.num_micro_batches
        for kind in ("forward", "backward", "weights"):
            order = [a.micro_batch for a in actions if a.kind == kind]
            assert order == sorted(order)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_no_schedule_waits_for_itself(schedule: Schedule, num_stages: int) -> None:
    found = [action for tick in ideal_ticks(schedule, num_stages) for action in tick]

    each = [schedule.actions(stage, num_stages) for stage in range(num_stages)]
    assert sorted(found) == sorted(action for actions in each for action in actions)
    assert len(set(found)) == len(found)


def test_textbook_1f1b_for_four_stages() -> None:
    order = OneForwardOneBackward(8).actions(1, 4)

    assert "".join(f"{a.kind[0]}{a.micro_batch}" for a in order) == (
        "f0f1f2b0f3b1f4b2f5b3f6b4f7b5b6b7"
    )


def test_zero_bubble_for_four_stages_is_zb_h1() -> None:
    """Qi et al., figure 3: the first stage as under 1F1B, the last one puts off three."""
    orders = ["".join(f"{a.kind[0]}{a.micro_batch}" for a in ZeroBubble(8).actions(stage, 4))
              for stage in range(4)]  # fmt: skip

    assert orders[0] == "f0f1f2f3b0f4b1f5b2f6b3f7b4b5b6b7"
    assert orders[2] == "f0f1b0f2b1f3b2w0f4b3w1f5b4w2f6b5w3f7b6w4b7w5w6w7"
    assert orders[3] == "f0b0f1b1f2b2f3b3w0f4b4w1f5b5w2f6b6w3f7b7w4w5w6w7"


@pytest.mark.parametrize(("num_in_flight", "num_in_memory"), [(None, None), (6, None), (6, 2)])
def test_zero_bubble_keeps_no_more_than_it_may(
    num_in_flight: int | None, num_in_memory: int | None
) -> None:
    """From forward to weights: as many as stage 0, or, where asked, as the stage under 1F1B."""
    for stage in range(1, 4):
        own = OneForwardOneBackward(12, num_in_flight).actions(stage, 4)
        actions = ZeroBubble(12, num_in_flight, num_in_memory).actions(stage, 4)
        (under_way,) = max_in_flight(own, lambda i: None).values()

        assert max_in_flight(actions, lambda i: None) == {None: under_way}, "links as in 1F1B"
        kept = most = 0
        for action in actions:
            kept += {"forward": 1, "backward": 0, "weights": -1}[action.kind]
            most = max(most, kept)
        assert most == max(under_way, num_in_memory or num_in_flight or 4)


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
        if action.kind == "weights":
            assert position[action._replace(kind="backward")] < at
    for stage in range(3):
        assert [a for a in both if a.stage == stage] == schedule.actions(stage, 3)


@pytest.mark.parametrize("value", [0, -1, "lots", 2.5, True])
def test_a_bad_number_of_micro_batches_dies_at_once(value: object) -> None:
    for kind in (GPipe, OneForwardOneBackward, ZeroBubble):
        with pytest.raises(ConfigError, match="num_micro_batches"):
            kind(value)
