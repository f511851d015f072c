"""Follow a run's event log and join the ranks' reports into steps. What is kept of them is in
summary.py.

`events.jsonl` is append-only, one JSON object per line; all have "event", "rank", "cloud", "t" and
what intake.py says. Rank 0 writes it for all ranks, the parent follows. A step is complete when
every rank has reported it. A run that was interrupted continues in the same file: "resume" names
the step, and what was reported of later ones no longer counts.

Two clocks: "t" is by the clock of the rank that reports, "arrived" by that of rank 0, which adds
it to what other ranks report. What one rank spends is told by its "t"; when something was in the
run, and how much later than something else, by `moment`.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from xcloud.base.bounded import parsed_json
from xcloud.record import files
from xcloud.record.files import EVENTS_FILE as EVENTS_FILE

LOST_LINES_FILE = "events.lost.json"  # exists only if lines were lost

Event = dict[str, Any]
Key = tuple[Any, ...]  # ("tokens",), ("compute_s", cloud), ("line_busy_s", kind, (cloud, cloud))

# Kinds of seconds that a rank reports for a step, and kinds of traffic that every run counts, of
# which some carry tensors. A job may count more, under the names of its channels' directions, and
# AVERAGING where there are replicas to average.
TIMES = ("compute_s", "codec_s", "waiting_s", "sync_s")
HEAD = ("event", "rank", "cloud", "t", "arrived")  # of every event; the last one of other ranks'
OWN = "step_s"  # a rank's own time for a step, of which these are parts
FEED = {"taken", "skipped", "fed_bytes", "line_s"}  # of a step of a one-way job
TENSORS = ("forward", "backward")
TRAFFIC = (*TENSORS, "other")
AVERAGING = "averaging"
# The parts of a peak; each is the most that it ever was, so they may add up to more.
MEMORY = ("peak", "gpu_peak", "program", "parameters", "gradients", "optimizer", "activations",
          "queued", "checkpoint")  # fmt: skip
"""Bytes that a rank reports of its training; gpu_peak only where there is a GPU."""
OTHER_MEMORY = "other"  # what of the peak is none of these: network buffers, caches, work space

NO_LOSS = math.inf  # in Columns, of a step that reports none
MAX_TIME_S = 1e11  # of a clock: beyond it there is no date

MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What feeding an event may raise that is from another cloud, or partly lost."""

log = logging.getLogger(__name__)


class EventReader:
    """Follow an event log: iteration gives the events completed since the last one, and may be
    left and taken up again.

    The log may not exist yet; an incomplete last line is kept until it is complete. A line that
    is not a JSON object (its writer died, another continued) is skipped, with a warning unless
    warn is False (for a second reader of the same file).
    """

    def __init__(self, path: str | Path, warn: bool = True) -> None:
        self.path = Path(path)
        self._warn = warn
        # What release 0.2.0 cut off every 8 MB (events.0001.jsonl.gz, or without .gz if it was
        # killed meanwhile), then the log itself.
        earlier = sorted(self.path.parent.glob(f"{self.path.stem}.[0-9]*"), reverse=True)
        # A log that was being packed when its writer died is there twice: the plain one is whole.
        one_each = {file.name.removesuffix(".gz"): file for file in earlier}
        self._logs = [*(one_each[name] for name in sorted(one_each)), self.path]
        self._offset = 0
        self._lines: deque[bytes] = deque()
        self._unfinished = b""

    def __iter__(self) -> Iterator[Event]:
        # Lines are taken as they come: a log of a long run does not fit into memory.
        while self._lines or self._read():
            if (event := self._parse(self._lines.popleft())) is not None:
                yield event

    def _read(self) -> bool:
        """Take more lines; False if there are none at present."""
        while not self._lines:
            try:
                new = files.read(self._logs[0], offset=self._offset)
            except files.DAMAGED as error:
                new = b""
                if self._warn:
                    log.warning("%s is damaged, its events are left out: %r", self._logs[0], error)
            self._offset += len(new)
            if not new:
                # The last file grows on; an earlier one has ended.
                if len(self._logs) == 1:
                    return False
                del self._logs[0]
                self._offset = 0
                new = b"\n"  # a file ends with a whole line, unless the machine died
            # Split bytes, not text: the data read may end inside a UTF-8 character.
            *lines, self._unfinished = (self._unfinished + new).split(b"\n")
            self._lines.extend(line for line in lines if line.strip())
        return True

    def _parse(self, line: bytes) -> Event | None:
        try:
            event = parsed_json(line)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict) or "event" not in event:
            if self._warn:
                # The writer died in the middle of the line, and another one has begun a new one.
                log.warning("skipped a line of %s that is no event: %r", self.path, line[:200])
            return None
        return event


