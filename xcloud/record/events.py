"""Follow a run's event log and merge the ranks' reports into steps. Statistics over steps are in
summary.py.

`events.jsonl` is append-only, one JSON object per line; all have "event", "rank", "cloud", "t":
start, note, phase, step, skipped_update, lost_file, timeline, quality, finish; checkpoint,
lost_checkpoint, resume, stop; in one-way jobs also fed, producer. Rank 0 writes it for all ranks
(reporter.py), the parent follows. A step is complete when every rank has reported it.

A run that was interrupted goes on in the same file. "resume" says from which step: what was told
before of later steps is superseded (`one_timeline`).
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EVENTS_FILE = "events.jsonl"  # in the run folder
LOST_LINES_FILE = "events.lost.json"  # exists only if lines were lost

Event = dict[str, Any]

# Kinds of seconds that a rank reports for a step, and kinds of traffic that every run counts, of
# which some carry tensors. A job may count more, under the names of its channels' directions.
TIMES = ("compute_s", "codec_s", "waiting_s", "sync_s")
TENSORS = ("forward", "backward")
TRAFFIC = (*TENSORS, "other")

log = logging.getLogger(__name__)


class EventReader:
    """Follow events.jsonl; `poll()` returns the events completed since the last call.

    The file may not exist yet; an incomplete last line is kept until it is complete. A line that
    is not a JSON object (its writer died, another continued) is skipped, with a warning unless
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
        # Split bytes, not text: the data read may end inside a UTF-8 character.
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


def one_timeline(events: Iterable[Event]) -> list[Event]:
    """Without what was told of steps that were done again. A "resume" event then has
    "steps_again", the number of these steps, and "lost_s": from the end of the step that the run
    went on from until it did."""
    kept: list[Event] = []
    for event in events:
        if event["event"] == "resume":
            step, steps = _step(event), [e for e in kept if e["event"] == "step"]
            done_at_s = [_at_s(e) for e in steps if _step(e) <= step] or list(map(_at_s, kept[:1]))
            lost_s = _at_s(event) - max(done_at_s, default=_at_s(event))
            again = len({_step(e) for e in steps if _step(e) > step})
            event = {**event, "steps_again": again, "lost_s": lost_s}
            kept = [_seen_from(step, e) for e in kept if not _is_superseded(e, step)]
        kept.append(event)
    return kept


def _step(event: Event) -> int:
    """0 for an event of no step, and for one that is malformed."""
    step = event.get("step")
    return step if isinstance(step, int) else 0


def _at_s(event: Event) -> float:
    at_s = event.get("t")
    return at_s if isinstance(at_s, int | float) else 0.0


def _is_superseded(event: Event, step: int) -> bool:
    if event["event"] in ("finish", "timeline"):  # of the end of an attempt
        return True
    stays = event["event"] in ("resume", "checkpoint", "lost_checkpoint")
    return not stays and _step(event) > step


def _seen_from(step: int, event: Event) -> Event:
    """The time that an earlier attempt has lost lies within what a later one loses, if that goes
    further back."""
    is_within = event["event"] == "resume" and _step(event) >= step
    return {**event, "lost_s": 0.0} if is_within else event


@dataclass
class StepTotals:
    """One complete step over all ranks. Seconds are sums over the ranks of a cloud."""

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
    values: dict[str, float] = field(default_factory=dict)  # further measurements of a kind of job

    @classmethod
    def of(cls, step: int, reports: Mapping[int, Event]) -> "StepTotals":
        """reports: the "step" event of each rank."""
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
    """Join the ranks' step reports; `feed` returns the totals once the last rank has reported."""

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"StepCollector.num_ranks must be 1 or more, got {num_ranks}")
        self.num_ranks = num_ranks
        self._reports: dict[int, dict[int, Event]] = {}

    def feed(self, event: Event) -> StepTotals | None:
        if event["event"] == "resume":
            self._reports.clear()  # of steps that not every rank had reported
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
