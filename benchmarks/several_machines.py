"""One experiment on two namespaces as two machines: torchrun in each, tbf limits the link, as a
trace says if there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.namespaces import ADDRESSES, inside, limit, two_hosts
from xcloud.net.link_profile import LinkProfile
from xcloud.record.events import EVENTS_FILE, EventReader

ROOT = Path(__file__).resolve().parent.parent
POLL_S = 0.02


def run_on_two_machines(
    file: Path,
    folder: Path,
    line: LinkProfile | None,
    clouds: tuple[str, str],
    prepare: Callable[[Sequence[str]], AbstractContextManager[object]] = nullcontext,
    master: str = ADDRESSES[0],
) -> dict[str, Any]:
    """Start the file's clouds, one rank in each, and return the first cloud's summary.

    line: bandwidth and trace of the link, whose time 0 is the beginning of the first update; None
        = no limit.
    prepare: is given the names of the hosts, and entered before anything starts. master: the
        first host's address for the others.
    """
    rate = least = None
    if line is not None:
        rate, least = line.rate_from(0.0)[0], min((e[1] for e in line.trace), default=None)
    with two_hosts(rate, min_bits_per_s=least) as hosts, prepare(hosts):
        machines = []
        for number, (host, cloud) in enumerate(zip(hosts, clouds, strict=True)):
            run_dir = folder / cloud
            run_dir.mkdir(parents=True)
            command = [
                *inside(host), sys.executable, "-m", "xcloud", "torchrun",
                "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1",
                "--master-addr", master, "--master-port", "29500",
                "-m", "xcloud", "worker", str(file), "--cloud", cloud, "--run-dir", str(run_dir),
            ]  # fmt: skip
            environment = {
                **os.environ, "OMP_NUM_THREADS": "1",
                "XCLOUD_POLICY": str(ROOT / "tests" / "policy.yaml"),
            }  # fmt: skip
            environment.pop("GLOO_SOCKET_IFNAME", None)  # the ranks find the interface
            with open(run_dir / "machine.log", "w") as log:
                machines.append(
                    subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
                )
        if line is not None and line.trace:
            _follow(line, hosts, folder / clouds[0] / EVENTS_FILE, machines)
        codes = [machine.wait() for machine in machines]
    if any(codes):
        logs = "\n".join((folder / cloud / "machine.log").read_text()[-2000:] for cloud in clouds)
        raise RuntimeError(f"the machines ended with {codes}:\n{logs}")
    return dict(json.loads((folder / clouds[0] / "summary.json").read_text()))


def _follow(
    line: LinkProfile,
    hosts: Sequence[str],
    events: Path,
    machines: Sequence[subprocess.Popen[Any]],
) -> None:
    reader, began_s = EventReader(events), None
    in_force = line.rate_from(0.0)[0]
    while all(machine.poll() is None for machine in machines):
        time.sleep(POLL_S)
        if began_s is None:
            if any(event.get("name") == "training" for event in reader):
                began_s = time.monotonic()
        elif (rate := line.rate_from(time.monotonic() - began_s)[0]) != in_force:
            in_force = rate
            for host in hosts:
                limit(host, rate)