@dataclass
class StepTotals:
    """One complete step over all ranks.

    step_s: see update_s. ended_s: when rank 0 knew that all had ended it. values: further
    measurements of a kind of job. numbers: what is added up over the ranks, under these keys:
        ("num_ranks", cloud), (kind of TIMES or OWN, cloud) in seconds,
        ("sent", traffic) bytes on the WAN link, ("raw", traffic) FP32 bytes of their tensors,
        ("sent_again",) bytes that a sealed line sent once more after a cut, in none of "sent",
        ("boundaries", "NUMBER DIRECTION") bytes on the WAN link of one boundary,
        ("line_busy_s", traffic, line) of each emulated line, in seconds,
        (kind of FEED, producer) of a one-way job, ("samples",), ("tokens",) that were computed,
        ("learned",): what the loss counts, tokens or samples.
    """

    step: int
    step_s: float = 0.0
    ended_s: float = 0.0
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    values: dict[str, float] = field(default_factory=dict)
    numbers: dict[Key, float] = field(default_factory=dict)

    @classmethod
    def of(cls, step: int, reports: Mapping[int, Event]) -> StepTotals:
        """reports: the "step" event of each rank."""
        spans = [(r["t"], r.get("step_s", 0.0)) for r in reports.values()]
        totals = cls(step)
        # A rank that has just begun the run may lack its own time.
        if spans:
            totals.step_s = update_s(spans)
            totals.ended_s = max(moment(report) for report in reports.values())
        for _, report in sorted(reports.items()):  # clouds in the layout's order
            totals._add(report)
        totals.loss = _mean_loss(report for _, report in sorted(reports.items()))
        return totals

    def sums(self, name: str) -> dict[Any, float]:
        """Return the numbers of a name, by what follows it in the keys."""
        return {key[1]: value for key, value in self.numbers.items() if key[0] == name}

    def mean_s(self, kind: str) -> dict[str, float]:
        """Seconds of one of TIMES by cloud, mean over the cloud's ranks."""
        ranks = self.sums("num_ranks")
        return {cloud: value / ranks[cloud] for cloud, value in self.sums(kind).items()}

    def _add(self, report: Event) -> None:
        cloud = report["cloud"]
        found = dict[Key, float]()
        found["num_ranks", cloud] = 1
        found |= {(kind, cloud): report.get(kind, 0.0) for kind in (*TIMES, OWN)}
        for name in ("sent", "raw", "boundaries", *(FEED & report.keys())):
            found |= {(name, part): value for part, value in report.get(name, {}).items()}
        for kind, busy_s in report.get("line_busy_s", {}).items():
            # An emulated line that nobody used was busy for 0 s, which is no missing number.
            found["line_busy_s", kind, ("", "")] = 0.0  # where none is busy with this kind
            found |= {("line_busy_s", kind, (cloud, to)): s for to, s in busy_s.items()}
        whole = ("samples", "tokens", "learned", "sent_again")
        found |= {(name,): report.get(name, 0) for name in whole}
        add_to(self.numbers, more=found)
        # Names that a kind of job has chosen; of several ranks the last one's counts.
        self.values.update(report.get("values", {}))
        for name in ("grad_norm", "learning_rate"):
            if report.get(name) is not None:
                setattr(self, name, report[name])


def _mean_loss(reports: Iterable[Event]) -> float | None:
    """Return the loss of a step. One rank reports it, or, where replicas update apart, one of each
    that did not skip the update: then their mean, weighted by what each counts."""
    mean: float | None = None
    weight = 0.0
    for report in reports:
        if report.get("loss") is None:
            continue
        loss = float(report["loss"])
        learned = float(report.get("learned", 0))
        # Weighted step by step, so that no list of reports has to be kept.
        if mean is not None and weight + learned:
            loss = (mean * weight + loss * learned) / (weight + learned)
        mean = loss
        weight += learned
    return mean


@dataclass(eq=False)
class Columns:
    """Numbers of complete steps, in order: of each key of StepTotals, and of "step_s", "ended_s"
    and "loss", one for each step."""

    step: array[int] = field(default_factory=lambda: array("q"))
    _columns: dict[Key, array[float]] = field(default_factory=dict)

    def append(self, totals: StepTotals) -> None:
        loss = NO_LOSS if totals.loss is None else totals.loss
        row = {("step_s",): totals.step_s, ("ended_s",): totals.ended_s, ("loss",): loss}
        row["learning_rate",] = totals.learning_rate or 0.0
        row |= totals.numbers
        # A key that appears late has 0 for the steps before it.
        for key in row:
            self._columns.setdefault(key, array("d", bytes(8 * len(self.step))))
        for key, column in self._columns.items():
            column.append(row.get(key, 0.0))
        self.step.append(totals.step)

    def drop_after(self, step: int) -> set[int]:
        """Forget later steps, which are returned."""
        num_kept = bisect_right(self.step, step)
        dropped = {*self.step[num_kept:]}
        del self.step[num_kept:]
        for column in self._columns.values():
            del column[num_kept:]
        return dropped

    def __getitem__(self, name: str) -> array[float]:
        return self._columns.get((name,), array("d"))

    def below(self, *head: object) -> list[Any]:
        """Return what follows `head` in keys, in order of appearance."""
        num = len(head)
        found = (key[num] for key in self._columns if key[:num] == head and len(key) > num)
        return list(dict.fromkeys(found))

    def sum(self, *key: object, first: int = 0) -> float:
        """Return the sum of a key over all steps from the place `first`."""
        return sum(self._columns.get(key, array("d"))[first:])

    def sums(self, *head: object, first: int = 0) -> dict[Any, float]:
        return {tail: self.sum(*head, tail, first=first) for tail in self.below(*head)}


