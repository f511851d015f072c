"""Parameters that replicas change apart and bring together from time to time. No links to other
replicas, no rounds: what is kept between two merges, and what a merge does to the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from xcloud.comm.state import OUTER, State, copy_of
from xcloud.parallel.norm import are_finite
from xcloud.parallel.outer_optimizer import OuterOptimizer
from xcloud.parallel.rank_group import RankGroup


class OuterParameters:
    """parameters: by name, the same values in every rank of `inside`. shares: positions of those
    that each of these ranks carries across; the last ranks may have none. anchor: the values of
    this rank's share after the last merge, the same bits in all replicas.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shares: Sequence[Sequence[int]],
        inside: RankGroup,
        outer: OuterOptimizer,
    ) -> None:
        named = list(parameters.items())
        self._shares = [[named[position][1] for position in share] for share in shares]
        mine = shares[inside.lane] if inside.lane < len(shares) else ()
        self._names = [named[position][0] for position in mine]
        self._mine = [named[position][1] for position in mine]
        self._inside, self._outer = inside, outer
        self.anchor: list[Tensor] = []
        self.velocity: list[Tensor] = []

    def drop(self) -> None:
        """Agree on the values of now: replicas start equal."""
        self.anchor = [p.detach().clone() for p in self._mine]
        momentum = self._outer.momentum
        self.velocity = [torch.zeros_like(a) if momentum else a.new_empty(0) for a in self.anchor]

    @property
    def are_finite(self) -> bool:
        """The parameters of now, those of other shares too: the same in all ranks of `inside`."""
        return are_finite(p.detach() for share in self._shares for p in share)

    def gradient(self) -> list[Tensor]:
        """How far this replica has moved away from the anchor: anchor - values."""
        return [a - p.detach() for a, p in zip(self.anchor, self._mine, strict=True)]

    def move(self, gradients: Sequence[Tensor]) -> None:
        """The outer optimizer's step, unless a gradient is not finite; the parameters stay."""
        if are_finite(gradients):
            self._outer.step(self.anchor, self.velocity, gradients)

    def take(self, mix: float = 0.0) -> None:
        """Parameters become mix * own + (1 - mix) * anchor."""
        if not mix:
            return self._write(self.anchor)
        pairs = zip(self._mine, self.anchor, strict=True)
        self._write([own.detach() * mix + anchor * (1 - mix) for own, anchor in pairs])

    def keep(self, gradients: Sequence[Tensor]) -> None:
        """Parameters become the anchor, and on top of it what this replica has done by itself."""
        self._write([a - g for a, g in zip(self.anchor, gradients, strict=True)])

    def state_dict(self) -> State:
        return {name: copy_of(tensor) for name, tensor in self._places.items()}

    def load_state_dict(self, state: State) -> None:
        self.drop()
        places = self._places
        if state.keys() != places.keys():
            raise ValueError(
                f"local updates were saved with {len(state)} tensors, expected {len(places)}; "
                "they were saved with other settings"
            )
        for name, place in places.items():
            value = state[name]
            if not isinstance(value, Tensor) or value.shape != place.shape:
                raise ValueError(f"local updates: {name} was saved with another shape")
            place.copy_(value)

    @property
    def _places(self) -> dict[str, Tensor]:
        return {
            f"{OUTER}.{what}.{name}": tensor
            for what, tensors in (("anchor", self.anchor), ("velocity", self.velocity))
            for name, tensor in zip(self._names, tensors, strict=True)
        }

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        """values: of this rank's share; every rank of the cloud gets those of all others."""
        if self._inside.num_lanes == 1:
            for parameter, value in zip(self._mine, values, strict=True):
                parameter.copy_(value)
            return
        # Gathered, not summed: adding zeros would change the sign of a zero.
        sizes = [[p.numel() for p in share] for share in self._shares]
        first = self._shares[0][0]
        flat = first.new_zeros(max(map(sum, sizes)))
        if values:
            joined = torch.cat([value.reshape(-1) for value in values])
            flat[: len(joined)] = joined
        gathered = self._inside.gather(flat)
        for share, own_sizes, found in zip(self._shares, sizes, gathered, strict=False):
            pieces = torch.split(found[: sum(own_sizes)], own_sizes)
            for parameter, piece in zip(share, pieces, strict=True):
                parameter.copy_(piece.view_as(parameter))
