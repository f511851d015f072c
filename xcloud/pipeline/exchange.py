"""Ranks that share one part of the work (a stage, a cloud), and how those that train the same
parameters agree on an update. Knows no optimizer, task or stage.

Sums, not means: every micro-batch's loss is already divided by the weight of the whole update, so
the sum over ranks is the gradient of the large batch, whatever the number of ranks
([B]: gradient averaging, (1/N) sum of the ranks' gradients).

Shapes: N = number of trained values.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from xcloud.comm.state import StatefulTree
from xcloud.net.peer import Peer
from xcloud.net.transport import Collectives


@dataclass(frozen=True)
class RankGroup:
    """The ranks that share one part of the work, as one of them sees them.

    rank: number of this rank, one of `ranks`.
    ranks: the ranks in the order of their group ranks.
    group: the collectives of these ranks. None if the rank is alone; then every method returns at
        once.
    peers: the records of the others' heartbeats, by rank. The ranks that this one waits for are
        noted there.
    """

    rank: int
    ranks: tuple[int, ...]
    group: Collectives | None = None
    peers: Mapping[int, Peer] = field(default_factory=dict)

    @staticmethod
    def alone(rank: int = 0) -> RankGroup:
        return RankGroup(rank=rank, ranks=(rank,))

    @property
    def group_rank(self) -> int:
        return self.ranks.index(self.rank)

    @property
    def leader(self) -> int:
        """The rank that speaks for the group."""
        return self.ranks[0]

    @property
    def leads(self) -> bool:
        return self.rank == self.leader

    def barrier(self) -> None:
        self._call("barrier", lambda group: group.barrier())

    def sum(self, values: Tensor) -> Tensor:
        """All-reduce in place."""
        self._call("sum", lambda group: group.sum(values))
        return values

    def start_sum(self, values: Tensor) -> Callable[[], None]:
        """All-reduce in place. `values` are left alone until the returned call has come back."""
        # Peers are noted as waited for when the sum is waited for, not while it goes on beside the
        # backward.
        wait = self.group.start_sum(values) if self.group is not None else None
        return lambda: self._call("sum", lambda group: wait and wait())

    def from_leader(self, values: Tensor) -> Tensor:
        """Broadcast in place."""
        self._call("broadcast", lambda group: group.broadcast(values, source=self.leader))
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        """Return the tensors of every rank, in order; all must be of one shape."""
        gathered = [values] if self.group is None else []
        self._call("gathering", lambda group: gathered.extend(group.gather(values)))
        return gathered

    def _call(self, what: str, call: Callable[[Collectives], object]) -> None:
        """Wait for each of the others in one call: nobody knows who of them is late."""
        if self.group is None:
            return
        message = _Call(f"the {what} of {len(self.ranks)} ranks")
        with ExitStack() as stack:
            for rank in self.ranks:
                if rank in self.peers:
                    stack.enter_context(self.peers[rank].awaiting(message))
            call(self.group)


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a collective: the next one is another."""

    name: str

    def __str__(self) -> str:
        return self.name


DIGEST_BYTES = 16
_CACHED = 1 << 16  # values that stay in a processor's cache


