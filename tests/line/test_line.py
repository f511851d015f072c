"""Links between two owners: cut, refused, damaged, and what arrives all the same."""

from __future__ import annotations

import dataclasses
import errno
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.line_links import (
    LABEL,
    NAME,
    RUN,
    Proxy,
    dialler,
    linked,
    listener,
    stop,
    stream,
)
from tests.nightly import NIGHTLY, first_daily
from tests.owners import CLOUDS, copy_keys, folder_of_keys, keys_of
from tests.runs import free_port, wait_for
from xcloud.base.errors import FrameError, LinkClosed, LinkError, LinkTimeout
from xcloud.launch.joined_rank import place_of
from xcloud.layout import Cloud, ClusterLayout
from xcloud.line import connection as connections
from xcloud.line import door as doors
from xcloud.line import stream_link
from xcloud.line.door import name_in
from xcloud.line.hello import Hello, HelloRefusal, encode_hello, read_hello
from xcloud.line.keys import LineKeys, make_key, read_line_keys
from xcloud.line.pieces import ACKNOWLEDGEMENT, HEADER, PIECE_BYTES
from xcloud.line.pinned_tls import LineDown, PinnedTls
from xcloud.line.stream_link import StreamInLink, StreamOutLink
from xcloud.line.transport import SealedLines
from xcloud.line.ways import Dialler, KnownAttempts, Listener, num_connections
from xcloud.net.frame import Kind, MessageKey, encode_frame, seal_frame
from xcloud.net.link_end import InSettings, OutSettings, ignore
from xcloud.net.link_profile import LinkWindow

pytestmark = pytest.mark.slow


def key(number: int) -> MessageKey:
    return MessageKey(Kind.ACTIVATION, 1, micro_batch=number)


def parts_of(sizes: Sequence[int], seed: int = 0) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (size,), generator=made, dtype=torch.uint8) for size in sizes]


def send_all(out: StreamOutLink, parts: Sequence[Tensor], first: int = 0) -> threading.Thread:
    def work() -> None:
        for number, part in enumerate(parts, first):
            out.send(key(number), (part,))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def check_all(incoming: StreamInLink, parts: Sequence[Tensor], first: int = 0) -> None:
    for number, part in enumerate(parts, first):
        [found] = incoming.recv(key(number), 60.0)
        assert torch.equal(found, part)


@pytest.mark.parametrize("out_listens", [True, False])
@pytest.mark.parametrize("num_connections", [1, 3])
def test_messages_of_any_size_arrive_in_order(out_listens: bool, num_connections: int) -> None:
    sizes = [0, 1, 3_000, PIECE_BYTES, 1_900_000, 5, 5, 5, 1_000_000]
    parts = parts_of(sizes)
    with linked(out_listens, num_connections=num_connections) as (ends, _):
        sending = send_all(ends.out, parts)
        check_all(ends.incoming, parts)
        sending.join()
        ends.close()
        assert ends.incoming.has_closed
        assert ends.state.num_cuts == 0
    assert ends.out.record.num_messages[Kind.ACTIVATION] == len(sizes)
    assert ends.out.settings.queued.num_bytes == 0


