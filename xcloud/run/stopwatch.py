"""Time work on a device. Measures nothing by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

BUDGET_S = 0.1
MOST_TIMES = 5


@dataclass(frozen=True)
class Stopwatch:
    device: torch.device

    def now_s(self) -> float:
        """Once the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def median_s(self, once: Callable[[], object]) -> float:
        """Median seconds of 2 to MOST_TIMES times, up to BUDGET_S; the first time is left out."""
        once()
        found: list[float] = []
        while len(found) < 2 or (sum(found) < BUDGET_S and len(found) < MOST_TIMES):
            started_s = self.now_s()
            once()
            found.append(self.now_s() - started_s)
        return statistics.median(found)
