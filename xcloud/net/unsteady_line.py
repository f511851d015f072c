"""The changes of an emulated line over time: traces of bandwidth and latency, outages."""

from __future__ import annotations

import math
import random
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated

from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.settings import NotNegativeFloat, settings

_Pair = Annotated[Sequence[NotNegativeFloat], Field(min_length=2, max_length=2)]
_PairOrThree = Annotated[Sequence[NotNegativeFloat], Field(min_length=2, max_length=3)]


_DRAWING = threading.Lock()
"""Held while outages are drawn: one line serves the threads of all links of a rank."""


def jitter_share(number: int) -> float:
    """Return which share of jitter_s delays a message: a draw that is the same in every run.

    number: number of the message, counted from 0 for each direction between two clouds.
    """
    return random.Random(f"0:{number}").random()


@settings("wan", kw_only=True)
class UnsteadyLine(ABC):
    """An emulated line that does not stay the same: its settings, and when it carries what.

    trace: [[seconds since the start, bits per second], ...]. Each entry may have a third number,
        the latency in seconds. An entry applies from its time on. Before the first entry
        bandwidth_bits_per_s and latency_s apply. The trace repeats every trace_period_s if that is
        set.
    outages: [[start, duration], ...] in seconds since the start. Nothing is sent meanwhile.
    outage_every_s: mean seconds from one further outage to the next, at random (exponential) gaps.
        They are the same in every run. 0 = none.
    outage_lasting_s: duration of each of these outages in seconds. 0 = none.
    trace_period_s: seconds after which the trace starts over. 0 = it does not repeat.
    """

    trace: Sequence[_PairOrThree] = ()
    trace_period_s: NotNegativeFloat = 0.0
    outages: Sequence[_Pair] = ()
    outage_every_s: NotNegativeFloat = 0.0
    outage_lasting_s: NotNegativeFloat = 0.0

    @property
    @abstractmethod
    def nominal(self) -> Sequence[float]:
        """The entry of the trace that holds before the first one."""

    def check(self) -> None:
        """Raise ConfigError for a line on which nothing would arrive."""
        for name in ("trace", "outages"):
            entries = list(getattr(self, name))
            if entries != sorted(entries):
                raise ConfigError(f"wan.{name} must be in order of time, got {entries}")
        if any(not duration for _, duration in self.outages):
            raise ConfigError(f"wan.outages must last longer than 0 s, got {list(self.outages)}")
        if self.trace_period_s and self.trace and self.trace[-1][0] >= self.trace_period_s:
            raise ConfigError(
                f"wan.trace_period_s ({self.trace_period_s}) must be longer than the last time in "
                f"wan.trace ({self.trace[-1][0]})"
            )
        # The last rate lasts for ever, unless the trace repeats; then any of them will do.
        rates = [entry[1] for entry in self.trace]
        if self.trace and not (any(rates) if self.trace_period_s else rates[-1]):
            raise ConfigError(
                "wan.trace ends with a bandwidth of 0, so nothing more would ever arrive; end it "
                "with a bandwidth above 0, or set wan.trace_period_s, where one of them is above 0"
            )
        if bool(self.outage_every_s) != bool(self.outage_lasting_s):
            raise ConfigError(
                "wan.outage_every_s and wan.outage_lasting_s go together; got "
                f"{self.outage_every_s} and {self.outage_lasting_s}"
            )

    def last_bit_at(self, start_s: float, bits: float) -> float:
        """Return when the last bit is sent if the first is sent at start_s (seconds since the
        start)."""
        now = start_s
        while True:
            # A message may cross several entries of the trace and outages. Each turn sends what
            # fits until the rate changes next.
            rate, until = self.rate_from(now)
            if rate > 0 and (bits <= rate * (until - now)):
                return now + bits / rate
            bits -= rate * (until - now)
            now = until

    def rate_from(self, now_s: float) -> tuple[float, float]:
        """Return the bits per second at now_s, and until when this rate holds."""
        until = math.inf
        for start, duration in (*self.outages, *self.random_outages(now_s)):
            if start <= now_s < start + duration:
                return 0.0, start + duration
            if start > now_s:
                until = min(until, start)
        entry, next_s = self.entry_from(now_s)
        return entry[1], min(until, next_s)

    def entry_from(self, now_s: float) -> tuple[Sequence[float], float]:
        """Return the entry of the trace that holds at now_s, and until when."""
        if not self.trace:
            return self.nominal, math.inf
        period = self.trace_period_s
        lap = math.floor(now_s / period) if period else 0
        # A lap's end computed as (lap + 1) * period may round to now_s itself.
        if period and (lap + 1) * period <= now_s:
            lap += 1
        base = lap * period
        starts = [entry[0] for entry in self.trace]
        index = bisect_right(starts, now_s - base) - 1
        # Between two starts rounding may leave base + start just above now_s: never go backwards.
        if index + 1 < len(starts) and base + starts[index + 1] <= now_s:
            index += 1
        if index >= 0:
            entry = self.trace[index]
        else:
            entry = self.trace[-1] if period and lap else self.nominal
        if index + 1 < len(starts):
            return entry, base + starts[index + 1]
        # Not base + period, which may round to now_s: the next lap would never begin.
        return entry, (lap + 1) * period if period else math.inf

    @cached_property
    def _outage_draws(self) -> tuple[random.Random, list[tuple[float, float]]]:
        return random.Random(0), []

    def random_outages(self, now_s: float) -> list[tuple[float, float]]:
        """Return the random outage that began last before now_s and the next one. They are drawn
        lazily, the same in all ranks and whatever was asked before."""
        if not self.outage_every_s:
            return []
        with _DRAWING:
            generator, drawn = self._outage_draws
            while not drawn or drawn[-1][0] <= now_s:
                # Gaps count from the end of the outage before, so two never overlap.
                end = sum(drawn[-1]) if drawn else 0.0
                gap = generator.expovariate(1.0 / self.outage_every_s)
                drawn.append((end + gap, self.outage_lasting_s))
            following = bisect_right(drawn, (now_s, math.inf))
            return drawn[max(0, following - 1) : following + 1]
