"""Follow a run's event log and merge the ranks' reports into steps. Statistics over steps are in
summary.py.

`events.jsonl` (long: with finished segments before it, segments.py) is append-only, one JSON
object per line; all have "event", "rank", "cloud", "t" and what event_kinds.py says. Rank 0 writes
it for all ranks (reporter.py, intake.py), the parent follows. A step is complete when every rank
has reported it, but those of clouds that are gone.

A run that was interrupted goes on in the same file. "resume" says from which step: what was told
before of later steps is superseded (`Attempts.one_timeline`).
"""

import itertools
import json
import logging
import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from xcloud.record import segments
from xcloud.record.segments import EVENTS_FILE as EVENTS_FILE

LOST_LINES_FILE = "events.lost.json"  # exists only if lines were lost

Event = dict[str, Any]
Line = tuple[str, str]  # from a cloud to another

# Kinds of seconds that a rank reports for a step, and kinds of traffic that every run counts, of
# which some carry tensors. A job may count more, under the names of its channels' directions, and
# AVERAGING where there are replicas to average.
TIMES = ("compute_s", "codec_s", "waiting_s", "sync_s")
TENSORS = ("forward", "backward")
TRAFFIC = (*TENSORS, "other")
AVERAGING = "averaging"
MEMORY = ("peak", "gpu_peak", "parameters", "gradients", "optimizer", "activations",
          "checkpoint")  # fmt: skip
"""Bytes that a rank reports of its training; gpu_peak only where there is a GPU."""

MAX_TIME_S = 1e11  # of a clock: beyond it there is no date
MAX_DEPTH = 8  # of the lists and objects in a line

MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What feeding an event may raise that is from another cloud, or partly lost."""

log = logging.getLogger(__name__)


class EventReader:
    """Follow an event log; `poll()` returns the events completed since the last call, iteration
    gives them one by one, and may be left and taken up again.

    The log may not exist yet; an incomplete last line is kept until it is complete. A line that
    is not a JSON object (its writer died, another continued) is skipped, with a warning unless
    warn is False (for a second reader of the same file).
    """

    def __init__(self, path: str | Path, warn: bool = True) -> None:
        self.path = Path(path)
        self._warn = warn
        self._segment, self._offset = 1, 0
        self._lines: deque[bytes] = deque()
        self._unfinished = b""

    def poll(self) -> list[Event]:
        return list(self)

    def __iter__(self) -> Iterator[Event]:
        while self._lines or self._read():
            if (event := self._parse(self._lines.popleft())) is not None:
                yield event

    def _read(self) -> bool:
        """Take more lines, of one segment; False if there are none at present."""
        is_finished = True
        while is_finished and not self._lines:
            try:
                new, is_finished = segments.read(self.path, self._segment, self._offset)
            except segments.DAMAGED as error:
                new, is_finished = b"", True
                if self._warn:
                    log.warning(
                        "segment %d of %s is damaged, its events are left out: %r",
                        *(self._segment, self.path, error),
                    )
            self._offset += len(new)
            if is_finished and len(new) < segments.SEGMENT_BYTES:
                self._segment, self._offset = self._segment + 1, 0
                new += b"\n"  # a segment ends with a whole line, unless the machine died
            # Split bytes, not text: the data read may end inside a UTF-8 character.
            *lines, self._unfinished = (self._unfinished + new).split(b"\n")
            self._lines.extend(line for line in lines if line.strip())
        return bool(self._lines)

    def _parse(self, line: bytes) -> Event | None:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        deep = line.count(b"[") + line.count(b"{") > MAX_DEPTH and is_too_deep(event)
        if not isinstance(event, dict) or "event" not in event or deep:
            if self._warn:
                log.warning("skipped a line of %s that is no event: %r", self.path, line[:200])
            return None
        return event


def is_too_deep(value: object, left: int = MAX_DEPTH) -> bool:
    """Whether lists and objects lie in each other more than MAX_DEPTH deep."""
    if not isinstance(value, dict | list):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return not left or any(is_too_deep(one, left - 1) for one in inside)


class Attempts:
    """What a first pass over the events of a run tells of the attempts at it; `one_timeline` is
    the second pass. Two passes, because a log may be larger than memory.

    num_resumes: how often the run went on. num_ranks: that report steps, at least.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.num_ranks, self._num_events = 1, 0
        self._resumes: list[tuple[int, Event]] = []  # place among the events, with what it cost
        done, done_at_s = array("q"), array("d")  # steps, as each rank reported them
        started_at_s = math.nan
        for place, event in enumerate(events):
            self._num_events += 1
            if math.isnan(started_at_s):
                started_at_s = _at_s(event)
            if event["event"] == "step":
                rank = event.get("rank")
                if isinstance(rank, int):
                    self.num_ranks = max(self.num_ranks, rank + 1)
                done.append(_step(event))
                done_at_s.append(_at_s(event))
            elif event["event"] == "resume":
                step = _step(event)
                kept = [i for i, one in enumerate(done) if one <= step]
                again = len({one for one in done if one > step})
                done = array("q", (done[i] for i in kept))
                done_at_s = array("d", (done_at_s[i] for i in kept))
                lost_s = _at_s(event) - max(done_at_s, default=started_at_s)
                costs = {"steps_again": again, "lost_s": lost_s}
                self._resumes.append((place, {**event, **costs}))

    @property
    def num_resumes(self) -> int:
        return len(self._resumes)

    def one_timeline(self, events: Iterable[Event]) -> Iterator[Event]:
        """The events of the first pass, without what was told of steps that were done again. A
        "resume" event then has "steps_again", the number of these steps, and "lost_s": from the
        end of the step that the run went on from until it did."""
        ahead = deque(self._resumes)
        lowest = self._lowest(ahead)
        for place, event in enumerate(itertools.islice(events, self._num_events)):
            if ahead and ahead[0][0] == place:
                event = ahead.popleft()[1]
                lowest = self._lowest(ahead)
                if _step(event) >= lowest:  # its lost time lies within that of a later one
                    event = {**event, "lost_s": 0.0}
            elif _is_superseded(event, lowest):
                continue
            yield event

    @staticmethod
    def _lowest(ahead: Iterable[tuple[int, Event]]) -> float:
        return min((_step(event) for _, event in ahead), default=math.inf)


