"""Meters of real lines: how long messages kept them busy, by the clocks at both ends."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from xcloud.comm.compression import ChannelId
from xcloud.net.frame import TRAFFIC_OF, Frame, Kind

_NUM_PROBES = 9


@dataclass(eq=False)
class LineMeter:
    """The meter of all links from one rank to this one, whose threads call it."""

    _delays_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_PROBES))
    _arrived_at_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def delay_s(self) -> float:
        """The clock difference plus the latency; 0 before the first probe."""
        with self._lock:
            if self._delays_s:
                return statistics.median(self._delays_s)
            return 0.0

    def probe(self, sent_at_s: float, arrived_at_s: float) -> None:
        """Note the times of a message that found the line free."""
        with self._lock:
            self._delays_s.append(arrived_at_s - sent_at_s)

    def busy_s(self, sent_at_s: float, arrived_at_s: float) -> float:
        """Return how long a message that has just arrived kept the line busy; 0 before the first
        probe."""
        with self._lock:
            before_s = self._arrived_at_s
            self._arrived_at_s = arrived_at_s
            if not self._delays_s:
                return 0.0
            # The clocks of two machines differ by an unknown number, which a heartbeat over an
            # idle line shows together with the latency. A message cannot begin to arrive before
            # the one in front of it has.
            start_s = max(sent_at_s + statistics.median(self._delays_s), before_s)
            return max(0.0, arrived_at_s - start_s)


@dataclass
class LineMeters:
    """The meters of the real lines that boundaries cross: one for each sender, and by channel the
    seconds that its messages kept the line busy. A heartbeat is a probe."""

    by_sender: dict[int, LineMeter] = field(default_factory=dict)
    line_s: dict[ChannelId, float] = field(default_factory=dict)

    def of(self, channel: ChannelId) -> Callable[[Frame, float], None]:
        """Return what must be given every frame of this channel's link, and when it came."""
        meter = self.by_sender.setdefault(channel.sender, LineMeter())
        self.line_s[channel] = 0.0

        def take(frame: Frame, now_s: float) -> None:
            if frame.deliver_at_s >= 0:  # nobody says when it was sent
                return
            sent_at_s = -frame.deliver_at_s
            if frame.key.kind is Kind.ALIVE:
                # It was sent when nothing waited (SendingEnd.say_alive), so it found the line
                # free.
                return meter.probe(sent_at_s, now_s)
            busy_s = meter.busy_s(sent_at_s, now_s)
            if TRAFFIC_OF.get(frame.key.kind) == channel.direction:
                self.line_s[channel] += busy_s

        return take
