"""Send a rank's events to rank 0 and append them to events.jsonl; survive a full disk.

What a rank does at the moment stands in a small file of its run folder, rankN.state.json, which
`python -m xcloud status` reads. A rank that is stopped or dead leaves an old one, so the age of
the file is that of its last heartbeat.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from xcloud.base.bounded import parsed_json
from xcloud.base.terminal import say
from xcloud.net.peer import Peer
from xcloud.record import files
from xcloud.record.events import LOST_LINES_FILE, now_s
from xcloud.record.files import rank_file, replace_text

# Often enough for who watches, and few enough messages on a slow line.
FLUSH_EVERY_S = 1.0
WRITE_EVERY_S = 1.0
FINISH_WITHIN_S = 10.0  # what waits, at the end of a run
_MAX_CHUNK_BYTES = 1 << 17
MAX_WAITING_BYTES = 16 << 20
"""Reports of other ranks that wait for a slow disk: minutes of a run of many ranks."""

log = logging.getLogger(__name__)


class EventFile:
    """Append whole lines; used by several threads of rank 0.

    `append` waits for the disk. A thread of a link calls `append_later`: it brings its rank's
    heartbeats too, and a disk that stands still must not be taken for the death of that rank. Up
    to MAX_WAITING_BYTES wait then for a thread that writes them; lines beyond that are lost.

    Never fails a run: lines that cannot be written (full disk) are lost, with one warning, and
    counted; later lines are tried again. `close()` writes the count, and the ranks whose "finish"
    was lost, to events.lost.json.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._path = path
        # Unbuffered: what is written is in the file even if the process is killed.
        self.file = open(path, "ab", buffering=0, opener=files.no_link)
        with open(path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            # An earlier attempt at the run was killed while it wrote if the file ends without a
            # line feed.
            self._is_torn = end > 0 and (file.seek(end - 1), file.read(1))[1] != b"\n"
        self.lost: LostLines | None = None
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0  # what is being written included
        self._crowded_out: list[bytes] = []
        self._changed = threading.Condition()
        self._is_closing = False
        self._writer = threading.Thread(target=self._write_waiting, name="events", daemon=True)
        self._writer.start()
        # A count of an earlier attempt is none of this one.
        path.with_name(LOST_LINES_FILE).unlink(missing_ok=True)  # of an earlier run here

    def append(self, lines: bytes) -> None:
        """Append lines behind all that were given before."""
        # What other ranks reported earlier stands before what is reported now.
        self.flush(within_s=None)
        self._append(lines)

    def _append(self, lines: bytes) -> None:
        with self._lock:
            self._count_crowded_out()
            # End a torn line first, or it would spoil the next one too.
            data = b"\n" + lines if self._is_torn else lines
            num_written = 0
            try:
                # A write to a full disk may take a part of the data and say no error.
                while num_written < len(data):
                    num_new = self.file.write(data[num_written:])  # may be partial
                    if not num_new:
                        raise OSError("nothing could be written")
                    num_written += num_new
            except (OSError, ValueError) as error:  # ValueError: closed, at the end of a rank
                # The first error is told, the rest is counted.
                self.lost = self.lost or LostLines(log_file=self._path, error=error)
                # From the beginning of the line that was cut off: what stands before it is in the
                # file.
                self.lost.add(data[data.rfind(b"\n", 0, num_written) + 1 :])
            if num_written:
                self._is_torn = data[num_written - 1 : num_written] != b"\n"

    def append_later(self, lines: bytes) -> None:
        """Have lines appended in another thread. Never blocks."""
        with self._changed:
            # Never waits: the thread that calls brings a rank's heartbeats.
            if self._waiting_bytes + len(lines) > MAX_WAITING_BYTES or self._is_closing:
                self._crowded_out.append(_in_short(lines))
                return
            self._waiting.append(lines)
            self._waiting_bytes += len(lines)
            self._changed.notify_all()

    def flush(self, within_s: float | None = FINISH_WITHIN_S) -> bool:
        """Wait until all that `append_later` was given is written. Return whether it is.

        within_s: None: however long that takes.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting_bytes, within_s)

    def _write_waiting(self) -> None:
        while True:
            with self._changed:
                # `append` is not held up meanwhile: the lock of the file is taken only to write.
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    return
                lines = self._waiting.popleft()
            self._append(lines)
            with self._changed:
                # Counted until they are written, so that `flush` waits for them, too.
                self._waiting_bytes -= len(lines)
                self._changed.notify_all()

    def _count_crowded_out(self) -> None:
        # Lines were crowded out while the lock of the file may have been held, so they are counted
        # when it is.
        with self._changed:
            crowded_out, self._crowded_out = self._crowded_out, []
        for lines in crowded_out:
            error = OSError(f"more than {MAX_WAITING_BYTES:,} bytes wait for it")
            self.lost = self.lost or LostLines(log_file=self._path, error=error)
            self.lost.add(lines)

    def close(self) -> None:
        """Close the file and record what was lost, if anything."""
        # A disk that stands still ends here after FINISH_WITHIN_S: what waits is lost and counted.
        self.flush()
        with self._changed:
            self._is_closing = True
            self._crowded_out += map(_in_short, self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        with self._lock:
            self.file.close()
            self._count_crowded_out()
            if self.lost is not None:
                self.lost.write(self._path.with_name(LOST_LINES_FILE))


def _in_short(lines: bytes) -> bytes:
    """Return lines that are lost with what LostLines counts of them: how many they are, and which
    of them end a rank."""
    # Only what LostLines looks at is kept: a rank that ends.
    kept = [line if b'"event":"finish"' in line else b"-" for line in lines.split(b"\n") if line]
    return b"\n".join(kept)


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
                # Cut off in the middle, so that its rank is unknown.
                with contextlib.suppress(ValueError, LookupError, TypeError):  # half a line
                    self._finished_ranks.append(int(parsed_json(line)["rank"]))

    def write(self, path: Path) -> None:
        lost = {"lines": self.num, "finished_ranks": self._finished_ranks}
        try:
            path.write_text(json.dumps(lost), encoding="utf-8")
        except OSError as error:
            log.warning("%d event lines are lost (%s)", self.num, error)


class RankState:
    """The state file of a rank, which says what the rank does at the moment.

    peers: the record of each peer. It is set once the rank has links, whose ends note there what
        they wait for.
    lines: returns the lines to other clouds that are down, in words.
    phase: the activity of the rank, or the way in which it has ended.
    step: step of its last finished update.
    torchrun: True if torchrun has started the rank.
    says: True to print each phase on standard output.
    """

    def __init__(
        self, run_dir: Path, rank: int, torchrun: bool = False, says: bool = False
    ) -> None:
        self.peers: Mapping[int, Peer] = {}
        self.lines: Callable[[], Sequence[str]] = list
        self._path = rank_file(run_dir, rank, "state.json")
        self._rank = rank
        self.says = says
        self._facts: dict[str, Any] = {"torchrun": torchrun}
        self.may_leave = False  # the run can do without this rank, which may come back
        self.listener: Callable[[str, Mapping[str, Any]], object] = lambda event, fields: None
        # Entered before the thread starts, so that the first file has a phase.
        self.enter("joining the others")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="state", daemon=True)
        self._thread.start()

    def enter(self, phase: str) -> None:
        self._facts |= {"phase": phase, "phase_since": time.time()}
        if self.says:
            say(f"rank {self._rank}: {phase}")

    def on_event(self, event: str, fields: Mapping[str, Any]) -> None:
        self.listener(event, fields)
        if event == "phase":
            self.enter(str(fields["name"]))
        elif event in ("step", "fed") and "step" in fields:
            self._facts |= {"step": fields["step"], "step_at": time.time()}

    def close(self, ending: str) -> None:
        """ending: how the rank has ended."""
        self.enter(ending)
        self._closing.set()
        # The last state is written by the thread; a disk that stands still does not hold up the
        # end.
        self._thread.join(WRITE_EVERY_S)

    def _work(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # a full disk must not end a rank
                self._write()
            if self._closing.is_set():
                return
            self._closing.wait(WRITE_EVERY_S)

    def _write(self) -> None:
        waits = [
            {"rank": peer, "message": str(key), "since": time.time() - seconds}
            # A copy: ranks come and go while this thread looks.
            for peer, record in list(self.peers.items())
            if (awaited := record.awaited) is not None
            for key, seconds in [awaited]
        ]
        heard = {peer: round(record.silent_s, 1) for peer, record in list(self.peers.items())}
        facts = {
            "rank": self._rank, "pid": os.getpid(), "host": socket.gethostname(),
            "written": time.time(), "ended": self._closing.is_set(), **self._facts,
            "may_leave": self.may_leave, "waits_for": waits,
            "lines_down": self.lines(),
            # JSON has no infinity: a peer that was never heard has no silence.
            "silent_s": {peer: s for peer, s in heard.items() if s < float("inf")},
        }  # fmt: skip
        replace_text(self._path, text=json.dumps(facts))


class Reporter:
    """Collect one rank's events and flush them about once a second.

    sink: called with full lines, at most 128 KiB per call. It does not block for long.
    state: the state file, which gets every event.
    is_abroad: True if the reports leave this rank's cloud for that of another owner. Then they
        name no path of this machine, and describe none of this cloud's own files and texts.
    """

    def __init__(
        self,
        rank: int,
        cloud: str,
        sink: Callable[[bytes], None],
        state: RankState | None = None,
        is_abroad: bool = False,
    ) -> None:
        self._rank = rank
        self._cloud = cloud
        self._sink = sink
        self.state = state
        self.is_abroad = is_abroad
        self._pending: list[bytes] = []
        self.contents: dict[str, set[str]] = {}  # kind of event -> names of its fields
        self._flushed_at_s = time.monotonic()

    def event(self, event: str, *, now: bool = False, **fields: Any) -> None:
        """now: flush at once (for what a user waits to see)."""
        head = {
            "event": event,
            "rank": self._rank,
            "cloud": self._cloud,
            "t": round(now_s(), 6),
        }
        # For the audit, which names the fields of each kind of event that left.
        self.contents.setdefault(event, set()).update(head, fields)
        # The rank's own state file may name paths: it stays on this machine.
        if self.state is not None:
            self.state.on_event(event, fields=fields)
        if self.is_abroad:
            fields = {name: without_paths(value) for name, value in fields.items()}
        self._pending.append(
            json.dumps({**head, **fields}, separators=(",", ":")).encode() + b"\n"
        )
        # Many events are one message, so that a slow line is not full of headers.
        if now or time.monotonic() - self._flushed_at_s > FLUSH_EVERY_S:
            self.flush()

    def note(self, text: str) -> None:
        self.event("note", now=True, text=text)

    def remark(self, text: str) -> None:
        """Note a remark on this cloud's own files and texts, such as how a network was made of
        them. It is not sent to another owner's cloud."""
        # Shown to this cloud's owner alone.
        if self.is_abroad:
            say(f"rank {self._rank}: {text}")
        else:
            self.note(text)

    @contextlib.contextmanager
    def may_lose(self, name: str) -> Iterator[None]:
        """Write a file that may be lost to a full disk without failing the run: warn and count."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            log.warning("%s could not be written: %s", name, error)
            self.event("lost_file", name=name)

    def flush(self) -> None:
        chunk = b""
        for line in self._pending:
            # Whole lines, in chunks that a message can carry.
            if chunk and len(chunk) + len(line) > _MAX_CHUNK_BYTES:
                self._sink(chunk)
                chunk = b""
            chunk += line
        if chunk:
            self._sink(chunk)
        self._pending.clear()
        self._flushed_at_s = time.monotonic()


_BEGIN = r"(?<![\w./~\\])(?:~[\w.-]*|\$\{?\w+\}?|(?:[\w.+-]+:)+)?[/\\](?=[^\s])"
_QUOTED = re.compile(rf"(['\"`]){_BEGIN}.*\1")
_PLAIN = re.compile(rf"{_BEGIN}(?:.*[/\\])?.*?(?=: |, |$)|file:\S+", re.MULTILINE)
"""A path may hold blanks, commas and colons: of what is not in quotes all up to the last slash of
the line goes, and what follows up to the next colon or comma."""
A_PATH = "(a path)"


def without_paths(value: Any) -> Any:
    """Return a value of an event with every absolute path in its texts left out."""
    if isinstance(value, str):
        return _PLAIN.sub(A_PATH, _QUOTED.sub(rf"\1{A_PATH}\1", value))
    if isinstance(value, Mapping):
        return {key: without_paths(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(each) for each in value]
    return value
