"""One TLS connection that one thread drives, and the connections of a stream, which are made again
after every cut."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from xcloud.base.errors import FrameError, LinkClosed, LinkError, LinkTimeout
from xcloud.base.units import human_duration
from xcloud.line.hello import Hello
from xcloud.line.pinned_tls import LineDown, in_words
from xcloud.line.ways import Connected, Way
from xcloud.net.link_end import ignore
from xcloud.net.peer import Peer

SPEAK_EVERY_S = 0.5
SILENT_S = 3.0
"""After which a connection counts as cut. Both ends say something every SPEAK_EVERY_S."""
UNANSWERED_S = 1.0
"""The same, where the system has sent something NUM_RETRIES times more, and in vain."""
NUM_RETRIES = 2
_SPEAK_AFTER_S = 2.0
_SPEAK_AGAIN_S = 60.0
_LOOK_EVERY_S = 0.5
_WAKE_EVERY_S = 0.25
_FIRST_PAUSE_S = 0.05
"""How long after an attempt at a connection the next one begins, at least; each time longer."""
_LONGEST_PAUSE_S = _LOOK_EVERY_S  # so that who listens never looks away


class LineState:
    """The state of the line to one rank of another cloud. Any thread may read it.

    round_trip_s, bytes_per_s: as last measured; None before.
    num_cuts: connections that were cut.
    say: is told when the line is down, and when it is back.
    """

    def __init__(self, peer_name: str, say: Callable[[str], object] = ignore) -> None:
        self.peer_name = peer_name
        self.round_trip_s: float | None = None
        self.bytes_per_s: float | None = None
        self.num_cuts = 0
        self._say = say
        self._down: dict[object, float] = {}  # by stream, since when
        self._since_s: float | None = None  # since when it was said to be down
        self._waits_since_s: float | None = None  # for the peer to come at all
        self._waits_said_s: dict[str, float] = {}  # by reason
        self._lock = threading.Lock()

    @property
    def down_s(self) -> float | None:
        """For how many seconds the line has been down; None while it is not."""
        with self._lock:
            since_s = min(self._down.values(), default=None)
        if since_s is None:
            return None
        return time.monotonic() - since_s

    @property
    def text(self) -> str | None:
        """The line in words while it is down."""
        down_s = self.down_s
        if down_s is None:
            return None
        return f"line to {self.peer_name} down for {down_s:.0f} s"

    def went_down(self, stream: object, since_s: float, until_s: float, reason: str) -> None:
        """Note that a stream is down. What is mended at once is not spoken of."""
        now_s = time.monotonic()
        with self._lock:
            self._down[stream] = since_s
            is_news = self._since_s is None and now_s - since_s > _SPEAK_AFTER_S
            if is_news:
                self._since_s = since_s
        if is_news:
            left = human_duration(until_s - now_s)
            self._say(f"the line to {self.peer_name} is down ({reason}); dialling for {left}")

    def waits(self, reason: str) -> None:
        """Note that the peer has not come yet. A reason is spoken of once a minute."""
        now_s = time.monotonic()
        with self._lock:
            if self._waits_since_s is None:
                self._waits_since_s = now_s
            waited_s = now_s - self._waits_since_s
            said_s = self._waits_said_s.get(reason, float("-inf"))
            if waited_s < _SPEAK_AFTER_S or now_s - said_s < _SPEAK_AGAIN_S:
                return
            self._waits_said_s[reason] = now_s
        self._say(f"waiting for {self.peer_name}, {human_duration(waited_s)}: {reason}")

    def came_back(self, stream: object) -> None:
        with self._lock:
            self._waits_since_s = None
            self._down.pop(stream, None)
            since_s = self._since_s
            if self._down or since_s is None:
                return
            self._since_s = None
        down = human_duration(time.monotonic() - since_s)
        self._say(f"the line to {self.peer_name} is back after {down}")


class Waker:
    """Ends another thread's wait on a connection."""

    def __init__(self) -> None:
        self._heard, self._said = socket.socketpair()
        self._heard.setblocking(False)
        self._said.setblocking(False)

    def wake(self) -> None:
        with suppress(OSError):  # it has been woken often enough, or is closed
            self._said.send(b"!")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            self._heard.recv(4096)

    def fileno(self) -> int:
        return self._heard.fileno()

    def close(self) -> None:
        self._heard.close()
        self._said.close()


