"""Time work on a device. Measures nothing by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

BUDGET_S = 0.1
MOST_TIMES = 5
OTHER_BYTES = 32 << 20


@dataclass(frozen=True)
class Stopwatch:
    device: torch.device

    def now_s(self) -> float:
        """Once the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def cool(self) -> None:
        """Use other memory, so that little of what was used last is left in a processor's
        caches."""
        if self.device.type == "cpu":
            _other().add_(1.0)

    def median_s(self, once: Callable[[], object], cold: bool = False) -> float:
        """Median seconds of 2 to MOST_TIMES times, up to BUDGET_S; the first time is left out.

        cold: of work that comes now and then. Each time other memory has been used before, as by
        the stage that computes in between, so that little is left in the processor's caches.
        """
        once()
        found: list[float] = []
        while len(found) < 2 or (sum(found) < BUDGET_S and len(found) < MOST_TIMES):
            if cold:
                self.cool()
            started_s = self.now_s()
            once()
            found.append(self.now_s() - started_s)
        return statistics.median(found)


@cache
def _other() -> torch.Tensor:
    return torch.ones(OTHER_BYTES // 4)
