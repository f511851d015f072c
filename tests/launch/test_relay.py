"""A relay, and the two ends of a line that meet at it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.namespaces import available, several_hosts, without_route
from tests.line_links import LABEL, NAME, listener, relay_running, stop, stream
from tests.owners import CLOUDS, TwoOwners, copy_keys, keys_of, relay_at
from tests.runs import ROOT, free_port, in_threads, losses, wait_for, weights
from tests.toy import toy_config
from xcloud.base.errors import ConfigError
from xcloud.launch import relay as relays
from xcloud.launch.relay import Bounds
from xcloud.line import relayed
from xcloud.line.keys import make_key, read_line_keys
from xcloud.line.pinned_tls import LineDown, PinnedTls
from xcloud.line.relayed import MAGIC, RECORD, Meeting, Side, enter, rooms_of
from xcloud.line.stream_link import StreamInLink, StreamOutLink
from xcloud.line.ways import Dialler
from xcloud.net.frame import Kind, MessageKey
from xcloud.net.link_end import InSettings, OutSettings
from xcloud.record.events import EVENTS_FILE

ROOM = bytes(range(32))
LOCAL = "127.0.0.1"
REFUSED = "connection refused: nobody listens there"


@contextmanager
def met(bounds: Bounds | None = None) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Who listens and who dials, on both sides of a room."""
    with relay_running(bounds) as port, ExitStack() as held:
        waits = held.enter_context(waiting(port))
        dials = held.enter_context(enter((LOCAL, port), room=ROOM, side=Side.DIALS))
        assert until_met(waits) == b"+"
        yield waits, dials


def waiting(port: int, room: bytes = ROOM, side: Side = Side.LISTENS) -> socket.socket:
    """Wait in a room, once the relay has said that nobody is there."""
    plain = socket.create_connection((LOCAL, port), timeout=10.0)
    plain.sendall(RECORD.pack(MAGIC, side, room))
    assert plain.recv(1) == b"."
    return plain


def until_met(plain: socket.socket) -> bytes:
    while (answer := plain.recv(1)) == b".":
        continue
    return answer


def ended(plain: socket.socket) -> bool:
    """Block until the relay has ended a connection; False if it says something instead."""
    try:
        return plain.recv(1) == b""
    except ConnectionError:
        return True


def test_what_one_side_says_the_other_hears_to_the_end() -> None:
    data = bytes(range(256)) * 4_000
    with met() as (waits, dials):
        for one, other in ((waits, dials), (dials, waits)):
            one.sendall(data)
            one.shutdown(socket.SHUT_WR)
            heard = bytearray()
            while more := other.recv(1 << 16):
                heard += more
            assert heard == data


def test_a_side_that_is_reset_takes_the_other_with_it() -> None:
    for number in (0, 1):
        with met() as both:
            both[number].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            both[number].close()
            assert ended(both[1 - number])


def say_nothing(port: int) -> socket.socket:
    return socket.create_connection((LOCAL, port), timeout=10.0)


def say(record: bytes) -> Callable[[int], socket.socket]:
    def stranger(port: int) -> socket.socket:
        plain = say_nothing(port)
        plain.sendall(record)
        return plain

    return stranger


@pytest.mark.parametrize(
    "stranger",
    [
        say_nothing,
        say(RECORD.pack(MAGIC, Side.DIALS, ROOM)[:-1]),
        say(RECORD.pack(b"GET / ", Side.DIALS, ROOM)),
        say(RECORD.pack(MAGIC, 9, ROOM)),
    ],
    ids=["silent", "stops", "speaks HTTP", "unknown side"],
)
def test_strangers_are_closed_and_meet_nobody(
    stranger: Callable[[int], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "RECORD_S", 0.1)
    with relay_running() as port, waiting(port) as waits, stranger(port) as plain:
        assert ended(plain)
        with enter((LOCAL, port), room=ROOM, side=Side.DIALS):
            assert until_met(waits) == b"+"


def test_who_talks_while_it_waits_is_closed() -> None:
    with relay_running() as port, waiting(port) as plain:
        plain.sendall(b"x")
        assert ended(plain)


def test_those_of_other_rooms_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relayed, "CONNECT_S", 0.1)
    with relay_running() as port, waiting(port):
        with pytest.raises(LineDown, match=rf"nobody waits at the relay {LOCAL}:{port}"):
            enter((LOCAL, port), room=bytes(32), side=Side.DIALS, within_s=0.1)


