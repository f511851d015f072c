"""The door of a rank that listens, without its thread: who is let in, and who gives way."""

from __future__ import annotations

import socket
import struct
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from xcloud.line import door


class Dialled:
    """What a door sees of a connection. start: what has come, or why nothing can."""

    def __init__(self, number: int, start: bytes | OSError = b"", host: str = "") -> None:
        self.number = number
        self.start = start
        self.host = host or f"host {number}"
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


@pytest.fixture
def shut(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A door whose threads do not run: `threads` are those that it has made."""
    refused: list[Any] = []
    polled: list[Any] = []
    coming: list[Any] = []
    done: list[Any] = []
    made: list[Any] = []

    class NoThread:
        def __init__(self, target: Any, name: str, daemon: bool, args: Any = ()) -> None:
            assert daemon and name == (f"greet {args[1]}" if args else "listener")
            self.run = partial(target, *args)
            self.name = name
            self.join = done.append
            made.append(self)

        def start(self) -> None:
            if self.name == "greet full":
                raise RuntimeError("can't start new thread")

    def accept() -> tuple[Dialled, tuple[str, int]]:
        one = coming.pop(0)
        if isinstance(one, OSError):
            raise one
        return one, (one.host, 1)

    def shutdown(how: int) -> None:
        done.append(how)
        raise OSError

    poll = SimpleNamespace(
        register=lambda one, what: polled.append(one), unregister=lambda one: polled.remove(one)
    )
    monkeypatch.setattr(door, "select", SimpleNamespace(poll=lambda: poll, POLLIN=1))
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=refused.append)
    monkeypatch.setattr(door, "time", clock)
    threads = SimpleNamespace(
        Thread=NoThread, Lock=threading.Lock, current_thread=threading.current_thread
    )
    monkeypatch.setattr(door, "threading", threads)
    listening: Any = SimpleNamespace(
        accept=accept,
        shutdown=shutdown,
        close=lambda: done.append("closed"),
        setblocking=lambda blocks: None,
    )
    shut: Any = door.Door(
        listening,
        label="name",
        greet=lambda plain, host: None,
        on_refused=refused.append,
        is_known=lambda host: host == "peer",
    )
    polled.clear()
    vars(shut).update(refused=refused, polled=polled, coming=coming, done=done, threads=made)
    vars(shut).update(poller=poll, listening=listening)
    return shut


def ready(shut: Any, number: int) -> Any:
    """Let a connection that came have said the name, and return it."""
    caller = shut.waiting[number]
    caller.is_ready = True
    shut.polled.remove(caller.plain)
    return caller.plain


def test_a_door_takes_whoever_comes_and_the_oldest_silent_one_gives_way(
    shut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MAX_WAITING", 2)
    shut.coming += [BlockingIOError(), OSError(24, "Too many open files")]
    shut.accept()
    assert not shut.refused and not shut.waiting
    shut.accept()
    said, pause_s = shut.refused
    assert said.startswith("the system refuses connections: ") and "open files" in said
    assert pause_s == 0.1
    shut.close()
    shut.coming.append(OSError(9, "closed"))
    shut.accept()
    assert len(shut.refused) == 2, "a door that closes says nothing"
    shut.coming += [Dialled(number) for number in (5, 6, 7, 8)]
    for _ in range(2):
        shut.accept()
    ready(shut, 5)
    shut.accept()
    assert [*shut.waiting] == [5, 7] and shut.refused[2:] == [f"host 6: {door.CROWDED}"]
    ready(shut, 7)
    shut.accept()
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
    shut.accept()
    (caller,) = shut.waiting.values()
    shut.look(caller)
    assert shut.refused == ([] if said is None else [f"host 5: {said}"])
    assert caller.plain.is_closed is (said is not None) and len(shut.waiting) == (said is None)


def test_a_door_waits_for_a_whole_record_and_hands_over_who_says_the_name(
    shut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = hello_record(1 << 14)
    monkeypatch.setattr(door, "name_in", lambda hello: b"name" if hello == whole[5:] else None)
    shut.coming.append(Dialled(5, whole[:3]))
    shut.accept()
    (caller,) = shut.waiting.values()
    for num_bytes in (3, 5, len(whole) - 1):
        caller.plain.start = whole[:num_bytes]
        shut.look(caller)
    assert caller.plain.marks == [5, len(whole), len(whole)] and not caller.is_ready
    caller.plain.start = whole + b"more"
    shut.look(caller)
    assert caller.is_ready and shut.polled == [] and not shut.refused
    shut.let_in()
    (handshake,) = shut.handshakes
    assert caller.plain.marks[-1] == 1 and handshake.twin.number == -5 and not shut.waiting
    assert not handshake.is_known
    shut.threads[-1].run()
    assert handshake.twin.is_closed and shut.handshakes == []


def test_a_door_that_lacks_descriptors_threads_or_places_says_so_and_goes_on(
    shut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def comes(number: int, host: str, start: bytes | OSError = b"") -> Any:
        shut.coming.append(Dialled(number, start, host))
        shut.accept()
        return ready(shut, number)

    none_left = comes(5, "far", OSError(24, "Too many open files"))
    full = comes(6, "full")
    peer = comes(7, "peer")
    shut.let_in()
    assert none_left.is_closed and full.is_closed and not peer.is_closed
    first, second = shut.refused
    assert first.startswith("far: ") and second == "full: can't start new thread"
    (kept,) = shut.handshakes
    assert kept.is_known and kept.twin.number == -7

    monkeypatch.setattr(door, "MAX_HANDSHAKES", 2)
    now_s = [kept.since_s]
    monkeypatch.setattr(door.time, "monotonic", lambda: now_s[0])
    comes(8, "stranger")
    shut.let_in()
    comes(9, "late")
    shut.let_in()
    assert [one.twin.marks for one in shut.handshakes] == [[], []], "both are fresh"
    now_s[0] += 1.5
    shut.let_in()
    assert [one.twin.marks for one in shut.handshakes] == [[], [socket.SHUT_RDWR]]
    assert shut.handshakes[1].since_s == now_s[0] and [*shut.waiting] == [9]
    shut.let_in()
    assert shut.handshakes[0].twin.marks == [socket.SHUT_RDWR], "then the peer's"


@pytest.mark.parametrize("is_own", [True, False])
def test_a_door_that_closes_waits_for_its_thread_unless_that_closes_it(
    is_own: bool, shut: Any
) -> None:
    if is_own:
        door.threading.current_thread = lambda: shut.threads[0]
    shut.close()
    assert shut.done == [socket.SHUT_RDWR, *([] if is_own else [5.0]), "closed"]


def test_a_door_refuses_whoever_is_silent_for_too_long_and_closes_the_others_at_its_end(
    shut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Number 3 is the port itself; 9 has been forgotten since it was polled."""
    shut.coming += [Dialled(number, BlockingIOError()) for number in (5, 6, 7, 8)]
    for _ in range(3):
        shut.accept()
    now_s = shut.waiting[7].since_s
    shut.waiting[5].since_s = shut.waiting[6].since_s = now_s - door.FIRST_BYTES_S - 0.5
    shut.waiting[6].num_bytes = 4
    shut.waiting[7].since_s = now_s - door.FIRST_BYTES_S
    plain = [caller.plain for caller in shut.waiting.values()]
    waits_ms: list[float] = []

    def poll(wait_ms: float) -> list[tuple[int, int]]:
        waits_ms.append(wait_ms)
        shut.close()
        return [(3, 1), (9, 1), (7, 1)]

    shut.poller.poll = poll
    shut.listening.fileno = lambda: 3
    monkeypatch.setattr(door.time, "monotonic", lambda: now_s)
    shut.threads[0].run()
    assert shut.refused == [f"host 5: {door.CROWDED}", "host 6: no answer"]
    assert waits_ms == [100.0] and shut.waiting == {} and shut.coming == []
    assert all(one.is_closed for one in plain)
