"""Run discrete events: ranks that work through operations, lines that carry their messages.

The engine knows nothing of stages, schedules or clouds; those who write programs do.

A *token* is something that operations wait for: so many signals or arrivals, then it is there. An
operation may wait for one token; when it ends, it may post messages, each of which counts for a
token when it arrives, and signal a token at once. Messages of one *route* share a line.

Cost: O((operations + messages) * log(ranks)). Times in seconds from 0 on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from types import MappingProxyType
from typing import NamedTuple

from xcloud.net.link_profile import LinkProfile
from xcloud.net.unsteady_line import jitter_share
from xcloud.simulator.costs import FREE


class Parcel(NamedTuple):
    """A message: where it goes, not how large it is."""

    sender: int
    receiver: int
    route: int
    token: int


@dataclass
class Program:
    """The operations of every rank, in order.

    needs: the token that each operation waits for, by rank and operation, or -1.
    posts: the numbers of the parcels that each operation sends, by rank and operation.
    signals: the token that each operation signals, by rank and operation, or -1.
    counts: the number of signals or arrivals that each token takes.
    """

    needs: list[list[int]]
    posts: list[list[tuple[int, ...]]]
    signals: list[list[int]]
    parcels: list[Parcel] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_routes: int = 0

    @classmethod
    def for_ranks(cls, num_ranks: int) -> Program:
        return cls(*([[] for _ in range(num_ranks)] for _ in range(3)))  # type: ignore[arg-type]

    def token(self, count: int = 1) -> int:
        self.counts.append(count)
        return len(self.counts) - 1

    def route(self) -> int:
        self.num_routes += 1
        return self.num_routes - 1

    def parcel(self, sender: int, receiver: int, route: int, token: int) -> int:
        self.parcels.append(Parcel(sender, receiver, route, token=token))
        return len(self.parcels) - 1

    def operation(
        self, rank: int, need: int = -1, posts: tuple[int, ...] = (), signal: int = -1
    ) -> None:
        self.needs[rank].append(need)
        self.posts[rank].append(posts)
        self.signals[rank].append(signal)

    def repeated(self, times: int, carried: Mapping[int, int] = MappingProxyType({})) -> Program:
        """Return the program so many times in a row.

        Each time has tokens and parcels of its own, on the same routes.

        carried: the token, of the next time, that the parcel of each token counts for. The first
            time has what would have been carried into it.
        """
        program = Program.for_ranks(len(self.needs))
        program.num_routes = self.num_routes
        for time in range(times):
            token = len(program.counts)
            parcel = len(program.parcels)
            program.counts += self.counts
            if time == 0:
                for at in carried.values():
                    # Nobody sends what the first step would have got from the one before: it is
                    # there at once.
                    program.counts[at] = 0
            # The last time sends into no next one; its parcels count for tokens that nobody waits
            # for.
            of_next = {} if time + 1 == times else carried
            for p in self.parcels:
                at = p.token
                if at in of_next:
                    at = of_next[at] + len(self.counts)
                program.parcels.append(p._replace(token=at + token))
            for rank, posts in enumerate(self.posts):
                program.needs[rank] += [n if n < 0 else n + token for n in self.needs[rank]]
                program.posts[rank] += [tuple(number + parcel for number in own) for own in posts]
                program.signals[rank] += [s if s < 0 else s + token for s in self.signals[rank]]
        return program


class Passage(NamedTuple):
    """The moments of a message: handed to the line, carried from, carried until, received."""

    queued_s: float
    from_s: float
    until_s: float
    arrived_s: float


class Cause(NamedTuple):
    """The operation that brought a token.

    parcel: the one that the token came with; -1 = the operation signalled it.
    """

    rank: int
    operation: int
    parcel: int


NEVER = Passage(*[float("inf")] * 4)


@dataclass
class Moments:
    """The moments at which things happened.

    begin_s: the second at which each operation that ran began, once its token was there, by rank.
    passages: the passage of each parcel; NEVER if it was not posted.
    causes: the operation that brought each token last.
    """

    begin_s: list[list[float]]
    passages: list[Passage]
    causes: list[Cause] = field(default_factory=list)


class Lines:
    """The state of all routes during one simulation."""

    def __init__(
        self, program: Program, num_bytes: Sequence[int], lines: Sequence[LinkProfile | None]
    ) -> None:
        self.lines = [FREE if line is None else line for line in lines]
        self.beyond_s = [line.beyond_s for line in self.lines]
        # Lines of routes, then the inbound wires of ranks.
        self._line_of = [
            len(lines) + p.receiver if self.lines[p.route].is_inbound else p.route
            for p in program.parcels
        ]
        self.free_s = [0.0] * (1 + max(self._line_of, default=0))
        self._last_s = [0.0] * len(lines)
        self._num_carried = [0] * len(lines)
        self._num_bytes = num_bytes
        odd = ((p.trace, p.outages, p.outage_every_s, p.jitter_s) for p in self.lines)
        self._odd = [*map(any, odd)]
        # A step has thousands of messages of a few sizes.
        line_s = cache(lambda route, size: self.lines[route].line_s(size))
        sizes = zip(program.parcels, num_bytes, strict=True)
        self._line_s = [line_s(parcel.route, size) for parcel, size in sizes]

    def carry(self, number: int, route: int, now_s: float) -> Passage:
        """Take the route's line for this parcel from now on, or when it is free."""
        at = self._line_of[number]
        free_s = self.free_s[at]
        start_s = now_s if now_s > free_s else free_s
        # The usual line, steady and in order: two additions a message, since the planner simulates
        # hundreds of plans.
        if not self._odd[route]:
            until_s = self.free_s[at] = start_s + self._line_s[number]
            return Passage(
                queued_s=now_s,
                from_s=start_s,
                until_s=until_s,
                arrived_s=until_s + self.beyond_s[route],
            )
        line = self.lines[route]
        until_s = self.free_s[at] = line.sent_at(start_s, num_bytes=self._num_bytes[number])
        arrived_s = until_s + line.latency_at(until_s)
        if line.jitter_s:
            # The draws of the emulated link (net/link.py).
            draw = jitter_share(self._num_carried[route])
            arrived_s += draw * line.jitter_s
        self._num_carried[route] += 1
        # As in net/link.py, jitter and a falling latency let no message overtake another.
        arrived_s = self._last_s[route] = max(arrived_s, self._last_s[route])
        return Passage(queued_s=now_s, from_s=start_s, until_s=until_s, arrived_s=arrived_s)