def test_one_who_wants_a_room_alone_shares_it_with_no_other_listener() -> None:
    for first, second in ((Side.ALONE, Side.ALONE), (Side.ALONE, Side.LISTENS),
                          (Side.LISTENS, Side.ALONE)):  # fmt: skip
        with relay_running() as port, waiting(port, side=first):
            with pytest.raises(LineDown, match="or that one is taken"):
                enter((LOCAL, port), room=ROOM, side=second)


@pytest.mark.parametrize(
    ("bounds", "sends"),
    [
        (Bounds(silence_s=0.1), b""),
        (Bounds(pair_s=0.1), b""),
        (Bounds(pair_bytes=1000), bytes(1001)),
    ],
    ids=["silence", "time", "bytes"],
)
def test_two_are_parted_at_each_bound(bounds: Bounds, sends: bytes) -> None:
    with met(bounds) as (waits, dials):
        if sends:
            dials.sendall(sends)
            assert len(waits.recv(2_000)) <= 1_000
        assert ended(dials) and ended(waits)


def test_two_who_talk_are_parted_by_time_and_not_by_silence() -> None:
    with met(Bounds(silence_s=0.3, pair_s=1.0)) as (waits, dials):
        until_s = time.monotonic() + 0.7
        while time.monotonic() < until_s:
            dials.sendall(b"x")
            assert waits.recv(1) == b"x"
            time.sleep(0.02)
        assert ended(waits)


def test_nobody_waits_longer_than_the_bound() -> None:
    with relay_running(Bounds(wait_s=0.1)) as port, waiting(port) as plain:
        assert until_met(plain) == b""


def test_one_address_has_so_many_connections() -> None:
    with relay_running(Bounds(per_address=2)) as port:
        with waiting(port), waiting(port), say_nothing(port) as third:
            assert third.recv(1) == b"!"
        wait_for(lambda: not refused(port), 10)


def refused(port: int) -> bool:
    """Return whether the relay takes no further connection."""
    try:
        waiting(port, room=bytes(32)).close()
    except AssertionError:
        return True
    return False


def test_of_a_full_relay_who_waits_longest_makes_room_and_who_is_served_stays() -> None:
    with relay_running(Bounds(connections=4)) as port, ExitStack() as held:
        served = held.enter_context(waiting(port))
        held.enter_context(enter((LOCAL, port), room=ROOM, side=Side.DIALS))
        assert until_met(served) == b"+"
        waits = [held.enter_context(waiting(port, room=bytes([n]) * 32)) for n in range(2)]
        waits.append(held.enter_context(waiting(port, room=bytes([2]) * 32)))
        assert ended(waits[0])
        served.settimeout(0.1)
        with pytest.raises(TimeoutError):
            served.recv(1)


