"""Schedules as data: in which order a stage computes its micro-batches. Nothing is computed here.

A schedule is written for a whole stage; the ranks (lanes) of the stage take their own
micro-batches out of that one order, which keeps any number of lanes free of deadlock.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeVar

from xcloud.checks import check_int

K = TypeVar("K", bound=Hashable)


class Action(NamedTuple):
    kind: Literal["forward", "backward"]
    stage: int
    micro_batch: int


class Schedule(Hashable, Protocol):
    @property
    def num_micro_batches(self) -> int: ...

    @property
    def label(self) -> str: ...

    def actions(self, stage: int, num_stages: int) -> list[Action]:
        """Every forward and backward of this stage for one pass over the pipeline."""


@dataclass(frozen=True)
class GPipe:
    """All forwards, then all backwards (Huang et al., arXiv:1811.06965), micro-batch 0 first."""

    num_micro_batches: int = 4

    def __post_init__(self) -> None:
        check_int("schedule.num_micro_batches", self.num_micro_batches, 1)

    @property
    def label(self) -> str:
        return f"gpipe m={self.num_micro_batches}"

    def actions(self, stage: int, num_stages: int) -> list[Action]:
        order = range(self.num_micro_batches)
        return [Action("forward", stage, i) for i in order] + [
            Action("backward", stage, i) for i in order
        ]


@dataclass(frozen=True)
class OneForwardOneBackward:
    """1F1B (PipeDream-flush): after a warm-up, forwards and backwards alternate.

    num_in_flight: micro-batches that stage 0 starts before its first backward; the later stages
    hold evenly fewer, the last one 1. None = num_stages, the textbook's count. On a slow link one
    or two more keep the stages busy while messages travel.
    """

    num_micro_batches: int = 4
    num_in_flight: int | None = None

    def __post_init__(self) -> None:
        check_int("schedule.num_micro_batches", self.num_micro_batches, 1)
        if self.num_in_flight is not None:
            check_int("schedule.num_in_flight", self.num_in_flight, 1)

    @property
    def label(self) -> str:
        return f"1f1b m={self.num_micro_batches} in flight={self.num_in_flight or 'p'}"

    def actions(self, stage: int, num_stages: int) -> list[Action]:
        at_first = self.num_in_flight or num_stages
        behind = num_stages - 1
        share = (behind - stage) / behind if behind else 0.0
        warm_up = min(1 + math.ceil((at_first - 1) * share), self.num_micro_batches)
        actions = [Action("forward", stage, i) for i in range(warm_up)]
        for i in range(self.num_micro_batches):
            actions.append(Action("backward", stage, i))
            if warm_up + i < self.num_micro_batches:
                actions.append(Action("forward", stage, warm_up + i))
        return actions


@dataclass(frozen=True)
class ForwardOnly:
    """Evaluation: every micro-batch once, forward."""

    num_micro_batches: int

    @property
    def label(self) -> str:
        return f"forward only m={self.num_micro_batches}"

    def actions(self, stage: int, num_stages: int) -> list[Action]:
        return [Action("forward", stage, i) for i in range(self.num_micro_batches)]


def rank_actions(
    schedule: Schedule,
    stages: Sequence[int],
    num_stages: int,
    lane_of: Mapping[int, tuple[int, int]],
) -> list[Action]:
    """The order in which one rank works on all stages it holds.

    lane_of: stage -> (lane, number of lanes); only micro-batches i with i mod lanes = lane are the
    rank's own. Several stages (a rank at both ends, or one that holds all) are interleaved in the
    order of an ideal pipeline, which respects every dependency and so cannot deadlock.
    """
    if len(stages) > 1:
        order = ideal_order(schedule, num_stages)
    else:
        order = schedule.actions(stages[0], num_stages)
    return [
        action
        for action in order
        if action.stage in lane_of
        and action.micro_batch % lane_of[action.stage][1] == lane_of[action.stage][0]
    ]


def ideal_order(schedule: Schedule, num_stages: int) -> list[Action]:
    """All actions as a pipeline does them whose actions all take one tick and whose messages take
    no time; within a tick by stage. Raises ValueError for a schedule that waits for itself."""
    queues = [deque(schedule.actions(stage, num_stages)) for stage in range(num_stages)]
    done: set[Action] = set()
    order: list[Action] = []
    while any(queues):
        tick = [queue[0] for queue in queues if queue and _is_ready(queue[0], num_stages, done)]
        if not tick:
            raise ValueError(
                f"{schedule.label} with {num_stages} stages waits for itself for ever"
            )
        for action in tick:
            queues[action.stage].popleft()
        done.update(tick)
        order += tick
    return order


def _is_ready(action: Action, num_stages: int, done: set[Action]) -> bool:
    """Whether what the action takes as its input has been computed."""
    if action.kind == "forward":
        return action.stage == 0 or action._replace(stage=action.stage - 1) in done
    if action.stage == num_stages - 1:
        return action._replace(kind="forward") in done
    return action._replace(stage=action.stage + 1) in done


def most_in_flight(actions: Iterable[Action], link: Callable[[int], K]) -> Counter[K]:
    """Most micro-batches between their forward and their backward at once, by the link they take.

    actions: of one stage, in order. link: of a micro-batch, to the next stage and back. As the
    stage's backward follows the gradient from the next stage, no more messages than this are
    under way on a link, in either direction.
    """
    in_flight: Counter[K] = Counter()
    most: Counter[K] = Counter()
    for action in actions:
        taken = link(action.micro_batch)
        in_flight[taken] += 1 if action.kind == "forward" else -1
        most[taken] = max(most[taken], in_flight[taken])
    return most
