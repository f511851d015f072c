"""The clock of an emulated link: computes when a message would arrive. Delays nothing itself.

All ranks of one cloud that send to the same other cloud share one clock, kept in a small file in
the run folder, and so share the bandwidth. The sender's background thread reserves the line and
writes the time of delivery into the frame; the receiver's background thread holds the frame back
until then. It needs no root rights and no busy waiting, and never blocks the compute threads.

Model: whole messages first come, first served (as in a router's queue); TCP and Ethernet headers
count; latency is added after the last byte; jitter never reorders. As on a real link, a message
starts only when its sender knows of a posted receive
(`PostedReceives`). Not modelled: TCP slow start, loss, cross traffic.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from xcloud.cluster.link_profile import LinkProfile

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
