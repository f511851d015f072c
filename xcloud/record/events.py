"""The file in which a run tells what happens: append, follow, and join the ranks' reports.
Not a place for statistics over steps (summary.py) or for showing anything.

One JSON object a line in `events.jsonl`, append only; all have "event", "rank", "cloud", "t":
start, note, phase, step, skipped_update, lost_file, timeline,
quality, finish; in one-way jobs also fed, producer.
Rank 0 writes it for all ranks, the parent follows.
A step is complete when every rank has reported it.
"""

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EVENTS_FILE = "events.jsonl"
LOST_LINES_FILE = "events.lost.json"  # what could not be written there; only where something was

Event = dict[str, Any]

EVENTS_FILE = "events.jsonl"  # in the run folder

# Kinds of seconds that a rank reports for a step, and kinds of traffic that every run counts, of
# which some carry tensors. A job may count more, under the names of its channels' directions.
TIMES = ("compute_s", "codec_s", "waiting_s", "sync_s")
TENSORS = ("forward", "backward")
TRAFFIC = (*TENSORS, "other")

log = logging.getLogger(__name__)


def append_event(path: Path, event: str, *, rank: int, cloud: str, **fields: object) -> None:
    """Append one event, with the time of now, in a single write: readers see whole lines."""
    entry = {"event": event, "rank": rank, "cloud": cloud, "t": time.time(), **fields}
    line = json.dumps(entry, ensure_ascii=False) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


class EventReader:
    """Follows events.jsonl. `poll()` returns the events whose lines were finished since then.

    The file may not exist yet; an unfinished last line waits for its end. A finished line that
    is no JSON object (a writer died in it, another went on) is skipped, with a warning unless
    warn is False (for a second reader of the same file).
    """

    def __init__(self, path: str | Path, warn: bool = True) -> None:
        self.path = Path(path)
        self._warn = warn
        self._offset = 0
        self._unfinished = b""

    def poll(self) -> list[Event]:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(new)
        # Split bytes, not text: the end of what was read may lie inside a UTF-8 character.
        *lines, self._unfinished = (self._unfinished + new).split(b"\n")
        return [event for line in lines if (event := self._parse(line)) is not None]

    def _parse(self, line: bytes) -> Event | None:
        if not line.strip():
            return None
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict) or "event" not in event:
            if self._warn:
                log.warning("skipped a line of %s that is no event: %r", self.path, line[:200])
            return None
        return event


@dataclass
class StepTotals:
    """One complete step, all ranks joined. Seconds are sums over the ranks of a cloud."""

    step: int
    step_s: float = 0.0  # the slowest rank's
    num_ranks: dict[str, int] = field(default_factory=dict)  # by cloud
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)  # kind -> cloud -> s
    sent: dict[str, float] = field(default_factory=dict)  # bytes on the WAN link, by traffic
    raw: dict[str, float] = field(default_factory=dict)  # FP32 bytes of the tensors in them
    link_busy_s: dict[str, float] = field(default_factory=dict)
    samples: int = 0
    tokens: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    values: dict[str, float] = field(default_factory=dict)  # what a kind of job measures besides

    @classmethod
    def of(cls, step: int, reports: Mapping[int, Event]) -> "StepTotals":
        """`reports`: the "step" event of each rank."""
        totals = cls(step)
        for _, report in sorted(reports.items()):  # clouds in the layout's order
            totals._add(report)
        return totals

    def mean_s(self, kind: str) -> dict[str, float]:
        """Seconds of one of TIMES by cloud, mean over the cloud's ranks."""
        by_cloud = self.seconds.get(kind, {})
        return {cloud: value / self.num_ranks[cloud] for cloud, value in by_cloud.items()}

    def _add(self, report: Event) -> None:
        cloud = report["cloud"]
        self.step_s = max(self.step_s, report.get("step_s", 0.0))
        self.num_ranks[cloud] = self.num_ranks.get(cloud, 0) + 1
        for kind in TIMES:
            add_to(self.seconds.setdefault(kind, {}), {cloud: report.get(kind, 0.0)})
        add_to(self.sent, report.get("sent", {}))
        add_to(self.raw, report.get("raw", {}))
        add_to(self.link_busy_s, report.get("link_busy_s") or {})
        self.samples += report.get("samples", 0)
        self.tokens += report.get("tokens", 0)
        self.values.update(report.get("values", {}))
        for name in ("loss", "grad_norm", "learning_rate"):
            if report.get(name) is not None:
                setattr(self, name, report[name])


class StepCollector:
    """Joins the ranks' step reports; `feed` returns the totals when the last rank has spoken."""

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"StepCollector.num_ranks must be 1 or more, got {num_ranks}")
        self.num_ranks = num_ranks
        self._reports: dict[int, dict[int, Event]] = {}

    def feed(self, event: Event) -> StepTotals | None:
        if event["event"] != "step":
            return None
        step = event["step"]
        reports = self._reports.setdefault(step, {})
        reports[event["rank"]] = event
        if len(reports) < self.num_ranks:
            return None
        return StepTotals.of(step, self._reports.pop(step))


def add_to(sums: dict[str, float], more: Mapping[str, float]) -> None:
    """sums[key] += more[key] for every key."""
    for key, value in more.items():
        sums[key] = sums.get(key, 0) + value
