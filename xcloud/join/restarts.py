"""How ranks meet that may begin more than once. Where a cloud may be late or lost, a rank begins
at any time, also again, and compares what it has loaded with what rank 0 has put into the store.
Under torchrun with --max-restarts all begin again: its store may outlive the ranks and still have
the addresses of those that have died, which new ones would try to reach, so each attempt has a
part of it.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistNetworkError
from torch.distributed.rendezvous import rendezvous

from xcloud.base.errors import LinkTimeout
from xcloud.cluster.layout import Layout
from xcloud.cluster.transport import Meeting, meeting_store
from xcloud.job.job import Job
from xcloud.join.failure_detector import FailureDetector
from xcloud.parallel.control import NOTHING, compare_facts, decode_facts, encode_facts
from xcloud.parallel.exchange import digest
from xcloud.parallel.hub import HUB

_GREET_EVERY_S = 0.2
_NAME = "xcloud.attempt"
_SETTING = "cluster.liveness.join_within_s"
_LOOK_EVERY_S = 0.05
_CONNECT_EVERY_S = 0.2


def meet_under_torchrun(
    job: Job, rank: int, run_dir: Path, failure_detector: FailureDetector
) -> Meeting:
    if job.roster.is_elastic:
        return meet_any_time(job, rank, run_dir, failure_detector)
    num_ranks, within_s = int(os.environ["WORLD_SIZE"]), job.cluster.liveness.join_within_s

    def connect(timeout_s: float) -> Store:
        store: Store = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))[0]
        failure_detector.ask(store)
        return store

    store = attempt_of(connect, rank, num_ranks, failure_detector.watch, within_s)
    return Meeting(rank, num_ranks, store, within_s)


def meet_any_time(
    job: Job, rank: int, run_dir: Path, failure_detector: FailureDetector | None = None
) -> Meeting:
    """In a file of the run folder or, where MASTER_ADDR and MASTER_PORT are set, at a server in
    rank 0."""
    host, port = os.environ.get("MASTER_ADDR"), int(os.environ.get("MASTER_PORT", "0"))
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # its agent serves at that port itself
    layout, within_s = job.cluster, job.cluster.liveness.join_within_s
    store = meeting_store(rank, run_dir, host, port + under_torchrun, within_s)
    beginning = int(store.add(f"beginnings.{rank}", 1))
    meeting = Meeting(rank, layout.num_ranks, store, within_s, True, beginning)
    if failure_detector is not None:
        _watch(meeting, failure_detector, layout)
    return meeting


def _watch(meeting: Meeting, failure_detector: FailureDetector, layout: Layout[Any]) -> None:
    """Rank 0 looks for ranks that begin, also again, as long as it lives."""
    if meeting.rank != HUB:
        life = _life(meeting.store, meeting.rank, meeting.beginning)
        return failure_detector.watch(HUB, life)
    store = meeting.store.clone()  # type: ignore[attr-defined]
    greeted = dict.fromkeys(range(1, layout.num_ranks), 0)

    def greet() -> None:
        while not failure_detector.over.wait(_GREET_EVERY_S):
            for rank, before in list(greeted.items()):
                greeted[rank] = int(store.add(f"beginnings.{rank}", 0))
                if greeted[rank] > before:
                    mates = layout.ranks_in(layout.cloud_of(rank))
                    failure_detector.watch(rank, _life(store, rank, greeted[rank]), mates)

    threading.Thread(target=greet, name="greeting", daemon=True).start()


def _life(store: Store, rank: int, beginning: int) -> Store:
    return PrefixStore(f"life {rank}.{beginning}", store.clone())  # type: ignore[attr-defined]


class StoreFacts:
    """What each rank compares before its first step: rank 0 leaves its own in the store."""

    tells_sizes = False

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._number = 0

    def tell_sizes(self, sizes: Sequence[int], peers: Iterable[int]) -> None:
        raise AssertionError("ranks that begin at any time read their own data")

    def hear_sizes(self, num_splits: int) -> list[int]:
        raise AssertionError("ranks that begin at any time read their own data")

    def agree(
        self, facts: Mapping[str, str], left_out: Mapping[int, Collection[str]] = NOTHING
    ) -> None:
        """Every rank calls it, in the same order. Raises ConfigError for one that differs."""
        meeting, rank = self._meeting, self._meeting.rank
        self._number += 1
        name = f"facts.{self._number}"
        if rank == HUB:
            meeting.write(name, encode_facts(facts).numpy().tobytes().decode("ascii", "replace"))
        else:
            text = bytearray(meeting.read(name, HUB).encode())
            theirs = decode_facts((torch.frombuffer(text, dtype=torch.uint8),), HUB)
            compare_facts(facts, theirs, HUB, left_out.get(rank, ()))


def parameters_fact(stages: Mapping[int, nn.Module]) -> dict[str, str]:
    """All replicas begin with the same parameters, also those that come later."""
    whole = torch.cat([digest(stages[stage].parameters()) for stage in sorted(stages)])
    return {"the parameters before the first update": bytes(whole.tolist()).hex()}


def attempt_of(
    connect: Callable[[float], Store],
    rank: int,
    num_ranks: int,
    watch: Callable[[int, Store], None],
    within_s: float,
) -> Store:
    """`of_this_attempt` of the store that `connect` finds in at most so many seconds. A rank that
    is started again may find the store of an attempt that just ends: it then looks again."""
    until_s = time.monotonic() + within_s
    while True:
        try:
            store = connect(max(1.0, until_s - time.monotonic()))
            return of_this_attempt(store, rank, num_ranks, watch)
        except DistNetworkError:
            if rank == 0 or time.monotonic() > until_s:
                raise
        time.sleep(_CONNECT_EVERY_S)


def of_this_attempt(
    store: Store,
    rank: int,
    num_ranks: int,
    watch: Callable[[int, Store], None] = lambda peer, line: None,
) -> Store:
    """A part of the store that no earlier attempt has used. Every rank calls it.

    Rank 0 numbers the attempt, the others sign in for it, and it begins once rank 0 has named all
    of them: a rank that was signed in and has died is not among those who wait for that word.

    watch: called in rank 0 with every other rank that has come, in these with rank 0, and with a
    part of the store for the two. Ranks that have not come yet are waited for as long as the
    store's timeout; then raises LinkTimeout naming them.
    """
    if rank == 0:
        return _call_in(store, num_ranks, watch)
    name = uuid.uuid4().hex
    signed_in = ""
    for _ in _looks(store):
        attempt = store.get(f"{_NAME}.current").decode()
        part, begun = f"{_NAME}.{attempt}", f"{_NAME}.{attempt}.all"
        if store.check([begun]):
            if name in store.get(begun).decode().split(","):
                return PrefixStore(part, store)
        elif attempt != signed_in:
            store.set(f"{part}.{rank}", name)
            watch(0, _line(store, part, name))
            signed_in = attempt
    raise LinkTimeout(f"rank 0 has not come in {_timeout(store)} ({_SETTING})")


def _call_in(store: Store, num_ranks: int, watch: Callable[[int, Store], None]) -> Store:
    number = store.add(f"{_NAME}.count", 1)
    part = f"{_NAME}.{number}"
    store.set(f"{_NAME}.current", str(number))
    names: dict[int, str] = {}
    for _ in _looks(store):
        missing = [other for other in range(1, num_ranks) if other not in names]
        for other in missing:
            if store.check([f"{part}.{other}"]):
                names[other] = store.get(f"{part}.{other}").decode()
                watch(other, _line(store, part, names[other]))
        if len(names) == num_ranks - 1:
            store.set(f"{part}.all", ",".join(names.values()))
            return PrefixStore(part, store)
    who = ", ".join(map(str, missing))
    raise LinkTimeout(f"ranks {who} have not come in {_timeout(store)} ({_SETTING})")


def _looks(store: Store) -> Iterator[None]:
    """Every now and then, as long as the store's timeout."""
    until_s = time.monotonic() + _timeout(store).total_seconds()
    while time.monotonic() < until_s:
        yield
        time.sleep(_LOOK_EVERY_S)


def _timeout(store: Store) -> timedelta:
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]
    return timeout


def _line(store: Store, part: str, name: str) -> Store:
    # A client of its own: whoever waits in a store keeps others of that client waiting.
    return PrefixStore(f"{part}.line.{name}", store.clone())  # type: ignore[attr-defined]
