"""One rank as a process, whatever starts it and whatever its role: it joins the
others, compares with them what is to run, lives, and leaves its last words, a record of what it
sent, and why it failed.

READ THIS FIRST. A run on one machine starts `main` once per rank (processes.py); on several
machines torchrun starts it in each cloud (docs/several-machines.md).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import singledispatch
from pathlib import Path
from typing import Any, NoReturn

import torch

from xcloud.base.errors import ConfigError, LinkError
from xcloud.experiment import Experiment
from xcloud.features.checkpoints.common_step import newest_common
from xcloud.features.checkpoints.resume import RankCheckpoints
from xcloud.features.checkpoints.saving import StopSignal
from xcloud.features.one_way.consumer import ConsumerRank
from xcloud.features.one_way.job import OneWayExperiment
from xcloud.features.one_way.producer import ProducerRank
from xcloud.job import config as configs
from xcloud.job.job import Job
from xcloud.launch.failures import EXIT_FAILED, EXIT_START_AGAIN, check_gpu, failed, write_failure
from xcloud.net.gloo_link import GlooTransport
from xcloud.net.transport import Meeting, Transport
from xcloud.rank.agreement import Table, Verdict, agree, meet_here, table_of
from xcloud.rank.restarts import meet_at_any_time
from xcloud.rank.role import RankContext, Role
from xcloud.record.events import EVENTS_FILE
from xcloud.record.files import CheckpointSteps, has_events
from xcloud.record.intake import Intake
from xcloud.record.reporter import EventFile, RankState, Reporter
from xcloud.security.audit import write_rank_audit
from xcloud.train.stage_rank import StageRank

DONE, STOPPED = "has done its part", "has stopped as it was asked to, and saved its last step"
LAST_WORDS_S = 0.3


def join(
    job: Job, table: Table, rank: int, run_dir: Path, meet: Callable[[], Meeting]
) -> tuple[Meeting, Verdict]:
    """Compare with the others what is to run and what it goes on from. table: what this rank runs.
    meet: with the others, in a place that is called once this one has read its checkpoints. Raises
    ConfigError in a rank that cannot go on."""
    held = {}
    if CheckpointSteps(run_dir).steps():
        held = RankCheckpoints.of(job, rank, run_dir, table["setting"]).table()
    meeting = meet()
    return meeting, agree(job, meeting, table, held, newest_common)


@singledispatch
def role_of(job: Job, rank: int) -> type[Role[Any]]:
    """A further kind of job registers its own."""
    raise TypeError(f"a {type(job).__name__} has no roles")


@role_of.register
def _(job: Experiment, rank: int) -> type[Role[Any]]:
    return StageRank


@role_of.register
def _(job: OneWayExperiment, rank: int) -> type[Role[Any]]:
    return ConsumerRank if job.cluster.placement(rank).producer is None else ProducerRank


class Process:
    """What a rank's process has beside the rank. asked: whether it is to end early. state: what it
    does at the moment, for python -m xcloud status; None: nobody asks. Here the launcher of this
    machine looks after the ranks.

    roll_back: agreed checkpoints later than the one that the ranks go on from may be deleted. On
    one machine all of them are one user's.
    """

    roll_back = True
    crosses_owners = False
    """Clouds may have several owners."""

    def __init__(self, asked: StopSignal, state: RankState | None = None) -> None:
        self.asked, self.state = asked, state

    @contextmanager
    def taking_part(self, role: Role[Any], last_words: Callable[[], None]) -> Iterator[None]:
        """From when the rank has all its links to the end of its part. last_words: what it says
        where it is ended before."""
        if self.state is not None:
            self.state.lives = role.lives
        yield


def live(
    job: Job,
    run_dir: Path,
    settings: Mapping[str, str],
    verdict: Verdict,
    process: Process,
    transport: Transport,
) -> bool:
    """One rank's life, whatever its role, once the ranks have compared what they run. settings: as
    they have compared them. transport: joins it to the others. Returns whether the run has ended
    early, as asked."""
    rank, layout, roster, is_resumed = transport.rank, job.cluster, job.roster, has_events(run_dir)
    device = _device_of(job, rank)
    events = EventFile(run_dir / EVENTS_FILE) if rank == 0 else None
    intake = None
    if events is not None:
        intake = Intake(
            events, layout.cloud_of, job.max_steps, roster.may_report, clouds=tuple(layout.clouds)
        )
    # The role is there before anything is reported.
    reporter = Reporter(
        rank, layout.cloud_of(rank),
        events.append if events else lambda lines: role.report(lines), process.state,
        is_abroad=process.crosses_owners and layout.cloud_of(rank) != layout.cloud_of(0),
    )  # fmt: skip
    take = intake.take if intake else lambda peer, frame: None
    context = RankContext(
        job, settings, run_dir, device, reporter, take, verdict, process.asked, transport,
        is_resumed=is_resumed, roll_back=process.roll_back,
    )  # fmt: skip
    role: Role[Any] = role_of(job, rank)(context)

    def write_audit() -> None:
        sent, kinds = role.records, reporter.contents
        write_rank_audit(run_dir, rank, layout, sent, kinds, role.received)

    def last_words() -> None:  # if rank 0 still listens
        with contextlib.suppress(LinkError):
            reporter.flush()
            time.sleep(LAST_WORDS_S)
        write_audit()

    try:
        with process.taking_part(role, last_words):
            _play(role, verdict, reporter)
        return role.is_stopped
    except BaseException:
        last_words()  # the threads end with this process
        raise
    finally:
        if intake is not None and events is not None:
            intake.close()
            events.close()
        write_audit()


def _play(role: Role[Any], verdict: Verdict, reporter: Reporter) -> None:
    if role.rank in verdict.refused:
        raise ConfigError(verdict.text)
    if role.rank == 0 and verdict.text and not verdict.refused:
        reporter.note(verdict.text)
    with role.alive():
        role.run()
        reporter.flush()
        role.close()


def _device_of(job: Job, rank: int) -> torch.device:
    """What its cloud's settings say; "auto" takes a GPU if there is one."""
    cloud = job.cluster.cloud_of(rank)
    wanted = job.cluster.clouds[cloud].device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    check_gpu(cloud)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class RankProcess(Process):
    """Started by the launcher of this machine, which has checked what it gives its ranks. says:
    whether it prints what it does."""

    state: RankState

    stop_signals: tuple[signal.Signals, ...] = (signal.SIGUSR1,)

    def __init__(self, file: Path, run_dir: Path, rank: int, says: bool = False) -> None:
        self.file, self.run_dir, self.rank = file, run_dir, rank
        run_dir.mkdir(parents=True, exist_ok=True)
        for stale in ("error", "wire"):  # of an earlier run in this folder
            (run_dir / f"rank{rank}.{stale}.json").unlink(missing_ok=True)
        state = RankState(run_dir, rank, type(self) is not RankProcess, says=says)
        super().__init__(StopSignal(), state)
        self.asked.install(*self.stop_signals, exit_code=EXIT_START_AGAIN)

    def main(self) -> NoReturn:
        """Ends the process itself."""
        code, ending = 0, DONE
        try:
            if self.run():
                code, ending = EXIT_START_AGAIN, STOPPED
        except BaseException as error:
            code, ending, self.state.says = EXIT_FAILED, failed(error), False
            code = self.fail(error)
        finally:
            self.state.close(ending)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            # Background threads of a failed rank may sit in a receive for ever: do not wait.
            os._exit(code)

    def run(self) -> bool:
        """Returns whether the run has ended early, as asked."""
        config, job = self.read()
        table = table_of(configs.plain_settings(config))
        self.state.may_leave = self.rank not in job.roster.essential
        meeting, verdict = join(job, table, self.rank, self.run_dir, lambda: self.meet(job))
        return self.play(job, config, table, meeting, verdict)

    def play(
        self, job: Job, config: Any, table: Table, meeting: Meeting, verdict: Verdict
    ) -> bool:
        """What all ranks have agreed to run."""
        if job.cluster.num_processes < job.cluster.num_ranks:
            # Builds on this file.
            in_threads = importlib.import_module("xcloud.launch.ranks_in_threads")
            return bool(in_threads.live(job, table, self.run_dir, self.asked, self.state))
        carrier = job.cluster.carrier
        transport = GlooTransport(meeting) if carrier is None else carrier.transport(meeting)
        return live(job, self.run_dir, table["setting"], verdict, self, transport)

    def read(self) -> tuple[Any, Job]:
        config = configs.load(self.file)
        return config, configs.job_from_config(config)

    def meet(self, job: Job) -> Meeting:
        meet = meet_at_any_time if job.roster.is_elastic else meet_here
        return meet(job, self.rank, self.run_dir)

    def fail(self, error: BaseException) -> int:
        """Returns the exit code."""
        return write_failure(self.run_dir, self.rank, error)


