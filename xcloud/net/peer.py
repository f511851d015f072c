"""What a rank knows of one other rank: when something last came from it, and what it waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from xcloud.net.link import Progress
from xcloud.net.link_profile import DEFAULT_LIVENESS, Liveness


class Peer:
    """The record that a rank keeps of one other rank. Thread-safe.

    Whatever hears the peer notes it here: a frame over any link, a heartbeat, the word of rank 0,
    a launcher's look at the process. The rule is the same for all: a peer is silent once nothing
    has been heard for `liveness.lost_after_s`. Two clocks are kept apart. One says when the peer's
    process was last heard. The other says when the last message arrives that an emulated line
    still holds back: whoever waits for a message waits for that one too, but a process is not
    alive for having sent a message that takes long.

    now_s: a clock in seconds. The failure detector's stands still while this process is stopped.
    """

    silence_is_loss = False
    """Whether silence is a loss inside a step too, because heartbeats come all the time."""

    def __init__(
        self, liveness: Liveness = DEFAULT_LIVENESS, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.liveness = liveness
        self._now_s = now_s
        self._lock = threading.Lock()
        self._heard_at_s = float("-inf")
        self._arrives_at_s = float("-inf")
        self._awaited: tuple[object, float] | None = None  # message, since when
        self._waited_at_s = float("-inf")

    def mark_alive(self, age_s: float = 0.0) -> None:
        """Note that something came from the peer.

        age_s: seconds since it came; below 0 for a message that an emulated line delivers later.
        """
        now_s = self._now_s()
        with self._lock:
            self._heard_at_s = max(self._heard_at_s, now_s - max(0.0, age_s))
            # On an emulated line a frame is here before it has arrived; then this lies in the
            # future.
            self._arrives_at_s = max(self._arrives_at_s, now_s - age_s)

    def note_taken(self, arrives_at_s: float) -> None:
        """Note that the peer's machine has taken a message that arrives then, by the monotonic
        clock. Whoever waits gives the peer the time until then, but its process was not heard."""
        at_s = self._now_s() + arrives_at_s - time.monotonic()
        with self._lock:
            self._arrives_at_s = max(self._arrives_at_s, at_s)

    def forget(self) -> None:
        """Count the peer as never heard, until it is heard again."""
        with self._lock:
            self._heard_at_s = float("-inf")
            self._arrives_at_s = float("-inf")

    @property
    def silent_s(self) -> float:
        """The seconds since the peer's process was heard, infinite before the first time."""
        now_s = self._now_s()
        with self._lock:
            return max(0.0, now_s - self._heard_at_s)

    @property
    def is_silent(self) -> bool:
        """Return whether a peer heard before has been silent for longer than is allowed."""
        return self.liveness.lost_after_s < self.silent_s < float("inf")

    @contextmanager
    def awaiting(self, message: object) -> Iterator[None]:
        """Note that this rank waits for `message` of the peer while the block lasts. Who looks for
        the same one again within a second has waited since the first time."""
        now_s = time.monotonic()
        before = self._awaited
        if before is None or before[0] != message or now_s - self._waited_at_s > 1.0:
            self._awaited = (message, now_s)
        self._waited_at_s = float("inf")
        try:
            yield
        finally:
            self._waited_at_s = time.monotonic()

    @property
    def awaited(self) -> tuple[object, float] | None:
        """The message that this rank waits for now, and for how many seconds; None for none."""
        found = self._awaited
        now_s = time.monotonic()
        if found is None or now_s - self._waited_at_s > 0.5:
            return None
        return found[0], now_s - found[1]

    def left_s(self, waited_s: float, overdue_s: float) -> float:
        """Return how long a wait may still last: until the peer has been silent for
        lost_after_s, but at least overdue_s in all if it sends no heartbeats all the time."""
        patience_s = self.liveness.lost_after_s if self.silence_is_loss else overdue_s
        now_s = self._now_s()
        with self._lock:
            # Whoever waits counts both clocks: what the peer's machine has taken is still on its
            # way.
            last_at_s = max(self._heard_at_s, self._arrives_at_s)
        return max(patience_s - waited_s, last_at_s + self.liveness.lost_after_s - now_s)

    def wait(
        self,
        attempt: Callable[[float], bool],
        overdue_s: float,
        in_step: bool = False,
        progress: Progress | None = None,
    ) -> bool:
        """Call attempt(seconds), which waits no longer than that, until it returns True. Return
        False once the time is over: a message of a step must be there in overdue_s anyway, counted
        from when `progress` last saw one move."""
        started_at_s = self._now_s()
        while True:
            waited_s = self._now_s() - started_at_s
            since_s = waited_s
            if progress is not None:
                since_s = min(waited_s, time.monotonic() - progress.moved_at_s)
            left_s = self.left_s(waited_s if self.silence_is_loss else since_s, overdue_s)
            if in_step:
                # A live peer is no excuse inside a step: it may itself wait for a message that
                # never comes.
                left_s = min(left_s, overdue_s - since_s)
            # A second at most, as heartbeats and other messages move the deadline meanwhile.
            if attempt(min(1.0, max(0.0, left_s))):
                return True
            if left_s <= 0:
                return False
