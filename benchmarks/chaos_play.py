"""One run of benchmarks/chaos.py: its faults one after the other, gone on with as a user would."""

from __future__ import annotations

import contextlib
import importlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks.chaos_faults import FAULTS, NotInjected, Repair, Target
from benchmarks.chaos_record import Fault, Outcome
from benchmarks.chaos_runs import Run
from xcloud.base.project import MODEL_DIR, project_root
from xcloud.launch.failures import EXIT_START_AGAIN
from xcloud.record.events import EVENTS_FILE
from xcloud.record.summary import read_summary

MAX_ATTEMPTS = 8  # after one fault
ENDED_BY_SIGNAL = (EXIT_START_AGAIN, 130, 128 + signal.SIGTERM)  # asked to once, twice
ORPHANS_WITHIN_S = 6.0  # launch.END_WITHIN_S, and some


class Defect(Exception):
    """verdict: hang, orphans or unexplained."""

    def __init__(self, verdict: str, detail: str):
        super().__init__(detail)
        self.verdict = verdict


def write_record_as_told(run: Run) -> None:
    """By the command that a run names whose monitor was killed."""
    told = re.findall(r"record: python -m xcloud (monitor .+)", run.said())
    if told and read_summary(run.first).get("status") != "finished":
        words = [sys.executable, "-m", "xcloud", *told[-1].split()]
        subprocess.run(words, cwd=project_root(), stdout=subprocess.DEVNULL)


