"""The door of a rank that listens, without its thread: who is let in, and who gives way."""

from __future__ import annotations

import socket
import struct
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from xcloud.line import door


class Dialled:
    """What a door sees of a connection. start: what has come, or why nothing can."""

    def __init__(self, number: int, start: bytes | OSError = b"") -> None:
        self.number = number
        self.start = start
        self.marks: list[int] = []
        self.is_closed = False

    def fileno(self) -> int:
        return self.number

    def setblocking(self, blocks: bool) -> None:
        assert not blocks

    def recv(self, num_bytes: int, how: int) -> bytes:
        assert how == socket.MSG_PEEK
        if isinstance(self.start, OSError):
            raise self.start
        return self.start[:num_bytes]

    def setsockopt(self, level: int, name: int, value: int) -> None:
        assert (level, name) == (socket.SOL_SOCKET, socket.SO_RCVLOWAT)
        self.marks.append(value)

    def dup(self) -> Dialled:
        if isinstance(self.start, OSError):
            raise self.start
        return Dialled(-self.number)

    def shutdown(self, how: int) -> None:
        self.marks.append(how)

    def close(self) -> None:
        self.is_closed = True


class NoThread:
    def __init__(self, target: Any, args: Any, name: str, daemon: bool) -> None:
        assert daemon and name == f"greet {args[1]}"
        self.args = args

    def start(self) -> None:
        if self.args[1] == "full":
            raise RuntimeError("can't start new thread")


