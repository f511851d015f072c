"""How long a real line was busy, as its receiving end sees it. Pure arithmetic; sends nothing.

Every message tells when it was sent, by its sender's clock. A probe (a message without content,
sent while the line is idle) shows what that clock and the latency add up to:

    delay = median(arrived - sent) of the last probes.

A message then keeps the line busy from when its first byte could be here, or from the end of the
one before, until it is here:

    busy = arrived - max(sent + delay, arrived before).

The median, and not the least, because the receiving thread wakes late by as much for a message as
for a probe: so a fast line is not taken for a slow one.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque

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