def main(words: Sequence[str] | None = None) -> None:
    """One rank of a run. Ends the process itself."""
    parser = argparse.ArgumentParser(prog="python -m xcloud worker", description=main.__doc__)
    parser.add_argument("experiment", type=Path, help="run folder or experiment file")
    parser.add_argument("--rank", type=int, help="set by the launcher; torchrun sets it itself")
    parser.add_argument("--parent", type=int, help="process to end with; set by the launcher")
    parser.add_argument("--cloud", help="refuse to start if this rank is in another cloud")
    parser.add_argument("--run-dir", type=Path, help="where to write; needed with a file")
    parser.add_argument(
        "--roll-back", action="store_true",
        help="let agreed checkpoints be deleted that are later than the one all ranks go on from",
    )  # fmt: skip
    arguments = parser.parse_args(words)
    if arguments.parent is not None:
        _tie_to_parent(arguments.parent)
    place: Path = arguments.experiment
    file = place / configs.EXPERIMENT_FILE if place.is_dir() else place
    run_dir = (arguments.run_dir or file.parent).resolve()
    if arguments.rank is not None:
        RankProcess(file, run_dir, arguments.rank).main()
    if "RANK" not in os.environ:
        parser.error("start me with torchrun, or use run.py")
    if arguments.run_dir is None and not place.is_dir():
        parser.error(
            f"give --run-dir: the run is written there and may read there, and {file} may lie in "
            "any folder"
        )
    several_machines = importlib.import_module("xcloud.launch.several_machines")  # builds on this
    several_machines.live(file, run_dir, arguments.cloud, roll_back=arguments.roll_back)


def _tie_to_parent(parent: int) -> None:
    """End with the parent, whatever ends it; leave Ctrl+C to the parent, which ends all ranks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    if sys.platform == "linux" and os.getppid() != parent:
        sys.exit("the parent is gone")


def end_with_parent() -> None:
    """The kernel ends this rank with the process that has started it. Linux only."""
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG. A rank that is stopped (SIGSTOP) would keep SIGTERM pending for ever.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