def one_timeline(events: Sequence[Event]) -> list[Event]:
    return list(Attempts(events).one_timeline(events))


def recorded_timeline(path: Path) -> Iterator[Event]:
    """`one_timeline` of an event log."""
    attempts = Attempts(EventReader(path, warn=False))
    return attempts.one_timeline(EventReader(path))


def _step(event: Event) -> int:
    """0 for an event of no step, and for one that is malformed."""
    step = event.get("step")
    return step if isinstance(step, int) and abs(step) < 1 << 62 else 0


def _at_s(event: Event) -> float:
    at_s = event.get("t")
    return at_s if isinstance(at_s, int | float) and abs(at_s) < MAX_TIME_S else 0.0


def _is_superseded(event: Event, step: float) -> bool:
    """step: the lowest from which the run went on later; infinite if it did not."""
    if event["event"] in ("finish", "timeline"):  # of the end of an attempt
        return step < math.inf
    return event["event"] not in ("checkpoint", "lost_checkpoint") and _step(event) > step


@dataclass
class StepTotals:
    """One complete step over all ranks. Seconds are sums over the ranks of a cloud."""

    step: int
    step_s: float = 0.0  # see update_s
    num_ranks: dict[str, int] = field(default_factory=dict)  # by cloud
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)  # kind -> cloud -> s
    sent: dict[str, float] = field(default_factory=dict)  # bytes on the WAN link, by traffic
    raw: dict[str, float] = field(default_factory=dict)  # FP32 bytes of the tensors in them
    # Of each emulated line: kind of traffic -> (from cloud, to cloud) -> s
    line_busy_s: dict[str, dict[Line, float]] = field(default_factory=dict)
    samples: int = 0
    tokens: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    values: dict[str, float] = field(default_factory=dict)  # further measurements of a kind of job

    @classmethod
    def of(cls, step: int, reports: Mapping[int, Event]) -> "StepTotals":
        """reports: the "step" event of each rank."""
        spans = [(r["t"], r.get("step_s", 0.0)) for r in reports.values()]
        totals = cls(step, update_s(spans) if spans else 0.0)
        for _, report in sorted(reports.items()):  # clouds in the layout's order
            totals._add(report)
        return totals

    def mean_s(self, kind: str) -> dict[str, float]:
        """Seconds of one of TIMES by cloud, mean over the cloud's ranks."""
        by_cloud = self.seconds.get(kind, {})
        return {cloud: value / self.num_ranks[cloud] for cloud, value in by_cloud.items()}

    def _add(self, report: Event) -> None:
        cloud = report["cloud"]
        self.num_ranks[cloud] = self.num_ranks.get(cloud, 0) + 1
        for kind in TIMES:
            add_to(self.seconds.setdefault(kind, {}), {cloud: report.get(kind, 0.0)})
        add_to(self.sent, report.get("sent", {}))
        add_to(self.raw, report.get("raw", {}))
        for kind, busy_s in report.get("line_busy_s", {}).items():
            lines = {(cloud, to): seconds for to, seconds in busy_s.items()}
            add_to(self.line_busy_s.setdefault(kind, {}), lines)
        self.samples += report.get("samples", 0)
        if report.get("loss") is not None:
            self._count_loss(float(report["loss"]), report.get("tokens", 0))
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

    Ranks of a cloud that is gone are not waited for, nor, once a run goes on, those that have not
    told of the steps before. What this completes comes one by one with the next events.
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
            for step in sorted(self._reports):
                if step <= event["step"]:  # of a rank that was lost before it could tell
                    self._complete.append(StepTotals.of(step, self._reports[step]))
            self._reports.clear()
            self._done = min(self._done, event["step"])
            self._gone_until = {r: min(u, event["step"]) for r, u in self._gone_until.items()}
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
        # A rank reports in order: what is missing of earlier steps was lost.
        self._reports = {later: found for later, found in self._reports.items() if later > step}
        if self._gone_until:
            self._done = max(self._done, step)


def update_s(spans: Iterable[tuple[float, float]]) -> float:
    """The wall time of an update: from when the last rank had begun it to when the last one had
    ended it. spans: of each rank when it ended, in seconds, and its own time for it. As a rank
    begins where it ended the one before, the times of all updates add up, whoever is ahead; with
    clocks that disagree too, if a rank's own ones are used throughout."""
    spans = list(spans)
    last_s = max(ended_s for ended_s, _ in spans)
    return min(own_s + (last_s - ended_s) for ended_s, own_s in spans)


Key = TypeVar("Key")


def add_to(sums: dict[Key, float], more: Mapping[Key, float]) -> None:
    """sums[key] += more[key] for every key."""
    for key, value in more.items():
        sums[key] = sums.get(key, 0) + value
