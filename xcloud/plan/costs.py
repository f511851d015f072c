"""What things cost, for the simulator: seconds of work, bytes of messages, lines between clouds.
Numbers only; measured.py reads them from recorded steps, pricing.py from a profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import NamedTuple

from xcloud.base.errors import ConfigError
from xcloud.cluster.layout import ClusterLayout
from xcloud.cluster.link_profile import LinkProfile, Wan
from xcloud.parallel.schedule import Action

FREE = LinkProfile(1e18)  # as good as no time


def lines_of(
    layout: ClusterLayout, given: Mapping[str, LinkProfile], bandwidth: float | None = None
) -> dict[str, LinkProfile]:
    """Between every two clouds, by "a-b", and inside one, by "a-a", where it is given.
    given: by pair, or "*" for all between clouds; comes before the layout's own.
    bandwidth: in place of theirs. Raises ConfigError for a line that nobody describes."""
    found = {}
    for here, there in permutations(layout.clouds, 2):
        pair, turned = f"{here}-{there}", f"{there}-{here}"
        own = layout.wan_of(here, there)
        line = _profile(given.get(pair, given.get(turned, given.get("*", own))), here, there)
        if bandwidth is not None:
            line = replace(line, bandwidth_bits_per_s=bandwidth, trace=(), trace_period_s=0.0)
        found[pair] = line
    inside = {f"{name}-{name}" for name in layout.clouds} & set(given)
    return found | {pair: given[pair] for pair in inside}


def _profile(wan: Wan, here: str, there: str) -> LinkProfile:
    """Raises ConfigError for a real network, which has no numbers."""
    if not wan.has_numbers:
        raise ConfigError(
            f"nobody says what the real network from {here!r} to {there!r} can do; choose a "
            "profile (cluster/wan=…), or give plan.profile a file whose `lines` name "
            f"'{here}-{there}' or \"*\""
        )
    return wan.profile or FREE


class Transfer(NamedTuple):
    """One message of the pipeline. boundary: number of the stage before it; direction: "forward"
    for its activation, "backward" for the gradient. micro_batch: counts within the update."""

    direction: str
    boundary: int
    micro_batch: int
    sender: int
    receiver: int


@dataclass(frozen=True)
class Update:
    """Seconds that one rank spends on a step outside the schedule. fetch_s: before each pass.
    average_s: the all-reduce with the other ranks of its stage, once all are there. norm_s: up to
    the agreement on the gradient norm. optimizer_s: after it, clipping included."""

    fetch_s: float = 0.0
    average_s: float = 0.0
    norm_s: float = 0.0
    optimizer_s: float = 0.0


@dataclass(frozen=True)
class Direction:
    """What goes one way over one boundary, for each micro-batch."""

    num_bytes: int = 0
    compress_s: float = 0.0
    decompress_s: float = 0.0

    def times(self, factor: float) -> Direction:
        """Of a message so many times as large."""
        size = round(factor * self.num_bytes)
        return Direction(size, factor * self.compress_s, factor * self.decompress_s)


@dataclass(frozen=True)
class Costs:
    """The same for every micro-batch. A backward is all of it, also what may be put off; bytes are
    those of whole frames, and compressing includes framing.

    forward_s, backward_s: by stage. forward, backward: by boundary (the gradient in `backward`).
    updates: by stage; of a rank with several stages they add up. weights_s: by stage, the part of
    backward_s that may be put off. Missing ones cost nothing.
    slowdown: rank -> how many times longer it computes and updates; 1 for the others.
    control_bytes: of a message of the agreement on the gradient norm.
    lines: "a-b" -> the line from cloud a to cloud b, or inside a cloud as "a-a". It carries one
        message at a time, first come, first served; time 0 is the start of the simulation. Where
        none is named, the layout says what joins two clouds, and messages inside a cloud are free.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    forward: Sequence[Direction] = ()
    backward: Sequence[Direction] = ()
    updates: Sequence[Update] = ()
    slowdown: Mapping[int, float] = field(default_factory=dict)
    lines: Mapping[str, LinkProfile] = field(default_factory=dict)
    control_bytes: int = 128
    weights_s: Sequence[float] = ()

    def action_s(self, rank: int, action: Action) -> float:
        table: Sequence[float] = getattr(self, f"{action.kind}_s")
        return table[action.stage] * self.slowdown.get(rank, 1.0) if table else 0.0

    def direction(self, message: Transfer) -> Direction:
        table = self.forward if message.direction == "forward" else self.backward
        return table[message.boundary] if table else _NOTHING

    def line(self, here: str, there: str, wan: Wan | None) -> LinkProfile:
        """wan: of the layout; None inside a cloud."""
        if (found := self.lines.get(f"{here}-{there}")) is not None:
            return found
        return FREE if wan is None else _profile(wan, here, there)

    def update(self, rank: int, stages: Sequence[int]) -> Update:
        factor = self.slowdown.get(rank, 1.0)
        mine = [self.updates[stage] for stage in stages] if self.updates else []
        return Update(
            factor * sum(entry.fetch_s for entry in mine),
            sum(entry.average_s for entry in mine),
            factor * sum(entry.norm_s for entry in mine),
            factor * sum(entry.optimizer_s for entry in mine),
        )


_NOTHING = Direction()
