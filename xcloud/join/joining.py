"""How the ranks of a job come together: they meet in a store, all at once or, where clouds may be
late or lost, each as it begins, compare what they run, and are joined by the carrier.

The store of torchrun may outlive the ranks: with --max-restarts it still has the addresses of
ranks that have died, and new ones would try to reach those. So each attempt has a part of it.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore
from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from xcloud.base.errors import LinkTimeout
from xcloud.cluster.transport import Gloo, Meeting, Transport, meeting_store
from xcloud.job.job import Job
from xcloud.join import elastic
from xcloud.join.agreement import Verdict, agree
from xcloud.join.failure_detector import FailureDetector
from xcloud.survive.changes import make_table

_NAME = "xcloud.attempt"
_SETTING = "cluster.liveness.join_within_s"
_LOOK_EVERY_S = 0.05
_CONNECT_EVERY_S = 0.2


def join(
    job: Job, settings: Mapping[str, Any], rank: int, run_dir: Path, held: Mapping[str, str],
    failure_detector: FailureDetector | None = None,
) -> tuple[Transport, Verdict]:  # fmt: skip
    """settings: the resolved experiment file. held: this rank's checkpoints. failure_detector: of
    ranks under torchrun; on one machine the launcher looks after the ranks. Returns what joins
    this rank to the others. Raises ConfigError in a rank that cannot go on."""
    meeting = meet(job, rank, run_dir, failure_detector)
    verdict = agree(job, meeting, {**make_table(settings), **held})
    return (job.cluster.carrier or Gloo()).transport(meeting), verdict


def meet(job: Job, rank: int, run_dir: Path, failure_detector: FailureDetector | None) -> Meeting:
    """On one machine in a file of the run folder."""
    num_ranks, within_s = job.cluster.num_processes, job.cluster.liveness.join_within_s
    if job.is_elastic:
        return elastic.meet(job, rank, run_dir, failure_detector)
    if failure_detector is None:
        store = meeting_store(rank, run_dir, None, 0) if num_ranks > 1 else HashStore()
        return Meeting(rank, num_ranks, store, within_s)
    num_ranks = int(os.environ["WORLD_SIZE"])

    def connect(timeout_s: float) -> Store:
        store: Store = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))[0]
        failure_detector.ask(store)
        return store

    store = attempt_of(connect, rank, num_ranks, failure_detector.watch, within_s)
    return Meeting(rank, num_ranks, store, within_s)


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
