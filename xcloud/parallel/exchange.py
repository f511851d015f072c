"""How ranks that train the same parameters agree on an update. Knows no optimizer, task or stage.

Sums, not means: every micro-batch's loss is already divided by the weight of the whole update, so
the sum over ranks is the gradient of the large batch, whatever the number of ranks
([B]: gradient averaging, (1/N) sum of the ranks' gradients).

Shapes: N = number of trained values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from xcloud.comm.state import State, Stateful, split_state
from xcloud.parallel.norm import are_finite, squared_norm
from xcloud.parallel.rank_group import RankGroup
from xcloud.parallel.sharded import local_part, with_part


class FlatBuffer:
    """Trained parameters as one vector: their gradients always, their values where asked for.
    Of parameters dealt over ranks, what this one holds.

    flat: [N + 1], every `.grad` is a view of it; the last place is for the loss.
    squares_elsewhere: added to the squared norm: what other ranks hold of these gradients, or,
        negative, what another stage counts too.
    """

    squares_elsewhere = 0.0
    finish_sum: Callable[[], None] | None = None  # of the gradients, where the backward began it

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        held = list(parameters)
        self.parameters = [p for p in held if p.requires_grad]
        # Where nothing is trained the loss still lies where the other ranks have theirs.
        first = next(iter(self.parameters or held), torch.zeros(0))
        assert all(p.dtype == first.dtype and p.device == first.device for p in self.parameters)
        own = [local_part(p) for p in self.parameters]
        size = sum(part.numel() for part in own)
        self.flat = torch.zeros(size + 1, dtype=first.dtype, device=first.device)
        for parameter, view in zip(self.parameters, _views(self.gradients, own), strict=True):
            parameter.grad = with_part(parameter, view)

    @property
    def gradients(self) -> Tensor:
        """[N], a view."""
        return self.flat[:-1]

    @cached_property
    def values(self) -> Tensor:
        """The parameters themselves, [N]: writing to it changes them. The first use moves them
        there; an exchange of gradients never asks."""
        values = self.flat.new_empty(len(self.gradients))
        for parameter, view in zip(self.parameters, _views(values, self.parameters), strict=True):
            parameter.data = view.copy_(parameter.data)
        return values

    def zero(self) -> None:
        self.flat.zero_()

    def sum_over(self, group: RankGroup, loss: Tensor) -> Tensor:
        """Gradients and loss become their sums over the ranks of `group`; returns the loss."""
        self.flat[-1] = loss
        if self.finish_sum is None:
            group.sum(self.flat)
        else:
            self.finish_sum()
            group.sum(self.flat[-1:])
        return self.flat[-1].clone()

    def is_finite(self) -> bool:
        """Of all gradients and the loss."""
        return are_finite([self.flat])

    def squared_norm(self) -> float:
        """Sum of the squared gradients, in float64."""
        squares = squared_norm(self.gradients) + self.squares_elsewhere
        return 0.0 if squares < 0 else squares  # of nothing but what another end counts, rounded

    def scale(self, factor: float) -> None:
        """Multiply the gradients."""
        self.gradients.mul_(factor)


def _views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(flat, [p.numel() for p in parameters])
    return [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]


class GradientExchange(Stateful, Protocol):
    """Keeps replicas of the same parameters equal, or brings them together from time to time.

    Every rank has one for each stage (or one-way part) that it trains. All replicas of a stage
    have the same kind and make both calls for every update, skipped ones included.

    What it sends to another cloud goes through channels of the wiring, which count, emulate and
    audit it, and whose state is the wiring's. Inside a cloud it may use the group's collectives.
    """

    def before_update(self, step: int, buffer: FlatBuffer, loss: Tensor) -> Tensor:
        """Replace this rank's gradients by those that the optimizer is to use.

        loss: this rank's share, a scalar. Returns the whole loss, which also takes the last place
        of `buffer.flat`. What is there afterwards is checked for finite values and clipped.
        """

    def after_update(self, step: int, buffer: FlatBuffer) -> None:
        """The optimizer has made or skipped the update. May change `buffer.values`."""


@dataclass(frozen=True)
class AllReduce:
    """The sum over the ranks of one cloud in every update; carries nothing between updates."""

    group: RankGroup

    def before_update(self, step: int, buffer: FlatBuffer, loss: Tensor) -> Tensor:
        return buffer.sum_over(self.group, loss)

    def after_update(self, step: int, buffer: FlatBuffer) -> None:
        """All replicas have made the same update."""

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        split_state(state, (), "an all-reduce of gradients")
