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
from typing import NamedTuple

import torch
from torch import Tensor, nn

from xcloud.comm.memory import State, join_states, split_state, whole_number
from xcloud.parallel.averaging import Averager
from xcloud.parallel.exchange import FlatBuffer, GradientExchange
from xcloud.parallel.rank_group import RankGroup
from xcloud.parallel.replica_check import ReplicaCheck

LOSS = "(loss)"
"""Travels with the gradients, as it is."""

MakeAverager = Callable[[Mapping[str, torch.Size]], Averager]
"""For the tensors that a rank carries across, by name."""


class Piece(NamedTuple):
    """A tensor's rows (axis 0) that belong to one share, or the whole tensor. start: of its first
    value among the gradients of its stage."""

    name: str
    stage: int
    start: int
    shape: torch.Size

    def of(self, buffer: FlatBuffer) -> Tensor:
        """A view of the gradient."""
        flat = buffer.gradients[self.start : self.start + self.shape.numel()]
        return flat.view(self.shape)


def shares(
    parameters: Mapping[int, Mapping[str, nn.Parameter]], num_shares: int
) -> list[list[Piece]]:
    """The trained parameters, by stage and name, in parts of about equal numbers of values.
    Tensors are cut between rows only, for compressors that see matrices."""
    total = sum(p.numel() for named in parameters.values() for p in named.values())
    found: list[list[Piece]] = [[] for _ in range(num_shares)]
    seen = 0
    for stage, named in parameters.items():
        start = 0
        for name, parameter in named.items():
            rows = parameter.shape[0] if parameter.dim() else 1
            width = parameter.numel() // rows if rows else 0
            first = 0
            while first < rows and width:
                share = min(num_shares - 1, num_shares * (seen + first * width) // total)
                ends_at = total * (share + 1) // num_shares - seen  # in values of this tensor
                last = rows if share == num_shares - 1 else min(rows, -(-ends_at // width))
                last = max(last, first + 1)
                shape = (last - first, *parameter.shape[1:]) if parameter.dim() else ()
                piece = Piece(f"{stage}.{name}", stage, start + first * width, torch.Size(shape))
                found[share].append(piece)
                first = last
            start += parameter.numel()
            seen += parameter.numel()
    return found


class AcrossClouds:
    """Of one rank. `exchanges` gives the trainer one for each stage; the last of them in an update
    sends what all have gathered, and only then are the gradients of the others whole.

    parameters: trained ones of the rank's stages, by stage and name, in the order of the modules.
    group: the ranks of the same cloud that hold the same stages.
    num_shares: how many of a cloud's ranks carry across, the same in all replicas.
    make_averager: its `merge` is a sum, as losses are divided by the weight of the whole update.
    delay: 1 = an update gets the gradient of the one before; the first gets zero.
    """

    def __init__(
        self,
        parameters: Mapping[int, Mapping[str, nn.Parameter]],
        group: RankGroup,
        num_shares: int,
        num_replicas: int,
        make_averager: MakeAverager,
        delay: int,
        check: ReplicaCheck,
    ) -> None:
        self._group, self._num_replicas, self._delay = group, num_replicas, delay
        self._check = check
        self._shares = shares(parameters, num_shares)
        self._buffers: dict[int, FlatBuffer] = {}
        self._averager: Averager | None = None
        if group.lane < num_shares:
            pieces = {piece.name: piece.shape for piece in self._shares[group.lane]}
            self._averager = make_averager({LOSS: torch.Size([1])} | pieces)
        self._under_way = 0  # with delay: the step whose gradients are used next
        self._arrived: list[Tensor] | None = None  # what was merged of it, if it is here already
        self.exchanges: dict[int, GradientExchange] = {
            stage: _OfStage(self, stage, stage == max(parameters)) for stage in parameters
        }

    def gather(self, stage: int, buffer: FlatBuffer, loss: Tensor) -> Tensor:
        """Sum over the ranks of the cloud."""
        buffer.flat[-1] = loss
        self._buffers[stage] = buffer
        return self._group.sum(buffer.flat)[-1].clone()

    def exchange(self, step: int, loss: Tensor) -> Tensor:
        """Across clouds; leaves the merged gradients in the buffers. loss: of this cloud's ranks.
        Returns that of all."""
        self._send(step, loss)
        if not self._delay:
            total = self._receive(step)
        elif self._under_way:
            total = self._receive(self._under_way)
        else:
            for buffer in self._buffers.values():
                buffer.zero()
            total = loss * self._num_replicas  # the others' are not here yet
        self._under_way = step if self._delay else 0
        for buffer in self._buffers.values():
            buffer.flat[-1] = total
        return total

    def after_update(self, step: int) -> None:
        if self._check.is_due(step):
            if self._under_way:  # messages are taken in the order in which they were sent
                self._arrived = self._finish(self._under_way)
            self._check.compare(step)

    def state_dict(self) -> State:
        state: State = {"under_way": self._under_way}
        if self._averager is not None:
            state |= join_states({"averager": self._averager.state_dict()})
        for number, tensor in enumerate(self._arrived or ()):
            state[f"arrived.{number}"] = tensor.clone()
        return state

    def load_state_dict(self, state: State) -> None:
        self._under_way = whole_number(state, "under_way")
        rest = {name: value for name, value in state.items() if name != "under_way"}
        parts = split_state(rest, ("averager", "arrived"), "an exchange of gradients over clouds")
        if self._averager is not None:
            self._averager.load_state_dict(parts["averager"])
        arrived = [parts["arrived"][str(n)] for n in range(len(parts["arrived"]))]
        self._arrived = [t for t in arrived if isinstance(t, Tensor)] or None

    def _send(self, step: int, loss: Tensor) -> None:
        if self._averager is None:
            return
        tensors = [
            piece.of(self._buffers[piece.stage]) for piece in self._shares[self._group.lane]
        ]
        if not all(buffer.is_finite() for buffer in self._buffers.values()):
            loss = torch.full_like(loss, math.nan)  # tells it; compressors need not bear it
            tensors = [torch.zeros_like(tensor) for tensor in tensors]
        self._averager.start(step, [loss.reshape(1), *tensors])

    def _finish(self, step: int) -> list[Tensor]:
        """The merged loss and this rank's share; nothing in a rank that carries none."""
        merged, self._arrived = self._arrived, None
        if merged is None and self._averager is not None:
            merged = self._averager.finish(step)
        return merged or []

    def _receive(self, step: int) -> Tensor:
        """The merged gradients into the buffers, in all ranks of the cloud. Returns the loss."""
        merged = self._finish(step)
        for share, tensors in zip(self._shares, self._spread(merged), strict=False):
            for piece, tensor in zip(share, tensors[1:], strict=True):
                piece.of(self._buffers[piece.stage]).copy_(tensor.view(piece.shape))
            loss = tensors[0]
        return loss.reshape(())

    def _spread(self, merged: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """The loss and the pieces of every share."""
        if self._group.num_lanes == 1:
            return [merged]
        sizes = [[1, *(piece.shape.numel() for piece in share)] for share in self._shares]
        longest = max(map(sum, sizes))
        row = next(iter(self._buffers.values())).flat.new_zeros(longest)
        if merged:
            flat = torch.cat([tensor.reshape(-1) for tensor in merged])
            row[: len(flat)] = flat
        rows = self._group.gather(row)
        return [
            torch.split(row[: sum(own)], own) for row, own in zip(rows, sizes, strict=False)
        ]  # ranks that carry nothing come last


@dataclass(frozen=True)
class _OfStage:
    """What the trainer sees of it at one stage."""

    whole: AcrossClouds
    stage: int
    is_last: bool

    def before_update(self, step: int, buffer: FlatBuffer, loss: Tensor) -> Tensor:
        summed = self.whole.gather(self.stage, buffer, loss)
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
