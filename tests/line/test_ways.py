"""Both sides of a greeting: what each says, and that no connection stays open without a use."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from xcloud.base.errors import FrameError, LinkClosed
from xcloud.line import ways
from xcloud.line.hello import (
    Hello,
    HelloRefusal,
    StreamName,
    decode_hello,
    encode_hello,
    encode_refusal,
)
from xcloud.line.pinned_tls import LineDown
from xcloud.line.ways import Connected, Dialler, KnownAttempts, Listener

RUN = bytes(range(16))
NAME = StreamName("forward 0", "cloud_a", sender=0, receiver_cloud="cloud_b", receiver=1)
WANTED = Hello(NAME, RUN, attempt=3, connection=0, of=0)
ANSWER = Hello(NAME, RUN, attempt=9, connection=0, of=1, expected=4, known=3)


class Greeted:
    """A connection over which one greeting comes. fails: it ends when something is said."""

    def __init__(self, comes: bytes = b"", fails: bool = False) -> None:
        self.comes = comes
        self.fails = fails
        self.said = b""
        self.is_closed = False

    def settimeout(self, timeout_s: float) -> None:
        assert 0 < timeout_s <= 5.0

    def sendall(self, data: bytes) -> None:
        if self.fails:
            raise ConnectionResetError
        self.said += data

    def recv(self, num_bytes: int) -> bytes:
        found, self.comes = self.comes[:num_bytes], self.comes[num_bytes:]
        return found

    def close(self) -> None:
        self.is_closed = True

    @property
    def greeting(self) -> Hello | HelloRefusal:
        return decode_hello(self.said[1:], sender="here")


def dialled(
    greeted: Greeted,
    monkeypatch: pytest.MonkeyPatch,
    attempts: KnownAttempts,
    is_bulk: bool = False,
    wanted: Hello = WANTED,
) -> Connected:
    """Dial cloud_a, which is 100 ms away."""
    tuned: list[tuple[object, bool]] = []
    now_s = iter([100.0, 100.1, *[100.2] * 99])
    monkeypatch.setattr(ways, "tune", lambda plain, is_bulk: tuned.append((plain, is_bulk)))
    monkeypatch.setattr(ways, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    tls: Any = SimpleNamespace(dial=lambda plain, cloud: greeted)
    dialler = Dialler(("h", 1), "cloud_a", tls, attempts=attempts)
    monkeypatch.setattr(dialler, "_dialled", lambda: "plain")
    try:
        return dialler.connect(wanted, is_bulk=is_bulk, timeout_s=1.0, wake=lambda: None)
    finally:
        assert tuned == [("plain", is_bulk)]


def test_who_dials_says_how_many_connections_and_which_attempt_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts = KnownAttempts()
    for is_bulk, of, known in ((False, 1, 0), (True, 5, 9)):
        greeted = Greeted(encode_hello(ANSWER._replace(of=of)))
        made = dialled(greeted, monkeypatch, attempts, is_bulk=is_bulk)
        assert (made.tls, made.of, made.expected) == (greeted, of, 4)
        assert made.round_trip_s == pytest.approx(0.1)
        assert greeted.greeting == WANTED._replace(of=of, known=known)
        assert not greeted.is_closed and attempts.known["cloud_a"] == 9
    greeted = Greeted(encode_hello(ANSWER._replace(of=3)))
    fixed = WANTED._replace(of=3)
    assert dialled(greeted, monkeypatch, attempts, is_bulk=True, wanted=fixed).of == 3


OTHER = NAME._replace(line="backward 0")


@pytest.mark.parametrize(
    ("comes", "error", "said"),
    [
        (b"", LineDown, "cloud_a: the connection was closed"),
        (encode_refusal(HelloRefusal.NOT_YET), LineDown, "cloud_a: it is not ready for this"),
        (encode_refusal(HelloRefusal.OTHER_RUN), LineDown, "cloud_a: it runs another experiment"),
        (encode_refusal(HelloRefusal.EARLIER_ATTEMPT), LinkClosed, "cloud_a refuses this rank"),
        (b"\x05XCLX?", FrameError, "cloud_a sent no greeting"),
        (encode_hello(ANSWER._replace(stream=OTHER)), FrameError, "answers line 'forward 0'"),
        (encode_hello(ANSWER._replace(run=bytes(16))), FrameError, "cloud_a answers"),
        (encode_hello(ANSWER._replace(connection=0, of=2)), FrameError, "cloud_a answers"),
        (encode_hello(ANSWER._replace(connection=1, of=2)), FrameError, "cloud_a answers"),
        (encode_hello(ANSWER._replace(known=2)), FrameError, "cloud_a answers"),
        (encode_hello(ANSWER._replace(attempt=8)), LinkClosed, "cloud_a has begun the run again"),
    ],
)
def test_an_answer_that_leads_nowhere_is_named_and_its_connection_closed(
    comes: bytes, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = KnownAttempts()
    attempts.note("cloud_a", 9)
    greeted = Greeted(comes)
    with pytest.raises(error, match=said):
        dialled(greeted, monkeypatch, attempts)
    assert greeted.is_closed
    assert ("cloud_a" in attempts.began_again) is (error is LinkClosed)


class Waiting:
    """A rank of cloud_b that listens, behind a door that the test opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused: list[str] = []
        self.greeted = Greeted()
        self.num_woken = 0
        self.is_open = True
        self.door: Any = SimpleNamespace(trouble=None, close=self._close)
        self.known: Callable[[str], bool] = bool
        monkeypatch.setattr(ways, "Door", self._door)
        monkeypatch.setattr(ways, "tune", lambda tls, is_bulk: None)
        accepting: Any = SimpleNamespace(
            label="label", accept=lambda plain: (self.greeted, "cloud_a")
        )
        self.listener = Listener(
            ("127.0.0.1", 0), accepting, "cloud_b", 1, RUN, 3, on_refused=self.refused.append
        )

    def _door(
        self,
        listening: socket.socket,
        label: str,
        greet: Callable[[Any, str], object],
        on_refused: object,
        is_known: Callable[[str], bool],
    ) -> Any:
        listening.close()
        assert label == "label"
        self._greet = greet
        self.known = is_known
        return self.door

    def _close(self) -> None:
        self.is_open = False

    def wake(self) -> None:
        self.num_woken += 1

    def comes(self, greeting: Hello, fails: bool = False) -> Greeted:
        """Let somebody dial from h with this greeting."""
        self.greeted = Greeted(encode_hello(greeting), fails=fails)
        self._greet("plain", "h")
        return self.greeted

    def connect(self, wanted: Hello = WANTED, is_fixed: bool = False) -> Connected:
        return self.listener.connect(
            wanted, is_bulk=False, timeout_s=0.0, wake=self.wake, is_fixed=is_fixed
        )


