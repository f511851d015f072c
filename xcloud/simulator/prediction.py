"""Tell what a simulated step takes: its time, who was busy, what bounds it, its timeline.

The timeline has the form in which a real step is recorded (timeline.py), so that traces and
pictures draw both. Everything but the moments themselves is worked out when it is asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from xcloud.record.timeline import COMPUTING, Box, Flight, Lane, Timeline
from xcloud.simulator.costs import Costs
from xcloud.simulator.engine import Moments, run
from xcloud.simulator.step_program import Route, StepProgram

_FLIGHT_KIND = {"forward": "activation", "backward": "gradient", "norm": "norm"}


def largest_first(spent: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds by what they go into, largest first, without what takes none."""
    return dict(sorted(((k, v) for k, v in spent.items() if v > 1e-12), key=lambda e: -e[1]))


class RankUse(NamedTuple):
    """The seconds of the step that one rank spends on each thing.

    average_s: the seconds of averaging, with waiting for the other ranks of its stage, as a real
        run counts it.
    idle_s: the seconds of all the rest.
    """

    rank: int
    compute_s: float
    codec_s: float
    average_s: float
    idle_s: float


class LineUse(NamedTuple):
    """The use of one direction between two clouds.

    busy_s: the seconds for which it carried something.
    """

    here: str
    there: str
    num_bytes: int
    busy_s: float


@dataclass(frozen=True, eq=False)
class Prediction:
    """A simulated step.

    seconds, num_bytes: the input of the engine.
    moments: the result of the engine.
    """

    step: StepProgram
    costs: Costs
    seconds: Sequence[Sequence[float]]
    num_bytes: Sequence[int]
    moments: Moments

    @cached_property
    def step_s(self) -> float:
        """The seconds from the last rank's beginning of the last step to the last rank's end, as
        in a run."""
        return max(self._end_s(rank, index=-1) for rank in self._all) - self._since_s

    @cached_property
    def bubble_ratio(self) -> float:
        """The idle time over computing time, summed over ranks.

        For equal stages that do nothing but compute it is (step_s - m(tf+tb)) / (m(tf+tb)), the
        convention of [N] (1).
        """
        return sum(use.idle_s for use in self.ranks) / sum(use.compute_s for use in self.ranks)

    @cached_property
    def ranks(self) -> list[RankUse]:
        uses = []
        for rank in self._all:
            total = defaultdict[str, float](float)
            for span in self._spans(rank):
                total[span.what] += span.until_s - span.from_s
            compute_s = sum(total[what] for what in COMPUTING)
            codec_s = total["compress"] + total["decompress"]
            average_s = total["average"]
            idle_s = self._span_s(rank) - compute_s - codec_s - average_s
            uses.append(RankUse(rank, compute_s, codec_s, average_s, idle_s=idle_s))
        return uses

    @cached_property
    def links(self) -> list[LineUse]:
        """The use of lines between clouds, by direction."""
        uses = {route: LineUse(*route, 0, 0.0) for route in self.step.routes}
        for number in self._parcels():
            route = self._route(number)
            passage = self.moments.passages[number]
            _, _, num_bytes, busy_s = uses[route]
            busy_s += passage.until_s - passage.from_s
            uses[route] = LineUse(*route, num_bytes + self.num_bytes[number], busy_s)
        return [use for use in uses.values() if use.here != use.there]

    @cached_property
    def critical_s(self) -> dict[str, float]:
        """The seconds of the longest chain of causes that ends with the step, largest first.

        They are named "compute of stage 0", "codec of stage 0", "link a to b" (carrying, and
        queueing for it), "latency a to b", "update", "averaging", and add up to step_s.
        """
        rank = max(self._all, key=lambda r: self._end_s(r, index=-1))
        since_s = self._since_s
        spent = defaultdict[str, float](float)
        for cause, from_s, until_s in self._causes(rank):
            spent[cause] += max(0.0, until_s - max(from_s, since_s))
            # The chain goes back into the step before; this step's part of it ends here.
            if from_s <= since_s:
                break
        return largest_first(spent)

    @cached_property
    def timeline(self) -> Timeline:
        """The step as a real record has it: flights are between clouds only."""
        zero_s = min(map(self._started_s, self._all))

        def us(moment_s: float) -> int:
            return round(1e6 * (moment_s - zero_s))

        lanes = []
        for rank in self._all:
            from_s = self._started_s(rank)
            cloud = self.step.placements[rank].cloud
            spans = (Box(s.what, *s.place, us(s.from_s), us(s.until_s)) for s in self._spans(rank))
            boxes = tuple(box for box in spans if box.until_us > box.from_us)
            lanes.append(
                Lane(
                    rank,
                    cloud,
                    from_us=us(from_s),
                    until_us=us(from_s + self._span_s(rank)),
                    boxes=boxes,
                )
            )
        flights = defaultdict[Route, list[Flight]](list)
        for number in self._parcels():
            route = self._route(number)
            index = number % len(self.step.transfers)  # steps repeat the same transfers
            if route.here == route.there:
                continue
            sent = self.step.transfers[index]
            what = _FLIGHT_KIND[sent.direction], sent.micro_batch, self.num_bytes[number]
            moments = (us(moment) for moment in self.moments.passages[number])
            flights[route].append(Flight(sent.sender, sent.receiver, *what, *moments))
        ordered = {
            (way.here, way.there): tuple(sorted(some, key=lambda f: f.from_us))
            for way, some in sorted(flights.items())
        }
        return Timeline(
            step=self.step.num_steps, lanes=tuple(lanes), flights=ordered, clocks="predicted"
        )

    @property
    def _all(self) -> range:
        return range(len(self.seconds))

    @property
    def _since_s(self) -> float:
        return max(map(self._started_s, self._all))

    # One rank's last step.

    def _first(self, rank: int) -> int:
        """Return the rank's first operation of the last step."""
        return len(self.step.ops[rank]) * (self.step.num_steps - 1)

    def _end_s(self, rank: int, index: int) -> float:
        return self.moments.begin_s[rank][index] + self.seconds[rank][index]

    def _started_s(self, rank: int) -> float:
        first = self._first(rank)
        return self._end_s(rank, index=first - 1) if first else 0.0

    def _span_s(self, rank: int) -> float:
        """Return the seconds of the rank's part of the step.

        A step that stands alone ends for all at once.
        """
        if self.step.num_steps == 1:
            return self.step_s
        return self._end_s(rank, index=-1) - self._started_s(rank)

    def _spans(self, rank: int) -> Iterator[_Span]:
        at_s = self._started_s(rank)
        first = self._first(rank)
        for index, op in enumerate(self.step.ops[rank], first):
            begin_s = self.moments.begin_s[rank][index]
            place = _OUTSIDE if op.action is None else op.action
            if begin_s > at_s:
                # As a real rank counts it: waits for the ranks of its own stage are averaging.
                what = "average" if op.what in ("average", "shared") else "wait"
                yield _Span(what, place, from_s=at_s, until_s=begin_s)
            at_s = begin_s
            parts = self.step.parts_s(self.costs, rank, op)
            for what, took_s in zip(("decompress", op.what, "compress"), parts, strict=True):
                if took_s > 0:
                    yield _Span(what, place, from_s=at_s, until_s=at_s + took_s)
                    at_s += took_s
            # Not the sum of the parts, which may differ from it in the last digit.
            at_s = self._end_s(rank, index)
        until_s = self._started_s(rank) + self._span_s(rank)
        if until_s > at_s:
            yield _Span(what="wait", place=_OUTSIDE, from_s=at_s, until_s=until_s)

    def _parcels(self) -> range:
        """Return the numbers of the last step's parcels."""
        return range(len(self.step.transfers) * (self.step.num_steps - 1), len(self.num_bytes))

    def _route(self, parcel: int) -> Route:
        return self.step.routes[self.step.program.parcels[parcel].route]

    # The chain of causes, from the end on.

    def _causes(self, rank: int) -> Iterator[tuple[str, float, float]]:
        """Yield what took a rank until when, from when; without gaps, the latest first."""
        program = self.step.program
        moments = self.moments
        index = len(self.seconds[rank]) - 1
        while index >= 0:
            op = self.step.ops[rank][index % len(self.step.ops[rank])]
            begin_s = moments.begin_s[rank][index]
            before, own, behind = self.step.parts_s(self.costs, rank, op)
            middle_s = begin_s + before + own
            if op.action is None:
                yield "averaging" if op.what == "average" else "update", begin_s, middle_s
            else:
                stage = op.action.stage
                yield f"codec of stage {stage}", middle_s, middle_s + behind
                yield f"compute of stage {stage}", begin_s + before, middle_s
                yield f"codec of stage {stage}", begin_s, begin_s + before
            free_s = self._end_s(rank, index=index - 1) if index else 0.0
            # It began as soon as the rank was free, so what held it up is the rank's own work
            # before it.
            if begin_s <= free_s:
                index -= 1
                continue
            # The rank was free before it began, so whoever brought its token last is the cause.
            rank, index, parcel = moments.causes[program.needs[rank][index]]
            if parcel >= 0:
                way = " to ".join(self._route(parcel))
                passage = moments.passages[parcel]
                # Queueing for the line counts as the line's, since a faster one would end it.
                yield f"latency {way}", passage.until_s, passage.arrived_s
                yield f"link {way}", passage.queued_s, passage.until_s


