"""Recorded steps read back as costs: of one step what a stage took for its actions and messages,
of a trial run's steps a profile. Finds no files and runs nothing.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from xcloud.record.timeline import Lane, Timeline
from xcloud.simulator.costs import (
    BoundaryCodec,
    Costs,
    Curve,
    Direction,
    DirectionCurves,
    Piece,
    Update,
)

# One step.


def measured_costs(timeline: Timeline) -> Costs:
    """Means over ranks and micro-batches of a recorded step. What is no recorded span (the
    interpreter between two of them) counts for the span after it. A rank of several stages gives
    each an equal part of its update. Lines are not read: the layout, or whoever asks, has them."""
    spent = defaultdict[tuple[str, int, int, int], Counter[str]](Counter)
    for lane in timeline.lanes:
        for part, (direction, stage, micro_batch), us in _shares(lane):
            spent[direction, stage, lane.rank, micro_batch][part] += us
    ranks_of = defaultdict[int, set[int]](set)
    for direction, stage, rank, _ in spent:
        if direction:
            ranks_of[stage].add(rank)
    flights = [flight for some in timeline.flights.values() for flight in some]

    def mean_s(part: str, direction: str, stage: int) -> float:
        own = (of[part] for (*action, _, _), of in spent.items() if action == [direction, stage])
        return 1e-6 * _mean(own)

    def crossing(kind: str, direction: str, sending: int, receiving: int) -> Direction:
        sizes = (
            f.num_bytes
            for f in flights
            if f.kind == kind
            and f.sender in ranks_of[sending]
            and f.receiver in ranks_of[receiving]
        )
        compress_s = mean_s("compress", direction, stage=sending)
        return Direction(
            round(_mean(sizes)),
            compress_s=compress_s,
            decompress_s=mean_s("decompress", direction, stage=receiving),
        )

    def update(stage: int) -> Update:
        """The mean over its ranks. Of an average the last to come waits for nobody."""
        mates = ranks_of[stage]
        shares = []
        shared_us = min(spent["", -1, rank, -1]["average"] for rank in mates)
        alone_us = shared_us if len(mates) == 1 else 0
        for rank in mates:
            own = spent["", -1, rank, -1]
            each = own["fetch"] / max(1, own["fetches"]), shared_us - alone_us
            each_us = *each, own["clip"] + alone_us, own["after"]
            num_held = sum(rank in ranks for ranks in ranks_of.values())
            shares.append([1e-6 * us / num_held for us in each_us])
        return Update(*map(_mean, zip(*shares, strict=True)))

    stages = range(len(ranks_of))
    late_s = [mean_s("compute", "weights", stage=stage) for stage in stages]
    return Costs(
        forward_s=[mean_s("compute", "forward", stage=stage) for stage in stages],
        backward_s=[
            mean_s("compute", "backward", stage=stage) + late_s[stage] for stage in stages
        ],
        forward=[
            crossing("activation", "forward", sending=stage, receiving=stage + 1)
            for stage in stages[:-1]
        ],
        backward=[
            crossing("gradient", "backward", sending=stage + 1, receiving=stage)
            for stage in stages[:-1]
        ],
        updates=[update(stage) for stage in stages],
        control_bytes=round(_mean(f.num_bytes for f in flights if f.kind == "norm")),
        weights_s=late_s,
    )


def _shares(lane: Lane) -> Iterator[tuple[str, tuple[str, int, int], int]]:
    """What a rank's step went into, but for waiting: part, action, microseconds."""
    at_us = lane.from_us
    has_normed = False
    for box in lane.boxes:
        gap_us = box.from_us - at_us
        own_us = box.until_us - box.from_us
        at_us = box.until_us
        action = box.direction, box.stage, box.micro_batch
        if box.direction:
            yield "compute", action, gap_us
            if box.what != "wait":
                is_codec = box.what in ("compress", "decompress")
                yield box.what if is_codec else "compute", action, own_us
            continue
        waits = box.what == "wait" or (box.what == "average" and has_normed)
        part = "clip" if waits else box.what
        is_before = not has_normed and part in ("fetch", "average", "clip")
        yield part if is_before else "after", action, gap_us + own_us * (not waits)
        if box.what == "fetch":
            yield "fetches", action, 1
        has_normed = has_normed or box.what == "clip"
    yield "after", ("", -1, -1), lane.until_us - at_us


def typical(steps: Sequence[Any]) -> Any:
    """Costs number by number: the median."""
    first = steps[0]
    if is_dataclass(first):
        own = {f.name: typical([getattr(s, f.name) for s in steps]) for f in fields(first)}
        return replace(first, **own)  # type: ignore[type-var]
    if isinstance(first, Sequence):
        return [typical(each) for each in zip(*steps, strict=True)]
    return statistics.median(steps) if isinstance(first, int | float) else first


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


# The steps of a trial.


@dataclass(frozen=True)
class Leg:
    """What steps of a trial with one schedule and compression took. samples: of a micro-batch, on
    average. splits: whether weights' gradients were put off."""

    samples: float
    compression: str
    splits: bool
    costs: Costs


class StageFacts(NamedTuple):
    """activation_bytes, put_off_bytes: of a sample. blocks: of a model that is cut freely."""

    parameter_bytes: int
    trained_bytes: int
    activation_bytes: float
    put_off_bytes: float
    blocks: int = 0


_Quantities = dict[str, dict[float, float]]  # by the fields of a Piece and samples


