"""The emulated link against the kernel's shaper (tbf), side by side.

    python -m benchmarks.bench_emulator [--mbit 10 30 100] [--rounds 3] [--json FILE]

The same experiment (demo AB-Net, no compression) runs on two network namespaces under torchrun,
their veth limited by tbf, and on this machine with the emulated link of the same bandwidth; they
take turns. Latency is 0: the kernel here has no netem. Prints the median step times, their ratio,
and the bytes, which must be equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.namespaces import available
from benchmarks.several_machines import ROOT, run_on_two_machines, write_experiment

CLOUDS = ("cloud_a", "cloud_b")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", nargs="+", type=float, default=[10.0, 30.0, 100.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if (reason := available()) is not None:
        sys.exit(f"this benchmark cannot run here: {reason}")
    results = {}
    for mbit in arguments.mbit:
        kernel, emulated = [], []
        sent: set[float] = set()
        for _ in range(arguments.rounds):
            for times, measure in ((kernel, by_kernel), (emulated, by_emulator)):
                summary = measure(mbit * 1e6, arguments.steps)
                times.append(summary["step_time_s"]["median"])
                sent.add(summary["wan_bytes_per_step"]["forward"])
        ratio = statistics.median(emulated) / statistics.median(kernel)
        print(
            f"{mbit:>6g} Mbit/s  tbf {statistics.median(kernel):.3f} s "
            f"({', '.join(f'{t:.3f}' for t in kernel)})  emulated "
            f"{statistics.median(emulated):.3f} s ({', '.join(f'{t:.3f}' for t in emulated)})  "
            f"emulated / tbf {ratio:.3f}  forward bytes per step {sorted(sent)}",
            flush=True,
        )
        results[f"{mbit:g}"] = {"tbf_s": kernel, "emulated_s": emulated, "ratio": ratio}
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def settings(steps: int) -> list[str]:
    return ["+exp=abnet_iwslt", "compression=none", f"training.max_steps={steps}",
            "training.eval_samples=1", "tracker=none"]  # fmt: skip


def by_kernel(rate: float, steps: int) -> dict:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_experiment(folder / "experiment.yaml", *settings(steps), "cluster.wan=real")
        return run_on_two_machines(folder / "experiment.yaml", folder, rate, CLOUDS)


def by_emulator(rate: float, steps: int) -> dict:
    with tempfile.TemporaryDirectory() as name:
        link = [f"cluster.wan.bandwidth_bits_per_s={rate}", "cluster.wan.latency_s=0"]
        command = [sys.executable, "run.py", *settings(steps), *link, f"hydra.run.dir={name}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        return dict(json.loads((Path(name) / "summary.json").read_text()))


if __name__ == "__main__":
    main()