@pytest.fixture
def shut(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A door without its thread."""
    shut: Any = object.__new__(door.Door)
    shut.refused, shut.polled, shut.coming = [], [], []
    shut.waiting, shut.handshakes, shut._lock = {}, [], threading.Lock()
    shut._label, shut._is_closed, shut._is_known = b"name", False, lambda host: host == "peer"
    shut._on_refused, shut._greet = shut.refused.append, lambda plain, host: None
    shut._poll = SimpleNamespace(
        register=lambda one, what: shut.polled.append(one),
        unregister=lambda one: shut.polled.remove(one),
    )

    def accept() -> tuple[Dialled, tuple[str, int]]:
        one = shut.coming.pop(0)
        if isinstance(one, OSError):
            raise one
        return one, (f"host {one.number}", 1)

    shut._listening = SimpleNamespace(accept=accept)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=shut.refused.append)
    monkeypatch.setattr(door, "time", clock)
    threads = SimpleNamespace(Thread=NoThread, current_thread=threading.current_thread)
    monkeypatch.setattr(door, "threading", threads)
    return shut


def test_a_door_takes_whoever_comes_and_the_oldest_silent_one_gives_way(
    shut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MAX_WAITING", 2)
    shut.coming += [BlockingIOError(), OSError(24, "Too many open files")]
    shut._accept()
    assert not shut.refused and not shut.waiting
    shut._accept()
    said, pause_s = shut.refused
    assert said.startswith("the system refuses connections: ") and "open files" in said
    assert pause_s == 0.1
    shut._is_closed = True
    shut.coming.append(OSError(9, "closed"))
    shut._accept()
    assert len(shut.refused) == 2, "a door that closes says nothing"
    shut.coming += [Dialled(number) for number in (5, 6, 7, 8)]
    for _ in range(2):
        shut._accept()
    shut.waiting[5].is_ready = True
    shut._poll.unregister(shut.waiting[5].plain)
    shut._accept()
    assert [*shut.waiting] == [5, 7] and shut.refused[2:] == [f"host 6: {door.CROWDED}"]
    shut.waiting[7].is_ready = True
    shut._poll.unregister(shut.waiting[7].plain)
    shut._accept()
    assert [*shut.waiting] == [7, 8], "of those who are ready the oldest"


def hello_record(num_bytes: int, kind: int = 22, version: int = 0x0301) -> bytes:
    return struct.pack(">BHH", kind, version, num_bytes) + b"\1" * num_bytes


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (BlockingIOError(), None),
        (ConnectionResetError(104, "reset by peer"), "the connection was closed"),
        (b"", "the connection was closed"),
        (hello_record(4, kind=23), "what came is no TLS"),
        (hello_record(4, version=0x0200), "what came is no TLS"),
        (struct.pack(">BHH", 22, 0x0303, (1 << 14) + 1), "what came is no TLS"),
        (hello_record(4), "it asks for another name than this rank's"),
    ],
)
def test_a_door_looks_at_how_a_connection_begins_and_says_what_is_wrong(
    start: bytes | OSError, said: str | None, shut: Any
) -> None:
    shut.coming.append(Dialled(5, start))
    shut._accept()
    (caller,) = shut.waiting.values()
    shut._look(caller)
    assert shut.refused == ([] if said is None else [f"host 5: {said}"])
    assert caller.plain.is_closed is (said is not None) and len(shut.waiting) == (said is None)


def test_a_door_waits_for_a_whole_record_and_hands_over_who_says_the_name(
    shut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = hello_record(1 << 14)
    monkeypatch.setattr(door, "name_in", lambda hello: b"name" if hello == whole[5:] else None)
    shut.coming.append(Dialled(5, whole[:3]))
    shut._accept()
    (caller,) = shut.waiting.values()
    for num_bytes in (3, 5, len(whole) - 1):
        caller.plain.start = whole[:num_bytes]
        shut._look(caller)
    assert caller.plain.marks == [5, len(whole), len(whole)] and not caller.is_ready
    caller.plain.start = whole + b"more"
    shut._look(caller)
    assert caller.is_ready and shut.polled == [] and not shut.refused
    shut._let_in()
    (handshake,) = shut.handshakes
    assert caller.plain.marks[-1] == 1 and handshake.twin.number == -5 and not shut.waiting
    assert not handshake.is_known
    shut._handed(caller.plain, "host 5", handshake)
    assert handshake.twin.is_closed and shut.handshakes == []


def test_a_door_that_lacks_descriptors_threads_or_places_says_so_and_goes_on(
    shut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def comes(number: int, host: str, start: bytes | OSError = b"") -> Any:
        caller = door._Caller(Dialled(number, start), host, is_ready=True)  # type: ignore[arg-type]
        shut.waiting[number] = caller
        return caller.plain

    none_left = comes(5, "far", OSError(24, "Too many open files"))
    full = comes(6, "full")
    peer = comes(7, "peer")
    shut._let_in()
    assert none_left.is_closed and full.is_closed and not peer.is_closed
    first, second = shut.refused
    assert first.startswith("far: ") and second == "full: can't start new thread"
    (kept,) = shut.handshakes
    assert kept.is_known and kept.twin.number == -7

    monkeypatch.setattr(door, "MAX_HANDSHAKES", 2)
    now_s = [kept.since_s]
    monkeypatch.setattr(door.time, "monotonic", lambda: now_s[0])
    comes(8, "stranger")
    shut._let_in()
    comes(9, "late")
    shut._let_in()
    assert [one.twin.marks for one in shut.handshakes] == [[], []], "both are fresh"
    now_s[0] += 1.5
    shut._let_in()
    assert [one.twin.marks for one in shut.handshakes] == [[], [socket.SHUT_RDWR]]
    assert shut.handshakes[1].since_s == now_s[0] and [*shut.waiting] == [9]
    shut._let_in()
    assert shut.handshakes[0].twin.marks == [socket.SHUT_RDWR], "then the peer's"


@pytest.mark.parametrize("is_own", [True, False])
def test_a_door_that_closes_waits_for_its_thread_unless_that_closes_it(
    is_own: bool, shut: Any
) -> None:
    done: list[Any] = []

    def shutdown(how: int) -> None:
        done.append(how)
        raise OSError

    shut._listening = SimpleNamespace(shutdown=shutdown, close=lambda: done.append("closed"))
    other = SimpleNamespace(join=done.append)
    shut._thread = threading.current_thread() if is_own else other
    shut.close()
    assert shut._is_closed
    assert done == [socket.SHUT_RDWR, *([] if is_own else [5.0]), "closed"]
