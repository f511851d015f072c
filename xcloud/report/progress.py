"""Progress line of a run: step, speed, waiting. Shows; measures nothing.

On a terminal rich updates one line below all other output (at most 10 times a second); elsewhere a
line is printed about every 30 s:

    step 120/2000  13 min left  loss 3.214  0.412 s/step  waits 0.101 s  link 87 %

In a one-way job precision and recall come after the loss, and each producer's loss and share.

Times are smoothed; waiting is of the cloud that waits most, link use of the busiest line between
two clouds. The summary has them separately.
"""

from __future__ import annotations

import io
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import TextIO

from xcloud.base.units import human_duration
from xcloud.record.events import AVERAGING, Event, Line, StepTotals
from xcloud.record.scores import score_name, score_text

REDRAWS_PER_S = 10
PRINT_S = 30.0
SMOOTHING = 0.9  # weight of the past: the figures look back over about ten steps


class ProgressLine:
    """`show(event)` every event, `update(totals)` every complete step, `close()` at the end."""

    def __init__(
        self,
        max_steps: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_steps = max_steps
        from rich.console import Console
        from rich.live import Live

        stream = sys.stdout if stream is None else stream
        if isinstance(stream, io.TextIOWrapper):
            # A corpus sample must not fail the run on an ASCII terminal.
            stream.reconfigure(errors="replace")
        self._console = Console(file=stream)
        self._rewrites = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, refresh_per_second=REDRAWS_PER_S)
        self._clock = clock
        self._smooth = _Smooth()
        self._unprinted = ""  # not on a terminal: the latest line, if not printed yet
        self._printed_at_s = -math.inf
        self._phase = ""
        # Of a one-way job, by producer: batches so far, last loss, seconds on its link this step.
        self._taken: Counter[str] = Counter()
        self._losses: dict[str, float] = {}
        self._fed_s: Counter[str] = Counter()

    def update(self, totals: StepTotals) -> None:
        smooth = self._smooth
        smooth.count()
        smooth.put("step_s", totals.step_s)
        if totals.loss is not None:
            smooth.put("loss", totals.loss)
        for cloud, waiting_s in totals.mean_s("waiting_s").items():
            smooth.put(f"waiting {cloud}", waiting_s)
        for direction in ("forward", "backward", AVERAGING):
            smooth.put(f"sent {direction}", totals.sent.get(direction, 0))
        if totals.line_busy_s:  # only emulated lines report it
            lines = Counter[Line]()
            for busy_s in totals.line_busy_s.values():
                lines.update(busy_s)
            smooth.put("line_s", max(lines.values(), default=0.0))
        if self._fed_s:
            smooth.put("line_s", max(self._fed_s.values()))
            self._fed_s.clear()
        for name, value in totals.values.items():
            smooth.put(name, value)
        line = self._describe(totals.step, totals)
        if self._rewrites:
            from rich.text import Text

            self._live.start()
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
            return
        self._unprinted = line
        if self._clock() - self._printed_at_s >= PRINT_S:
            self._printed_at_s = self._clock()
            self._print_line()

    def show(self, event: Event) -> None:
        """Print the text of an event, if any; step events have none."""
        kind = event["event"]
        if kind == "start" and event.get("headline"):
            self.note(f"{event['cloud']}: {event['headline']}")
        elif kind == "note":
            self.note(f"{event['cloud']}: {event['text']}")
        elif kind == "step" and "taken" in event:
            self._taken.update(event["taken"])
            self._fed_s.update(event["line_s"])
        elif kind == "fed" and "loss" in event:
            self._losses[event["cloud"]] = event["loss"]
        elif kind == "phase" and event["name"] != self._phase:
            self._phase = event["name"]  # every rank reports it; print it once
            self._print_line()  # the last step before an evaluation, not after it
            self.note(self._phase)
        elif kind == "quality":
            self.note(_describe_quality(event))
        elif kind == "autopilot":
            self.note(f"after step {event['step']} {event['choice']}; {event['reason']}")
        elif kind == "resume":
            self.note(_describe_resume(event))

    def note(self, text: str) -> None:
        """Print one or more lines at once, on a terminal above the live line."""
        from rich.text import Text

        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Print the last state and end the line."""
        self._live.stop()
        self._print_line()

    def _print_line(self) -> None:
        if self._unprinted:
            self.note(self._unprinted)
            self._unprinted = ""

    def _describe(self, step: int, totals: StepTotals) -> str:
        smooth = self._smooth
        step_s = smooth.get("step_s")
        left_s = (self.max_steps - step) * step_s
        # Most important first: a narrow window cuts off the end.
        parts = [f"step {step}/{self.max_steps}", f"{human_duration(left_s)} left"]
        if smooth.has("loss"):
            parts.append(f"loss {smooth.get('loss'):.3f}")
        scores = [name for name in ("precision", "recall") if smooth.has(name)]
        parts += [f"{name} {smooth.get(name):.2f}" for name in scores]
        for name, count in sorted(self._taken.items()):
            loss = f" {self._losses[name]:.2f}" if name in self._losses else ""
            parts.append(f"{name}{loss} ({100 * count / self._taken.total():.0f} %)")
        parts.append(f"{step_s:.3f} s/step")
        waiting_s = max(smooth.get(f"waiting {cloud}") for cloud in totals.num_ranks)
        parts += [f"waits {waiting_s:.3f} s", self._describe_link(step_s)]
        return "  ".join(parts)

    def _describe_link(self, step_s: float) -> str:
        sent, averaged = self._smooth, self._smooth.get(f"sent {AVERAGING}")
        busiest = max(sent.get("sent forward"), sent.get("sent backward"))
        if not busiest + averaged:
            return "nothing crosses clouds"
        if not step_s:
            return ""
        if sent.has("line_s"):
            return f"link {100 * sent.get('line_s') / step_s:.0f} %"
        return f"sends {8e-6 * max(busiest, averaged) / step_s:.1f} Mbit/s"


class _Smooth:
    """Exponential moving averages: sum(w^age * x) / sum(w^age), one age for all names."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def count(self) -> None:
        for name, (value, weight) in self._sums.items():
            self._sums[name] = (SMOOTHING * value, SMOOTHING * weight)

    def put(self, name: str, value: float) -> None:
        sum_, weight = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (sum_ + value, weight + 1.0)

    def has(self, name: str) -> bool:
        return name in self._sums

    def get(self, name: str) -> float:
        value, weight = self._sums[name]
        return value / weight


def _describe_resume(event: Event) -> str:
    text = f"goes on from step {event['step']}" if event["step"] else "begins anew"
    if again := event.get("steps_again"):
        text += f"; {again} step{'s' if again > 1 else ''} done before are done again"
    changed = ", ".join(event.get("changed", ()))
    return text + (f"; changed: {changed}" if changed else "")


def _describe_quality(event: Event) -> str:
    values = "  ".join(
        f"{score_name(name)} {score_text(name, value)}" for name, value in event["values"].items()
    )
    text = f"{event['split']} at step {event['step']}: {values}"
    if event.get("evaluation_s") is not None:
        text += f"  ({human_duration(event['evaluation_s'])})"
    # Dev is scored repeatedly; only the final samples are worth the space.
    if event["split"] == "test" and event["step"] and event.get("samples_text"):
        text += "\n" + str(event["samples_text"]).rstrip("\n")
    return text
