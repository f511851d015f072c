"""How the ranks of a run meet in which a cloud may be late or lost: a rank may begin at any time,
also again, and compares what it has loaded with what rank 0 has put into the store."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store

from xcloud.cluster.layout import Layout
from xcloud.cluster.transport import Meeting, meeting_store
from xcloud.job.job import Job
from xcloud.join.failure_detector import FailureDetector
from xcloud.parallel.control import NOTHING, compare_facts, decode_facts, encode_facts
from xcloud.parallel.exchange import digest
from xcloud.parallel.hub import HUB

_GREET_EVERY_S = 0.2


def meet(job: Job, rank: int, run_dir: Path, failure_detector: FailureDetector | None) -> Meeting:
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
