"""A run over several machines (docs/several-machines.md): torchrun starts its ranks, which watch
each other, and rank 0 starts the monitor, for no launcher does."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from xcloud.base.errors import ConfigError, DataError, LinkError
from xcloud.base.project import MODEL_DIR, module_paths, python_command
from xcloud.base.run_folder import check_owned_by_parent, owned
from xcloud.base.terminal import say, signals_to_stop
from xcloud.job import given
from xcloud.job.config import EXPERIMENT_FILE, Settings, this_clouds_policy
from xcloud.job.job import Job
from xcloud.job.misfits import announce
from xcloud.launch.failures import START_EACH_CLOUD, failed, leave_ending, write_failure
from xcloud.launch.own_progress import OwnProgress, what_left
from xcloud.launch.processes import WAYS_TO_STOP
from xcloud.launch.rank_process import RankProcess, end_with_parent
from xcloud.net.failure_detector import FailureDetector
from xcloud.net.rendezvous import Ending
from xcloud.net.transport import Rendezvous
from xcloud.rank.agreement import Verdict, rank_name
from xcloud.rank.restarts import rendezvous_under_torchrun
from xcloud.rank.role import Role, is_needed
from xcloud.record.events import EVENTS_FILE, EventReader
from xcloud.record.files import CheckpointSteps
from xcloud.record.summary import SUMMARY_FILE, drop_unfinished, read_summary

MONITOR_NOTE_S = 60.0  # how often to say that the monitor still writes the run's record
TABLE_WITHIN_S = 30.0  # of a run that has failed


class TorchrunProcess(RankProcess):
    """A rank that torchrun has started, perhaps on a machine of another owner.

    is_first_here: True for the first rank of its machine. The monitor reports rank 0. In every
        other cloud the first rank prints what it does.
    """

    crosses_owners = True
    by_torchrun = True

    def __init__(
        self, file: Path, run_dir: Path, rank: int, cloud: str | None, is_first_here: bool
    ) -> None:
        self.is_first_here = is_first_here
        self.stop_signals = tuple(signals_to_stop())
        super().__init__(file, run_dir, rank, says=self.is_first_here and rank != 0)
        leave_ending(rank, ending=Ending.FAILED)  # if it says nothing else
        self.asked.before_exit = partial(leave_ending, rank, Ending.STOPPED)
        self.cloud = cloud
        self.monitor: subprocess.Popen[bytes] | None = None
        self.detector: FailureDetector | None = None

    def read(self) -> Settings:
        settings = given.read_shared(self.file, run_dir=self.run_dir)  # it comes from elsewhere
        me = this_clouds_policy().me
        if settings.job.cluster.between_owners:
            raise ConfigError(f"cluster/wan=sealed and mailbox: {START_EACH_CLOUD}")
        _check_cloud(settings.job, rank=self.rank, cloud=self.cloud, me=me)
        return settings

    def rendezvous(self, job: Job) -> Rendezvous:
        # Where a cloud may be late, silence is no loss: who needs whom is the role's to say.
        needs = partial(is_needed, job, self.rank) if job.roster.is_elastic else bool
        self.detector = FailureDetector(
            rank=self.rank,
            num_ranks=job.cluster.num_ranks,
            liveness=job.cluster.liveness,
            name_of=partial(rank_name, job),
            on_lost=self._end_alone,
            needs=needs,
        )
        return rendezvous_under_torchrun(
            job, rank=self.rank, run_dir=self.run_dir, detector=self.detector, say=self._say
        )

    def _say(self, text: str) -> None:
        """Print a text in one rank of each machine, which speaks for it."""
        if self.is_first_here:
            say(text)

    @contextmanager
    def taking_part(self, role: Role[Any], final_report: Callable[[], None]) -> Iterator[None]:
        detector = self.detector
        assert detector is not None, "there is one from the rendezvous on"
        detector.connected(role.needs, final_report)
        try:
            with super().taking_part(role, final_report):
                yield
        except BaseException:
            detector.over.set()
            raise
        # Only a rank that has finished closes its link of heartbeats, so a broken one is a death.
        detector.leave()

    def play(self, settings: Settings, rendezvous: Rendezvous, verdict: Verdict) -> bool:
        """Run what all ranks have agreed on; one rank of each machine says how it goes."""
        job = settings.job
        check_started(job)
        check_unfinished(job, run_dir=self.run_dir)
        if self.is_first_here:
            keep_experiment(self.file, settings, run_dir=self.run_dir)
            announce(job)
        if verdict.from_step:
            self._say(f"resumes from step {verdict.from_step}")
        if self.is_first_here and self.rank:
            cloud = job.cluster.cloud_of(self.rank)
            seen = OwnProgress(job.max_steps, self._say, cloud=cloud, next_merge=job.next_merge)
            self.state.listener = seen.on_event
        if self.rank == 0:
            self.monitor = start_monitor(self.run_dir, file=self.file)
        is_stopped = super().play(settings, rendezvous, verdict)
        if is_stopped:
            # Its torchrun must not start it again, in any cloud.
            leave_ending(self.rank, ending=Ending.STOPPED)
            if self.rank:  # the monitor says it in the first cloud
                own = job.cluster.cloud_of(self.rank)
                self._say(stopped_by([*job.cluster.clouds], own, self.asked.was_asked))
                self._say_last_checkpoint()
        model = self.run_dir / MODEL_DIR
        self._say_what_left()
        if self.is_first_here and self.rank and not is_stopped and model.is_dir():
            say(f"this cloud's part of the model: {model.resolve()}")
        for clock in self.run_dir.glob("link-*.clock"):  # of emulated links, which have closed
            clock.unlink(missing_ok=True)
        if self.monitor is not None:
            self.state.enter("waiting for the monitor")
            if await_monitor(self.monitor) < 0:
                (self.run_dir / SUMMARY_FILE).unlink(missing_ok=True)  # of an earlier attempt
                again = ["monitor", str(self.run_dir), "--experiment", str(self.file), "--again"]
                say(
                    "the monitor was killed; to write the run's record: "
                    f"python -m xcloud {shlex.join(again)}"
                )
        return is_stopped

    def fail(self, error: BaseException) -> int:
        if self.detector is not None:
            self.detector.close()
        if isinstance(error, ConfigError | DataError):
            leave_ending(self.rank, ending=Ending.REFUSED)
        code = super().fail(error)
        self._say_how_to_go_on()
        return code

    def _end_alone(self, error: LinkError) -> None:
        """End the process from another thread: the main one may wait in torch for a lost rank."""
        code = write_failure(self.run_dir, rank=self.rank, error=error)
        self.state.close(failed(error))
        self._say_how_to_go_on()
        os._exit(code)

    def _say_what_left(self) -> None:
        """Print what left this cloud; the first cloud has it in its table."""
        if self.rank and (table := what_left(self.run_dir)):
            self._say(table)

    def _say_how_to_go_on(self) -> None:
        """Print what left and what is saved, behind the table of the failed run, which the monitor
        finishes before the starting command ends."""
        if self.monitor is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.monitor.wait(TABLE_WITHIN_S)
        self._say_what_left()
        self._say_last_checkpoint()

    def _say_last_checkpoint(self) -> None:
        steps = CheckpointSteps(self.run_dir).agreed_steps()
        if steps:
            self._say(f"last checkpoint: step {steps[0]}; give the same command in every cloud")


def keep_experiment(file: Path, settings: Settings, run_dir: Path) -> None:
    """Copy the experiment to the run folder, for `export` and the tracker, once all ranks have
    agreed to run it."""
    kept = run_dir / EXPERIMENT_FILE
    with contextlib.suppress(OSError):  # a full disk: the monitor says what it cannot write
        if file.resolve() != kept:
            settings.write(kept)


def start_monitor(run_dir: Path, file: Path) -> subprocess.Popen[bytes]:
    """Start the process that follows the events of rank 0, as no launcher watches the run."""
    drop_unfinished(run_dir)
    past = sum(1 for _ in EventReader(path=run_dir / EVENTS_FILE, warn=False))
    words = ["monitor", str(run_dir), "--experiment", str(file), "--parent", str(os.getpid())]
    command = python_command("xcloud", *words, "--past", str(past))
    return subprocess.Popen(command, env={**os.environ, **module_paths()})


def await_monitor(monitor: subprocess.Popen[bytes], note_s: float = MONITOR_NOTE_S) -> int:
    """Wait for the monitor, however long it measures, draws and stores: the run has ended well.
    Return its exit code, below 0 for a signal."""
    while True:
        try:
            return monitor.wait(note_s)
        except subprocess.TimeoutExpired:
            say(f"the run is done; process {monitor.pid} still writes its record")


def check_started(job: Job) -> None:
    """Raise ConfigError unless torchrun has started as many ranks as the job has.

    Called once the ranks have agreed on the file: its number of ranks is then the same in all.
    """
    started = int(os.environ["WORLD_SIZE"])
    num_ranks = job.cluster.num_processes
    if started != num_ranks:
        raise ConfigError(
            f"torchrun started {started} ranks in all, but the clouds of this experiment have "
            f"{num_ranks}; set --nproc-per-node of each cloud to its num_ranks"
        )


def check_unfinished(job: Job, run_dir: Path) -> None:
    """Raise ConfigError for a folder with a finished run.

    torchrun restarts a run that was interrupted with the same command, so that it resumes. A run
    that has come to its end must not restart.
    """
    summary = read_summary(run_dir)
    if summary.get("status") == "finished" and summary.get("num_steps", 0) >= job.max_steps:
        raise ConfigError(
            f"{run_dir} holds a finished run; give another --run-dir, or raise "
            "training.max_steps in every cloud's experiment file to train it longer"
        )


def stopped_by(clouds: Sequence[str], own: str, was_asked: bool) -> str:
    """Say in a cloud other than the first which cloud has stopped the run.

    own: name of this cloud.
    was_asked: True if the run was stopped here.
    """
    if was_asked:
        return f"stopped by {own} ({WAYS_TO_STOP})"
    others = [name for name in clouds if name != own]
    if len(others) == 1:
        return f"stopped by {others[0]}"
    return "stopped by another cloud or machine, whose terminal says so"


def cloud_meant(cloud: str | None, me: str | None) -> str | None:
    """Return this cloud, as --cloud or `me` of its policy names it. Raises ConfigError where they
    differ."""
    if me is not None and cloud not in (None, me):
        raise ConfigError(f"--cloud is {cloud!r}, but the policy of this cloud says me: {me}")
    return cloud or me


def _check_cloud(job: Job, rank: int, cloud: str | None, me: str | None) -> None:
    """Raise ConfigError for a rank of another cloud than --cloud or this cloud's policy says.

    me: the cloud that the policy names.
    """
    cloud = cloud_meant(cloud, me)
    if cloud is None or rank >= job.cluster.num_ranks:
        return  # too many ranks are refused when all have joined, whatever file they read
    found = job.cluster.placement(rank).cloud
    if cloud != found:
        raise ConfigError(
            f"this is rank {rank}, which belongs to cloud {found!r}, not {cloud!r}; start the "
            f"clouds with --node-rank in this order: {', '.join(job.cluster.clouds)}"
        )


def run_under_torchrun(
    file: Path, run_dir: Path, cloud: str | None, roll_back: bool = False
) -> None:
    """Run the rank that torchrun has started, then end the process."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's ranks would go on without it
        end_with_parent()
    is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    with contextlib.ExitStack() as held:
        if is_first_here:
            held.enter_context(owned(run_dir))
        elif "TORCHELASTIC_RUN_ID" in os.environ:  # the first one is torchrun's child as well
            check_owned_by_parent(run_dir)
        rank = int(os.environ["RANK"])
        process = TorchrunProcess(file, run_dir, rank, cloud=cloud, is_first_here=is_first_here)
        process.roll_back = roll_back
        process.main()
