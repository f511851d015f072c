"""Run the points of a study, each in a process: keep finished ones, go on with interrupted ones,
report failures. Sweeps and claims (experiments/claims/reproduce.py) use the same runner.
Independent of Hydra: others compose the points.

Each point is a process, python -m xcloud.study.runner RUN_DIR. Its output goes to run.log in its
folder, and up to its closing table to the screen, prefixed with the point's name.

Exit codes of a sweep: 0 success, 1 some points failed, 2 refused before anything started, 130
Ctrl+C.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Literal, Protocol

from xcloud.base import wording
from xcloud.base.errors import ConfigError, RunFailed, XcloudError
from xcloud.base.project import run_command
from xcloud.base.run_folder import LOCK_FILE
from xcloud.base.settings import Positive, settings
from xcloud.base.terminal import prepare_process, say, signals_to_stop
from xcloud.base.units import human_duration, human_seconds, score_name, score_text
from xcloud.feature_list import FIGURES
from xcloud.job.config import EXPERIMENT_FILE, Settings
from xcloud.job.misfits import misfits
from xcloud.launch.failures import EXIT_START_AGAIN
from xcloud.launch.processes import RunStopped, num_threads
from xcloud.record.run_record import RunRecord
from xcloud.record.summary import SUMMARY_FILE, read_summary
from xcloud.study.point_process import OUTPUT_FILE, start_point
from xcloud.study.points import Decision, Overrides, Point, SweepState, name_points, same_overrides
from xcloud.tracking.mlflow_store import legal
from xcloud.tracking.tracker import Tracker

FINISHED = 0
SOME_FAILED = 1
REFUSED = 2
INTERRUPTED = 130
_VERBS = {"run": "runs", "again": "runs again", "skip": "is kept", "resume": "resumes",
          "follow": "is followed"}  # fmt: skip
MAX_REASONS = 10  # shown of why points are invalid
SAY_EVERY_S = 5.0  # while points are checked

Compose = Callable[[Sequence[str]], Any]


@settings("hydra.launcher")
class LauncherSettings:
    """How the points of a sweep are run.

    stop_on_failure: start no other point after a failure.
    parallel: the number of points that run at once. For jobs, the number that are queued or run.
    accept_changes: keep finished points even if code or config has changed since.
    also: settings with which to run every point again.
    on: the place to run points. "here" runs them as processes of this command, "slurm" as jobs of
        a cluster, which continue without it, and "local" as such jobs of this machine.
    job: the parameters of submitit for a job, such as {timeout_min: 60, slurm_partition: gpu}.
    """

    stop_on_failure: bool = False
    parallel: Positive = 1
    accept_changes: bool = False
    also: Mapping[str, Any] | None = None
    on: Literal["here", "local", "slurm"] = "here"
    job: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.job is not None and self.on == "here":
            raise ConfigError("hydra.launcher.job is for hydra.launcher.on=slurm or local")


class PointRunner(Protocol):
    """A way to run points. `run` blocks: it is called from one thread per point. `end` is called
    once, at Ctrl+C."""

    def run(self, point: Point, run_dir: Path) -> None: ...
    def is_running(self, run_dir: Path) -> bool: ...
    def end(self) -> None: ...


def check_name(name: object) -> None:
    """Raise ConfigError for what is no name of a sweep. None: it gets one."""
    if name is not None:
        wording.check_name("sweep", name=name)


@dataclass
class Processes:
    """`run` blocks: call it from one thread per point. `end` ends all of them. parallel: points
    that compute at once."""

    parallel: int
    is_ending: bool = False
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(self, point: Point, run_dir: Path) -> None:
        """Raises RunFailed with the last line that the point said."""
        # The file says what the point is, so that the folder can be run by hand as well.
        point.named.write(run_dir / EXPERIMENT_FILE)
        # Points that compute at once share the cores.
        threads = num_threads(point.experiment.cluster.num_processes * self.parallel)
        process = start_point(run_dir, threads)
        self.running.append(process)
        # Ctrl+C may come between its start and the line above.
        if self.is_ending:  # it began while `end` went through the others
            process.terminate()
        last = ""
        assert process.stdout is not None
        with process.stdout, open(run_dir / OUTPUT_FILE, "ab", buffering=0) as log:
            for line in process.stdout:
                with suppress(OSError):  # a full disk ends no point
                    log.write(line.encode())
                last = line.strip() or last
                # The closing table of a point is in its log; on the screen it would bury the
                # others.
                if line.strip() and not (run_dir / SUMMARY_FILE).exists():
                    say(f"[{point.name}] {line.rstrip()}")
        # Its last line is the reason.
        if code := process.wait():
            raise RunFailed(last.removeprefix("xcloud: ") or f"it ended with exit code {code}")

    def is_running(self, run_dir: Path) -> bool:
        """Return whether a run that this command has not started is under way: none is."""
        return False

    def end(self) -> None:
        """Ask all runs to save the step under way and to end; at a second Ctrl+C within 60 s."""
        say("\nsaving what there is; once more, to end at once")
        # Waits without a limit until a second Ctrl+C ends the first block.
        with suppress(KeyboardInterrupt):
            self._terminate(None)
            return
        # No third one may interrupt the killing.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._terminate(60.0)

    def _terminate(self, within_s: float | None) -> None:
        self.is_ending = True
        for process in self.running:
            # First all are asked, then each is waited for, so that they save at the same time.
            process.terminate()  # those that have ended are left alone
        for process in self.running:
            try:
                process.wait(within_s)
            except subprocess.TimeoutExpired:
                process.kill()


class Runner:
    """Runs the points of a study in its folder and says how each of them ends. Hold the lock of
    `state` from `decide` to the end of `run`.

    on_finished: a function that is called for each finished point and its folder, one at a time;
        also for a point that had finished before.
    causes: the reasons for which points failed.
    """

    def __init__(
        self,
        state: SweepState,
        settings: LauncherSettings,
        processes: PointRunner,
        on_finished: Callable[[Point, Path], None] | None = None,
    ) -> None:
        self.causes: dict[Overrides, str] = {}
        self.todo: list[Decision] = []
        self._state = state
        self._settings = settings
        self._processes = processes
        self._on_finished = on_finished
        self._finished: list[Decision] = []  # before this runner
        self._took_s: list[float] = []  # of the points that have ended
        self._is_interrupted = False
        self._one_at_a_time = Lock()  # points share the file of the study

    @property
    def num_left(self) -> int:
        """How many of the points to run have not ended."""
        return len(self.todo) - len(self._took_s)

    def decide(self, points: Sequence[Point]) -> list[Decision]:
        """Decide what becomes of each point. Raises ConfigError if that cannot be told."""
        # Looks at every folder before anything is started.
        decisions = self._state.decide(
            points, self._settings.accept_changes, is_running=self._processes.is_running
        )
        self.todo = [decision for decision in decisions if decision.verdict != "skip"]
        self._finished = [decision for decision in decisions if decision.verdict == "skip"]
        return decisions

    def run(self) -> None:
        """Run what was decided. At Ctrl+C every run saves the step under way and ends; then
        KeyboardInterrupt is raised."""
        # Who learns from points hears of finished ones, too.
        for decision in self._finished:
            self._hand_over(decision.point, run_dir=self._state.folder / decision.folder)
        with ThreadPoolExecutor(self._settings.parallel) as pool:
            try:
                # list() waits for all and raises what a thread raised.
                list(pool.map(self._point, self.todo))
            except BaseException:
                self._is_interrupted = True
                # Points in the queue never start; those that run are ended.
                pool.shutdown(wait=False, cancel_futures=True)
                self._processes.end()
                raise

    @property
    def _starts_no_more(self) -> bool:
        return self._is_interrupted or (self._settings.stop_on_failure and bool(self.causes))

    def _hand_over(self, point: Point, run_dir: Path) -> None:
        if self._on_finished is not None:
            with self._one_at_a_time:
                self._on_finished(point, run_dir)

    def _point(self, decision: Decision) -> None:
        # A point in the queue when another has failed.
        if self._starts_no_more:
            return
        point = decision.point
        run_dir = self._state.folder
        # Its number among those to run, not among all.
        say(f"[{1 + self.todo.index(decision)}/{len(self.todo)}] {point.name}")
        started_s = time.monotonic()
        figures = ""
        cause = None
        try:
            # sweep.json is one file for all points.
            with self._one_at_a_time:
                run_dir = self._state.begin(decision, self._settings.parallel)
            self._processes.run(point, run_dir)
            figures = _figures(run_dir)
            self._hand_over(point, run_dir=run_dir)
        except Exception as error:
            cause = _one_line(error)
        # Every run has been asked to end, so its failure says nothing.
        if not self._is_interrupted:
            self._ended(point, figures, cause, took_s=time.monotonic() - started_s)

    def _ended(self, point: Point, figures: str, cause: str | None, took_s: float) -> None:
        self._took_s.append(took_s)
        if cause is None:
            text = f"finished in {human_duration(took_s)}{figures}"
        else:
            self.causes[point.overrides] = cause
            text = f"FAILED after {human_duration(took_s)}: {cause}"
            if self.num_left and self._starts_no_more:
                text += "; no other starts"
            elif self.num_left:
                text += "; the others continue"
        if self.num_left and not self._starts_no_more:
            done = len(self._took_s)
            # Mean so far, and as many at once as run.
            left_s = sum(self._took_s) / done * self.num_left / self._settings.parallel
            text += f" ({done} of {len(self.todo)} done, about {human_duration(left_s)} left)"
        say(f"{point.name}: {text}")


def say_verdicts(decisions: Sequence[Decision]) -> None:
    """Say which points resume, run again or are kept in spite of changes, and why."""
    for decision in decisions:
        if decision.why:
            say(f"  {decision.point.name} {_VERBS[decision.verdict]}; {decision.why}")


@contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Let every signal to stop raise KeyboardInterrupt, as Ctrl+C does, while the block lasts."""
    usual = {
        number: signal.signal(number, signal.default_int_handler) for number in signals_to_stop()
    }
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


