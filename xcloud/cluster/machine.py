"""Identify the machine: processes on one machine share a monotonic clock."""

from __future__ import annotations

import hashlib
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> int:
    """Below 2**60; the same in all processes on a machine until it reboots. Containers on one
    kernel are one machine. Without Linux's boot id all processes get the same id."""
    host = _BOOT_ID.read_text() if _BOOT_ID.exists() else "one host"
    return int(hashlib.sha256(host.encode()).hexdigest()[:15], 16)
