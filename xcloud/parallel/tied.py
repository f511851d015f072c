"""A matrix that the first and the last stage both hold (tied embeddings and head), trained as one:
in every update both get the sum of the two gradients. Both ends begin equal and make the same
update, so they stay equal bit for bit, whatever compressor the gradients cross through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xcloud.comm.state import State, Stateful, join_states, split_state
from xcloud.parallel.averaging import Averager
from xcloud.parallel.exchange import FlatBuffer
from xcloud.parallel.rank_group import RankGroup


@dataclass(frozen=True)
class TiedGradients(Stateful):
    """Of one rank that holds one end or both. Called once the gradients of each stage are whole.

    held: the matrix by stage. groups: the ranks of these stages; the first of each speaks for it.
    averager: between the two ends, its `merge` a sum; None in ranks that do not speak, and where
        both ends are here.
    """

    held: Mapping[int, nn.Parameter]
    groups: Mapping[int, RankGroup]
    averager: Averager | None

    def sum(self, step: int, buffers: Mapping[int, FlatBuffer]) -> None:
        """Replace the gradients at both ends. Of the norm the first end counts."""
        gradients = [_gradient(self.held[stage]) for stage in sorted(self.held)]
        if len(gradients) == 2:
            gradients[0] += gradients[1]
            gradients[1].copy_(gradients[0])
        else:
            self._across(step, gradients[0])
        last = max(self.held)
        if last:
            own = torch.linalg.vector_norm(gradients[-1], dtype=torch.float64)
            buffers[last].squares_elsewhere = -(float(own) ** 2)

    def _across(self, step: int, gradient: Tensor) -> None:
        (group,) = self.groups.values()
        merged = gradient
        if self.averager is not None:
            # One that is not finite stays where it is, and stops or skips the update by its norm;
            # compressors need not bear it.
            is_finite = bool(gradient.isfinite().all())
            self.averager.start(step, [gradient if is_finite else torch.zeros_like(gradient)])
            (merged,) = self.averager.finish(step)
            merged = merged if is_finite else gradient
        gradient.copy_(group.from_leader(merged.clone()))

    def state_dict(self) -> State:
        if self.averager is None:
            return {}
        return join_states({"averager": self.averager.state_dict()})

    def load_state_dict(self, state: State) -> None:
        names = () if self.averager is None else ("averager",)
        parts = split_state(state, names, "the gradients of tied embeddings")
        if self.averager is not None:
            self.averager.load_state_dict(parts["averager"])


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
