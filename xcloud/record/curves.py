"""The curves behind a run's pictures, collected during the run: one number per step.
No statistics, no drawing.
"""

from __future__ import annotations

import math
from array import array
from pathlib import Path

from xcloud.record.events import (
    TIMES,
    Event,
    EventReader,
    StepCollector,
    StepTotals,
    one_timeline,
)


class RunCurves:
    """Feed it every event of a run, with the totals of the step that the event completed."""

    def __init__(self) -> None:
        self.step = array("q")
        self.step_s = array("d")  # the slowest rank's
        self.loss = array("d")  # nan where a step has none
        # kind -> cloud -> one number per step, the mean over the cloud's ranks.
        self.seconds: dict[str, dict[str, array[float]]] = {kind: {} for kind in TIMES}
        # By cloud, one entry per step and rank, in the order reported.
        self.own_step: dict[str, array[int]] = {}
        self.own_step_s: dict[str, array[float]] = {}
        self._first_rank: dict[str, int] = {}  # of each cloud
        self.dev_quality: dict[str, list[tuple[int, float]]] = {}  # metric -> (step, value)
        self.timeline: list[Event] = []
        self.switches: list[tuple[int, str]] = []  # (step, compression after it)

    @property
    def clouds(self) -> list[str]:
        """In layout order, regardless of who reported first."""
        return sorted(self._first_rank, key=self._first_rank.__getitem__)

    def feed(self, event: Event, totals: StepTotals | None) -> None:
        if event["event"] == "step":
            cloud, rank = event["cloud"], event["rank"]
            self._first_rank[cloud] = min(rank, self._first_rank.get(cloud, rank))
            self.own_step.setdefault(cloud, array("q")).append(event["step"])
            self.own_step_s.setdefault(cloud, array("d")).append(event["step_s"])
        elif event["event"] == "autopilot":
            self.switches.append((event["step"], str(event["choice"])))
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
    """The curves of a finished run, from its event log; empty without that file."""
    curves, events = RunCurves(), one_timeline(EventReader(path).poll())
    # Producers of one-way jobs report no steps.
    stepping = (event["rank"] for event in events if event["event"] == "step")
    collector = StepCollector(1 + max(stepping, default=0))
    for event in events:
        curves.feed(event, collector.feed(event))
    return curves
