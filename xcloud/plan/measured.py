"""A recorded step of a real run, read back as costs: what every rank took for every action, what
every message weighed, what every line did. Finds the run's files with read_timeline.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from xcloud.cluster.link_profile import LinkProfile, Wan, line_bytes
from xcloud.parallel.schedule import Action
from xcloud.plan.costs import Direction, TableCosts, Transfer, Update, line_of_layout
from xcloud.plan.line import FREE, Line
from xcloud.record.timeline import Box, Flight, Lane, Timeline

_DIRECTION = {"activation": "forward", "gradient": "backward"}


class Parts(NamedTuple):
    """Seconds of one action of one rank. compute_s: with whatever the main thread did between the
    recorded spans."""

    decompress_s: float
    compute_s: float
    compress_s: float


class Sent(NamedTuple):
    direction: str
    sender: int
    receiver: int
    micro_batch: int


@dataclass(frozen=True)
class MeasuredCosts:
    """As recorded, for the same ranks and micro-batches; `averaged` is for all others.

    lines: by (sending cloud, receiving cloud). Where none was recorded, or with
    dataclasses.replace(costs, lines={}), the layout says what joins two clouds. Messages inside a
    cloud are not recorded; they are free.
    """

    parts: Mapping[tuple[int, Action], Parts]
    bytes_of: Mapping[Sent, int]
    updates: Mapping[int, Update]
    lines: Mapping[tuple[str, str], Line]
    control_bytes: int = 0
    cloud_of: Mapping[int, str] = field(default_factory=dict)

    def action_s(self, rank: int, action: Action) -> float:
        own_s = self._parts(rank, action).compute_s
        if action.kind != "backward":
            return own_s
        late = self.parts.get((rank, action._replace(kind="weights")))
        return own_s if late is None else own_s + late.compute_s

    def message_bytes(self, message: Transfer) -> int:
        direction, _, micro_batch, sender, receiver = message
        found = self.bytes_of.get(Sent(direction, sender, receiver, micro_batch))
        if found is None:
            if self.cloud_of.get(sender) == self.cloud_of.get(receiver) is not None:
                return 0
            raise ValueError(
                f"the recorded step has no {direction} message of micro-batch {micro_batch} from "
                f"rank {sender} to rank {receiver}; for another layout or schedule than the "
                "recorded one use MeasuredCosts.averaged()"
            )
        return found

    def compress_s(self, message: Transfer) -> float:
        stage = message.boundary + (message.direction == "backward")
        return self._parts(message.sender, _action(message, stage)).compress_s

    def decompress_s(self, message: Transfer) -> float:
        stage = message.boundary + (message.direction == "forward")
        return self._parts(message.receiver, _action(message, stage)).decompress_s

    def line(self, here: str, there: str, wan: Wan | None) -> Line:
        if here == there:
            return FREE
        found = self.lines.get((here, there))
        return line_of_layout(here, there, wan) if found is None else found

    def update(self, rank: int, stages: Sequence[int]) -> Update:
        if rank not in self.updates:
            raise ValueError(f"the recorded step has no rank {rank}; use averaged()")
        return self.updates[rank]

    def averaged(self) -> TableCosts:
        """Means over ranks and micro-batches, for other schedules, micro-batch counts of the same
        size, and layouts of the same stages. Lines keep the clouds' names."""
        ranks_of: dict[int, set[int]] = defaultdict(set)
        by_place: dict[tuple[str, int], list[Parts]] = defaultdict(list)
        for (rank, action), parts in self.parts.items():
            ranks_of[action.stage].add(rank)
            by_place[action.kind, action.stage].append(parts)
        stages = range(len(ranks_of))

        def mean(kind: str, stage: int, name: str) -> float:
            return _mean(getattr(parts, name) for parts in by_place[kind, stage])

        def direction(kind: str, sending: int, receiving: int) -> Direction:
            sizes = [
                size
                for sent, size in self.bytes_of.items()
                if sent.direction == kind
                and sent.sender in ranks_of[sending]
                and sent.receiver in ranks_of[receiving]
            ]
            return Direction(
                round(_mean(sizes)),
                mean(kind, sending, "compress_s"),
                mean(kind, receiving, "decompress_s"),
            )

        late_s = [mean("weights", stage, "compute_s") for stage in stages]
        return TableCosts(
            [mean("forward", stage, "compute_s") for stage in stages],
            [mean("backward", stage, "compute_s") + late_s[stage] for stage in stages],
            [direction("forward", stage, stage + 1) for stage in stages[:-1]],
            [direction("backward", stage + 1, stage) for stage in stages[:-1]],
            [self._mean_update(stage, ranks_of) for stage in stages],
            lines={f"{here}-{there}": line for (here, there), line in self.lines.items()},
            control_bytes=self.control_bytes,
            weights_s=late_s,
        )

    def _mean_update(self, stage: int, ranks_of: Mapping[int, set[int]]) -> Update:
        """A rank of several stages gives each an equal part of its own."""
        names = ("fetch_s", "average_s", "norm_s", "optimizer_s")
        held = {rank: sum(rank in r for r in ranks_of.values()) for rank in ranks_of[stage]}
        return Update(
            *(_mean(getattr(self.updates[r], name) / n for r, n in held.items()) for name in names)
        )

    def _parts(self, rank: int, action: Action) -> Parts:
        found = self.parts.get((rank, action))
        if found is None:
            raise ValueError(
                f"the recorded step has no {action.kind} of micro-batch {action.micro_batch} at "
                f"stage {action.stage} on rank {rank}; for another layout or schedule than the "
                "recorded one use MeasuredCosts.averaged()"
            )
        return found


