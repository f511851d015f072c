"""The machine: which it is, as processes on one share a monotonic clock, and its cores."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> int:
    """Below 2**60; the same in all processes on a machine until it reboots. Containers on one
    kernel are one machine. Without Linux's boot id all processes get the same id."""
    host = _BOOT_ID.read_text() if _BOOT_ID.exists() else "one host"
    return int(hashlib.sha256(host.encode()).hexdigest()[:15], 16)


def num_cores() -> int:
    """That this process may use; on macOS, which does not tell, all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
