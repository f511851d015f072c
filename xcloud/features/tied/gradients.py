"""A matrix that the first and the last stage both hold: its embeddings and its head.

In every update both stages get the sum of the two gradients, so the two copies stay equal bit for
bit, whatever compressor the gradients cross through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from xcloud.comm.compressor import Chain, seed_from
from xcloud.comm.state import Stateful
from xcloud.comm.tensor_codec import Choose, TensorCodec
from xcloud.layout import ClusterLayout
from xcloud.pipeline.exchange import FlatBuffer, RankGroup
from xcloud.pipeline.hook import Hook, StepReport
from xcloud.pipeline.trainer import Trainer

TIED = "embeddings.weight"
"""What choices of a compressor know a tied matrix by; its two ends have two names for it."""


class _Sums(Protocol):
    @property
    def changes(self) -> Sequence[list[Tensor]]:
        """The sums over both ends; here of one tensor."""


class EndsAverager(Stateful, Protocol):
    """The averager of two ranks, of which each holds one end (features/replicas/averaging.py)."""

    def start(self, step: int, tensors: Sequence[Tensor]) -> None:
        """Send this end's gradients."""

    def finish(self, step: int) -> _Sums:
        """Return the sums over both ends."""

    def settle(self, was_used: bool) -> None:
        """Note whether the update was made."""


Join = Callable[[tuple[int, int], int, TensorCodec], EndsAverager]
"""Makes an averager and its links: of (both ranks, this rank's stage, codec of the matrix)."""


@dataclass(frozen=True)
class TiedGradients(Hook):
    """The hook that sums the gradients of a tied matrix, of one rank that holds one end or both.

    held: the matrix by stage.
    groups: the ranks of these stages. The first of each sends and receives for it.
    averager: the averager between the two ends; None in ranks that are not first, and where both
        ends are here.
    """

    name = "tied"
    child_names = ("averager",)

    held: Mapping[int, nn.Parameter]
    groups: Mapping[int, RankGroup]
    averager: EndsAverager | None
    buffers: Mapping[int, FlatBuffer]

    def after_exchange(self, step: int) -> None:
        """Sum the gradients of both ends. The first one counts the sum in its norm."""
        held = [self.held[stage].grad for stage in sorted(self.held)]
        gradients = [gradient for gradient in held if gradient is not None]
        if len(gradients) == 2:
            # One rank holds both ends: nothing crosses.
            gradients[0] += gradients[1]
            gradients[1].copy_(gradients[0])
        else:
            self._sum_with_other_end(step, gradient=gradients[0])
        # Both ends now hold one gradient. Its square counts once in the norm of the update, at
        # stage 0, so the other end takes its own out again.
        last = max(self.held)
        if last:
            own = torch.linalg.vector_norm(gradients[-1], dtype=torch.float64)
            self.buffers[last].squares_elsewhere = -(float(own) ** 2)

    def _sum_with_other_end(self, step: int, gradient: Tensor) -> None:
        (group,) = self.groups.values()
        merged = gradient
        if self.averager is not None:
            # One that is not finite stays where it is, and stops or skips the update by its norm;
            # compressors may not accept it.
            is_finite = bool(gradient.isfinite().all())
            self.averager.start(step, [gradient if is_finite else torch.zeros_like(gradient)])
            ((merged,),) = self.averager.finish(step).changes
            if not is_finite:
                merged = gradient
        # All ranks of this end need the sum; only their first has the link. A copy into the
        # buffer: optimizer and clipping look there.
        gradient.copy_(group.from_leader(merged.clone()))

    def after_update(self, step: int, report: StepReport) -> None:
        if self.averager is not None:
            self.averager.settle(report.skipped is None)


def tied_gradients(
    trainer: Trainer,
    groups: Mapping[int, RankGroup],
    layout: ClusterLayout,
    choose: Choose,
    seed: int,
    join: Join,
) -> TiedGradients | None:
    """Return the hook of a rank that holds an end of a tied matrix; None for other ranks.

    groups: the ranks of each stage.
    choose: the compressor that crosses between clouds.
    join: a function that is called where this rank is the first of one of two ends.
    """
    pipeline = trainer.pipeline
    ends = {stage: module.tied() for stage, module in pipeline.stages.items()}
    held = {stage: tied for stage, tied in ends.items() if tied is not None}
    if not held:
        return None
    leaders = layout.leader_of(layout.placement(pipeline.rank).replica)
    first = leaders[0]
    last = leaders[layout.num_stages - 1]
    averager = None
    # The first rank of each end speaks for it. With both ends in one rank there is nobody to ask.
    if first != last and pipeline.rank in (first, last):
        ((stage, parameter),) = held.items()
        is_one_cloud = layout.cloud_of(first) == layout.cloud_of(last)
        codec = TensorCodec(
            shapes={TIED: parameter.shape},
            # Lines inside a cloud are fast: compressing would only cost time and error.
            choose=(lambda name, shape: Chain()) if is_one_cloud else choose,
            identity=seed_from(seed, "tied"),
            feedback=True,
            dtype=parameter.dtype,
            device=parameter.device,
            replica=(first, last).index(pipeline.rank),
        )
        averager = join((first, last), stage, codec)
    return TiedGradients(
        held=held,
        groups={stage: groups[stage] for stage in held},
        averager=averager,
        buffers={stage: trainer.stages[stage].buffer for stage in held},
    )
