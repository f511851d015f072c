"""Faults at random moments of small runs: python -m benchmarks.chaos [--runs N] [--each N]

Each run gets several faults one after the other (chaos_faults.py) and is gone on with as a user
would until it ends. Its weights and all losses that it told must be those of an undisturbed run of
the job, or an error must name the cause; nothing may hang, and no process be left. Exit code 1
otherwise. Real processes (chaos_runs.py) of toy jobs (chaos_jobs.py): by run.py, by torchrun, and
on two machines whose line is cut (network namespaces, need root, as "disk full" does). Linux.

--each: faults in a run. --minutes: begin no run after so long. --at-once: runs side by side.
--kinds, --jobs, --forms: only these. --record: append a line for each run. --known: file for the
results of undisturbed runs. --keep: folders of good runs too.
`python -m benchmarks.chaos --table RECORD...` prints what records hold.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import namespaces
from benchmarks.chaos_faults import FAULTS, WEIGHTS, NotInjected, Repair, Target
from benchmarks.chaos_runs import IMPORTED, Launched, Machines, Run, Torchrun
from xcloud.project import MODEL_DIR, commit
from xcloud.record.events import EVENTS_FILE
from xcloud.record.summary import read_summary
from xcloud.run.launch import EXIT_START_AGAIN

FORMS = {"launcher": 6, "machines": 5, "torchrun": 1}  # how often each is drawn
PHASES = ("start", "step", "step", "step", "checkpoint", "evaluation")
STEPS_FOR_A_FAULT = 12
TMPFS_BYTES = 6 << 20
MOST_ATTEMPTS = 8  # after one fault
_ENDED_BY_SIGNAL = (EXIT_START_AGAIN, 130, 128 + signal.SIGTERM)  # asked to once, twice
ORPHANS_WITHIN_S = 6.0  # launch.END_WITHIN_S, and some
KINDS = sorted({kind for faults in FAULTS.values() for kind in faults})


@dataclass
class Fault:
    """verdict: recovered, refused (an error named the cause), missed (not injected), or the defect
    that came after it: hang, orphans, unexplained. length_s: of one that lasts. steps_lost: done
    twice because of it, restarts: from a checkpoint (both also of the faults just before it, if
    the run had not got over them yet)."""

    kind: str
    phase: str
    verdict: str = "missed"
    detail: str = ""
    noticed_s: float | None = None
    steps_lost: int | None = None
    restarts: int = 0
    length_s: float = 0.0


@dataclass
class Outcome:
    """Of a run. verdict: equal, different, skipped, or what its last fault led to."""

    seed: int
    number: int
    job: str
    form: str
    faults: list[Fault]
    verdict: str = ""
    detail: str = ""
    wall_s: float = 0.0
    commit: str = ""
    folder: str = ""
    said: list[str] = field(default_factory=list)


GOOD = ("equal", "skipped")


class Defect(Exception):
    """verdict: hang, orphans or unexplained."""

    def __init__(self, verdict: str, detail: str):
        super().__init__(detail)
        self.verdict = verdict


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
        until_s, attempts = time.monotonic() + self.deadline_s, self._num_attempts
        while not is_so():
            if attempts != self._num_attempts or self.target.undo:  # counts from the last change
                until_s, attempts = time.monotonic() + self.deadline_s, self._num_attempts
            if time.monotonic() > until_s:
                raise Defect("hang", f"{self.deadline_s:g} s, at {self._where()}")
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
        if left := self._left_behind(code):
            raise Defect("orphans", f"processes {left}, exit code {code}")
        if self._repair is not None:
            self._repair()
            self._repair = None
        if code == 0:
            self.is_over = True
            return
        if fault is None:
            raise Defect("unexplained", f"exit code {code} before any fault")
        last = _causes(new)[-1:] or [""]
        if "no checkpoint that every rank can go on from" in last[0]:
            fault.verdict, fault.detail = "refused", last[0]
            self.run.begin_anew()
            self._base_step = 0
        elif code not in _ENDED_BY_SIGNAL and code > 0 and not last[0]:
            raise Defect("unexplained", f"exit code {code} without a cause")
        if self._num_attempts == MOST_ATTEMPTS:
            raise Defect("unexplained", f"{MOST_ATTEMPTS} attempts after {fault.kind}: {last[0]}")
        self._num_attempts += 1
        self._said_before = len(self.run.said())
        self.run.start()

    def _left_behind(self, code: int) -> list[int]:
        if isinstance(self.run, Machines) and code != 0:
            return []  # a monitor may still write its record, and nobody waits for that
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


class Lane:
    """Runs one after the other in folders of its own."""

    def __init__(
        self, folder: Path, expected: dict[str, Any], steps: int, deadline_s: float
    ) -> None:
        self.folder, self.expected, self.steps = folder, expected, steps
        self.deadline_s = deadline_s

    def one(self, outcome: Outcome) -> None:
        started_s, folder = time.monotonic(), self.folder / f"run{outcome.number}"
        folder.mkdir()
        outcome.folder, outcome.commit = str(folder), commit()
        with ExitStack() as stack:
            try:
                run = self._set_up(outcome, folder, stack)
            except RuntimeError as error:
                outcome.verdict, outcome.detail = "skipped", str(error)
                return
            try:
                self._play(run, outcome)
            except Defect as defect:
                outcome.verdict, outcome.detail = defect.verdict, str(defect)
            except Exception as error:  # of the benchmark itself: shown, not hidden
                outcome.verdict, outcome.detail = "unexplained", f"benchmark: {error!r}"
            for pid in run.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in run.processes:
                process.wait(5)
            outcome.wall_s = round(time.monotonic() - started_s, 1)
            if outcome.verdict not in GOOD:
                outcome.said = _causes(run.said())[-12:]
                injected = [fault for fault in outcome.faults if fault.verdict != "missed"]
                if injected and outcome.verdict != "different":
                    injected[-1].verdict, injected[-1].detail = outcome.verdict, outcome.detail

    def _set_up(self, outcome: Outcome, folder: Path, stack: ExitStack) -> Run:
        """Raises RuntimeError where this needs root."""
        jobs = importlib.import_module("benchmarks.chaos_jobs")
        job, kinds = outcome.job, {fault.kind for fault in outcome.faults}
        names = ["a", "b"] if outcome.form == "machines" else ["run"]
        folders = [folder / name for name in names]
        for path in folders:
            path.mkdir()
        if "disk full" in kinds:
            stack.enter_context(_small_disk(folders[0]))
        config = jobs.config_of(
            job, self.steps, folder / "store" if "MLflow gone or back" in kinds else None,
            folder, outcome.form == "machines",
        )  # fmt: skip
        if outcome.form == "machines":
            hosts = stack.enter_context(namespaces.two_hosts(None))
            place = jobs.num_on_first(job)
            return Machines(folders, config, jobs.num_ranks(job), hosts, place)
        form = Launched if outcome.form == "launcher" else Torchrun
        return form(folders, config, jobs.num_ranks(job))

    def _play(self, run: Run, outcome: Outcome) -> None:
        jobs = importlib.import_module("benchmarks.chaos_jobs")
        dice = random.Random(f"{outcome.seed} {outcome.number}")
        store = run.first.parent / "store"
        target = Target(run, 0, dice, jobs.LOST_AFTER_S, store)
        Disturbed(run, outcome, target, self.deadline_s, jobs.EVERY).play()
        fills_disk = any(fault.kind == "disk full" for fault in outcome.faults)
        status = read_summary(run.first).get("status")
        if status != "finished" and not (
            fills_disk and "summary.json could not be written" in run.said()
        ):
            raise Defect("unexplained", f"summary: {status}")
        wanted, losses = self.expected[outcome.job], jobs.losses_of(run.first)
        weights = jobs.weights_of(outcome.job, run.folders)
        wrong = {key: told for key, told in losses.items() if told != wanted["losses"].get(key)}
        missing = wanted["losses"].keys() - losses.keys()
        outcome.verdict = "different"
        if weights != wanted["weights"]:
            outcome.detail = f"weights {weights}, not {wanted['weights']}; losses {wrong}"
        elif wrong:
            outcome.detail = f"losses {wrong}"
        elif missing and not fills_disk:
            outcome.detail = f"losses missing of {sorted(missing)}"
        else:
            outcome.verdict = "equal"


def _causes(said: str) -> list[str]:
    """Lines that name a cause."""
    signs = ("xcloud:", "start again", "Error:", "Exception:", "LinkClosed:", "LinkTimeout:")
    return [line[:400] for line in said.splitlines() if any(sign in line for sign in signs)]


@contextlib.contextmanager
def _small_disk(folder: Path) -> Any:
    words = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True).returncode:
        raise RuntimeError("a small tmpfs needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


# --- all of them


def undisturbed(names: list[str], folder: Path, steps: int, known: Path | None) -> dict[str, Any]:
    """Weights and losses of each job. known: file of those of earlier calls, which gets more."""
    jobs = importlib.import_module("benchmarks.chaos_jobs")
    found = json.loads(known.read_text()) if known is not None and known.exists() else {}
    for place, name in enumerate(names):
        if f"{name}, {steps}" in found:
            continue
        run_dir = folder / f"whole{place}"
        run_dir.mkdir()
        run = Launched([run_dir], jobs.config_of(name, steps), jobs.num_ranks(name))
        run.start()
        if run.processes[0].wait(300):
            sys.exit(f"{name} fails undisturbed: {run.said()[-2000:]}")
        found[f"{name}, {steps}"] = {
            "weights": jobs.weights_of(name, [run_dir]), "losses": jobs.losses_of(run_dir),
        }  # fmt: skip
        if known is not None:
            known.write_text(json.dumps(found))
    return {name: found[f"{name}, {steps}"] for name in names}


def draw(
    runs: int, each: int, seed: int, jobs: Sequence[str], kinds: Sequence[str] = KINDS,
    forms: Sequence[str] = tuple(FORMS),
) -> list[Outcome]:  # fmt: skip
    """Every job in turn, forms and kinds by their weights."""
    from benchmarks.chaos_jobs import fits

    dice, drawn = random.Random(seed), []
    forms = [form for form in forms if FAULTS[form].keys() & set(kinds)]
    for number in range(runs):
        job = jobs[number % len(jobs)]
        form = dice.choices(forms, [FORMS[form] for form in forms])[0]
        ours = [kind for kind in FAULTS[form] if kind in kinds and fits(job, kind)]
        weights = [WEIGHTS.get(kind, 1) for kind in ours]
        faults = [Fault(kind, dice.choice(PHASES)) for kind in dice.choices(ours, weights, k=each)]
        if dice.random() < 0.3:
            faults[-1].phase = "end"
        for fault in faults:
            needs_steps = "checkpoint" in fault.kind or fault.kind == "kill monitor"
            if needs_steps or not fits(job, fault.kind, fault.phase):
                fault.phase = "step"
        drawn.append(Outcome(seed, number, job, form, faults))
    return drawn


def report(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """By kind: what faults led to. Of runs: what they came to."""
    kinds: dict[str, Any] = {}
    told = [(one.form, fault) for one in outcomes for fault in one.faults]
    injected = [(form, fault) for form, fault in told if fault.verdict != "missed"]
    for kind, form in sorted({(fault.kind, form) for form, fault in injected}):
        ours = [fault for where, fault in injected if (fault.kind, where) == (kind, form)]
        noticed = sorted(one.noticed_s for one in ours if one.noticed_s is not None)
        lost = [one.steps_lost for one in ours if one.steps_lost is not None]
        kinds[f"{kind} ({form})"] = {
            "faults": len(ours),
            **Counter(one.verdict for one in ours),
            "went_on_without_restart": sum(not one.restarts for one in ours),
            "noticed_s_median": statistics.median(noticed) if noticed else None,
            "noticed_s_most": noticed[-1] if noticed else None,
            "steps_lost_mean": round(statistics.mean(lost), 1) if lost else None,
        }
    runs = dict(Counter(one.verdict for one in outcomes))
    faults = dict(Counter(fault.verdict for _, fault in injected))
    return {"faults": len(injected), "verdicts": faults, "runs": runs, "kinds": kinds}


def read_record(files: Sequence[Path]) -> list[Outcome]:
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [Outcome(**{**line, "faults": [Fault(**f) for f in line["faults"]]}) for line in lines]


def print_table(outcomes: Sequence[Outcome]) -> None:
    """In Markdown."""
    found = report(outcomes)
    print(
        f"{found['faults']} faults: {found['verdicts']}; {len(outcomes)} runs: {found['runs']}\n"
    )
    print("| fault | injected | recovered | refused | without restart | seconds to notice, median "
          "and most | steps lost, mean |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for kind, row in found["kinds"].items():
        noticed = "–"
        if row["noticed_s_median"] is not None:
            noticed = f"{row['noticed_s_median']:.1f}, {row['noticed_s_most']:.1f}"
        cells = [kind, row["faults"], row.get("recovered", 0), row.get("refused", 0),
                 row["went_on_without_restart"], noticed, row["steps_lost_mean"]]  # fmt: skip
        print(f"| {' | '.join(map(str, cells))} |")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--each", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", help="only these runs of the seed")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds to go on within")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--jobs", nargs="+")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--known", type=Path)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--table", type=Path, nargs="+")
    asked = parser.parse_args(words)
    if asked.table:
        print_table(read_record(asked.table))
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in IMPORTED:  # once, for all processes; no thread may run when they fork
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    # Half a second of each attempt, and not what is disturbed.
    vars(importlib.import_module("xcloud.report.pictures"))["write_pictures"] = lambda *_: []
    jobs = importlib.import_module("benchmarks.chaos_jobs")
    names = asked.jobs or list(jobs.JOBS)
    drawn = draw(asked.runs, asked.each, asked.seed, names, asked.kinds, asked.forms)
    drawn = [one for one in drawn if asked.only is None or one.number in asked.only]
    if any(fault.kind.startswith("MLflow") for one in drawn for fault in one.faults):
        importlib.import_module("xcloud.record.mlflow_store")
    steps = STEPS_FOR_A_FAULT * (1 + asked.each)
    folder, until_s = (
        Path(tempfile.mkdtemp(prefix="chaos-")),
        time.monotonic() + 60 * asked.minutes,
    )
    expected = undisturbed(sorted({one.job for one in drawn}), folder, steps, asked.known)

    def play(place: int) -> None:
        lane = Lane(folder, expected, steps, asked.deadline)
        for one in drawn[place :: asked.at_once]:
            if time.monotonic() > until_s:
                return
            lane.one(one)
            for file in (folder / f"lane{place}.jsonl", asked.record):
                if file is not None:
                    with open(file, "a") as record:
                        record.write(json.dumps(asdict(one)) + "\n")
            verdicts = dict(Counter(fault.verdict for fault in one.faults))
            print(f"{one.number:4} {one.verdict:12} {one.form}, {one.job} ({one.wall_s:.0f} s) "
                  f"{verdicts} {one.detail[:300]}", flush=True)  # fmt: skip
            if one.verdict in GOOD and not asked.keep:
                shutil.rmtree(one.folder, ignore_errors=True)

    _side_by_side(play, asked.at_once)
    outcomes = read_record(sorted(folder.glob("lane*.jsonl")))
    print_table(outcomes)
    is_good = all(one.verdict in GOOD for one in outcomes)
    if asked.minutes == float("inf"):
        is_good = is_good and len(outcomes) == len(drawn)
    if is_good and not asked.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if is_good else 1


def _in_minutes(minutes: float) -> float:
    return time.monotonic() + 60 * minutes


def _side_by_side(play: Callable[[int], None], count: int) -> None:
    """In processes, which have no threads when they fork."""
    lanes = []
    for place in range(count):
        pid = os.fork()
        if not pid:
            try:
                play(place)
            finally:
                sys.stdout.flush()
                os._exit(0)
        lanes.append(pid)
    for pid in lanes:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main())