@pytest.mark.parametrize(
    ("bytes_per_s", "round_trip_s", "carrying"),
    [
        (12.5e6, 0.1, {0}),  # 100 Mbit/s
        (37.5e6, 0.1, {0, 1}),
        (125e6, 0.1, {0, 1, 2}),
        (None, 0.1, {0, 1, 2}),  # nothing has been measured yet
        (12.5e6, None, {0, 1, 2}),
    ],
)
def test_only_as_many_connections_carry_as_the_line_asks_for(
    bytes_per_s: float | None,
    round_trip_s: float | None,
    carrying: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one takes the place of one that was cut."""
    monkeypatch.setattr(stream_link, "SPEAK_EVERY_S", 60.0)  # no answer changes the round trip
    monkeypatch.setattr(connections, "_WAKE_EVERY_S", 0.05)
    parts = parts_of([PIECE_BYTES] * 40)
    with linked(True, num_connections=3) as (ends, _):
        out = ends.out
        wait_for(lambda: len(out.connected) == 3, seconds=10.0)
        asked = set[int]()  # connections that would have taken a piece
        take = out.outbox.take

        def noted(number: int) -> Any:
            asked.add(number)
            return take(number)

        monkeypatch.setattr(out.outbox, "take", noted)
        monkeypatch.setattr(out.outbox, "_measure", ignore)
        out.outbox.bytes_per_s = bytes_per_s
        ends.state.round_trip_s = round_trip_s
        sending = send_all(out, parts)
        check_all(ends.incoming, parts)
        sending.join()
        wait_for(lambda: asked >= carrying)
        time.sleep(0.25)  # the others would have looked for work meanwhile, five times
        assert asked == carrying
        out.connected.discard(0)
        needed_after = {number for number in (1, 2) if out.is_needed(number)}
        assert needed_after == set(range(1, min(3, 1 + len(carrying))))
        ends.close()


def test_a_connection_that_waits_for_room_is_woken_when_there_is_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where what came last has filled the room just after the opening thread had looked."""
    monkeypatch.setattr(stream_link, "_READY_BYTES", 10_000)
    monkeypatch.setattr(stream_link, "SPEAK_EVERY_S", 60.0)
    monkeypatch.setattr(connections, "_WAKE_EVERY_S", 60.0)
    monkeypatch.setattr(connections, "SILENT_S", 60.0)
    looks, waits = threading.Event(), threading.Event()
    wait = connections.Connection.wait

    def noted(self: Any, *given: Any, reading: bool = True, **named: Any) -> None:
        if not reading:
            waits.set()
        wait(self, *given, reading=reading, **named)

    monkeypatch.setattr(connections.Connection, "wait", noted)
    parts = parts_of([6_000] * 4)
    with linked(True) as (ends, _):
        ready = ends.incoming.ready
        get = ready.get

        def get_once_full() -> Any:
            looks.set()
            assert waits.wait(10.0)
            return get()

        monkeypatch.setattr(ready, "get", get_once_full)
        sending = send_all(ends.out, parts[:1])  # is got as before
        assert looks.wait(10.0)
        sending = send_all(ends.out, parts[1:], first=1)
        for number in range(4):
            ends.incoming.recv(key(number), 10.0)
        sending.join()
        ends.close()


def test_room_in_the_window_wakes_a_connection_that_may_use_it() -> None:
    """What made the room may have gone over one that takes no more pieces."""
    parts = parts_of([PIECE_BYTES] * 2)
    with linked(True, num_connections=2) as (ends, _):
        out = ends.out
        wait_for(lambda: out.idle == {0, 1}, seconds=10.0)
        woken = list[int]()
        wake = out.connections.wake
        out.outbox.bytes_per_s = 1.0
        ends.state.round_trip_s = 0.1
        out.connections.wake = woken.append  # type: ignore[assignment, method-assign]
        out.acknowledged(1, num_pieces=0)
        assert woken == [0]
        out.acknowledged(0, num_pieces=0)  # its own thread goes on to look for a piece
        assert woken == [0]
        out.connections.wake = wake  # type: ignore[method-assign]
        sending = send_all(out, parts)
        check_all(ends.incoming, parts)
        sending.join()
        ends.close()


def cut_often(num_cuts: int, seed: int, num_connections: int, out_listens: bool) -> None:
    """A link that is cut after random numbers of bytes delivers the same ones, with windows
    smaller than messages."""
    draw = random.Random(seed)
    number = 0
    with linked(
        out_listens,
        capacity_bytes=1 << 20,
        window=LinkWindow(max_queued_bytes=600_000),
        num_connections=num_connections,
        cut_after=lambda: draw.randrange(6_000, 600_000),
        # A reset drops what the receiver has not read yet, and half of these cuts come before a
        # piece is through. Beside other load no piece passed for 20 s, which ends a line.
        reconnect_s=50.0,
    ) as (ends, proxy):
        while proxy.num_cuts < num_cuts:
            sizes = [draw.choice([10, 3_000, 300_000, 700_000]) for _ in range(6)]
            parts = parts_of(sizes, seed + number)
            sending = send_all(ends.out, parts, first=number)
            check_all(ends.incoming, parts, first=number)
            sending.join()
            number += len(parts)
        ends.close()


TCP_CLOSED = 7  # the first byte of TCP_INFO


def test_a_connection_that_is_reset_before_tls_begins_is_closed() -> None:
    tls = PinnedTls(keys_of("cloud_b", ["cloud_a"]), LABEL)
    with socket.create_server(("127.0.0.1", 0)) as server:
        plain = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.close()
        wait_for(lambda: plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO) == TCP_CLOSED, 10)
        with pytest.raises(LineDown, match="cloud_a"):
            tls.dial(plain, cloud="cloud_a")


def test_a_refusal_is_said_but_for_one_that_passes_and_most_of_a_crowd() -> None:
    said: list[str] = []
    sealed = SealedLines.__new__(SealedLines)
    sealed.num_crowded = 0
    sealed.say_refused = said.append  # type: ignore[assignment]
    for reason in ("b: not_yet", "b: other_run", *[doors.CROWDED] * 2000, "c: other_run"):
        sealed.note_refused(reason)
    crowded = [f"refused: {doors.CROWDED}"] * 2
    assert said == ["refused: b: other_run", *crowded, "refused: c: other_run"]


