"""How ranks and machines find each other: on which interface, at which port, and what those are
told who wait."""

import contextlib
import os
import socket
import threading
from collections import namedtuple
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from tests.pipelines import in_threads
from tests.runs import free_port, wait_for
from xcloud.base.errors import ConfigError, LinkClosed, LinkError, LinkTimeout
from xcloud.launch import failures
from xcloud.launch.torchrun import (
    Machines,
    StopAsked,
    endings_here,
    host_and_port_of,
    leave_endings,
)
from xcloud.net import addresses, rendezvous
from xcloud.net.addresses import (
    choose_interface,
    is_loopback,
    own_address,
    store_at,
    why_unreachable,
)
from xcloud.net.failure_detector import FailureDetector
from xcloud.net.rendezvous import (
    HAS_ENDED,
    Ending,
    count_of,
    ended_key,
    of_this_attempt,
    value_of,
)
from xcloud.net.transport import rendezvous_store
from xcloud.rank import restarts
from xcloud.rank.restarts import Doorbell, over_gloo, unreachable

Address = namedtuple("Address", "family address")
INTERFACES = {
    "lo": [Address(socket.AF_INET, "127.0.0.1")],
    "eth0": [Address(socket.AF_PACKET, "00:00"), Address(socket.AF_INET, "192.168.1.5")],
    "wg0": [Address(socket.AF_INET6, "fd00::2"), Address(socket.AF_INET, "10.77.0.2")],
}


@pytest.mark.parametrize(
    ("route", "set_to", "taken", "address"),
    [
        ("10.77.0.2", None, "wg0", "10.77.0.2"),
        ("192.168.1.5", None, "eth0", "192.168.1.5"),
        ("fd00::2", None, "wg0", "fd00::2"),
        ("127.0.0.1", None, "lo", "127.0.0.1"),
        ("10.77.0.2", "eth0", "eth0", "192.168.1.5"),  # set by hand, it wins
        ("192.168.1.5", "wg0,eth0", "wg0,eth0", "10.77.0.2"),
    ],
)
def test_the_interface_that_faces_the_first_machine_is_taken_unless_another_is_named(
    route: str, set_to: str | None, taken: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", set_to or "")  # put back afterwards in any case
    if set_to is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: INTERFACES)
    monkeypatch.setattr(addresses, "own_address", lambda host: route)
    assert choose_interface("first.example") == address
    assert os.environ["GLOO_SOCKET_IFNAME"] == taken


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "tun7")
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME is tun7.*it has .*lo"):
        choose_interface("127.0.0.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with pytest.raises(ConfigError, match=r"--master-addr is nowhere\.invalid"):
        choose_interface("nowhere.invalid")


def test_the_store_listens_on_the_address_it_was_asked_for_alone() -> None:
    port = free_port()
    server = store_at("127.0.0.1", port, serves=True, within_s=20)
    listening = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections()
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    assert listening == {"127.0.0.1"} and own_address("127.0.0.1") == "127.0.0.1"
    store_at("127.0.0.1", port, serves=False, within_s=20).set("a", "b")
    assert value_of(server, "a") == "b"
    with pytest.raises(ConfigError, match=f"port {port}, which is taken"):
        store_at("127.0.0.1", port, serves=True, within_s=20)
    assert why_unreachable("127.0.0.1", port) is None
    assert why_unreachable("127.0.0.1", free_port()) == "connection refused"


def test_why_ranks_that_reach_the_store_have_no_connection_is_said_with_what_to_do() -> None:
    store = "10.77.0.1:29500"
    blocked = unreachable("timed out", store, here="10.77.0.2", there="10.77.0.1:33311")
    for part in (store, "10.77.0.2 (here) and 10.77.0.1:33311", "in both directions", "timed out"):
        assert part in blocked
    low, high = addresses.port_range().split("-")
    assert f"({low}-{high} here)" in blocked
    for here, there in (("127.0.1.1", "10.77.0.1:7"), ("10.77.0.2", "127.0.0.1:7")):
        text = unreachable("connection refused", store, here=here, there=there)
        assert "127.0." in text and "loopback" in text and "GLOO_SOCKET_IFNAME" in text


def test_a_rank_that_has_come_and_cannot_be_reached_is_named_with_its_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restarts, "_REFUSED_FOR_S", 0.3)
    store, lost = dist.HashStore(), list[LinkError]()
    here, there = (Doorbell(store, rank, "127.0.0.1", "the store") for rank in (0, 1))
    assert here.why_not(1) is None and there.why_not(0) is None
    assert here.why_not(2) is None  # it has not come
    closed = free_port()
    detector = FailureDetector(0, 2, on_lost=lost.append)
    detector.why_not = here.why_not
    store.set("address.1", f"127.0.0.1 {closed}")
    detector.watch(1, over_gloo(store, 0, detector))
    wait_for(lambda: bool(lost), 20)
    assert f"127.0.0.1:{closed} (connection refused)" in str(lost[0])
    assert str(lost[0]).startswith("rank 1 cannot be reached: both reach the store at the store")
    detector.over.set()  # the end of its thread
    here.close()
    there.close()