class Disturbed:
    """One run, its faults one after the other. deadline_s: within which it must go on."""

    def __init__(
        self, run: Run, outcome: Outcome, target: Target, deadline_s: float, every: int
    ) -> None:
        self.run, self.outcome, self.target = run, outcome, target
        self.deadline_s, self.every = deadline_s, every
        self.fault: Fault | None = None  # the last one that was injected
        self.is_over = False
        self._faulted_s = 0.0
        self._victim: int | None = None
        self._base_step = self._num_attempts = self._num_evaluations = self._said_before = 0
        self._repair: Repair = None
        self._resumes_before = self._lost_before = 0

    def play(self) -> None:
        """Raises Defect."""
        self.run.start()
        for fault in self.outcome.faults:
            self.target.is_last = fault is self.outcome.faults[-1]
            if not self._await_moment(fault):
                break
            self._inject(fault)
        self._until(lambda: self.is_over)
        self._count()

    # --- when

    def _await_moment(self, fault: Fault) -> bool:
        """Whether the run still goes on when the moment for this fault has come."""
        dice = self.target.dice
        if fault.phase == "start":  # of the ranks, also of those that the fault before has ended
            self._until(lambda: self.is_over or self._is_settled() or self._is_noticed())
            self._pause(1.5 * dice.random())
        else:
            self._until(lambda: self.is_over or self._is_settled())
            self._count()
            if fault.phase == "step":
                self._pause(0.5 * dice.random())
            self._until(self._coming(fault.phase), every_s=0.0005)
        return not self.is_over

    def _coming(self, phase: str) -> Callable[[], bool]:
        """Whether a phase has come."""
        if phase == "checkpoint":
            until_s = time.monotonic() + 5  # each may be written between two looks
            return lambda: self.is_over or self._is_writing() or time.monotonic() > until_s
        if phase == "evaluation":
            before = self._evaluations()
            return lambda: self.is_over or self._evaluations() > before
        if phase == "end":
            return lambda: self.is_over or (self.run.first / MODEL_DIR).exists()
        return lambda: True

    def _is_writing(self) -> bool:
        with contextlib.suppress(OSError):  # a folder was deleted meanwhile
            return any(self.run.first.glob("checkpoints/*/.rank*"))
        return False

    def _num_told(self) -> int:
        """Bytes of events."""
        with contextlib.suppress(OSError):
            return (self.run.first / EVENTS_FILE).stat().st_size
        return 0

    def _evaluations(self) -> int:
        with contextlib.suppress(OSError):
            return (self.run.first / EVENTS_FILE).read_text().count('"event":"quality"')
        return 0

    def _is_noticed(self) -> bool:
        return self.fault is not None and self.fault.noticed_s is not None

    def _is_settled(self) -> bool:
        """It has saved twice since the last fault: once may have been under way already."""
        if self.target.undo:
            return False
        newest = (*self.run.agreed_steps(), 0)[0]
        return newest >= self._base_step + (2 if self.fault else 1) * self.every

    def _pause(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        self._until(lambda: self.is_over or time.monotonic() > until_s)

    def _until(self, is_so: Callable[[], bool], every_s: float = 0.01) -> None:
        """Raises Defect if nothing at all happens for deadline_s, or not this for long."""
        started_s = changed_s = time.monotonic()
        before = None
        while not is_so():
            now_s, after = time.monotonic(), (self._num_attempts, self._num_told())
            if after != before or self.target.undo:
                changed_s, before = now_s, after
            if max(now_s - changed_s, (now_s - started_s) / 10) > self.deadline_s:
                raise Defect("hang", f"{now_s - changed_s:.0f} s, at {self._where()}")
            self.target.undo_due(time.monotonic())
            if not self.is_over:
                self._look()
            time.sleep(every_s)

    def _where(self) -> str:
        return f"agreed step {self.run.agreed_steps()[:1]}, processes {self.run.alive()}"

    # --- what

    def _inject(self, fault: Fault) -> None:
        target, self._base_step = self.target, (*self.run.agreed_steps(), 0)[0]
        target.rank = target.dice.randrange(self.run.num_ranks)
        target.length_s, self._faulted_s = 0.0, time.monotonic()
        self._victim = None if "line" in fault.kind else target.rank
        self._said_before = len(self.run.said())
        self.run.failed.clear()
        try:
            repair = FAULTS[self.outcome.form][fault.kind](target)
        except NotInjected as why:
            fault.detail = str(why)
            return
        fault.verdict, fault.length_s = "recovered", round(target.length_s, 1)
        self.fault, self._repair, self._num_attempts = fault, repair, 0

    def _look(self) -> None:
        """Go on with a run that has ended; see what has become of the fault."""
        code, fault = self.run.poll(), self.fault
        new = self.run.said()[self._said_before :] if fault is not None else ""
        if fault is not None and fault.noticed_s is None:
            if self.run.has_noticed(self._victim, new):
                fault.noticed_s = round(time.monotonic() - self._faulted_s, 2)
        if code is None:
            return
        if left := self._left_behind():
            raise Defect("orphans", f"processes {left}, exit code {code}")
        if self._repair is not None:
            self._repair()
            self._repair = None
        if code == 0:
            write_record_as_told(self.run)
            self.is_over = True
            return
        if fault is None:
            raise Defect("unexplained", f"exit code {code} before any fault")
        last = causes(new)[-1:] or [""]
        if "no checkpoint is one that every rank can resume from" in last[0]:
            fault.verdict, fault.detail = "refused", last[0]
            self.run.begin_anew()
            self._base_step = 0
        elif code not in ENDED_BY_SIGNAL and code > 0 and not last[0]:
            raise Defect("unexplained", f"exit code {code} without a cause")
        if self._num_attempts == MAX_ATTEMPTS:
            raise Defect("unexplained", f"{MAX_ATTEMPTS} attempts after {fault.kind}: {last[0]}")
        self._num_attempts += 1
        self._said_before = len(self.run.said())
        self.run.start()

    def _left_behind(self) -> list[int]:
        until_s = time.monotonic() + ORPHANS_WITHIN_S
        while (left := self.run.alive()) and time.monotonic() < until_s:
            time.sleep(0.05)
        return left

    def _count(self) -> None:
        if self.fault is None or self.fault.steps_lost is not None:
            return
        jobs = importlib.import_module("benchmarks.chaos_jobs")
        resumes, lost = jobs.resumes_of(self.run.first)
        self.fault.restarts = max(0, resumes - self._resumes_before)
        self.fault.steps_lost = max(0, lost - self._lost_before)
        self._resumes_before, self._lost_before = resumes, lost


def causes(said: str) -> list[str]:
    """Lines that name a cause."""
    signs = ("xcloud:", "start again", "Error:", "Exception:", "LinkClosed:", "LinkTimeout:")
    return [line[:400] for line in said.splitlines() if any(sign in line for sign in signs)]