class FlatBuffer:
    """Gradients of trained parameters as one vector. Of sharded parameters it has this rank's
    shard.

    flat: a vector [N + 1]. Every `.grad` is a view of it; the last place is for the loss.
    squares_elsewhere: number added to the squared norm. It is the part of these gradients that
        other ranks hold or, if negative, a part that another stage counts too.
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
        self.is_sharded = any(part is not p for part, p in zip(own, self.parameters, strict=True))
        size = sum(part.numel() for part in own)
        self.flat = torch.zeros(size + 1, dtype=first.dtype, device=first.device)
        pieces = torch.split(self.gradients, [part.numel() for part in own])
        for parameter, part, piece in zip(self.parameters, own, pieces, strict=True):
            # A view for good: the backward adds into the vector, which is summed over ranks as it
            # is.
            parameter.grad = with_part(parameter, part=piece.view_as(part))

    @property
    def gradients(self) -> Tensor:
        """[N], a view."""
        return self.flat[:-1]

    def zero(self) -> None:
        self.flat.zero_()

    def sum_over(self, group: RankGroup, loss: Tensor) -> Tensor:
        """Make gradients and loss their sums over the ranks of `group`, and return the loss.

        Sharded gradients have been summed by the backward: what is left is the loss, and the
        squared norm of what the other ranks hold.
        """
        if self.is_sharded:
            own = torch.linalg.vector_norm(self.gradients, dtype=torch.float64) ** 2
            # One sum of two numbers in place of one over all gradients.
            total, squares = group.sum(torch.stack([loss.double(), own]))
            self.squares_elsewhere = float(squares - own)
            # One rank's gradient that is not finite must be seen by the one that speaks for all.
            self.flat[-1] = total if math.isfinite(float(squares)) else math.nan
            whole_loss: Tensor = total.to(loss.dtype)
            return whole_loss
        # In the vector that is summed anyway, so the loss costs no collective, and a loss of one
        # rank that is not finite reaches all.
        self.flat[-1] = loss
        if self.finish_sum is None:
            group.sum(self.flat)
        else:
            # Its gradients began to be summed in the backward; only the loss is left.
            self.finish_sum()
            group.sum(self.flat[-1:])
        return self.flat[-1].clone()

    def is_finite(self) -> bool:
        """Return whether all gradients and the loss are finite."""
        return are_finite([self.flat])

    def has_finite_squares(self) -> bool:
        """Return whether the squares of all gradients, those that other ranks hold included, and
        of the loss are finite in their dtype. Second moments are squares: one that overflows would
        never let its value move again."""
        limit = torch.finfo(self.flat.dtype).max
        if self.squares_elsewhere > limit:
            return False
        low, high = (float(end) for end in torch.aminmax(self.flat))
        largest = max(-low, high)  # NaN anywhere makes both NaN
        return largest * largest <= limit

    def squared_norm(self) -> float:
        """Return the sum of the squared gradients, in float64."""
        squares = squared_norm(self.gradients) + self.squares_elsewhere
        return 0.0 if squares < 0 else squares  # of nothing but what another end counts, rounded


@dataclass
class Work:
    """The work of a replica in one update.

    num_samples: number of samples that the replica trains on.
    weight: weight of the samples in the loss. It is 1 in ranks that do not hold the last stage.
    num_own: number of samples that this rank computes.
    num_tokens: number of tokens in these, in the fields whose tokens this rank counts
        (SampleFeed).
    """

    num_samples: int = 0
    weight: float = 0.0
    num_own: int = 0
    num_tokens: int = 0


class Exchange(StatefulTree, ABC):
    """Keeps replicas of the same parameters equal, or brings them together from time to time.

    Every rank has one, for all stages that it trains. All ranks make both calls around every
    update, skipped ones included. What it sends to another cloud is counted, emulated and audited
    by the wiring's links; inside a cloud it may use the group's collectives.
    """

    def is_idle(self, step: int) -> bool:
        """Return whether this replica leaves out update `step`; the same in all of its ranks. Then
        only `after_update` is called."""
        return False

    @abstractmethod
    def before_update(
        self, step: int, buffers: Mapping[int, FlatBuffer], losses: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Replace this rank's gradients by those that the optimizer is to use.

        buffers: the buffer of each stage, with the stages in ascending order.
        losses: this rank's share of the loss of each stage, a scalar, in the same order.
        Returns the full losses, which also take the last place of each `flat`. The values that
        are there afterwards are checked for finite values and clipped.
        """

    def after_update(self, step: int, work: Work) -> None:
        """Act once the optimizer has made or skipped the update. May change parameters.

        work: the work of this replica in the update; an empty Work if it was skipped.
        """
        return

    def compare(self, step: int) -> None:
        """Raise ReplicasDiffer if replicas differ, after a step that leaves all of them equal."""
        return

    def resume(self, step: int) -> int:
        """Wait for the other replicas, and return the step after which to resume.

        It is called if clouds may come back: in a cloud that starts while the run is under way or
        resumes, and in the first cloud, which is there after `step`.
        """
        return step


@dataclass(frozen=True)
class AllReduce(Exchange):
    """The sum over the ranks of one cloud in every update. It keeps nothing between updates.

    groups: the group of ranks of each stage.
    """

    groups: Mapping[int, RankGroup]

    def before_update(
        self, step: int, buffers: Mapping[int, FlatBuffer], losses: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        return {s: b.sum_over(self.groups[s], loss=losses[s]) for s, b in buffers.items()}


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all values of these tensors are finite."""
    # One pass of each; NaN anywhere makes both NaN.
    ends = (end for tensor in tensors if tensor.numel() for end in torch.aminmax(tensor))
    return all(bool(end.isfinite()) for end in ends)


def squared_norm(values: Tensor) -> float:
    """Return the sum of the squares of a tensor of any shape, in float64; not finite if any of
    them is not.

    On CPUs by pieces that stay in the cache: a fifth of the time of one
    torch.linalg.vector_norm(dtype=float64), which was a fortieth of a step.
    """
    if values.device.type != "cpu":
        return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
    flat = values.detach().reshape(-1)
    total = 0.0
    room = torch.empty(min(_CACHED, len(flat)), dtype=torch.float64)
    for piece in torch.split(flat, _CACHED):
        wide = room[: len(piece)].copy_(piece)
        total += float(torch.dot(wide, wide))
    return total


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a sharded tensor (torch's DTensor), sharing memory; all of an
    ordinary one. Does not import torch's code for them: a run that shards nothing never does."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part


def with_part(tensor: Tensor, part: Tensor) -> Tensor:
    """Return a tensor sharded as `tensor` is, of which this rank holds `part`, sharing memory."""
    if not hasattr(tensor, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape,
        stride=tensor.stride(),
    )  # fmt: skip


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """Return the digest, uint8 [16], of the tensors' bytes in their order; of sharded ones what
    this rank holds."""
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for tensor in tensors:
        flat = local_part(tensor).detach().cpu().contiguous().reshape(-1)
        hashed.update(memoryview(cast(Any, flat.view(torch.uint8).numpy())))
    return torch.frombuffer(bytearray(hashed.digest()), dtype=torch.uint8)