@dataclass
class Sweep:
    """One sweep; `run` runs it.

    again: the command or call by which a user continues the sweep.
    drops_invalid: points that cannot run do not refuse the others. A sweeper needs this if it
        learns from each point what it asks for next.
    closes: the table and the pictures follow at once; otherwise whoever runs more points makes
        them.
    tracker: the tracker that records the runs, set once points have been asked for.
    causes: the reasons for which points failed or cannot run.
    """

    name: str
    folder: Path
    settings: LauncherSettings
    processes: PointRunner
    again: str
    drops_invalid: bool = False
    closes: bool = True
    tracker: Tracker | None = None
    causes: dict[Overrides, str] = field(default_factory=dict)
    _folders: dict[Overrides, Path] = field(default_factory=dict)

    def run(self, asked: Sequence[Overrides], compose: Compose) -> int:
        """asked: the overrides of each point of the grid. Returns the exit code."""
        # All points are composed and checked before one starts: a typo in the last one costs no
        # hours.
        points, wrong = composed_points(asked, compose)
        if wrong and not self.drops_invalid:
            self._forget_folder()
            reasons = reasons_of(wrong, asked)
            return refuse("the sweep is refused, nothing was started; " + reasons[0], *reasons[1:])
        # A sweeper that asked for a point needs an answer for each.
        for reason, refused in wrong.items():
            for overrides in refused:
                self.causes[overrides] = reason
                say(f"left out: {' '.join(overrides)}: {reason}")
        if not points:
            return REFUSED
        unique = {point.identity: point for point in reversed(points)}  # the first of equal ones
        try:
            state = SweepState(self.folder)
            with state.lock():
                code = self._run([*reversed(unique.values())], state)
        except ConfigError as error:
            code = refuse(str(error))
        # Equal points are run once, and their results are those of all.
        ran = {
            p.identity: self._folders[p.overrides] for p in points if p.overrides in self._folders
        }
        for point in points:  # those that are equal to another one as well
            if point.identity in ran:
                self._folders[point.overrides] = ran[point.identity]
        return code

    def summary_of(self, overrides: Overrides) -> dict[str, Any]:
        """Return the figures of a point that has run. Raises RunFailed, with the cause, if it has
        not finished."""
        folder = self._folders.get(overrides)
        summary = read_summary(folder) if folder else {}
        if summary.get("status") != "finished":
            cause = self.causes.get(overrides) or summary.get("cause") or "it has not run"
            raise RunFailed(f"{' '.join(overrides)}: {cause}")
        return summary

    def _run(self, points: list[Point], state: SweepState) -> int:
        # Imports pandas and matplotlib, which a refused sweep does not need.
        from xcloud.study.report import close_sweep, page_in_mlflow

        # Points of other commands with this name keep their rows and their names.
        earlier = [
            tuple(entry["overrides"])
            for entry in state.points.values()
            if not any(
                same_overrides(entry["overrides"], other=point.overrides) for point in points
            )
        ]
        name_points(points, earlier)
        for point in points:
            point.sweep = self.name
        runner = Runner(state, settings=self.settings, processes=self.processes)
        decisions = runner.decide(points)
        # Known before they run, so that a sweeper finds a point that fails.
        for decision in decisions:
            self._folders[decision.point.overrides] = self.folder / decision.folder
        self._announce(decisions, todo=runner.todo, num_others=len(earlier))
        tracker = self.tracker = points[0].experiment.tracker
        # Beside the first point: MLflow's import and page take seconds.
        page = self.name, tracker, [point.settings for point in points]
        Thread(target=page_in_mlflow, args=page, name="sweep page", daemon=True).start()
        try:
            runner.run()
        # SystemExit: a signal that the launcher has turned into one.
        except (KeyboardInterrupt, SystemExit):
            left = runner.num_left + len(runner.causes)
            say(f"\nsweep {self.name}: interrupted, {left} of {len(decisions)} points are left")
            say(f"continue it:    {self.again}")
            say(f"the table now:  python -m xcloud report {os.path.relpath(self.folder)}")
            return INTERRUPTED
        # Points of earlier calls may have failed, too.
        self.causes |= runner.causes
        if self.closes:
            close_sweep(self.folder, tracker)
        if not runner.causes:
            return FINISHED
        failed = f"{len(runner.causes)} of {len(runner.todo)} points failed"
        which = "them"
        if runner.num_left:
            failed += f", {runner.num_left} not tried (stop_on_failure)"
            which = "all of these"
        say(f"{failed}; to run {which} again, and nothing else:\n{self.again}")
        return SOME_FAILED

    def _announce(
        self, decisions: Sequence[Decision], todo: Sequence[Decision], num_others: int
    ) -> None:
        done = len(decisions) - len(todo)
        text = f"sweep {self.name}: {len(decisions)} point{'s' * (len(decisions) > 1)}"
        text += f", {len(todo)} to run" + f", {done} finished before" * bool(done)
        say(text + f", {num_others} more recorded by other commands" * bool(num_others))
        say_verdicts(decisions)
        if any(d.verdict == "again" and "changed since" in d.why for d in decisions):
            say("  (to keep finished points as they are: hydra.launcher.accept_changes=true)")
        if todo:
            say(f"  to continue it later: {self.again}")
        if any(getattr(decision.point.experiment, "follow_up", ()) for decision in todo):
            say("  points of a sweep run no follow_up; what they leave is in their run folders")

    def _forget_folder(self) -> None:
        """Remove the folder that Hydra has already made for a refused sweep."""
        # Only if nothing of a sweep is in it yet.
        by_hydra = {"multirun.yaml", LOCK_FILE}
        if self.folder.is_dir() and {*os.listdir(self.folder)} <= by_hydra:
            for name in by_hydra:
                (self.folder / name).unlink(missing_ok=True)
            self.folder.rmdir()