@pytest.mark.parametrize(("silent_s", "hosts"), [(60.0, "2222"), (0.0, "2345")])
def test_of_a_full_relay_who_says_nothing_makes_room_before_who_waits(
    silent_s: float, hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crowd of silent strangers keeps nobody out, from one address or each from another."""
    monkeypatch.setattr(relays, "SILENT_S", silent_s)
    with relay_running(Bounds(connections=5)) as port, ExitStack() as held:
        mine = [held.enter_context(waiting(port))]
        silent = []
        for host in hosts:
            source = (f"127.0.0.{host}", 0)
            plain = socket.create_connection((LOCAL, port), timeout=10.0, source_address=source)
            silent.append(held.enter_context(plain))
        mine += [held.enter_context(waiting(port, room=bytes([n]) * 32)) for n in (2, 3)]
        assert all(ended(plain) for plain in silent[:2])
        for plain in mine:
            plain.settimeout(0.02)
            with pytest.raises(TimeoutError):
                plain.recv(1)


def test_a_relay_that_brings_nobody_is_dialled_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relayed, "NUM_SPARES", 1)
    dialled: list[Any] = []
    monkeypatch.setattr(relayed, "enter", lambda *_, **named: dialled.append(named) or object())
    door = relayed.RelayDoor(Meeting((LOCAL, 1), (ROOM,)), greet=lambda *_: None)
    time.sleep(0.05)
    door.close()
    assert len(dialled) == 1


def test_addresses_are_counted_by_owner() -> None:
    crowds = [relays.crowd_of((host, 1)) for host in ("192.0.2.7", "::ffff:192.0.2.7")]
    assert crowds == ["192.0.2.7", "192.0.2.7"]
    v6 = [
        relays.crowd_of((host, 1)) for host in ("2001:db8::1", "2001:db8::ffff:1", "fe80::1%eth0")
    ]
    assert v6[0] == v6[1] != v6[2]


def test_rooms_are_known_to_two_owners_and_to_no_third() -> None:
    ours = rooms_of(keys_of("cloud_a", ["cloud_b", "cloud_c"]), cloud="cloud_b", label=LABEL)
    theirs = rooms_of(keys_of("cloud_b", ["cloud_a", "cloud_c"]), cloud="cloud_a", label=LABEL)
    assert ours == theirs
    third = keys_of("cloud_c", ["cloud_a", "cloud_b"])
    others = {
        *rooms_of(third, cloud="cloud_a", label=LABEL),
        *rooms_of(third, cloud="cloud_b", label=LABEL),
        *rooms_of(keys_of("cloud_a", ["cloud_b"]), cloud="cloud_b", label="another rank"),
    }
    assert not others & {*ours}


@contextmanager
def link_over(dials: int, listens: int, **changed: Any) -> Iterator[tuple[StreamOutLink, Any]]:
    """Both ends of a link through a relay, whose ports each end reaches it by."""
    waits = listener(listens)
    keys = keys_of("cloud_b", ["cloud_a"])
    rooms = rooms_of(keys, cloud="cloud_a", label=LABEL)
    way = Dialler(Meeting((LOCAL, dials), rooms), cloud="cloud_a", tls=PinnedTls(keys, LABEL))
    out = StreamOutLink(stream(waits, NAME, **changed), OutSettings("r", capacity_bytes=1 << 21))
    incoming = StreamInLink(stream(way, NAME, **changed), InSettings("s", capacity_bytes=1 << 21))
    try:
        yield out, incoming
    finally:
        waits.close()
        stop(out, incoming)


def test_a_link_over_a_relay_that_is_ended_and_begins_again_loses_nothing() -> None:
    with ExitStack() as held, socket.create_server((LOCAL, 0)) as free:
        port = free.getsockname()[1]
        free.close()
        running = held.enter_context(ExitStack())
        running.enter_context(relay_running(port=port))
        out, incoming = held.enter_context(link_over(port, port, num_connections=2))
        for number in range(4):
            sent = torch.full((200_000,), float(number))
            key = MessageKey(Kind.AVERAGING, 1, micro_batch=number)
            out.send(key, (sent,))
            if number % 2:
                running.close()
                running.enter_context(relay_running(port=port))
            (found,) = incoming.recv(key, 20.0)
            assert torch.equal(found, sent)


def test_a_listener_says_why_nobody_can_come() -> None:
    with socket.create_server((LOCAL, 0)) as free:
        port = free.getsockname()[1]
    waits = listener(port)
    try:
        wait_for(lambda: waits.door.trouble is not None, 10)
        assert waits.door.trouble == f"the relay {LOCAL}:{port}: {REFUSED}"
        with relay_running(port=port):
            wait_for(lambda: waits.door.trouble is None, 10)
    finally:
        waits.close()


def test_on_the_day_of_a_change_either_certificate_meets(tmp_path: Path) -> None:
    """cloud_b has a new key already, and cloud_a knows both of its certificates."""
    policy = copy_keys(tmp_path)
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    make_key("cloud_b", fresh)
    (tmp_path / "new.pem").write_bytes((fresh / "cloud_b.pem").read_bytes())
    (fresh / "cloud_a.pem").write_bytes((tmp_path / "cloud_a.pem").read_bytes())
    knows = read_line_keys("cloud_a", {"cloud_b": ["cloud_b.pem", "new.pem"]}, policy)
    ours = rooms_of(knows, cloud="cloud_b", label=LABEL)
    for folder in (tmp_path, fresh):
        theirs = read_line_keys("cloud_b", {"cloud_a": ["cloud_a.pem"]}, folder / "policy.yaml")
        assert {*rooms_of(theirs, cloud="cloud_a", label=LABEL)} < {*ours}


@pytest.mark.slow
def test_ctrl_c_ends_the_command_at_once_with_somebody_served() -> None:
    """The command runs on the smallest machines: it does not import torch."""
    port = free_port()
    script = (
        "import sys, xcloud.launch.relay as relay; assert 'torch' not in sys.modules; "
        f"relay.main(['--listen', '{LOCAL}:{port}'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(f"relay at port {port}: 2048 connections, 512 of one address"), line
    with waiting(port) as waits, enter((LOCAL, port), room=ROOM, side=Side.DIALS):
        assert until_met(waits) == b"+"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--listen", "nowhere"], "--listen must be HOST:PORT or :PORT, got nowhere"),
        (["--listen", "192.0.2.1:1"], r"cannot listen at 192\.0\.2\.1:1"),
        (["--connections", "1"], "--connections must be at least 2"),
        (["--per-address", "0"], "--per-address 1"),
        (["--gb", "0"], "--gb above 0"),
        (["--connections", "999999999"], "raise the limit"),
    ],
)
def test_what_a_relay_cannot_be_is_said(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        relays.main(words)


def test_a_relay_may_be_as_small_as_its_bounds_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Bounds] = []

    async def serve(host: str, port: int, bounds: Bounds) -> None:
        asked.append(bounds)

    monkeypatch.setattr(relays, "_serve_for_ever", serve)
    relays.main(["--connections", "2", "--per-address", "1", "--gb", "0.001"])
    relays.main([])
    assert asked == [Bounds(2, per_address=1, pair_bytes=1e6), Bounds()]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_two_without_a_route_are_at_step_1_within_a_minute_and_train_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = "10.213.0.3:7100"
    owners = TwoOwners(tmp_path, [f"cluster.relay={relay}", "training.max_steps=100"])
    with several_hosts(3, 50e6) as hosts:
        without_route(hosts)
        with relay_at(hosts[2], relay):
            started_s = time.monotonic()
            both = [owners.start(cloud, host=hosts[n]) for n, cloud in enumerate(CLOUDS)]
            try:
                wait_for(lambda: num_steps(owners) > 0, 200)
                to_step_1_s = time.monotonic() - started_s
                codes = [process.wait(120) for process in both]
            finally:
                for process in both:
                    process.kill()
                    process.wait()
    assert codes == [0, 0], owners.said("cloud_a") + owners.said("cloud_b")
    assert to_step_1_s < 60.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    for cloud, other in (CLOUDS, CLOUDS[::-1]):
        assert f"it meets {other} at the relay {relay}" in owners.said(cloud)
    check_equal_to_threads(owners, tmp_path, ["training.max_steps=100"], monkeypatch)


def num_steps(owners: TwoOwners) -> int:
    """Return how many steps rank 0 has reported."""
    run_dir = owners.run_dir("cloud_a")
    return len(losses(run_dir)) if (run_dir / EVENTS_FILE).exists() else 0


def check_equal_to_threads(
    owners: TwoOwners, folder: Path, settings: list[str], patch: pytest.MonkeyPatch
) -> None:
    in_threads(folder / "threads", toy_config("two_clouds", settings), patch)
    assert losses(owners.run_dir("cloud_a")) == losses(folder / "threads")
    theirs = weights(folder / "threads")
    ours = {**weights(owners.run_dir("cloud_a")), **weights(owners.run_dir("cloud_b"))}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_hundred_cuts_of_the_relay_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    # A cut takes three steps, and up to twelve beside other load.
    settings = ["training.max_steps=3000"]
    owners = TwoOwners(tmp_path, [f"cluster.relay={LOCAL}:{port}", *settings])
    with relay_running(port=port):
        both = [owners.start(cloud) for cloud in CLOUDS]
        wait_for(lambda: num_steps(owners) > 0, 60)
    num_cuts = 1
    while both[0].poll() is None and num_cuts < 100:
        wanted = num_steps(owners) + 3
        with relay_running(port=port):
            while num_steps(owners) < wanted and both[0].poll() is None:
                time.sleep(0.05)
        num_cuts += 1
    with relay_running(port=port):
        codes = [process.wait(120) for process in both]
    assert codes == [0, 0], owners.said("cloud_a") + owners.said("cloud_b")
    assert num_cuts == 100
    [line] = json.loads((owners.run_dir("cloud_a") / "summary.json").read_text())["lines"]
    assert line["num_cuts"] >= 100
    check_equal_to_threads(owners, tmp_path, settings, monkeypatch)
