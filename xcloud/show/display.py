"""The progress line of a run. Measures nothing.

On a terminal rich updates one line below all other output (at most 10 times a second); elsewhere a
line is printed about every 30 s:

    step 120/2000  13 min left  loss 3.214  0.412 s/step  430 tokens/s  cloud_a waits 0.1 s …

All figures are smoothed. The cloud that waits most is named. What follows is the use of the
busiest line between two clouds ("link 87 %"), or how fast a cloud sends. A window that is too
narrow leaves out the last figures. A one-way job adds the consumer's scores and each producer's
loss and share so far: "precision 0.61  recall 0.40  en 2.31 (50 %)". The summary has all of it
separately.
"""

from __future__ import annotations

import io
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TextIO

from xcloud.base.terminal import can_rewrite, printable
from xcloud.base.units import human_duration, score_name, score_with_error
from xcloud.feature_list import FIGURES
from xcloud.record.events import AVERAGING, Event, StepTotals, add_to
from xcloud.show.smoothing import Smoothed, rate_in_words

NOTIFIED = {kind: f.notified for f in FIGURES if f.notified for kind in f.kinds}
NOTICES = {kind: f.notice for f in FIGURES if f.notice is not None for kind in f.kinds}
REDRAWS_PER_S = 10
PRINT_S = 30.0
_SENT = ("forward", "backward", AVERAGING)


class ProgressLine:
    """`show(event)` every event, `update(totals)` every complete step, `close()` at the end.

    next_merge: returns the next step in which replicas that train apart merge; None where none do.
    """

    def __init__(
        self,
        max_steps: int,
        *,
        next_merge: Callable[[int], int | None] = lambda step: None,
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
        self._rewrites = can_rewrite(stream)
        # By itself rich takes FORCE_COLOR for a terminal, and rewrites lines of a file.
        self._console = Console(file=stream, force_terminal=self._rewrites, force_jupyter=False)
        self._live = Live(console=self._console, refresh_per_second=REDRAWS_PER_S)
        self._clock = clock
        # Smoothed, as a single step tells little of how long the rest takes.
        self._next_merge = next_merge
        self._smoothed = Smoothed()
        self._taken = Counter[str]()  # batches of each producer
        self._losses: dict[str, float] = {}  # of each producer
        self._unprinted = ""  # not on a terminal: the latest line, if not printed yet
        self._printed_at_s = -math.inf
        self._phase = ""

    def update(self, totals: StepTotals) -> None:
        self._taken.update({name: int(n) for name, n in totals.sums("taken").items()})
        figures = self._figures(totals)
        if self._rewrites:
            from rich.text import Text

            line = printable(_fitting(figures, width=self._console.width))
            self._live.start()
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
            return
        # Elsewhere than on a terminal a line stays, so only some are printed.
        line = "  ".join(figures)
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
        elif kind == "phase" and event["name"] != self._phase:
            self._phase = event["name"]  # every rank reports it; print it once
            self._print_line()  # the last step before an evaluation, not after it
            self.note(self._phase)
        elif kind == "quality":
            self.note(_describe_quality(event))
        elif kind == "resume":
            text = f"resumes from step {event['step']}" if event["step"] else "restarts"
            if again := event.get("steps_again"):
                text += f"; {again} step{'s' if again > 1 else ''} done before are repeated"
            changed = ", ".join(event.get("changed", ()))
            self.note(text + (f"; changed: {changed}" if changed else ""))
        # A producer's loss comes with what it has fed.
        elif kind == "fed" and "loss" in event:
            self._losses[event["cloud"]] = event["loss"]
        elif kind in NOTICES:
            self.note(NOTICES[kind](event))

    def note(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(printable(text)), soft_wrap=True)

    def close(self) -> None:
        self._live.stop()
        self._print_line()

    def _print_line(self) -> None:
        if self._unprinted:
            self.note(self._unprinted)
            self._unprinted = ""

    def _figures(self, totals: StepTotals) -> list[str]:
        """Return the figures of the line in words, the most important first."""
        values = {"step_s": totals.step_s, **totals.values}
        if totals.loss is not None:
            values["loss"] = totals.loss
        values["tokens"] = totals.numbers.get(("tokens",), 0)
        waits = totals.mean_s("waiting_s")
        values.update({f"waits {cloud}": waiting_s for cloud, waiting_s in waits.items()})
        for kind in _SENT:
            values[f"sent {kind}"] = totals.numbers.get(("sent", kind), 0)
        # Only emulated lines report how long they were busy.
        # One-way jobs report a line's seconds under another name.
        lines: dict[object, float] = {**totals.sums("line_s")}
        for key, busy_s in totals.numbers.items():
            if key[0] == "line_busy_s":
                # A line is busy with messages of every kind.
                add_to(lines, more={key[-1]: busy_s})
        if lines:
            # The busiest line is the one that holds a step up.
            values["line_s"] = max(lines.values())
        smooth = self._smoothed.add(values)

        step_s = smooth["step_s"]
        # By the smoothed step: a single slow one would add hours.
        left_s = (self.max_steps - totals.step) * step_s
        figures = [f"step {totals.step}/{self.max_steps}", f"{human_duration(left_s)} left"]
        if "loss" in smooth:
            figures.append(f"loss {smooth['loss']:.3f}")
        figures += [f"{n} {smooth[n]:.2f}" for n in ("precision", "recall") if n in smooth]
        for name, count in sorted(self._taken.items()):
            loss = f" {self._losses[name]:.2f}" if name in self._losses else ""
            figures.append(f"{name}{loss} ({100 * count / self._taken.total():.0f} %)")
        figures.append(f"{step_s:.3f} s/step")
        if smooth["tokens"] and step_s:
            figures.append(f"{smooth['tokens'] / step_s:,.0f} tokens/s")
        if waits:
            cloud = max(waits, key=lambda name: smooth[f"waits {name}"])
            figures.append(f"{cloud} waits {smooth[f'waits {cloud}']:.3f} s")
        sent = [smooth[f"sent {kind}"] for kind in _SENT]
        # Replicas that train apart send nothing between two merges.
        next_merge = self._next_merge(totals.step)
        if next_merge is not None:
            figures.append(f"next merge at step {next_merge}")
        elif not any(sent):
            figures.append("nothing crosses clouds")
        elif step_s and "line_s" in smooth:
            figures.append(f"link {100 * smooth['line_s'] / step_s:.0f} %")
        elif step_s:
            figures.append(rate_in_words(max(sent), step_s))
        return figures


def _fitting(figures: Sequence[str], width: int) -> str:
    """Return as many of the figures, from the first one on, as fit into a line."""
    line = figures[0]
    for figure in figures[1:]:
        if len(line) + 2 + len(figure) > width:
            break
        line += f"  {figure}"
    return line


def _describe_quality(event: Event) -> str:
    errors = event.get("errors", {})
    values = "  ".join(
        f"{score_name(name)} {score_with_error(name, value, error=errors.get(name))}"
        for name, value in event["values"].items()
    )
    text = f"{event['split']} at step {event['step']}: {values}"
    if event.get("evaluation_s") is not None:
        text += f"  ({human_duration(event['evaluation_s'])})"
    # Dev is scored repeatedly; only the final samples are worth the space.
    if event["split"] == "test" and event["step"] and event.get("samples_text"):
        text += "\n" + str(event["samples_text"]).rstrip("\n")
    return text
