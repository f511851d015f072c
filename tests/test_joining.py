"""Ranks that die or fall silent while others join, over real sockets in one process."""

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.pipelines import in_threads
from tests.runs import wait_for
from xcloud.errors import LinkClosed, LinkError, LinkTimeout
from xcloud.run import joining
from xcloud.run.joining import Joining, _Line, _Word
from xcloud.run.meeting_store import of_this_attempt

STORE_TIMEOUT = timedelta(seconds=30)


class Ranks:
    """Of a job of three, which meet in one store; `lost[rank]` is what made that rank end."""

    def __init__(self, lost_after_s: float = 30.0) -> None:
        self.store = dist.HashStore()
        self.store.set_timeout(STORE_TIMEOUT)
        self.lost: dict[int, LinkError] = {}
        self.joined: dict[int, Joining] = {}
        self.begun: set[int] = set()
        self.lost_after_s = lost_after_s

    def come(self, rank: int) -> Joining:
        self.joined[rank] = Joining(
            rank, "rank {}".format, self.lost_after_s, lambda error: self.lose(rank, error)
        )
        self._sign_in(rank, self.joined[rank].watch)
        return self.joined[rank]

    def come_by_hand(self, rank: int) -> _Line:
        """A rank that gives no sign of life but those that the test gives."""
        lines: list[_Line] = []
        self._sign_in(rank, lambda peer, store: lines.append(_Line(store, 1, 30.0)))
        wait_for(lambda: bool(lines), 20)
        return lines.pop()

    def _sign_in(self, rank: int, watch: Callable[[int, dist.Store], None]) -> None:
        def meet() -> None:
            with contextlib.suppress(LinkTimeout):  # of those that nobody waits for any more
                of_this_attempt(self.store, rank, 3, watch)
                self.begun.add(rank)

        threading.Thread(target=meet, daemon=True).start()

    def lose(self, rank: int, error: LinkError) -> None:
        self.lost[rank] = error


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "BEAT_S", 0.02)
    monkeypatch.setattr(joining, "GRACE_S", 0.1)


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
    assert isinstance(ranks.lost[0], LinkTimeout) and "rank 1 gave no sign" in str(ranks.lost[0])
    assert line is not None

    patient = Ranks(lost_after_s=0.2)
    patient.come(0)
    threading.Event().wait(1.0)
    assert not patient.lost and not patient.begun


def test_once_a_rank_has_met_the_others_its_end_is_no_loss() -> None:
    ranks = Ranks()
    for rank in range(3):
        ranks.come(rank)
    wait_for(lambda: ranks.begun == {0, 1, 2}, 20)
    lines = [line for joined in ranks.joined.values() for line in joined._lines.values()]
    assert len(lines) == 4 and all(line.is_alive() for line in lines)
    for joined in ranks.joined.values():
        joined.met()
    wait_for(lambda: not any(line.is_alive() for line in lines), 20)
    assert not ranks.lost


def test_a_rank_with_a_reason_of_its_own_tells_that_one_and_still_the_others_of_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining, "GRACE_S", 20.0)
    ranks = Ranks()
    hub = ranks.come(0)
    other = ranks.come_by_hand(2)
    line = ranks.come_by_hand(1)
    line.receive("rank 0")
    assert other.receive("rank 0") == (_Word.ALIVE, 0)
    del line
    wait_for(hub._news.is_set, 20)

    def hear() -> tuple[_Word, int]:
        other.send(_Word.ALIVE, 2)
        return other.receive("rank 0")

    assert in_threads([hub.close, hear])[1] == (_Word.ENDED, 1)
    assert not ranks.lost