GREETING = Hello(NAME, RUN, attempt=5, connection=0, of=2, expected=6, known=3)


def test_who_listens_answers_the_last_greeting_that_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Waiting(monkeypatch)
    with pytest.raises(LineDown, match=r"^cloud_a has not dialled$"):
        here.connect()
    here.door.trouble = "the relay is gone"
    with pytest.raises(LineDown, match="cloud_a has not dialled; the relay is gone"):
        here.connect()
    earlier = here.comes(GREETING._replace(known=0))
    assert here.listener.has_come_again(WANTED) and here.num_woken == 1
    last = here.comes(GREETING)
    assert earlier.is_closed and not last.is_closed and here.num_woken == 2
    made = here.connect()
    assert (made.tls, made.of, made.expected, made.round_trip_s) == (last, 2, 6, None)
    assert last.greeting == WANTED._replace(of=2, known=5)
    assert not here.listener.has_come_again(WANTED)
    assert here.known("h") and not here.known("i") and here.refused == []


def test_a_greeting_that_cannot_be_answered_leaves_no_connection_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Waiting(monkeypatch)
    with pytest.raises(LineDown):
        here.connect()
    gone = here.comes(GREETING, fails=True)
    with pytest.raises(LineDown, match="cloud_a: the connection was closed"):
        here.connect()
    other = here.comes(GREETING)
    with pytest.raises(FrameError, match="cloud_a wants 2 connections for line 'forward 0'"):
        here.connect(WANTED._replace(of=1), is_fixed=True)
    assert gone.is_closed and other.is_closed
    fits = here.comes(GREETING)
    assert here.connect(WANTED._replace(of=2), is_fixed=True).tls is fits
    left = here.comes(GREETING)
    here.listener.leave(WANTED)
    assert left.is_closed
    unawaited = here.comes(GREETING)
    assert unawaited.is_closed and unawaited.greeting is HelloRefusal.NOT_YET
    with pytest.raises(LineDown):
        here.connect()
    waits = here.comes(GREETING)
    here.listener.close()
    assert waits.is_closed and not here.is_open
    late = here.comes(GREETING)
    assert late.is_closed and here.refused[-1].endswith("rank 1, which has ended")


@pytest.mark.parametrize(
    ("greeting", "refusal", "said"),
    [
        (GREETING._replace(run=bytes(16)), HelloRefusal.OTHER_RUN, "other_run"),
        (GREETING._replace(known=2), HelloRefusal.EARLIER_ATTEMPT, "earlier_attempt"),
        (GREETING._replace(attempt=6), HelloRefusal.NOT_YET, "not_yet"),
        (GREETING._replace(connection=1), HelloRefusal.NOT_YET, "not_yet"),
        (GREETING._replace(stream=NAME._replace(receiver=2)), None, "has dialled rank 1 of"),
        (GREETING._replace(stream=NAME._replace(sender_cloud="c")), None, "has dialled rank 1 of"),
    ],
)
def test_a_greeting_that_is_not_waited_for_is_refused_by_its_reason_and_closed(
    greeting: Hello, refusal: HelloRefusal | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Waiting(monkeypatch)
    with pytest.raises(LineDown):
        here.connect()
    here.comes(GREETING)
    here.connect()
    found = here.comes(greeting)
    assert found.is_closed and said in here.refused[-1] and here.refused[-1].startswith("h: cloud")
    assert (found.greeting if refusal else found.said) == (refusal or b"")
    is_earlier = refusal is HelloRefusal.EARLIER_ATTEMPT
    assert here.listener.told == ({"cloud_a"} if is_earlier else set())
    if said == "not_yet" and greeting.attempt == 6:
        with pytest.raises(LinkClosed, match="cloud_a has begun the run again"):
            here.connect()
