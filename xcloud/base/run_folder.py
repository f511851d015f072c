"""Who may write into a run folder, and what no run folder holds."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import ConfigError
from xcloud.base.locks import POLL_S, LockTaken, locked
from xcloud.base.wording import MAX_NAME_BYTES

LOCK_FILE = ".lock"


def file_name(text: str, end: str = "") -> str:
    """Return a text with an end as the name of a file: one that would be too long is cut, and a
    digest of all of it tells it from others that begin alike."""
    name = f"{text}{end}"
    if len(name.encode()) <= MAX_NAME_BYTES:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    # A character may be cut at the end; 13 bytes are the dash and the digest.
    kept = text.encode()[: MAX_NAME_BYTES - len(end.encode()) - 13].decode(errors="ignore")
    return f"{kept}-{digest}{end}"


@contextmanager
def owned(run_dir: Path, advice: str = "") -> Iterator[None]:
    """Own a run folder, which is made if it is missing: nobody else writes there meanwhile.

    advice: advice for the error message if the folder is in use. "": the advice for a run.
    Raises ConfigError, before anything in the folder is touched, if another process owns it or
    something in it is no plain file.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    # Before anything is opened in it, also for the lock.
    refuse_links(run_dir)
    # Entered by hand, so that LockTaken of this lock is told from what the caller raises.
    lock = locked(run_dir / LOCK_FILE, wait_s=0)
    try:
        file = lock.__enter__()
    except LockTaken as taken:
        advice = advice or (
            f"to see what it does, python -m xcloud status {shlex.quote(str(run_dir))}; wait for "
            "it or end it, or choose another folder"
        )
        raise ConfigError(f"{run_dir} is in use by {_named(str(taken))}: {advice}") from None
    try:
        os.ftruncate(file, 0)
        this_process = {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": shlex.join(sys.argv)[:200],
        }
        os.pwrite(file, json.dumps(this_process).encode(), 0)
        yield
    finally:
        lock.__exit__(None, None, None)


def check_is_folder(folder: Path) -> None:
    """Raise ConfigError unless the folder is there and holds nothing but files and folders."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    refuse_links(folder)


def owner(run_dir: Path) -> dict[str, object]:
    """Return what the folder's owner, or its last one, wrote of itself; empty if nobody did."""
    try:
        found = parsed_json((run_dir / LOCK_FILE).read_text("utf-8"))
    # Half a text: its owner has only just begun to write it.
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def check_owned_by_parent(run_dir: Path) -> None:
    """Block until this process's parent, or a child of it, has come to own the folder.

    Ranks that torchrun starts beside the first one of their machine call it. If the folder is
    another command's, the first rank fails, and torchrun ends this one.
    """
    # The parent of the first rank is torchrun, which is this process's parent as well.
    while owner(run_dir).get("parent") != os.getppid():
        time.sleep(POLL_S)


def _named(text: str) -> str:
    """Name the owner by what it has written."""
    try:
        found = parsed_json(text)
        who = f"process {found['pid']} on {found['host']} since {found['since']}"
        return f"{who} ({found['command']})"
    except (ValueError, LookupError, TypeError):  # it has only just taken the lock
        return "another process"


def refuse_links(folder: Path) -> None:
    """Raise ConfigError for whatever is neither a folder nor a plain file, at any depth.

    Through a symbolic link a folder from elsewhere would have a file outside of it read or
    overwritten; a pipe would block for ever. The folder itself may be a link.
    """
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            try:
                # lstat: the link itself, not what it leads to.
                mode = path.lstat().st_mode
            except FileNotFoundError:  # a file of a living run, which has gone meanwhile
                continue
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                what = "a symbolic link" if stat.S_ISLNK(mode) else "no plain file"
                raise ConfigError(
                    f"{path} is {what}, and what a run reads and writes lies in its own folder: "
                    f"replace it by a copy, or make all of {folder} a link"
                )
