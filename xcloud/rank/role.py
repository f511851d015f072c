"""A rank has a role. What launch/one_rank.py gives to every role, and asks of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from xcloud.comm.state import StateTree
from xcloud.job.job import Job
from xcloud.net.link import LinkRecord
from xcloud.net.peer import Peer
from xcloud.net.transport import Transport
from xcloud.pipeline.control import Control
from xcloud.pipeline.ends import OnReport
from xcloud.rank.agreement import Verdict
from xcloud.rank.saving import Facts, Saver
from xcloud.rank.stop_signal import StopSignal
from xcloud.record.reporter import Reporter

JobT = TypeVar("JobT", bound=Job, covariant=True)  # a context is only read


class Restored(Protocol):
    """The function that gives a rank the state that the ranks go on from."""

    def __call__(
        self,
        context: RankContext[Any],
        states: StateTree,
        control: Control | None,
        facts: Facts,
    ) -> Saver:
        """Return what saves `states` from now on, once they have taken over that state."""


@dataclass(frozen=True)
class RankContext(Generic[JobT]):
    """The things that every rank has, whatever its role.

    reporter: what it tells is carried by the role's own `report` (rank 0: into the event file).
    on_report: rank 0 writes other ranks' reports with it, as they come.
    settings: as all ranks have compared them.
    verdict: of that comparison, with the checkpoint to go on from.
    asked: whether the run is to end early.
    transport: joins this rank to the others.
    restored: gives a rank its state back that has no list of features (train/parts.py).
    is_resumed: there was an earlier attempt, which may have left no checkpoint.
    roll_back: this cloud's user lets agreed checkpoints go that are later than the one that all
        ranks go on from.
    """

    job: JobT
    settings: Mapping[str, str]
    run_dir: Path
    device: torch.device
    reporter: Reporter
    on_report: OnReport
    verdict: Verdict
    asked: StopSignal
    transport: Transport
    restored: Restored
    is_resumed: bool = False
    roll_back: bool = False

    @property
    def rank(self) -> int:
        return self.transport.rank


def is_needed(job: Job, rank: int, lost: frozenset[int]) -> bool:
    """Return whether `rank` cannot go on without any of these: one of its own cloud, whose ranks
    wait for each other, or one without which the run cannot go on."""
    essential = job.roster.saving if job.roster.is_elastic else job.roster.essential
    mates = job.cluster.ranks_in(job.cluster.cloud_of(rank))
    return bool(lost & essential.union(mates))


class Role(ABC, Generic[JobT]):
    """The role of one rank. It is built in all ranks at the same time: that joins them (process
    groups, links). Then `run` is called, and `close` if it came to its end.

    records: of each link to another cloud, or from one.
    received: by rank of the sender, where its own record may be lost with it.
    control: None where there is one rank.
    peers: the record of each other rank's heartbeats.
    is_stopped: the run has ended early, as it was asked to.
    """

    records: Sequence[LinkRecord] = ()
    received: Mapping[int, LinkRecord] = {}
    control: Control | None = None
    peers: Mapping[int, Peer] = {}
    is_stopped = False

    def __init__(self, context: RankContext[JobT]) -> None:
        self.context = context
        self.job = context.job
        self.rank = context.rank
        self.reporter = context.reporter

    def report(self, lines: bytes) -> None:
        """Carry lines of the reporter to rank 0. Never called in rank 0."""
        assert self.control is not None, "this role has no other ranks"
        self.control.report(lines)

    def needs(self, lost: frozenset[int]) -> bool:
        """Return whether this rank cannot go on without any of these, which have ended or are
        silent."""
        return is_needed(self.job, rank=self.rank, lost=lost)

    @abstractmethod
    def run(self) -> None:
        """Run the role, from full connection to the export and evaluation of its part."""

    def alive(self) -> AbstractContextManager[object]:
        """Send the other ranks heartbeats while the block lasts."""
        if self.control is None:
            return nullcontext()
        return self.control.detector.running()

    def close(self) -> None:
        """Deliver everything, and wait until every peer has closed its links."""