@pytest.mark.parametrize(
    ("num_connections", "out_listens"), [(1, True), pytest.param(3, False, marks=NIGHTLY)]
)
def test_twenty_cuts_change_no_byte(
    num_connections: int, out_listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_LONGEST_PAUSE_S", 0.05)
    cut_often(20, seed=1, num_connections=num_connections, out_listens=out_listens)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_many_cuts_change_no_byte(seed: int) -> None:
    cut_often(200, seed=seed, num_connections=1 + seed, out_listens=seed % 2 == 0)


def quick_silence(monkeypatch: pytest.MonkeyPatch, silent_s: float = 0.6) -> None:
    monkeypatch.setattr(connections, "SILENT_S", silent_s)
    monkeypatch.setattr(connections, "SPEAK_EVERY_S", silent_s / 3)
    monkeypatch.setattr(stream_link, "SPEAK_EVERY_S", silent_s / 3)


def test_a_silent_line_is_dialled_again_and_said_to_be_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick_silence(monkeypatch)
    with linked() as (ends, proxy):
        ends.out.send(key(0), (torch.ones(3),))
        ends.incoming.recv(key(0), 20.0)
        assert ends.state.text is None
        proxy.is_silent = True
        ends.out.send(key(1), (torch.ones(4),))
        wait_for(lambda: ends.state.text is not None)
        assert "line to the other rank down for" in str(ends.state.text)
        proxy.reset()
        proxy.is_silent = False
        assert ends.incoming.recv(key(1), 20.0)[0].shape == (4,)
        wait_for(lambda: ends.state.text is None)
        ends.close()
        assert ends.state.num_outages >= 1 and ends.state.outage_s > 0.0


def test_a_line_on_which_nothing_arrives_any_more_is_dialled_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the system of the dialling end sends is not acknowledged, as after a change of its
    address; a peer whose process alone stands still gets more time."""
    monkeypatch.setattr(connections, "SILENT_S", 30.0)
    with linked() as (ends, proxy):
        ends.out.send(key(0), (torch.ones(3),))
        ends.incoming.recv(key(0), 20.0)
        num_dialled = proxy.num_dialled
        proxy.is_silent = True
        time.sleep(0.5)
        assert proxy.num_dialled == num_dialled
        monkeypatch.setattr(connections, "num_retries", lambda connection: 2)
        wait_for(lambda: proxy.num_dialled > num_dialled, 15)
        proxy.is_silent = False
        ends.out.send(key(1), (torch.ones(4),))
        assert ends.incoming.recv(key(1), 20.0)[0].shape == (4,)
        ends.close()


def test_an_attempt_that_took_long_is_followed_by_the_next_one_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "_FIRST_PAUSE_S", 30.0)
    now_s = [100.0]
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    tried = threading.Semaphore(0)

    def connect(*given: object, **named: object) -> None:
        tried.release()
        now_s[0] += 40.0
        raise LineDown("no answer")

    way: Any = SimpleNamespace(connect=connect, leave=ignore)
    out = StreamOutLink(stream(way, first_within_s=1e9), OutSettings("receiver", 1000))
    assert tried.acquire(timeout=10) and tried.acquire(timeout=10)
    stop(out)


def test_a_line_that_only_rests_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_silence(monkeypatch)
    with linked() as (ends, _):
        ends.out.send(key(0), (torch.ones(3),))
        ends.incoming.recv(key(0), 20.0)
        time.sleep(1.0)
        assert ends.state.num_cuts == 0
        assert ends.state.round_trip_s is not None and ends.state.round_trip_s < 1.0
        ends.close()


def test_a_full_inbox_silences_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads for longer than silence is borne, and the sender waits, without a cut."""
    quick_silence(monkeypatch)
    parts = parts_of([1_000_000] * 16)
    with linked(window=LinkWindow(max_queued_bytes=1_000_000)) as (ends, _):
        sending = send_all(ends.out, parts)
        time.sleep(1.0)
        assert sending.is_alive()  # it is held back
        check_all(ends.incoming, parts)
        sending.join()
        ends.close()
        assert ends.state.num_cuts == 0
        assert ends.out.settings.queued.peak_bytes <= 3_100_000


def test_a_line_that_stays_down_ends_the_link_with_the_reason() -> None:
    with linked(reconnect_s=0.6) as (ends, proxy):
        ends.out.send(key(0), (torch.ones(3),))
        ends.incoming.recv(key(0), 20.0)
        proxy.close()
        said = r"down for 0\.6 s \(cluster\.reconnect_s\): cloud_a at 127.*connection refused"
        with pytest.raises(LinkClosed, match=said):
            ends.incoming.recv(key(1), 20.0)
        said = r"down for 0\.6 s .*cloud_b has not dialled"
        with pytest.raises(LinkClosed, match=said):
            ends.out.close(20.0)


def test_a_line_is_down_from_its_cut_on_however_long_it_was_up() -> None:
    with linked(reconnect_s=20.0) as (ends, proxy):
        for number in range(2):
            ends.out.send(key(number), (torch.ones(3),))
            ends.incoming.recv(key(number), 20.0)
            for end in (ends.out, ends.incoming):
                course = end.connections.course
                wait_for(lambda course=course: bool(course.carrying))
                course._since_s -= 100  # that long ago
            proxy.reset()
        ends.close()


def test_a_rank_that_never_comes_is_named() -> None:
    listens = listener()
    out = StreamOutLink(
        stream(listens, first_within_s=0.3), OutSettings("rank 1 of cloud 'b'", 1000)
    )
    with pytest.raises(LinkTimeout, match=r"no line to the other rank in 0\.3 s"):
        out.close(20.0)
    listens.close()


@pytest.mark.parametrize("num_connections", [1, 3])
def test_the_last_acknowledgement_may_be_lost(num_connections: int) -> None:
    """The receiver has everything and has closed; the sender hears it over another connection."""
    with linked(num_connections=num_connections) as (ends, proxy):
        for number in range(3):
            ends.out.send(key(number), (torch.ones(3),))
        check_all(ends.incoming, [torch.ones(3)] * 3)
        lost = threading.Event()
        acknowledge = ends.out.outbox.acknowledge

        def lose(number: int, num_pieces: int) -> Any:
            if ends.out.close_taken and not lost.is_set():  # this thread has sent it
                wait_for(lambda: ends.incoming.has_closed)
                lost.set()
                raise LineDown("cut")
            return acknowledge(number, num_pieces)

        ends.out.outbox.acknowledge = lose  # type: ignore[method-assign]
        ends.close()
        assert lost.is_set()
        # Of three connections another one may carry it before the cut one is dialled again.
        assert num_connections > 1 or proxy.num_dialled > 1


@pytest.mark.parametrize("change", ["flip", "drop", "repeat"])
def test_bytes_changed_on_the_way_end_a_connection_and_no_link(change: str) -> None:
    """TLS finds it; the frame is sent again."""
    left = [3]

    def alter(at: int, data: bytes) -> Sequence[bytes]:
        if at < 100_000 or not left[0] or len(data) < 4_000:
            return [data]
        left[0] -= 1
        if change == "flip":
            return [data[:999] + bytes([data[999] ^ 4]) + data[1000:]]
        return [data[:999], data[1003:]] if change == "drop" else [data, data]

    parts = parts_of([200_000] * 8)
    with linked(out_listens=False, change=alter) as (ends, proxy):
        sending = send_all(ends.out, parts)
        check_all(ends.incoming, parts)
        sending.join()
        ends.close()
        assert left[0] < 3 and proxy.num_dialled > 1


def test_what_an_observer_sees_are_records_of_tls_without_a_name() -> None:
    with linked(out_listens=False) as (ends, proxy):
        ends.out.send(key(0), (torch.frombuffer(bytearray(b"secret" * 999), dtype=torch.uint8),))
        ends.incoming.recv(key(0), 20.0)
        ends.close()
        seen = bytes(proxy.seen)
    assert LABEL.encode() in seen  # by which an ingress finds the rank
    for word in (b"cloud", b"secret", b"XCL", b"forward", RUN, b"localhost"):
        assert word not in seen
    at = 0
    while at < len(seen):
        assert seen[at] in (20, 21, 22, 23) and seen[at + 1] == 3
        at += 5 + int.from_bytes(seen[at + 3 : at + 5], "big")


def test_a_dialler_may_want_another_number_until_something_was_carried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The listener has answered, and the answer was lost with its connection."""
    monkeypatch.setattr("xcloud.line.ways.num_connections", lambda round_trip_s: 1)
    answered = threading.Event()
    send = stream_link.StreamOutLink.begin

    def begin(self: Any, number: int, of: int, expected: int) -> None:
        if not answered.is_set() and of == 3:
            answered.set()
            raise LineDown("cut before the dialler has read the answer")
        send(self, number, of, expected)

    monkeypatch.setattr(stream_link.StreamOutLink, "begin", begin)
    listens = listener()
    out = StreamOutLink(stream(listens), OutSettings("receiver", 1 << 20))
    Peer(listens.port, hello(of=3)).close()
    assert answered.wait(10.0)
    incoming = StreamInLink(stream(dialler(listens.port)), InSettings("sender", 1 << 20))
    out.send(key(0), (torch.ones(3),))
    incoming.recv(key(0), 20.0)
    assert out.connections.of == incoming.connections.of == 1
    out.close(20.0)
    incoming.close(20.0)
    listens.close()


def test_connections_that_lack_descriptors_are_made_once_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And it is said."""
    monkeypatch.setattr(connections, "_LACK_EVERY_S", 0.2)
    made = connections.Waker
    is_scarce = threading.Event()
    is_scarce.set()
    num = [0]

    def scarce() -> Any:
        num[0] += 1
        if is_scarce.is_set() and num[0] > 4:
            raise OSError(24, "Too many open files")
        return made()

    monkeypatch.setattr(connections, "Waker", scarce)
    said: list[str] = []
    with linked(num_connections=5) as (ends, _):
        ends.state._say_at_times.say = said.append
        ends.out.send(key(0), (torch.ones(3),))
        ends.incoming.recv(key(0), 20.0)
        wait_for(lambda: bool(said))
        assert "lacks connections" in said[0] and "Too many open files" in said[0]
        is_scarce.clear()
        wait_for(lambda: len(ends.out.connected) == 5, 15.0)
        ends.close()


def test_an_idle_stream_speaks_over_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others rest, are not cut for it, and carry when they are needed."""
    quick_silence(monkeypatch)
    with linked(num_connections=4) as (ends, _):
        wait_for(lambda: len(ends.out.connected) == 4)
        time.sleep(0.5)
        asked: list[int] = []
        ask = ends.out.outbox.ask

        def noted(number: int) -> None:
            asked.append(number)
            ask(number)

        ends.out.outbox.ask = noted  # type: ignore[method-assign]
        time.sleep(1.5)
        assert {*asked} == {0} and len(asked) >= 3
        assert ends.state.num_cuts == 0 and len(ends.out.connected) == 4
        parts = parts_of([PIECE_BYTES] * 8)
        sending = send_all(ends.out, parts)
        check_all(ends.incoming, parts)
        sending.join()
        ends.close()


def test_a_receiver_stays_for_a_sender_that_has_not_heard_that_all_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has closed, and the last acknowledgements are lost with the line for a while."""
    with linked(out_listens=False) as (ends, proxy):
        ends.out.send(key(0), (torch.ones(3),))
        ends.incoming.recv(key(0), 20.0)
        wait_for(lambda: bool(ends.out.connections.course.carrying))
        proxy.held_to = "dialler"
        closing = threading.Thread(target=ends.out.close, args=(20.0,), daemon=True)
        closing.start()
        ends.incoming.close(20.0)
        assert ends.incoming.has_closed
        proxy.refuses = True
        proxy.reset()
        proxy.held_to = None
        time.sleep(1.0)
        proxy.refuses = False
        closing.join(20.0)
        assert not closing.is_alive() and ends.out.failure is None
        assert ends.incoming.connections.join(10.0)


# Who is let in


class Door:
    """A listener of cloud_a, and what it has refused."""

    def __init__(self, **changed: Any) -> None:
        self.refused: list[str] = []
        self.listener = listener(on_refused=self.refused.append, **changed)

    def said(self, word: str) -> str:
        wait_for(lambda: any(word in line for line in self.refused))
        return next(line for line in self.refused if word in line)


@pytest.fixture
def door() -> Any:
    made = Door()
    yield made
    made.listener.close()


def hello(**changed: Any) -> Hello:
    fields = {"run": RUN, "attempt": 1, "connection": 0, "of": 1, **changed}
    return Hello(changed.pop("stream", NAME), **{k: v for k, v in fields.items() if k != "stream"})


def dial(way: Dialler, said: Hello | None = None) -> str:
    """What dialling comes to, in words."""
    try:
        way.connect(said or hello(), is_bulk=False, timeout_s=1.0, wake=lambda: None)
    except LinkError as error:
        return f"{type(error).__name__}: {error}"
    return "let in"


def test_a_stranger_is_refused_in_words_on_both_sides(door: Door) -> None:
    said = dial(dialler(door.listener.port, me="cloud_c"))
    assert "cloud_a: it does not accept the certificate of this cloud" in said
    door.said("certificate is not accepted here")


def test_a_listener_whose_system_has_no_room_says_so_and_answers_who_comes_later(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, calls = socket.socket.accept, list[int]()

    def full(listening: socket.socket) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", full)
    assert "does not accept" in dial(dialler(door.listener.port, me="cloud_c"))
    assert door.refused[0] == "the system refuses connections: Too many open files"


def test_who_greets_a_rank_while_it_ends_finds_the_connection_closed() -> None:
    door = Door()
    door.listener.awaited[NAME, 0] = lambda: None
    plain = socket.create_connection(("127.0.0.1", door.listener.port), 5)
    tls = PinnedTls(keys_of("cloud_b", ["cloud_a"]), LABEL)
    with tls.dial(plain, "cloud_a") as end:
        door.listener.close()
        end.sendall(encode_hello(hello()))
        assert "has ended" in door.said("rank 0")
        end.settimeout(5.0)
        with pytest.raises(OSError, match=r"EOF|reset"):
            end.recv(1)
    assert not door.listener.arrived


def test_a_cloud_that_answers_for_another_is_found_out(door: Door) -> None:
    """cloud_b takes who answers for cloud_c, whose certificate it has."""
    said = dial(dialler(door.listener.port, peer="cloud_c"))
    assert "cloud_c: its certificate is not accepted here" in said


def test_a_certificate_that_expires_while_a_run_goes_on_is_named_on_both_sides(
    tmp_path: Path,
) -> None:
    """It was valid when the keys were read; the line is cut, and dialled again."""
    policy = copy_keys(tmp_path)
    a = read_line_keys("cloud_a", {}, policy_file=policy)
    for name in ("cloud_b.key", "cloud_b.pem"):
        (tmp_path / name).unlink()
    expired = make_key("cloud_b", tmp_path, valid_for=timedelta(minutes=-5))
    a = dataclasses.replace(a, peers={"cloud_b": [expired]})
    b = LineKeys(
        expired, tmp_path / "cloud_b.key", pem_file=tmp_path / "cloud_b.pem",
        peers={"cloud_a": [a.own]},
    )  # fmt: skip
    refused: list[str] = []
    listens = Listener(
        ("127.0.0.1", 0), PinnedTls(a, LABEL), cloud="cloud_a", rank=0, run=RUN, attempt=1,
        on_refused=refused.append,
    )  # fmt: skip
    dials = Dialler(("127.0.0.1", listens.port), "cloud_a", PinnedTls(b, LABEL))
    assert "certificate expired" in dial(dials)
    wait_for(lambda: any("certificate has expired" in line for line in refused))
    listens.close()


def test_either_of_two_certificates_is_its_cloud_on_the_day_of_a_change(tmp_path: Path) -> None:
    policy = copy_keys(tmp_path)
    (tmp_path / "new").mkdir()
    make_key("cloud_b", tmp_path / "new")
    (tmp_path / "new" / "cloud_a.pem").write_bytes((tmp_path / "cloud_a.pem").read_bytes())
    both = {"cloud_b": ["cloud_b.pem", "new/cloud_b.pem"]}
    a = read_line_keys("cloud_a", both, policy_file=policy)
    listens = Listener(
        ("127.0.0.1", 0), PinnedTls(a, LABEL), cloud="cloud_a", rank=0, run=RUN, attempt=1
    )
    for folder in (tmp_path, tmp_path / "new"):
        b = read_line_keys(
            "cloud_b", {"cloud_a": ["cloud_a.pem"]}, policy_file=folder / "policy.yaml"
        )
        dials = Dialler(("127.0.0.1", listens.port), "cloud_a", PinnedTls(b, LABEL))
        assert "not ready" in dial(dials)  # it has come through all of TLS
    listens.close()


def raw_dial(port: int, context: ssl.SSLContext | None) -> bytes:
    """What a client of another kind gets back."""
    end = socket.create_connection(("127.0.0.1", port), 5)
    try:
        if context is not None:
            end = context.wrap_socket(end, server_hostname=LABEL)
        end.sendall(b"GET / HTTP/1.1\r\n\r\n")
        return end.recv(100)
    except OSError as error:
        return str(error).encode()
    finally:
        end.close()


def test_clients_without_certificate_without_tls_and_of_old_tls_get_nothing(door: Door) -> None:
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname = False
    anyone.verify_mode = ssl.CERT_NONE
    assert b"XCL" not in raw_dial(door.listener.port, anyone)
    door.said("did not return a certificate")

    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.verify_mode = ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert b"XCL" not in raw_dial(door.listener.port, old)
    door.said("TLS 1.3")

    assert b"XCL" not in raw_dial(door.listener.port, None)
    door.said("no TLS")


@pytest.mark.parametrize(
    ("said", "answer", "refused"),
    [
        (hello(run=bytes(16)), "runs another experiment file", "other_run"),
        (hello(stream=NAME._replace(line="backward 0")), "not ready for this link", "not_yet"),
        (hello(stream=NAME._replace(sender=5)), "connection was closed", "has dialled rank 0"),
        (
            hello(stream=NAME._replace(receiver_cloud="cloud_c")),
            "connection was closed",
            "has dialled rank 0 of cloud_a for line 'forward 0'",
        ),
    ],
)
def test_a_greeting_that_nobody_waits_for_leads_nowhere(
    said: Hello, answer: str, refused: str, door: Door
) -> None:
    assert answer in dial(dialler(door.listener.port), said)
    door.said(refused)


def test_who_knows_an_earlier_attempt_of_this_rank_is_refused_and_not_known(door: Door) -> None:
    attempts = KnownAttempts()
    attempts.note("cloud_a", 9)
    tls = PinnedTls(keys_of("cloud_b", ["cloud_a"]), LABEL)
    dials = Dialler(("127.0.0.1", door.listener.port), "cloud_a", tls, attempts)
    assert "LinkClosed: cloud_a refuses this rank: it has begun the run again" in dial(dials)
    door.said("earlier_attempt")
    closed = free_port()  # of another rank of that cloud, which is not there yet
    other = Dialler(("127.0.0.1", closed), "cloud_a", tls, attempts)
    assert "LinkClosed: cloud_a has begun the run again" in dial(other)
    assert "not ready" in dial(dialler(door.listener.port), hello(attempt=2))


@pytest.mark.parametrize("listens", CLOUDS)
def test_the_other_cloud_hears_of_ranks_that_start_again_before_they_are_there(
    listens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two dials. The rank of cloud_a has died."""
    monkeypatch.setattr("xcloud.line.transport._TELL_WITHIN_S", 20.0)
    clouds = {name: Cloud() for name in CLOUDS}
    clouds[listens] = Cloud(address=f"127.0.0.1:{free_port()}")
    layout = ClusterLayout(clouds, "sealed")

    def lines_of(rank: int, attempt: int) -> SealedLines:
        place = place_of(layout, rank=rank, attempt=attempt, listen=None)
        keys = keys_of(CLOUDS[rank], [CLOUDS[1 - rank]])
        return SealedLines(place=place, keys=keys, say=ignore)

    dies, lives = lines_of(0, attempt=1), lines_of(1, attempt=1)
    out = dies.out("forward", 1, OutSettings("b", 1 << 20, LinkWindow()))
    incoming = lives.incoming("forward", 0, InSettings("a", 1 << 20, LinkWindow()))
    out.send(key(0), (torch.ones(3),))
    incoming.recv(key(0), 20.0)
    stop(out)
    if dies.listener is not None:
        dies.listener.close()

    lines_of(0, attempt=2).tell_of_restart([1])
    with pytest.raises(LinkClosed, match="begun the run again"):
        incoming.recv(key(1), 20.0)
    if lives.listener is not None:
        lives.listener.close()


@pytest.mark.parametrize("closes", [True, False])
def test_a_link_tells_its_rank_that_it_ended_unclosed_though_nobody_reads_from_it(
    closes: bool,
) -> None:
    """The main thread may wait for another rank, which waits for the lost one."""
    lost = list[LinkError]()
    with linked(on_lost=lost.append) as (ends, _):
        ends.out.send(key(0), (torch.ones(3),))
        ends.incoming.recv(key(0), 20.0)
        if closes:
            ends.close()
            assert not lost
        else:
            ends.out.abandon()
            wait_for(lambda: lost != [])
            assert str(lost[0]) == "sender has ended without closing its link"


def test_a_peer_that_has_begun_again_ends_the_links_of_the_attempt_before() -> None:
    lost = list[LinkError]()
    with linked(on_lost=lost.append) as (ends, proxy):
        ends.out.send(key(0), (torch.ones(3),))
        ends.incoming.recv(key(0), 20.0)
        proxy.refuses = True
        proxy.reset()
        again = dialler(ends.listener.port)
        assert "not ready" in dial(again, hello(attempt=2))
        with pytest.raises(LinkClosed, match="cloud_b has begun the run again"):
            ends.out.close(20.0)
        wait_for(lambda: lost != [])


def test_a_slow_or_endless_greeting_is_left_after_five_seconds(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xcloud.line.hello.HELLO_S", 0.5)
    tls = PinnedTls(keys_of("cloud_b", ["cloud_a"]), LABEL)
    plain = socket.create_connection(("127.0.0.1", door.listener.port))
    with tls.dial(plain, "cloud_a") as end:
        started_s = time.monotonic()
        with pytest.raises(OSError):
            for byte in encode_hello(hello()):
                end.sendall(bytes([byte]))
                time.sleep(0.02)
            end.recv(1)
        assert time.monotonic() - started_s < 5.0
    door.said("no answer")


def client_hello(label: str = LABEL) -> bytes:
    """What a TLS client says first."""
    sent = ssl.MemoryBIO()
    client = ssl.create_default_context()
    with suppress(ssl.SSLWantReadError):
        client.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=label).do_handshake()
    return sent.read()


def test_the_name_is_found_in_what_a_client_says_first_and_nowhere_else() -> None:
    record = client_hello()
    assert name_in(record[5:]) == LABEL.encode()
    assert name_in(client_hello("other.example")[5:]) == b"other.example"
    draw = random.Random(0)
    for num_bytes in range(len(record) - 5):
        assert LABEL.encode().startswith(name_in(record[5 : 5 + num_bytes]) or b"")
    for _ in range(2000):
        damaged = bytearray(record[5:])
        for _ in range(4):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        name_in(bytes(damaged))  # raises nothing


CROWDS = {
    "silent": lambda: b"",
    "half a beginning": lambda: client_hello()[:60],
    "garbage": lambda: b"GET / HTTP/1.1",
    "another name": lambda: client_hello("other.example"),
    "this rank's name": client_hello,
}


@pytest.mark.parametrize("says", first_daily(CROWDS, count=3))
def test_a_crowd_keeps_no_peer_out_that_shares_its_address(
    says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the crowd dials again as soon as it is closed. The line is cut meanwhile."""
    monkeypatch.setattr(doors, "MAX_WAITING", 24)
    monkeypatch.setattr(doors, "MAX_HANDSHAKES", 8)
    said = CROWDS[says]()
    is_over = threading.Event()
    lost = list[LinkError]()
    with linked(reconnect_s=15.0, on_lost=lost.append) as (ends, proxy):
        ends.out.send(key(0), (torch.ones(3),))
        ends.incoming.recv(key(0), 20.0)

        def stand() -> None:
            while not is_over.is_set():
                with suppress(OSError):
                    with socket.create_connection(("127.0.0.1", ends.listener.port), 5) as one:
                        one.sendall(said)
                        one.settimeout(1.0)
                        while one.recv(1000) and not is_over.is_set():
                            pass
                is_over.wait(0.01)

        crowd = [threading.Thread(target=stand, daemon=True) for _ in range(16)]
        for one in crowd:
            one.start()
        time.sleep(0.5)
        for number in (1, 2):
            proxy.reset()
            ends.out.send(key(number), (torch.ones(3),))
            ends.incoming.recv(key(number), 20.0)
        door = ends.listener.door
        assert len(door.waiting) <= 24 and len(door.handshakes) <= 8
        is_over.set()
        for one in crowd:
            one.join(10.0)
        assert not lost
        ends.close()


def test_the_oldest_of_a_crowd_makes_room_for_who_comes(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "MAX_WAITING", 4)
    monkeypatch.setattr(doors, "FIRST_BYTES_S", 60.0)
    port = door.listener.port
    silent = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(4)]
    wait_for(lambda: len(door.listener.door.waiting) == 4)
    assert "not ready" in dial(dialler(port))
    assert silent[0].recv(1) == b""
    door.said("say nothing")
    for one in silent:
        one.close()
    wait_for(lambda: len(door.listener.door.waiting) == 0)


def test_a_link_goes_on_while_strangers_dial() -> None:
    parts = parts_of([100_000] * 20)
    with linked() as (ends, _):
        port = ends.listener.port
        sending = send_all(ends.out, parts)
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        check_all(ends.incoming, parts)
        sending.join()
        ends.close()
        assert ends.state.num_cuts == 0
        for one in strangers:
            one.close()


# What an authenticated peer may not say


def message() -> bytes:
    """The bytes of the first message of a link, of three numbers."""
    frame = encode_frame(key(0), (torch.ones(3),), sequence=0)
    seal_frame(frame, 0.0)
    return bytes(frame.numpy().tobytes())


class Peer:
    """cloud_b as a hostile program: it dials a listener of cloud_a and says what it likes."""

    def __init__(self, port: int, said: Hello) -> None:
        tls = PinnedTls(keys_of("cloud_b", ["cloud_a"]), LABEL)
        until_s = time.monotonic() + 10
        while True:
            plain = socket.create_connection(("127.0.0.1", port))
            self.tls = tls.dial(plain, "cloud_a")
            self.tls.sendall(encode_hello(said))
            answer = read_hello(self.tls, "cloud_a")
            if isinstance(answer, Hello) or time.monotonic() > until_s:
                break
            assert answer is HelloRefusal.NOT_YET
        assert isinstance(answer, Hello)

    def take(self, num_pieces: int) -> None:
        """Read pieces that carry messages of three numbers."""
        left = num_pieces * (HEADER.size + len(message()))
        while left:
            left -= len(self.tls.recv(left))

    def close(self) -> None:
        self.tls.close()


def sending_to(**changed: Any) -> tuple[StreamOutLink, Listener]:
    listens = listener()
    out = StreamOutLink(
        stream(listens, first_within_s=10.0, reconnect_s=10.0, **changed),
        OutSettings("receiver", 1 << 20),
    )
    return out, listens


def failure(end: StreamOutLink) -> str:
    wait_for(lambda: end.failure is not None)
    with pytest.raises(FrameError) as error:
        end.send(key(9), ())
    return str(error.value)


@pytest.mark.parametrize("expected", [2, 7])
def test_a_receiver_expects_no_frame_that_was_never_sent(expected: int) -> None:
    out, listens = sending_to()
    out.send(key(0), (torch.ones(3),))
    peer = Peer(listens.port, hello(expected=expected))
    assert f"expects frame {expected}, but 0 to 0 can come" in failure(out)
    peer.close()
    listens.close()


def test_a_receiver_expects_no_frame_that_it_has_acknowledged() -> None:
    out, listens = sending_to()
    for number in range(3):
        out.send(key(number), (torch.ones(3),))
    peer = Peer(listens.port, hello())
    peer.take(3)
    peer.tls.sendall(ACKNOWLEDGEMENT.pack(3))
    wait_for(lambda: out.outbox.is_empty)
    peer.close()
    peer = Peer(listens.port, hello(expected=1))
    assert "expects frame 1, but 3 to 3 can come" in failure(out)
    peer.close()
    listens.close()


@pytest.mark.parametrize("counts", [[4], [2, 1], [1 << 60]])
def test_a_receiver_acknowledges_no_more_than_was_sent_and_takes_nothing_back(
    counts: Sequence[int],
) -> None:
    out, listens = sending_to()
    for number in range(3):
        out.send(key(number), (torch.ones(3),))
    peer = Peer(listens.port, hello())
    peer.take(3)
    with suppress(OSError):
        for count in counts:
            peer.tls.sendall(ACKNOWLEDGEMENT.pack(count))
    assert f"acknowledges {counts[-1]} pieces" in failure(out)
    peer.close()
    listens.close()


BACK = NAME._replace(sender_cloud="cloud_b", sender=1, receiver_cloud="cloud_a", receiver=0)


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([(0, 1 << 40, 0)], "at most 1,048,576 were promised"),
        ([(0, 1000, 1)], "frame 0 has 1,000 bytes and no piece 1"),
        ([(0, 1 << 20, 4)], "frame 0 has 1,048,576 bytes and no piece 4"),
        ([(0, 1 << 20, 0), (0, 1 << 19, 1)], "or 524,288"),
        ([(n, 1 << 20, 0) for n in range(9)], "from 0 on are not finished"),
        ([(0, 39, 0)], "a frame has 40 or more"),
        ([(n, 40, 0) for n in range(1, 9)] + [(1 << 10, 40, 0)], "at most 1,024 are under way"),
        ([(0, 0, 1)], "has ended without closing its link"),
    ],
)
def test_a_sender_cuts_frames_as_agreed(pieces: Sequence[tuple[int, int, int]], said: str) -> None:
    listens = listener()
    window = LinkWindow(max_queued_bytes=1 << 20)
    incoming = StreamInLink(stream(listens, BACK), InSettings("sender", 1 << 20, window=window))
    peer = Peer(listens.port, hello(stream=BACK))
    with suppress(OSError):  # it may be refused before all is said
        for piece in pieces:
            peer.tls.sendall(HEADER.pack(*piece) + bytes(min(piece[1], PIECE_BYTES)))
    with pytest.raises(LinkError, match=said):
        incoming.recv(key(0), 20.0)
    assert incoming.ready.total.peak_bytes < 1 << 23
    peer.close()
    listens.close()


