"""What carries messages between two clouds, for the simulator. Sends nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import permutations

from xcloud.base.checks import check_number
from xcloud.base.errors import ConfigError
from xcloud.cluster.layout import ClusterLayout
from xcloud.cluster.link_profile import LinkProfile


@dataclass(frozen=True)
class Line:
    """One direction. It carries one message at a time, first come, first served:

        until   = start + per_message_s + 8 * line_bytes(num_bytes) / bandwidth
        arrived = until + latency (+ jitter; no message overtakes another)

    profile: bandwidth, latency, jitter, trace and outages, as for the emulated link; time 0 is the
        start of the simulation. None = any number of bytes takes no time.
    per_message_s: the line is busy with each message for so long besides.
    """

    profile: LinkProfile | None = None
    per_message_s: float = 0.0

    def __post_init__(self) -> None:
        if self.profile is not None and not isinstance(self.profile, LinkProfile):
            raise ConfigError(f"line.profile must be a LinkProfile or None, got {self.profile!r}")
        check_number("line.per_message_s", self.per_message_s, 0.0)

    @property
    def latency_s(self) -> float:
        return 0.0 if self.profile is None else self.profile.latency_s

    def latency_at(self, now_s: float) -> float:
        """For a message whose last byte leaves at now_s; any line."""
        return 0.0 if self.profile is None else self.profile.latency_at(now_s)

    @property
    def jitter_s(self) -> float:
        return 0.0 if self.profile is None else self.profile.jitter_s

    @property
    def is_steady(self) -> bool:
        """A message takes the line for equally long whenever it begins."""
        p = self.profile
        return p is None or not (p.trace or p.outages or p.outage_every_s)

    def line_s(self, num_bytes: int) -> float:
        """Seconds that a message keeps a steady line busy."""
        return self.per_message_s + (self.profile.line_s(num_bytes) if self.profile else 0.0)

    def until_s(self, start_s: float, num_bytes: int) -> float:
        """When the last byte leaves if the line turns to the message at start_s; any line."""
        if self.is_steady or self.profile is None:
            return start_s + self.line_s(num_bytes)
        return self.profile.sent_at(start_s + self.per_message_s, num_bytes)


FREE = Line()


def lines_of(
    layout: ClusterLayout, given: Mapping[str, LinkProfile], bandwidth: float | None = None
) -> dict[str, Line]:
    """Between every two clouds, by "a-b", and inside one, by "a-a", where it is given.
    given: by pair, or "*" for all between clouds; comes before the layout's own.
    bandwidth: in place of theirs. Raises ConfigError for a line that nobody describes."""
    found = {}
    for here, there in permutations(layout.clouds, 2):
        pair, turned = f"{here}-{there}", f"{there}-{here}"
        own = layout.wan_of(here, there)
        wan = given.get(pair, given.get(turned, given.get("*", own)))
        if not wan.has_numbers:
            raise ConfigError(
                f"plan: nobody says what the real network from {here!r} to {there!r} can do; "
                "choose a profile (cluster/wan=…), or give plan.profile a file whose `lines` "
                'names "*" or this pair'
            )
        line = wan.profile
        if bandwidth is not None:
            if line is None:
                line = LinkProfile(bandwidth)
            line = replace(line, bandwidth_bits_per_s=bandwidth, trace=(), trace_period_s=0.0)
        found[pair] = FREE if line is None else Line(line)
    inside = {f"{name}-{name}" for name in layout.clouds} & set(given)
    return found | {pair: Line(given[pair]) for pair in inside}
