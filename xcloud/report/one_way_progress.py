"""Progress line of a one-way job: the consumer's scores and each producer's share.

step 120/2000  13 min left  loss 9.214  precision 0.61  recall 0.40  en 2.31 (50 %) ...
"""

from __future__ import annotations

from collections import Counter
from typing import TextIO

from xcloud.record.events import Event, StepTotals
from xcloud.report.progress import ProgressLine


class OneWayProgressLine(ProgressLine):
    """The line of any run, with precision, recall, and each producer's loss and share so far."""

    def __init__(self, max_steps: int, *, stream: TextIO | None = None) -> None:
        super().__init__(max_steps, stream=stream)
        self._taken: Counter[str] = Counter()
        self._losses: dict[str, float] = {}
        self._line_s: Counter[str] = Counter()  # of the current step, by the producer's link

    def show(self, event: Event) -> None:
        if event["event"] == "step":
            self._taken.update(event["taken"])
            self._line_s.update(event["line_s"])
        elif event["event"] == "fed":
            if "loss" in event:
                self._losses[event["cloud"]] = event["loss"]
        super().show(event)

    def update(self, totals: StepTotals) -> None:
        for name, value in totals.values.items():
            self._smooth.put(name, value)
        if self._line_s:  # only an emulated link reports it
            self._smooth.put("line_s", max(self._line_s.values()))
            self._line_s.clear()
        super().update(totals)

    def _more_parts(self) -> list[str]:
        parts = [
            f"{name} {self._smooth.get(name):.2f}"
            for name in ("precision", "recall")
            if self._smooth.has(name)
        ]
        total = max(1, sum(self._taken.values()))
        for name, count in sorted(self._taken.items()):
            loss = f" {self._losses[name]:.2f}" if name in self._losses else ""
            parts.append(f"{name}{loss} ({100 * count / total:.0f} %)")
        return parts
