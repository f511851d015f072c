"""What the pictures of a run need, collected while the run goes on: one number a step, not events.
Works nothing out and draws nothing.
"""

from __future__ import annotations

import math
from array import array
from pathlib import Path

from xcloud.record.events import TIMES, Event, EventReader, StepCollector, StepTotals


class RunCurves:
    """Feed it every event of a run, with the totals of the step that the event completed."""

    def __init__(self) -> None:
        self.step = array("q")
        self.step_s = array("d")  # the slowest rank's
        self.loss = array("d")  # nan where a step has none
        self.seconds: dict[str, dict[str, array[float]]] = {kind: {} for kind in TIMES}
        # Mean over the ranks of a cloud: kind -> cloud -> one number a step.
        # By cloud, one entry for each step and rank, in the order in which they were reported.
        self.own_step: dict[str, array[int]] = {}
        self.own_step_s: dict[str, array[float]] = {}
        self._first_rank: dict[str, int] = {}  # of each cloud
        self.dev_quality: dict[str, list[tuple[int, float]]] = {}  # metric -> (step, value)
        self.timeline: list[Event] = []

    @property
    def clouds(self) -> list[str]:
        """In the order of the layout, whoever reported first."""
        return sorted(self._first_rank, key=self._first_rank.__getitem__)

    def feed(self, event: Event, totals: StepTotals | None) -> None:
        if event["event"] == "step":
            cloud, rank = event["cloud"], event["rank"]
            self._first_rank[cloud] = min(rank, self._first_rank.get(cloud, rank))
            self.own_step.setdefault(cloud, array("q")).append(event["step"])
            self.own_step_s.setdefault(cloud, array("d")).append(event["step_s"])
        elif event["event"] == "timeline":
            self.timeline.append(event)
        elif event["event"] == "quality" and event["split"] == "dev":
            for metric, value in event["values"].items():
                self.dev_quality.setdefault(metric, []).append((event["step"], value))
        if totals is None:
            return
        self.step.append(totals.step)
        self.step_s.append(totals.step_s)
        self.loss.append(math.nan if totals.loss is None else totals.loss)
        for kind in TIMES:
            for cloud, seconds in totals.mean_s(kind).items():
                self.seconds[kind].setdefault(cloud, array("d")).append(seconds)


def read_curves(path: Path) -> RunCurves:
    """The curves of a run that is over, from its event log; empty without that file."""
    curves, events = RunCurves(), EventReader(path).poll()
    # Ranks that only feed others have no steps.
    stepping = (event["rank"] for event in events if event["event"] == "step")
    collector = StepCollector(1 + max(stepping, default=0))
    for event in events:
        curves.feed(event, collector.feed(event))
    return curves
