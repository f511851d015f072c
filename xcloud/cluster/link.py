"""One direction between two ranks: what a link promises, counts, and records of what it carried.

Links move frames and count bytes; they never look into a tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from xcloud.base.errors import FrameError
from xcloud.cluster.frame import Frame, Kind, MessageKey

Parts = tuple[Tensor, ...]


@dataclass
class LinkStats:
    """What has been sent so far, by kind of message; bytes are whole frames, headers included.

    line_s: seconds that messages kept the emulated line busy, counted when each takes it; the
    others count when a message is handed to the link. latency_s: of the last of them. Of a real
    line the receiving end counts line_s, see LineMeter.
    """

    num_bytes: Counter[Kind] = field(default_factory=Counter)
    num_messages: Counter[Kind] = field(default_factory=Counter)
    line_s: Counter[Kind] = field(default_factory=Counter)
    latency_s: float = 0.0

    def count(self, kind: Kind, num_bytes: int) -> None:
        self.num_bytes[kind] += num_bytes
        self.num_messages[kind] += 1

    def count_line(self, kind: Kind, line_s: float) -> None:
        self.line_s[kind] += line_s  # type: ignore[assignment]


class OutLink(Protocol):
    """The sending end. `send` returns before delivery; LinkClosed if the peer is gone."""

    stats: LinkStats

    def send(self, key: MessageKey, parts: Parts, carries: Sequence[str] = ()) -> None:
        """carries: what each part is, in words, for the record of what left the cloud."""

    def say_alive(self, parts: Parts = (), carries: Sequence[str] = ()) -> None:
        """Send a sign of life if nothing else is waiting to be sent. Never blocks."""

    def close(self, timeout_s: float) -> None:
        """Deliver what is under way and say goodbye.

        Raises LinkTimeout when nothing was taken, and the peer was silent, for timeout_s.
        """


class InLink(Protocol):
    """The receiving end."""

    def recv(self, key: MessageKey, overdue_s: float) -> Parts:
        """The next message, which must be `key`.

        Raises LinkTimeout after overdue_s seconds (in an evaluation: not while the peer gives
        signs of life), LinkClosed if the peer is gone, FrameError if something else came.
        """

    def close(self, timeout_s: float) -> None:
        """Wait for the peer's goodbye. Raises LinkTimeout when it was silent for timeout_s."""


def expect(frame: Frame, key: MessageKey, sender: str) -> Frame:
    """The frame, if it is the message that was expected; FrameError otherwise."""
    if frame.key != key:
        raise FrameError(
            f"expected {key} from {sender}, got {frame.key}; the two ranks follow different "
            "schedules: do they run the same experiment file?"
        )
    return frame


@dataclass
class _Entry:
    """All messages of one kind and composition on one link."""

    carries: tuple[str, ...]
    dtypes: tuple[str, ...]
    smallest: list[list[int]]  # size of each axis of each part
    largest: list[list[int]]
    num_messages: int = 0
    num_bytes: int = 0

    def add(self, parts: Sequence[Tensor], num_bytes: int) -> None:
        self.num_messages += 1
        self.num_bytes += num_bytes
        for part, low, high in zip(parts, self.smallest, self.largest, strict=True):
            for axis, size in enumerate(part.shape):
                low[axis], high[axis] = min(low[axis], size), max(high[axis], size)

    def described_parts(self) -> list[dict[str, Any]]:
        carries = self.carries or ("unnamed",) * len(self.dtypes)
        shapes = zip(self.smallest, self.largest, strict=True)
        return [
            {"carries": carried, "dtype": dtype,
             "shape": [a if a == b else f"{a}-{b}" for a, b in zip(low, high, strict=True)]}
            for carried, dtype, (low, high) in zip(carries, self.dtypes, shapes, strict=True)
        ]  # fmt: skip


@dataclass
class LinkRecord:
    """What went over one link. to: cloud of the receiver. boundary: number of the stage before it;
    None for control messages from and to rank 0 and in one-way jobs. bytes_of: whole frames, by
    kind; other threads may read it."""

    to: str
    receiver: int
    boundary: int | None
    bytes_of: Counter[Kind] = field(default_factory=Counter)
    _entries: dict[tuple[Any, ...], _Entry] = field(default_factory=dict)

    def note(
        self, kind: Kind, parts: Sequence[Tensor], carries: Sequence[str], num_bytes: int
    ) -> None:
        """carries: a description of each part. num_bytes: of the whole frame."""
        dtypes = tuple(str(part.dtype).removeprefix("torch.") for part in parts)
        axes = tuple(part.dim() for part in parts)
        key = (kind, tuple(carries), dtypes, axes)
        if key not in self._entries:
            sizes = [list(part.shape) for part in parts]
            self._entries[key] = _Entry(tuple(carries), dtypes, sizes, [list(s) for s in sizes])
        self._entries[key].add(parts, num_bytes)
        self.bytes_of[kind] += num_bytes

    def described(self) -> list[dict[str, Any]]:
        return [
            {
                "to": self.to,
                "receiver": self.receiver,
                "boundary": self.boundary,
                "kind": kind.name.lower(),
                "parts": entry.described_parts(),
                "num_messages": entry.num_messages,
                "num_bytes": entry.num_bytes,
            }
            for (kind, *_), entry in self._entries.items()
        ]
