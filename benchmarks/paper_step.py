"""The paper's step on paper: equal stages and boundaries, and transfers that block those who send
and receive (formula (2)). The simulator checks itself against it; no run behaves so.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

from xcloud.layout import ClusterLayout
from xcloud.net.link_profile import LinkProfile, line_bytes
from xcloud.pipeline.schedule import Action, Schedule
from xcloud.simulator.costs import FREE, NORM, Costs, Direction, TransferCost
from xcloud.simulator.engine import NEVER, Lines, Moments, Program
from xcloud.simulator.prediction import Prediction, Simulator

NUM_BYTES = 125  # of a message


class UniformCosts(Costs):
    """Equal stages and boundaries, in the paper's letters: tf = forward_s and tb = backward_s of a
    micro-batch, tt = transfer_s of a message between any two ranks, l = latency_s. weights_s: the
    part of the backward that may be put off. Nothing else costs time; the layout's links are not
    asked."""

    def __init__(
        self,
        forward_s: float,
        backward_s: float,
        transfer_s: float = 0.0,
        latency_s: float = 0.0,
        control_bytes: int = 0,
        weights_s: float = 0.0,
    ) -> None:
        super().__init__(
            [forward_s], [backward_s], control_bytes=control_bytes, weights_s=[weights_s]
        )
        rate = 8 * line_bytes(NUM_BYTES) / transfer_s if transfer_s else FREE.bandwidth_bits_per_s
        object.__setattr__(self, "_line", LinkProfile(rate, latency_s))

    def action_s(self, rank: int, action: Action) -> float:
        return super().action_s(rank, action._replace(stage=0))

    def direction(self, message: TransferCost) -> Direction:
        return super().direction(message) if message.direction == NORM else Direction(NUM_BYTES)

    def line(self, layout: ClusterLayout, here: str, there: str) -> LinkProfile:
        line: LinkProfile = self._line  # type: ignore[attr-defined]
        return line


def run_blocking(
    program: Program,
    seconds: Sequence[Sequence[float]],
    num_bytes: Sequence[int],
    lines: Sequence[LinkProfile | None],
) -> Moments:
    """As `run`, but while a message crosses, its sender and its receiver do nothing else, and a
    rank begins nothing before what it has posted is over (not its latency). Of what could begin at
    the same moment, transfers do before operations, and first the one that was begun to be
    computed first."""
    state = Lines(program, num_bytes, lines)
    missing = list(program.counts)
    ready_s = [0.0] * len(missing)
    sleepers: dict[int, list[int]] = {}
    num_ranks = len(program.needs)
    position = [0] * num_ranks
    free_s = [0.0] * num_ranks
    to_cross = [0] * num_ranks  # parcels posted by the rank's last operation
    begin_s: list[list[float]] = [[] for _ in range(num_ranks)]
    passages = [NEVER] * len(program.parcels)
    queued_s = [0.0] * len(program.parcels)
    turn = [0] * len(program.parcels)
    num_begun = 0
    events: list[tuple[float, int, int, int]] = []  # when, what, its turn, its number
    end, cross, begin = 0, 1, 2

    def count(token: int, at_s: float) -> None:
        missing[token] -= 1
        ready_s[token] = max(ready_s[token], at_s)
        if not missing[token]:
            for rank in sleepers.pop(token, ()):
                consider(rank)

    def consider(rank: int) -> None:
        """Note when the rank could begin its next operation."""
        if to_cross[rank] or position[rank] == len(program.needs[rank]):
            return
        token = program.needs[rank][position[rank]]
        if token >= 0 and missing[token]:
            sleepers.setdefault(token, []).append(rank)
        else:
            at_s = max(free_s[rank], ready_s[token] if token >= 0 else 0.0)
            heappush(events, (at_s, begin, rank, rank))

    for rank in range(num_ranks):
        consider(rank)
    while events:
        now, what, _, number = heappop(events)
        if what == cross:
            parcel = program.parcels[number]
            both = parcel.sender, parcel.receiver
            at = max(state.free_s[parcel.route], *(free_s[rank] for rank in both))
            if at > now:
                heappush(events, (at, cross, turn[number], number))
                continue
            found = state.carry(number, parcel.route, now)._replace(queued_s=queued_s[number])
            passages[number] = found
            for rank in both:
                free_s[rank] = found.until_s
            count(parcel.token, found.arrived_s)
            to_cross[parcel.sender] -= 1
            if not to_cross[parcel.sender]:
                consider(parcel.sender)
        elif what == begin:
            if free_s[number] > now:  # a transfer came between
                heappush(events, (free_s[number], begin, number, number))
                continue
            index = position[number]
            begin_s[number].append(now)
            num_begun += 1
            position[number] += 1
            free_s[number] = now + seconds[number][index]
            to_cross[number] = len(program.posts[number][index])
            for parcel_number in program.posts[number][index]:
                turn[parcel_number] = num_begun
            heappush(events, (free_s[number], end, number, number))
        else:
            index = position[number] - 1
            for parcel_number in program.posts[number][index]:
                queued_s[parcel_number] = now
                heappush(events, (now, cross, turn[parcel_number], parcel_number))
            if (token := program.signals[number][index]) >= 0:
                count(token, now)
            consider(number)
    return Moments(begin_s, passages)


class BlockingSimulator(Simulator):
    """Sender and receiver do nothing else while a message crosses. It has no chain of causes."""

    engine = staticmethod(run_blocking)


def simulate(
    schedule: Schedule,
    layout: ClusterLayout,
    costs: Costs,
    *,
    transfers_block: bool = False,
    **settings: Any,
) -> Prediction:
    """One simulation. settings: as of Simulator."""
    kind = BlockingSimulator if transfers_block else Simulator
    return kind(schedule, layout, **settings).run(costs)