_OUTSIDE = "", -1, -1


class _Span(NamedTuple):
    """A stretch of a rank's time.

    place: direction, stage, micro-batch.
    """

    what: str
    place: tuple[str, int, int]
    from_s: float
    until_s: float


class Simulator(StepProgram):
    """The program of a step, to be run at any costs: Simulator(schedule, layout).run(costs).step_s

    Model: a rank does one thing at a time, in the order that the real pipeline follows. For an
    action it waits for its message, decompresses, computes, compresses and hands its own message
    on, which then travels while the rank continues. All ranks of one cloud that send to one other
    cloud share that line; inside a cloud every pair of ranks has its own. After the actions: the
    all-reduce inside a stage, the agreement on the gradient norm, the optimizer. Where the paper's
    formulas (formulas.py) apply, it equals them.

    Not modelled: ranks that slow each other down on one machine, and threads of links that do.
    """

    engine = staticmethod(run)

    def run(self, costs: Costs) -> Prediction:
        seconds = [
            [sum(self.parts_s(costs, rank, op)) for op in ops] * self.num_steps
            for rank, ops in enumerate(self.ops)
        ]
        sizes = [costs.direction(message).num_bytes for message in self.transfers]
        num_bytes = sizes * self.num_steps
        lines = [
            costs.line(self.layout, here=route.here, there=route.there) for route in self.routes
        ]
        # Codecs count with the action that they belong to: a rank does one thing at a time.
        moments = self.engine(self.program, seconds, num_bytes, lines)
        # A rank that began fewer operations than it has waits for one that never comes.
        if [*map(len, moments.begin_s)] != [*map(len, self.program.needs)]:
            raise self.deadlock()
        return Prediction(
            step=self, costs=costs, seconds=seconds, num_bytes=num_bytes, moments=moments
        )