def command_again(name: str) -> str:
    """Return the command line of this process as one that continues the sweep of this name."""
    # The name is given at the end, so one that was typed is left out.
    words = [word for word in sys.argv if not word.startswith("sweep=")]
    program = run_command()
    if Path(words[0]).name == "run.py":
        program = f"python {shlex.quote(os.path.relpath(words[0]))}"
    typed = [word.removeprefix("++") for word in words[1:]]  # which entry.main has put there
    return f"{program} {shlex.join([*typed, f'sweep={name}'])}"


def refuse(*reasons: str) -> int:
    for reason in reasons:
        say(f"xcloud: {reason}", error=True)
    return REFUSED


def composed_points(
    asked: Sequence[Overrides], compose: Compose
) -> tuple[list[Point], dict[str, list[Overrides]]]:
    """Return a point for each of the overrides that can run, and the others by reason."""
    points: list[Point] = []
    checked = set[str]()
    trackers: list[Any] = []
    wrong: dict[str, list[Overrides]] = {}  # all seeds of an invalid setting share a reason
    odd = Counter[str]()
    said_at_s = time.monotonic()
    for number, overrides in enumerate(asked):
        if time.monotonic() > said_at_s + SAY_EVERY_S:
            said_at_s = time.monotonic()
            say(f"checked {number} of {len(asked)} points")
        try:
            point = Point.of(overrides, compose(overrides))
            # Seeds of one setting have the same files, which are looked at once for each identity.
            if point.identity not in checked:
                checked.add(point.identity)
                point.experiment.check()
                odd.update(misfits(point.experiment))
            # One store is asked once, as it may be far away.
            if (tracker := point.config.plain["tracker"]) not in trackers:
                point.experiment.tracker.check()
                trackers.append(tracker)
            points.append(point)
        # One line of all seeds of an invalid setting.
        except XcloudError as error:
            wrong.setdefault(_one_line(error), []).append(overrides)
    for text, num in odd.items():
        say(f"{num} of {len(asked)} points: {text}")
    return points, wrong


