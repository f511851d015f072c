"""What a process needs before it says or writes anything: output that no terminal can break, text
that cannot steer one, and files that are private."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO, cast

# A newline and a tab are the only control characters that belong into a text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

_SAY_AGAIN_S = 60.0
_MAX_REASONS = 100
"""Strangers choose some of the reasons: they do not fill the memory."""


def printable(text: object) -> str:
    """Return a text with every control character but newline and tab written out.

    Whatever came from a file or from another rank goes through this on its way to a terminal,
    where an escape sequence would set the title, write over lines, or worse.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def say(text: object, error: bool = False, end: str = "\n") -> None:
    """Print a text that may hold what came from elsewhere, in one write."""
    stream = sys.stderr if error else sys.stdout
    # One write: lines of several processes would mix otherwise.
    print(printable(text) + end, end="", file=stream, flush=True)


@dataclass
class OnceAMinute:
    """Says a text, unless it has said one for the same reason less than a minute ago."""

    say: Callable[[str], object]
    _said_at_s: dict[str, float] = field(default_factory=dict)  # by reason
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, text: str, reason: str | None = None) -> None:
        """reason: the text itself by default."""
        reason = reason or text
        now_s = time.monotonic()
        # Threads of several connections may say the same at once.
        with self._lock:
            if now_s - self._said_at_s.get(reason, float("-inf")) < _SAY_AGAIN_S:
                return
            # Forgetting all is enough: then a text may come twice in a minute.
            if len(self._said_at_s) >= _MAX_REASONS:
                self._said_at_s.clear()
            self._said_at_s[reason] = now_s
        # Outside the lock: a terminal that does not read would hold up every other thread.
        self.say(text)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal. FORCE_COLOR, which notebooks and many CI services
    set, asks for colors and makes no terminal of a file."""
    return stream is not None and not stream.closed and stream.isatty()


def can_rewrite(stream: TextIO | None) -> bool:
    """Return whether a line that is shown on a stream can be replaced by the next one."""
    return is_terminal(stream) and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def prepare_process() -> None:
    """Prepare a command, before it imports or writes anything else.

    Standard streams that are closed lead nowhere; what a terminal's encoding lacks is shown by its
    number; files are the user's own alone; pictures need no screen, whatever a notebook has set.
    """
    for number in range(3):  # in this order: a new descriptor is the lowest free one
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = _lasting(sys.stdout, number=1)
    sys.stderr = _lasting(sys.stderr, number=2)
    # What a run writes (keys, texts, checkpoints) is its user's alone.
    os.umask(0o077)
    os.environ["MPLBACKEND"] = "agg"


class _Lasting(io.FileIO):
    """An output whose reader may go away (a closed terminal, `| head`): the rest is dropped."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # EIO: the terminal has been closed.
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            return memoryview(data).nbytes


def _lasting(stream: TextIO | None, number: int) -> TextIO:
    if stream is not None:
        stream.flush()
    given = cast(io.TextIOWrapper, stream)
    # closefd: the descriptor stays open for whoever else writes to it.
    raw = io.BufferedWriter(_Lasting(number, "wb", closefd=False))
    return io.TextIOWrapper(
        raw,
        encoding="utf-8" if stream is None else stream.encoding,
        errors="backslashreplace",
        line_buffering=stream is not None and given.line_buffering,
        write_through=stream is not None and given.write_through,
    )


def signals_to_stop() -> list[signal.Signals]:
    """Return the signals that ask a command to save what there is and to end.

    SIGHUP, which the terminal sends when it closes, is not one of them in a command that was
    started to outlive its terminal (nohup).
    """
    found = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    # nohup ignores SIGHUP for its child, and so does this command.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found
