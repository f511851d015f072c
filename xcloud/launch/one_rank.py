"""What one rank lives through, whatever starts it and whatever its role: it joins the others,
compares with them what is to run, plays its role, and leaves a final report and a record of what
it sent.

READ THIS FIRST. A run on one machine starts worker.py once per rank (processes.py); on several
machines torchrun starts it in each cloud (docs/several-machines.md).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import singledispatch
from pathlib import Path
from typing import Any

import torch

from xcloud.base.errors import LinkError
from xcloud.experiment import Experiment
from xcloud.features.checkpoints.common_step import newest_common
from xcloud.features.checkpoints.restored import restored
from xcloud.features.checkpoints.resume import RankCheckpoints
from xcloud.features.one_way.consumer import ConsumerRank
from xcloud.features.one_way.job import OneWayExperiment
from xcloud.features.one_way.producer import ProducerRank
from xcloud.job.audit_keys import audit_signer
from xcloud.job.config import Settings
from xcloud.job.job import Job
from xcloud.launch.failures import check_gpu
from xcloud.net.transport import Rendezvous, Transport
from xcloud.rank.agreement import ComparedTable, Verdict, agree
from xcloud.rank.role import RankContext, Role
from xcloud.rank.stop_signal import StopSignal
from xcloud.record.checkpoint_files import CheckpointFolder
from xcloud.record.events import EVENTS_FILE
from xcloud.record.files import CheckpointSteps, has_events
from xcloud.record.intake import ReportIntake
from xcloud.record.reporter import EventFile, RankState, Reporter
from xcloud.security.audit import write_rank_audit
from xcloud.train.stage_rank import StageRank

DONE = "has finished"
STOPPED = "has stopped as it was asked to, and saved its last step"
FINAL_REPORT_S = 0.3  # how long a rank that fails lets its last report travel


def join(
    job: Job, table: ComparedTable, rank: int, run_dir: Path, find_others: Callable[[], Rendezvous]
) -> tuple[Rendezvous, Verdict]:
    """Compare with the other ranks what is to run and from which checkpoint it resumes.

    table: the settings that this rank runs.
    find_others: returns the rendezvous. It is called once this rank has read its checkpoints.

    Raises ConfigError in a rank that cannot continue.
    """
    held = {}
    if CheckpointSteps(run_dir).steps():
        folder = CheckpointFolder(run_dir)
        held = RankCheckpoints(folder, rank, job.places, table["setting"]).table()
    rendezvous = find_others()
    return rendezvous, agree(job, rendezvous, mine=table, held=held, newest=newest_common)


@singledispatch
def role_of(job: Job, rank: int) -> type[Role[Any]]:
    """Return the class of a rank's role. A further kind of job registers its own."""
    raise TypeError(f"a {type(job).__name__} has no roles")


@role_of.register
def _(job: Experiment, rank: int) -> type[Role[Any]]:
    return StageRank


@role_of.register
def _(job: OneWayExperiment, rank: int) -> type[Role[Any]]:
    if job.cluster.placement(rank).producer is None:
        return ConsumerRank
    return ProducerRank


@dataclass(eq=False)
class Process:
    """The process of a rank, beside the rank itself. Here the launcher of this machine watches it.

    asked: the signal to end early.
    state: the record of what the rank does at the moment, which python -m xcloud status shows.
        None: none is kept.
    roll_back: True if agreed checkpoints may be deleted that are later than the one from which the
        ranks resume. On one machine all of them belong to one user.
    """

    asked: StopSignal
    state: RankState | None = None

    roll_back = True
    crosses_owners = False
    """Whether clouds may have several owners."""

    @contextmanager
    def taking_part(self, role: Role[Any], final_report: Callable[[], None]) -> Iterator[None]:
        """Hold the rank in the run, from full connection to the end of its part.

        final_report: sends what is left to say, where the rank is ended before.
        """
        if self.state is not None:
            self.state.peers = role.peers
        yield


def run_rank(
    settings: Settings, run_dir: Path, verdict: Verdict, process: Process, transport: Transport
) -> bool:
    """Run one rank to its end, whatever its role, once the ranks have compared what they run.

    transport: joins it to the others.

    Returns whether the run has ended early, as it was asked to.
    """
    job = settings.job
    rank = transport.rank
    layout = job.cluster
    is_resumed = has_events(run_dir)
    device = _device_of(job, rank)
    events = None
    intake = None
    if rank == 0:
        events = EventFile(run_dir / EVENTS_FILE)
        intake = ReportIntake(
            events,
            cloud_of=layout.cloud_of,
            max_steps=job.max_steps,
            may_report=job.roster.may_report,
            clouds=tuple(layout.clouds),
            num_boundaries=layout.num_ranks,  # a stage has a rank or more
            figures=job.figures,  # which say what else other ranks report
        )
    # The role is there before anything is reported.
    reporter = Reporter(
        rank,
        cloud=layout.cloud_of(rank),
        sink=events.append if events else lambda lines: role.report(lines),
        state=process.state,
        # Another owner's cloud is told no path of this machine.
        is_abroad=process.crosses_owners and layout.cloud_of(rank) != layout.cloud_of(0),
    )
    context = RankContext(
        job=job,
        settings=settings.compared,
        run_dir=run_dir,
        device=device,
        reporter=reporter,
        on_report=intake.take if intake else lambda peer, frame: None,
        verdict=verdict,
        asked=process.asked,
        transport=transport,
        is_resumed=is_resumed,
        roll_back=process.roll_back,
        restored=restored,
    )
    role: Role[Any] = role_of(job, rank)(context)

    sign = audit_signer(layout.cloud_of(rank))
    is_over = False

    def write_audit() -> None:
        write_rank_audit(
            run_dir,
            rank,
            layout,
            records=role.records,
            report_contents=reporter.contents,
            received=role.received,
            attempt=verdict.attempt,
            is_finished=is_over,
            sign=sign,
        )

    def final_report() -> None:  # if rank 0 still listens
        with contextlib.suppress(LinkError):
            reporter.flush()
            time.sleep(FINAL_REPORT_S)
        write_audit()

    try:
        with process.taking_part(role, final_report):
            _play(role, verdict, reporter)
        is_over = True
        return role.is_stopped
    except BaseException:
        final_report()  # the threads end with this process
        raise
    finally:
        if intake is not None and events is not None:
            intake.close()
            events.close()
        write_audit()


def _play(role: Role[Any], verdict: Verdict, reporter: Reporter) -> None:
    """Run a role from its first heartbeat until its links are closed."""
    if role.rank == 0 and verdict.text:
        reporter.note(verdict.text)
    with role.alive():
        role.run()
        reporter.flush()
        role.close()


def _device_of(job: Job, rank: int) -> torch.device:
    """Return the device that the cloud of a rank asks for; "auto" takes a GPU if there is one."""
    cloud = job.cluster.cloud_of(rank)
    wanted = job.cluster.clouds[cloud].device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    check_gpu(cloud)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
