"""Parameters that replicas change apart and bring together from time to time: what is kept between
two merges, what a merge does to the parameters, how many steps a replica makes until then. No
links to other replicas, no rounds. The inner optimizer is the trainer's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from xcloud.base.errors import ConfigError, FrameError
from xcloud.base.settings import settings
from xcloud.cluster.link import Parts
from xcloud.comm.state import OUTER, State, copy_of, fill, whole_number
from xcloud.parallel.exchange import RankGroup, are_finite
from xcloud.parallel.merging import Piece, gather_shares


@settings("strategy.averaging.outer")
class OuterOptimizer:
    """Gradient descent on the outer parameters. Their gradient: outer - values, how far replicas
    have moved away, merged.

    velocity = momentum * velocity + gradient
    outer -= learning_rate * (gradient + momentum * velocity   if nesterov, else velocity)

    DiLoCo (arXiv:2311.08105): 0.7, 0.9, Nesterov. Learning rate 1 without momentum replaces the
    outer parameters by the mean of the replicas: local SGD, and FedAvg (arXiv:1602.05629) where
    replicas count by their samples.
    """

    learning_rate: Annotated[float, Field(gt=0)] = 0.7
    momentum: Annotated[float, Field(ge=0, le=0.999999)] = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ConfigError(
                "strategy.averaging.outer.nesterov needs a momentum; set outer.momentum, or "
                "outer.nesterov=false"
            )

    @property
    def label(self) -> str:
        if not self.momentum:
            return "mean" if self.learning_rate == 1 else f"sgd({self.learning_rate:g})"
        name = "nesterov" if self.nesterov else "momentum"
        return f"{name}({self.learning_rate:g}, {self.momentum:g})"

    def step(
        self, outer: Sequence[Tensor], velocities: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Changes outer parameters and velocities in place, tensor by tensor."""
        for parameter, velocity, gradient in zip(outer, velocities, gradients, strict=True):
            # Multiplications and additions apart: a fused one rounds once, and replicas on
            # different processors would drift apart.
            update = gradient
            if self.momentum:
                velocity.mul_(self.momentum).add_(gradient)
                update = gradient + velocity * self.momentum if self.nesterov else velocity
            parameter.sub_(update * self.learning_rate)


