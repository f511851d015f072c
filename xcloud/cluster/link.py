"""One direction between two ranks: what a link promises.

Links move frames and count bytes; they never look into a tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

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
