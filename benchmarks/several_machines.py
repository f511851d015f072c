"""One experiment on two namespaces as two machines: torchrun in each, tbf limits the link."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.namespaces import ADDRESSES, INTERFACE, inside, two_hosts

ROOT = Path(__file__).resolve().parent.parent


def run_on_two_machines(
    file: Path, folder: Path, bandwidth_bits_per_s: float | None, clouds: tuple[str, str]
) -> dict[str, Any]:
    """Start the file's clouds, one rank in each, and return the first cloud's summary."""
    with two_hosts(bandwidth_bits_per_s) as hosts:
        machines = []
        for number, (host, cloud) in enumerate(zip(hosts, clouds, strict=True)):
            run_dir = folder / cloud
            run_dir.mkdir(parents=True)
            command = [
                *inside(host), sys.executable, "-m", "torch.distributed.run",
                "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1",
                "--master-addr", ADDRESSES[0], "--master-port", "29500",
                "-m", "xcloud", "worker", str(file), "--cloud", cloud, "--run-dir", str(run_dir),
            ]  # fmt: skip
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
            with open(run_dir / "machine.log", "w") as log:
                machines.append(
                    subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
                )
        codes = [machine.wait() for machine in machines]
    if any(codes):
        logs = "\n".join((folder / cloud / "machine.log").read_text()[-2000:] for cloud in clouds)
        raise RuntimeError(f"the machines ended with {codes}:\n{logs}")
    return dict(json.loads((folder / clouds[0] / "summary.json").read_text()))
