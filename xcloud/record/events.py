"""Follow a run's event log and merge the ranks' reports into steps. Statistics over steps are in
summary.py.

`events.jsonl` is append-only, one JSON object per line; all have "event", "rank", "cloud", "t":
start, note, phase, step, skipped_update, autopilot, lost_file, memory, privacy, timeline, quality,
finish; checkpoint, lost_checkpoint, resume, stop; in one-way jobs also fed, producer; where a
cloud may be late or lost also merge, partial_merge, absence. Rank 0 writes it for all ranks
(reporter.py), the parent follows. A step is complete when every rank has reported it, but those of
clouds that are gone.

A run that was interrupted goes on in the same file. "resume" says from which step: what was told
before of later steps is superseded (`one_timeline`).
"""

import json
import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EVENTS_FILE = "events.jsonl"  # in the run folder
LOST_LINES_FILE = "events.lost.json"  # exists only if lines were lost

Event = dict[str, Any]

# Kinds of seconds that a rank reports for a step, and kinds of traffic that every run counts, of
# which some carry tensors. A job may count more, under the names of its channels' directions, and
# AVERAGING where there are replicas to average.
TIMES = ("compute_s", "codec_s", "waiting_s", "sync_s")
TENSORS = ("forward", "backward")
TRAFFIC = (*TENSORS, "other")
AVERAGING = "averaging"
MEMORY = ("peak", "gpu_peak", "parameters", "gradients", "optimizer", "activations")
"""Bytes that a rank reports of its training; gpu_peak only where there is a GPU."""

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
        if report.get("loss") is not None:
            self._count_loss(report["loss"], report.get("tokens", 0))
        self.tokens += report.get("tokens", 0)
        self.values.update(report.get("values", {}))
        for name in ("grad_norm", "learning_rate"):
            if report.get(name) is not None:
                setattr(self, name, report[name])

    def _count_loss(self, loss: float, tokens: float) -> None:
        """One rank tells it, or, where replicas update apart, one of each: then their mean by
        token."""
        if self.loss is not None and self.tokens + tokens:
            loss = (self.loss * self.tokens + loss * tokens) / (self.tokens + tokens)
        self.loss = loss


class StepCollector:
    """Join the ranks' step reports; `feed` returns the totals once the last rank has reported.

    Ranks of a cloud that is gone are not waited for. The steps that this completes come one by one
    with the next events.
    """

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"StepCollector.num_ranks must be 1 or more, got {num_ranks}")
        self.num_ranks = num_ranks
        self._reports: dict[int, dict[int, Event]] = {}
        self._gone_until: dict[int, float] = {}  # the last step that a lost rank does not report
        self._done = -1  # the latest complete step, once ranks have gone
        self._complete: deque[StepTotals] = deque()

    def feed(self, event: Event) -> StepTotals | None:
        if event["event"] == "resume":  # from a step before those that were done
            self._reports.clear()
            self._done = min(self._done, event["step"])
        if event["event"] == "absence":
            self._note_absence(event)
        if event["event"] == "step":
            step, rank = event["step"], event["rank"]
            if step > self._done:
                self._reports.setdefault(step, {})[rank] = event
                self._close(step)
        return self._complete.popleft() if self._complete else None

    def _note_absence(self, event: Event) -> None:
        for rank in event["ranks"]:
            if event["what"] == "left":
                self._gone_until[rank] = math.inf
            elif event["what"] == "back" and rank in self._gone_until:
                self._gone_until[rank] = event["step"]  # it begins with the next one
        for step in sorted(self._reports):
            self._close(step)

    def _close(self, step: int) -> None:
        reports = self._reports[step]
        gone = {rank for rank, until in self._gone_until.items() if step <= until}
        if len(reports.keys() | gone) < self.num_ranks:
            return
        self._complete.append(StepTotals.of(step, self._reports.pop(step)))
        if self._gone_until:
            self._done = max(self._done, step)


def add_to(sums: dict[str, float], more: Mapping[str, float]) -> None:
    """sums[key] += more[key] for every key."""
    for key, value in more.items():
        sums[key] = sums.get(key, 0) + value
