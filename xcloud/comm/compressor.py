"""What every compressor promises, and how one draws random numbers. No compressor lives here, and
none knows links or ranks.

A compressor turns one floating tensor into a few tensors ("parts") that are cheaper to send, and
back. `family` fixes where in a chain it may stand: low_rank, then sparse, then precision.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from xcloud.cluster.frame import TensorSpec
from xcloud.comm.state import State, whole_number

Parts = tuple[Tensor, ...]
Family = Literal["none", "low_rank", "sparse", "precision"]
Feedback = Literal["needless", "useful", "needed", "harmful"]
"""What error feedback does for a compressor whose messages are added up: nothing, as nothing is
lost; less error; convergence, as what is lost is lost in the same direction again; or harm, as the
error of one message exceeds the tensor (unbiased, so that the sum of many is right without)."""


@runtime_checkable
class Compressor(Protocol):
    """Tensor ↔ parts. Everything the decoder needs is sent as a part, including random seeds.

    A compressor may keep a warm start between calls as long as decoding does not need it
    (`Stateful`). Its random numbers depend on the channel and the call (`Randomized`).
    """

    @property
    def family(self) -> Family: ...

    @property
    def feedback(self) -> Feedback: ...

    @property
    def label(self) -> str:
        """Short name for run names and tables, such as "int8", "topk(0.1)", "svd(0.6)"."""

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """Shape and dtype of every part that `compress` returns for a tensor of this spec."""

    def compress(self, tensor: Tensor) -> Parts:
        """Parts with exactly the specs of `wire_specs`. Raises ValueError for integer tensors."""

    def decompress(self, parts: Parts, spec: TensorSpec) -> Tensor:
        """The tensor as the receiver sees it, of exactly this spec (shape and dtype)."""


def refuse_integers(tensor: Tensor) -> None:
    """Raise ValueError unless the tensor is floating-point."""
    if not tensor.is_floating_point():
        raise ValueError(f"only floating tensors can be compressed, got {tensor.dtype}")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def seed_from(*names: str | int) -> int:
    """A 63-bit seed, the same in every process and on every machine; similar names give unrelated
    seeds."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class ChannelId:
    """Identifies one direction between two ranks over one boundary; the same at both ends.

    seed: of the experiment. boundary: the stage before it. direction: "forward" or "backward".
    sender, receiver: ranks.
    """

    seed: int
    boundary: int
    direction: str
    sender: int
    receiver: int

    def stream(self, *names: str | int) -> int:
        """The number of this channel's random stream for the named part."""
        channel = (self.seed, self.boundary, self.direction, self.sender, self.receiver)
        return seed_from(*channel, *names)

    def __str__(self) -> str:
        return f"boundary {self.boundary} {self.direction}, rank {self.sender} to {self.receiver}"


@runtime_checkable
class Randomized(Protocol):
    """A compressor whose result depends on random numbers."""

    def use_stream(self, stream: int) -> None:
        """Draw from this stream, starting at its first call. Different streams share no random
        numbers."""


class Draws:
    """Base class of random compressors: one seed per call, from the stream, the compressor's own
    `seed` and the call's number. The stream depends on where the compressor is used, so the only
    state is the number of calls.
    """

    _stream = 0
    _num_calls = 0

    def use_stream(self, stream: int) -> None:
        self._stream, self._num_calls = stream, 0

    def state_dict(self) -> State:
        return {"num_calls": self._num_calls}

    def load_state_dict(self, state: State) -> None:
        self._num_calls = whole_number(state, "num_calls")

    def _next_seed(self, seed: int) -> int:
        self._num_calls += 1
        return seed_from(self._stream, seed, self._num_calls)
