"""One direction between two ranks: what a link counts and records, and the times of its messages:
an emulated line's clock, a real line's meter, a log of sending and receiving.

Links move frames and count bytes; they never look into a tensor.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import statistics
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from xcloud.base.errors import FrameError
from xcloud.cluster.frame import Frame, Kind, MessageKey
from xcloud.cluster.link_profile import LinkProfile

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


_STATE = struct.Struct("<dddQ")  # started at, line free at, last arrival (all seconds), messages


class Reservation(NamedTuple):
    """start_s, sent_s: when the line starts and finishes carrying the message. deliver_at_s: when
    its last byte arrives. Seconds of this machine's monotonic clock."""

    start_s: float
    sent_s: float
    deliver_at_s: float


class PostedReceives:
    """When the sender of an emulated link may start a message: the receive window that gloo has
    on a real link.

    With w receives posted initially, message k needs the one that the receiver posts when it takes
    message k - w. The receiver's thread takes each message on delivery, and the notice of the next
    posted receive takes one latency back. So message k starts no earlier than
        deliver_at(k - w) + latency,
    which the sender can compute: it wrote deliver_at. A notice has no size and no jitter.
    If the receiver's queue is full (evaluation with a slow decoder) it takes messages later than
    modelled; nothing is timed then.
    """

    def __init__(self, num_posted: int, latency_at: Callable[[float], float]) -> None:
        """latency_at: a moment of the monotonic clock, in seconds."""
        self._latency_at = latency_at
        self._delivered_at_s: deque[float] = deque(maxlen=num_posted)

    @property
    def known_at_s(self) -> float:
        """When the sender learns of the next message's receive, by the monotonic clock; 0 for the
        first messages, whose receives were posted at set-up."""
        if len(self._delivered_at_s) < (self._delivered_at_s.maxlen or 0):
            return 0.0
        delivered_at_s = self._delivered_at_s[0]
        return delivered_at_s + self._latency_at(delivered_at_s)

    def used(self, deliver_at_s: float) -> None:
        """Note that a message delivered at that time used up a receive."""
        self._delivered_at_s.append(deliver_at_s)


class LinkClock:
    """Arrival times for one direction between two clouds; seeded, shared through `path`."""

    def __init__(self, profile: LinkProfile, path: Path) -> None:
        self.profile = profile
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        if os.fstat(self._file).st_size < _STATE.size:
            os.write(self._file, _STATE.pack(time.monotonic(), 0.0, 0.0, 0))
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._state = mmap.mmap(self._file, _STATE.size)

    def reserve(self, num_bytes: int, now_s: float | None = None) -> Reservation:
        """Reserve the line for `num_bytes`, from now_s (default: now) or as soon as it is free."""
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                now = time.monotonic() if now_s is None else now_s
                origin, free_at, last_arrival, messages = _STATE.unpack(self._state[:])
                start = max(now, free_at)
                sent_s = self.profile.sent_at(start - origin, num_bytes)
                sent = origin + sent_s
                jitter = random.Random(f"{self.profile.seed}:{messages}").random()
                arrival = sent + self.profile.latency_at(sent_s) + jitter * self.profile.jitter_s
                arrival = max(arrival, last_arrival)
                self._state[:] = _STATE.pack(origin, sent, arrival, messages + 1)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        return Reservation(start, sent, arrival)

    def latency_at(self, moment_s: float) -> float:
        """One way, by the monotonic clock."""
        return self.profile.latency_at(moment_s - self.started_at_s)

    @property
    def started_at_s(self) -> float:
        """Time zero of the profile's trace and outages, by the monotonic clock."""
        return float(_STATE.unpack(self._state[:])[0])

    def close(self) -> None:
        self._state.close()
        os.close(self._file)


_NUM_PROBES = 9


class LineMeter:
    """Of all links from one rank to this one, whose threads call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._delays_s: deque[float] = deque(maxlen=_NUM_PROBES)
        self._arrived_at_s = 0.0

    @property
    def delay_s(self) -> float:
        """Clock difference + latency; 0 before the first probe."""
        with self._lock:
            return statistics.median(self._delays_s) if self._delays_s else 0.0

    def probe(self, sent_at_s: float, arrived_at_s: float) -> None:
        with self._lock:
            self._delays_s.append(arrived_at_s - sent_at_s)

    def busy_s(self, sent_at_s: float, arrived_at_s: float) -> float:
        """Of a message that has just arrived; 0 before the first probe."""
        with self._lock:
            before_s, self._arrived_at_s = self._arrived_at_s, arrived_at_s
            if not self._delays_s:
                return 0.0
            start_s = max(sent_at_s + statistics.median(self._delays_s), before_s)
            return max(0.0, arrived_at_s - start_s)


CONTROL = -1
"""In place of a boundary: control messages from and to rank 0."""


class LinkName(NamedTuple):
    """The same at both ends. boundary: number of the stage before it, or CONTROL."""

    boundary: int
    sender: int
    receiver: int


class SentMessage(NamedTuple):
    """line_from_s, line_until_s: when the emulated line carried it. On a real link line_from_s is
    when it was passed to the network, and line_until_s is None: only the receiver knows it."""

    link: LinkName
    key: MessageKey
    sequence: int
    num_bytes: int
    queued_at_s: float
    line_from_s: float
    line_until_s: float | None


class ReceivedMessage(NamedTuple):
    link: LinkName
    key: MessageKey
    sequence: int
    received_at_s: float


class MessageLog:
    """What one rank sent to and received from other clouds; its links append from their threads.

    Messages of step from_step or later are recorded whenever they arrive: without a backward pass
    a cloud may be many steps ahead of the next. Reports belong to no step; they are recorded
    while is_open.
    """

    def __init__(self, from_step: int) -> None:
        self.from_step = from_step
        self.is_open = False
        self.sent: list[SentMessage] = []
        self.received: list[ReceivedMessage] = []

    def wants(self, key: MessageKey) -> bool:
        if key.kind is Kind.REPORT:
            return self.is_open
        return key.step >= self.from_step and key.kind not in _OF_NO_STEP


_OF_NO_STEP = (Kind.EVALUATION, Kind.MEETING, Kind.ALIVE, Kind.CHECKPOINT)


@dataclass(frozen=True)
class LinkLog:
    """One link's access to its rank's log."""

    name: LinkName
    log: MessageLog

    def sending(
        self,
        key: MessageKey,
        sequence: int,
        num_bytes: int,
        queued_at_s: float,
        now_s: float,
        slot: Reservation | None,
    ) -> None:
        """now_s: when it is passed to the network. slot: its reservation on an emulated line."""
        if not self.log.wants(key):
            return
        line = (now_s, None) if slot is None else (slot.start_s, slot.sent_s)
        self.log.sent.append(SentMessage(self.name, key, sequence, num_bytes, queued_at_s, *line))

    def received(self, frame: Frame, now_s: float) -> None:
        if self.log.wants(frame.key):
            self.log.received.append(ReceivedMessage(self.name, frame.key, frame.sequence, now_s))
