"""A rank as a process that a launcher has started: it reads what it is to run, finds the other
ranks, runs, and says in its run folder and by its exit code how it has ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from xcloud.job.config import Settings
from xcloud.job.job import Job
from xcloud.launch.failures import EXIT_FAILED, EXIT_START_AGAIN, failed, write_failure
from xcloud.launch.one_rank import DONE, STOPPED, Process, join, run_rank
from xcloud.net.gloo_link import GlooTransport
from xcloud.net.memory_transport import MemoryTransport, in_threads
from xcloud.net.transport import Rendezvous, Transport
from xcloud.rank.agreement import Verdict, rendezvous_here, table_of
from xcloud.rank.restarts import rendezvous_at_any_time
from xcloud.rank.stop_signal import StopSignal
from xcloud.record.files import rank_file
from xcloud.record.reporter import RankState
from xcloud.security.audit import audit_file, set_aside


class RankProcess(Process):
    """A rank that the launcher of this machine has started, and whose settings it has checked.

    says: True if it prints what it does.
    """

    state: RankState
    by_torchrun = False

    stop_signals: tuple[signal.Signals, ...] = (signal.SIGUSR1,)

    def __init__(self, file: Path, run_dir: Path, rank: int, says: bool = False) -> None:
        self.file = file
        self.run_dir = run_dir
        self.rank = rank
        run_dir.mkdir(parents=True, exist_ok=True)
        # A file of an earlier run goes before anything can fail.
        rank_file(run_dir, rank, "error.json").unlink(missing_ok=True)
        set_aside(audit_file(run_dir, rank))
        state = RankState(run_dir, rank, torchrun=self.by_torchrun, says=says)
        super().__init__(StopSignal(), state)
        # From here on a signal asks for a stop instead of ending the process.
        self.asked.install(*self.stop_signals, exit_code=EXIT_START_AGAIN)

    def main(self) -> NoReturn:
        """Run the rank, then end the process."""
        code = 0
        ending = DONE
        try:
            if self.run():
                code = EXIT_START_AGAIN
                ending = STOPPED
        except BaseException as error:
            code = EXIT_FAILED
            ending = failed(error)
            # What has failed is said by `fail` alone.
            self.state.says = False
            code = self.fail(error)
        finally:
            self.state.close(ending)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            # Background threads of a failed rank may sit in a receive for ever: do not wait.
            os._exit(code)

    def run(self) -> bool:
        """Run the rank. Return whether the run has ended early, as it was asked to."""
        settings = self.read()
        # Told before it joins, as others may lose it while it waits.
        job = settings.job
        self.state.may_leave = self.rank not in job.roster.essential
        rendezvous, verdict = join(
            job,
            table_of(settings.compared),
            rank=self.rank,
            run_dir=self.run_dir,
            find_others=lambda: self.rendezvous(job),
        )
        return self.play(settings, rendezvous, verdict)

    def play(self, settings: Settings, rendezvous: Rendezvous, verdict: Verdict) -> bool:
        """Run what all ranks have agreed on. Return whether it has ended early."""
        job = settings.job
        # Several ranks in one process: threads that take turns (docs/decisions/0015).
        if job.cluster.num_processes < job.cluster.num_ranks:
            return run_in_threads(
                settings, run_dir=self.run_dir, asked=self.asked, state=self.state
            )
        return run_rank(
            settings,
            run_dir=self.run_dir,
            verdict=verdict,
            process=self,
            transport=self.transport(job, rendezvous=rendezvous),
        )

    def transport(self, job: Job, rendezvous: Rendezvous) -> Transport:
        """Return what joins this rank to the others."""
        carrier = job.cluster.carrier
        if carrier is None:
            return GlooTransport(rendezvous)
        return carrier.transport(rendezvous)

    def read(self) -> Settings:
        """Return the settings that this rank is to run."""
        return Settings.load(self.file)

    def rendezvous(self, job: Job) -> Rendezvous:
        """Find the other ranks."""
        # In an elastic job ranks come at any time, and may come again.
        find = rendezvous_at_any_time if job.roster.is_elastic else rendezvous_here
        return find(job, self.rank, self.run_dir)

    def fail(self, error: BaseException) -> int:
        """Record why this rank has failed. Return the exit code."""
        return write_failure(self.run_dir, rank=self.rank, error=error)


def tie_to_parent(parent: int) -> None:
    """End with the parent, whatever ends it; leave Ctrl+C to the parent, which ends all ranks."""
    # Ctrl+C goes to the launcher, which asks its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    # The parent may have ended before the line above.
    if sys.platform == "linux" and os.getppid() != parent:
        sys.exit("the parent is gone")


def end_with_parent() -> None:
    """Have the kernel end this rank with the process that has started it. Linux only."""
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG. A rank that is stopped (SIGSTOP) would keep SIGTERM pending for ever.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def run_in_threads(settings: Settings, run_dir: Path, asked: StopSignal, state: RankState) -> bool:
    """Run each rank of a one-way job on one machine in a thread, over links in memory. Return
    whether the run has ended early.

    state: the state of rank 0.
    """
    job = settings.job
    table = table_of(settings.compared)

    def work(transport: MemoryTransport) -> bool:
        rank = transport.rank
        # Rank 0 has the state of the process itself.
        own = RankState(run_dir, rank) if rank else state
        _, verdict = join(
            job, table, rank=rank, run_dir=run_dir, find_others=lambda: transport.rendezvous
        )
        is_stopped = run_rank(
            settings, run_dir, verdict, process=Process(asked, state=own), transport=transport
        )
        if rank:
            own.close(STOPPED if is_stopped else DONE)
        return is_stopped

    # The last rank is the consumer, whose end is that of the run.
    return in_threads(job.cluster.num_ranks, work)[-1]
