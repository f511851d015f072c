"""Faults at random moments of small runs: python -m benchmarks.chaos [--faults N] [--seed S]

Each run gets one fault (chaos_faults.py), then is gone on with as a user would (resume=RUN) until
it ends. Its weights must be those of an undisturbed run of the job, or an error must name the
cause; nothing may hang, and no process be left. Exit code 1 otherwise. Real launchers and ranks
(chaos_runs.py) of toy jobs (chaos_jobs.py); Linux. "disk full" mounts a small tmpfs: needs root.

--at-once runs side by side. --kinds, --jobs: only these. --keep: folders of good runs too.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos_faults import FAULTS
from benchmarks.chaos_runs import (
    IMPORTED,
    LAUNCHER_LOG,
    Forked,
    processes_of,
    start_launcher,
    start_torchrun,
)
from xcloud.record.checkpoints import CheckpointFolder

PHASES = ("start", "step", "step", "checkpoint", "evaluation", "end")
WEIGHTS = {  # how often each kind of fault is drawn
    "kill rank": 5, "kill launcher": 3, "pause rank": 3, "stop rank": 2, "pause launcher": 1,
    "SIGTERM": 2, "SIGUSR1": 1, "SIGTERM twice": 1, "truncated checkpoint": 2,
    "flipped bit in a checkpoint": 2, "all checkpoints damaged": 1, "disk full": 2,
    "out of memory": 2, "kill and kill again": 2, "MLflow gone": 1, "kill monitor": 1,
}  # fmt: skip
TMPFS_BYTES = 2 << 20
MOST_ATTEMPTS = 5
ORPHANS_WITHIN_S = 6.0  # launch.END_WITHIN_S, and some


@dataclass
class Outcome:
    """verdict: recovered, refused (an error named the cause), missed (the run had ended before the
    fault), skipped, or a defect: different, hang, orphans, unexplained."""

    number: int
    kind: str
    job: str
    phase: str
    verdict: str = ""
    detail: str = ""
    noticed_s: float | None = None
    steps_lost: int | None = None
    attempts: int = 0
    wall_s: float = 0.0
    folder: str = ""
    said: list[str] = field(default_factory=list)


class Chaos:
    """One fault after the other in folders of its own. deadline_s: of one attempt at a run."""

    def __init__(self, folder: Path, expected: dict[str, dict[str, str]], deadline_s: float):
        self.folder, self.expected, self.deadline_s = folder, expected, deadline_s

    def one(self, outcome: Outcome, dice: random.Random) -> None:
        started_s = time.monotonic()
        run_dir = self.folder / f"fault{outcome.number}"
        run_dir.mkdir()
        outcome.folder = str(run_dir)
        is_mounted = outcome.kind == "disk full"
        if is_mounted and not _mount(run_dir):
            outcome.verdict, outcome.detail = "skipped", "a small tmpfs needs root"
            return
        try:
            self._disturb(outcome, run_dir, dice)
        except Exception as error:  # a fault of the benchmark itself: shown, not hidden
            outcome.verdict, outcome.detail = "unexplained", f"benchmark: {error!r}"
        finally:
            for pid in processes_of(run_dir):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            outcome.wall_s = round(time.monotonic() - started_s, 1)
            outcome.said = _said(run_dir)
            if is_mounted:
                subprocess.run(["umount", "-l", str(run_dir)], check=False)

    def _disturb(self, outcome: Outcome, run_dir: Path, dice: random.Random) -> None:
        mlflow = self.folder / f"store{outcome.number}" if "MLflow" in outcome.kind else None
        jobs = importlib.import_module("benchmarks.chaos_jobs")
        config = jobs.config_of(outcome.job, mlflow)
        # Only a run under torchrun has a monitor that is a process of its own.
        if outcome.kind == "kill monitor":
            launcher = start_torchrun(run_dir, config, jobs.num_ranks(outcome.job))
        else:
            launcher = start_launcher(run_dir, config)
        outcome.attempts = 1
        if not _await_phase(outcome.phase, run_dir, launcher, dice, self.deadline_s):
            outcome.verdict = "missed" if launcher.poll() is not None else "hang"
            outcome.detail = f"before the fault: exit code {launcher.poll()}"
            if launcher.poll() not in (0, None):
                outcome.verdict = "unexplained"
            return
        rank = dice.randrange(jobs.num_ranks(outcome.job))
        faulted_s = time.monotonic()
        repair = FAULTS[outcome.kind](run_dir, launcher, rank, dice, mlflow)
        self._finish(outcome, run_dir, config, launcher, faulted_s, repair)
        if outcome.verdict != "recovered":
            return
        found = jobs.result_of(outcome.job, run_dir)
        wanted = self.expected[outcome.job]
        summary: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            summary = json.loads((run_dir / "summary.json").read_text())
        outcome.steps_lost = summary.get("num_steps_done_twice", 0)
        says_lost = b"summary.json could not be written" in (run_dir / LAUNCHER_LOG).read_bytes()
        if summary.get("status") != "finished" and not (outcome.kind == "disk full" and says_lost):
            outcome.verdict, outcome.detail = "unexplained", f"summary: {summary.get('status')}"
        elif found["weights"] != wanted["weights"]:
            outcome.verdict, outcome.detail = "different", f"{found} instead of {wanted}"
        elif found != wanted and outcome.kind != "disk full":  # there lines of events may be lost
            outcome.verdict, outcome.detail = "different", f"curve: {found}, not {wanted}"

    def _finish(
        self, outcome: Outcome, run_dir: Path, config: dict[str, Any], launcher: Forked,
        faulted_s: float, repair: Callable[[], None] | None,
    ) -> None:  # fmt: skip
        """Go on until the run ends or refuses to."""
        log, size = run_dir / LAUNCHER_LOG, _size(run_dir / LAUNCHER_LOG)
        while True:
            until_s = time.monotonic() + self.deadline_s
            while launcher.poll() is None and time.monotonic() < until_s:
                time.sleep(0.02)
                said = log.read_bytes()[size:] if _size(log) > size else b""
                if outcome.noticed_s is None and b"start again" in said:
                    outcome.noticed_s = round(time.monotonic() - faulted_s, 2)
            code = launcher.poll()
            if code is None:
                outcome.verdict, outcome.detail = "hang", f"attempt {outcome.attempts}"
                return
            if outcome.noticed_s is None and code != 0:
                outcome.noticed_s = round(time.monotonic() - faulted_s, 2)
            if left := _left_behind(run_dir):
                outcome.verdict, outcome.detail = "orphans", f"processes {left}, exit code {code}"
                return
            if repair is not None:
                repair()
                repair = None
            if code == 0:
                outcome.verdict = "recovered"
                return
            if outcome.attempts == MOST_ATTEMPTS or _is_refusal(log):
                causes = [line for line in _said(run_dir) if line.startswith("xcloud:")]
                outcome.verdict = "refused" if causes else "unexplained"
                outcome.detail = causes[-1] if causes else f"exit code {code}"
                return
            outcome.attempts += 1
            launcher = start_launcher(run_dir, config)


# --- when


def _await_phase(
    phase: str, run_dir: Path, launcher: Forked, dice: random.Random, deadline_s: float
) -> bool:
    """Whether the moment has come while the run goes on."""
    from benchmarks.chaos_jobs import EVERY, STEPS

    folder, until_s = CheckpointFolder(run_dir), time.monotonic() + deadline_s
    step = dice.randrange(EVERY, STEPS - EVERY)
    wait_s = dice.random() * {"start": 1.5, "step": 0.3, "checkpoint": 0.0}.get(phase, 0.1)

    def events_hold(text: str) -> bool:
        with contextlib.suppress(OSError):
            return text in (run_dir / "events.jsonl").read_text()
        return False

    def has_come() -> bool:
        if phase == "start":
            return True
        if phase == "checkpoint":  # being written, after some step
            return bool(folder.steps() and folder.steps()[0] >= step) and any(
                run_dir.glob("checkpoints/*/.rank*")
            )
        if phase == "evaluation":
            return events_hold('"event":"quality"')
        if phase == "end":
            return (run_dir / "model").exists()
        return any(found >= step for found in folder.agreed_steps())

    while launcher.poll() is None and time.monotonic() < until_s:
        if has_come():
            time.sleep(wait_s)
            return launcher.poll() is None
        if phase == "checkpoint" and any(run_dir.glob("model/*")):
            return launcher.poll() is None  # each was written between two looks
        time.sleep(0.0005 if phase == "checkpoint" else 0.01)
    return False


# --- what was left and said


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _said(run_dir: Path) -> list[str]:
    try:
        lines = (run_dir / LAUNCHER_LOG).read_text(errors="replace").splitlines()
    except OSError:
        return []
    signs = ("xcloud:", "start again", "Error", "Traceback")
    return [line[:400] for line in lines if any(sign in line for sign in signs)][-12:]


def _is_refusal(log: Path) -> bool:
    """The last words say that going on is refused."""
    last = [line for line in log.read_text(errors="replace").splitlines() if "xcloud:" in line]
    return bool(last) and "no checkpoint that every rank can go on from" in last[-1]


def _left_behind(run_dir: Path) -> list[int]:
    until_s = time.monotonic() + ORPHANS_WITHIN_S
    while (left := processes_of(run_dir)) and time.monotonic() < until_s:
        time.sleep(0.05)
    return left


def _mount(run_dir: Path) -> bool:
    words = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(run_dir)]
    return subprocess.run(words, capture_output=True).returncode == 0


# --- all of them


def undisturbed(names: list[str], folder: Path, deadline_s: float) -> dict[str, dict[str, str]]:
    jobs = importlib.import_module("benchmarks.chaos_jobs")
    found = {}
    for place, name in enumerate(names):
        run_dir = folder / f"whole{place}"
        run_dir.mkdir()
        code = start_launcher(run_dir, jobs.config_of(name)).wait(deadline_s)
        if code:
            sys.exit(f"{name} fails undisturbed: {(run_dir / LAUNCHER_LOG).read_text()[-2000:]}")
        found[name] = jobs.result_of(name, run_dir)
    return found


def draw(faults: int, seed: int, jobs: list[str], kinds: list[str]) -> list[Outcome]:
    """Every job in turn, kinds by WEIGHTS."""
    dice, drawn = random.Random(seed), []
    for number in range(faults):
        kind = dice.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        needs_steps = "checkpoint" in kind or kind == "kill monitor"
        phase = "step" if needs_steps else dice.choice(PHASES)
        drawn.append(Outcome(number, kind, jobs[number % len(jobs)], phase))
    return drawn


def report(outcomes: list[Outcome]) -> dict[str, Any]:
    kinds = {}
    for kind in sorted({one.kind for one in outcomes}):
        ours = [one for one in outcomes if one.kind == kind]
        noticed = sorted(one.noticed_s for one in ours if one.noticed_s is not None)
        lost = [one.steps_lost for one in ours if one.steps_lost is not None]
        kinds[kind] = {
            **Counter(one.verdict for one in ours),
            "noticed_s_median": statistics.median(noticed) if noticed else None,
            "noticed_s_most": noticed[-1] if noticed else None,
            "steps_lost_mean": round(statistics.mean(lost), 1) if lost else None,
        }
    verdicts = Counter(one.verdict for one in outcomes)
    faults = len(outcomes) - verdicts["missed"] - verdicts["skipped"]
    return {"faults": faults, "verdicts": dict(verdicts), "kinds": kinds}


GOOD = ("recovered", "refused", "missed", "skipped")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=90.0, help="seconds for one attempt")
    parser.add_argument("--kinds", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--jobs", nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args(words)
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in IMPORTED:  # once, for all processes; no thread may run when they fork
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    if "MLflow gone" in asked.kinds:
        importlib.import_module("xcloud.record.mlflow_store")
    jobs = asked.jobs or list(importlib.import_module("benchmarks.chaos_jobs").JOBS)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    expected = undisturbed(jobs, folder, asked.deadline)
    drawn = draw(asked.faults, asked.seed, jobs, asked.kinds)

    def lane(place: int) -> None:
        chaos = Chaos(folder, expected, asked.deadline)
        for one in drawn[place :: asked.at_once]:
            chaos.one(one, random.Random(f"{asked.seed} {one.number}"))
            with open(folder / f"lane{place}.jsonl", "a") as file:
                file.write(json.dumps(asdict(one)) + "\n")
            print(f"{one.number:4} {one.verdict:12} {one.kind}, {one.job}, {one.phase} "
                  f"({one.wall_s:.0f} s) {one.detail[:200]}", flush=True)  # fmt: skip
            if one.verdict in GOOD and not asked.keep:
                shutil.rmtree(one.folder, ignore_errors=True)

    outcomes = _side_by_side(lane, asked.at_once, folder)
    found = {"seed": asked.seed, **report(outcomes), "outcomes": [asdict(one) for one in outcomes]}
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: found[name] for name in ("faults", "verdicts", "kinds")}, indent=1))
    is_good = all(one.verdict in GOOD for one in outcomes) and len(outcomes) == asked.faults
    if is_good and not asked.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if is_good else 1


def _side_by_side(lane: Callable[[int], None], count: int, folder: Path) -> list[Outcome]:
    """In processes, which have no threads when they fork."""
    lanes = []
    for place in range(count):
        pid = os.fork()
        if not pid:
            try:
                lane(place)
            finally:
                sys.stdout.flush()
                os._exit(0)
        lanes.append(pid)
    for pid in lanes:
        os.waitpid(pid, 0)
    lines = [line for path in folder.glob("lane*.jsonl") for line in path.read_text().splitlines()]
    return sorted((Outcome(**json.loads(line)) for line in lines), key=lambda one: one.number)


if __name__ == "__main__":
    sys.exit(main())