class Connection:
    """A TLS connection that never blocks. One thread alone uses it: a socket of Python's ssl may
    not be read and written by two.

    has_ended: whether the thread is wanted for something else.
    """

    def __init__(self, tls: ssl.SSLSocket, waker: Waker, has_ended: Callable[[], bool]) -> None:
        tls.setblocking(False)
        self._tls = tls
        self._waker = waker
        self._has_ended = has_ended
        self._unsent: deque[memoryview] = deque()
        self._poll = select.poll()
        self._poll.register(waker, select.POLLIN)
        self._heard_at_s = time.monotonic()
        self.spoke_at_s = self._heard_at_s

    def queue(self, data: bytes | memoryview) -> None:
        self._unsent.append(memoryview(data))

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def write(self) -> bool:
        """Write what is queued, as far as the socket takes it. Return whether it took all.

        Raises OSError where the connection has ended.
        """
        while self._unsent:
            data = self._unsent[0]
            try:
                num_bytes = self._tls.send(data)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return False  # the same bytes must be offered next
            if num_bytes == len(data):
                self._unsent.popleft()
            else:
                self._unsent[0] = data[num_bytes:]
            self.spoke_at_s = time.monotonic()
        return True

    def read_into(self, place: memoryview) -> int:
        """Read what is there. Return how many bytes that was.

        Raises OSError or LineDown where the connection has ended.
        """
        try:
            num_bytes = self._tls.recv_into(place)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        if num_bytes == 0:
            raise LineDown("the connection was closed")
        self._heard_at_s = time.monotonic()
        return num_bytes

    def wait(self, timeout_s: float, reading: bool = True) -> None:
        """Wait until the socket has something to read, or takes what is queued, or `waker` ends
        the wait.

        reading: False where nothing is read, so that the peer's silence says nothing.

        Raises LineDown once the peer has been silent for too long, or the thread is wanted for
        something else.
        """
        if self._has_ended():
            raise LineDown("it was made again")
        now_s = time.monotonic()
        if not reading:
            self._heard_at_s = now_s
        silent_s = now_s - self._heard_at_s
        if silent_s >= SILENT_S:
            raise LineDown(f"silent for {SILENT_S:g} s")
        if silent_s >= UNANSWERED_S and num_retries(self._tls) >= NUM_RETRIES:
            raise LineDown(f"no answer for {UNANSWERED_S:g} s")
        wanted = select.POLLIN if reading else 0
        if self._unsent:
            wanted |= select.POLLOUT
        self._poll.register(self._tls, wanted)
        self._poll.poll(1000 * min(timeout_s, SILENT_S - silent_s, _WAKE_EVERY_S))
        self._waker.clear()

    def close(self) -> None:
        self._tls.close()


def num_retries(connection: socket.socket) -> int:
    """Return how often the system has sent its oldest bytes again, or has asked whether it may
    send, since the peer's system last acknowledged anything. Always 0 but on Linux."""
    if not hasattr(socket, "TCP_INFO"):
        return 0
    # struct tcp_info of <linux/tcp.h>, a byte each
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)
    _state, _congestion_state, num_retransmits, num_probes = info
    return num_retransmits + num_probes


