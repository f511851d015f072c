"""Seconds of a step over a sealed line between two owners, beside gloo between the same hosts.

    python -m benchmarks.line_steps [--rtt-ms 0 100] [--micro-batches 4 16] [--mbit 100]
        [--steps 60] [--rounds 3] [--json FILE]

Two network namespaces are the clouds' machines, of one rank of one thread each. The same small
job of 1.5 MB each way in an update, uncompressed, runs over gloo (`cluster/wan=real`, torchrun)
and over a sealed line (`xcloud join`), in turns, so often as --rounds says. Printed for each round
trip and number of micro-batches: the median of the steps of each run, and the ratio of each pair.
Needs what benchmarks/namespaces.py needs; alone on the machine, three quarters of a minute a pair.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import ran_on, say_where
from benchmarks.namespaces import ADDRESSES, delay_available, inside, two_hosts
from tests.owners import CLOUDS, TwoOwners

ROOT = Path(__file__).resolve().parent.parent
PORT = 7000
WITHIN_S = 300.0
CARRIERS = ("gloo", "line")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rtt-ms", type=float, nargs="+", default=[0.0, 100.0])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if (reason := delay_available()) is not None:
        sys.exit(f"this benchmark cannot run here: {reason}")
    say_where()
    rows = []
    for rtt_ms in given.rtt_ms:
        for num_micro_batches in given.micro_batches:
            pairs = []
            for number in range(given.rounds):
                with two_hosts(given.mbit * 1e6, rtt_ms / 1e3 or None) as hosts:
                    order = CARRIERS if number % 2 == 0 else CARRIERS[::-1]
                    pairs.append(
                        {
                            carrier: step_s(carrier, hosts, num_micro_batches, given.steps)
                            for carrier in order
                        }
                    )
            ratios = [pair["line"] / pair["gloo"] for pair in pairs]
            print(
                f"{given.mbit:g} Mbit/s, {rtt_ms:g} ms, m = {num_micro_batches}: "
                f"step over gloo {statistics.median(pair['gloo'] for pair in pairs):.4f} s, "
                f"over the line {statistics.median(pair['line'] for pair in pairs):.4f} s, "
                f"ratios {' '.join(f'{ratio:.3f}' for ratio in ratios)}",
                flush=True,
            )
            row = {"mbit": given.mbit, "rtt_ms": rtt_ms, "micro_batches": num_micro_batches}
            rows.append({**row, "pairs": pairs})
    if given.json:
        given.json.write_text(json.dumps({"ran_on": ran_on(), "rows": rows}) + "\n")


def step_s(carrier: str, hosts: Sequence[str], num_micro_batches: int, num_steps: int) -> float:
    """Run the job over one carrier, and return the median of its steps in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        is_line = carrier == "line"
        address = f"+cluster.clouds.cloud_a.address={ADDRESSES[0]}:{PORT}"
        owners = TwoOwners(
            Path(folder),
            [
                *([address] if is_line else []),
                f"training.max_steps={num_steps}",
                "training.batch_size=64",
                f"schedule.num_micro_batches={num_micro_batches}",
            ],
            {
                "model.hidden": 1024,
                "task.num_samples": 1000,
                **({} if is_line else {"cluster.wan": "real"}),
            },
        )
        commands = []
        for number, (cloud, host) in enumerate(zip(CLOUDS, hosts, strict=True)):
            own = ["--cloud", cloud, "--run-dir", str(owners.run_dir(cloud))]
            words = ["join", str(owners.file), *own]
            if not is_line:
                words = [
                    *("torchrun", "--nnodes", "2", "--node-rank", str(number)),
                    *("--nproc-per-node", "1", "--master-addr", ADDRESSES[0]),
                    *("--master-port", "29500", "-m", "xcloud", "worker"),
                    *(str(owners.file), *own),
                ]
            environment = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "XCLOUD_POLICY": str(owners.folder / f"owner_{cloud}" / "policy.yaml"),
            }
            with owners.log(cloud).open("w") as log:
                commands.append(
                    subprocess.Popen(
                        [*inside(host), sys.executable, "-m", "xcloud", *words],
                        cwd=ROOT,
                        env=environment,
                        stdout=log,
                        stderr=log,
                    )
                )
        try:
            codes = [command.wait(WITHIN_S) for command in commands]
        finally:
            for command in commands:
                command.kill()
                command.wait()
        if any(codes):
            sys.exit("".join(owners.said(cloud) for cloud in CLOUDS))
        summary = json.loads((owners.run_dir(CLOUDS[0]) / "summary.json").read_text())
        return float(summary["step_time_s"]["median"])


if __name__ == "__main__":
    main()
