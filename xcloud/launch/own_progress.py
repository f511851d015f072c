"""The progress that a cloud other than the first one sees of a run over several machines: its own
steps while it runs, and in the end how many bytes of which kind have left it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xcloud.base.units import human_bytes, human_duration
from xcloud.record.files import read_json

SAY_EVERY_S = 30.0  # as the first cloud's terminal, where it cannot be rewritten (show/display.py)


class OwnProgress:
    """A line about every 30 s, of the steps since the last one: `hear` is told every event."""

    def __init__(
        self,
        max_steps: int,
        say: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_steps = max_steps
        self._say = say
        self._clock = clock
        self._said_at_s = -math.inf
        self._num_steps = 0
        self._sums = Counter[str]()
        self._loss: float | None = None

    def hear(self, event: str, fields: Mapping[str, Any]) -> None:
        """Count a step, and say how it goes if it is time to."""
        if event != "step" or "step_s" not in fields:
            return
        self._num_steps += 1
        self._sums["step_s"] += fields["step_s"]
        self._sums["waits"] += fields.get("waiting_s", 0.0)
        self._sums["sent"] += sum(fields.get("sent", {}).values())
        self._loss = fields.get("loss", self._loss)
        if self._clock() - self._said_at_s < SAY_EVERY_S:
            return
        self._said_at_s = self._clock()
        self._say(self._line(fields["step"]))
        self._num_steps = 0
        self._sums = Counter()

    def _line(self, step: int) -> str:
        step_s = self._sums["step_s"] / self._num_steps
        left_s = (self._max_steps - step) * step_s
        parts = [f"step {step}/{self._max_steps}", f"{human_duration(left_s)} left"]
        if self._loss is not None:
            parts.append(f"loss {self._loss:.3f}")
        parts += [f"{step_s:.3f} s/step", f"waits {self._sums['waits'] / self._num_steps:.3f} s"]
        if self._sums["step_s"]:
            parts.append(f"sends {8e-6 * self._sums['sent'] / self._sums['step_s']:.1f} Mbit/s")
        return "  ".join(parts)


def what_left(run_dir: Path) -> str:
    """Return, by kind of message, what the ranks of this folder have sent to other clouds; empty
    if nothing is known."""
    sent = Counter[str]()
    for path in run_dir.glob("rank*.wire.json"):
        for message in read_json(path).get("messages", ()):
            sent[message["kind"]] += message["num_bytes"]
    rows = [f"  {kind:<12}{human_bytes(num):>10}" for kind, num in sent.most_common() if num]
    if rows:
        return "\n".join(["sent to other clouds:", *rows])
    return ""
