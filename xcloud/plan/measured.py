"""Recorded steps read back as costs: of one step what a stage took for its actions and messages,
of a trial run's steps a profile. Finds no files and runs nothing.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xcloud.plan.costs import Costs, Direction, Update
from xcloud.plan.profile import BoundaryCodec, Curve, DirectionCurves, Piece
from xcloud.record.timeline import Lane, Timeline

# One step.

_DIRECTION = {"activation": "forward", "gradient": "backward"}


class _Parts(NamedTuple):
    """Seconds of one action of one rank. compute_s: with whatever the main thread did between the
    recorded spans."""

    decompress_s: float
    compute_s: float
    compress_s: float


def measured_costs(timeline: Timeline) -> Costs:
    """Means over ranks and micro-batches of a recorded step. What is no recorded span (the
    interpreter between two of them) counts for the span after it. A rank of several stages gives
    each an equal part of its update. Lines are not read: the layout, or whoever asks, has them."""
    parts: dict[tuple[str, int], list[_Parts]] = defaultdict(list)
    updates: dict[int, tuple[Update, float]] = {}
    stages_of = {
        lane.rank: {box.stage for box in lane.boxes if box.direction} for lane in timeline.lanes
    }
    for lane in timeline.lanes:
        updates[lane.rank] = _read_lane(lane, parts)
    ranks_of: dict[int, set[int]] = defaultdict(set)
    for rank, held in stages_of.items():
        for stage in held:
            ranks_of[stage].add(rank)
    sizes, control_bytes = _messages(timeline)

    def mean(kind: str, stage: int, name: str) -> float:
        return _mean(getattr(found, name) for found in parts[kind, stage])

    def direction(kind: str, sending: int, receiving: int) -> Direction:
        found = [
            size
            for (of_kind, sender, receiver), own in sizes.items()
            if (of_kind, sender in ranks_of[sending], receiver in ranks_of[receiving])
            == (kind, True, True)
            for size in own
        ]
        compress_s = mean(kind, sending, "compress_s")
        return Direction(round(_mean(found)), compress_s, mean(kind, receiving, "decompress_s"))

    stages = range(len(ranks_of))
    late_s = [mean("weights", stage, "compute_s") for stage in stages]
    return Costs(
        [mean("forward", stage, "compute_s") for stage in stages],
        [mean("backward", stage, "compute_s") + late_s[stage] for stage in stages],
        [direction("forward", stage, stage + 1) for stage in stages[:-1]],
        [direction("backward", stage + 1, stage) for stage in stages[:-1]],
        [_update(ranks_of[stage], updates, stages_of) for stage in stages],
        control_bytes=control_bytes,
        weights_s=late_s,
    )


def _messages(timeline: Timeline) -> tuple[dict[tuple[str, int, int], list[int]], int]:
    """Bytes by direction, sender and receiver; and of a message about the norm."""
    sizes: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    control: list[int] = []
    for flight in (f for flights in timeline.flights.values() for f in flights):
        if flight.kind in _DIRECTION:
            way = _DIRECTION[flight.kind], flight.sender, flight.receiver
            sizes[way].append(flight.num_bytes)
        elif flight.kind == "norm":
            control.append(flight.num_bytes)
    return sizes, round(_mean(control))


def _update(
    mates: Collection[int],
    updates: Mapping[int, tuple[Update, float]],
    stages_of: Mapping[int, Collection[int]],
) -> Update:
    """Of a stage, the mean over its ranks. Of an average the last to come waits for nobody."""
    shares = []
    for rank in mates:
        own, average_s = updates[rank]
        shared_s = min(updates[mate][1] for mate in mates) if len(mates) > 1 else 0.0
        norm_s = own.norm_s + (average_s if len(mates) == 1 else 0.0)
        n = len(stages_of[rank])
        shares.append([s / n for s in (own.fetch_s, shared_s, norm_s, own.optimizer_s)])
    return Update(*map(_mean, zip(*shares, strict=True)))


def _read_lane(lane: Lane, parts: dict[tuple[str, int], list[_Parts]]) -> tuple[Update, float]:
    """Adds its actions to `parts`. The rank's update, and its seconds in averages."""
    us: dict[tuple[str, int, int], list[int]] = {}
    outside = {"fetch": 0, "average": 0, "clip": 0, "after": 0}
    num_fetches, at_us, has_normed = 0, lane.from_us, False
    for box in lane.boxes:
        gap_us, own_us = box.from_us - at_us, box.until_us - box.from_us
        at_us = box.until_us
        if box.direction:
            own = us.setdefault((box.direction, box.stage, box.micro_batch), [0, 0, 0])
            own[1] += gap_us
            if box.what != "wait":
                own[{"decompress": 0, box.direction: 1, "compress": 2}[box.what]] += own_us
            continue
        num_fetches += box.what == "fetch"
        if box.what in ("wait", "average") and (has_normed or box.what == "wait"):
            outside["after" if has_normed else "clip"] += gap_us
            continue  # waiting for the sum of the norms
        name = box.what if box.what in outside and not has_normed else "after"
        outside[name] += gap_us + own_us
        has_normed = has_normed or box.what == "clip"
    outside["after"] += lane.until_us - at_us
    for (kind, stage, _), spent in us.items():
        parts[kind, stage].append(_Parts(*(1e-6 * part for part in spent)))
    fetch_s = 1e-6 * outside["fetch"] / max(1, num_fetches)
    own_update = Update(fetch_s, 0.0, 1e-6 * outside["clip"], 1e-6 * outside["after"])
    return own_update, 1e-6 * outside["average"]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


