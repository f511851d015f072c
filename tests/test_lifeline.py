"""Ranks that die or fall silent while others join or run, over real sockets in one process."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.pipelines import in_threads
from tests.runs import wait_for
from xcloud.base.errors import FrameError, LinkClosed, LinkError, LinkTimeout
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.gloo_groups import of_this_attempt
from xcloud.net.link_end import PeerLife
from xcloud.net.transport import Rendezvous, rendezvous_store
from xcloud.rank import failure_detector
from xcloud.rank.failure_detector import FailureDetector, HeartbeatCode, HeartbeatLine
from xcloud.rank.restarts import life_of, watch


class Ranks:
    """Of a job of three, which meet in one store; `lost[rank]` is what made that rank end."""

    def __init__(self, lost_after_s: float = 30.0) -> None:
        self.store = dist.HashStore()
        self.lost: dict[int, LinkError] = {}
        self.joined: dict[int, FailureDetector] = {}
        self.begun: set[int] = set()
        self.lost_after_s = lost_after_s

    def come(self, rank: int) -> FailureDetector:
        self.joined[rank] = FailureDetector(
            rank, "rank {}".format, self.lost_after_s, lambda error: self.lose(rank, error)
        )
        self._sign_in(rank, self.joined[rank].watch)
        return self.joined[rank]

    def come_by_hand(self, rank: int) -> HeartbeatLine:
        """A rank that sends no heartbeat but those that the test gives."""
        lines: list[HeartbeatLine] = []
        self._sign_in(rank, lambda peer, store: lines.append(HeartbeatLine(store, 1, 30.0)))
        wait_for(lambda: bool(lines), 20)
        return lines.pop()

    def _sign_in(self, rank: int, watch: Callable[[int, dist.Store], None]) -> None:
        def meet() -> None:
            with contextlib.suppress(LinkTimeout):  # of those that nobody waits for any more
                of_this_attempt(self.store, rank, range(3), 30.0, watch)
                self.begun.add(rank)

        threading.Thread(target=meet, daemon=True).start()

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
    monkeypatch.setattr(failure_detector, "BEAT_S", 0.02)
    monkeypatch.setattr(failure_detector, "GRACE_S", 0.1)
    yield
    for each in made:  # or its threads would be in torch when Python ends
        each.close()


def test_a_rank_that_dies_before_all_have_come_is_named_in_those_that_wait() -> None:
    ranks = Ranks()
    ranks.come(0)
    ranks.come(2)
    line = ranks.come_by_hand(1)
    line.receive("rank 0")
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

    liar.receive("rank 0")
    liar.send(HeartbeatCode.ENDED, 2)

    wait_for(lambda: 0 in ranks.lost, 20)
    assert str(ranks.lost[0]) == "rank 1 calls rank 2 lost"
    assert isinstance(ranks.lost[0], FrameError)


def test_once_a_rank_has_left_its_end_is_no_loss() -> None:
    ranks = Ranks()
    for rank in range(3):
        ranks.come(rank)
    wait_for(lambda: ranks.begun == {0, 1, 2}, 20)
    lines = [line for joined in ranks.joined.values() for line in joined._lines.values()]
    for joined in ranks.joined.values():
        joined.met(bool, {}, lambda: None)
    assert len(lines) == 4 and all(line.is_alive() for line in lines)
    for rank in (2, 0, 1):
        ranks.joined[rank].leave()
    wait_for(lambda: not any(line.is_alive() for line in lines), 20)
    assert not ranks.lost


@pytest.mark.parametrize("how", ["stopped", "dead"])
def test_a_rank_that_is_lost_in_a_run_is_named_by_all_whatever_they_do(how: str) -> None:
    """With what it was waited for, as nothing interrupts a collective; after last words."""
    ranks, life, said = Ranks(lost_after_s=2.0), PeerLife(), list[int]()
    first, other = ranks.come(0), ranks.come(2)
    lines = [ranks.come_by_hand(1)]
    wait_for(lambda: ranks.begun == {0, 1, 2}, 20)
    first.met(bool, {}, lambda: said.append(0))
    other.met(bool, {1: life}, lambda: threading.Event().wait())
    with life.awaiting("the sum of 2 ranks"):
        if how == "dead":
            lines[0].receive("rank 0")
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
        joined[rank].met(needs[rank], {}, lambda: None)
    wait_for(lambda: 2 in ranks.lost, 20)
    assert "rank 1 sent no heartbeat" in str(ranks.lost[2])
    line.receive("rank 0")
    line.send(HeartbeatCode.ALIVE, 1)
    wait_for(lambda: 1 not in joined[0]._lost, 20)
    line.receive("rank 0")
    line.send(HeartbeatCode.LEFT, 1)
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
        mine = FailureDetector(
            rank, "rank {}".format, 1.0, lambda error: ranks.lose(rank, error), needs[rank]
        )
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
        line = HeartbeatLine(life_of(gone.store, 2, gone.beginning), 1, 30.0)
        wait_for(lambda: 1 in ranks.lost, 20)
        assert "rank 2 sent no heartbeat" in str(ranks.lost.pop(1))
        del line
        wait_for(lambda: 2 in first._lost, 20)
    assert not ranks.lost


def test_a_word_that_a_rank_has_begun_again_replaces_no_line_and_takes_one_thread(
    tmp_path: Path,
) -> None:
    """Whoever reaches the store may raise the number; nobody comes."""
    layout = ClusterLayout({"hub": Cloud(), "away": Cloud()}, "free")
    store, lost = rendezvous_store(tmp_path), list[LinkError]()
    first = FailureDetector(0, "rank {}".format, 5.0, lost.append)
    watch(Rendezvous(0, 2, rendezvous_store(tmp_path), is_open=True), first, layout)
    other = Rendezvous(1, 2, store, is_open=True, beginning=int(store.add("beginnings.1", 1)))
    line = HeartbeatLine(life_of(other.store, 1, 1), 1, 30.0)
    live, num_greetings = first._lines[1], set[int]()
    for _ in range(20):
        store.add("beginnings.1", 1)
        assert line.receive("rank 0") == (HeartbeatCode.ALIVE, 0)
        line.send(HeartbeatCode.ALIVE, 1)
        threading.Event().wait(0.05)
        num_greetings.add(len(first._greetings))
        assert first._lines[1] is live and live.is_alive()
    assert max(num_greetings) == 1 and not lost
    line.receive("rank 0")
    line.send(HeartbeatCode.LEFT, 1)
    first.over.set()  # it looks no more
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
    line.receive("rank 0")
    assert other.receive("rank 0") == (HeartbeatCode.ALIVE, 0)
    del line
    wait_for(lambda: 1 in hub._lost, 20)

    def hear() -> tuple[HeartbeatCode, int]:
        other.send(HeartbeatCode.ALIVE, 2)
        return other.receive("rank 0")

    assert in_threads([hub.close, hear])[1] == (HeartbeatCode.ENDED, 1)
    assert not ranks.lost