class StepCollector:
    """Join the ranks' step reports; `feed` returns the totals once the last rank has reported.

    Once a run resumes, ranks that have not reported the steps before are not waited for, nor are
    those of a cloud that has left. What this completes comes one by one with the next events.

    reports: those of steps that are not complete, by step and rank.
    """

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"StepCollector.num_ranks must be 1 or more, got {num_ranks}")
        self.num_ranks = num_ranks
        self.reports: dict[int, dict[int, Event]] = {}
        self._complete: deque[StepTotals] = deque()
        self._gone_until: dict[int, float] = {}  # the last step that a lost rank does not report
        self._done = -1  # the latest complete step, once ranks have gone

    def feed(self, event: Event) -> StepTotals | None:
        kind = event["event"]
        if kind == "absence":
            self._note_absence(event)
        if kind == "resume":
            # Steps of an attempt that was interrupted are never completed by the ranks that are
            # gone.
            self._go_back(event["step"])
        # Without the rank that reports now, an earlier step may be complete already.
        if kind == "step" and event["step"] > self._done:
            self.reports.setdefault(event["step"], {})[event["rank"]] = event
            self._close(event["step"])
        if self._complete:
            return self._complete.popleft()
        return None

    def _note_absence(self, event: Event) -> None:
        for rank in event["ranks"]:
            if event["what"] == "left":
                self._gone_until[rank] = math.inf
            elif event["what"] == "back" and rank in self._gone_until:
                self._gone_until[rank] = event["step"]  # it begins with the next one
        # A cloud that left may have been all that a step waited for.
        for step in sorted(self.reports):
            self._close(step)

    def _go_back(self, to_step: int) -> None:
        for step in sorted(self.reports):
            # Up to the step of the checkpoint all ranks had trained; whoever was lost had no time
            # to tell.
            if step <= to_step:  # of a rank that was lost before it could report
                self._complete.append(StepTotals.of(step, self.reports[step]))
        self.reports.clear()
        self._done = min(self._done, to_step)
        # Ranks that were gone at that step are still gone.
        self._gone_until = {rank: min(u, to_step) for rank, u in self._gone_until.items()}

    def _close(self, step: int) -> None:
        absent = {rank for rank, until in self._gone_until.items() if step <= until}
        # Ranks that are not waited for may have reported all the same.
        if len(self.reports[step].keys() | absent) >= self.num_ranks:
            self._complete.append(StepTotals.of(step, self.reports.pop(step)))
            # A rank reports in order: what is missing of earlier steps was lost.
            self.reports = {later: some for later, some in self.reports.items() if later > step}
        if self._gone_until and step not in self.reports:
            self._done = max(self._done, step)


def update_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the wall time of an update: from when the last rank had begun it to when the last one
    had ended it.

    A rank begins an update when it ends the one before. So the times of all updates add up,
    whichever rank is ahead. That holds for clocks that disagree, too, if each rank's times are by
    its own clock throughout.

    spans: the time at which each rank ended, in seconds, and its own seconds for the update.
    """
    spans = list(spans)
    last_s = max(ended_s for ended_s, _ in spans)
    # For each rank: what is left behind its own beginning until the last one has ended.
    return min(own_s + (last_s - ended_s) for ended_s, own_s in spans)


# A clock that nobody sets. Where there is such a one it counts through a machine's sleep, during
# which a monotonic clock may stand still.
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BEGAN_AT_S = time.time() - time.clock_gettime(_STEADY)


def now_s() -> float:
    """Return the time of an event that happens now: what the machine's clock said when this
    process began, and the seconds since. A clock that is set during a run moves no event."""
    return _BEGAN_AT_S + time.clock_gettime(_STEADY)


def moment(event: Event) -> float:
    """Return when an event was in the run, by the clock of rank 0."""
    return float(event["arrived"] if "arrived" in event else event["t"])


def body(event: Event) -> dict[str, Any]:
    """Return what an event says, without what all events have."""
    return {key: value for key, value in event.items() if key not in HEAD}


Name = TypeVar("Name")


def add_to(sums: dict[Name, float], more: Mapping[Name, float]) -> None:
    for key, value in more.items():
        sums[key] = sums.get(key, 0) + value
