"""One TLS connection that one thread drives, and the connections of a stream, which are made again
after every cut."""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from xcloud.base.errors import FrameError, LinkClosed, LinkError
from xcloud.line.hello import Hello, StreamName
from xcloud.line.line_state import Course, LineState
from xcloud.line.pinned_tls import LineDown, in_words
from xcloud.line.ways import Connected, Way
from xcloud.net.link_end import ignore
from xcloud.net.peer import Peer
from xcloud.net.rendezvous import JOIN_WITHIN_S

SPEAK_EVERY_S = 0.5
"""How often an idle stream says something, over its first connection."""
SILENT_S = 3.0
"""How long an answer may take, or the rest of a piece, before a connection counts as cut."""
UNANSWERED_S = 1.0
"""The same, where the system has sent something NUM_RETRIES times more, and in vain."""
NUM_RETRIES = 2
RESTING_EVERY_S = 10.0
"""How often a connection that has nothing to do says something, beside the first of its stream: a
line of 200 ms has ten for each direction of a link, most of which rest most of the time."""
RESTING_SILENT_S = 30.0
RECONNECT_S = 120.0
_SENT = struct.Struct("QQ")  # tcpi_bytes_sent, tcpi_bytes_retrans
_SENT_AT = 200  # in struct tcp_info of <linux/tcp.h>
_LOOK_EVERY_S = 0.5
_WAKE_EVERY_S = 0.25
_LACK_EVERY_S = 1.0
_FIRST_PAUSE_S = 0.05
"""How long after an attempt at a connection the next one begins, at least; each time longer."""
_LONGEST_PAUSE_S = _LOOK_EVERY_S  # so that who listens never looks away


class Waker:
    """Ends another thread's wait on a connection."""

    def __init__(self) -> None:
        # The wait is a poll on a socket of TLS, which no condition or event of Python can end. A
        # second descriptor in the same poll can.
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

    has_ended: returns whether the thread is wanted for something else.
    heard: called whenever bytes have come.
    """

    def __init__(
        self,
        tls: ssl.SSLSocket,
        waker: Waker,
        has_ended: Callable[[], bool],
        heard: Callable[[], object] = ignore,
    ) -> None:
        tls.setblocking(False)
        self._tls = tls
        self._waker = waker
        self._has_ended = has_ended
        self._heard = heard
        self.unsent: deque[memoryview] = deque()
        self._poll = select.poll()
        self._poll.register(waker, select.POLLIN)
        self._heard_at_s = time.monotonic()
        # Two clocks: silence counts from the first unanswered byte, not from the last one, or a
        # sender that keeps writing would never notice a dead line.
        self._asked_at_s = self._heard_at_s  # when something was first said since then
        self.spoke_at_s = self._heard_at_s

    def queue(self, data: bytes | memoryview) -> None:
        self.unsent.append(memoryview(data))

    def write(self) -> bool:
        """Write what is queued, as far as the socket takes it. Return whether it took all.

        Raises OSError where the connection has ended.
        """
        while self.unsent:
            data = self.unsent[0]
            try:
                num_bytes = self._tls.send(data)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return False  # the same bytes must be offered next
            if num_bytes == len(data):
                self.unsent.popleft()
            else:
                self.unsent[0] = data[num_bytes:]
            self.spoke_at_s = time.monotonic()
            if self._asked_at_s <= self._heard_at_s:
                self._asked_at_s = self.spoke_at_s
        return True

    def read_into(self, place: memoryview) -> int:
        """Read what is there. Return how many bytes that was.

        Raises OSError or LineDown where the connection has ended.
        """
        try:
            # A write may be wanted here too: TLS 1.3 answers an update of keys by itself.
            num_bytes = self._tls.recv_into(place)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        if num_bytes == 0:
            raise LineDown("the connection was closed")
        self._heard_at_s = time.monotonic()
        self._heard()
        return num_bytes

    @property
    def silent_s(self) -> float:
        """The seconds since something came."""
        return time.monotonic() - self._heard_at_s

    def unanswered_s(self, is_owed: bool) -> float:
        """Return for how many seconds an answer of the peer has been due; 0 if none is due.

        is_owed: True if an answer is due, even if something was received since the last question.
        """
        if is_owed or self._asked_at_s > self._heard_at_s:
            return time.monotonic() - max(self._asked_at_s, self._heard_at_s)
        return 0.0

    def wait(
        self, timeout_s: float, silent_s: float, limit_s: float | None = None, reading: bool = True
    ) -> None:
        """Wait until the socket has something to read, or takes what is queued, or `waker` ends
        the wait.

        silent_s: seconds since the peer, from which something is due, last sent anything.
        limit_s: seconds that it may be silent; SILENT_S by default.
        reading: False if nothing is read here, so that the peer's silence means nothing.

        Raises LineDown once the peer has been silent for too long, or the thread is wanted for
        something else.
        """
        if self._has_ended():
            raise LineDown("it was made again")
        if limit_s is None:
            limit_s = SILENT_S
        # A full inbox stops reading, and then the peer's silence is our doing. The clock is set
        # forward, so that it does not count as a cut once reading goes on.
        if not reading:
            self._heard_at_s = time.monotonic()
        if silent_s >= limit_s:
            raise LineDown(f"silent for {limit_s:g} s")
        # The system knows sooner than SILENT_S: it has sent the same bytes again in vain. This is
        # how a changed address of the peer is found within two seconds. A slow line alone does not
        # come here, since its acknowledgements of TCP do arrive.
        if silent_s >= UNANSWERED_S and num_retries(self._tls) >= NUM_RETRIES:
            raise LineDown(f"no answer for {UNANSWERED_S:g} s")
        wanted = select.POLLIN if reading else 0
        if self.unsent:
            wanted |= select.POLLOUT
        # Registered anew each time, as what is wanted of the socket changes. The wait is cut into
        # quarters of a second, since `has_ended` may change without a call of `wake`.
        self._poll.register(self._tls, wanted)
        self._poll.poll(1000 * min(timeout_s, limit_s - silent_s, _WAKE_EVERY_S))
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


def num_sent(connection: socket.socket) -> int | None:
    """Return how many bytes the system has sent over a connection, each once; None but on Linux
    (4.19), which says so."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    # tcpi_bytes_sent counts what was sent again too. An older kernel returns a shorter struct.
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SENT_AT + _SENT.size)
    if len(info) < _SENT_AT + _SENT.size:
        return None
    sent_bytes, sent_again_bytes = _SENT.unpack_from(info, _SENT_AT)
    return int(sent_bytes - sent_again_bytes)