def reasons_of(wrong: Mapping[str, Sequence[Overrides]], asked: Sequence[Overrides]) -> list[str]:
    # What all points have in common explains nothing.
    shared = set(asked[0]).intersection(*asked)
    num = sum(map(len, wrong.values()))
    lines = [f"{num} of {len(asked)} points:"]
    for reason, (first, *others) in list(wrong.items())[:MAX_REASONS]:
        own = " ".join(word for word in first if word not in shared) or " ".join(first)
        if others:
            own += f" (and {len(others)} more)"
        lines.append(f"  {own}: {reason}")
    if len(wrong) > MAX_REASONS:
        lines.append(f"  and {len(wrong) - MAX_REASONS} more reasons")
    return lines


def _figures(run_dir: Path) -> str:
    """Score, step time and ratio of a point, in short."""
    # Numbers by the names of the tracker, as the table has them.
    summary = read_summary(run_dir)
    known = legal(RunRecord(summary, FIGURES).metrics)
    score = next(iter(summary.get("quality", ())), "")
    texts: dict[str, Callable[[float], str]] = {
        score: lambda value: f"{score_name(score)} {score_text(score, value)}",
        "step_time_s": lambda value: f"{human_seconds(value)} a step",
        "compression_ratio": lambda value: f"ratio {value:.2f}x",
        "bytes_per_token": lambda value: f"{value:,.1f} B a token",
    }
    return "".join(f", {text(known[name])}" for name, text in texts.items() if name in known)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # An error of the program is named by its class, as its text alone may say nothing.
    if isinstance(error, XcloudError):
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}"


def main() -> int:
    """Run one point. Ctrl+C is handled by the sweep."""
    parser = argparse.ArgumentParser("python -m xcloud.study.runner", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--parent", type=int, required=True, help="process id of the sweep")
    arguments = parser.parse_args()
    # A sweep that is killed with kill -9 leaves no point running.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end with the sweep
        # The sweep had ended before the line above.
        if os.getppid() != arguments.parent:
            return 1
    from xcloud.features.checkpoints.resume import check_can_go_on
    from xcloud.launch.local import run

    try:
        file = arguments.run_dir / EXPERIMENT_FILE
        run(Settings.load(file), run_dir=arguments.run_dir, resumes=check_can_go_on)  # a point may
    except XcloudError as error:
        say(f"xcloud: {error}")
        return 1
    except RunStopped:
        return EXIT_START_AGAIN
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    prepare_process()
    sys.exit(main())