class Connections:
    """The connections of one end of a stream, a thread for each. One that is cut is made again,
    until all have been down for too long.

    hello: returns the greeting for connection 0 of `of`; its number is put in here.
    begin: is given (number, of, expected) when a connection has been made.
    carry: moves bytes over a connection until the stream has ended; then it returns.
    cut: is given the number of a connection that has ended.
    fail: is given, once, why the stream cannot go on.
    """

    def __init__(
        self,
        way: Way,
        state: LineState,
        peer: Peer,
        first_within_s: float,
        reconnect_s: float,
        is_bulk: bool,
        num_connections: int,
        hello: Callable[[], Hello],
        begin: Callable[[int, int, int], None],
        carry: Callable[[Connection, int], None],
        cut: Callable[[int], None],
        fail: Callable[[LinkError], None],
    ) -> None:
        self._way = way
        self._state = state
        self._peer = peer
        self._first_within_s = first_within_s
        self._reconnect_s = reconnect_s
        self._is_bulk = is_bulk
        self._hello = hello
        self._begin = begin
        self._carry = carry
        self._cut = cut
        self._fail = fail
        self._stream = hello().stream
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._of = num_connections
        self._is_first = True
        self._up: set[int] = set()
        self._down_since_s = time.monotonic()
        self._linger_until_s: float | None = None
        self._wakers: dict[int, Waker] = {}
        self._threads: list[threading.Thread] = []
        self._start(0)

    def wake(self, number: int | None = None) -> None:
        """Wake the thread of one connection, or of all."""
        wakers: Mapping[int, Waker] = self._wakers
        for waker in [*wakers.values()] if number is None else [wakers[number]]:
            waker.wake()

    def linger(self, for_s: float) -> None:
        """Go on for a while only: what matters has been done, and a cut is no longer one."""
        self._linger_until_s = time.monotonic() + for_s

    def stop(self) -> None:
        """Have all threads end."""
        self._stop.set()
        self.wake()

    def join(self, timeout_s: float) -> bool:
        """Return whether all threads have ended in this time."""
        until_s = time.monotonic() + timeout_s
        for thread in list(self._threads):
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self, number: int) -> None:
        self._wakers[number] = Waker()
        thread = threading.Thread(
            target=self._run, args=(number,), name=f"{self._stream.line} {number}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _run(self, number: int) -> None:
        try:
            self._keep_up(number)
        except FrameError as error:
            self._fail(FrameError(f"{self._state.peer_name}: {error}"))
            self.stop()
        except LinkError as error:
            self._fail(error)
            self.stop()
        except Exception as error:  # a thread that dies in silence loses what is sent
            self._fail(LinkClosed(f"{self._stream} broke: {error!r}"))
            self.stop()
        finally:
            self._wakers[number].close()

    def _keep_up(self, number: int) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stop.is_set():
            wanted = self._hello()._replace(connection=number, of=self._of)
            begun_s = time.monotonic()
            try:
                made = self._way.connect(
                    wanted,
                    is_bulk=self._is_bulk,
                    timeout_s=_LOOK_EVERY_S,
                    wake=self._wakers[number].wake,
                )
            except LineDown as reason:
                if self._note_down(str(reason)):
                    return
                self._stop.wait(max(0.0, begun_s + pause_s - time.monotonic()))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            pause_s = _FIRST_PAUSE_S
            if self._carried(made, number=number, wanted=wanted):
                self._stop.set()
                self.wake()
                return

    def _carried(self, made: Connected, number: int, wanted: Hello) -> bool:
        """Return whether the stream has ended; False after a cut."""
        connection = Connection(
            tls=made.tls,
            waker=self._wakers[number],
            has_ended=lambda: self._stop.is_set() or self._way.has_come_again(wanted),
        )
        reason = ""
        try:
            self._begin(number, made.of, made.expected)
            self._note_up(number, made=made)
            self._carry(connection, number)
            return True
        except LineDown as error:
            reason = str(error)
        except OSError as error:
            reason = in_words(error)
        finally:
            connection.close()
            self._cut(number)
            with self._lock:
                self._up.discard(number)
                if not self._up:
                    self._down_since_s = time.monotonic()
        if self._linger_until_s is None and not self._stop.is_set():
            self._state.num_cuts += 1
            self._note_down(reason)
        return False

    def _note_up(self, number: int, made: Connected) -> None:
        if made.round_trip_s is not None:
            self._state.round_trip_s = made.round_trip_s
        self._peer.hear()
        with self._lock:
            self._up.add(number)
            is_first = self._is_first
            self._is_first = False
        if is_first:
            self._of = made.of
            for further in range(1, made.of):
                self._start(further)
        self._state.came_back(self._stream)

    def _note_down(self, reason: str) -> bool:
        """Return whether nothing more is to be carried. Raises LinkTimeout or LinkClosed once the
        line has been down for too long."""
        with self._lock:
            if self._up:
                return False  # the others carry on
            since_s = self._down_since_s
        now_s = time.monotonic()
        if self._linger_until_s is not None:
            return now_s > self._linger_until_s
        who = self._state.peer_name
        if self._is_first:
            if now_s - since_s > self._first_within_s:
                raise LinkTimeout(
                    f"no line to {who} in {self._first_within_s:g} s "
                    f"(cluster.liveness.join_within_s): {reason}"
                )
            self._state.waits(reason)
            return False
        self._state.went_down(
            self._stream, since_s=since_s, until_s=since_s + self._reconnect_s, reason=reason
        )
        if now_s - since_s > self._reconnect_s:
            raise LinkClosed(
                f"the line to {who} has been down for {self._reconnect_s:g} s "
                f"(cluster.reconnect_s): {reason}"
            )
        self._peer.hear()  # it is waited for
        return False