# The steps of a trial.


@dataclass(frozen=True)
class Leg:
    """Steps of a trial with one schedule and compression. samples: of a micro-batch, on average.
    splits: whether weights' gradients were put off."""

    samples: float
    compression: str
    splits: bool
    steps: Sequence[Costs]

    def at(self, quantity: Callable[[Costs], float]) -> float:
        """The median over its steps."""
        return statistics.median(map(quantity, self.steps))


class StageFacts(NamedTuple):
    """activation_bytes, put_off_bytes: of a sample. blocks: of a model that is cut freely."""

    parameter_bytes: int
    trained_bytes: int
    activation_bytes: float
    put_off_bytes: float
    blocks: int = 0


@dataclass(frozen=True)
class Trial:
    """own: the job's compression. ranks: of each the stages that it holds, and how many ranks
    share them. pass_samples: of an accumulation pass."""

    legs: Sequence[Leg]
    own: str
    stages: Sequence[StageFacts]
    ranks: Sequence[tuple[Sequence[int], int]]
    pass_samples: float

    def pieces(self, boundary_after: Sequence[int | None]) -> tuple[list[Piece], Curve, Curve]:
        """The model as it was cut, or, if it has blocks, block by block: those between the first
        and the last of a model are alike. boundary_after: each piece but the last.
        Then what a stage takes besides its blocks, forward and backward, where that is known."""
        quantities = [self._of_stage(stage) for stage in range(len(self.stages))]
        calls = Curve(), Curve()
        if all(facts.blocks for facts in self.stages):
            quantities, calls = _by_block(quantities, [facts.blocks for facts in self.stages])
        boundaries = [*boundary_after, None]
        per_byte_s = self._update_s() / max(1, sum(s.trained_bytes for s in self.stages))
        pieces = [
            _piece(i, found, boundary, per_byte_s, bool(self.stages[0].blocks))
            for i, (found, boundary) in enumerate(zip(quantities, boundaries, strict=True))
        ]
        return pieces, *calls

    def directions(self, compression: str, boundary: int) -> BoundaryCodec:
        """What crossed after a stage; no backward if none did."""
        legs = self._legs(compression=compression, splits=None)

        def curve(way: str, name: str) -> Curve:
            return Curve(
                [
                    (leg.samples, leg.at(lambda t: getattr(getattr(t, way)[boundary], name)))
                    for leg in legs
                ]
            )

        def curves(way: str) -> DirectionCurves:
            return DirectionCurves(
                curve(way, "num_bytes"), curve(way, "compress_s"), curve(way, "decompress_s")
            )

        backward = curves("backward")
        returns = any(size for _, size in backward.num_bytes.points)
        return BoundaryCodec(curves("forward"), backward if returns else None)

    def fetch_s(self) -> Curve:
        """Of a micro-batch, by a rank."""

        def of_rank(costs: Costs) -> float:
            fetched_s = (n * sum(costs.updates[s].fetch_s for s in held) for held, n in self.ranks)
            return _mean(fetched_s)

        share = 1 / self.pass_samples
        own = self._legs(self.own, splits=False)
        return Curve([(leg.samples, leg.at(of_rank) * leg.samples * share) for leg in own])

    @property
    def control_bytes(self) -> int:
        return round(self.legs[0].at(lambda t: t.control_bytes))

    def _legs(self, compression: str, splits: bool | None) -> list[Leg]:
        found = [
            leg
            for leg in self.legs
            if leg.compression == compression and splits in (None, leg.splits)
        ]
        by_size = {leg.samples: leg for leg in reversed(found)}
        return [by_size[samples] for samples in sorted(by_size)]

    def _of_stage(self, stage: int) -> _Quantities:
        def curve(legs: Sequence[Leg], of: Callable[[Costs], float]) -> _Points:
            return {leg.samples: leg.at(of) for leg in legs}

        whole, split = (self._legs(self.own, splits) for splits in (False, True))
        forward, backward = (
            curve(whole, lambda t, n=name: getattr(t, n)[stage])  # type: ignore[misc]
            for name in ("forward_s", "backward_s")
        )
        facts = self.stages[stage]
        both = Curve(sorted((b, forward[b] + backward[b]) for b in forward))
        return _Quantities(
            forward,
            backward,
            curve(split, lambda t: t.weights_s[stage]),
            {
                leg.samples: leg.at(lambda t: t.forward_s[stage] + t.backward_s[stage])
                - both.at(leg.samples)
                for leg in split
            },
            {1.0: facts.activation_bytes},
            {1.0: facts.put_off_bytes},
            {1.0: float(facts.parameter_bytes)},
            {1.0: float(facts.trained_bytes)},
        )

    def _update_s(self) -> float:
        """Of all weights: norm, clipping and optimizer of the ranks that hold them."""
        own = self._legs(self.own, splits=False)
        return statistics.median(
            leg.at(lambda t: sum(u.norm_s + u.optimizer_s for u in t.updates)) for leg in own
        )