def test_an_attempt_that_was_given_up_ends_nobody_who_is_in_the_next_one() -> None:
    """Rank 0 of the first attempt is gone, and so is the port that it listened on."""
    store, lost = dist.HashStore(), list[LinkError]()
    asked, released = threading.Event(), threading.Event()
    answers = iter(["connection refused", None])
    detector = FailureDetector(1, 2, on_lost=lost.append)

    def why_not(peer: int) -> str | None:
        answer = next(answers)
        if answer:
            asked.set()
            released.wait(30)
        return answer

    detector.why_not = why_not
    detector.watch(0, over_gloo(PrefixStore("given up", store), 1, detector))
    stale = detector.watches[0]
    assert asked.wait(20)
    part = PrefixStore("next", store)
    detector.watch(0, over_gloo(part, 1, detector))
    first = FailureDetector(0, 2, on_lost=lost.append)
    first.watch(1, over_gloo(part, 0, first))
    released.set()
    wait_for(lambda: stale.is_over and detector.watches[0].has_come, 20)
    assert not lost
    in_threads([first.leave, detector.leave])
    assert not lost


@pytest.mark.parametrize(
    ("endpoint", "place"),
    [
        ("a.b:123", ("a.b", 123)),
        ("a.b", ("a.b", 29500)),
        ("[::1]:7", ("::1", 7)),
        ("[fe80::a]", ("fe80::a", 29500)),
        (" a.b:1 ", ("a.b", 1)),
    ],
)
def test_the_place_is_host_and_port(endpoint: str, place: tuple[str, int]) -> None:
    assert host_and_port_of(endpoint) == place


def test_what_stands_in_the_store_is_short_or_nothing() -> None:
    store = dist.HashStore()
    store.set("long", "x" * (rendezvous.MAX_VALUE_BYTES + 1))
    store.set("odd", "-3")
    assert value_of(store, "long") == "" and count_of(store, "odd") == 0
    assert count_of(store, "none") == 0 and not store.check(["none"])
    store.add("count", 3)
    assert count_of(store, "count") == 3


@pytest.mark.parametrize("ending", [*Ending])
def test_who_waits_for_a_rank_that_comes_no_more_is_told_how_it_ended(ending: Ending) -> None:
    store = dist.HashStore()
    store.set(ended_key(1), "it may sing")  # which is no way to end
    threading.Timer(0.3, lambda: store.set(ended_key(1), ending.value)).start()
    with pytest.raises(LinkClosed, match=f"rank 1 .cloud_b. {HAS_ENDED[ending][:20]}"):
        of_this_attempt(store, 0, range(2), 30.0, name_of="rank {} (cloud_b)".format)


def test_a_rank_that_comes_again_takes_back_that_it_had_ended() -> None:
    store = dist.HashStore()
    store.set(ended_key(1), Ending.FAILED.value)
    come = [lambda r=rank: of_this_attempt(store, r, range(2), 30.0) for rank in (1,)]
    thread = threading.Thread(target=come[0], daemon=True)
    thread.start()
    wait_for(lambda: rendezvous.ending_of(store, 1) is None, 20)
    of_this_attempt(store, 0, range(2), 30.0)
    thread.join(20)
    assert not thread.is_alive()


