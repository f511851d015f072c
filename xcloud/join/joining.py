"""How the ranks of a job come together: all at once in a process group, or, where clouds may be
late or lost, each as it begins. Either way they compare what they run before anything else.

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

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from xcloud.base.errors import LinkTimeout
from xcloud.cluster.transport import Transport
from xcloud.job.job import Job
from xcloud.join import elastic
from xcloud.join.agreement import Agreed, agree
from xcloud.join.failure_detector import FailureDetector

_SETUP_TIMEOUT = timedelta(hours=12)  # one cloud may pretrain its backbone while others wait
_NAME = "xcloud.attempt"
_SETTING = "cluster.liveness.join_within_s"
_LOOK_EVERY_S = 0.05
_CONNECT_EVERY_S = 0.2


def join(
    job: Job, settings: Mapping[str, Any], rank: int, run_dir: Path, held: Mapping[str, str],
    failure_detector: FailureDetector | None = None,
) -> tuple[Transport | None, Agreed]:  # fmt: skip
    """settings: the resolved experiment file. held: this rank's checkpoints. failure_detector: of
    ranks under torchrun; on one machine the launcher looks after the ranks. Returns what joins
    this rank to the others, None for torch's default process group. Raises ConfigError in a rank
    that cannot go on."""
    if job.is_elastic:
        return elastic.join(job, settings, rank, run_dir, held, failure_detector)
    form_group(job, rank, run_dir, failure_detector)
    return None, agree(job, settings, rank, held)


def form_group(
    job: Job, rank: int, run_dir: Path, failure_detector: FailureDetector | None
) -> None:
    """Form the process group. On one machine a file in the run folder is the meeting point, and
    the launcher looks after the ranks. failure_detector: of ranks under torchrun."""
    num_ranks = job.cluster.num_processes
    if failure_detector is not None:
        join_within_s = job.cluster.liveness.join_within_s
        size = int(os.environ["WORLD_SIZE"])

        def connect(timeout_s: float) -> Store:
            store: Store = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))[0]
            failure_detector.ask(store)
            return store

        store = attempt_of(connect, rank, size, failure_detector.watch, join_within_s)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=_SETUP_TIMEOUT
        )
    elif num_ranks > 1:
        # Not by its URL, which would end at a '#' or '?' in the path.
        store = FileStore(str(run_dir.resolve() / "rendezvous"), num_ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=_SETUP_TIMEOUT
        )


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
