"""Recorded steps read back as costs: of one step what a stage took for its actions and messages,
of a trial run's steps a profile. Finds no files and runs nothing.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

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
    share them. parts: of a model with blocks, the number of stages in each of the job's own."""

    legs: Sequence[Leg]
    own: str
    stages: Sequence[StageFacts]
    ranks: Sequence[tuple[Sequence[int], int]]
    pass_samples: float
    parts: Sequence[int] = ()

    def pieces(
        self, boundary_after: Sequence[int | None], *others: Trial
    ) -> tuple[list[Piece], Curve, Curve]:
        """The model as it was cut, or, if it has blocks, block by block. boundary_after: each
        piece but the last. others: with other cuts of the same model.
        Then what a stage takes besides its blocks, forward and backward, where that is known."""
        if self.parts:
            together = [part for trial in (self, *others) for part in trial._parts()]
            quantities, calls = _by_block(together, sum(facts.blocks for facts in self.stages))
        else:
            quantities = [self._of_stage(stage) for stage in range(len(self.stages))]
            calls = Curve(), Curve()
        boundaries = [*boundary_after, None]
        per_byte_s = self._update_s() / max(1, sum(s.trained_bytes for s in self.stages))
        pieces = [
            _piece(i, found, boundary, per_byte_s, bool(self.parts))
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

    def _parts(self) -> Iterator[_Part]:
        first = 0
        for number in self.parts:
            stages = range(first, first + number)
            first += number
            of = [self._of_stage(stage) for stage in stages]
            yield _Part(
                [number, 0 in stages, first == len(self.stages),
                 sum(self.stages[stage].blocks for stage in stages)],
                _Quantities(*(
                    {b: sum(points[b] for points in same) for b in same[0]}
                    for same in zip(*of, strict=True)
                )),
            )  # fmt: skip

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


class _Part(NamedTuple):
    """holds: so many stages, the model's first one, its last one, so many blocks. Of several
    stages of a rank the sum: what the first of them to be called takes to warm up, others save."""

    holds: Sequence[int]
    of: _Quantities


def _by_block(
    parts: Sequence[_Part], num_blocks: int
) -> tuple[list[_Quantities], tuple[Curve, Curve]]:
    """Of each block, the first with what is before it, the last with what is after it.

    A stage is called once for each micro-batch, which takes as long whatever its blocks. So a
    part takes calls * call + front + tail + blocks * block, and parts that differ tell which is
    which. What they leave open goes to the blocks."""
    block, front, tail, calls = [], [], [], []
    for number, name in enumerate(_Quantities._fields):
        # The first stage puts nothing off, so nothing was seen of it.
        late = name in ("weights_s", "splitting_s")
        seen = [part for part in parts if not (late and part.holds[1])]
        is_known = np.array([name in ("forward_s", "backward_s"), not late, True, True])
        found: dict[float, list[float]] = {}
        for b in parts[0].of[number]:
            rows = np.array([part.holds for part in seen if b in part.of[number]], float)
            values = [part.of[number][b] for part in seen if b in part.of[number]]
            found[b] = _solved(rows.reshape(-1, 4) * is_known, values)
        call, first, last, each = ({b: x[i] for b, x in found.items()} for i in range(4))
        calls.append(Curve(sorted(call.items())))
        block.append(each)
        front.append({b: each[b] + first[b] for b in each})
        tail.append({b: each[b] + last[b] for b in each})
        if num_blocks == 1:
            tail[-1] = {b: each[b] + first[b] + last[b] for b in each}
    between = [_Quantities(*block)] * (num_blocks - 2)
    ends = [_Quantities(*front)] * (num_blocks > 1), [_Quantities(*tail)]
    return [*ends[0], *between, *ends[1]], (calls[0], calls[1])


def _solved(rows: Any, values: Sequence[float]) -> list[float]:
    """The shares, none negative, that come nearest to the values, blocks' shares first."""
    if not values:
        return [0.0] * 4
    little = 1e-3 * np.diag([1.0, 1.0, 1.0, 0.0])
    shares, _ = nnls(np.vstack([rows, little]), [*values, *[0.0] * 4])
    return [float(share) for share in shares]


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