def test_a_second_process_of_one_rank_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have signed in; rank 0 takes the first, and no new attempt begins."""
    monkeypatch.setattr(rendezvous, "TAKEN_AFTER_S", 0.2)
    store = dist.HashStore()
    store.set("attempt", "attempt.1")

    def second() -> None:
        with pytest.raises(ConfigError, match="another process has begun as rank 1"):
            of_this_attempt(store, 1, range(2), 30.0)

    def first() -> None:
        wait_for(lambda: store.check(["attempt.1.1"]), 20)
        store.set("attempt.1.all", "the name of the other")

    in_threads([second, first])


def test_who_waits_says_so_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "NOTE_EVERY_S", 0.1)
    said: list[str] = []
    with pytest.raises(LinkTimeout):
        of_this_attempt(dist.HashStore(), 0, range(2), 1.0, say=said.append)
    assert 2 <= len(said) <= 10 and said[0].startswith("still waiting for the other ranks, ")
    assert said[0].endswith("rank 1 has not come")


def machines(
    number: int, port: int, said: list[str], within_s: float = 30.0, of: int = 2
) -> Machines:
    return Machines(
        "127.0.0.1", port, number, of, run_id="run", within_s=within_s, say=said.append
    )


def test_machines_wait_for_each_other_and_say_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "NOTE_EVERY_S", 0.3)
    port, said = free_port(), {0: list[str](), 1: list[str]()}
    second = threading.Thread(target=machines(1, port, said[1]).next_rendezvous, daemon=True)
    second.start()
    wait_for(lambda: bool(said[1]), 20)
    assert said[1][0].startswith(f"still waiting for 127.0.0.1:{port}, ")
    assert said[1][0].endswith("connection refused")
    alone = free_port()
    with pytest.raises(LinkTimeout, match=r"waited for all machines .*--node-rank 1 has not come"):
        machines(0, alone, said[0], within_s=1.0).next_rendezvous()
    assert said[0][0].endswith("--node-rank 1 has not come")
    first = machines(0, port, said[0])
    info = first.next_rendezvous()
    second.join(20)
    assert not second.is_alive() and info.bootstrap_store_info.master_port == port
    assert first.next_rendezvous().rank == 0  # ranks begin again


def test_ranks_that_were_asked_to_stop_are_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failures.ENDINGS, str(tmp_path))
    own = machines(0, free_port(), [], of=1)
    own.next_rendezvous()
    failures.leave_ending(3, Ending.FAILED)
    own.next_rendezvous()
    failures.leave_ending(3, Ending.STOPPED)
    with pytest.raises(StopAsked):
        own.next_rendezvous()
    assert endings_here() == {3: Ending.STOPPED}


@pytest.mark.parametrize(
    ("code", "ending", "told"),
    [(1, Ending.REFUSED, Ending.REFUSED), (75, Ending.FAILED, Ending.STOPPED)],
)
def test_a_machine_leaves_word_of_ranks_that_come_no_more_and_never_why(
    code: int, ending: Ending, told: Ending
) -> None:
    port = free_port()
    server: Any = store_at("127.0.0.1", port, serves=True, within_s=20)
    leave_endings(f"127.0.0.1:{port}", {1: ending}, code)
    assert rendezvous.ending_of(server, 1) is told
    assert value_of(server, ended_key(1)) in {one.value for one in Ending}
    with contextlib.suppress(LinkClosed):  # nobody is there any more: nothing to tell
        leave_endings(f"127.0.0.1:{free_port()}", {1: ending}, code)


def test_a_rank_waits_for_another_as_long_as_it_is_told_to(tmp_path: Path) -> None:
    """torch's own limit of five minutes would end a run whose first rank loads longer."""
    assert rendezvous_store(tmp_path).timeout > timedelta(days=1)


@pytest.mark.parametrize(
    ("address", "is_own"),
    [("localhost", True), ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True),
     ("::1%lo", True), ("10.0.0.1", False), ("fe80::1%eth0", False), ("example.org", False)],
)  # fmt: skip
def test_an_address_of_this_machine_alone_is_known(address: str, is_own: bool) -> None:
    assert is_loopback(address) is is_own
