"""One direction between two ranks: what an end notes of its messages, and when an emulated line
delivers them.

Links move frames and count bytes; they never look into a tensor.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from xcloud.net.frame import Frame, Kind, MessageKey
from xcloud.net.link_profile import LinkProfile
from xcloud.net.unsteady_line import jitter_share

CONTROL = -1
"""In place of a boundary: control messages from and to rank 0."""


class LinkName(NamedTuple):
    """The name of a direction of a link, the same at both ends.

    boundary: number of the stage before it, or CONTROL.
    """

    boundary: int
    sender: int
    receiver: int


_UNNAMED = LinkName(CONTROL, 0, receiver=0)


class Reservation(NamedTuple):
    """The time of a message on an emulated line, in seconds of this machine's monotonic clock.

    start_s, sent_s: times at which the line starts and finishes carrying the message.
    deliver_at_s: time at which its last byte arrives.
    """

    start_s: float
    sent_s: float
    deliver_at_s: float


class SentMessage(NamedTuple):
    """A message that this rank sent.

    line_from_s, line_until_s: the times at which the emulated line began and ended carrying it.
        On a real link line_from_s is the time at which it was passed to the network. There
        line_until_s is None, because only the receiver knows it.
    """

    link: LinkName
    key: MessageKey
    sequence: int
    num_bytes: int
    queued_at_s: float
    line_from_s: float
    line_until_s: float | None


class ReceivedMessage(NamedTuple):
    """A message that this rank received."""

    link: LinkName
    key: MessageKey
    sequence: int
    received_at_s: float


@dataclass(eq=False)
class MessageLog:
    """A log of what one rank sent to and received from other clouds. Its links append from their
    threads.

    Messages of step from_step or later are recorded whenever they arrive: without a backward pass
    a cloud may be many steps ahead of the next. Reports belong to no step; they are recorded
    while is_open.
    """

    from_step: int
    is_open: bool = False
    sent: list[SentMessage] = field(default_factory=list)
    received: list[ReceivedMessage] = field(default_factory=list)

    def wants(self, key: MessageKey) -> bool:
        if key.kind is Kind.REPORT:
            return self.is_open
        return key.step >= self.from_step and key.kind not in _OF_NO_STEP


_OF_NO_STEP = (Kind.EVALUATION, Kind.BARRIER, Kind.ALIVE, Kind.CHECKPOINT, Kind.WORD)


@dataclass
class _Entry:
    """The messages of one kind and composition on one link.

    sizes: the smallest and the largest of each axis of each part.
    """

    carries: Sequence[str]
    dtypes: tuple[str, ...]
    sizes: list[list[tuple[int, int]]]
    num_messages: int = 0
    num_bytes: int = 0


@dataclass
class LinkRecord:
    """The notes of one end of a link. Other threads may read all of it.

    to: cloud of the receiver; None inside a cloud, where messages are only counted.
    log: the log of its rank. None: no times are noted.
    num_bytes, num_messages: bytes and number of messages handed to the link, by kind. The bytes
        are those of full frames with their headers.
    arrived_bytes, arrived_messages: the same for the receiving end, counted once a frame has been
        checked.
    line_s: seconds that messages keep the emulated line busy, by kind. Each message is counted
        when the line takes it.
    latency_s: latency of the last message on the emulated line, in seconds.
    sent_again_bytes: bytes that the carrier sent once more after a disconnect. No other count
        includes them.
    """

    link: LinkName = _UNNAMED
    to: str | None = None
    log: MessageLog | None = None
    num_bytes: Counter[Kind] = field(default_factory=Counter)
    num_messages: Counter[Kind] = field(default_factory=Counter)
    arrived_bytes: Counter[Kind] = field(default_factory=Counter)
    arrived_messages: Counter[Kind] = field(default_factory=Counter)
    line_s: Counter[Kind] = field(default_factory=Counter)
    latency_s: float = 0.0
    sent_again_bytes: int = 0
    _entries: dict[tuple[Any, ...], _Entry] = field(default_factory=dict)

    def note(
        self, kind: Kind, parts: Sequence[Tensor], carries: Sequence[str], num_bytes: int
    ) -> None:
        """Count a message that is handed to the link.

        carries: a description of each part.
        num_bytes: size of the full frame.
        """
        self.num_bytes[kind] += num_bytes
        self.num_messages[kind] += 1
        # Inside a cloud nothing has left anybody's hands, so no record of contents is kept.
        if self.to is None:
            return
        dtypes = tuple(str(part.dtype).removeprefix("torch.") for part in parts)
        # Thousands of messages differ only in the lengths of their texts, so a record holds
        # ranges.
        key = (kind, tuple(carries), dtypes, tuple(part.dim() for part in parts))
        if (entry := self._entries.get(key)) is None:
            sizes = [[(size, size) for size in part.shape] for part in parts]
            entry = _Entry(
                carries=carries or ("unnamed",) * len(parts), dtypes=dtypes, sizes=sizes
            )
            self._entries[key] = entry
        entry.num_messages += 1
        entry.num_bytes += num_bytes
        for part, axes in zip(parts, entry.sizes, strict=True):
            seen = zip(axes, part.shape, strict=True)
            axes[:] = [(min(low, size), max(high, size)) for (low, high), size in seen]

    def sending(
        self, key: MessageKey, sequence: int, num_bytes: int, queued_at_s: float,
        slot: Reservation | None = None,
    ) -> None:  # fmt: skip
        """Note that a message is passed to the network now.

        slot: its reservation on an emulated line.
        """
        if slot is not None:
            self.line_s[key.kind] += slot.sent_s - slot.start_s  # type: ignore[assignment]
            self.latency_s = slot.deliver_at_s - slot.sent_s
        if self.log is not None and self.log.wants(key):
            line = (time.monotonic(), None) if slot is None else (slot.start_s, slot.sent_s)
            found = SentMessage(self.link, key, sequence, num_bytes, queued_at_s, *line)
            self.log.sent.append(found)

    def arrived(self, frame: Frame) -> None:
        """Count a frame that has arrived and been checked."""
        self.arrived_bytes[frame.key.kind] += frame.num_bytes
        self.arrived_messages[frame.key.kind] += 1

    def received(self, frame: Frame) -> None:
        if self.log is not None and self.log.wants(frame.key):
            found = ReceivedMessage(
                self.link, frame.key, sequence=frame.sequence, received_at_s=time.monotonic()
            )
            self.log.received.append(found)

    def described(self) -> list[dict[str, Any]]:
        boundary = None if self.link.boundary == CONTROL else self.link.boundary
        return [
            {
                "to": self.to,
                "receiver": self.link.receiver,
                "boundary": boundary,
                "kind": kind.name.lower(),
                "parts": [
                    {
                        "carries": carried,
                        "dtype": dtype,
                        "shape": [low if low == high else f"{low}-{high}" for low, high in sizes],
                    }
                    for carried, dtype, sizes in zip(
                        entry.carries, entry.dtypes, entry.sizes, strict=True
                    )
                ],
                "num_messages": entry.num_messages,
                "num_bytes": entry.num_bytes,
            }
            for (kind, *_), entry in self._entries.items()
        ]


_MOMENT = struct.Struct("<d")
_STATE = struct.Struct("<dddQ")  # started at, line free at, last arrival (all seconds), messages


class PostedReceives:
    """The receive window of an emulated link: when its sender may start a message, as gloo lets it
    on a real link.

    With w receives posted at first, message k needs the one that the receiver posts when message
    k - w is delivered, and the notice of it (no size, no jitter) takes one latency back. So
    message k starts no earlier than deliver_at(k - w) + latency, both of which the sender knows.
    A receiver whose queue is full takes messages later; nothing is timed then.
    """

    def __init__(self, num_posted: int, latency_at: Callable[[float], float]) -> None:
        """latency_at: returns the latency at a moment of the monotonic clock, both in seconds."""
        self._latency_at = latency_at
        self._delivered_at_s: deque[float] = deque(maxlen=num_posted)

    @property
    def known_at_s(self) -> float:
        """The time when the sender learns of the next message's receive, by the monotonic clock; 0
        for the first messages, whose receives were posted at set-up."""
        if len(self._delivered_at_s) < (self._delivered_at_s.maxlen or 0):
            return 0.0
        # The oldest of as many as there are receives: message k waits for that of k - w.
        delivered_at_s = self._delivered_at_s[0]
        return delivered_at_s + self._latency_at(delivered_at_s)

    def used(self, deliver_at_s: float) -> None:
        """Note that a message delivered at that time used up a receive."""
        self._delivered_at_s.append(deliver_at_s)


class Progress:
    """The time when a message of a step last arrived or will arrive, by the monotonic clock.
    Thread-safe.

    What a rank waits for may stand behind whatever is still on its way, also between two other
    ranks, so the deadline of a message counts from here. Heartbeats say when one last moved
    between others.

    path: a file that all ranks of a run share, whose lines are emulated on one machine.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._heard_at_s = float("-inf")
        self._file: int | None = None
        # One number, in a file that all ranks of the machine map where their lines are emulated: a
        # rank may wait behind a message of two others, of which it hears nothing by itself.
        self._state: mmap.mmap | bytearray = bytearray(_MOMENT.pack(float("-inf")))
        if path is not None:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            with self._locked():
                if os.fstat(self._file).st_size < _MOMENT.size:
                    os.write(self._file, self._state)
            self._state = mmap.mmap(self._file, _MOMENT.size)

    def note(self, at_s: float | None = None) -> None:
        """Note that a message moved.

        at_s: default now; in the future for what an emulated line holds back.
        """
        moved_at_s = time.monotonic() if at_s is None else at_s
        with self._locked():
            if moved_at_s > self._read():
                self._state[:] = _MOMENT.pack(moved_at_s)

    def mark_moved(self, age_s: float) -> None:
        """Note that a message moved at another rank, that many seconds ago."""
        moved_at_s = time.monotonic() - age_s
        with self._lock:
            self._heard_at_s = max(self._heard_at_s, moved_at_s)

    @property
    def own_at_s(self) -> float:
        """The time when a message last moved here, without what other ranks said."""
        with self._locked():
            return self._read()

    @property
    def moved_at_s(self) -> float:
        return max(self.own_at_s, self._heard_at_s)

    def _read(self) -> float:
        return float(_MOMENT.unpack(self._state[:])[0])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            if self._file is None:
                yield
                return
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)


class LinkClock:
    """The arrival times of one direction between two clouds; seeded, shared through `path`."""

    def __init__(self, profile: LinkProfile, path: Path) -> None:
        self.profile = profile
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        # Whichever rank opens it first writes it, under the lock.
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
                # The line carries messages in full, first come first served; this one begins when
                # those before it are off the line, at whichever rank they began.
                start = max(now, free_at)
                sent_s = self.profile.sent_at(start - origin, num_bytes)
                sent = origin + sent_s
                jitter = jitter_share(messages)
                arrival = sent + self.profile.latency_at(sent_s) + jitter * self.profile.jitter_s
                # Neither jitter nor a latency that falls lets a message overtake the one before:
                # TCP would not.
                arrival = max(arrival, last_arrival)
                self._state[:] = _STATE.pack(origin, sent, arrival, messages + 1)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        return Reservation(start, sent, deliver_at_s=arrival)

    def latency_at(self, moment_s: float) -> float:
        """Return the latency one way, at a moment of the monotonic clock."""
        return self.profile.latency_at(moment_s - self.started_at_s)

    @property
    def started_at_s(self) -> float:
        """The time zero of the profile's trace and outages, by the monotonic clock."""
        return float(_STATE.unpack(self._state[:])[0])
