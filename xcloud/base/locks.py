"""Locks on files, which end with the process that holds them."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.05
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class LockTaken(Exception):
    """Another process holds the lock; the text is what it wrote into the file."""


@contextmanager
def locked(path: Path, wait_s: float | None = None) -> Iterator[int]:
    """Hold the lock on a file, which is made if it is missing, and yield its descriptor.

    The kernel gives the lock back when the process ends, however it ends. The file stays.

    wait_s: seconds to wait for another holder. None: wait without a limit.
    Raises LockTaken after wait_s. Raises OSError, naming the file and what to do, if the file
    system has no locks.
    """
    # O_NOFOLLOW: a link under that name may lead to another user's file. O_CLOEXEC: a child that
    # outlives the process would keep the lock.
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _acquire(file, path, wait_s)
        yield file
    finally:
        os.close(file)


def _acquire(file: int, path: Path, wait_s: float | None) -> None:
    until_s = time.monotonic() + wait_s if wait_s is not None else None
    while True:
        try:
            # Without a limit the kernel waits; with one it is asked again and again, as flock has
            # no limit of its own.
            return fcntl.flock(file, fcntl.LOCK_EX | (0 if until_s is None else fcntl.LOCK_NB))
        except BlockingIOError:
            if until_s is None or time.monotonic() >= until_s:
                # Whoever holds the lock has written into the file who it is.
                raise LockTaken(os.pread(file, 1000, 0).decode("utf-8", "replace")) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise no_locks(path, error) from None
        time.sleep(POLL_S)


def no_locks(path: Path, error: OSError) -> OSError:
    """Build the error for a file system without file locks, such as Lustre or NFS without lockd:
    two processes could not be kept apart there."""
    advice = (
        f"{error.strerror}: this file system has no file locks, without which two commands would "
        "spoil each other's files; put the folder on a local disk (a run: hydra.run.dir, "
        "several machines: --run-dir, a sweep: hydra.sweep.dir, the cache: cache_dir, MLflow: "
        "tracker.root)"
    )
    return OSError(error.errno, advice, str(path))