_Points = dict[float, float]  # by samples of a micro-batch


class _Quantities(NamedTuple):
    forward_s: _Points
    backward_s: _Points
    weights_s: _Points
    splitting_s: _Points
    activation_bytes: _Points
    put_off_bytes: _Points
    parameter_bytes: _Points
    trained_bytes: _Points


def _by_block(
    stages: Sequence[_Quantities], blocks: Sequence[int]
) -> tuple[list[_Quantities], tuple[Curve, Curve]]:
    """Of each block, the first with what is before it, the last with what is after it. One
    between is its share of the stages between or, where there are none, of the first stage.

    A stage is called once for each micro-batch, which takes as long whatever its blocks: by
    stages between of unequal numbers of blocks both are told apart. A stage of n blocks takes
    call + n * block."""
    if sum(blocks) == 1:
        return list(stages), (Curve(), Curve())
    between, counts = stages[1:-1], blocks[1:-1]
    if not between:
        end = 0 if blocks[0] > 1 else -1
        between, counts = [stages[end]], [blocks[end]]
    each: list[_Points] = []
    first: list[_Points] = []
    last: list[_Points] = []
    calls: list[Curve] = []
    for name, *own in zip(_Quantities._fields, *stages, strict=True):
        found = [getattr(stage, name) for stage in between]
        call, block = dict[float, float](), dict[float, float]()
        for b in own[0]:
            values = [points[b] for points in found]
            is_called = name in ("forward_s", "backward_s")
            call[b] = _at_no_blocks(counts, values) if is_called else 0.0
            block[b] = (sum(values) - len(values) * call[b]) / sum(counts)
        calls.append(Curve(sorted(call.items())))
        each.append(block)
        for ends, points, number in ((first, own[0], blocks[0]), (last, own[-1], blocks[-1])):
            ends.append({
                b: max(0.0, points[b] - call[b] - (number - 1) * block[b]) for b in points
            })  # fmt: skip
    # The first stage puts nothing off, so nothing was seen of it.
    front = _Quantities(*first)._replace(weights_s=each[2], splitting_s=each[3])
    found = [front, *[_Quantities(*each)] * (sum(blocks) - 2), _Quantities(*last)]
    return found, (calls[0], calls[1])


def _at_no_blocks(counts: Sequence[int], values: Sequence[float]) -> float:
    """The straight line through the values of so many blocks, at none of them; 0 where all have
    as many, or noise is larger than what a call takes."""
    if len(set(counts)) == 1:
        return 0.0
    line = statistics.linear_regression(counts, values)
    return min(max(0.0, line.intercept), min(values))


def _piece(
    number: int, of: _Quantities, boundary: int | None, per_byte_s: float, is_block: bool
) -> Piece:
    forward, backward, weights, splitting, activations, put_off = (
        Curve(sorted((b, max(0.0, value)) for b, value in points.items())) for points in of[:6]
    )
    trained = of.trained_bytes[1.0]
    return Piece(
        f"{'block' if is_block else 'stage'} {number}", forward, backward, boundary,
        round(of.parameter_bytes[1.0]), round(trained), activations, per_byte_s * trained,
        int(is_block), weights, put_off, splitting,
    )  # fmt: skip