class StreamEnd(Protocol):
    """An end of a stream, as the threads of its connections call it."""

    def hello(self) -> Hello:
        """Return the greeting for connection 0; its number is put in by the caller."""

    def begin(self, number: int, of: int, expected: int) -> None:
        """Take up a connection that was made, one of `of` connections.

        expected: number of the first frame that the receiver has not got in full, from the peer's
            greeting.
        """

    def carry(self, connection: Connection, number: int) -> None:
        """Move bytes over a connection until the stream has ended; then return."""

    def cut(self, number: int, sent_bytes: int | None) -> None:
        """Let go of a connection that has ended.

        sent_bytes: number of bytes that the system has sent over it; None if that is not known.
        """

    def fail(self, reason: LinkError) -> None:
        """Take, once, why the stream cannot go on."""


@dataclass(frozen=True)
class Stream:
    """A stream as both its ends see it.

    run, attempt: the same values as in a greeting (Hello).
    state: the state of the line to the peer. Other links to this peer share it.
    first_within_s: seconds to wait for the peer's first connection.
    reconnect_s: seconds that the line may be down later.
    num_connections: number of connections. 0: chosen from the round-trip time.
    on_lost: called in a thread of either end when the stream has ended although neither end
        closed it.
    """

    name: StreamName
    run: bytes
    attempt: int
    way: Way
    state: LineState
    first_within_s: float = JOIN_WITHIN_S
    reconnect_s: float = RECONNECT_S
    num_connections: int = 0
    on_lost: Callable[[LinkError], object] = ignore

    def hello(self, expected: int = 0) -> Hello:
        return Hello(
            self.name,
            self.run,
            attempt=self.attempt,
            connection=0,
            of=self.num_connections,
            expected=expected,
        )


