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
from xcloud.pipeline.control import Control, send_report
from xcloud.pipeline.ends import OnReport
from xcloud.rank.agreement import Verdict
from xcloud.rank.saving import InputDigests, Saver
from xcloud.rank.stop_signal import StopSignal
from xcloud.record.reporter import Reporter

JobT = TypeVar("JobT", bound=Job, covariant=True)  # a context is only read


class Restored(Protocol):
    """The function that restores the state from which a rank resumes."""

    def __call__(
        self,
        context: RankContext[Any],
        states: StateTree,
        control: Control | None,
        facts: InputDigests,
    ) -> Saver:
        """Return what saves `states` from now on, once they have taken over that state."""


@dataclass(frozen=True)
class RankContext(Generic[JobT]):
    """The things that every rank has, whatever its role.

    reporter: takes this rank's reports. The role's own `report` sends them to rank 0; rank 0
        writes them into the event file.
    on_report: called by rank 0 to write other ranks' reports as they come.
    settings: the settings that all ranks have compared.
    verdict: the result of that comparison, with the checkpoint from which to resume.
    asked: the signal to end the run early.
    transport: joins this rank to the others.
    restored: restores the state of a rank that has no list of features (train/parts.py).
    is_resumed: True if there was an earlier attempt, which may have left no checkpoint.
    roll_back: True if this cloud's user agrees to delete agreed checkpoints that are later than
        the one from which all ranks resume.
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
    """Return whether `rank` cannot continue because of these losses: a rank of its own cloud,
    whose ranks wait for each other, or a rank that the run needs."""
    essential = job.roster.saving if job.roster.is_elastic else job.roster.essential
    mates = job.cluster.ranks_in(job.cluster.cloud_of(rank))
    return bool(lost & essential.union(mates))


class Role(ABC, Generic[JobT]):
    """The role of one rank. It is built in all ranks at the same time: that joins them (process
    groups, links). Then `run` is called, and `close` if it came to its end.

    records: the records of all links to and from other clouds.
    received: the records of incoming links, by rank of the sender, for senders whose own record
        may be lost with them.
    control: the control links. None if there is one rank.
    peers: the record of each other rank's heartbeats.
    is_stopped: True if the run has ended early on request.
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
        send_report(self.control.out[0], lines)

    def needs(self, lost: frozenset[int]) -> bool:
        """Return whether this rank cannot continue once these have ended or become silent."""
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
