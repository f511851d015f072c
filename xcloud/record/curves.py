"""The curves behind a run's pictures, read back from its events: one number per step.
No statistics, no drawing.
"""

from __future__ import annotations

import contextlib
import math
from array import array
from pathlib import Path

from xcloud.record.events import (
    MALFORMED,
    TIMES,
    Attempts,
    Event,
    EventReader,
    StepCollector,
    StepTotals,
)
from xcloud.record.summary import RunStatistics


class RunCurves:
    """Feed it every event of a run, with the totals of the step that the event completed."""

    def __init__(self) -> None:
        self.step = array("q")
        self.step_s = array("d")
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


def read_curves(path: Path, steps: StepCollector | RunStatistics | None = None) -> RunCurves:
    """The curves of a run, from its event log; empty without that file.

    steps: joins the ranks' reports; a fresh one. Default: of all ranks that report steps, which
    producers of one-way jobs do not.
    """
    attempts = Attempts(EventReader(path, warn=False))
    steps = StepCollector(attempts.num_ranks) if steps is None else steps
    curves = RunCurves()
    for event in attempts.one_timeline(EventReader(path, warn=False)):
        with contextlib.suppress(*MALFORMED):
            curves.feed(event, steps.feed(event))
    return curves
