"""One run on this machine, from its settings to summary.json; also the rest of one that was
interrupted."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xcloud.base.errors import ConfigError, RunFailed
from xcloud.base.project import run_command
from xcloud.base.run_folder import owned
from xcloud.base.terminal import say, signals_to_stop
from xcloud.job.config import EXPERIMENT_FILE, Settings, this_clouds_policy
from xcloud.job.job import Job
from xcloud.job.misfits import announce
from xcloud.launch.failures import (
    EXIT_COMES_AGAIN,
    START_EACH_CLOUD,
    check_gpu,
    own_failures,
)
from xcloud.launch.processes import LocalRanks, RunStopped
from xcloud.record.files import (
    CheckpointSteps,
    forget_launcher,
    has_events,
    note_attempt,
    read_json,
    replace_text,
)
from xcloud.record.summary import SUMMARY_FILE, drop_unfinished
from xcloud.security.audit import set_aside
from xcloud.show.monitor import Monitor

UNSAVED = "it has no checkpoint to resume from (the cache keeps its pretraining)"

CanGoOn = Callable[[Settings, Path], None]


def run(
    settings: Settings, run_dir: Path, resumes: CanGoOn | None = None, more_follows: bool = False
) -> dict[str, Any]:
    """Run an experiment on this machine, in a folder that nobody else writes to meanwhile, and
    return its summary.

    resumes: check of an earlier run in run_dir, which is resumed if there is one and the check
        raises nothing (features/checkpoints/resume.py).
    more_follows: True if this process has more to run. Then a signal while the record is written
        raises RunStopped as well.

    Raises ConfigError before anything starts, RunFailed naming the first cause when a rank fails,
    RunStopped on the first Ctrl+C, SIGTERM, SIGUSR1 or SIGHUP, once the ranks have saved the step
    under way, KeyboardInterrupt on the second; every rank is gone by then and summary.json says
    what happened. A first signal after the ranks have ended waits until the record is written,
    and changes nothing else; a second one ends that too.
    """
    # Before the folder is owned: a wrong setting leaves nothing behind.
    _check_job(settings.job)
    with owned(run_dir):
        _check_folder(settings, run_dir, resumes)
        return run_in_owned(
            settings,
            run_dir,
            resumes=resumes is not None,
            more_follows=more_follows,
            ranks_of=_ranks,
            again=f"{run_command()} {shlex.quote(f'resume={run_dir}')}",
        )


def run_in_owned(
    settings: Settings,
    run_dir: Path,
    resumes: bool,
    more_follows: bool,
    ranks_of: Callable[[Job, Path, Path], LocalRanks],
    again: str,
    unsaved: str = UNSAVED,
) -> dict[str, Any]:
    """Run an experiment as `run` does, in a folder that this process owns.

    resumes: True if there is an earlier run in run_dir and it is resumed.
    ranks_of: returns the processes to start, for (job, run folder, file that they read).
    again: text that tells the user how to resume a run that was stopped.
    unsaved: text for a run that was stopped before it had a checkpoint.
    """
    settings.job.tracker.check()
    job = settings.job
    file = run_dir / EXPERIMENT_FILE
    # Ranks read it under another name until they have taken over the state; so a resume that fails
    # leaves the file of the run as it was.
    asked = run_dir / f"resumed.{file.name}" if resumes and file.exists() else file
    settings.write(asked)
    # A summary says that a run has ended, so the new attempt must not have one.
    drop_unfinished(run_dir)
    for stale in run_dir.glob("rank*.wire.json"):  # of a run here that may have had more ranks
        set_aside(stale)
    # Only a resumed run goes on counting what its earlier attempts sent.
    if not resumes:
        for stale in run_dir.glob("rank*.wire.earlier.json"):
            stale.unlink()
    monitor = Monitor(settings, run_dir)
    ranks = ranks_of(job, run_dir, asked)
    announce(job)

    cause: str | None = None
    signals = StopSignals(ranks.ask_to_stop)
    # Signals are handled from before the first rank starts until the record is written.
    with signals.handled():
        try:
            monitor.start()
            train(
                ranks,
                next_attempt=monitor.next_attempt,
                follow=lambda: _follow(ranks, monitor=monitor, file=file),
            )
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                by = "interrupted (Ctrl+C or SIGTERM)"
                if isinstance(error, RunStopped):
                    by = ranks.who_stopped(asked=monitor.attempt.stop_asked_of)
                cause = stopped_in_words(run_dir, by, again, unsaved=unsaved)
            else:
                cause = _cause(error)
            # The same exception with the words for a user.
            if isinstance(error, RunStopped):
                raise RunStopped(cause) from None
            raise
        finally:
            # From here on a first signal waits until the record is written.
            signals.writes_record = True
            # Also on any error of this process: no rank is left behind.
            ranks.end()
            if asked != file:
                asked.unlink(missing_ok=True)
            # What this block runs for, seen from `finally`.
            is_stopped = isinstance(sys.exception(), RunStopped)
            summary = monitor.finish(cause, is_stopped, is_raised=cause is not None)
            forget_launcher(run_dir)
            if signals.came_late and more_follows:
                raise RunStopped(cause or "The run finished; the runs after it were cancelled.")
    say(run_dir / SUMMARY_FILE)
    return summary


def _check_job(job: Job) -> None:
    """Raise ConfigError for what cannot run here."""
    # A policy that cannot be read would fail every rank.
    this_clouds_policy()  # each rank reads it
    # Only run.py chooses plans, before it comes here.
    if job.plan is not None:
        raise ConfigError("plan= is for one run of run.py: leave -m out, or plan=none")
    if job.cluster.between_owners:
        raise ConfigError(f"cluster/wan=sealed and mailbox: {START_EACH_CLOUD}")
    job.check()
    for name, cloud in job.cluster.clouds.items():
        if cloud.device == "cuda":
            check_gpu(name)


def _check_folder(settings: Settings, run_dir: Path, resumes: CanGoOn | None) -> None:
    """Raise ConfigError if the run can neither start in the folder nor resume from it."""
    if not has_events(run_dir):
        return
    if resumes is None:
        raise ConfigError(
            f"{run_dir} holds an earlier run; give another hydra.run.dir, move it away, or resume "
            f"with it: {run_command()} {shlex.quote(f'resume={run_dir}')}"
        )
    resumes(settings, run_dir)


def _ranks(job: Job, run_dir: Path, file: Path) -> LocalRanks:
    """Return the processes of a job, which read this file."""
    layout = job.cluster
    processes = range(layout.num_processes)
    clouds = [layout.placement(rank).cloud for rank in processes]
    return LocalRanks(
        run_dir,
        clouds,
        essential=job.roster.essential & set(processes),
        restart_s=job.roster.restart_s,
        liveness=layout.liveness,
        experiment_file=file,
        max_restarts=job.launch.max_restarts,
    )


def _follow(ranks: LocalRanks, monitor: Monitor, file: Path) -> bool:
    """Read new events. Return whether all ranks have joined.

    file: the experiment file of the folder. What the ranks read takes its place once they have
        taken the state over.
    """
    have_joined = monitor.poll()
    if monitor.attempt.trains and ranks.experiment_file != file:
        with contextlib.suppress(OSError):  # a full disk: it is tried again
            # From now on the run is that of the new file.
            replace_text(file, text=ranks.experiment_file.read_text("utf-8"))
            ranks.experiment_file = file
            monitor.keep(file)
    return have_joined


def _cause(error: BaseException) -> str:
    """Return why a run that nobody has stopped has ended early, for its summary."""
    if isinstance(error, RunFailed):
        return str(error)
    if isinstance(error, Exception):
        return f"{type(error).__name__}: {error}"
    return "the run was ended from outside"


def stopped_in_words(run_dir: Path, by: str, again: str, unsaved: str) -> str:
    """Return a text that says who stopped a run, and how to resume it from which step. again,
    unsaved: see run_in_owned."""
    agreed = CheckpointSteps(run_dir).agreed_steps()
    return f"{by}; " + (f"to resume from step {agreed[0]}: {again}" if agreed else unsaved)


def train(ranks: LocalRanks, next_attempt: Callable[[], None], follow: Callable[[], bool]) -> None:
    """Train to the end of the run, in as many attempts as that takes and the user allows.

    next_attempt: called before the ranks are restarted.
    follow: called often. It returns whether all ranks have joined.
    """
    folder = CheckpointSteps(ranks.run_dir)
    # Checkpoints that were there before this command.
    step = max(folder.agreed_steps(), default=0)
    num_restarts = Counter[str]()
    while True:
        note_attempt(ranks.run_dir, restarts_left=ranks.max_restarts - num_restarts["here"])
        ranks.start()
        try:
            return ranks.wait(meanwhile=follow)
        except RunFailed as error:
            # A rank that has named an error of its own would name it again.
            if EXIT_COMES_AGAIN in ranks.failed.values():
                raise
            agreed = folder.agreed_steps()
            if agreed and agreed[0] > step:  # what was lost is made up for
                step = agreed[0]
                num_restarts.clear()
            # Failures of other owners' ranks do not use up what is allowed here.
            where = "here" if own_failures(ranks.failed) else "elsewhere"
            if num_restarts[where] == ranks.max_restarts:
                raise
            # Without a checkpoint all would be repeated, unless another owner's cloud has
            # restarted and does so anyway: it joins the ranks here once they restart, too.
            failures = [read_json(path) for path in ranks.run_dir.glob("rank*.error.json")]
            if not agreed and not any(
                "has begun the run again" in str(one.get("message")) for one in failures
            ):
                raise
            num_restarts[where] += 1
            cause = "" if where == "here" else " for another cloud"
            again_from = f"from step {agreed[0]}" if agreed else "from the beginning"
            say(
                f"{error}\nall ranks start again {again_from} (restart {num_restarts[where]} of "
                f"at most {ranks.max_restarts}{cause} before the next checkpoint: "
                "launch.max_restarts)"
            )
            next_attempt()


@dataclass(eq=False)
class StopSignals:
    """The signals to stop: while `handled` lasts, the first one calls on_first, any later one
    raises KeyboardInterrupt.

    writes_record: True once nothing is left to do but to write the record of the run.
    came_late: True if the first signal came after that.
    """

    on_first: Callable[[], None]
    writes_record: bool = False
    came_late: bool = False
    _was_asked: bool = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals while the block lasts; outside the main thread, which alone gets signals,
        nothing is done."""
        before: dict[int, Any] = {}
        # Signals can be handled in the main thread only; elsewhere the caller has to.
        with contextlib.suppress(ValueError):
            for number in signals_to_stop():
                before[number] = signal.signal(number, self._take)
        try:
            yield
        finally:
            for handled, handler in before.items():
                signal.signal(handled, handler)

    def _take(self, number: int, frame: object) -> None:
        if self._was_asked:
            raise KeyboardInterrupt
        self._was_asked = True
        self.came_late = self.writes_record
        doing = "writing the record of the run" if self.came_late else "saving what there is"
        with contextlib.suppress(OSError):  # not print: it may be what was interrupted
            os.write(2, f"\n{doing}; once more, to end at once\n".encode())
        self.on_first()
