"""Bandwidth, latency and faults of a link between two clouds, and how much may be in flight on it.
Pure arithmetic; sends nothing.

Times in seconds, bandwidth in bits per second of the line, packet headers included.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.settings import NotNegative, NotNegativeFloat, PositiveFloat, settings

# TCP over IPv4 and Ethernet: of 1514 bytes on the line, 1448 are payload (20 IP, 32 TCP with
# timestamps, 14 Ethernet). A kernel shaper (tbf) counts the same bytes.
PACKET_PAYLOAD_BYTES = 1448
PACKET_HEADER_BYTES = 66


def line_bytes(num_bytes: int) -> int:
    """Bytes on the line for `num_bytes` handed to TCP."""
    return num_bytes + PACKET_HEADER_BYTES * math.ceil(num_bytes / PACKET_PAYLOAD_BYTES)


class Wan:
    """What joins two clouds: here the network as it is (cluster/wan=real), whose bandwidth is
    not known. Another carrier is a subclass, named by its YAML in conf/cluster/wan."""

    advice: ClassVar[str] = (
        "a profile of conf/cluster/wan is chosen with a slash, such as cluster/wan=oregon_tokyo"
    )
    emulated: ClassVar[bool] = False
    """Whether the sender's clock says when a message arrives."""
    is_metered: ClassVar[bool] = True
    """Whether the receiving end measures how long messages keep the line busy."""
    has_numbers: ClassVar[bool] = False
    """Whether `profile` says what the line can do."""
    patience_settings: ClassVar[str] = "cluster.liveness.overdue_after_s or lost_after_s"
    """Which settings make a rank wait longer for a message."""

    @property
    def profile(self) -> LinkProfile | None:
        """The line in numbers; None where there is no limit, or nobody says one."""
        return None

    def overdue_s(self, num_bytes: int) -> float | None:
        """Seconds to wait for a message of this size before the peer counts as silent; None: as
        cluster.liveness says."""
        return None

    def describe(self) -> str:
        return "the network as it is"


class FreeWan(Wan):
    """No limit; messages are still framed, compressed and counted (cluster/wan=free)."""

    is_metered = False
    has_numbers = True

    def describe(self) -> str:
        return "no limit"


REAL, FREE = Wan(), FreeWan()


_Pair = Annotated[Sequence[NotNegativeFloat], Field(min_length=2, max_length=2)]
_PairOrThree = Annotated[Sequence[NotNegativeFloat], Field(min_length=2, max_length=3)]


@settings("wan", kw_only=True)
class UnsteadyLine(Wan):
    """What an emulated line does over time.

    trace: [[seconds since the start, bits per second], ...], or in each entry a third number, the
        latency in seconds: what the line does from then on; repeats every trace_period_s if that
        is set. Before the first entry it is bandwidth_bits_per_s and latency_s.
    outages: [[start, duration], ...] in seconds since the start; nothing is sent meanwhile.
    outage_every_s, outage_lasting_s: further outages at seeded exponential gaps; 0 = none.
    """

    trace: Sequence[_PairOrThree] = ()
    trace_period_s: NotNegativeFloat = 0.0
    outages: Sequence[_Pair] = ()
    outage_every_s: NotNegativeFloat = 0.0
    outage_lasting_s: NotNegativeFloat = 0.0
    seed: NotNegative = 0

    def __post_init__(self) -> None:
        for name in ("trace", "outages"):
            entries = tuple(map(tuple, getattr(self, name)))
            object.__setattr__(self, name, entries)
            if list(entries) != sorted(entries):
                raise ConfigError(f"wan.{name} must be in order of time, got {list(entries)}")
        if any(not duration for _, duration in self.outages):
            raise ConfigError(f"wan.outages must last longer than 0 s, got {list(self.outages)}")
        if self.trace_period_s and self.trace and self.trace[-1][0] >= self.trace_period_s:
            raise ConfigError(
                f"wan.trace_period_s ({self.trace_period_s}) must be longer than the last time in "
                f"wan.trace ({self.trace[-1][0]})"
            )
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

    @property
    def _nominal(self) -> Sequence[float]:
        """What holds before the first entry of the trace."""
        raise NotImplementedError

    def _rate_from(self, now_s: float) -> tuple[float, float]:
        """Bits per second at now_s, and until when this rate holds."""
        until = math.inf
        for start, duration in (*self.outages, *self._random_outages(now_s)):
            if start <= now_s < start + duration:
                return 0.0, start + duration
            if start > now_s:
                until = min(until, start)
        entry, next_s = self._entry_from(now_s)
        return entry[1], min(until, next_s)

    def _entry_from(self, now_s: float) -> tuple[Sequence[float], float]:
        """The entry of the trace that holds at now_s, and until when."""
        if not self.trace:
            return self._nominal, math.inf
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
            entry = self.trace[-1] if period and lap else self._nominal
        if index + 1 < len(starts):
            return entry, base + starts[index + 1]
        # Not base + period, which may round to now_s: the next lap would never begin.
        return entry, (lap + 1) * period if period else math.inf

    @cached_property
    def _outage_draws(self) -> tuple[random.Random, list[tuple[float, float]]]:
        return random.Random(self.seed), []

    def _random_outages(self, now_s: float) -> list[tuple[float, float]]:
        """The seeded outage that began last before now_s and the next one; drawn lazily, the same
        in all ranks and whatever was asked before."""
        if not self.outage_every_s:
            return []
        generator, drawn = self._outage_draws
        while not drawn or drawn[-1][0] <= now_s:
            end = sum(drawn[-1]) if drawn else 0.0
            gap = generator.expovariate(1.0 / self.outage_every_s)
            drawn.append((end + gap, self.outage_lasting_s))
        following = bisect_right(drawn, (now_s, math.inf))
        return drawn[max(0, following - 1) : following + 1]