def measured_costs(timeline: Timeline) -> MeasuredCosts:
    """The costs of a recorded step. What is not a recorded span (the interpreter between two of
    them) counts for the span behind it; what wakes a waiting rank late, for the line's latency."""
    parts: dict[tuple[int, Action], Parts] = {}
    updates: dict[int, Update] = {}
    stages_of = {
        lane.rank: {box.stage for box in lane.boxes if box.direction} for lane in timeline.lanes
    }
    averages: dict[int, float] = {}
    for lane in timeline.lanes:
        found = _read_lane(lane)
        parts.update({(lane.rank, action): p for action, p in found.parts.items()})
        updates[lane.rank], averages[lane.rank] = found.update, found.average_s
    for rank, update in updates.items():
        mates = [r for r, held in stages_of.items() if held & stages_of[rank]]
        if len(mates) > 1:
            # The last to come waits for nobody.
            shared = Update(
                update.fetch_s, min(averages[r] for r in mates), update.norm_s, update.optimizer_s
            )
        else:
            norm_s = update.norm_s + averages[rank]
            shared = Update(update.fetch_s, 0.0, norm_s, update.optimizer_s)
        updates[rank] = shared
    sizes: dict[Sent, list[int]] = defaultdict(list)
    control: list[int] = []
    for flight in (f for flights in timeline.flights.values() for f in flights):
        if flight.kind in _DIRECTION:
            sent = _DIRECTION[flight.kind], flight.sender, flight.receiver, flight.micro_batch
            sizes[Sent(*sent)].append(flight.num_bytes)
        elif flight.kind == "norm":
            control.append(flight.num_bytes)
    waits = _waits(timeline)
    return MeasuredCosts(
        parts,
        {sent: round(_mean(found)) for sent, found in sizes.items()},
        updates,
        {
            direction: _line_of(flights, waits)
            for direction, flights in timeline.flights.items()
            if any(flight.kind in _DIRECTION for flight in flights)
        },
        round(_mean(control)),
        {lane.rank: lane.cloud for lane in timeline.lanes},
    )


