"""The progress that a cloud other than the first one sees of a run over several machines: its own
steps while it runs, and in the end how many bytes of which kind have left it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xcloud.base.units import human_bytes, human_duration
from xcloud.record.files import read_json
from xcloud.show.smoothing import Smoothed, rate_in_words

SAY_EVERY_S = 30.0  # as the first cloud's terminal, where it cannot be rewritten (show/display.py)


class OwnProgress:
    """A line of text about every 30 s and after the last step, smoothed like that of the first
    cloud. `hear` is called with every event.

    cloud: name of the cloud whose waiting time is printed.
    next_merge: returns the next step in which replicas that train locally are averaged; None if
        none are.
    """

    def __init__(
        self,
        max_steps: int,
        say: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        cloud: str = "",
        next_merge: Callable[[int], int | None] = lambda step: None,
    ) -> None:
        self._max_steps = max_steps
        self._say = say
        self._clock = clock
        self._waits = f"{cloud} waits".lstrip()
        self._next_merge = next_merge
        self._said_at_s = -math.inf
        self._smoothed = Smoothed()
        self._unsaid = ""

    def on_event(self, event: str, fields: Mapping[str, Any]) -> None:
        """Take a step, and say how it goes if it is time to; say how far it came where steps
        end."""
        if event == "step" and "step_s" in fields:
            self._unsaid = self._line(fields)
            if self._clock() - self._said_at_s >= SAY_EVERY_S:
                self._said_at_s = self._clock()
                self._say_last()
        # Every terminal ends with the last step that was made.
        elif event in ("phase", "stop", "finish"):
            self._say_last()

    def _say_last(self) -> None:
        if self._unsaid:
            self._say(self._unsaid)
            self._unsaid = ""

    def _line(self, fields: Mapping[str, Any]) -> str:
        step = fields["step"]
        values = {
            "step_s": fields["step_s"],
            "waits": fields.get("waiting_s", 0.0),
            "sent": sum(fields.get("sent", {}).values()),
        }
        if "loss" in fields:
            values["loss"] = fields["loss"]
        # As the first cloud's terminal does, or two owners would see two losses for one step.
        smooth = self._smoothed.add(values)
        left_s = (self._max_steps - step) * smooth["step_s"]
        parts = [f"step {step}/{self._max_steps}", f"{human_duration(left_s)} left"]
        next_merge = self._next_merge(step)
        if "loss" in smooth:
            # Replicas that train apart have a loss each; the first cloud shows their mean.
            name = "loss" if next_merge is None else "own loss"
            parts.append(f"{name} {smooth['loss']:.3f}")
        parts.append(f"{smooth['step_s']:.3f} s/step")
        parts.append(f"{self._waits} {smooth['waits']:.3f} s")
        # Nothing crosses in a step of replicas that train apart, which is no fault.
        if next_merge is not None:
            parts.append(f"next merge at step {next_merge}")
        elif smooth["step_s"]:
            parts.append(rate_in_words(smooth["sent"], step_s=smooth["step_s"]))
        return "  ".join(parts)


def what_left(run_dir: Path) -> str:
    """Return, by kind of message, what the ranks of this folder have sent to other clouds in this
    attempt; empty if nothing is known."""
    sent = Counter[str]()
    for path in run_dir.glob("rank*.wire.json"):
        for message in read_json(path).get("messages", ()):
            sent[message["kind"]] += message["num_bytes"]
    rows = [f"  {kind:<12}{human_bytes(num):>10}" for kind, num in sent.most_common() if num]
    if not rows:
        return ""
    heading = "sent to other clouds:"
    if any(run_dir.glob("rank*.wire.earlier.json")):
        heading = "sent to other clouds in this attempt:"
    return "\n".join([heading, *rows])
