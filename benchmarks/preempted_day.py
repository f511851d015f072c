"""A day with pre-emptions in minutes: python -m benchmarks.preempted_day [--every S] [--minutes M]

A toy run is taken away about every S seconds and started again at once with the user's command
(run.py resume=RUN), with notice (SIGTERM, exit code 75) and without (SIGKILL, its ranks die with
it). Measured is the share of the wall time, up to the end of the last step, that was spent in
steps which counted; against what arithmetic allows, which loses the first start and each time

    with notice     leave_s + restart_s
    without         leave_s + restart_s + checkpoint_s / 2

leave_s: from the signal until all processes are gone. restart_s: from the command to the first
step. checkpoint_s: between two checkpoints. All measured. The weights and losses must be those of
a run that nothing disturbed. --forked: start again without the seconds of importing.
"""

from __future__ import annotations

import argparse
import hashlib
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
from pathlib import Path
from typing import Any

from benchmarks.chaos_jobs import losses_of, weights_of
from benchmarks.chaos_runs import LOG, ROOT, Launched, prepare_to_fork
from benchmarks.machine import ran_on
from tests.event_lines import steps_done
from tests.warm_ranks import Child
from xcloud.launch.failures import EXIT_START_AGAIN
from xcloud.record.checkpoint_files import CheckpointFolder
from xcloud.record.events import EVENTS_FILE, EventReader

STEP_S = 0.05  # of each of two stages
STEPS_PER_S = 6.0  # about, to plan the run
JOB = "int4, delta memory"
RANKS = 2
REAL_EVERY_S, REAL_CHECKPOINT_S = 1200.0, 600.0
Running = Child | subprocess.Popen[bytes]


def config_of(steps: int, every_steps: int) -> dict[str, Any]:
    from tests.toy import toy_config

    config: dict[str, Any] = toy_config("two_clouds", [
        "compression=delta_int4", "schedule.num_micro_batches=1", f"training.max_steps={steps}",
        f"training.checkpoint.every_steps={every_steps}",
    ])  # fmt: skip
    config["model"] |= {"step_s": STEP_S}
    return config


def start_again(run: Launched, forked: bool) -> Running:
    if forked:
        run.start()
        return run.processes[0]
    with open(run.first / LOG, "ab") as log:
        return subprocess.Popen(
            [sys.executable, "run.py", f"resume={run.first}"], cwd=ROOT, stdout=log, stderr=log,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip


def take_away(run: Launched, running: Running, kind: str) -> None:
    """Returns when all its processes are gone."""
    running.send_signal(signal.SIGTERM if kind == "notice" else signal.SIGKILL)
    code = running.wait(120)
    # The notice may come when all steps are done, and end the command while it draws pictures.
    if code not in (0, EXIT_START_AGAIN, -signal.SIGTERM, -signal.SIGKILL):
        sys.exit(f"exit code {code}: {run.said()[-2000:]}")
    while run.alive():
        time.sleep(0.01)


def day(kind: str, run_dir: Path, config: dict[str, Any], asked: argparse.Namespace) -> Any:
    run_dir.mkdir()
    dice = random.Random(asked.seed)
    starts, leaves, checkpoints = [time.time()], [], CheckpointFolder(run_dir)
    run = Launched([run_dir], config, RANKS)
    running = start_again(run, forked=True)
    while True:
        due_s = starts[-1] + asked.every * dice.uniform(0.75, 1.25)
        agreed = checkpoints.agreed_steps()[:1]
        while running.poll() is None and (
            # Where no checkpoint falls between two pre-emptions, a run would never end.
            kind == "none" or time.time() < due_s or checkpoints.agreed_steps()[:1] == agreed
        ):
            time.sleep(0.05)
        if running.poll() is not None:
            break
        taken_s = time.time()
        take_away(run, running, kind)
        leaves.append(time.time() - taken_s)
        starts.append(time.time())
        running = start_again(run, asked.forked)
    if running.wait():
        sys.exit(f"the run failed: {run.said()[-2000:]}")
    return measured(kind, run_dir, starts, leaves, asked.checkpoint)


def measured(
    kind: str, run_dir: Path, starts: list[float], leaves: list[float], every_steps: int
) -> Any:
    told = list(EventReader(run_dir / EVENTS_FILE, warn=False))
    first = [e for e in told if e["event"] == "step" and e["rank"] == 0]
    counted = [e for e in steps_done(told) if e["rank"] == 0]
    ends_s = max(e["t"] for e in counted)
    useful_s = sum(e["step_s"] for e in counted)
    # The first start is forked, whatever the others are.
    begins = [(s, min((e["t"] - e["step_s"] for e in first if e["t"] > s), default=s))
              for s in starts]  # fmt: skip
    restarts = [begin - start for start, begin in begins[1:] if start < ends_s]
    wall_s = ends_s - starts[0]
    found: dict[str, Any] = {
        "wall_s": round(wall_s, 1), "steps": len(counted), "pre_emptions": len(leaves),
        "steps_done_twice": len(first) - len(counted),
        "step_ms": round(1e3 * useful_s / len(counted), 1), "goodput": round(useful_s / wall_s, 4),
        "weights": weights_of(JOB, [run_dir]),
        "losses": hashlib.sha256(repr(losses_of(run_dir)).encode()).hexdigest()[:16],
    }  # fmt: skip
    if restarts:
        restart_s, leave_s = statistics.mean(restarts), statistics.mean(leaves)
        between_s = (starts[-1] - starts[0]) / len(leaves)
        checkpoint_s = every_steps * useful_s / len(counted)
        # The last stretch is shorter, and the first start costs what it costs.
        lost_s = begins[0][1] - starts[0] + restart_s * len(restarts)
        lost_s += (leave_s if kind == "notice" else leave_s + checkpoint_s / 2) * len(leaves)
        found |= {
            "restart_s": round(restart_s, 2), "leave_s": round(leave_s, 2),
            "checkpoint_s": round(checkpoint_s, 2), "between_s": round(between_s, 1),
            "bound": round(1 - lost_s / wall_s, 4),
            "goodput_over_bound": round((useful_s / wall_s) / (1 - lost_s / wall_s), 4),
            "bound_of_a_real_day": real_day(kind, restart_s, leave_s),
        }  # fmt: skip
    return found


def real_day(kind: str, restart_s: float, leave_s: float) -> float:
    """Every 20 minutes, with a checkpoint every 10."""
    lost_s = restart_s + (leave_s if kind == "notice" else REAL_CHECKPOINT_S / 2)
    return round(1 - lost_s / REAL_EVERY_S, 4)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=float, default=50.0, help="seconds between pre-emptions")
    parser.add_argument("--minutes", type=float, default=4.0, help="of useful steps, each kind")
    parser.add_argument("--checkpoint", type=int, default=40, help="every so many steps")
    parser.add_argument("--kinds", nargs="+", default=["notice", "kill"])
    parser.add_argument("--forked", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(words)
    prepare_to_fork()
    folder = Path(tempfile.mkdtemp(prefix="preempted-"))
    config = config_of(round(60 * asked.minutes * STEPS_PER_S), asked.checkpoint)
    print(json.dumps(ran_on()), flush=True)
    found = {}
    for kind in ("none", *asked.kinds):
        found[kind] = day(kind, folder / kind, config, asked)
        print(json.dumps({kind: found[kind]}), flush=True)
    same = {(one["weights"], one["losses"]) for one in found.values()}
    if asked.out is not None:
        asked.out.write_text(json.dumps({**ran_on(), **found}, indent=1) + "\n")
    if len(same) > 1:
        print("the runs have not come to the same bits")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
