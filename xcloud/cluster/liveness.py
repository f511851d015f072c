"""Liveness: when a peer was last heard, and how long it may be silent. No network here.

Ranks of a pipeline send a heartbeat every few seconds, from a thread, whatever else they do, so
no limit on an evaluation or an export is needed. Every message counts as a heartbeat. Inside a
step a message has a deadline too (`overdue_s`), which the link or the policy sets.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from xcloud.base.errors import ConfigError, LinkError
from xcloud.base.settings import PositiveFloat, settings


@settings("cluster.liveness")
class Liveness:
    """When a silent rank counts as lost.

    interval_s: how often a rank sends a heartbeat.
    lost_after_s: a rank is lost this many seconds after its last heartbeat.
    overdue_after_s: how long a rank that lives may take for one message inside a step, where no
        emulated link says it.
    join_within_s: how long ranks that torchrun has not started yet are waited for.
    """

    interval_s: PositiveFloat = 5.0
    lost_after_s: PositiveFloat = 20.0
    overdue_after_s: PositiveFloat = 300.0
    join_within_s: PositiveFloat = 43_200.0

    def __post_init__(self) -> None:
        if self.lost_after_s < 3 * self.interval_s:
            raise ConfigError(
                f"cluster.liveness.lost_after_s ({self.lost_after_s:g}) must be at least three "
                f"times cluster.liveness.interval_s ({self.interval_s:g}): heartbeats that "
                "rank 0 passes on come up to two intervals late"
            )


DEFAULT_LIVENESS = Liveness()


class PeerLife:
    """When one peer last sent a heartbeat, by this machine's monotonic clock. Thread-safe."""

    def __init__(self, policy: Liveness = DEFAULT_LIVENESS) -> None:
        self.policy = policy
        self.beats = False  # heartbeats come all the time: silence is a loss, in a step too
        self._lock = threading.Lock()
        self._last_s = float("-inf")
        self._awaited: tuple[object, float] | None = None  # message, since when
        self._arrived_s = float("-inf")

    def note(self, at_s: float | None = None) -> None:
        """at_s: default now; in the future for a message that an emulated link holds back."""
        with self._lock:
            self._last_s = max(self._last_s, time.monotonic() if at_s is None else at_s)

    @contextmanager
    def awaiting(self, message: object) -> Iterator[None]:
        """While the block lasts this rank waits for `message` of the peer. Who looks for the same
        one again within a second has waited since the first time."""
        now_s, before = time.monotonic(), self._awaited
        if before is None or before[0] != message or now_s - self._arrived_s > 1.0:
            self._awaited = (message, now_s)
        self._arrived_s = float("inf")
        try:
            yield
        finally:
            self._arrived_s = time.monotonic()

    @property
    def awaited(self) -> tuple[object, float] | None:
        """The message that this rank waits for now, and for how many seconds; None for none."""
        found, now_s = self._awaited, time.monotonic()
        if found is None or now_s - self._arrived_s > 0.5:
            return None
        return found[0], now_s - found[1]

    @property
    def silent_s(self) -> float:
        """Seconds since the last heartbeat, infinite before the first."""
        with self._lock:
            return max(0.0, time.monotonic() - self._last_s)

    def deadline_s(self, started_s: float, overdue_s: float) -> float:
        """Until when to wait, having started at started_s: lost_after_s after the last sign of
        life, but at least overdue_s if the peer does not give them all the time."""
        with self._lock:
            patience_s = self.policy.lost_after_s if self.beats else overdue_s
            return max(started_s + patience_s, self._last_s + self.policy.lost_after_s)

    def step_deadline_s(self, started_s: float, overdue_s: float) -> float:
        """The same for a message of a step, which a rank that lives must send in overdue_s."""
        overdue_at_s = started_s + overdue_s
        return min(self.deadline_s(started_s, overdue_s), overdue_at_s)


@contextmanager
def heartbeat(interval_s: float, beat: Callable[[], object]) -> Iterator[None]:
    """While the block lasts beat() is called in the background every interval_s seconds, until it
    raises LinkError (which the main thread will meet itself)."""
    stop = threading.Event()

    def run() -> None:
        with contextlib.suppress(LinkError):
            while not stop.wait(interval_s):
                beat()

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
