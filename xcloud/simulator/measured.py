"""Read recorded steps back as costs: those of one step, or a profile of a trial run's steps.

Finds no files and runs nothing.
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
    ModelPiece,
    Update,
)

# One step.


@dataclass(frozen=True)
class _Action:
    """An action of the schedule, as one rank carried it out."""

    direction: str
    stage: int
    micro_batch: int
    rank: int


class _Share(NamedTuple):
    """A part of a rank's step.

    action: the action that it belongs to; None outside the schedule.
    """

    part: str
    action: _Action | None
    us: int


def measured_costs(timeline: Timeline) -> Costs:
    """Return the mean costs of a recorded step, over ranks and micro-batches.

    What is no recorded span (the interpreter between two of them) counts for the span after it. A
    rank of several stages gives each an equal part of its update. Lines are not read: the layout,
    or whoever asks, has them.
    """
    spent = defaultdict[_Action, Counter[str]](Counter)  # microseconds, by part
    outside = defaultdict[int, Counter[str]](Counter)  # by rank: the same outside the schedule
    for lane in timeline.lanes:
        for part, action, us in _shares(lane):
            own = outside[lane.rank] if action is None else spent[action]
            own[part] += us
    ranks_of = defaultdict[int, set[int]](set)
    for action in spent:
        ranks_of[action.stage].add(action.rank)
    flights = [flight for some in timeline.flights.values() for flight in some]

    def mean_s(part: str, direction: str, stage: int) -> float:
        each_us = (
            parts_us[part]
            for action, parts_us in spent.items()
            if action.direction == direction and action.stage == stage
        )
        return 1e-6 * _mean(each_us)

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
            num_bytes=round(_mean(sizes)),
            compress_s=compress_s,
            decompress_s=mean_s("decompress", direction, stage=receiving),
        )

    def update(stage: int) -> Update:
        """Return the mean over the stage's ranks.

        Of an average the last rank to come waits for nobody, so it tells what the average took.
        """
        mates = ranks_of[stage]
        average_us = min(outside[rank]["average"] for rank in mates)
        is_alone = len(mates) == 1  # then it averages with nobody
        shares = []
        for rank in mates:
            own = outside[rank]
            num_held = sum(rank in ranks for ranks in ranks_of.values())
            each_us = (
                # Of each pass: how many passes an update has is the plan's to say.
                own["fetch"] / max(1, own["fetches"]),
                0 if is_alone else average_us,
                own["clip"] + (average_us if is_alone else 0),
                own["after"],
            )
            # An update covers all stages of a rank at once, and no span says which.
            shares.append([1e-6 * us / num_held for us in each_us])
        fetch_s, average_s, norm_s, optimizer_s = map(_mean, zip(*shares, strict=True))
        return Update(fetch_s, average_s, norm_s, optimizer_s=optimizer_s)

    stages = range(len(ranks_of))
    # A backward includes what was put off, whether or not this step put it off (Costs).
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


def _shares(lane: Lane) -> Iterator[_Share]:
    """Yield all that a rank's step went into, but for waiting.

    "fetches" counts instead: one for each fetch.
    """
    at_us = lane.from_us
    has_normed = False
    for box in lane.boxes:
        gap_us = box.from_us - at_us
        own_us = box.until_us - box.from_us
        at_us = box.until_us
        if box.direction:
            action = _Action(
                direction=box.direction,
                stage=box.stage,
                micro_batch=box.micro_batch,
                rank=lane.rank,
            )
            yield _Share(part="compute", action=action, us=gap_us)
            if box.what != "wait":
                is_codec = box.what in ("compress", "decompress")
                yield _Share(part=box.what if is_codec else "compute", action=action, us=own_us)
            continue
        # Behind the norm a stage's ranks wait under that name for their leader's answer.
        waits = box.what == "wait" or (box.what == "average" and has_normed)
        # Waiting is nobody's cost, but what the interpreter did before it is.
        part = "clip" if waits else box.what
        if has_normed or part not in ("fetch", "average", "clip"):
            part = "after"
        yield _Share(part, action=None, us=gap_us if waits else gap_us + own_us)
        if box.what == "fetch":
            yield _Share(part="fetches", action=None, us=1)
        has_normed = has_normed or box.what == "clip"
    yield _Share(part="after", action=None, us=lane.until_us - at_us)


def typical(steps: Sequence[Any]) -> Any:
    """Return costs of which each number is the median of those of the steps."""
    first = steps[0]
    if is_dataclass(first):
        own = {f.name: typical([getattr(s, f.name) for s in steps]) for f in fields(first)}
        return replace(first, **own)  # type: ignore[type-var]
    if isinstance(first, Sequence):
        return [typical(each) for each in zip(*steps, strict=True)]
    if isinstance(first, int | float):
        # A step in which something else held the machine up counts for nothing.
        return statistics.median(steps)
    return first


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return 0.0 if not numbers else sum(numbers) / len(numbers)


# The steps of a trial.


@dataclass(frozen=True)
class Leg:
    """The typical costs of a trial's steps with one schedule and compression.

    samples: the mean number of samples of a micro-batch.
    splits: true if the gradients of weights were put off.
    """

    samples: float
    compression: str
    splits: bool
    costs: Costs


class StageFacts(NamedTuple):
    """The sizes of one stage of a trial.

    activation_bytes, deferred_bytes: the bytes of one sample.
    blocks: the number of blocks that it holds of a model that is split freely; else 0.
    """

    parameter_bytes: int
    trained_bytes: int
    activation_bytes: float
    deferred_bytes: float
    blocks: int = 0


_Quantities = dict[str, dict[float, float]]  # by the fields of a Piece and samples


class _BlockPart(NamedTuple):
    """The quantities of those stages of a trial that were one stage of the job.

    holds: how many stages, whether the model's first, whether its last, how many blocks.
    of: summed over the stages of a rank, because what the first of them to be called takes to warm
        up, the others save.
    """

    holds: Sequence[int]
    of: _Quantities


@dataclass(frozen=True)
class Trial:
    """All that a trial run measured.

    own: the compression of the job itself.
    ranks: the stages that each rank holds, and how many ranks share them.
    pass_samples: the number of samples of one pass over the schedule.
    parts: the number of trial stages in each of the job's own stages, for a model with blocks.
    """

    legs: Sequence[Leg]
    own: str
    stages: Sequence[StageFacts]
    ranks: Sequence[tuple[Sequence[int], int]]
    pass_samples: float
    parts: Sequence[int] = ()

    def pieces(
        self, boundary_after: Sequence[int | None], *others: Trial
    ) -> tuple[list[ModelPiece], Curve, Curve]:
        """Return the pieces of the model, and what a stage takes besides them, forward and
        backward.

        The pieces are the stages as the model was cut or, if it has blocks, each block.

        boundary_after: the boundary after each piece but the last.
        others: the trials with other splits of the same model.
        """
        quantities = [self._of_stage(n) for n in range(len(self.stages))]
        calls = [Curve(), Curve()]
        if self.parts:
            together = [part for trial in (self, *others) for part in trial._parts()]
            quantities, calls = _by_block(
                together, num_blocks=sum(facts.blocks for facts in self.stages)
            )
        # Of all weights: norm, clipping and optimizer of the ranks that hold them.
        update_s = statistics.median(
            sum(own.norm_s + own.optimizer_s for own in costs.updates)
            for _, costs in self._legs(self.own, splits=False)
        )
        # An optimizer reads and writes each trained value a few times, so its time follows the
        # bytes.
        per_byte_s = update_s / max(1, sum(s.trained_bytes for s in self.stages))
        pieces = []
        for i, (of, boundary) in enumerate(zip(quantities, [*boundary_after, None], strict=True)):
            size, trained = (of.pop(name)[1.0] for name in ("parameter_bytes", "trained_bytes"))
            curves = {name: Curve(sorted(points.items())) for name, points in of.items()}
            pieces.append(
                ModelPiece(
                    name=f"{'block' if self.parts else 'stage'} {i}", boundary=boundary,
                    parameter_bytes=round(size), trained_bytes=round(trained),
                    optimizer_s=per_byte_s * trained, blocks=int(bool(self.parts)), **curves,
                )
            )  # fmt: skip
        return pieces, calls[0], calls[1]

    def directions(self, compression: str, boundary: int) -> BoundaryCodec:
        """Return the costs of what crossed after a stage; without a backward if none did."""

        def curves(way: str) -> DirectionCurves:
            seen = [(b, getattr(c, way)[boundary]) for b, c in self._legs(compression)]
            names = [entry.name for entry in fields(Direction)]
            return DirectionCurves(*(Curve([(b, getattr(d, n)) for b, d in seen]) for n in names))

        backward = curves("backward")
        returns = any(size for _, size in backward.num_bytes.points)
        return BoundaryCodec(forward=curves("forward"), backward=backward if returns else None)

    def fetch_s(self) -> Curve:
        """Return what a rank takes to fetch a micro-batch."""
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
        """Return costs by samples of a micro-batch, fewest first.

        splits: true if the gradients of weights were put off, false if not; None = either, the
            first that was tried.
        """
        costs_of: dict[float, Costs] = {}
        for leg in self.legs:
            if leg.compression == compression and splits in (None, leg.splits):
                costs_of.setdefault(leg.samples, leg.costs)
        return sorted(costs_of.items(), key=lambda entry: entry[0])

    def _of_stage(self, stage: int) -> _Quantities:
        # A split leg is compared with the others at its own number of samples, hence the curve.
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

    def _parts(self) -> Iterator[_BlockPart]:
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
            yield _BlockPart(holds, of)


def _by_block(
    parts: Sequence[_BlockPart], num_blocks: int
) -> tuple[list[_Quantities], list[Curve]]:
    """Return the quantities of each block, and the curves of calling a stage.

    The first block includes what is before it, the last what is after it. A stage is called once
    for each micro-batch, which takes as long whatever its blocks. So a part takes calls * call +
    front + tail + blocks * block, and parts that differ tell which is which. What they leave open
    goes to the blocks.
    """
    blocks: list[_Quantities] = [{} for _ in range(num_blocks)]
    calls = []
    for name, points in parts[0].of.items():
        # The first stage puts nothing off, so nothing was seen of it.
        late = name in ("weights_s", "splitting_s")
        is_known = np.array([name in ("forward_s", "backward_s"), not late, True, True])
        shares = {}
        for b in points:
            seen = [p for p in parts if b in p.of[name] and not (late and p.holds[1])]
            # A row for each part: how often it calls a stage, whether it has the front and the
            # tail, its blocks. What this quantity cannot have is struck out.
            rows = np.array([part.holds for part in seen], float).reshape(-1, 4) * is_known
            shares[b] = _solved(
                rows, values=[p.of[name][b] for p in seen], may_save=name == "splitting_s"
            )
        if is_known[0]:
            calls.append(Curve([(b, call) for b, (call, *_) in shares.items()]))
        for i, block in enumerate(blocks):
            ends = np.array([0, i == 0, i == num_blocks - 1, 1])
            block[name] = {b: float(ends @ share) for b, share in shares.items()}
    return blocks, calls


def _solved(rows: Any, values: Sequence[float], may_save: bool) -> Any:
    """Return the shares that come nearest to the values, the blocks' share first.

    may_save: true if shares may be below 0. Such times are as small as the error of what they are
        read from, so nearly all of them goes to the blocks.
    """
    # Four more rows that ask the first three shares to be 0: without them parts that do not differ
    # enough would leave the answer open.
    little = (1.0 if may_save else 1e-3) * np.diag([1.0, 1.0, 1.0, 0.0])
    rows = np.vstack([rows, little])
    values = [*values, *[0.0] * 4]
    if may_save:
        return np.linalg.lstsq(rows, values, rcond=None)[0]
    # Times are not negative, so neither are their shares.
    return nnls(rows, values)[0]
