"""Child processes forked from one that has imported torch: what a run's processes are, without the
seconds of importing. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


class Child:
    """What launch.py uses of a Popen. A subclass says how the process is waited for."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def _ended(self) -> int | None:
        """The exit code, negative for a signal; None while the process goes on."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._ended()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until_s = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if until_s is not None and time.monotonic() >= until_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # its number is not given to another process before that
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork() -> int:
    """os.fork of a process of one thread: what others hold would stay locked in the child. That of
    jemalloc (in pyarrow) begins anew there."""
    others = {*Path("/proc/self/task").iterdir()} - {Path(f"/proc/self/task/{os.getpid()}")}
    names = set()
    for thread in others:
        with contextlib.suppress(OSError):  # it has just ended
            names.add((thread / "comm").read_text().strip())
    assert names <= {"jemalloc_bg_thd"}, f"a fork with threads: {names}"
    return os.fork()


def become(body: Callable[[], object], log: Path, how: int = os.O_APPEND) -> NoReturn:
    """In a child: run `body` in a session of its own, with its output in `log` (how: os.O_APPEND
    or os.O_TRUNC), and end as a Python process does."""
    code = 1
    try:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | how, 0o666)
        for there, here in ((os.open(os.devnull, os.O_RDONLY), 0), (file, 1), (file, 2)):
            os.dup2(there, here)
        body()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
