"""One connection of a line as its thread sees it: what is written, when silence counts, how long
a wait is. Sockets, clock and poll are stand-ins."""

from __future__ import annotations

import select
import ssl
import struct
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from xcloud.base.errors import LinkClosed
from xcloud.line import connection as connections
from xcloud.line import ways
from xcloud.line.connection import Connection, Connections, Stream, num_retries, num_sent
from xcloud.line.hello import StreamName
from xcloud.line.line_state import LineState
from xcloud.line.pinned_tls import LineDown
from xcloud.line.ways import KnownAttempts, num_connections, stream_bytes, tune
from xcloud.net.peer import Peer


class Tls:
    """A socket of TLS. takes: how many bytes each call of `send` takes, or the error it raises."""

    def __init__(self) -> None:
        self.takes: list[int | Exception] = []
        self.comes: list[bytes | Exception] = []
        self.sent: list[bytes] = []
        self.info = bytes(4)

    def setblocking(self, blocks: bool) -> None:
        assert not blocks

    def send(self, data: memoryview) -> int:
        found = self.takes.pop(0) if self.takes else len(data)
        if isinstance(found, Exception):
            raise found
        self.sent.append(bytes(data[:found]))
        return found

    def recv_into(self, place: memoryview) -> int:
        found = self.comes.pop(0)
        if isinstance(found, Exception):
            raise found
        place[: len(found)] = found
        return len(found)

    def getsockopt(self, level: int, option: int, length: int) -> bytes:
        return self.info[:length]


