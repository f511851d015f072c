"""The autopilot against every fixed choice, on lines that change.

    python -m benchmarks.autopilot [--steps 300] [--traces down up sawtooth] [--rounds 3]
    python -m benchmarks.autopilot --toy --steps 24 --rounds 1     # does it work at all

One job (a Transformer over two clouds, GPipe) is trained for as many steps with each compression
in turn and with the autopilot that may choose among them, on the same trace: a line that becomes
slow, one that becomes fast, one that goes up and down. Runs go round in turn, so noise hits all
alike. Prints the seconds in steps, and of the autopilot its switches and its regret: its seconds /
those of the best fixed choice in hindsight - 1, the median over rounds. Writes JSON with --json.

The trace begins when the ranks have joined; --change-s should be about half of what a run on the
fast line takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import say_where
from xcloud.record.events import EVENTS_FILE, EventReader, StepCollector
from xcloud.record.summary import read_summary

FIXED = ("none", "int8", "int4")
AUTOPILOT = "autopilot"
JOB = ["+exp=abnet_iwslt", "model=transformer", "training.eval_samples=8"]
TOY = ["--config-dir", "tests/conf", "+exp=toy", "autopilot.every=1", "autopilot.dwell=4"]


def trace(name: str, fast: float, slow: float, change_s: float) -> tuple[list[list[float]], float]:
    """Entries of cluster.wan.trace, and its period; 0 = none."""
    if name == "down":
        return [[0, fast], [change_s, slow]], 0.0
    if name == "up":
        return [[0, slow], [change_s, fast]], 0.0
    middle = (fast * slow) ** 0.5
    rates = (fast, middle, slow, middle)
    return [[k * change_s / 4, rate] for k, rate in enumerate(rates)], change_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", nargs="+", default=["down", "up", "sawtooth"],
                        choices=["down", "up", "sawtooth"])  # fmt: skip
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fast-mbit", type=float, help="default 1000; of the toy 10")
    parser.add_argument("--slow-mbit", type=float, help="default 4; of the toy 0.05")
    parser.add_argument("--change-s", type=float, help="default 30; of the toy 2")
    parser.add_argument("--toy", action="store_true", help="a job of milliseconds")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    fast, slow, change_s = (10.0, 0.05, 2.0) if arguments.toy else (1000.0, 4.0, 30.0)
    fast, slow = arguments.fast_mbit or fast, arguments.slow_mbit or slow
    change_s = arguments.change_s or change_s
    say_where()
    print(f"{arguments.steps} steps, {fast:g} and {slow:g} Mbit/s, change after {change_s:g} s")
    names = (*FIXED, AUTOPILOT)
    print(f"{'trace':>9} | {' '.join(f'{name:>10}' for name in names)} | regret | switches")
    found = {}
    for name in arguments.traces:
        line = trace(name, 1e6 * fast, 1e6 * slow, change_s)
        job = TOY if arguments.toy else JOB
        rounds = [
            {one: run([*job, f"training.max_steps={arguments.steps}"], one, line) for one in names}
            for _ in range(arguments.rounds)
        ]
        found[name] = rounds
        seconds = {o: statistics.median(r[o]["in_steps_s"] for r in rounds) for o in names}
        regret = statistics.median(
            r[AUTOPILOT]["in_steps_s"] / min(r[o]["in_steps_s"] for o in FIXED) - 1 for r in rounds
        )
        row = " ".join(f"{seconds[one]:>8.1f} s" for one in names)
        switches = ", ".join(
            f"{s['step']} {s['choice']}" for s in rounds[-1][AUTOPILOT]["switches"]
        )
        print(f"{name:>9} | {row} | {100 * regret:>4.1f} % | {switches}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def run(job: list[str], choice: str, line: tuple[list[list[float]], float]) -> dict[str, Any]:
    entries, period_s = line
    own = [f"compression={choice}"]
    if choice == AUTOPILOT:
        own = [f"compression={FIXED[0]}", "autopilot=on"]
    else:
        job = [word for word in job if not word.startswith("autopilot.")]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        command = [
            sys.executable, "run.py", *job, *own, "tracker=none", "cluster/wan=line_1g",
            f"cluster.wan.trace={json.dumps(entries)}", f"cluster.wan.trace_period_s={period_s}",
            f"hydra.run.dir={run_dir}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        collector = StepCollector(2)
        totals = [collector.feed(event) for event in EventReader(run_dir / EVENTS_FILE).poll()]
        in_steps_s = sum(one.step_s for one in totals if one is not None)
        return {"in_steps_s": in_steps_s, "switches": read_summary(run_dir).get("autopilot", [])}


if __name__ == "__main__":
    main()
