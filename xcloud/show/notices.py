"""Run a command of the user's when a run diverges, loses a cloud, resumes or ends
(`launch.on_event`)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LIMIT_S = 10.0  # for a call of the command, and for those that are open when the run has ended
POLL_S = 0.1
MAX_WAITING = 16  # events; where the command is slower than they come, further ones are dropped

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Notices:
    """A queue of events and a thread that calls the command for one after another.

    The event is JSON on the command's standard input and never part of its words, which no shell
    reads. A command that fails, hangs or cannot be started costs a warning, and never the run.

    command: a command in words as in a shell. None: nothing is called.
    about: fields about the run that every event carries.
    """

    command: str | None
    about: Mapping[str, str]
    _waiting: queue.Queue[dict[str, Any]] = field(default_factory=lambda: queue.Queue(MAX_WAITING))
    _thread: threading.Thread | None = None
    _is_closed: threading.Event = field(default_factory=threading.Event)

    def send(self, event: str, **facts: Any) -> None:
        """Have the command called with this event. Return at once."""
        if self.command is None:
            return
        told = {"event": event, "time": round(time.time(), 3), **self.about, **facts}
        # Never blocks: a command that hangs must not hold the run up.
        try:
            self._waiting.put_nowait(told)
        except queue.Full:
            log.warning("launch.on_event is slower than events come: %s was dropped", event)
            return
        # A run without such an event needs no thread.
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="on_event", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait until the command has been called for all events, for LIMIT_S at most. What it has
        not done by then is not done; nothing of it is left running."""
        # Nothing was ever sent.
        if self._thread is None:
            return
        give_up_at_s = time.monotonic() + LIMIT_S
        # A short time for what is still open, and then it is over.
        while self._waiting.unfinished_tasks and time.monotonic() < give_up_at_s:
            time.sleep(0.01)
        self._is_closed.set()
        if num := self._waiting.unfinished_tasks:
            log.warning("launch.on_event was not done within %g s: %d events", LIMIT_S, num)
            self._thread.join(LIMIT_S)

    def _work(self) -> None:
        while not self._is_closed.is_set():
            try:
                # Looks up now and then whether it is to end.
                told = self._waiting.get(timeout=POLL_S)
            except queue.Empty:
                continue
            try:
                self._run(told)
            except (OSError, ValueError) as error:
                log.warning("launch.on_event (%s): %s", told["event"], error)
            finally:
                self._waiting.task_done()

    def _run(self, told: Mapping[str, Any]) -> None:
        """Run the command in a session of its own: Ctrl+C is for the run, and its time limit ends
        what it has started, too."""
        process = subprocess.Popen(
            shlex.split(self.command or ""),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # A session of its own, so that what the command starts can be ended with it.
            start_new_session=True,
        )
        end_at_s = time.monotonic() + LIMIT_S
        given: bytes | None = json.dumps(told).encode()
        while process.returncode is None:
            # Looked at in short turns, as `close` may end it at any time.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(given, timeout=POLL_S)
            given = None
            if self._is_closed.is_set() or time.monotonic() > end_at_s:
                break
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            log.warning("launch.on_event (%s) took too long and was ended", told["event"])
        elif process.returncode:
            log.warning(
                "launch.on_event (%s) ended with code %d", told["event"], process.returncode
            )