class Watched:
    """A connection whose clock stands at now_s, and what it polls for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.tls = Tls()
        self.waits: list[tuple[int, float]] = []  # events, milliseconds
        self.is_wanted = False
        self.num_heard = 0
        self.waker = Mock()
        poll = SimpleNamespace(register=self._register, poll=self._poll)
        faked = SimpleNamespace(poll=lambda: poll, POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)
        monkeypatch.setattr(connections, "select", faked)
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(connections, "time", clock)
        self.connection = Connection(
            self.tls,  # type: ignore[arg-type]
            waker=self.waker,
            has_ended=lambda: self.is_wanted,
            heard=self._note_heard,
        )

    def _note_heard(self) -> None:
        self.num_heard += 1

    def _register(self, thing: object, events: int) -> None:
        if thing is self.tls:
            self._events = events
        else:
            assert thing is self.waker and events == select.POLLIN

    def _poll(self, milliseconds: float) -> None:
        self.waits.append((self._events, pytest.approx(milliseconds)))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_what_the_socket_does_not_take_is_offered_again_from_there(watched: Watched) -> None:
    connection = watched.connection
    connection.queue(b"abcdef")
    connection.queue(b"ghi")
    watched.tls.takes = [4, ssl.SSLWantWriteError()]
    watched.now_s = 101.0
    assert not connection.write() and connection.unsent
    assert connection.spoke_at_s == 101.0
    watched.tls.takes = [ssl.SSLWantReadError()]
    watched.now_s = 102.0
    assert not connection.write() and connection.spoke_at_s == 101.0  # nothing went
    assert connection.write() and not connection.unsent
    assert watched.tls.sent == [b"abcd", b"ef", b"ghi"]
    assert connection.write()


def test_an_answer_is_due_from_the_first_question_since_the_last_answer(watched: Watched) -> None:
    connection = watched.connection
    watched.now_s = 103.0
    assert connection.silent_s == 3.0
    assert connection.unanswered_s(is_owed=False) == 0.0  # nothing was asked
    assert connection.unanswered_s(is_owed=True) == 3.0
    for _ in range(2):
        connection.queue(b"?")
        connection.write()
        watched.now_s += 1.0
    assert connection.unanswered_s(is_owed=False) == 2.0  # since the first of them
    watched.tls.comes = [b"yes"]
    place = bytearray(9)
    assert connection.read_into(memoryview(place)) == 3 and place[:3] == b"yes"
    assert watched.num_heard == 1
    watched.now_s += 1.0
    assert connection.silent_s == 1.0 and connection.unanswered_s(is_owed=False) == 0.0
    assert connection.unanswered_s(is_owed=True) == 1.0
    connection.queue(b"?")
    connection.write()
    watched.now_s += 0.5
    assert connection.unanswered_s(is_owed=False) == 0.5


def test_nothing_to_read_is_no_news_and_the_end_is_a_cut(watched: Watched) -> None:
    watched.tls.comes = [ssl.SSLWantReadError(), ssl.SSLWantWriteError(), b""]
    watched.now_s = 104.0
    place = memoryview(bytearray(9))
    assert [watched.connection.read_into(place) for _ in range(2)] == [0, 0]
    assert watched.connection.silent_s == 4.0 and watched.num_heard == 0
    with pytest.raises(LineDown, match="the connection was closed"):
        watched.connection.read_into(place)


def test_a_wait_ends_with_the_time_the_peer_s_time_or_a_look_around(watched: Watched) -> None:
    connection = watched.connection
    connection.wait(0.1, silent_s=0.0)
    connection.wait(9.0, silent_s=2.9)
    connection.wait(9.0, silent_s=0.0)
    connection.wait(9.0, silent_s=9.9, limit_s=10.0)
    connection.queue(b"x")
    connection.wait(9.0, silent_s=0.0)
    watched.now_s = 150.0
    connection.wait(9.0, silent_s=0.0, reading=False)
    both = select.POLLIN | select.POLLOUT
    assert watched.waits == [
        (select.POLLIN, 100.0),
        (select.POLLIN, 100.0),
        (select.POLLIN, 250.0),
        (select.POLLIN, 100.0),
        (both, 250.0),
        (select.POLLOUT, 250.0),
    ]
    assert watched.waker.clear.call_count == 6
    assert connection.silent_s == 0.0  # who does not read hears nobody


@pytest.mark.parametrize(
    ("silent_s", "info", "limit_s", "said"),
    [
        (2.99, (1, 0, 1, 0), None, None),
        (3.0, (1, 0, 0, 0), None, "silent for 3 s"),
        (3.0, (1, 0, 0, 0), 30.0, None),
        (30.0, (1, 0, 0, 0), 30.0, "silent for 30 s"),
        (0.99, (1, 0, 2, 0), None, None),
        (1.0, (1, 0, 2, 0), None, "no answer for 1 s"),
        (1.0, (1, 0, 0, 2), 30.0, "no answer for 1 s"),
        (1.0, (1, 0, 1, 1), None, "no answer for 1 s"),
        (1.0, (9, 9, 1, 0), None, None),
    ],
)
def test_silence_ends_a_connection_sooner_where_the_system_tries_in_vain(
    silent_s: float,
    info: Sequence[int],
    limit_s: float | None,
    said: str | None,
    watched: Watched,
) -> None:
    watched.tls.info = bytes(info)
    if said is None:
        return watched.connection.wait(9.0, silent_s=silent_s, limit_s=limit_s)
    with pytest.raises(LineDown, match=said):
        watched.connection.wait(9.0, silent_s=silent_s, limit_s=limit_s)


def test_a_thread_that_is_wanted_elsewhere_waits_no_longer(watched: Watched) -> None:
    watched.is_wanted = True
    with pytest.raises(LineDown, match="it was made again"):
        watched.connection.wait(9.0, silent_s=0.0)


def test_what_the_system_says_of_a_connection_is_read_where_linux_writes_it() -> None:
    socket: Any = Tls()
    socket.info = bytes([1, 2, 3, 4]) + bytes(196) + struct.pack("QQ", 1000, 300)
    assert num_retries(socket) == 7
    assert num_sent(socket) == 700
    socket.info = socket.info[:-1]  # an older kernel knows less
    assert num_sent(socket) is None


def test_connections_are_as_many_as_a_fast_line_takes() -> None:
    """125 MB/s, 3 MB of each in a round trip: one per 24 ms, and ten at most."""
    assert [num_connections(s) for s in (0.024, 0.025, 0.048, 0.049, 0.24, 0.241)] == [
        1, 2, 2, 3, 10, 10,
    ]  # fmt: skip
    assert stream_bytes(1 << 22) == 3e6 and stream_bytes(1 << 21) == 1.5e6


@pytest.mark.parametrize("is_bulk", [True, False])
def test_only_a_stream_that_may_fill_the_line_changes_how_the_system_sends(
    is_bulk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("IPPROTO_TCP", "TCP_NODELAY", "TCP_NOTSENT_LOWAT", "TCP_CONGESTION")
    faked = SimpleNamespace(**{name: name for name in names})
    monkeypatch.setattr(ways, "socket", faked)
    options: dict[str, object] = {}

    def set_option(level: str, name: str, value: object) -> None:
        assert level == "IPPROTO_TCP"
        options[name] = value
        if name == "TCP_CONGESTION":
            raise OSError("no BBR")

    tune(SimpleNamespace(setsockopt=set_option), is_bulk=is_bulk)  # type: ignore[arg-type]
    assert options.pop("TCP_CONGESTION", None) == (b"bbr" if is_bulk else None)
    assert options == {"TCP_NODELAY": 1, "TCP_NOTSENT_LOWAT": 1 << 19}


def test_attempts_that_fail_come_at_longer_intervals_until_one_has_carried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: 100.0))
    outcomes = ["fails"] * 6 + ["is empty", "carries", "fails"]
    end = SimpleNamespace(hello=lambda: stream.hello())
    way = SimpleNamespace(leave=lambda wanted: None)
    name = StreamName("forward 0", "a", sender=0, receiver_cloud="b", receiver=1)
    stream = Stream(name, bytes(16), 1, way, LineState("b"), num_connections=3)  # type: ignore[arg-type]
    made = Connections(end, stream, Peer(), is_bulk=False)  # type: ignore[arg-type]
    asked: list[tuple[int, bool]] = []

    def connect(wanted: Any, is_bulk: bool, is_fixed: bool, **named: object) -> str:
        assert (wanted.connection, wanted.of) == (2, 3)
        asked.append((len(waits), is_fixed))
        outcome = outcomes.pop(0)
        if outcome == "fails":
            raise LineDown("nobody dials")
        return outcome

    def carried(outcome: str, number: int, **named: object) -> str:
        made.course.met()
        if outcome == "carries":
            made.course.carries(number)
        return "cut"

    way.connect = connect
    waits: list[float] = []
    monkeypatch.setattr(made, "_carried", carried)
    stops = SimpleNamespace(is_set=lambda: not outcomes, wait=waits.append)
    monkeypatch.setattr(made, "_stop", stops)
    made._keep_up(2, Mock())
    assert waits == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.5, 0.5, 0.5, 0.05])
    assert asked == [*((n, False) for n in range(8)), (7, True)]


def test_a_cloud_that_greets_by_another_attempt_has_begun_again() -> None:
    attempts = KnownAttempts()
    assert not attempts.known and not attempts.began_again
    attempts.note("b", 5)
    attempts.note("b", 5)
    attempts.note("c", 6)
    with pytest.raises(LinkClosed, match="b has begun the run again"):
        attempts.note("b", 6)
    assert attempts.known == {"b": 5, "c": 6}  # the new one is nobody's here
    attempts.check("c")
    attempts.began_again.add("c")
    for cloud in ("b", "c"):
        with pytest.raises(LinkClosed, match=f"{cloud} has begun the run again"):
            attempts.check(cloud)


def test_threads_are_waited_for_as_long_as_was_said() -> None:
    over = threading.Event()
    made = object.__new__(Connections)
    made._threads = {0: threading.Thread(target=over.wait), 1: threading.Thread()}
    for thread in made._threads.values():
        thread.start()
    assert made.join(0.01) is False
    over.set()
    assert made.join(20.0) is True
