"""Liveness: when a peer was last heard, and how long it may be silent. No network here.

Ranks of a pipeline send a heartbeat every few seconds, from a thread, whatever else they do, so
no limit on an evaluation or an export is needed. Every message counts as a heartbeat. Inside a
step a message has a deadline too (`overdue_s`), which the link or the policy sets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

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


class Silence:
    """Which peers, of those heard at least once, have been silent for lost_after_s. Not
    thread-safe. A rank that does not look itself for half that time was stopped or its machine
    suspended: it could hear nobody meanwhile, and counts that as nobody's silence."""

    def __init__(self, lost_after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lost_after_s, self._clock = lost_after_s, clock
        self._looked_s = clock()
        self._heard_s: dict[int, float] = {}

    def hear(self, peer: int) -> None:
        self._heard_s[peer] = self._clock()

    def forget(self, peer: int) -> None:
        """Until it is heard again."""
        self._heard_s.pop(peer, None)

    def look(self) -> list[int]:
        """To be called several times in lost_after_s."""
        now_s = self._clock()
        missed_s, self._looked_s = now_s - self._looked_s, now_s
        if missed_s > self._lost_after_s / 2:
            self._heard_s = {peer: at_s + missed_s for peer, at_s in self._heard_s.items()}
        heard = sorted(self._heard_s.items())
        return [peer for peer, at_s in heard if now_s - at_s > self._lost_after_s]


class Heartbeat:
    """`with Heartbeat(interval_s, beat):` calls beat() in the background every interval_s seconds,
    until the block ends or beat() raises LinkError (which the main thread will meet itself)."""

    def __init__(self, interval_s: float, beat: Callable[[], None]) -> None:
        self._interval_s, self._beat = interval_s, beat
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self._beat()
            except LinkError:
                return
