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
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import namespaces
from benchmarks.chaos_faults import FAULTS, WEIGHTS, Target
from benchmarks.chaos_play import Defect, Disturbed, causes
from benchmarks.chaos_record import GOOD, Fault, Outcome, print_table, read_record
from benchmarks.chaos_runs import Launched, Machines, Run, Torchrun, prepare_to_fork
from xcloud.base.project import commit
from xcloud.record.summary import read_summary

FORMS = {"launcher": 6, "machines": 5, "torchrun": 1}  # how often each is drawn
PHASES = ("start", "step", "step", "step", "checkpoint", "evaluation")
STEPS_FOR_A_FAULT = 12
TMPFS_BYTES = 6 << 20
KINDS = sorted({kind for faults in FAULTS.values() for kind in faults})


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
                outcome.said = causes(run.said())[-12:]
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
    prepare_to_fork()
    # Half a second of each attempt, and not what is disturbed.
    vars(importlib.import_module("xcloud.show.pictures"))["write_pictures"] = lambda *_: []
    jobs = importlib.import_module("benchmarks.chaos_jobs")
    names = asked.jobs or list(jobs.JOBS)
    drawn = draw(asked.runs, asked.each, asked.seed, names, asked.kinds, asked.forms)
    drawn = [one for one in drawn if asked.only is None or one.number in asked.only]
    if any(fault.kind.startswith("MLflow") for one in drawn for fault in one.faults):
        importlib.import_module("xcloud.tracking.mlflow_store")
    steps = STEPS_FOR_A_FAULT * (1 + asked.each)
    folder, until_s = (
        Path(tempfile.mkdtemp(prefix="chaos-")),
        time.monotonic() + 60 * asked.minutes,
    )
    policy = folder / "policy.yaml"  # the toys', and that models look for trouble in this folder
    allowed = Path(os.environ["XCLOUD_POLICY"]).read_text(encoding="utf-8")
    policy.write_text(f"{allowed}read: ['.', '{folder}']\n", encoding="utf-8")
    os.environ["XCLOUD_POLICY"] = str(policy)
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
