"""Files that hold something else than their names promise: what a clone without its large files,
or a failed download, leaves in place of data. Reads the beginning of a file, never all of it."""

from __future__ import annotations

import codecs
import gzip
import zlib
from pathlib import Path

from xcloud.base.bounded import parsed_json, read_json
from xcloud.base.errors import DataError

HEAD = 1 << 16  # bytes that are looked at
MAX_HEADER = 100_000_000  # bytes of safetensors' own limit
AGAIN = "download it again"
# How a file begins that is no data, how long such a file may be, what it is then, what to do.
PLACEHOLDERS: tuple[tuple[bytes, int, str, str], ...] = (
    (b"version https://git-lfs", 2_000, "a Git LFS pointer, not the file itself",
     "run `git lfs pull` in its clone"),
    (b"/annex/objects/", 2_000, "a git-annex pointer, not the file itself",
     "run `git annex get` on it"),
    (b"<!doctype html", 1_000_000, "a web page, as a failed download leaves it", AGAIN),
    (b"<html", 1_000_000, "a web page, as a failed download leaves it", AGAIN),
    (b"entry not found", 200, "the hub's answer for a file that it lacks", AGAIN),
    (b"repository not found", 200, "the hub's answer for a repository that it lacks", AGAIN),
    (b"invalid username or password", 200, "the hub's refusal of a download", AGAIN),
    (b"access denied", 200, "a server's refusal of a download", AGAIN),
)  # fmt: skip
# How a file begins that is data, but no UTF-8 text.
NO_TEXT: tuple[tuple[bytes, str, str], ...] = (
    (b"\xff\xfe", "UTF-16 text", "write it as UTF-8: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "write it as UTF-8: iconv -f UTF-16 -t UTF-8"),
    (b"\x1f\x8b", "packed by gzip", "give it a name that ends in .gz"),
    (b"PK\x03\x04", "a zip archive", "unpack it"),
    (b"BZh", "packed by bzip2", "unpack it"),
    (b"\xfd7zXZ\x00", "packed by xz", "unpack it"),
    (b"\x28\xb5\x2f\xfd", "packed by zstd", "unpack it"),
    (b"PAR1", "a parquet file", "write it as .jsonl, or read its folder by profile=paper"),
)


def check_is_data(path: Path) -> bytes:
    """Return the first bytes of a file. Raises DataError if it is empty, or stands for a file that
    is not here. Of a pipe nothing is read."""
    check_is_no_dead_link(path)
    # Reading would wait for the writer, and take what the command is meant to get.
    if path.is_fifo():
        return b""
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if not head:
        raise DataError(f"{path} is empty (0 bytes); {AGAIN}, or remove it")
    _check_is_no_placeholder(path, head)
    # Object stores answer a refused download with an error in XML.
    start = head.lstrip()[:500]
    if start.startswith(b"<?xml") and b"<Error>" in start:
        raise DataError(f"{path} is a server's error message, not the file itself; {AGAIN}")
    return head


def check_is_no_dead_link(path: Path) -> None:
    """Raise DataError for a link to nothing, as git-annex and unfinished downloads have them."""
    if path.is_symlink() and not path.exists():
        raise DataError(f"{path} is a link to a file that is not here; fetch that, or remove it")


def check_is_text(path: Path) -> None:
    """Raise DataError if a file is no UTF-8 text with line feeds, gzipped where its name ends in
    .gz."""
    head = check_is_data(path)
    # A pipe has no head.
    if path.suffix == ".gz" and head:
        if not head.startswith(b"\x1f\x8b"):
            raise DataError(f"{path} cannot be read: no gzip, as its name says; rename or pack it")
        try:
            with gzip.open(path, "rb") as file:
                head = file.read(HEAD)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{path} cannot be read: truncated or damaged ({error}); {AGAIN}"
            ) from error
        if not head:
            raise DataError(f"{path} is empty once it is unpacked; {AGAIN}, or remove it")
        # A placeholder may have been packed, too.
        _check_is_no_placeholder(path, head)
    for start, what, remedy in NO_TEXT:
        if head.startswith(start):
            raise DataError(f"{path} is {what}; {remedy}")
    # UTF-16 without a mark of its order: every second byte of English text is zero.
    if b"\0" in head:
        raise DataError(f"{path} holds zero bytes: it is no UTF-8 text, or UTF-16 without a mark")
    try:
        codecs.getincrementaldecoder("utf-8")().decode(
            head
        )  # a character may be cut off at the end
    except UnicodeDecodeError as error:
        said = f"byte {error.start} is 0x{head[error.start]:02x}"
        raise DataError(
            f"{path} is not UTF-8 text ({said}); write it as UTF-8: iconv -f LATIN1 -t UTF-8"
        ) from error
    # The last line may lack its line feed, so a file of one line has none.
    if b"\n" not in head and b"\r" in head.rstrip(b"\r"):
        raise DataError(
            f"{path}: its lines end with a carriage return only, as on old Macs; write line feeds:"
            " tr '\\r' '\\n' < OLD > NEW"
        )


def check_is_json(path: Path) -> None:
    """Raise DataError if a file of settings, such as a tokenizer's, is a placeholder or cut
    off."""
    check_is_data(path)
    try:
        read_json(path)
    except ValueError as error:
        said = str(error)[:200]
        raise DataError(
            f"{path} is no complete JSON ({said}); is it truncated? {AGAIN}"
        ) from error


def check_is_safetensors(path: Path) -> None:
    """Raise DataError if a file of weights is a placeholder, or shorter than its header says."""
    head = check_is_data(path)
    num_bytes = path.stat().st_size
    # safetensors: a length of 8 bytes, a header of JSON, then the tensors.
    length = int.from_bytes(head[:8], "little")
    if not 2 <= length <= min(num_bytes - 8, MAX_HEADER) or head[8:9] != b"{":
        raise DataError(f"{path} is no safetensors file, or its beginning is damaged; {AGAIN}")
    with open(path, "rb") as file:
        file.seek(8)
        text = file.read(length)
    try:
        tensors = {name: of for name, of in parsed_json(text).items() if name != "__metadata__"}
        # The header says where the last tensor ends, so a file that was cut off is found without
        # reading it.
        wanted = 8 + length + max((of["data_offsets"][1] for of in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: the header of its tensors is damaged; {AGAIN}") from error
    if num_bytes < wanted:
        said = f"{num_bytes:,} of {wanted:,} bytes"
        raise DataError(f"{path} is truncated: it has {said}; {AGAIN}")


def _check_is_no_placeholder(path: Path, head: bytes) -> None:
    # A page may begin with a mark of its encoding and blanks.
    begins = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    num_bytes = path.stat().st_size
    for start, longest, what, remedy in PLACEHOLDERS:
        # Only short files: a corpus about web pages may begin like one.
        if begins.startswith(start) and num_bytes <= longest:
            raise DataError(f"{path} is {what}; {remedy}")
