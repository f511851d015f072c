"""The order in which a stage computes where the pipeline is not drained between updates.

Counted from 0: m micro-batches of an update, p stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from xcloud.base.settings import Positive, settings
from xcloud.pipeline.schedule import Action, Schedule


@settings("schedule")
class TwoBuffered(Schedule):
    """While an update's gradients come back, the next update's micro-batches go out.

    Every gradient is one update old, whatever the number of stages: update k moves the weights
    that update k-1 made by a gradient at the weights of update k-2. Two copies of the weights live
    at a time, one for the micro-batches of each of the two updates under way. Neither the bubble
    nor the round trip is in a step, as long as the round trip is shorter than what a stage
    computes in an update.

    Source: PipeDream-2BW (Narayanan et al., arXiv:2006.09503). Differences: the gradient is
    computed at w + (w - the w before), a prediction of the weights that it will move, and the
    order of the actions is this one's own.
    """

    overlaps_updates: ClassVar[bool] = True
    num_more_copies: ClassVar[int] = 3  # two of the weights, one of the gradients
    num_micro_batches: Positive = 4
    """Pieces that an update is cut into, over all ranks of a stage together."""
    predict: bool = True
    """Whether gradients are computed where the weights are expected to be when they move. False
    computes them at the weights as they were, as PipeDream-2BW does."""

    label_form = "two buffered m={num_micro_batches}"

    def num_ahead(self, stage: int, num_stages: int) -> int:
        """Return how many backwards of the next update a stage computes before this update ends.

        All at the last stage, none at the first, evenly between: so the last stage has told the
        norm of an update, and received the next micro-batches, before the first stage answers.
        """
        return round(self.num_micro_batches * stage / max(1, num_stages - 1))

    def window(self, stage: int, num_stages: int) -> list[Action]:
        """Return what a stage computes from one update to the next, in order.

        Micro-batches 0 to m-1 are of this update, m to 2m-1 those of the next one.
        """
        m = self.num_micro_batches
        ahead = self.num_ahead(stage, num_stages)
        # One backward for each forward: a stage never keeps more than m micro-batches'
        # activations, and sends in both directions all the time.
        order = []
        for i in range(m):
            forward = Action("forward", stage, micro_batch=m + i)
            backward = Action("backward", stage, micro_batch=ahead + i)
            # The last stage's backward follows its own forward; every other one waits for less.
            order += [forward, backward] if ahead == m else [backward, forward]
        return order

    def begun(self, stage: int, num_stages: int) -> set[Action]:
        ahead = self.num_ahead(stage, num_stages)
        forwards = {Action("forward", stage, micro_batch=i) for i in range(self.num_micro_batches)}
        return forwards | {Action("backward", stage, micro_batch=i) for i in range(ahead)}

    def actions(self, stage: int, num_stages: int) -> list[Action]:
        """Return a pass of its own: what the first update begins with, and what ends the last."""
        m = self.num_micro_batches
        window = self.window(stage, num_stages=num_stages)
        return next_part(window, m) + this_part(window, m)


def this_part(window: Sequence[Action], num_micro_batches: int) -> list[Action]:
    """Return what a window has of its own update."""
    return [action for action in window if action.micro_batch < num_micro_batches]


def next_part(window: Sequence[Action], num_micro_batches: int) -> list[Action]:
    """Return what a window has of the next update, numbered from 0."""
    return [
        action._replace(micro_batch=action.micro_batch - num_micro_batches)
        for action in window
        if action.micro_batch >= num_micro_batches
    ]