class Connections:
    """The connections of one end of a stream, a thread for each. One that is cut is made again,
    until no data have passed for too long. `start` begins.

    How many there are is up to the rank that dials: it fixes the number with the first answer that
    it reads. The rank that listens follows it until something was carried.
    """

    def __init__(self, end: StreamEnd, stream: Stream, peer: Peer, is_bulk: bool) -> None:
        self._end = end
        self._way = stream.way
        self._state = stream.state
        self._name = stream.name
        self._is_bulk = is_bulk
        self.course = Course(
            stream.name,
            state=stream.state,
            peer=peer,
            first_within_s=stream.first_within_s,
            reconnect_s=stream.reconnect_s,
        )
        self._stop = threading.Event()
        self.of = stream.num_connections
        self._lock = threading.Lock()
        self._wakers: dict[int, Waker] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._lacks_since_s: float | None = None
        self._heard_at_s = time.monotonic()

    @property
    def silent_s(self) -> float:
        """The seconds since something came over any connection."""
        return time.monotonic() - self._heard_at_s

    def wake(self, number: int | None = None) -> None:
        """Wake the thread of one connection, or of all."""
        with self._lock:
            wakers = [*self._wakers.values()] if number is None else [self._wakers.get(number)]
        for waker in wakers:
            if waker is not None:
                waker.wake()

    def stop(self) -> None:
        """Have all threads end."""
        self._stop.set()
        self.wake()

    def join(self, timeout_s: float) -> bool:
        """Return whether all threads have ended in this time."""
        until_s = time.monotonic() + timeout_s
        threads = [*self._threads.values()]
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    @property
    def _num(self) -> int:
        """How many connections there should be, as far as that is known."""
        return max(1, self.of)

    def start(self, number: int = 0) -> None:
        """Start a thread for one connection. The others follow once the first is made, as the rank
        that dials chooses their number then.

        Raises OSError or RuntimeError where the system has no room for another one.
        """
        waker = Waker()
        thread = threading.Thread(
            target=self._run, args=(number, waker), name=f"{self._name.line} {number}", daemon=True
        )
        with self._lock:
            # Entered before the thread begins, since it takes itself out again when it ends.
            self._wakers[number] = waker
            self._threads[number] = thread
        try:
            thread.start()
        except RuntimeError:
            self._let_go(number, waker)
            raise

    def _start_missing(self) -> None:
        """Start the connections that are not there yet."""
        for number in range(self._num):
            with self._lock:
                if number in self._threads or self._stop.is_set():
                    continue
            try:
                self.start(number)
            # A stream works with fewer connections, only slower. So this is said, and tried again
            # about once a second by a connection that is there (`has_ended` in `_carried`).
            except (OSError, RuntimeError) as error:  # no descriptor or thread is left
                self._lacks_since_s = time.monotonic()
                self._state.lacks(
                    f"{len(self._threads)} of {self._num} of {self._name.line!r} are there "
                    f"({getattr(error, 'strerror', None) or error})"
                )
                return
        self._lacks_since_s = None

    def _let_go(self, number: int, waker: Waker) -> None:
        with self._lock:
            # A connection of this number may have been started again meanwhile; that one stays.
            if self._wakers.get(number) is waker:
                del self._wakers[number]
                if not self._stop.is_set():  # else `join` asks for it
                    del self._threads[number]
        waker.close()

    def _run(self, number: int, waker: Waker) -> None:
        try:
            self._keep_up(number, waker)
        except FrameError as error:
            self._end.fail(FrameError(f"{self._state.peer_name}: {error}"))
            self.stop()
        except LinkError as error:
            self._end.fail(error)
            self.stop()
        except Exception as error:  # a thread that dies in silence loses what is sent
            self._end.fail(LinkClosed(f"{self._name} broke: {error!r}"))
            self.stop()
        finally:
            # A listener must not hand a connection to a thread that is gone.
            self._way.leave(self._hello(number))
            self._let_go(number, waker)

    def _hello(self, number: int) -> Hello:
        return self._end.hello()._replace(connection=number, of=self.of)

    def _keep_up(self, number: int, waker: Waker) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stop.is_set() and number < self._num:
            wanted = self._hello(number)
            # Counted from the beginning of an attempt: one that took long is followed at once by
            # the next, one that failed at once (nobody listens) waits.
            begun_s = time.monotonic()
            try:
                made = self._way.connect(
                    wanted,
                    is_bulk=self._is_bulk,
                    is_fixed=self.course.has_carried,
                    timeout_s=_LOOK_EVERY_S,
                    wake=waker.wake,
                )
            except LineDown as reason:
                if self.course.failed(str(reason)):
                    return
                has_carried = False
            else:
                reason_of_end = self._carried(made, number=number, wanted=wanted, waker=waker)
                if reason_of_end is None:
                    # The stream has ended as agreed, so its other connections end, too.
                    return self.stop()
                # A connection that carried nothing counts as a failed attempt, however well it
                # greeted: behind too small an MTU greetings pass and data never do, which was
                # dialled for ever.
                has_carried = self._stop.is_set() or self.course.ended(number, reason_of_end)
            if has_carried:
                pause_s = _FIRST_PAUSE_S
                continue
            self._stop.wait(max(0.0, begun_s + pause_s - time.monotonic()))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _carried(self, made: Connected, number: int, wanted: Hello, waker: Waker) -> str | None:
        """Use a connection until it ends. Return why, or None once the stream has ended."""

        def has_ended() -> bool:
            # Asked about four times a second by the thread that waits on this connection, so the
            # missing ones need no thread of their own to be tried again.
            since_s = self._lacks_since_s
            if since_s is not None and time.monotonic() - since_s > _LACK_EVERY_S:
                self._start_missing()
            has_come_again = self._way.has_come_again(wanted)
            return self._stop.is_set() or has_come_again or number >= self._num

        def heard() -> None:
            self._heard_at_s = time.monotonic()

        connection = Connection(made.tls, waker=waker, has_ended=has_ended, heard=heard)
        try:
            if made.round_trip_s is not None:
                self._state.round_trip_s = made.round_trip_s
            # The rank that dials chose the number from the round trip, and may choose another one
            # as long as nothing was carried.
            if not self.course.has_carried:
                self.of = made.of
            heard()
            self._end.begin(number, made.of, made.expected)
            self.course.met()
            self._start_missing()
            self._end.carry(connection, number)
            return None
        except LineDown as error:
            return str(error)
        except OSError as error:
            return in_words(error)
        finally:
            # Asked before the socket closes. The outbox tells by it which bytes never left here.
            sent_bytes = num_sent(made.tls)
            connection.close()
            self._end.cut(number, sent_bytes)
