"""JSON and lines that a stranger may have written: nothing is kept or parsed before its size is
known to be bounded, and whatever cannot be parsed is a ValueError."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from xcloud.base.errors import DataError

MAX_LINE = 16 << 20
"""Characters of a line of a corpus."""
MAX_WHOLE = 512 << 20
"""Characters of a corpus that is one JSON value."""
MAX_JSON = 256 << 20
"""Bytes of a file of settings of a checkpoint; the largest tokenizers have 40 MB."""
MAX_UNPACKED = 200
"""Times the size of a gzip file that it may hold, beside the first 64 MB. Texts have 3 to 20."""


def parsed_json(text: str | bytes) -> Any:
    """Return what a JSON text holds.

    Raises ValueError, also for values that are nested too deeply, and for a key that occurs twice
    in one object. Python's own reader silently drops the first of the two values.
    """
    if not isinstance(text, str):
        # Python's reader finds out UTF-16 and UTF-32 likewise, but takes no half of a surrogate
        # pair.
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    try:
        return _DECODER.decode(text)
    except RecursionError:
        # `from None`: the traceback has a thousand lines.
        raise ValueError("too many values in each other") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        # Only found where there are two, as most objects have none.
        twice = next(key for number, key in enumerate(keys) if key in keys[:number])
        raise ValueError(f"the key {twice[:80]!r} stands twice in one object")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def read_json(path: Path) -> Any:
    """Return what a JSON file holds. Raises DataError for one that is too large, ValueError for
    one that is no JSON."""
    check_size(path, max_bytes=MAX_JSON)
    return parsed_json(path.read_bytes())


def check_is_ordinary(path: Path) -> None:
    """Raise DataError for a pipe, which waits for its writer, a device or a folder."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is no ordinary file; put the file itself there")


def check_size(path: Path, max_bytes: int) -> None:
    """Raise DataError for a file that is larger, and for what may never end: a pipe, a device."""
    check_is_ordinary(path)
    size = path.stat().st_size
    if size > max_bytes:
        raise DataError(f"{path} has {size:,} bytes; at most {max_bytes:,} are read")


def bounded_lines(file: IO[str], path: Path, max_line: int = MAX_LINE) -> Iterator[str]:
    """Yield the lines of an open text file. Raises DataError for one longer than `max_line`.

    path: the path of the file, which is unpacked if its name ends in .gz.
    """
    is_packed = path.suffix == ".gz"
    # 64 MB are free: a short text of one letter packs to a thousandth.
    left = (64 << 20) + MAX_UNPACKED * path.stat().st_size if is_packed else 0
    # One more than is allowed, to tell a line that is too long from one that just fits.
    while line := file.readline(max_line + 1):
        if len(line) > max_line:
            raise DataError(
                f"{path} has a line of more than {max_line:,} characters; is it text, with an end "
                "after each sample?"
            )
        left -= len(line)
        if is_packed and left < 0:
            raise DataError(
                f"{path} unpacks to more than {MAX_UNPACKED} times its size; if that is meant, "
                "unpack it and give the file"
            )
        yield line
