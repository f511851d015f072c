"""A matrix that the first and the last stage both hold (tied embeddings and head), trained as one:
in every update both get the sum of the two gradients. Both ends begin equal and make the same
update, so they stay equal bit for bit, whatever compressor the gradients cross through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xcloud.comm.compression import Chain, seed_from
from xcloud.comm.state import StateTree
from xcloud.comm.tensor_codec import Choose, TensorCodec
from xcloud.contracts.model import Stage
from xcloud.parallel.averaging import AllToAll, Averager
from xcloud.parallel.exchange import FlatBuffer, RankGroup
from xcloud.parallel.part import Part
from xcloud.wire.wiring import Wiring

TIED = "embeddings.weight"
"""What choices of a compressor know a tied matrix by; its two ends have two names for it."""


@dataclass(frozen=True)
class TiedGradients(Part):
    """Of one rank that holds one end or both.

    held: the matrix by stage. groups: the ranks of these stages; the first of each speaks for it.
    averager: between the two ends, its `merge` a sum; None in ranks that do not speak, and where
        both ends are here. buffers: of the gradients of these stages.
    """

    name = "tied"

    held: Mapping[int, nn.Parameter]
    groups: Mapping[int, RankGroup]
    averager: Averager | None
    buffers: Mapping[int, FlatBuffer]

    def after_exchange(self, step: int) -> None:
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
            self.buffers[last].squares_elsewhere = -(float(own) ** 2)

    def _across(self, step: int, gradient: Tensor) -> None:
        (group,) = self.groups.values()
        merged = gradient
        if self.averager is not None:
            # One that is not finite stays where it is, and stops or skips the update by its norm;
            # compressors may not accept it.
            is_finite = bool(gradient.isfinite().all())
            self.averager.start(step, [gradient if is_finite else torch.zeros_like(gradient)])
            ((merged,),) = self.averager.finish(step).changes
            merged = merged if is_finite else gradient
        gradient.copy_(group.from_leader(merged.clone()))

    def parts(self) -> StateTree:
        return {"averager": self.averager}


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def join_tied(
    wiring: Wiring,
    stages: Mapping[int, Stage],
    choose: Choose,
    seed: int,
    buffers: Mapping[int, FlatBuffer],
) -> TiedGradients | None:
    """For ranks that hold an end of a tied matrix; opens the link to the other end."""
    held = {stage: tied for stage, module in stages.items() if (tied := module.tied()) is not None}
    if not held:
        return None
    averager, links = None, wiring.tied
    if links is not None:
        (parameter,) = held.values()
        within = len(set(map(wiring.ends.layout.cloud_of, links.peers))) == 1
        codec = TensorCodec(
            {TIED: parameter.shape},
            lambda name, shape: Chain() if within else choose(name, shape),
            seed_from(seed, "tied"),
            True,
            parameter.dtype,
            parameter.device,
        )
        averager = AllToAll(links, codec)
        links.open(averager.max_bytes)
    return TiedGradients(held, {stage: wiring.groups[stage] for stage in held}, averager, buffers)