def run(
    program: Program,
    seconds: Sequence[Sequence[float]],
    num_bytes: Sequence[int],
    lines: Sequence[LinkProfile | None],
) -> Moments:
    """Run the program. A rank whose token never comes stops there: its `begin_s` is short.

    seconds: the seconds of each operation, by rank.
    num_bytes: the size of each parcel in bytes.
    lines: the line of each route; None = free.
    """
    state = _Run(program, seconds, lines=Lines(program, num_bytes, lines))
    # All ranks that can work do so before the clock moves on: what they post takes its line in the
    # order of time, first come, first served.
    while state.awake or state.events:
        while state.awake:
            state.work(state.awake.pop())
        if state.events:
            state.end(*heappop(state.events))
    return Moments(begin_s=state.begin_s, passages=state.passages, causes=state.causes)


class _Run:
    def __init__(self, program: Program, seconds: Sequence[Sequence[float]], lines: Lines) -> None:
        self.program = program
        self.seconds = seconds
        self.lines = lines
        num_ranks = len(program.needs)
        self.missing = list(program.counts)  # of each token
        self.ready_s = [0.0] * len(program.counts)
        self.causes = [Cause(rank=-1, operation=-1, parcel=-1)] * len(program.counts)
        self.sleepers: dict[int, list[int]] = {}  # ranks, by the token they wait for
        self.free_s = [0.0] * num_ranks
        self.begin_s: list[list[float]] = [[] for _ in range(num_ranks)]
        self.passages = [NEVER] * len(program.parcels)
        self.events: list[tuple[float, int]] = []  # (when, rank): its operation under way ends
        self.awake = list(range(num_ranks))

    def work(self, rank: int) -> None:
        """Work up to an operation that others may wait for, or one that waits itself."""
        missing = self.missing
        ready_s = self.ready_s
        seconds = self.seconds[rank]
        needs = self.program.needs[rank]
        begin_s = self.begin_s[rank]
        posts = self.program.posts[rank]
        signals = self.program.signals[rank]
        at_s = self.free_s[rank]
        for index in range(len(begin_s), len(needs)):
            token = needs[index]
            if token >= 0:
                # Sleeps until `count` has the last of what the token takes, and begins here again.
                if missing[token]:
                    self.sleepers.setdefault(token, []).append(rank)
                    break
                if ready_s[token] > at_s:
                    at_s = ready_s[token]
            begin_s.append(at_s)
            at_s += seconds[index]
            # Others may depend on when this ends, so it waits for its turn in the order of time.
            # An operation that nobody waits for costs no event.
            if posts[index] or signals[index] >= 0:
                heappush(self.events, (at_s, rank))
                break
        self.free_s[rank] = at_s

    def end(self, now_s: float, rank: int) -> None:
        """End a rank's last operation: what it posts leaves, what it signals is there."""
        index = len(self.begin_s[rank]) - 1
        for number in self.program.posts[rank][index]:
            parcel = self.program.parcels[number]
            passage = self.passages[number] = self.lines.carry(
                number, route=parcel.route, now_s=now_s
            )
            self.count(
                parcel.token,
                at_s=passage.arrived_s,
                cause=Cause(rank, operation=index, parcel=number),
            )
        if (token := self.program.signals[rank][index]) >= 0:
            self.count(token, at_s=now_s, cause=Cause(rank, operation=index, parcel=-1))
        # The rank itself goes on behind this operation, as far as it can.
        self.awake.append(rank)

    def count(self, token: int, at_s: float, cause: Cause) -> None:
        self.missing[token] -= 1
        # The last arrival decides, and is what the critical path goes on with.
        if at_s >= self.ready_s[token]:
            self.ready_s[token] = at_s
            self.causes[token] = cause
        if not self.missing[token]:
            self.awake += self.sleepers.pop(token, ())
