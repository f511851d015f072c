"""Run a sweep: check every point, skip finished ones, report failures, end with the report.
Independent of Hydra: the launcher plugin provides how a point is composed and run.

Exit codes: 0 success, 1 some points failed, 2 refused before anything started, 130 Ctrl+C.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xcloud.base.errors import ConfigError, XcloudError
from xcloud.base.settings import Positive, settings
from xcloud.base.units import human_duration, human_seconds, score_name, score_text
from xcloud.cluster.transport import num_cores
from xcloud.job.config import EXPERIMENT_FILE, write
from xcloud.record.summary import read_summary
from xcloud.sweep.children import Children
from xcloud.sweep.points import Overrides, Point, name_points, same_overrides
from xcloud.sweep.state import LOCK_FILE, Decision, SweepState

FINISHED, SOME_FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
_VERBS = {"run": "runs", "again": "runs again", "skip": "is kept", "resume": "resumes"}
MOST_REASONS = 10  # shown of why points are invalid

Compose = Callable[[Sequence[str]], Any]
RunHere = Callable[[Point, Path], None]


@settings("hydra.launcher")
class LauncherSettings:
    """stop_on_failure: no further point starts after a failure. parallel: points at once.
    accept_changes: keep finished points even if code or config has changed since. also: every
    point again with these."""

    stop_on_failure: bool = False
    parallel: Positive = 1
    accept_changes: bool = False
    also: Mapping[str, Any] | None = None


def check_name(name: object) -> None:
    """Raises ConfigError. name: of a sweep; None: it gets one."""
    if name is not None and not re.fullmatch(r"\w[\w.-]*", str(name), re.ASCII):
        raise ConfigError(
            f"sweep must be a name of letters, digits, '_', '-' and '.', for it is a folder and "
            f"an MLflow tag; got {name!r}"
        )


@dataclass
class _Running:
    """A point at work."""

    point: Point
    run_dir: Path
    future: Future[str | None]
    started_s: float


@dataclass
class Sweep:
    """One sweep; `run` runs it."""

    name: str
    folder: Path
    settings: LauncherSettings = field(default_factory=LauncherSettings)
    causes: dict[Overrides, str] = field(default_factory=dict)  # why points failed
    _took_s: list[float] = field(default_factory=list)  # of the points that have ended
    _todo: list[Decision] = field(default_factory=list)

    def run(self, asked: Sequence[Overrides], compose: Compose, run_here: RunHere) -> int:
        """asked: the overrides of each point of the grid. Returns the exit code."""
        points, wrong = _composed(asked, compose)
        if wrong:
            self._forget_folder()
            return refuse(_reasons(wrong, asked))
        try:
            state = SweepState(self.folder)
            with state.lock(), sigterm_as_interrupt():
                return self._run(points, state, run_here)
        except ConfigError as error:
            return refuse([str(error)])

    def _run(self, points: list[Point], state: SweepState, run_here: RunHere) -> int:
        from xcloud.sweep.report import close_sweep, prepare

        earlier = [
            tuple(entry["overrides"])
            for entry in state.points.values()
            if not any(same_overrides(entry["overrides"], point.overrides) for point in points)
        ]
        name_points(points, earlier)
        for point in points:
            point.config.sweep, point.config.label = self.name, point.label
        decisions = state.decide(points, self.settings.accept_changes)
        self._todo = [decision for decision in decisions if decision.verdict != "skip"]
        self._announce(decisions, len(earlier))
        tracker = points[0].experiment.tracker
        prepare(self.name, tracker, [point.settings for point in points])
        try:
            if self.settings.parallel == 1:
                self._one_by_one(state, run_here)
            else:
                self._several(state)
        except (KeyboardInterrupt, SystemExit):
            left = self._num_left + len(self.causes)
            _say(f"\nsweep {self.name}: interrupted, {left} of {len(decisions)} points are left")
            usual = self.folder == Path("multirun", self.name).absolute()
            _say(f"continue it:    {self.command}")
            _say(f"the table now:  python -m xcloud report {self.name if usual else self.folder}")
            return INTERRUPTED
        close_sweep(self.folder, tracker)
        if self.causes:
            not_tried = f", {self._num_left} not tried (stop_on_failure)" * bool(self._num_left)
            which = "all of these" if self._num_left else "them"
            failed = f"{len(self.causes)} of {len(self._todo)} points failed{not_tried}"
            _say(f"{failed}; to run {which} again, and nothing else:\n{self.command}")
        return SOME_FAILED if self.causes else FINISHED

    @property
    def command(self) -> str:
        """The command that continues this sweep."""
        words = [word for word in sys.argv if not word.startswith("sweep=")]
        script = os.path.relpath(words[0]) if os.path.exists(words[0]) else words[0]
        return shlex.join(["python", script, *words[1:], f"sweep={self.name}"])

    @property
    def _num_left(self) -> int:
        return len(self._todo) - len(self._took_s)

    @property
    def _starts_no_more(self) -> bool:
        return self.settings.stop_on_failure and bool(self.causes)

    def _announce(self, decisions: Sequence[Decision], num_others: int) -> None:
        todo, done = self._todo, len(decisions) - len(self._todo)
        count = f"{len(decisions)} point{'s' if len(decisions) > 1 else ''}"
        parts = [f"sweep {self.name}: {count}", f"{len(todo)} to run"]
        parts += [f"{done} finished before"] * bool(done)
        parts += [f"{num_others} more recorded by other commands"] * bool(num_others)
        _say(", ".join(parts))
        for decision in decisions:
            if decision.why:
                _say(f"  {decision.point.name} {_VERBS[decision.verdict]}; {decision.why}")
        if any(d.verdict == "again" and "changed since" in d.why for d in decisions):
            _say("  (to keep finished points as they are: hydra.launcher.accept_changes=true)")
        if todo:
            _say(f"  to continue it later: {self.command}")
        if any(getattr(decision.point.experiment, "follow_up", ()) for decision in todo):
            _say("  points of a sweep run no follow_up; what they leave is in their run folders")
        parallel, cores = self.settings.parallel, num_cores()
        ranks = sorted(decision.point.experiment.cluster.num_processes for decision in todo)
        if parallel > 1 and (needed := sum(ranks[-parallel:])) > cores:
            _say(
                f"  warning: {parallel} points at once are {needed} ranks on {cores} cores; they "
                "slow each other down, so do not trust step times of this sweep"
            )

    def _one_by_one(self, state: SweepState, run_here: RunHere) -> None:
        for number, decision in enumerate(self._todo, 1):
            _say(f"\n[{number}/{len(self._todo)}] {decision.point.name}")
            started_s, cause, run_dir = time.monotonic(), None, self.folder
            try:
                run_dir = state.begin(decision, self.settings.parallel)
                run_here(decision.point, run_dir)
            except Exception as error:
                cause = _one_line(error)
            self._ended(decision.point, run_dir, cause, time.monotonic() - started_s)
            if self._starts_no_more:
                return

    def _several(self, state: SweepState) -> None:
        waiting, parallel = list(self._todo), self.settings.parallel
        children = Children(parallel, _say)
        with self._at_work(children) as (running, pool):
            while running or (waiting and not self._starts_no_more):
                while waiting and len(running) < parallel and not self._starts_no_more:
                    running.append(self._start(waiting.pop(0), state, pool, children))
                wait([one.future for one in running], return_when=FIRST_COMPLETED)
                for one in [one for one in running if one.future.done()]:
                    running.remove(one)
                    self._close(one)

    @contextmanager
    def _at_work(self, children: Children) -> Iterator[tuple[list[_Running], ThreadPoolExecutor]]:
        """Running points, and threads that wait for them; if interrupted, all are ended."""
        running: list[_Running] = []
        with ThreadPoolExecutor(self.settings.parallel) as pool:
            try:
                yield running, pool
            except BaseException:
                _say(f"ending {len(running)} runs ...")
                children.end()
                raise

    def _start(
        self, decision: Decision, state: SweepState, pool: ThreadPoolExecutor, children: Children
    ) -> _Running:
        point, run_dir = decision.point, self.folder / decision.folder
        number = 1 + self._todo.index(decision)
        _say(f"[{number}/{len(self._todo)}] {point.name} starts")
        try:
            state.begin(decision, self.settings.parallel)
            write(point.config, run_dir / EXPERIMENT_FILE)
            future = pool.submit(children.run, point, run_dir)
        except OSError as error:  # a full disk ends no sweep
            future = Future()
            future.set_exception(error)
        return _Running(point, run_dir, future, time.monotonic())

    def _close(self, one: _Running) -> None:
        error = one.future.exception()
        cause = one.future.result() if error is None else _one_line(error)
        self._ended(one.point, one.run_dir, cause, time.monotonic() - one.started_s)

    def _ended(self, point: Point, run_dir: Path, cause: str | None, took_s: float) -> None:
        self._took_s.append(took_s)
        if cause is None:
            text = f"finished in {human_duration(took_s)}{_figures(run_dir)}"
        else:
            self.causes[point.overrides] = cause
            text = f"FAILED after {human_duration(took_s)}: {cause}"
            if self._num_left:
                text += "; no other starts" if self._starts_no_more else "; the others continue"
        if self._num_left and not self._starts_no_more:
            done = len(self._took_s)
            left_s = sum(self._took_s) / done * self._num_left / self.settings.parallel
            text += f" ({done} of {len(self._todo)} done, about {human_duration(left_s)} left)"
        _say(f"{point.name}: {text}")

    def _forget_folder(self) -> None:
        """Remove the folder that Hydra has already made for a refused sweep."""
        by_hydra = {"multirun.yaml", LOCK_FILE}
        if self.folder.is_dir() and {*os.listdir(self.folder)} <= by_hydra:
            for name in by_hydra:
                (self.folder / name).unlink(missing_ok=True)
            self.folder.rmdir()


def refuse(reasons: Sequence[str]) -> int:
    for reason in reasons:
        print(f"xcloud: {reason}", file=sys.stderr, flush=True)
    return REFUSED


def _composed(
    asked: Sequence[Overrides], compose: Compose
) -> tuple[list[Point], list[tuple[Overrides, str]]]:
    """All points without duplicates; and the invalid ones, each with the reason."""
    points: dict[str, Point] = {}
    wrong = []
    for index, overrides in enumerate(asked):
        try:
            point = Point.of(index, overrides, compose(overrides))
            if point.identity not in points:
                point.experiment.check()
        except XcloudError as error:
            wrong.append((overrides, _one_line(error)))
        else:
            points.setdefault(point.identity, point)
    names = {point.config.sweep for point in points.values()}
    if len(names) > 1:
        wrong.append((("sweep=...",), "all points of a sweep have one sweep=NAME"))
    return list(points.values()), wrong


def _reasons(wrong: Sequence[tuple[Overrides, str]], asked: Sequence[Overrides]) -> list[str]:
    shared = set(asked[0]).intersection(*asked)
    lines = [f"the sweep is refused, nothing was started; {len(wrong)} of {len(asked)} points:"]
    by_reason: dict[str, list[Overrides]] = {}  # all seeds of an invalid setting share one
    for overrides, reason in wrong:
        by_reason.setdefault(reason, []).append(overrides)
    for reason, alike in list(by_reason.items())[:MOST_REASONS]:
        own = " ".join(word for word in alike[0] if word not in shared) or " ".join(alike[0])
        more = f" (and {len(alike) - 1} more)" if len(alike) > 1 else ""
        lines.append(f"  {own}{more}: {reason}")
    if len(by_reason) > MOST_REASONS:
        lines.append(f"  and {len(by_reason) - MOST_REASONS} more reasons")
    return lines


def _figures(run_dir: Path) -> str:
    """Score, step time and ratio of a point, in short."""
    summary = read_summary(run_dir)
    parts = [
        f"{score_name(name)} {score_text(name, value)}"
        for name, value in list(summary.get("quality", {}).items())[:1]
        if value is not None
    ]
    step_s = (summary.get("step_time_s") or {}).get("median")
    ratio = (summary.get("compression_ratio") or {}).get("total")
    parts += [f"{human_seconds(step_s)} a step"] if step_s is not None else []
    parts += [f"ratio {ratio:.2f}x"] if ratio is not None else []
    return "".join(f", {part}" for part in parts)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if isinstance(error, XcloudError) else f"{type(error).__name__}: {lines[0]}"


def _say(text: str) -> None:
    # One write: lines of concurrent points stay whole.
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """A terminated sweep ends its runs and says so, like an interrupted one."""
    try:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
