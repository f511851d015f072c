"""Ranks that are started again in a store that has outlived the earlier ones."""

import pytest
import torch.distributed as dist

from tests.pipelines import in_threads
from xcloud.base.errors import LinkTimeout
from xcloud.net.gloo_groups import of_this_attempt
from xcloud.rank.restarts import attempt_of


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