class OuterParameters:
    """parameters: by name, the same values in every rank of `group` and in all replicas. shares:
    whole ones of these that each of its first ranks carries across. outer: the values of this
    rank's share after the last merge, the same bits in all replicas; velocity: of the outer
    optimizer.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], shares: Sequence[Sequence[Piece]],
        group: RankGroup, optimizer: OuterOptimizer,
    ) -> None:  # fmt: skip
        self._parameters, self._shares = list(parameters.values()), shares
        self._mine = shares[group.group_rank] if group.group_rank < len(shares) else ()
        self._own = [self._parameters[piece.index] for piece in self._mine]
        self._group, self._optimizer = group, optimizer
        self.outer = [p.detach().clone() for p in self._own]
        self.velocity = [
            torch.zeros_like(t) if optimizer.momentum else t.new_empty(0) for t in self.outer
        ]

    @property
    def are_finite(self) -> bool:
        """The parameters of now, those of other shares too: the same in all ranks of `group`."""
        return are_finite(p.detach() for p in self._parameters)

    def gradient(self) -> list[Tensor]:
        """How far this replica has moved away: outer - values."""
        return [a - p.detach() for a, p in zip(self.outer, self._own, strict=True)]

    def move(self, gradients: Sequence[Tensor]) -> None:
        """The outer optimizer's step, unless a gradient is not finite; the parameters stay."""
        if are_finite(gradients):
            self._optimizer.step(self.outer, self.velocity, gradients)

    def take(self, mix: float = 0.0) -> None:
        """Parameters become mix * own + (1 - mix) * outer."""
        if not mix:
            return self._write(self.outer)
        pairs = zip(self._own, self.outer, strict=True)
        self._write([own.detach() * mix + outer * (1 - mix) for own, outer in pairs])

    def keep(self, gradients: Sequence[Tensor]) -> None:
        """Parameters become the outer ones, and on top what this replica has done by itself."""
        self._write([a - g for a, g in zip(self.outer, gradients, strict=True)])

    def flat(self) -> Parts:
        """Outer parameters and velocity as one vector each, for another replica's `replace`."""
        return tuple(
            torch.cat([tensor.reshape(-1) for tensor in tensors])
            for tensors in (self.outer, self.velocity)
        )

    def replace(self, values: Parts) -> None:
        """Raises FrameError for those of other settings."""
        found, expected = ([flat.shape for flat in some] for some in (values, self.flat()))
        if found != expected:
            raise FrameError(f"the hub sent values and velocity of {found}, expected {expected}")
        for tensors, flat in zip((self.outer, self.velocity), values, strict=True):
            sizes = [tensor.numel() for tensor in tensors]
            for tensor, piece in zip(tensors, torch.split(flat, sizes), strict=True):
                tensor.copy_(piece.view_as(tensor))

    def state_dict(self) -> State:
        return {name: copy_of(tensor) for name, tensor in self._places.items()}

    def load_state_dict(self, state: State) -> None:
        fill(self._places, state, "local updates")

    @property
    def _places(self) -> dict[str, Tensor]:
        return {
            f"{OUTER}.{what}.{piece.name}": tensor
            for what, tensors in (("values", self.outer), ("velocity", self.velocity))
            for piece, tensor in zip(self._mine, tensors, strict=True)
        }

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        """values: of this rank's share; every rank of the group gets those of all others."""
        like = self._parameters[0]
        for piece, value in gather_shares(self._group, self._shares, values, like):
            self._parameters[piece.index].copy_(value)


@dataclass
class StepBudget:
    """How many steps a replica makes between two merges, where clouds are not equally fast: one
    that has used up its time or tokens leaves out those up to the next multiple of `every`.

    replica: all ranks of this replica, of which the first decides. clock: seconds; elapsed time
    is part of the state."""

    every: int
    replica: RankGroup
    most_s: float | None = None
    most_tokens: int | None = None
    clock: Callable[[], float] = time.monotonic
    _idle_until: int = 0
    _num_tokens: float = 0.0
    _started_s: float | None = None

    @property
    def is_limited(self) -> bool:
        return self.most_s is not None or self.most_tokens is not None

    def is_idle(self, step: int) -> bool:
        return step <= self._idle_until

    def idle_until(self, step: int) -> None:
        self._idle_until = max(self._idle_until, step)

    def end_step(self, step: int, num_tokens: float) -> None:
        """After the merge, if there is one at this step. Every rank of the replica calls it.
        num_tokens: that the replica trained on."""
        if not self.is_limited:
            return
        if step % self.every == 0:
            self._num_tokens, self._started_s = 0.0, self.clock()
            return
        if self.is_idle(step):
            return
        self._num_tokens += num_tokens
        if self._started_s is None:  # the first step builds caches: it is not counted
            self._started_s = self.clock()
        is_over = self.most_s is not None and self.clock() - self._started_s >= self.most_s
        is_over |= self.most_tokens is not None and self._num_tokens >= self.most_tokens
        if bool(self.replica.from_leader(torch.tensor([float(is_over)]))):
            self.idle_until(step - step % self.every + self.every)

    def state_dict(self) -> State:
        elapsed_s = 0.0 if self._started_s is None else self.clock() - self._started_s
        numbers = torch.tensor([self._num_tokens, elapsed_s], dtype=torch.float64)
        return {"idle_until": self._idle_until, "numbers": numbers}

    def load_state_dict(self, state: State) -> None:
        self._idle_until = whole_number(state, "idle_until")
        numbers = state["numbers"]
        assert isinstance(numbers, torch.Tensor)
        self._num_tokens, elapsed_s = numbers.tolist()
        self._started_s = self.clock() - elapsed_s if self.is_limited else None
