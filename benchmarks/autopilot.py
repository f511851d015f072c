"""The autopilot against every fixed choice, on lines that change.

    python -m benchmarks.autopilot                                 # about 12 minutes on two cores
    python -m benchmarks.autopilot --steps 300 --change-s 40 --micro-batches 8 --rounds 3
    python -m benchmarks.autopilot --toy --steps 24 --rounds 1     # does it work at all
    python -m benchmarks.autopilot --hosts --change-s 10           # on a real line; needs root

One job (a Transformer over two clouds, GPipe) is trained for as many steps with each fixed choice
in turn and with the autopilot that may choose among them, on the same trace: a line that becomes
slow, one that becomes fast, one that goes up and down. Choices are compressions, and with
--micro-batches each with these numbers too. Rounds go through the runs in turn, every other one
backwards, so noise hits all alike; a fixed choice that the first round saw HOPELESS times slower
than the best is not run again. Prints the seconds in steps, and of the autopilot its switches, its
regret: its seconds / those of the best fixed choice in hindsight - 1, the median over rounds, and
the same as a share of the best. Writes JSON with --json.

The trace begins when the ranks have joined, with --hosts at the first update; --change-s should
be about half of what a run on the fast line takes.

With --hosts nothing is emulated: torchrun starts each rank in a network namespace of its own, with
cluster.wan=real, and tc changes what the kernel lets through between them. That line has no round
trip: the one that has (delay_line.c) cannot change.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import say_where
from benchmarks.namespaces import available
from benchmarks.several_machines import run_on_two_machines
from xcloud.net.link_profile import LinkProfile
from xcloud.record.events import EVENTS_FILE, EventReader, StepCollector

COMPRESSIONS = ("none", "int8", "int4")
AUTOPILOT = "autopilot"
HOPELESS = 1.5
JOB = ["+exp=abnet_iwslt", "model=transformer", "training.eval_samples=8"]
TOY = ["--config-dir", "tests/conf", "+exp=toy"]
CLOUDS = ("cloud_a", "cloud_b")
TOY_PILOT = ["autopilot.every=1", "autopilot.dwell=4"]


def trace(name: str, fast: float, slow: float, change_s: float) -> LinkProfile:
    if name == "down":
        return LinkProfile(fast, trace=[[0, fast], [change_s, slow]])
    if name == "up":
        return LinkProfile(fast, trace=[[0, slow], [change_s, fast]])
    middle = (fast * slow) ** 0.5
    rates = (fast, middle, slow, middle)
    entries = [[k * change_s / 2, rate] for k, rate in enumerate(rates)]
    return LinkProfile(fast, trace=entries, trace_period_s=2 * change_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", nargs="+", default=["down", "up", "sawtooth"],
                        choices=["down", "up", "sawtooth"])  # fmt: skip
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--fast-mbit", type=float, help="default 1000; of the toy 10")
    parser.add_argument("--slow-mbit", type=float, help="default 20; of the toy 0.05")
    parser.add_argument("--change-s", type=float, help="default 15; of the toy 2")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[],
                        help="besides the job's own number")  # fmt: skip
    parser.add_argument("--toy", action="store_true", help="a job of milliseconds")
    parser.add_argument("--hosts", action="store_true", help="two network namespaces, a real line")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.hosts and (reason := available()) is not None:
        sys.exit(f"--hosts cannot run here: {reason}")
    run = run_on_hosts if arguments.hosts else run_emulated
    fast, slow, change_s = (10.0, 0.05, 2.0) if arguments.toy else (1000.0, 20.0, 15.0)
    fast, slow = arguments.fast_mbit or fast, arguments.slow_mbit or slow
    change_s = arguments.change_s or change_s
    say_where()
    print(f"{arguments.steps} steps, {fast:g} and {slow:g} Mbit/s, change after {change_s:g} s")
    fixed = {
        f"{compression}{f' m={m}' if m else ''}": [f"compression={compression}", *with_number(m)]
        for m in (0, *arguments.micro_batches)
        for compression in COMPRESSIONS
    }
    pilot = [f"compression={COMPRESSIONS[0]}", "autopilot=on", "~autopilot.choices.transform"]
    if arguments.toy:
        pilot += TOY_PILOT
    if arguments.micro_batches:
        pilot.append(f"autopilot.micro_batches={json.dumps(arguments.micro_batches)}")
    choices = {**fixed, AUTOPILOT: pilot}
    print(f"{'trace':>9} | {' '.join(f'{name:>10}' for name in choices)} | "
          "regret | of best | switches")  # fmt: skip
    found = {}
    for name in arguments.traces:
        line = trace(name, 1e6 * fast, 1e6 * slow, change_s)
        job = [*(TOY if arguments.toy else JOB), "tracker=none",
               f"training.max_steps={arguments.steps}"]  # fmt: skip
        rounds: list[dict[str, Any]] = []
        for number in range(arguments.rounds):
            names = [one for one in choices if not rounds or not is_hopeless(one, rounds[0])]
            order = reversed(names) if number % 2 else names
            rounds.append({one: run([*job, *choices[one]], line) for one in order})
        found[name] = rounds
        seconds = {
            one: statistics.median(r[one]["in_steps_s"] for r in rounds if one in r)
            for one in choices
        }
        regret = statistics.median(
            r[AUTOPILOT]["in_steps_s"] / best_fixed_s(r) - 1 for r in rounds
        )
        row = " ".join(f"{s:>8.1f} s" for s in seconds.values())
        last = rounds[-1][AUTOPILOT]
        switches = "; ".join(f"{s['step']} {s['choice']}" for s in last["switches"])
        if arguments.hosts:
            switches += f" (the line first changed in {last['changed_in']})"
        print(f"{name:>9} | {row} | {100 * regret:>4.1f} % | {100 / (1 + regret):>5.1f} % | "
              f"{switches}", flush=True)  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def with_number(micro_batches: int) -> list[str]:
    return [f"schedule.num_micro_batches={micro_batches}"] if micro_batches else []


def best_fixed_s(found: dict[str, Any]) -> float:
    """found: of one round."""
    return float(min(one["in_steps_s"] for name, one in found.items() if name != AUTOPILOT))


def is_hopeless(name: str, found: dict[str, Any]) -> bool:
    seconds: float = found[name]["in_steps_s"]
    return name != AUTOPILOT and seconds > HOPELESS * best_fixed_s(found)


def run_emulated(job: list[str], line: LinkProfile) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        entries = [list(entry) for entry in line.trace]
        start([*job, "cluster/wan=line_1g", f"cluster.wan.trace={json.dumps(entries)}",
               f"cluster.wan.trace_period_s={line.trace_period_s}",
               f"hydra.run.dir={run_dir}"])  # fmt: skip
        return result(run_dir)


def run_on_hosts(job: list[str], line: LinkProfile) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        file = folder / "experiment.yaml"
        file.write_text(experiment(*job))
        run_on_two_machines(file, folder, line, CLOUDS)
        return result(folder / CLOUDS[0]) | {"changed_in": changed_in(folder / CLOUDS[0], line)}


@functools.cache
def experiment(*job: str) -> str:
    return start([*job, "cluster.wan=real", "--cfg", "job", "--resolve"])


def start(words: list[str]) -> str:
    """What it prints."""
    command = [sys.executable, "run.py", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def result(run_dir: Path) -> dict[str, Any]:
    events, collector = list(EventReader(run_dir / EVENTS_FILE)), StepCollector(2)
    totals = [collector.feed(event) for event in events]
    told = ("step", "choice", "before", "reason")
    return {
        "in_steps_s": sum(one.step_s for one in totals if one is not None),
        "switches": [{k: e[k] for k in told} for e in events if e["event"] == "autopilot"],
    }


def changed_in(run_dir: Path, line: LinkProfile) -> int:
    """The update in which a real line first changed."""
    events = [e for e in EventReader(run_dir / EVENTS_FILE) if e["rank"] == 0]
    began_s = next(e["t"] for e in events if e.get("name") == "training")
    ends = [e["t"] - began_s for e in events if e["event"] == "step"]
    return 1 + sum(end_s < line.trace[1][0] for end_s in ends)


if __name__ == "__main__":
    main()
