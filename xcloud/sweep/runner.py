"""Run a sweep: check every point, skip finished ones, report failures, end with the report.
Independent of Hydra: the launcher plugin provides how a point is composed and run.

Exit codes: 0 success, 1 some points failed, 2 refused before anything started, 130 Ctrl+C.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xcloud.base.checks import check_choice, check_int
from xcloud.base.errors import ConfigError, XcloudError
from xcloud.base.units import human_duration, human_seconds
from xcloud.cluster.transport import num_cores
from xcloud.job.config import EXPERIMENT_FILE, write
from xcloud.launch.local import sigterm_as_interrupt
from xcloud.rank.interleaved import ADDRESS, check_takes_turns
from xcloud.record.scores import score_name, score_text
from xcloud.record.summary import read_summary
from xcloud.sweep.children import Children
from xcloud.sweep.conductor import InterleavingServer
from xcloud.sweep.points import Overrides, Point, name_points, same_overrides
from xcloud.sweep.state import LOCK_FILE, Decision, SweepState
from xcloud.sweep.step_ratio import record

TIMINGS = ("alone", "together")
FINISHED, SOME_FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
_VERBS = {"run": "runs", "again": "runs again", "skip": "is kept", "resume": "goes on"}
MOST_REASONS = 10  # shown of why points are invalid

Compose = Callable[[Sequence[str]], Any]
RunHere = Callable[[Point, Path], None]


@dataclass
class Sweep:
    """One sweep; `run` runs it. Settings: conf/hydra/launcher/xcloud.yaml."""

    name: str
    folder: Path
    stop_on_failure: bool = False
    parallel: int = 1
    accept_changes: bool = False
    timing: str = "alone"  # or "together": points make their steps in turns
    causes: dict[Overrides, str] = field(default_factory=dict)  # why points failed

    def run(self, asked: Sequence[Overrides], compose: Compose, run_here: RunHere) -> int:
        """asked: the overrides of each point of the grid. Returns the exit code."""
        points, wrong = _composed(asked, compose, self.timing == "together")
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
        from xcloud.sweep import view
        from xcloud.sweep.report import close_sweep

        earlier = [
            tuple(entry["overrides"])
            for entry in state.points.values()
            if not any(same_overrides(entry["overrides"], point.overrides) for point in points)
        ]
        name_points(points, earlier)
        for point in points:
            point.config.sweep, point.config.label = self.name, point.label
        decisions = state.decide(points, self.accept_changes)
        todo = [decision for decision in decisions if decision.verdict != "skip"]
        self._announce(decisions, len(earlier))
        tracker = points[0].experiment.tracker
        view.prepare(self.name, tracker, [point.settings for point in points])
        clock = _Clock(len(todo), self.parallel)
        try:
            if self.timing == "together" and len(todo) > 1:
                self._together(todo, state, clock)
            elif self.parallel == 1:
                self._one_by_one(todo, state, run_here, clock)
            else:
                self._several(todo, state, clock)
        except (KeyboardInterrupt, SystemExit):
            left = len(todo) - clock.num_done + len(self.causes)
            _say(f"\nsweep {self.name}: interrupted, {left} of {len(decisions)} points are left")
            usual = self.folder == Path("multirun", self.name).absolute()
            _say(f"continue it:    {self.command}")
            _say(f"the table now:  python -m xcloud report {self.name if usual else self.folder}")
            return INTERRUPTED
        close_sweep(self.folder, tracker)
        if self.causes:
            not_tried = len(todo) - clock.num_done
            _say(
                f"{len(self.causes)} of {len(todo)} points failed"
                + (f", {not_tried} not tried (stop_on_failure)" if not_tried else "")
                + f"; to run {'all of these' if not_tried else 'them'} again, and nothing else:"
                + f"\n{self.command}"
            )
        return SOME_FAILED if self.causes else FINISHED

    @property
    def command(self) -> str:
        """The command that continues this sweep."""
        words = [word for word in sys.argv if not word.startswith("sweep=")]
        script = os.path.relpath(words[0]) if os.path.exists(words[0]) else words[0]
        return shlex.join(["python", script, *words[1:], f"sweep={self.name}"])

    def _announce(self, decisions: Sequence[Decision], num_others: int) -> None:
        todo = [decision for decision in decisions if decision.verdict != "skip"]
        done = len(decisions) - len(todo)
        count = f"{len(decisions)} point{'s' if len(decisions) > 1 else ''}"
        parts = [f"sweep {self.name}: {count}", f"{len(todo)} to run"]
        if done:
            parts.append(f"{done} finished before")
        if num_others:
            parts.append(f"{num_others} more recorded by other commands")
        _say(", ".join(parts))
        for decision in decisions:
            if decision.why:
                _say(f"  {decision.point.name} {_VERBS[decision.verdict]}; {decision.why}")
        if any(d.verdict == "again" and "changed since" in d.why for d in decisions):
            _say("  (to keep finished points as they are: hydra.launcher.accept_changes=true)")
        if self.timing == "together" and len(todo) == 1:
            _say("  one point is left to run: it has no others to be timed with")
        if todo:
            _say(f"  to continue it later: {self.command}")
        if any(decision.point.experiment.next_experiment for decision in todo):
            _say("  points of a sweep run no follow_up; what they leave is in their run folders")
        self._warn_of_crowding([decision.point for decision in todo])

    def _warn_of_crowding(self, points: Sequence[Point]) -> None:
        ranks = sorted((point.experiment.cluster.num_ranks for point in points), reverse=True)
        needed, cores = sum(ranks[: self.parallel]), num_cores()
        if self.parallel > 1 and needed > cores:
            _say(
                f"  warning: {self.parallel} points at once are {needed} ranks on {cores} "
                f"cores; they slow each other down, so do not trust step times of this sweep"
            )

    def _one_by_one(
        self, todo: Sequence[Decision], state: SweepState, run_here: RunHere, clock: _Clock
    ) -> None:
        for number, decision in enumerate(todo, 1):
            _say(f"\n[{number}/{len(todo)}] {decision.point.name}")
            started_s, cause, run_dir = time.monotonic(), None, self.folder
            try:
                run_dir = state.begin(decision, self.parallel)
                run_here(decision.point, run_dir)
            except Exception as error:
                cause = _one_line(error)
            self._ended(decision.point, run_dir, cause, time.monotonic() - started_s, clock)
            if cause and self.stop_on_failure:
                return

    def _several(self, todo: Sequence[Decision], state: SweepState, clock: _Clock) -> None:
        children = Children(self.parallel, _say)
        waiting = list(todo)
        running: dict[Future[str | None], tuple[Point, Path, float]] = {}
        with ThreadPoolExecutor(self.parallel) as pool:
            try:
                while running or (waiting and not (self.causes and self.stop_on_failure)):
                    while waiting and len(running) < self.parallel:
                        if self.causes and self.stop_on_failure:
                            break
                        decision = waiting.pop(0)
                        point, run_dir = decision.point, self.folder / decision.folder
                        _say(f"[{len(todo) - len(waiting)}/{len(todo)}] {point.name} starts")
                        future = self._start(decision, state, pool, children)
                        running[future] = (point, run_dir, time.monotonic())
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        point, run_dir, started_s = running.pop(future)
                        elapsed_s = time.monotonic() - started_s
                        self._ended(point, run_dir, _cause(future), elapsed_s, clock)
            except BaseException:
                _say(f"ending {len(running)} runs ...")
                children.end()
                raise

    def _start(
        self, decision: Decision, state: SweepState, pool: ThreadPoolExecutor, children: Children
    ) -> Future[str | None]:
        try:
            run_dir = state.begin(decision, self.parallel)
            write(decision.point.config, run_dir / EXPERIMENT_FILE)
        except OSError as error:  # a full disk ends no sweep
            failed = Future[str | None]()
            failed.set_exception(error)
            return failed
        return pool.submit(children.run, decision.point, run_dir)

    def _together(self, todo: Sequence[Decision], state: SweepState, clock: _Clock) -> None:
        """All points at once, but one at a time makes steps, ends or loads."""
        running: list[_Running] = []
        finished: list[_Running] = []
        with InterleavingServer() as conductor, ThreadPoolExecutor(len(todo)) as pool:
            children = Children(1, _say, {ADDRESS: conductor.address})
            try:
                for number, decision in enumerate(todo, 1):
                    point, run_dir = decision.point, self.folder / decision.folder
                    _say(f"[{number}/{len(todo)}] {point.name} starts")
                    future = self._start(decision, state, pool, children)
                    running.append(_Running(point, run_dir, future, time.monotonic()))
                    conductor.await_ready(run_dir, future.done)
                for number in itertools.count():
                    # There and back, so that a steady drift favours none.
                    for one in running[:: -1 if number % 2 else 1]:
                        seconds = conductor.turn(one.run_dir, one.future.done)
                        if seconds is not None and number > 0:  # the first is the warm-up
                            one.rounds[number] = seconds
                        if one.future.done():
                            running.remove(one)
                            cause = _cause(one.future)
                            elapsed_s = time.monotonic() - one.started_s
                            self._ended(one.point, one.run_dir, cause, elapsed_s, clock)
                            finished += [one] if cause is None else []
                    if not running:
                        break
            except BaseException:
                _say(f"ending {len(running)} runs ...")
                conductor.close()
                children.end()
                raise
        for line in record([(one.point, one.run_dir, one.rounds) for one in finished]):
            _say(line)

    def _ended(
        self, point: Point, run_dir: Path, cause: str | None, elapsed_s: float, clock: _Clock
    ) -> None:
        clock.count(elapsed_s)
        if cause is None:
            text = f"finished in {human_duration(elapsed_s)}{_figures(run_dir)}"
        else:
            self.causes[point.overrides] = cause
            text = f"FAILED after {human_duration(elapsed_s)}: {cause}"
            if clock.num_left:
                text += "; no other starts" if self.stop_on_failure else "; the others go on"
        goes_on = clock.num_left and not (self.causes and self.stop_on_failure)
        # Points that take turns end one soon after the other.
        left = f" ({clock.describe()})" if goes_on and self.timing == "alone" else ""
        _say(f"{point.name}: {text}{left}")

    def _forget_folder(self) -> None:
        """Remove the folder that Hydra has already made for a refused sweep."""
        by_hydra = {"multirun.yaml", LOCK_FILE}
        if self.folder.is_dir() and {*os.listdir(self.folder)} <= by_hydra:
            for name in by_hydra:
                (self.folder / name).unlink(missing_ok=True)
            self.folder.rmdir()


@dataclass
class _Running:
    """A point among others that take turns. rounds: seconds of its turns."""

    point: Point
    run_dir: Path
    future: Future[str | None]
    started_s: float
    rounds: dict[int, float] = field(default_factory=dict)


class _Clock:
    """Counts finished points and estimates the remaining time."""

    def __init__(self, num_points: int, parallel: int) -> None:
        self.num_points, self.parallel = num_points, parallel
        self.num_done, self.total_s = 0, 0.0

    def count(self, elapsed_s: float) -> None:
        self.num_done += 1
        self.total_s += elapsed_s

    @property
    def num_left(self) -> int:
        return self.num_points - self.num_done

    def describe(self) -> str:
        left_s = self.total_s / self.num_done * self.num_left / self.parallel
        return f"{self.num_done} of {self.num_points} done, about {human_duration(left_s)} left"


def check_settings(
    name: object, parallel: object, timing: str = "alone", stop_on_failure: bool = False
) -> None:
    """Raises ConfigError."""
    check_int("hydra.launcher.parallel", parallel, 1)
    check_choice("hydra.launcher.timing", timing, TIMINGS)
    if timing == "together" and parallel != 1:
        raise ConfigError(
            f"hydra.launcher.timing=together lets one point compute at a time, and "
            f"hydra.launcher.parallel={parallel} asks for more: leave one of the two out"
        )
    if timing == "together" and stop_on_failure:
        raise ConfigError(
            "hydra.launcher.timing=together starts all points before the first step, so "
            "hydra.launcher.stop_on_failure=true could keep none from starting: leave one of the "
            "two out"
        )
    if name is not None and not re.fullmatch(r"\w[\w.-]*", str(name), re.ASCII):
        raise ConfigError(
            f"sweep must be a name of letters, digits, '_', '-' and '.', for it is a folder and "
            f"an MLflow tag; got {name!r}"
        )


def refuse(reasons: Sequence[str]) -> int:
    for reason in reasons:
        print(f"xcloud: {reason}", file=sys.stderr, flush=True)
    return REFUSED


def _composed(
    asked: Sequence[Overrides], compose: Compose, in_turns: bool
) -> tuple[list[Point], list[tuple[Overrides, str]]]:
    """All points without duplicates; and the invalid ones, each with the reason."""
    points: dict[str, Point] = {}
    wrong = []
    for index, overrides in enumerate(asked):
        try:
            point = Point.of(index, overrides, compose(overrides))
            if point.identity not in points:
                point.experiment.check()
                if in_turns:
                    check_takes_turns(point.experiment)
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


def _cause(future: Future[str | None]) -> str | None:
    """Why the point failed, or None."""
    error = future.exception()
    return future.result() if error is None else _one_line(error)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if isinstance(error, XcloudError) else f"{type(error).__name__}: {lines[0]}"


def _say(text: str) -> None:
    # One write: lines of concurrent points stay whole.
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