@settings("wan")
class LinkProfile(UnsteadyLine):
    """One direction of the link between two clouds; the other is identical and independent.

    bandwidth_bits_per_s: shared by all ranks of the pair of clouds.
    latency_s: one way. The round trip is twice this.
    jitter_s: each message is delayed by a seeded uniform draw from [0, jitter_s]; no reordering.
    timeout_s, timeout_factor: a message is overdue after timeout_s + timeout_factor * its own
        transfer time.
    """

    bandwidth_bits_per_s: PositiveFloat
    latency_s: NotNegativeFloat = 0.0
    jitter_s: NotNegativeFloat = 0.0
    timeout_s: PositiveFloat = 300.0
    timeout_factor: Annotated[float, Field(ge=1.0)] = 10.0

    emulated = True
    is_metered = False
    has_numbers = True
    patience_settings = "cluster.wan.timeout_s or cluster.wan.timeout_factor"

    @property
    def profile(self) -> LinkProfile:
        return self

    @property
    def _nominal(self) -> Sequence[float]:
        return 0.0, self.bandwidth_bits_per_s

    def transfer_s(self, num_bytes: int) -> float:
        """Seconds until the last byte arrives on an idle link at its nominal bandwidth."""
        return self.latency_s + self.line_s(num_bytes)

    def line_s(self, num_bytes: int) -> float:
        """Seconds that `num_bytes` keep the line busy at its nominal bandwidth."""
        return 8.0 * line_bytes(num_bytes) / self.bandwidth_bits_per_s

    def overdue_s(self, num_bytes: int) -> float:
        """Seconds to wait for a message of this size before the peer counts as silent."""
        return self.timeout_s + self.timeout_factor * self.transfer_s(num_bytes)

    def describe(self) -> str:
        rate = self.bandwidth_bits_per_s
        unit = f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"
        extras = [
            f"{2e3 * self.latency_s:g} ms round trip",
            *([f"jitter {1e3 * self.jitter_s:g} ms"] if self.jitter_s else []),
            *([f"trace of {len(self.trace)} rates"] if self.trace else []),
            *(["outages"] if self.outages or self.outage_every_s else []),
        ]
        return f"emulated {unit}, {', '.join(extras)}"

    def sent_at(self, start_s: float, num_bytes: int) -> float:
        """When the last byte is sent if the first is sent at start_s (seconds since the start)."""
        bits = 8.0 * line_bytes(num_bytes)
        now = start_s
        while True:
            rate, until = self._rate_from(now)
            if rate > 0 and (bits <= rate * (until - now)):
                return now + bits / rate
            bits -= rate * (until - now)
            now = until

    def bandwidth_at(self, now_s: float) -> float:
        """Bits per second at now_s (seconds since the start); 0 in an outage."""
        return self._rate_from(now_s)[0]

    def latency_at(self, now_s: float) -> float:
        """One way, for a message whose last byte leaves at now_s (seconds since the start)."""
        entry, _ = self._entry_from(now_s)
        return entry[2] if len(entry) == 3 else self.latency_s


BUDGET_BYTES = 64_000_000
MIN_POSTED = 3
"""Fewer would leave the line idle between two large messages."""


@dataclass(frozen=True)
class LinkWindow:
    """The limits of one direction between two ranks; the same at both ends.

    num_posted: receives that the receiver keeps posted, each with a buffer for the longest frame
        (pages use memory only once filled). The sender ends the link with as many goodbyes.
    max_queued_bytes: frames that may be queued at the sender before `send` blocks, and at the
        receiver before it stops reading from the network.
    """

    num_posted: int = MIN_POSTED
    max_queued_bytes: int = BUDGET_BYTES

    @classmethod
    def covering(
        cls, num_under_way: int, frame_bytes: int, budget_bytes: int = BUDGET_BYTES
    ) -> LinkWindow:
        """For a sender that may be `num_under_way` messages of at most frame_bytes ahead of what
        its receiver has read.

        Posted receives stay within budget_bytes, but there are at least MIN_POSTED. The queue
        takes everything in flight even beyond the budget: a schedule whose `send` blocked would
        deadlock.
        """
        num_posted = max(MIN_POSTED, min(num_under_way, budget_bytes // frame_bytes))
        return cls(num_posted, max(budget_bytes, num_under_way * frame_bytes))
