"""What features add to a run's figures: how steps are counted where clouds come and go, and which
events of theirs the summary tells; and what of single samples a tracker may have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from xcloud.record.events import MALFORMED, Event, EventReader, StepCollector, StepTotals
from xcloud.record.files import SAMPLES_FILE, SCORES_FILE, TRACKABLE_FILE, read_json
from xcloud.record.summary import Entry, RunStatistics, Summary, body

MERGED = {"merge": "whole", "partial_merge": "partial", "late": "clouds_late",
          "left": "clouds_lost", "back": "clouds_back"}  # fmt: skip


class ElasticCollector(StepCollector):
    """Ranks of a cloud that is gone are not waited for."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._gone_until: dict[int, float] = {}  # the last step that a lost rank does not report
        self._done = -1  # the latest complete step, once ranks have gone

    def feed(self, event: Event) -> StepTotals | None:
        if event["event"] == "absence":
            self._note_absence(event)
        is_late = event["event"] == "step" and event["step"] <= self._done
        return super().feed({"event": "late"} if is_late else event)

    def _note_absence(self, event: Event) -> None:
        for rank in event["ranks"]:
            if event["what"] == "left":
                self._gone_until[rank] = math.inf
            elif event["what"] == "back" and rank in self._gone_until:
                self._gone_until[rank] = event["step"]  # it begins with the next one
        for step in sorted(self._reports):
            self._close(step)

    def _go_back(self, to_step: int) -> None:
        super()._go_back(to_step)
        self._done = min(self._done, to_step)
        self._gone_until = {rank: min(u, to_step) for rank, u in self._gone_until.items()}

    def _absent(self, step: int) -> set[int]:
        return {rank for rank, until in self._gone_until.items() if step <= until}

    def _close(self, step: int) -> None:
        super()._close(step)
        if self._gone_until and step not in self._reports:
            self._done = max(self._done, step)


def _merges(events: list[Event]) -> Summary:
    found = Counter(event.get("what", event["event"]) for event in events)
    return {"merges": {name: found[what] for what, name in MERGED.items()}}


def _switches(events: list[Event]) -> Summary:
    names = ("step", "choice", "before")
    return {"autopilot": [{name: event[name] for name in names} for event in events]}


def files_of_samples(run_dir: Path) -> list[str]:
    """Return the files of single samples that a tracker may have: those that their writer has
    allowed it."""
    allowed = read_json(run_dir / TRACKABLE_FILE)
    return [name for name in (SCORES_FILE, SAMPLES_FILE) if allowed.get(name) is True]


ENTRIES = (
    Entry(("merge", "partial_merge", "absence"), _merges, is_of_steps=True),
    Entry(("autopilot",), _switches, is_of_steps=True),
    Entry(("privacy",), lambda events: {"privacy": body(events[-1])}),
    Entry(
        ("refused_reports",),
        lambda events: {"refused_reports": {str(e["sender"]): int(e["num"]) for e in events}},
    ),
)


def feed_log(run: RunStatistics, events: Iterable[Event]) -> int:
    """All events of a log. Returns how many were malformed."""
    num_malformed = 0
    for event in events:
        try:
            run.feed(event)
        except MALFORMED:
            num_malformed += 1
    return num_malformed


def read_run(path: Path) -> RunStatistics:
    """Of the event log of a run that has ended, for the ranks that report steps, which producers
    of one-way jobs do not; of a missing log what a run has before its first event."""
    steps = (event for event in EventReader(path, warn=False) if event["event"] == "step")
    num_ranks = 1 + max((event["rank"] for event in steps), default=0)
    run = RunStatistics(ElasticCollector(num_ranks), ENTRIES)
    feed_log(run, EventReader(path, warn=False))
    return run
