"""How far a step of several stages is from its limit: all that the slowest stage computes, without
fill, and one round trip for each boundary.

    python -m benchmarks.distance_to_limit [--stages 2 4] [--rtt-ms 0 50 150]
        [--micro-batches 8 16 32] [--steps 4] [--json FILE]

Stages sleep as long as they would compute (5 ms a sample forward, twice that backward, 64 samples
an update: 0.96 s), one rank each, so that four of them fit two cores; links of 100 Mbit/s are
emulated, messages are INT8; schedules are GPipe and zero bubble, all in flight. So it shows what
schedule and links leave of the limit, not what codecs and computing do: of two stages that compute
bench_pipelining says that.
About 6 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from itertools import product
from pathlib import Path

from benchmarks.bench_emulator import ROOT, run_block
from benchmarks.emulator_rank import BATCH
from benchmarks.machine import ran_on, say_where
from xcloud.net.link_profile import BUDGET_BYTES

SAMPLE_S = 5e-3  # of a forward; a backward takes twice that
SCHEDULES: dict[str, dict[str, bool]] = {"GPipe": {}, "zero bubble": {"zero": True}}
WARM_UP = 2  # steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rtt-ms", nargs="+", type=float, default=[0.0, 50.0, 150.0])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[8, 16, 32])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    say_where()
    print(f"{'stages':>7} {'round trip':>11} {'m':>3} {'schedule':>11} | {'step':>8} "
          f"{'limit':>8} | step / limit")  # fmt: skip
    rows = []
    for stages, rtt_ms in product(given.stages, given.rtt_ms):
        limit_s = 3 * SAMPLE_S * BATCH + (stages - 1) * rtt_ms / 1e3
        found = measure(stages, rtt_ms / 1e3, given.micro_batches, given.steps)
        for (m, schedule), step_s in found.items():
            print(f"{stages:>7} {rtt_ms:>8g} ms {m:>3} {schedule:>11} | {step_s:>6.3f} s "
                  f"{limit_s:>6.3f} s | {step_s / limit_s:.3f}", flush=True)  # fmt: skip
            rows.append({"stages": stages, "rtt_ms": rtt_ms, "m": m, "schedule": schedule,
                         "step_s": step_s, "limit_s": limit_s})  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps(ran_on() | {"rows": rows}, indent=1) + "\n")


def measure(
    stages: int, rtt_s: float, counts: list[int], steps: int
) -> dict[tuple[int, str], float]:
    """Median step by number of micro-batches and schedule."""
    link = {"bandwidth_bits_per_s": 1e8, "latency_s": rtt_s / 2}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                   "XCLOUD_SLEEP_S": str(SAMPLE_S)}  # fmt: skip
    with ExitStack() as stack:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.emulator_rank", str(rank), str(stages),
                 "tcp://127.0.0.1:29573", json.dumps(link)],
                cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(stages)
        ]  # fmt: skip
        for process in ranks:
            stack.callback(process.communicate)
            stack.callback(process.kill)
        found = {}
        for m, schedule in product(counts, SCHEDULES):
            block = {"micro_batches": m, "budget_bytes": BUDGET_BYTES, **SCHEDULES[schedule]}
            run_block(ranks, block | {"steps": WARM_UP})
            found[m, schedule] = statistics.median(
                run_block(ranks, block | {"steps": steps})["times"]
            )
        return found


if __name__ == "__main__":
    main()
