"""Seeds for random compressors, derived from the channel, the call and the compressor's `seed`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from xcloud.comm.memory import State, whole_number


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


@dataclass
class Draws:
    """Base class of random compressors: one seed per call, from the stream, the compressor's own
    `seed` and the call's number. The stream depends on where the compressor is used, so the only
    state is the number of calls.
    """

    _stream: int = field(default=0, init=False, repr=False, compare=False)
    _num_calls: int = field(default=0, init=False, repr=False, compare=False)

    def use_stream(self, stream: int) -> None:
        self._stream, self._num_calls = stream, 0

    def state_dict(self) -> State:
        return {"num_calls": self._num_calls}

    def load_state_dict(self, state: State) -> None:
        self._num_calls = whole_number(state, "num_calls")

    def _next_seed(self, seed: int) -> int:
        self._num_calls += 1
        return seed_from(self._stream, seed, self._num_calls)
