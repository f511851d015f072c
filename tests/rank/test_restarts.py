"""Ranks that begin again: in a store that has outlived others, and over real sockets."""

import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from tests.pipelines import in_threads
from tests.runs import free_port
from xcloud.base.errors import ConfigError, LinkTimeout
from xcloud.job.job import Roster
from xcloud.net.addresses import store_at
from xcloud.net.frame import Kind, MessageKey
from xcloud.net.gloo_groups import of_this_attempt
from xcloud.net.gloo_link import GlooTransport
from xcloud.net.link_end import InSettings, OutSettings
from xcloud.net.link_profile import LinkWindow
from xcloud.net.transport import Rendezvous, rendezvous_store
from xcloud.rank import restarts
from xcloud.rank.restarts import (
    attempt_of,
    rendezvous_at_any_time,
    rendezvous_under_torchrun,
)
from xcloud.rank.role import is_needed
from xcloud.record.files import rank_file

KEY = MessageKey(Kind.AVERAGING, 1)
WINDOW = LinkWindow()


def begun(
    rank: int, folder: Path, host: str | None = None, port: int = 0, within_s: float = 60.0
) -> GlooTransport:
    store = rendezvous_store(folder) if host is None else store_at(host, port, serves=rank == 0)
    beginning = int(store.add(f"beginnings.{rank}", 1))
    return GlooTransport(Rendezvous(rank, 3, store, within_s, True, beginning))


@pytest.mark.parametrize("over", ["a file", "a server"])
def test_a_rank_that_begins_again_is_met_again(over: str, tmp_path: Path) -> None:
    """Nobody waits for the other to make its end, and what the old link carried stays there."""
    host, port = (None, 0) if over == "a file" else ("127.0.0.1", free_port())
    hub, first = (begun(rank, tmp_path, host, port) for rank in (0, 1))
    assert not hub.begins_again([1])

    def deliver(sender: GlooTransport, value: float) -> float:
        incoming = hub.incoming("up", 1, InSettings("rank 1", 4096, window=WINDOW))
        threading.Event().wait(0.05)  # its thread now waits in the store, and nobody else does
        asks = threading.Thread(target=hub.begins_again, args=([3],), daemon=True)
        asks.start()
        asks.join(10.0)
        assert not asks.is_alive()
        out = sender.out("up", 0, OutSettings("rank 0", 4096, window=WINDOW))
        out.send(KEY, (torch.tensor([value]),))
        return float(incoming.recv(KEY, 20.0)[0])

    assert deliver(first, 1.0) == 1.0
    again = begun(1, tmp_path, host, port)
    assert again.rendezvous.beginning == 2
    assert hub.begins_again([1]) and not hub.begins_again([1])
    assert not hub.begins_again([1, 2])  # of a cloud of two ranks both must be there
    assert deliver(again, 2.0) == 2.0


@pytest.mark.parametrize(
    ("beginning", "from_step", "takes_over"),
    [(1, 0, False), (1, 5, True), (2, 0, True), (2, 5, True)],
)
def test_who_comes_to_a_run_that_goes_on_takes_over_its_values(
    beginning: int, from_step: int, takes_over: bool, tmp_path: Path
) -> None:
    """Also at step 0, where no checkpoint is: the others may have trained since."""
    job, trainer = Mock(), Mock(num_updates=from_step)
    job.roster.essential = {0}
    trainer.exchange.resume.return_value = 7
    rendezvous = Rendezvous(1, 3, Mock(), 60.0, True, beginning)
    restarts.enter_late(job, rendezvous, tmp_path, trainer, from_step)
    assert trainer.exchange.resume.called is takes_over
    assert trainer.num_updates == (7 if takes_over else from_step)
    assert rank_file(tmp_path, 1, "ready").exists()


def test_all_ranks_know_the_number_of_the_run(tmp_path: Path) -> None:
    hub, other = (begun(rank, tmp_path) for rank in (0, 1))
    assert hub.run_number() == other.run_number() > 0
    assert len(hub.machines()) == len(other.machines()) == 1


