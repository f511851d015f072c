"""Files and folders that are made once and kept. What is found under their name is whole."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from filelock import FileLock


def make_once(path: Path, make: Callable[[Path], None]) -> bool:
    """Make `path` unless it exists; returns whether it had to be made.

    One process at a time calls make(part), which writes the file or folder `part`; it gets its
    name when it is whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if path.exists():
            return False
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        make(part)
        part.replace(path)
        return True


def key_of(described: Mapping[str, object], *data: Iterable[bytes]) -> str:
    """A file name for what is made of these settings (JSON values) and data."""
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for pieces in data:
        for piece in pieces:
            digest.update(piece)
    return digest.hexdigest()[:32]


def bytes_of(tokens: Iterable[Sequence[int]]) -> Iterable[bytes]:
    """Token ids of texts, each with its length, for `key_of`."""
    return (array("q", [len(text), *text]).tobytes() for text in tokens)
