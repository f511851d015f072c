"""Schedules as data: in which order a stage computes its micro-batches. Nothing is computed here.

A schedule is written for a whole stage; the ranks of the stage take their own
micro-batches out of that one order, which keeps any number of ranks free of deadlock.

A new one is a frozen dataclass with num_micro_batches, a label and actions. It is planned
(plan=show) as it stands; `variants` offers what else may be tried of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, TypeVar

from xcloud.base.settings import Positive, settings

K = TypeVar("K", bound=Hashable)


class Action(NamedTuple):
    """kind: "backward" computes every gradient, unless the stage has a "weights" action of the
    micro-batch later on. Then it computes what the stage before needs, and "weights" the rest."""

    kind: Literal["forward", "backward", "weights"]
    stage: int
    micro_batch: int


class Schedule(Hashable, Protocol):
    @property
    def num_micro_batches(self) -> int: ...

    @property
    def label(self) -> str: ...

    def actions(self, stage: int, num_stages: int) -> list[Action]:
        """Everything this stage computes in one pass over the pipeline, in order."""


@settings("schedule")
class GPipe:
    """All forwards, then all backwards (Huang et al., arXiv:1811.06965), micro-batch 0 first."""

    num_micro_batches: Positive = 4

    @property
    def label(self) -> str:
        return f"gpipe m={self.num_micro_batches}"

    def actions(self, stage: int, num_stages: int) -> list[Action]:
        order = range(self.num_micro_batches)
        return [Action("forward", stage, i) for i in order] + [
            Action("backward", stage, i) for i in order
        ]


def _counts_in_flight(num_stages: int, num_micro_batches: int) -> list[int]:
    """Numbers of micro-batches in flight that are worth trying."""
    p = num_stages
    return sorted({k for k in (p, p + 1, 2 * p, 4 * p) if k < num_micro_batches})


@settings("schedule")
class OneForwardOneBackward:
    """1F1B (PipeDream-flush): after a warm-up, forwards and backwards alternate.

    num_in_flight: micro-batches that stage 0 starts before its first backward; the later stages
    hold evenly fewer, the last one 1. None = num_stages, the textbook's count. On a slow link one
    or two more keep the stages busy while messages travel.
    """

    num_micro_batches: Positive = 4
    num_in_flight: Positive | None = None

    @property
    def label(self) -> str:
        return f"1f1b m={self.num_micro_batches} in flight={self.num_in_flight or 'p'}"

    def actions(self, stage: int, num_stages: int) -> list[Action]:
        warm_up = self._warm_up(stage, num_stages)
        actions = [Action("forward", stage, i) for i in range(warm_up)]
        for i in range(self.num_micro_batches):
            actions.append(Action("backward", stage, i))
            if warm_up + i < self.num_micro_batches:
                actions.append(Action("forward", stage, warm_up + i))
        return actions

    def variants(self, num_stages: int) -> list[Schedule]:
        """With other numbers in flight, its own first."""
        counts = _counts_in_flight(num_stages, self.num_micro_batches)
        return [self, *(replace(self, num_in_flight=k) for k in counts)]

    def _warm_up(self, stage: int, num_stages: int) -> int:
        """Forwards of a stage before its first backward."""
        at_first = self.num_in_flight or num_stages
        behind = num_stages - 1
        share = (behind - stage) / behind if behind else 0.0
        return min(1 + math.ceil((at_first - 1) * share), self.num_micro_batches)


@settings("schedule")
class ZeroBubble(OneForwardOneBackward):
    """1F1B whose backward is split (Qi et al., arXiv:2401.10241): a stage sends the gradient that
    the stage before waits for, and computes those of its weights later, where it would wait.
    Stage 0, for which nobody waits, does both at once.

    num_in_memory: micro-batches that a stage keeps anything of at most, from their forward to
        their weights' gradients, where its forwards in flight leave room. None = num_in_flight: no
        stage keeps more than stage 0 does (ZB-H1). 1 = every stage keeps what it keeps under 1F1B.
    """

    num_in_memory: Positive | None = None

    @property
    def label(self) -> str:
        memory = "" if self.num_in_memory is None else f" in memory={self.num_in_memory}"
        in_flight = self.num_in_flight or "p"
        return f"zero bubble m={self.num_micro_batches} in flight={in_flight}{memory}"

    def actions(self, stage: int, num_stages: int) -> list[Action]:
        order = super().actions(stage, num_stages)
        if stage == 0:
            return order
        memory = self.num_in_memory or self.num_in_flight or num_stages
        most_late = max(0, memory - self._warm_up(stage, num_stages))
        num_late = num_weights = 0
        actions: list[Action] = []
        for action in order:
            if action.kind == "forward":
                makes_room = num_late > most_late
            else:  # in the cool-down, while the gradient is on its way
                makes_room = bool(actions) and actions[-1].kind == "backward"
            if makes_room:
                actions.append(Action("weights", stage, num_weights))
                num_weights += 1
                num_late -= 1
            num_late += action.kind == "backward"
            actions.append(action)
        late = range(num_weights, self.num_micro_batches)
        return actions + [Action("weights", stage, i) for i in late]

    def variants(self, num_stages: int) -> list[Schedule]:
        m = self.num_micro_batches
        counts = [*_counts_in_flight(num_stages, m), m]
        return [self, *(replace(self, num_in_flight=k, num_in_memory=k) for k in counts)]


@dataclass(frozen=True)
class ForwardOnly:
    """Evaluation: every micro-batch once, forward."""

    num_micro_batches: int

    @property
    def label(self) -> str:
        return f"forward only m={self.num_micro_batches}"

    def actions(self, stage: int, num_stages: int) -> list[Action]:
        return [Action("forward", stage, i) for i in range(self.num_micro_batches)]


def most_in_flight(actions: Iterable[Action], link: Callable[[int], K]) -> Counter[K]:
    """Most micro-batches between their forward and their backward at once, by the link they take.

    actions: of one stage, in order. link: of a micro-batch, to the next stage and back. As the
    stage's backward follows the gradient from the next stage, no more messages than this are
    under way on a link, in either direction.
    """
    change = {"forward": 1, "backward": -1, "weights": 0}
    in_flight: Counter[K] = Counter()
    most: Counter[K] = Counter()
    for action in actions:
        taken = link(action.micro_batch)
        in_flight[taken] += change[action.kind]
        most[taken] = max(most[taken], in_flight[taken])
    return most


def most_kept(
    actions: Iterable[Action], num_ranks: int, activations: float, waiting: float
) -> float:
    """Bytes that the fullest of a stage's ranks keeps at most. actions: of one stage, in order.
    activations: bytes of a micro-batch; waiting: of what remains when its weights are put off."""
    actions = list(actions)
    late = put_off(actions)
    kept, most = [0.0] * num_ranks, 0.0
    for kind, stage, i in actions:
        waits = waiting if (stage, i) in late else 0.0
        change = {"forward": activations, "backward": waits - activations, "weights": -waits}
        kept[i % num_ranks] += change[kind]
        most = max(most, kept[i % num_ranks])
    return most


def put_off(actions: Iterable[Action]) -> frozenset[tuple[int, int]]:
    """(stage, micro-batch) of the backwards that leave the weights for later."""
    return frozenset((a.stage, a.micro_batch) for a in actions if a.kind == "weights")


def rank_actions(
    schedule: Schedule, stages: Sequence[int], num_stages: int, turn_of: dict[int, tuple[int, int]]
) -> list[Action]:
    """The order in which one rank works on all stages it holds.

    turn_of: stage -> (first, period); only micro-batches i with i mod period = first are the
    rank's own. Several stages (a rank at both ends, interleaved stages, or one that holds all) are
    worked on in the order of an ideal pipeline, which respects every dependency and so cannot
    deadlock; in a tick the later stage comes first, as it is nearer to the gradients that all
    wait for.
    """
    if len(stages) > 1:
        ticks = ideal_ticks(schedule, num_stages)
        order = [action for tick in ticks for action in reversed(tick)]
    else:
        order = schedule.actions(stages[0], num_stages)
    return [
        action
        for action in order
        if action.stage in turn_of
        and action.micro_batch % turn_of[action.stage][1] == turn_of[action.stage][0]
    ]


def ideal_ticks(schedule: Schedule, num_stages: int) -> list[list[Action]]:
    """What equal stages on ranks of their own do in each tick, if every action takes one and
    messages take none; by stage within a tick. Raises ValueError for a schedule that deadlocks."""
    queues = [schedule.actions(stage, num_stages) for stage in range(num_stages)]
    position = [0] * num_stages
    done: set[Action] = set()
    ticks: list[list[Action]] = []
    while any(position[stage] < len(queue) for stage, queue in enumerate(queues)):
        tick = [
            queue[position[stage]]
            for stage, queue in enumerate(queues)
            if position[stage] < len(queue)
            and _has_input(queue[position[stage]], num_stages, done)
        ]
        if not tick:
            raise ValueError(
                f"{schedule.label} with {num_stages} stages waits for itself for ever"
            )
        done.update(tick)
        for action in tick:
            position[action.stage] += 1
        ticks.append(tick)
    return ticks


def _has_input(action: Action, num_stages: int, done: set[Action]) -> bool:
    """Whether the input of `action` is there after the actions in `done`."""
    if action.kind == "forward":
        return action.stage == 0 or action._replace(stage=action.stage - 1) in done
    if action.kind == "weights":
        return action._replace(kind="backward") in done
    if action.stage == num_stages - 1:
        return action._replace(kind="forward") in done
    return action._replace(stage=action.stage + 1) in done
