"""What a rank has to say, as JSON lines on their way to rank 0's events.jsonl. No formatting."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xcloud.cluster.frame import Frame

FLUSH_EVERY_S = 1.0
_MAX_CHUNK_BYTES = 1 << 17


class EventFile:
    """Appends whole lines; used by several threads of rank 0."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._file = open(path, "ab", buffering=0)

    def append(self, lines: bytes) -> None:
        with self._lock:
            self._file.write(lines)

    def append_frame(self, frame: Frame) -> None:
        """Another rank's lines, as they came over the link."""
        self.append(frame.parts[0].numpy().tobytes())


class Reporter:
    """Collects one rank's events and passes them on about once a second.

    sink: takes whole lines of at most 128 KiB at a time and does not block for long.
    """

    def __init__(self, rank: int, cloud: str, sink: Callable[[bytes], None]) -> None:
        self._rank, self._cloud, self._sink = rank, cloud, sink
        self._pending: list[bytes] = []
        self.contents: dict[str, set[str]] = {}  # kind of event -> names of what it told
        self._flushed_at_s = time.monotonic()

    def event(self, event: str, *, now: bool = False, **fields: Any) -> None:
        """now: pass it on at once (for what a person waits to see)."""
        head = {
            "event": event,
            "rank": self._rank,
            "cloud": self._cloud,
            "t": round(time.time(), 3),
        }
        self.contents.setdefault(event, set()).update(head, fields)
        self._pending.append(
            json.dumps({**head, **fields}, separators=(",", ":")).encode() + b"\n"
        )
        if now or time.monotonic() - self._flushed_at_s > FLUSH_EVERY_S:
            self.flush()

    def note(self, text: str) -> None:
        self.event("note", now=True, text=text)

    def flush(self) -> None:
        chunk = b""
        for line in self._pending:
            if chunk and len(chunk) + len(line) > _MAX_CHUNK_BYTES:
                self._sink(chunk)
                chunk = b""
            chunk += line
        if chunk:
            self._sink(chunk)
        self._pending.clear()
        self._flushed_at_s = time.monotonic()