@pytest.mark.parametrize(
    ("by_agent", "serves"), [("True", [False, False]), ("False", [True, False])]
)
def test_rank_0_serves_the_store_where_torchruns_agent_does_not(
    by_agent: str, serves: list[bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    for name, value in {**said, "TORCHELASTIC_USE_AGENT_STORE": by_agent}.items():
        monkeypatch.setenv(name, value)
    served = []
    monkeypatch.setattr(restarts, "choose_interface", lambda host: host)
    monkeypatch.setattr(restarts, "Doorbell", Mock())
    monkeypatch.setattr(restarts, "store_at", lambda *_, serves, **__: served.append(serves))
    monkeypatch.setattr(restarts, "attempt_of", lambda connect, *_, **__: connect(1.0))
    job = Mock()
    job.roster.is_elastic = False
    for rank in (0, 1):
        rendezvous_under_torchrun(job, rank, tmp_path, detector=Mock(), say=print)
    assert served == serves


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_serves_the_store_of_ranks_that_begin_at_any_time(
    rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    store_of = Mock()
    store_of.return_value.add.return_value = 1
    monkeypatch.setattr(restarts, "store_at", store_of)
    assert rendezvous_at_any_time(Mock(), rank, tmp_path).beginning == 1
    assert store_of.call_args.kwargs["serves"] is (rank == 0)


@pytest.mark.parametrize("first_to_come", [1, 2])
def test_ranks_of_a_cloud_meet_though_one_was_lost_before_it_had_begun(
    first_to_come: int, tmp_path: Path
) -> None:
    """In the second attempt only rank 1 came so far; in the third it meets the second beginning of
    rank 2, and neither takes up what an earlier attempt has left."""

    def sums(joined: list[GlooTransport]) -> list[float]:
        def one(transport: GlooTransport) -> float:
            group = transport.group([1, 2])
            assert group is not None
            values = torch.tensor([float(transport.rank)])
            group.sum(values)
            return float(values)

        return in_threads([lambda t=t: one(t) for t in joined])

    assert sums([begun(1, tmp_path), begun(2, tmp_path)]) == [3.0, 3.0]
    begun(1, tmp_path)
    third = [begun(first_to_come, tmp_path)]
    third.append(begun(3 - first_to_come, tmp_path))
    assert sorted((t.rank, t.rendezvous.beginning) for t in third) == [(1, 3), (2, 2)]
    assert sums(third) == [3.0, 3.0]


def test_a_rank_of_the_same_cloud_that_does_not_begin_is_named(tmp_path: Path) -> None:
    waiting = begun(1, tmp_path, within_s=0.2)
    with pytest.raises(LinkTimeout, match=r"ranks 2 have not come .*join_within_s"):
        waiting.group([1, 2])


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}, which is taken"):
            store_at("127.0.0.1", port, serves=True)


def began(store: dist.Store, num_ranks: int) -> list[dist.Store]:
    ranks = range(num_ranks)
    return in_threads([lambda r=rank: of_this_attempt(store, r, ranks, 60.0) for rank in ranks])


def test_every_attempt_has_a_part_of_its_own() -> None:
    store = dist.HashStore()
    for attempt in range(3):
        first, second, third = began(store, 3)
        assert not first.check(["address"])
        second.set("address", str(attempt))
        assert third.get("address") == first.get("address") == str(attempt).encode()


def test_a_rank_that_comes_first_does_not_take_the_word_of_a_dead_one() -> None:
    """It finds the last attempt complete in the store, and waits for the next one."""
    store = dist.HashStore()
    began(store, 2)
    order: list[int] = []

    def late() -> dist.Store:
        while not store.check(["attempt.1.1"]):
            pass
        order.append(0)
        return of_this_attempt(store, 0, range(2), 60.0)

    def early() -> dist.Store:
        found = of_this_attempt(store, 1, range(2), 60.0)
        order.append(1)
        return found

    early_store, late_store = in_threads([early, late])
    assert order == [0, 1]
    late_store.set("x", "y")
    assert early_store.get("x") == b"y"


def test_ranks_that_do_not_come_are_named_with_the_setting() -> None:
    store = dist.HashStore()
    with pytest.raises(LinkTimeout, match=r"ranks 1, 2 have not come .*liveness\.join_within_s"):
        of_this_attempt(store, 0, range(3), 0.2)


def test_a_rank_that_finds_the_store_of_an_attempt_that_ends_looks_again() -> None:
    store, tries = dist.HashStore(), []

    def connect(timeout_s: float) -> dist.Store:
        tries.append(timeout_s)
        if len(tries) < 3:
            raise dist.DistNetworkError("Connection reset by peer")
        return store

    def rank_0() -> dist.Store:
        return of_this_attempt(store, 0, range(2), 60.0)

    def rank_1() -> dist.Store:
        return attempt_of(connect, 1, 2, lambda peer, line: None, 60.0)

    first, second = in_threads([rank_0, rank_1])
    first.set("x", "y")
    assert second.get("x") == b"y" and len(tries) == 3
    tries.clear()
    with pytest.raises(dist.DistNetworkError):  # it has the store itself: nobody comes to mend it
        attempt_of(connect, 0, 2, lambda peer, line: None, 60.0)


@pytest.mark.parametrize(
    ("is_elastic", "rank", "lost", "ends"),
    [
        (False, 0, {2}, True),
        (True, 0, {2}, False),  # it may come again, and saves nothing that others lack
        (True, 3, {2}, True),  # its own cloud's ranks wait for each other
        (True, 3, {1}, True),
        (True, 3, set(), False),
    ],
)
def test_a_rank_goes_on_without_another_cloud_that_may_leave(
    is_elastic: bool, rank: int, lost: set[int], ends: bool
) -> None:
    """Clouds of ranks 0 and 1, 2 and 3; where clouds may leave, only the first one's save."""
    clouds = {"a": [0, 1], "b": [2, 3]}
    roster = Roster(frozenset(range(4)), frozenset({0, 1}), is_elastic=is_elastic)
    cluster = SimpleNamespace(
        cloud_of=lambda rank: "a" if rank < 2 else "b", ranks_in=clouds.__getitem__
    )
    job: Any = SimpleNamespace(roster=roster, cluster=cluster)
    assert is_needed(job, rank, frozenset(lost)) == ends