class _Part(NamedTuple):
    """holds: so many stages, the model's first one, its last one, so many blocks. Of several
    stages of a rank the sum: what the first of them to be called takes to warm up, others save."""

    holds: Sequence[int]
    of: _Quantities


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
        found = [self._of_stage(n) for n in range(len(self.stages))]
        calls = [Curve(), Curve()]
        if self.parts:
            together = [part for trial in (self, *others) for part in trial._parts()]
            found, calls = _by_block(together, sum(facts.blocks for facts in self.stages))
        # Of all weights: norm, clipping and optimizer of the ranks that hold them.
        update_s = statistics.median(
            sum(own.norm_s + own.optimizer_s for own in costs.updates)
            for _, costs in self._legs(self.own, splits=False)
        )
        per_byte_s = update_s / max(1, sum(s.trained_bytes for s in self.stages))
        pieces = []
        for i, (of, boundary) in enumerate(zip(found, [*boundary_after, None], strict=True)):
            size, trained = (of.pop(name)[1.0] for name in ("parameter_bytes", "trained_bytes"))
            curves = {name: Curve(sorted(points.items())) for name, points in of.items()}
            pieces.append(
                Piece(
                    name=f"{'block' if self.parts else 'stage'} {i}", boundary=boundary,
                    parameter_bytes=round(size), trained_bytes=round(trained),
                    optimizer_s=per_byte_s * trained, blocks=int(bool(self.parts)), **curves,
                )
            )  # fmt: skip
        return pieces, calls[0], calls[1]

    def directions(self, compression: str, boundary: int) -> BoundaryCodec:
        """What crossed after a stage; no backward if none did."""

        def curves(way: str) -> DirectionCurves:
            seen = [(b, getattr(c, way)[boundary]) for b, c in self._legs(compression)]
            names = [entry.name for entry in fields(Direction)]
            return DirectionCurves(*(Curve([(b, getattr(d, n)) for b, d in seen]) for n in names))

        backward = curves("backward")
        returns = any(size for _, size in backward.num_bytes.points)
        return BoundaryCodec(curves("forward"), backward if returns else None)

    def fetch_s(self) -> Curve:
        """Of a micro-batch, by a rank."""
        share = 1 / self.pass_samples
        points = []
        for b, costs in self._legs(self.own, splits=False):
            each = (n * sum(costs.updates[s].fetch_s for s in held) for held, n in self.ranks)
            points.append((b, _mean(each) * b * share))
        return Curve(points)

    @property
    def control_bytes(self) -> int:
        return round(self.legs[0].costs.control_bytes)

    def _legs(self, compression: str, splits: bool | None = None) -> list[tuple[float, Costs]]:
        """By samples of a micro-batch. splits: None = either, the first that was tried."""
        found: dict[float, Costs] = {}
        for leg in self.legs:
            if leg.compression == compression and splits in (None, leg.splits):
                found.setdefault(leg.samples, leg.costs)
        return sorted(found.items(), key=lambda entry: entry[0])

    def _of_stage(self, stage: int) -> _Quantities:
        whole, split = (self._legs(self.own, splits) for splits in (False, True))
        both = Curve([(b, c.forward_s[stage] + c.backward_s[stage]) for b, c in whole])
        facts = self.stages[stage]._asdict()
        return {
            "forward_s": {b: costs.forward_s[stage] for b, costs in whole},
            "backward_s": {b: costs.backward_s[stage] for b, costs in whole},
            "weights_s": {b: costs.weights_s[stage] for b, costs in split},
            "splitting_s": {
                b: costs.forward_s[stage] + costs.backward_s[stage] - both.at(b)
                for b, costs in split
            },
            **{name: {1.0: float(n)} for name, n in facts.items() if name != "blocks"},
        }

    def _parts(self) -> Iterator[_Part]:
        first = 0
        for number in self.parts:
            stages = range(first, first := first + number)
            num_blocks = sum(self.stages[stage].blocks for stage in stages)
            holds = [number, 0 in stages, first == len(self.stages), num_blocks]
            each = [self._of_stage(stage) for stage in stages]
            of = {
                name: {b: sum(one[name][b] for one in each) for b in points}
                for name, points in each[0].items()
            }
            yield _Part(holds, of)


def _by_block(parts: Sequence[_Part], num_blocks: int) -> tuple[list[_Quantities], list[Curve]]:
    """Of each block, the first with what is before it, the last with what is after it.

    A stage is called once for each micro-batch, which takes as long whatever its blocks. So a
    part takes calls * call + front + tail + blocks * block, and parts that differ tell which is
    which. What they leave open goes to the blocks."""
    found: list[_Quantities] = [{} for _ in range(num_blocks)]
    calls = []
    for name, points in parts[0].of.items():
        # The first stage puts nothing off, so nothing was seen of it.
        late = name in ("weights_s", "splitting_s")
        is_known = np.array([name in ("forward_s", "backward_s"), not late, True, True])
        shares = {}
        for b in points:
            seen = [p for p in parts if b in p.of[name] and not (late and p.holds[1])]
            rows = np.array([part.holds for part in seen], float).reshape(-1, 4) * is_known
            shares[b] = _solved(
                rows, [p.of[name][b] for p in seen], may_save=name == "splitting_s"
            )
        if is_known[0]:
            calls.append(Curve([(b, call) for b, (call, *_) in shares.items()]))
        for i, block in enumerate(found):
            ends = np.array([0, i == 0, i == num_blocks - 1, 1])
            block[name] = {b: float(ends @ share) for b, share in shares.items()}
    return found, calls


def _solved(rows: Any, values: Sequence[float], may_save: bool) -> Any:
    """The shares that come nearest to the values, blocks' shares first: of what may save time,
    which is as small as what it is read with errs, nearly all; of others, none is negative."""
    little = (1.0 if may_save else 1e-3) * np.diag([1.0, 1.0, 1.0, 0.0])
    rows = np.vstack([rows, little])
    values = [*values, *[0.0] * 4]
    return np.linalg.lstsq(rows, values, rcond=None)[0] if may_save else nnls(rows, values)[0]
