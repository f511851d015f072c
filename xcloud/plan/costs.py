"""What things cost, for the simulator: seconds of work, bytes of messages, lines between clouds.
Numbers only; measured.py reads them from recorded steps, pricing.py from a profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from xcloud.base.errors import ConfigError
from xcloud.cluster.link_profile import Wan
from xcloud.parallel.schedule import Action
from xcloud.plan.line import FREE, Line


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


class Costs(Protocol):
    """Every method is a pure function of its arguments."""

    @property
    def control_bytes(self) -> int:
        """Bytes of a message of the agreement on the gradient norm."""

    def action_s(self, rank: int, action: Action) -> float:
        """Seconds of computing; micro_batch counts within the update. Of a backward all of it; of
        weights the part of the backward that may be put off."""

    def message_bytes(self, message: Transfer) -> int:
        """Bytes of the whole frame."""

    def compress_s(self, message: Transfer) -> float:
        """Seconds of its sender's main thread, framing included."""

    def decompress_s(self, message: Transfer) -> float: ...

    def line(self, here: str, there: str, wan: Wan | None) -> Line:
        """What carries messages from one cloud to another, or, if they are the same, between two
        of its ranks. wan: what the layout says about these clouds; None inside one."""

    def update(self, rank: int, stages: Sequence[int]) -> Update:
        """stages: those that the rank holds."""


def line_of_layout(here: str, there: str, wan: Wan | None) -> Line:
    """The line that the layout describes. Raises ConfigError for a real network, which has no
    numbers."""
    if wan is None or wan.has_numbers:
        return Line(wan.profile) if wan is not None and wan.profile is not None else FREE
    raise ConfigError(
        f"nobody says what the real network from {here!r} to {there!r} can do; give the costs a "
        f"line named '{here}-{there}', or the layout a link profile"
    )


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
class TableCosts:
    """Numbers from a table; the same for every micro-batch.

    forward_s, backward_s: by stage. forward, backward: by boundary (the gradient in `backward`).
    updates: by stage; of a rank with several stages they add up. weights_s: by stage, the part of
    backward_s that may be put off. Missing ones cost nothing.
    slowdown: rank -> how many times longer it computes and updates; 1 for the others.
    lines: "a-b" -> the line from cloud a to cloud b, or inside a cloud as "a-a". Where none is
        named, the layout says what joins two clouds, and messages inside a cloud are free.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    forward: Sequence[Direction] = ()
    backward: Sequence[Direction] = ()
    updates: Sequence[Update] = ()
    slowdown: Mapping[int, float] = field(default_factory=dict)
    lines: Mapping[str, Line] = field(default_factory=dict)
    control_bytes: int = 128
    weights_s: Sequence[float] = ()

    def action_s(self, rank: int, action: Action) -> float:
        table: Sequence[float] = getattr(self, f"{action.kind}_s")
        return table[action.stage] * self.slowdown.get(rank, 1.0) if table else 0.0

    def message_bytes(self, message: Transfer) -> int:
        return self._direction(message).num_bytes

    def compress_s(self, message: Transfer) -> float:
        return self._direction(message).compress_s

    def decompress_s(self, message: Transfer) -> float:
        return self._direction(message).decompress_s

    def line(self, here: str, there: str, wan: Wan | None) -> Line:
        found = self.lines.get(f"{here}-{there}")
        return line_of_layout(here, there, wan) if found is None else found

    def update(self, rank: int, stages: Sequence[int]) -> Update:
        if not self.updates:
            return Update()
        factor = self.slowdown.get(rank, 1.0)
        mine = [self.updates[stage] for stage in stages]
        return Update(
            factor * sum(entry.fetch_s for entry in mine),
            sum(entry.average_s for entry in mine),
            factor * sum(entry.norm_s for entry in mine),
            factor * sum(entry.optimizer_s for entry in mine),
        )

    def _direction(self, message: Transfer) -> Direction:
        table = self.forward if message.direction == "forward" else self.backward
        return table[message.boundary] if table else _NOTHING


_NOTHING = Direction()
