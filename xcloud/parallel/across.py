"""Replicas in several clouds that stay equal: one gradient for all of them in every update.

Inside a cloud the gradients of a stage's ranks are summed; across clouds each rank carries its
own share of the sum, so that what crosses is per cloud and not per rank; the merged shares are
gathered inside again. All stages of a rank go in one message.

(A reduce-scatter in place of the sum would do inside; gloo's takes longer than its all-reduce.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xcloud.comm.state import MEMORY, State, load_states, split_state, states_of, whole_number
from xcloud.parallel.averaging import Averager
from xcloud.parallel.exchange import FlatBuffer, GradientExchange
from xcloud.parallel.pieces import dealt
from xcloud.parallel.rank_group import RankGroup
from xcloud.parallel.replica_check import ReplicaCheck
from xcloud.parallel.sharded import local_part

LOSS = "(loss)"
"""Travels with the gradients, as it is."""
_UNDER_WAY = f"{MEMORY}.under_way"

MakeAverager = Callable[[Mapping[str, torch.Size]], Averager]
"""For the tensors that a rank carries across, by name."""


class AcrossClouds:
    """Of one rank. `exchanges` gives the trainer one for each stage; the last of them in an update
    sends what all have gathered, and only then are the gradients of the others whole.

    parameters: trained ones of the rank's stages, by stage and name.
    group: the ranks of the same cloud that hold the same stages.
    num_shares: how many of a cloud's ranks carry across, the same in all replicas.
    make_averager: its `merge` is a sum, as losses are divided by the weight of the whole update;
        or, with is_mean, a mean.
    delay: 1 = an update gets the gradient of the one before; the first gets zero.
    """

    def __init__(
        self,
        parameters: Mapping[int, Mapping[str, nn.Parameter]],
        group: RankGroup,
        num_shares: int,
        num_replicas: int,
        make_averager: MakeAverager,
        is_mean: bool,
        delay: int,
        check: ReplicaCheck,
    ) -> None:
        self._group, self._num_replicas, self._delay = group, num_replicas, delay
        self._check, self._scale = check, num_replicas if is_mean else 1
        named = {f"{s}.{name}": p for s, own in parameters.items() for name, p in own.items()}
        held = {name: p for name, p in named.items() if local_part(p).numel()}
        self._parameters = list(held.values())
        shapes = {name: local_part(p).shape for name, p in held.items()}
        self._shares = dealt(shapes, num_shares)
        self._averager: Averager | None = None
        if group.lane < num_shares:
            pieces = {piece.name: piece.shape for piece in self._shares[group.lane]}
            self._averager = make_averager({LOSS: torch.Size([1])} | pieces)
        self._buffers: dict[int, FlatBuffer] = {}
        self._under_way = 0  # with delay: the step whose gradients are used next; 0 = none
        self.exchanges: dict[int, GradientExchange] = {
            stage: _OfStage(self, stage, stage == max(parameters)) for stage in parameters
        }

    @property
    def max_bytes(self) -> int:
        """Of its largest message across."""
        return 0 if self._averager is None else self._averager.max_bytes

    def gather(self, step: int, stage: int, buffer: FlatBuffer, loss: Tensor) -> Tensor:
        """Sum over the ranks of the cloud."""
        self._buffers[stage] = buffer
        return self._sum(step, buffer, loss)

    def _sum(self, step: int, buffer: FlatBuffer, loss: Tensor) -> Tensor:
        return buffer.sum_over(self._group, loss)

    def exchange(self, step: int, loss: Tensor) -> Tensor:
        """Across clouds; leaves the merged gradients in the buffers. loss: of this cloud's ranks.
        Returns that of all."""
        self._send(step, loss)
        due = self._under_way if self._delay else step
        if due:
            total = self._receive(due)
        else:
            for buffer in self._buffers.values():
                buffer.zero()
            total = loss * self._num_replicas  # the others' are not here yet
        self._under_way = step if self._delay else 0
        for buffer in self._buffers.values():
            self._told(step, buffer, total)
        return total

    def _told(self, step: int, buffer: FlatBuffer, loss: Tensor) -> None:
        """Its gradients are merged."""
        buffer.flat[-1] = loss

    def after_update(self, step: int) -> None:
        if self._check.is_due(step):
            self._check.compare(step)

    def state_dict(self) -> State:
        parts = {} if self._averager is None else {"averager": self._averager}
        return {_UNDER_WAY: self._under_way} | states_of(parts)

    def load_state_dict(self, state: State) -> None:
        self._under_way = whole_number(state, _UNDER_WAY)
        parts = {} if self._averager is None else {"averager": self._averager}
        load_states(parts, state, "an exchange of gradients over clouds", [_UNDER_WAY])

    def _send(self, step: int, loss: Tensor) -> None:
        if self._averager is None:
            return
        pieces = [piece.of(self._gradients) for piece in self._shares[self._group.lane]]
        if not all(buffer.is_finite() for buffer in self._buffers.values()):
            loss = torch.full_like(loss, math.nan)  # tells it; compressors need not bear it
            pieces = [torch.zeros_like(piece) for piece in pieces]
        self._averager.start(step, [loss.reshape(1), *pieces])

    def _receive(self, step: int) -> Tensor:
        """The merged gradients into the buffers, in all ranks of the cloud. Returns the loss."""
        merged = [] if self._averager is None else self._averager.finish(step)
        gradients = self._gradients
        everyone = self._spread(merged)
        for share, (_, *tensors) in zip(self._shares, everyone, strict=True):
            for piece, tensor in zip(share, tensors, strict=True):
                piece.of(gradients).copy_(tensor.view(piece.shape)).mul_(self._scale)
        return everyone[0][0].reshape(()) * self._scale

    def _spread(self, merged: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """The loss and the pieces of every share. merged: of this rank's; empty without one."""
        if self._group.num_lanes == 1:
            return [merged]
        sizes = [[1, *(piece.shape.numel() for piece in share)] for share in self._shares]
        row = next(iter(self._buffers.values())).flat.new_zeros(max(map(sum, sizes)))
        if merged:
            flat = torch.cat([tensor.reshape(-1) for tensor in merged])
            row[: len(flat)] = flat
        rows = self._group.gather(row)[: len(sizes)]  # the ranks without a share are the last
        return [torch.split(row[: sum(own)], own) for row, own in zip(rows, sizes, strict=True)]

    @property
    def _gradients(self) -> list[Tensor]:
        """Views of the buffers."""
        found = [p.grad for p in self._parameters]
        return [local_part(gradient) for gradient in found if gradient is not None]


@dataclass(frozen=True)
class _OfStage:
    """What the trainer sees of it at one stage."""

    whole: AcrossClouds
    stage: int
    is_last: bool

    def before_update(self, step: int, buffer: FlatBuffer, loss: Tensor) -> Tensor:
        summed = self.whole.gather(step, self.stage, buffer, loss)
        return self.whole.exchange(step, summed) if self.is_last else summed

    def after_update(self, step: int, buffer: FlatBuffer) -> None:
        if self.is_last:
            self.whole.after_update(step)

    def state_dict(self) -> State:
        return self.whole.state_dict() if self.is_last else {}

    def load_state_dict(self, state: State) -> None:
        if self.is_last:
            return self.whole.load_state_dict(state)
        split_state(state, (), "an exchange of gradients at a lower stage")
