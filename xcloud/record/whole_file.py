"""Write a file completely or not at all, whatever ends the process or the machine. No torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, rank: int, pieces: Iterable[bytes | memoryview]) -> tuple[str, int]:
    """Under another name until all of it is on the disk. Returns SHA-256 and bytes."""
    draft, digest, num_bytes = path.with_name(f".{path.name}.{rank}"), hashlib.sha256(), 0
    try:
        with open(draft, "wb", buffering=0) as file:
            for piece in pieces:
                digest.update(piece)
                rest = memoryview(piece)
                while rest:
                    rest = rest[file.write(rest) :]
                num_bytes += len(piece)
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_names(path.parent)
    return digest.hexdigest(), num_bytes


def sync_names(folder: Path) -> None:
    """Bring to the disk which files and folders are in it."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
