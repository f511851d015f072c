"""How the ranks of a run meet in which a cloud may be late or lost.

A rank may begin at any time, also again. It compares what it is about to run with what rank 0 has
put into the store where they meet, and leaves if that differs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError

from xcloud.base.errors import ConfigError, LinkTimeout
from xcloud.cluster.layout import Layout
from xcloud.cluster.transport import PairTransport, meeting_store
from xcloud.job.job import Job
from xcloud.join.agreement import (
    Agreed,
    Table,
    Verdict,
    decode_table,
    decode_verdict,
    encode_table,
    encode_verdict,
    judge,
)
from xcloud.join.failure_detector import FailureDetector
from xcloud.parallel.control import NOTHING, compare_facts, decode_facts, encode_facts
from xcloud.parallel.exchange import digest
from xcloud.parallel.hub import HUB
from xcloud.survive.compared import make_table
from xcloud.survive.resume import HELD

_GREET_EVERY_S = 0.2


def join(
    job: Job, settings: Mapping[str, Any], rank: int, run_dir: Path, held: Mapping[str, str],
    failure_detector: FailureDetector | None = None,
) -> tuple[PairTransport, Agreed]:  # fmt: skip
    """Meet the other ranks, in a file of the run folder or, where MASTER_ADDR and MASTER_PORT are
    set, at a server in rank 0, which says from which of the checkpoints of its cloud the run goes
    on. held: this rank's. failure_detector: under torchrun. Raises ConfigError for a rank that
    runs something else, LinkTimeout for ranks of the first cloud that do not come."""
    host, port = os.environ.get("MASTER_ADDR"), int(os.environ.get("MASTER_PORT", "0"))
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # its agent serves at that port itself
    within_s = job.cluster.liveness.join_within_s
    store = meeting_store(rank, run_dir, host, port + under_torchrun, within_s)
    transport, layout = PairTransport(rank, store, within_s), job.cluster
    if failure_detector is not None:
        _watch(transport, failure_detector, layout)
    mine = make_table(settings)

    def judged(tables: Mapping[int, Table]) -> Verdict:
        named = partial(_name, layout)
        verdict = judge(tables, {}, named, lambda ranks: frozenset())[rank]
        if verdict.kind != "go":
            raise ConfigError(verdict.text)
        return verdict

    saving, table = job.saving_ranks, {**mine, **held}
    if rank in saving:
        _put(store, f"table.{rank}", encode_table(table))
    if rank == HUB:
        others = {r: _table(store, r, within_s) for r in sorted(saving - {HUB})}
        tables = {HUB: table, **others}
        verdict = replace(judged(tables), attempt=time.time_ns())
        _put(store, "verdict", encode_verdict(verdict))
    else:
        theirs = {
            key: v for key, v in _table(store, HUB, within_s).items() if not key.startswith(HELD)
        }
        judged({HUB: theirs, rank: mine})
        verdict = decode_verdict(_get(store, "verdict"))
    return transport, Agreed(verdict)


def _watch(
    transport: PairTransport, failure_detector: FailureDetector, layout: Layout[Any]
) -> None:
    """Rank 0 looks for ranks that begin, also again, as long as it lives."""
    if transport.rank != HUB:
        return failure_detector.watch(
            HUB, _life(transport.store, transport.rank, transport.beginning)
        )
    store = transport.store.clone()  # type: ignore[attr-defined]
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


def _table(store: Store, rank: int, within_s: float) -> Table:
    try:
        store.wait([f"table.{rank}"], timedelta(seconds=within_s))
    except DistStoreError:
        raise LinkTimeout(
            f"rank {rank} has not come in {within_s:g} s (cluster.liveness.join_within_s)"
        ) from None
    return decode_table(_get(store, f"table.{rank}"), f"rank {rank}")


def _name(layout: Layout[Any], rank: int) -> str:
    return f"rank {rank} (cloud {layout.placement(rank).cloud})"


class StoreFacts:
    """What each rank compares before its first step: rank 0 leaves its own in the store."""

    tells_sizes = False

    def __init__(self, transport: PairTransport) -> None:
        self._transport = transport
        self._number = 0

    def tell_sizes(self, sizes: Sequence[int], peers: Iterable[int]) -> None:
        raise AssertionError("ranks that begin at any time read their own data")

    def hear_sizes(self, num_splits: int) -> list[int]:
        raise AssertionError("ranks that begin at any time read their own data")

    def agree(
        self, facts: Mapping[str, str], left_out: Mapping[int, Collection[str]] = NOTHING
    ) -> None:
        """Every rank calls it, in the same order. Raises ConfigError for one that differs."""
        store, rank = self._transport.store, self._transport.rank
        self._number += 1
        name = f"facts.{self._number}"
        if rank == HUB:
            _put(store, name, encode_facts(facts))
        else:
            theirs = decode_facts(_get(store, name), HUB)
            compare_facts(facts, theirs, HUB, left_out.get(rank, ()))


def parameters_fact(stages: Mapping[int, nn.Module]) -> dict[str, str]:
    """All replicas begin with the same parameters, also those that come later."""
    whole = torch.cat([digest(stages[stage].parameters()) for stage in sorted(stages)])
    return {"the parameters before the first update": bytes(whole.tolist()).hex()}


def _put(store: Store, name: str, message: Tensor) -> None:
    store.set(name, message.numpy().tobytes().decode("ascii", "replace"))


def _get(store: Store, name: str) -> tuple[Tensor]:
    return (torch.frombuffer(bytearray(store.get(name)), dtype=torch.uint8),)
