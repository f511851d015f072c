"""DiLoCo (arXiv:2311.08105, algorithm 1), but for its inner steps, which are the trainer's. Every
H steps LocalRounds (local_updates.py) does:

    gradient = outer - values                    OuterParameters.gradient
    gradient = mean of all replicas' gradients   Averager.start, Averager.finish
    outer = outer_optimizer(outer, gradient)     OuterParameters.move, OuterOptimizer.step
    values = outer                               OuterParameters.take
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from xcloud.base.errors import ConfigError, FrameError
from xcloud.base.settings import settings
from xcloud.comm.state import OUTER, State, copy_of, fill
from xcloud.features.replicas.merging import RowPiece, gather_shares
from xcloud.net.frame import Tensors
from xcloud.pipeline.exchange import RankGroup, are_finite


@settings("strategy.averaging.outer")
class OuterOptimizer:
    """Gradient descent on the outer parameters. Their gradient: outer - values, how far replicas
    have moved away, merged.

    velocity = momentum * velocity + gradient
    outer -= learning_rate * (gradient + momentum * velocity   if nesterov, else velocity)

    DiLoCo (arXiv:2311.08105): 0.7, 0.9, Nesterov. Learning rate 1 without momentum: local SGD, and
    FedAvg (arXiv:1602.05629) where replicas count by their samples.

    learning_rate: the step of the outer parameters, as a share of the merged move.
    momentum: the share of the last velocity that is kept; 0 = none.
    nesterov: look one step of momentum ahead.
    """

    learning_rate: Annotated[float, Field(gt=0)] = 0.7
    momentum: Annotated[float, Field(ge=0, le=0.999999)] = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            key = "strategy.averaging.outer"
            raise ConfigError(f"{key}.nesterov needs a momentum; set it, or {key}.nesterov=false")

    @property
    def label(self) -> str:
        """The optimizer in a few words."""
        if not self.momentum:
            if self.learning_rate == 1:
                return "mean"
            return f"sgd({self.learning_rate:g})"
        name = "nesterov" if self.nesterov else "momentum"
        return f"{name}({self.learning_rate:g}, {self.momentum:g})"

    def step(
        self,
        outer: Sequence[Tensor],
        velocities: Sequence[Tensor],
        gradients: Sequence[Tensor],
        round_number: int,
    ) -> None:
        """Change outer parameters and velocities in place, tensor by tensor.

        round_number: the number of this merge of these parameters, from 1. Nothing here depends
            on it; a rule whose rate decays is a subclass with a `step` of its own.
        """
        for parameter, velocity, gradient in zip(outer, velocities, gradients, strict=True):
            # Multiplications and additions apart: a fused one rounds once, and replicas on
            # different processors would drift apart.
            update = gradient
            if self.momentum:
                velocity.mul_(self.momentum).add_(gradient)
                update = gradient + velocity * self.momentum if self.nesterov else velocity
            parameter.sub_(update * self.learning_rate)


_TO_MEAN = OuterOptimizer(learning_rate=1.0, momentum=0.0, nesterov=False)


class OuterParameters:
    """The parameters that replicas change apart, with their values after the last merge.

    parameters: the parameters by name, with the same values in every rank of `group` and in all
        replicas.
    shares: the full parameters among these that each of its first ranks carries across.
    outer: the values of this rank's share after the last merge, the same bits in all replicas.
    velocity: the velocity of the outer optimizer.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shares: Sequence[Sequence[RowPiece]],
        group: RankGroup,
        optimizer: OuterOptimizer,
    ) -> None:
        self.parameters = list(parameters.values())
        self._shares = shares
        self._mine = shares[group.group_rank] if group.group_rank < len(shares) else ()
        self._own = [self.parameters[piece.index] for piece in self._mine]
        self._group = group
        self._optimizer = optimizer
        # One copy of this rank's share, not of the model: with n ranks a cloud each holds an n-th.
        self.outer = [p.detach().clone() for p in self._own]
        # Without momentum it stays empty, in memory, on the wire and in checkpoints.
        self.velocity = [t.new_zeros(t.shape if optimizer.momentum else 0) for t in self.outer]

    def gradient(self) -> list[Tensor]:
        """Return how far this replica has moved away: outer - values."""
        return [a - p.detach() for a, p in zip(self.outer, self._own, strict=True)]

    def move(
        self, gradients: Sequence[Tensor], round_number: int, is_cut_short: bool = False
    ) -> bool:
        """Make the outer optimizer's step, unless a gradient is not finite. Return whether it was
        made.

        round_number: the number of this merge of these parameters, from 1.
        is_cut_short: the run ends within a round. Momentum would move as far as after a whole one,
            and no step would follow, so the replicas' mean is taken instead. The velocity is
            emptied, since the next round of a resumed run may be as short.
        The parameters stay as they are.
        """
        is_made = are_finite(gradients)
        if is_made and is_cut_short and self._optimizer.momentum:
            _TO_MEAN.step(self.outer, self.velocity, gradients, round_number)
            for velocity in self.velocity:
                velocity.zero_()
        elif is_made:
            self._optimizer.step(self.outer, self.velocity, gradients, round_number)
        return is_made

    def take(self, mix: float = 0.0) -> None:
        """Set the parameters to mix * own + (1 - mix) * outer."""
        if not mix:
            return self._write(self.outer)
        pairs = zip(self._own, self.outer, strict=True)
        # Streaming DiLoCo's alpha: what was trained while the merge crossed is not thrown away.
        self._write([own.detach() * mix + outer * (1 - mix) for own, outer in pairs])

    def keep(self, gradients: Sequence[Tensor]) -> None:
        """Set the parameters to the outer ones, plus what this replica has done by itself."""
        self._write([a - g for a, g in zip(self.outer, gradients, strict=True)])

    def flat(self) -> Tensors:
        """Return outer parameters and velocity as one vector each, for another replica's
        `replace`."""
        return tuple(
            torch.cat([tensor.reshape(-1) for tensor in tensors])
            for tensors in (self.outer, self.velocity)
        )

    def replace(self, values: Tensors) -> None:
        """Take another replica's `flat`. Raises FrameError for values of other settings."""
        # It comes from another owner's cloud: other settings there must not end in a broadcast
        # here.
        found, expected = ([flat.shape for flat in some] for some in (values, self.flat()))
        if found != expected:
            raise FrameError(
                f"the averaging server sent values and velocity of {found}, expected {expected}"
            )
        for tensors, flat in zip((self.outer, self.velocity), values, strict=True):
            sizes = [tensor.numel() for tensor in tensors]
            for tensor, piece in zip(tensors, torch.split(flat, sizes), strict=True):
                tensor.copy_(piece.view_as(tensor))

    def state_dict(self) -> State:
        return {name: copy_of(tensor) for name, tensor in self._places.items()}

    def load_state_dict(self, state: State) -> None:
        fill(self._places, state=state, owner="local updates")

    @property
    def _places(self) -> dict[str, Tensor]:
        return {
            f"{OUTER}.{what}.{piece.name}": tensor
            for what, tensors in (("values", self.outer), ("velocity", self.velocity))
            for piece, tensor in zip(self._mine, tensors, strict=True)
        }

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        """Write the values of this rank's share into the parameters; every rank of the group gets
        those of all others."""
        like = self.parameters[0]
        for piece, value in gather_shares(
            self._group, shares=self._shares, mine=values, like=like
        ):
            self.parameters[piece.index].copy_(value)
