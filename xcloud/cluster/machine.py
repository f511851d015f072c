"""Which machine this is: processes on one machine share a monotonic clock. Reads one file."""

from __future__ import annotations

import hashlib
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> int:
    """Below 2**60; equal in all processes on one machine until it is started anew. Containers on
    one kernel are one machine. Without Linux's boot id every process claims the same one."""
    host = _BOOT_ID.read_text() if _BOOT_ID.exists() else "one host"
    return int(hashlib.sha256(host.encode()).hexdigest()[:15], 16)
