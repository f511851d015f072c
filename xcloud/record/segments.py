"""What must be on the disk whole or not at all: files of checkpoints, and the finished segments of
a long event log; and what a full disk has lost of one.

A segment is finished by a rename, then compressed under another name, brought to the disk and
renamed again, and only then deleted as it was. At any moment each line is therefore in one place
of the stream that `files.read` gives, whatever ends the process.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

from xcloud.base.bounded import parsed_json
from xcloud.record.files import no_link, numbers, segment

log = logging.getLogger(__name__)


def finish(path: Path) -> FileIO:
    """Make what is in the log a finished segment; returns the file to append to from now on.
    Nothing may be written meanwhile. Raises OSError, with the log as it was."""
    plain = segment(path, number=1 + max(_numbers(path), default=0))
    path.rename(plain)
    try:
        return open(path, "ab", buffering=0, opener=no_link)
    except OSError:
        plain.rename(path)
        raise


def compress(path: Path) -> None:
    """Compress the finished segments that are not. Raises OSError, with all of them readable."""
    for number in sorted(_numbers(path)):
        plain = segment(path, number=number)
        if not plain.exists():
            continue
        write_whole(
            plain.with_name(f"{plain.name}.gz"),
            rank=0,
            pieces=[gzip.compress(plain.read_bytes(), 6)],
        )
        plain.unlink()


def _numbers(path: Path) -> set[int]:
    name = rf"{re.escape(path.stem)}\.(\d+){re.escape(path.suffix)}(?:\.gz)?"
    return {*numbers(path.parent, pattern=name)}


def write_whole(path: Path, rank: int, pieces: Iterable[bytes | memoryview]) -> tuple[str, int]:
    """Write a file under another name until all of it is on the disk. Return SHA-256 and bytes."""
    draft = draft_of(path, rank=rank)
    digest = hashlib.sha256()
    num_bytes = 0
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


def draft_of(path: Path, rank: int) -> Path:
    """Return the path at which a rank writes a file before it bears its name."""
    return path.with_name(f".{path.name}.{rank}")


def sync_names(folder: Path) -> None:
    """Bring to the disk which files and folders are in it."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


class LostLines:
    """A count of what could not be appended to an event log: how many lines, and whose
    "finish"."""

    def __init__(self, log_file: Path, error: Exception) -> None:
        self.num = 0
        self._finished_ranks = list[int]()
        log.warning(
            "cannot write to %s (%s); the run continues, its lines are lost until this is "
            "repaired: is there space on that disk?", log_file, error
        )  # fmt: skip

    def add(self, data: bytes) -> None:
        for line in filter(None, data.split(b"\n")):
            self.num += 1
            if b'"event":"finish"' in line:
                with contextlib.suppress(ValueError, LookupError, TypeError):  # half a line
                    self._finished_ranks.append(int(parsed_json(line)["rank"]))

    def write(self, path: Path) -> None:
        lost = {"lines": self.num, "finished_ranks": self._finished_ranks}
        try:
            path.write_text(json.dumps(lost), encoding="utf-8")
        except OSError as error:
            log.warning("%d event lines are lost (%s)", self.num, error)
