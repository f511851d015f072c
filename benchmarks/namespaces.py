"""Network namespaces as hosts on one machine, joined by a veth pair that the kernel limits (tbf).

Needs root and iproute2. Traffic stays on this machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

INTERFACE = "xc-veth"
ADDRESSES = ("10.213.0.1", "10.213.0.2")


def available() -> str | None:
    """None if namespaces can be made here, else why not."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} (iproute2) is not installed"
    probe = f"xc-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"namespaces are not allowed here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


@contextmanager
def two_hosts(bandwidth_bits_per_s: float | None) -> Iterator[tuple[str, str]]:
    """Names of two namespaces whose veth pair carries at most this rate each way (None: no limit).

    Prefix a command with `inside(name)` to run it there.
    """
    names = tuple(f"xc-{os.getpid()}-{side}" for side in "ab")
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", INTERFACE, "netns", names[0], "type", "veth",
             "peer", "name", INTERFACE, "netns", names[1])  # fmt: skip
        for name, address in zip(names, ADDRESSES, strict=True):
            _run(*inside(name), "ip", "addr", "add", f"{address}/24", "dev", INTERFACE)
            _run(*inside(name), "ip", "link", "set", "lo", "up")
            _run(*inside(name), "ip", "link", "set", INTERFACE, "up")
            if bandwidth_bits_per_s is not None:
                # A queue of 1 s never drops what the sockets hand over. The burst (what passes at
                # once after a pause) is small, 4 ms of the line: with 64 kB of it a 10 Mbit/s
                # link carries each message 50 ms faster than its bandwidth allows.
                burst = max(3 * 1514, round(bandwidth_bits_per_s / 8 * 0.004))
                _run(*inside(name), "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf",
                     "rate", f"{bandwidth_bits_per_s:.0f}bit", "burst", f"{burst}b",
                     "latency", "1s")  # fmt: skip
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def inside(name: str) -> Sequence[str]:
    return ("ip", "netns", "exec", name)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