def test_a_piece_that_comes_twice_changes_nothing() -> None:
    listens = listener()
    frame = message()
    incoming = StreamInLink(stream(listens, BACK), InSettings("sender", 1 << 20))
    peer = Peer(listens.port, hello(stream=BACK))
    for number in (0, 0):
        peer.tls.sendall(HEADER.pack(number, len(frame), 0) + frame)
    assert torch.equal(incoming.recv(key(0), 20.0)[0], torch.ones(3))
    peer.tls.sendall(HEADER.pack(0, len(frame), 0) + bytes(len(frame)))
    with pytest.raises(LinkTimeout):
        incoming.recv(key(1), 0.2)
    peer.close()
    stop(incoming)
    listens.close()


def test_a_sender_expects_nothing() -> None:
    listens = listener()
    incoming = StreamInLink(stream(listens, BACK), InSettings("sender", 1 << 20))
    peer = Peer(listens.port, hello(stream=BACK, expected=4))
    with pytest.raises(FrameError, match="sends, and expects frame 4"):
        incoming.recv(key(0), 20.0)
    peer.close()
    listens.close()


def test_the_connections_of_a_stream_follow_the_round_trip() -> None:
    assert [num_connections(ms / 1e3) for ms in (0, 10, 30, 100, 200, 2000)] == [1, 1, 2, 5, 9, 10]


def test_the_proxy_of_these_tests_sees_every_byte() -> None:
    """Else the tests above would cut and change nothing."""
    assert folder_of_keys().is_dir()
    server = socket.create_server(("127.0.0.1", 0))
    proxy = Proxy(server.getsockname()[1])
    near = socket.create_connection(("127.0.0.1", proxy.port))
    far, _ = server.accept()
    near.sendall(b"hello")
    assert far.recv(5) == b"hello" and proxy.seen == b"hello"
    proxy.reset()
    assert far.recv(5) == b""
    for one in (near, far, server):
        one.close()
