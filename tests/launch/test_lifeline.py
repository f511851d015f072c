"""Ranks that die or fall silent while others join or run, over real sockets in one process."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.pipelines import in_threads
from tests.runs import wait_for
from xcloud.base.errors import FrameError, LinkClosed, LinkError, LinkTimeout
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net import failure_detector
from xcloud.net.failure_detector import FailureDetector, Loss
from xcloud.net.frame import Kind, MessageKey, decode_frame, encode_frame, seal_frame
from xcloud.net.gloo_groups import of_this_attempt
from xcloud.net.gloo_pair import GlooPair
from xcloud.net.link_profile import Liveness
from xcloud.net.transport import Rendezvous, rendezvous_store
from xcloud.rank.restarts import heartbeats_of, over_gloo, watch

LOST_AFTER_S = 30.0


def liveness(lost_after_s: float) -> Liveness:
    return Liveness(interval_s=min(0.1, lost_after_s / 4), lost_after_s=lost_after_s)


class ByHand:
    """A rank that sends no heartbeat but those that the test gives. Its process ends with it."""

    def __init__(self, store: dist.Store, place: int = 1) -> None:
        self._pair = GlooPair(store, "life", "heartbeats", place, timedelta(seconds=30))
        self._pair.join()
        self._num_sent = self._num_read = 0
        self.say()

    def say(self, *parts: Tensor, kind: Kind = Kind.ALIVE) -> None:
        frame = encode_frame(MessageKey(kind), parts, self._num_sent)
        seal_frame(frame, 0.0)
        self._pair.isend(frame, self._num_sent).wait()
        self._num_sent += 1

    def ages(self) -> list[float]:
        """The next heartbeat of rank 0 that says when it heard each rank."""
        while True:
            buffer = torch.zeros(1 << 16, dtype=torch.uint8)
            self._pair.irecv(buffer, self._num_read).wait()
            self._num_read += 1
            frame = decode_frame(buffer, "rank 0")
            if frame.parts:
                return [float(age) for age in frame.parts[0]]

    def close(self) -> None:
        for _ in range(3):
            self.say(kind=Kind.CLOSE)


class Ranks:
    """The three ranks of a job with one store; `lost[rank]` is what made that rank end."""

    def __init__(self, lost_after_s: float = LOST_AFTER_S) -> None:
        self.store = dist.HashStore()
        self.lost: dict[int, LinkError] = {}
        self.joined: dict[int, FailureDetector] = {}
        self.begun: set[int] = set()
        self.lost_after_s = lost_after_s

    def detector(
        self, rank: int, needs: Callable[[frozenset[int]], bool] = bool
    ) -> FailureDetector:
        return FailureDetector(
            rank,
            3,
            liveness(self.lost_after_s),
            on_lost=lambda error: self.lose(rank, error),
            needs=needs,
        )

    def come(self, rank: int) -> FailureDetector:
        mine = self.joined[rank] = self.detector(rank)
        self._sign_in(rank, lambda peer, part: mine.watch(peer, over_gloo(part, rank, mine)))
        return mine

    def come_by_hand(self, rank: int) -> ByHand:
        made: list[ByHand] = []
        self._sign_in(rank, lambda peer, store: made.append(ByHand(store)))
        wait_for(lambda: bool(made), 20)
        return made.pop()

    def _sign_in(self, rank: int, watch: Callable[[int, dist.Store], None]) -> None:
        def sign_in() -> None:
            with contextlib.suppress(LinkTimeout):  # of those that nobody waits for any more
                of_this_attempt(self.store, rank, range(3), 30.0, watch)
                self.begun.add(rank)

        threading.Thread(target=sign_in, daemon=True).start()

    def lose(self, rank: int, error: LinkError) -> None:
        self.lost[rank] = error


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[FailureDetector] = []
    begin = FailureDetector.__init__

    def noted(self: FailureDetector, *args: Any, **settings: Any) -> None:
        made.append(self)
        begin(self, *args, **settings)

    monkeypatch.setattr(FailureDetector, "__init__", noted)
    monkeypatch.setattr(failure_detector, "GRACE_S", 0.1)
    yield
    for each in made:  # its thread
        each.over.set()


def test_a_rank_that_dies_before_all_have_come_is_named_in_those_that_wait() -> None:
    ranks = Ranks()
    ranks.come(0)
    ranks.come(2)
    line = ranks.come_by_hand(1)
    line.ages()
    del line  # as the end of its process does
    wait_for(lambda: ranks.lost.keys() == {0, 2}, 20)
    for error in ranks.lost.values():
        assert isinstance(error, LinkClosed) and str(error).startswith("rank 1 ended while")


def test_a_rank_that_falls_silent_is_named_and_one_that_has_not_come_is_waited_for() -> None:
    ranks = Ranks(lost_after_s=2.0)
    ranks.come(0)
    line = ranks.come_by_hand(1)
    wait_for(lambda: bool(ranks.lost), 20)
    assert isinstance(ranks.lost[0], LinkTimeout) and "rank 1 sent no heartbeat" in str(
        ranks.lost[0]
    )
    assert line is not None

    patient = Ranks(lost_after_s=0.2)
    patient.come(0)
    threading.Event().wait(1.0)
    assert not patient.lost and not patient.begun


def test_only_rank_0_tells_that_another_rank_is_lost() -> None:
    ranks = Ranks()
    ranks.come(0)
    liar = ranks.come_by_hand(1)
    ranks.come(2)
    wait_for(lambda: ranks.begun >= {2}, 20)

    liar.say(torch.tensor([0.0, 0.0, -1.0]), torch.tensor([1.0]))

    wait_for(lambda: 0 in ranks.lost, 20)
    assert "rank 1 reports on other ranks" in str(ranks.lost[0])
    assert isinstance(ranks.lost[0], FrameError)


def test_once_a_rank_has_left_its_end_is_no_loss() -> None:
    """The others answer, so that it need not wait for as long as a lost rank is waited for."""
    ranks = Ranks(lost_after_s=100.0)
    for rank in range(3):
        ranks.come(rank)
    wait_for(lambda: ranks.begun == {0, 1, 2}, 20)
    links = [link for joined in ranks.joined.values() for link in joined.watches.values()]
    wait_for(lambda: all(link.has_come for link in links), 20)
    for joined in ranks.joined.values():
        joined.connected(bool, lambda: None)
    assert len(links) == 4 and not any(link.is_over for link in links)
    for rank in (2, 0, 1):
        leaving = threading.Thread(target=ranks.joined[rank].leave, daemon=True)
        leaving.start()
        leaving.join(20.0)
        assert not leaving.is_alive()
    assert all(link.is_over for link in links)
    assert not ranks.lost


@pytest.mark.parametrize("how", ["stopped", "dead"])
def test_a_rank_that_is_lost_in_a_run_is_named_by_all_whatever_they_do(how: str) -> None:
    """With what it was waited for, as nothing interrupts a collective; after last words."""
    ranks, said = Ranks(lost_after_s=2.0), list[int]()
    first, other = ranks.come(0), ranks.come(2)
    lines = [ranks.come_by_hand(1)]
    wait_for(lambda: ranks.begun == {0, 1, 2}, 20)
    first.connected(bool, lambda: said.append(0))
    other.connected(bool, lambda: threading.Event().wait())
    with other.peers[1].awaiting("the sum of 2 ranks"):
        if how == "dead":
            lines[0].ages()
            lines.clear()
        wait_for(lambda: ranks.lost.keys() == {0, 2}, 20)
    what = "ended" if how == "dead" else "sent no heartbeat for 2 s"
    assert str(ranks.lost[0]).startswith(f"rank 1 {what}") and said == [0]
    assert f"rank 1 {what} while this rank waited for the sum of 2 ranks" in str(ranks.lost[2])


def test_a_rank_that_others_can_do_without_may_fall_silent_and_come_back() -> None:
    """And only those that need it end: here rank 2, which is of its cloud."""
    ranks = Ranks(lost_after_s=1.0)
    needs = {0: lambda lost: 0 in lost, 2: lambda lost: bool(lost & {0, 1})}
    joined = {rank: ranks.come(rank) for rank in (0, 2)}
    line = ranks.come_by_hand(1)
    for rank in (0, 2):
        joined[rank].connected(needs[rank], lambda: None)
    wait_for(lambda: 2 in ranks.lost, 20)
    assert "rank 1 sent no heartbeat" in str(ranks.lost[2])
    line.say()
    wait_for(lambda: 1 not in joined[0].lost, 20)
    line.close()
    wait_for(lambda: 1 in joined[0].left, 20)
    assert not ranks.lost.keys() & {0}


def test_a_store_that_answers_no_more_while_the_ranks_join_is_named() -> None:
    class Stopped:
        def clone(self) -> "Stopped":
            return self

        def check(self, keys: list[str]) -> bool:
            return asked.set() or threading.Event().wait(0.01 if answers else None)

    ranks, asked = Ranks(lost_after_s=0.5), threading.Event()
    own, answers = ranks.come(0), True
    own.ask(Stopped())  # type: ignore[arg-type]
    threading.Event().wait(1.0)
    assert asked.is_set() and not ranks.lost
    answers = False
    wait_for(lambda: 0 in ranks.lost, 20)
    assert "the store sent no heartbeat" in str(ranks.lost[0])


def test_where_clouds_may_come_again_their_ranks_name_each_other_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    """Rank 1 and 2 are of one cloud; 2 is lost before any link is made, twice."""
    layout = ClusterLayout({"hub": Cloud(), "away": Cloud(num_ranks=2)}, "free")
    ranks = Ranks(lost_after_s=1.0)
    needs = {0: lambda lost: 0 in lost, 1: lambda lost: bool(lost)}

    def begin(rank: int) -> FailureDetector:
        mine = ranks.detector(rank, needs[rank])
        watch(rendezvous(rank), mine, layout)
        return mine

    def rendezvous(rank: int) -> Rendezvous:
        store = rendezvous_store(tmp_path)
        beginning = int(store.add(f"beginnings.{rank}", 1))
        return Rendezvous(rank, 3, store, is_open=True, beginning=beginning)

    first = begin(0)
    for _ in range(2):
        begin(1)
        gone = rendezvous(2)
        line = ByHand(heartbeats_of(gone.store, 2, gone.beginning))
        wait_for(lambda: 1 in ranks.lost, 20)
        assert "rank 2 sent no heartbeat" in str(ranks.lost.pop(1))
        del line
        wait_for(lambda: 2 in first.lost, 20)
    assert not ranks.lost


def test_a_word_that_a_rank_has_begun_again_replaces_no_line_and_takes_one_thread(
    tmp_path: Path,
) -> None:
    """Whoever reaches the store may raise the number; nobody comes."""
    layout = ClusterLayout({"hub": Cloud(), "away": Cloud()}, "free")
    store, lost = rendezvous_store(tmp_path), list[LinkError]()
    first = FailureDetector(0, 2, liveness(2.5), on_lost=lost.append)
    watch(Rendezvous(0, 2, rendezvous_store(tmp_path), is_open=True), first, layout)
    other = Rendezvous(1, 2, store, is_open=True, beginning=int(store.add("beginnings.1", 1)))
    line = ByHand(heartbeats_of(other.store, 1, 1))
    line.ages()
    live, greeted = first.watches[1], set[int]()
    for _ in range(8):
        store.add("beginnings.1", 1)
        line.say()
        line.ages()
        threading.Event().wait(0.05)
        greeted.add(id(first.greeted[1]))
        assert first.watches[1] is live and not live.is_over
    assert len(greeted) <= 2 and not lost
    line.close()
    wait_for(lambda: not first.is_greeting(1), 30)  # nobody has come in time
    assert not lost


def test_a_rank_with_a_reason_of_its_own_tells_that_one_and_still_the_others_of_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failure_detector, "GRACE_S", 20.0)
    ranks = Ranks()
    hub = ranks.come(0)
    other = ranks.come_by_hand(2)
    line = ranks.come_by_hand(1)
    line.ages()
    assert other.ages()[1] != -1.0
    del line
    wait_for(lambda: hub.lost.get(1) is Loss.ENDED, 20)

    def hear() -> float:
        while (age_s := other.ages()[1]) != -1.0:
            pass
        return age_s

    assert in_threads([hub.close, hear])[1] == -1.0
    assert not ranks.lost
