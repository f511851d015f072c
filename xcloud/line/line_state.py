"""The state of the line to one rank of another cloud, and of one stream on it: whether data pass,
since when they do not, and what is said of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from xcloud.base.errors import LinkClosed, LinkTimeout
from xcloud.base.terminal import OnceAMinute
from xcloud.base.units import human_duration
from xcloud.net.link_end import ignore
from xcloud.net.peer import Peer

_SPEAK_AFTER_S = 2.0


class LineState:
    """The state of the line to one rank of another cloud. Any thread may read it.

    An outage lasts from when the first stream carries nothing any more until all carry again.

    round_trip_s, bytes_per_s: the last measurement; None before the first.
    num_cuts: number of connections that were lost after they had carried something.
    num_outages: number of outages that have begun.
    outage_s: total seconds of the outages that are over.
    sent_again_bytes: bytes that were sent once more after a connection was lost.
    say: called with a message when the line goes down, and when it is back.
    """

    def __init__(self, peer_name: str, say: Callable[[str], object] = ignore) -> None:
        self.peer_name = peer_name
        self.round_trip_s: float | None = None
        self.bytes_per_s: float | None = None
        self.num_cuts = 0
        self.num_outages = 0
        self.outage_s = 0.0
        self.sent_again_bytes = 0
        self._say = say
        self._say_at_times = OnceAMinute(say)
        self._down: dict[object, float] = {}  # by stream, since when
        self._outage_since_s = 0.0
        self._since_s: float | None = None  # since when it was said to be down
        self._waits_since_s: float | None = None  # for the peer to come at all
        self._lock = threading.Lock()

    @property
    def down_s(self) -> float | None:
        """For how many seconds the line has been down; None while it is not."""
        with self._lock:
            # One line has several streams (control, norms, activations); the first that fell
            # counts.
            since_s = min(self._down.values(), default=None)
        return None if since_s is None else time.monotonic() - since_s

    @property
    def text(self) -> str | None:
        """The line in words while it is down."""
        down_s = self.down_s
        if down_s is None:
            return None
        return f"line to {self.peer_name} down for {down_s:.0f} s"

    def was_cut(self) -> None:
        """Count a connection that had carried something and has ended."""
        with self._lock:
            self.num_cuts += 1

    def sent_again(self, num_bytes: int) -> None:
        """Count bytes that are sent once more."""
        with self._lock:
            self.sent_again_bytes += num_bytes

    def is_down(self, stream: object, since_s: float, until_s: float, reason: str) -> None:
        """Note that a stream carries nothing. Report it, unless it is repaired at once or was
        reported before.

        until_s: time at which the stream is given up.
        """
        now_s = time.monotonic()
        with self._lock:
            if not self._down:
                self.num_outages += 1
                self._outage_since_s = since_s
            self._down[stream] = since_s
            # A cut that is mended within two seconds by dialling again is no news.
            is_news = self._since_s is None and now_s - since_s > _SPEAK_AFTER_S
            if is_news:
                self._since_s = since_s
        if is_news:
            left = human_duration(until_s - now_s)
            # Said outside the lock: `say` writes to a log and a terminal, and other threads ask
            # `down_s`.
            self._say(f"the line to {self.peer_name} is down ({reason}); dialling for {left}")

    def waits(self, reason: str) -> None:
        """Note that the peer has not come yet. A reason is spoken of once a minute."""
        now_s = time.monotonic()
        with self._lock:
            if self._waits_since_s is None:
                self._waits_since_s = now_s
            waited_s = now_s - self._waits_since_s
        if waited_s >= _SPEAK_AFTER_S:
            waited = human_duration(waited_s)
            self._say_at_times(f"waiting for {self.peer_name}, {waited}: {reason}", reason)

    def lacks(self, reason: str) -> None:
        """Say that a stream to this peer has fewer connections than it should, and why."""
        self._say_at_times(f"the line to {self.peer_name} lacks connections: {reason}", reason)

    def came_back(self, stream: object) -> None:
        """Note that a stream carries."""
        now_s = time.monotonic()
        with self._lock:
            self._waits_since_s = None
            was_down = self._down.pop(stream, None) is not None
            if was_down and not self._down:
                self.outage_s += now_s - self._outage_since_s
            since_s = self._since_s
            # Another stream still carries nothing, or nobody was told that the line was down.
            if self._down or since_s is None:
                return
            self._since_s = None
        down = human_duration(now_s - since_s)
        self._say(f"the line to {self.peer_name} is back after {down}")


class Course:
    """The course of one end of a stream: its peer has not come, data pass, or they do not.
    Thread-safe.

    A connection counts once data have come or were acknowledged over it, because greetings pass on
    many a line that carries no data.

    first_within_s: seconds to wait for the peer's first connection.
    reconnect_s: seconds that no data may pass later.
    """

    def __init__(
        self,
        stream: object,
        state: LineState,
        peer: Peer,
        first_within_s: float,
        reconnect_s: float,
    ) -> None:
        self._stream = stream
        self._state = state
        self._peer = peer
        self._first_within_s = first_within_s
        self._reconnect_s = reconnect_s
        self._lock = threading.Lock()
        self._has_met = False
        self.carrying: set[int] = set()  # connections
        self._num_empty = 0  # connections in a row that carried nothing
        self._since_s = time.monotonic()  # since when no data pass
        # When it ends once all messages have been carried; from then on a disconnect no longer
        # counts as one.
        self.linger_until_s: float | None = None
        self.has_carried = False

    def met(self) -> None:
        """Note that a connection was made and its peer has greeted."""
        self._peer.mark_alive()
        with self._lock:
            if not self._has_met:
                self._has_met = True
                self._since_s = time.monotonic()

    def carries(self, number: int) -> None:
        """Note that data pass over a connection."""
        # Called for each piece, so the usual case takes no lock.
        if number in self.carrying:
            return
        with self._lock:
            self.carrying.add(number)
            # In a row: one connection that carries shows that long packets do pass.
            self._num_empty = 0
            self.has_carried = True
        self._state.came_back(self._stream)

    def ended(self, number: int, reason: str) -> bool:
        """Note that a connection has ended. Return whether it had carried something.

        Raises as `failed` does.
        """
        with self._lock:
            has_carried = number in self.carrying
            self.carrying.discard(number)
            if not has_carried:
                self._num_empty += 1
            # The outage begins with this cut, however long the connection was up before.
            elif not self.carrying:
                self._since_s = time.monotonic()
        # All messages have been carried in the other case, so that the end of a connection is what
        # both sides want and no cut.
        if self.linger_until_s is None:
            if has_carried:
                self._state.was_cut()
            self.failed(reason)
        return has_carried

    def failed(self, reason: str) -> bool:
        """Note that there is no connection at present. Return whether none is needed any more.

        Raises LinkTimeout for a peer that never came, LinkClosed once the stream has been down for
        too long.
        """
        with self._lock:
            if self.carrying:
                return False  # the others carry on
            since_s = self._since_s
        now_s = time.monotonic()
        # Nobody is waited for any more, except a sender that may not know that all has come.
        if self.linger_until_s is not None:
            return now_s > self.linger_until_s
        who = self._state.peer_name
        # Before the first greeting the limit is that of joining. After it the limit is
        # `reconnect_s`, since the peer's process was there.
        if not self._has_met:
            if now_s - since_s > self._first_within_s:
                raise LinkTimeout(
                    f"no line to {who} in {self._first_within_s:g} s "
                    f"(cluster.liveness.join_within_s): {reason}"
                )
            self._state.waits(reason)
            return False
        until_s = since_s + self._reconnect_s
        if self._num_empty:
            reason = f"greetings pass, data do not ({reason}): is a packet too long for the way?"
            reason += " Lower the MTU of both machines or tunnels"
        self._state.is_down(self._stream, since_s=since_s, until_s=until_s, reason=reason)
        if now_s > until_s:
            raise LinkClosed(
                f"the line to {who} has been down for {self._reconnect_s:g} s "
                f"(cluster.reconnect_s): {reason}"
            )
        self._peer.mark_alive()  # it is waited for
        return False