@dataclass
class _LaneCosts:
    parts: dict[Action, Parts]
    update: Update
    average_s: float


def _read_lane(lane: Lane) -> _LaneCosts:
    us: dict[Action, list[int]] = {}
    outside = {"fetch": 0, "average": 0, "clip": 0, "behind": 0}
    num_fetches, at_us, has_normed = 0, lane.from_us, False
    for box in lane.boxes:
        gap_us, own_us = box.from_us - at_us, box.until_us - box.from_us
        at_us = box.until_us
        if box.direction:
            action = Action(box.direction, box.stage, box.micro_batch)  # type: ignore[arg-type]
            parts = us.setdefault(action, [0, 0, 0])
            parts[1] += gap_us
            if box.what != "wait":
                which = {"decompress": 0, box.direction: 1, "compress": 2}[box.what]
                parts[which] += own_us
            continue
        num_fetches += box.what == "fetch"
        if box.what in ("wait", "average") and (has_normed or box.what == "wait"):
            outside["behind" if has_normed else "clip"] += gap_us
            continue  # waiting for the sum of the norms
        name = box.what if box.what in outside and not has_normed else "behind"
        outside[name] += gap_us + own_us
        has_normed = has_normed or box.what == "clip"
    outside["behind"] += lane.until_us - at_us
    return _LaneCosts(
        {action: Parts(*(1e-6 * part for part in parts)) for action, parts in us.items()},
        Update(
            1e-6 * outside["fetch"] / max(1, num_fetches),
            0.0,
            1e-6 * outside["clip"],
            1e-6 * outside["behind"],
        ),
        1e-6 * outside["average"],
    )


_Waits = Mapping[tuple[int, str, int], Box]


def _waits(timeline: Timeline) -> _Waits:
    """By receiver, direction and micro-batch."""
    return {
        (lane.rank, box.direction, box.micro_batch): box
        for lane in timeline.lanes
        for box in lane.boxes
        if box.what == "wait" and box.direction
    }


def _line_of(flights: Sequence[Flight], waits: _Waits) -> Line:
    """One line that explains these flights: bytes over the time it was busy, and a latency.

    An emulated line says when it carried what. On a real one the fastest message gives the
    latency; each then had the line from its start, or the end of the one before, until it was
    there less latency.
    """
    is_emulated = any(flight.until_us < flight.arrived_us for flight in flights)
    awake_us = [_awake_us(flight, waits) for flight in flights]
    if is_emulated:
        latency_us = statistics.median(
            awake - flight.until_us for awake, flight in zip(awake_us, flights, strict=True)
        )
        busy_us = float(sum(flight.until_us - flight.from_us for flight in flights))
    else:
        latency_us = min(flight.arrived_us - flight.from_us for flight in flights)
        busy_us, free_us = 0.0, 0.0
        for flight in sorted(flights, key=lambda f: f.from_us):
            until_us = flight.arrived_us - latency_us
            busy_us += max(0.0, until_us - max(flight.from_us, free_us))
            free_us = max(free_us, until_us)
    bits = sum(8.0 * line_bytes(flight.num_bytes) for flight in flights)
    # Shorter than the clock's microseconds: as good as no time.
    bandwidth = bits / max(1e-6 * busy_us, 1e-9)
    return Line(LinkProfile(bandwidth, max(0.0, 1e-6 * latency_us)))


def _awake_us(flight: Flight, waits: _Waits) -> int:
    """When its receiver went on with it, if it was waiting for it; else when it had arrived."""
    direction = _DIRECTION.get(flight.kind, "")
    box = waits.get((flight.receiver, direction, flight.micro_batch))
    if box is not None and box.from_us < flight.arrived_us < box.until_us:
        return box.until_us
    return flight.arrived_us


def _action(message: Transfer, stage: int) -> Action:
    return Action(message.direction, stage, message.micro_batch)  # type: ignore[arg-type]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
