"""Schedules as data: in which order a stage computes its micro-batches. Nothing is computed here.

A schedule is written for a whole stage; the ranks of the stage take their own
micro-batches out of that one order, which keeps any number of ranks free of deadlock.

A new one is a frozen dataclass with num_micro_batches, a label and actions. It is planned
(plan=show) as it stands; `variants` offers what else may be tried of it. 1F1B and zero bubble are
in one_forward_one_backward.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeVar

from xcloud.base.settings import Labelled, Positive, settings

if TYPE_CHECKING:
    from torch import nn  # a schedule is planned without torch

K = TypeVar("K", bound=Hashable)


class Action(NamedTuple):
    """kind: "backward" computes every gradient, unless the stage has a "weights" action of the
    micro-batch later on. Then it computes what the stage before needs, and "weights" the rest."""

    kind: Literal["forward", "backward", "weights"]
    stage: int
    micro_batch: int


class SplitBackward(AbstractContextManager[object]):
    """Entered around the forward and around the backward of one micro-batch at one stage."""

    @abstractmethod
    def compute(self) -> None:
        """The gradients that the backward left out: of the "weights" action."""


class Schedule(Labelled, ABC):
    num_micro_batches: int
    overlaps_updates: ClassVar[bool] = False
    """Whether the next update begins before this one has ended."""
    num_more_copies: ClassVar[int] = 0
    """Copies of weights and gradients in memory, beside the one of each that training has."""

    @abstractmethod
    def actions(self, stage: int, num_stages: int) -> list[Action]:
        """Everything this stage computes in one pass over the pipeline, in order."""

    def window(self, stage: int, num_stages: int) -> list[Action]:
        """Return what a stage computes from one update to the next, once training is under way.

        A schedule that overlaps updates numbers the micro-batches of the next one from m on.
        """
        return self.actions(stage, num_stages=num_stages)

    def begun(self, stage: int, num_stages: int) -> set[Action]:
        """Return what the window before has computed of this update at a stage."""
        return set()

    def for_lanes(self, num_stages: int, num_lanes: int) -> Schedule:
        """Return this schedule with every setting that depends on the layout filled in.

        num_lanes: micro-batches that one stage computes side by side (ClusterLayout.num_lanes).
        The pipeline, the simulator, the windows of links and the planner's memory all ask here.
        """
        return self

    def variants(self, num_stages: int, num_lanes: int) -> Sequence[Schedule]:
        """Return what else may be tried of it, itself first."""
        return [self]

    def splits(self, stage: nn.Module) -> Callable[[], SplitBackward]:
        """Return what splits a micro-batch's backward, where there are "weights" actions."""
        raise TypeError(f"{self.label} has 'weights' actions, and no `splits`")


@settings("schedule")
class GPipe(Schedule):
    """All forwards, then all backwards (Huang et al., arXiv:1811.06965), micro-batch 0 first.

    num_micro_batches: pieces that a pass is cut into, over all ranks and replicas of a stage
        together.
    """

    num_micro_batches: Positive = 4

    label_form = "gpipe m={num_micro_batches}"

    def actions(self, stage: int, num_stages: int) -> list[Action]:
        order = range(self.num_micro_batches)
        return [Action("forward", stage, micro_batch=i) for i in order] + [
            Action("backward", stage, micro_batch=i) for i in order
        ]


def max_in_flight(actions: Iterable[Action], link: Callable[[int], K]) -> Counter[K]:
    """Return the maximum number of micro-batches that are between their forward and their backward
    at once, by the link they take.

    The stage's backward follows the gradient from the next stage. So no more messages than this
    are under way on a link, in either direction.

    actions: the actions of one stage, in order.
    link: returns the link of a micro-batch to the next stage and back.
    """
    change = {"forward": 1, "backward": -1, "weights": 0}
    in_flight: Counter[K] = Counter()
    most: Counter[K] = Counter()
    for action in actions:
        taken = link(action.micro_batch)
        in_flight[taken] += change[action.kind]
        most[taken] = max(most[taken], in_flight[taken])
    return most


def split_backwards(actions: Iterable[Action]) -> frozenset[tuple[int, int]]:
    """Return (stage, micro-batch) of the backwards that leave the weights for later."""
    return frozenset((a.stage, a.micro_batch) for a in actions if a.kind == "weights")


def rank_actions(
    schedule: Schedule, stages: Sequence[int], num_stages: int, turn_of: dict[int, tuple[int, int]]
) -> list[Action]:
    """The order in which one rank works on all stages it holds, from one update to the next.

    turn_of: stage -> (first, period); only micro-batches i with i mod period = first are the
    rank's own. Several stages (a rank at both ends, interleaved stages, or one that holds all) are
    worked on in the order of an ideal pipeline, which respects every dependency and so cannot
    deadlock; in a tick the later stage comes first, as it is nearer to the gradients that all
    wait for.
    """
    order = schedule.window(stages[0], num_stages=num_stages)
    if len(stages) > 1:
        ticks = ideal_ticks(schedule, num_stages=num_stages)
        order = [action for tick in ticks for action in reversed(tick)]
    m = schedule.num_micro_batches
    return [
        action
        for action in order
        if action.stage in turn_of
        and action.micro_batch % m % turn_of[action.stage][1] == turn_of[action.stage][0]
    ]


def ideal_ticks(schedule: Schedule, num_stages: int) -> list[list[Action]]:
    """Return what equal stages on ranks of their own do in each tick, by stage within a tick, if
    every action takes one tick and messages take none.

    Raises ValueError for a schedule that deadlocks.
    """
    stages = range(num_stages)
    queues = [deque(schedule.window(stage, num_stages=num_stages)) for stage in stages]
    done = {a for stage in stages for a in schedule.begun(stage, num_stages=num_stages)}
    ticks: list[list[Action]] = []
    while any(queues):
        # Decided before anything of this tick is done: an action cannot use what ends with it.
        tick = [
            queue[0]
            for queue in queues
            if queue and _has_input(queue[0], num_stages=num_stages, done=done)
        ]
        if not tick:
            raise ValueError(
                f"{schedule.label} with {num_stages} stages deadlocks: a stage waits for "
                "a message that it would send later"
            )
        for action in tick:
            queues[action.stage].popleft()
        done.update(tick)
        ticks.append(tick)
    return ticks


def _has_input(action: Action, num_stages: int, done: set[Action]) -> bool:
    """Return whether the input of `action` is there after the actions in `done`."""
    if action.kind == "forward":
        return action.stage == 0 or action._replace(stage=action.stage - 1) in done
    if action.kind == "weights":
        return action._replace(kind="backward") in done
    # The last stage has the loss, so it waits for nobody.
    if action.stage == num_stages - 1:
        return action._replace(kind="forward") in done
    return action._replace(stage=action.stage + 1) in done
