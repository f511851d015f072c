"""Whose batch is consumed when: the plan of a one-way job. Pure arithmetic: no links, no data.

Every rank of the consumer keeps the same plan and tells it the same things after every step, so
they agree without another message; the first one sends the orders to the producers. A *source* is
one rank of a producer: (producer, lane). A *slot* is the place of one batch in a step.

Bounded run-ahead: of a source at most `run_ahead` batches are ordered and not yet consumed. A
producer makes nothing that was not ordered.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch

from xcloud.comm import state as memory
from xcloud.parallel.one_way.feed import Feed
from xcloud.parallel.one_way.orders import NOBODY


class State(Enum):
    """Of a producer, in the plan of every rank of the consumer."""

    ABSENT = "absent"  # not ready yet
    ACTIVE = "active"
    SLOW = "slow"  # silent for too long
    DEAD = "dead"


class Source(NamedTuple):
    producer: int
    lane: int


class Order(NamedTuple):
    """Make batch `number` and send it to rank `consumer` of the consumer.

    num_planned: batches that each rank of the producer will make in all, as planned now; the same
    for all that make this number.
    """

    source: Source
    number: int
    consumer: int
    num_planned: int


@dataclass
class Round:
    """What all ranks of the consumer agreed on after a step; flags as sums over these ranks.

    skipped, consumed: batches, by (source, rank of the consumer).
    ready: in how many ranks the producer is there, or is no longer behind. slow, dead: likewise.
    """

    consumed: Mapping[tuple[Source, int], int]
    skipped: Mapping[tuple[Source, int], int]
    ready: Sequence[int]
    slow: Sequence[int]
    dead: Sequence[int]


@dataclass
class ConsumptionPlan:
    """num_batches: that the consumer will use in all; only Order.num_planned needs it."""

    shares: Sequence[float]
    num_lanes: Sequence[int]
    num_consumers: int
    batches_per_step: int
    feed: Feed
    num_batches: int = 0
    state: list[State] = field(init=False)
    ordered: Counter[tuple[Source, int]] = field(default_factory=Counter)
    consumed: Counter[tuple[Source, int]] = field(default_factory=Counter)
    _num_ordered: Counter[Source] = field(default_factory=Counter)
    _slots: list[deque[Source]] = field(init=False)
    _planned: Counter[Source] = field(default_factory=Counter)
    _surplus: Counter[tuple[Source, int]] = field(default_factory=Counter)
    _turn: list[float] = field(init=False)
    _next_slot: int = 0
    _started: bool = False
    _num_left: int = field(init=False)  # when the shares were last dealt anew
    _used_before: Counter[int] = field(default_factory=Counter)  # that, by producer
    _num_skipped: int = 0
    _told: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._num_left = self.num_batches
        self.state = [State.ABSENT] * len(self.shares)
        self._turn = [0.0] * len(self.shares)
        self._slots = [deque() for _ in range(self.num_consumers)]

    @property
    def per_consumer(self) -> int:
        """Batches of a step in each rank of the consumer."""
        return self.batches_per_step // self.num_consumers

    @property
    def sources(self) -> list[Source]:
        return [Source(p, lane) for p, n in enumerate(self.num_lanes) for lane in range(n)]

    @property
    def active(self) -> list[int]:
        return [p for p, state in enumerate(self.state) if state is State.ACTIVE]

    @property
    def is_exhausted(self) -> bool:
        """Nobody is left who could ever feed again."""
        return all(state is State.DEAD for state in self.state)

    def numbers(self, source: Source) -> int:
        """Batches ordered of a source so far; they are numbered from 1."""
        return self._num_ordered[source]

    def step_slots(self, consumer: int) -> list[Source]:
        """order=fixed: the sources of this rank's next batches, in order. Fewer than per_consumer
        only if no producer is active: then there is nothing to do but wait."""
        return list(self._slots[consumer])[: self.per_consumer]

    @property
    def has_started(self) -> bool:
        """Enough producers were ready. From then on the run does not wait for those to come."""
        return self._started

    def choose(self, ready: Iterable[int], taken: Mapping[int, int]) -> int | None:
        """order=arrival: the producer to take from, of those with a batch ready; None = better
        wait. taken: batches this rank took since a producer last came or went, by producer."""
        able = [p for p, s in enumerate(self.state) if s in (State.ACTIVE, State.SLOW)]
        whole = sum(self.shares[p] for p in able) or 1.0
        total = sum(taken.get(p, 0) for p in able) + 1
        ahead = {p: taken.get(p, 0) + 1 - total * self.shares[p] / whole for p in ready}
        if self.feed.on_slow == "wait" and len(able) > 1:
            ahead = {p: a for p, a in ahead.items() if a <= self.feed.most_ahead or p not in able}
        return min(ahead, key=lambda p: (ahead[p], p), default=None)

    def orders(self) -> list[Order]:
        """What to order now, so that the producers never idle and never run too far ahead."""
        if not self._started:
            alive = sum(state is not State.DEAD for state in self.state)
            wanted = self.feed.min_producers or len(self.shares)
            if not self.active or len(self.active) < min(wanted, alive):
                return []
            self._started = True
        return self._orders_in_turn() if self.feed.order == "fixed" else self._orders_by_need()

    def _orders_in_turn(self) -> list[Order]:
        orders: list[Order] = []
        while active := self.active:
            whole = sum(self.shares[p] for p in active)
            chosen = max(active, key=lambda p: (self._turn[p] + self.shares[p] / whole, -p))
            consumer = self._next_slot % self.num_consumers
            source = self._left_over(chosen, consumer)
            is_new = source is None
            if source is None:
                total = sum(self.numbers(Source(chosen, n)) for n in range(self.num_lanes[chosen]))
                source = Source(chosen, total % self.num_lanes[chosen])
            enough = all(len(slots) >= self.per_consumer for slots in self._slots)
            if enough and self._planned[source] >= self.feed.most_ahead:
                return orders
            for p in active:
                self._turn[p] += self.shares[p] / whole
            self._turn[chosen] -= 1.0
            self._next_slot += 1
            self._planned[source] += 1
            self._slots[consumer].append(source)
            if is_new:
                orders.append(self._order(source, consumer))
            else:
                self._surplus[source, consumer] -= 1
        return orders

    def _left_over(self, producer: int, consumer: int) -> Source | None:
        """A source whose batch came too late for its slot and still waits to be used."""
        for lane in range(self.num_lanes[producer]):
            if self._surplus[Source(producer, lane), consumer] > 0:
                return Source(producer, lane)
        return None

    def _orders_by_need(self) -> list[Order]:
        orders = []
        sources = [s for s in self.sources if self.state[s.producer] is State.ACTIVE]
        open_ = {
            (source, c): self.ordered[source, c] - self.consumed[source, c]
            for source in sources
            for c in range(self.num_consumers)
        }
        by_consumer = [sum(open_[s, c] for s in sources) for c in range(self.num_consumers)]
        room = {
            s: self.feed.most_ahead - sum(open_[s, c] for c in range(self.num_consumers))
            for s in sources
        }
        # One each in turn, to the rank with the least to come, so that none runs dry.
        while any(left > 0 for left in room.values()):
            for source in sources:
                if room[source] > 0:
                    consumer = min(
                        range(self.num_consumers),
                        key=lambda c: (by_consumer[c], open_[source, c], c),
                    )
                    room[source] -= 1
                    by_consumer[consumer] += 1
                    open_[source, consumer] += 1
                    orders.append(self._order(source, consumer))
        return orders

    def _order(self, source: Source, consumer: int) -> Order:
        self.ordered[source, consumer] += 1
        self._num_ordered[source] += 1
        p, number = source.producer, self.numbers(source)
        # Ranks that average gradients need one learning rate, whenever each is told the number.
        num_planned = self._told.setdefault((p, number), self.expected(p))
        if all(self.numbers(Source(p, n)) >= number for n in range(self.num_lanes[p])):
            del self._told[p, number]
        return Order(source, number, consumer, num_planned)

    def levelling_orders(self) -> list[Order]:
        """For nobody: so that all ranks of a producer, which average their gradients, stand at
        the same number, to save or to end."""
        return [
            Order(source, number, NOBODY, self._told.get((p, number), self.expected(p)))
            for p, num_lanes in enumerate(self.num_lanes)
            if self.state[p] is not State.DEAD
            for source in (Source(p, lane) for lane in range(num_lanes))
            for number in range(self.numbers(source) + 1, self._highest(p) + 1)
        ]

    def _highest(self, p: int) -> int:
        return max(self.numbers(Source(p, lane)) for lane in range(self.num_lanes[p]))

    def expected(self, p: int) -> int:
        """Batches that each rank of an active producer will have made at the end: what it gave,
        and its share of what is left among those that feed. order=fixed: worked out anew when a
        producer comes or goes; arrival: after every step, as shares are not kept there."""
        is_whole = len(self.active) == len(self.shares)
        together = 1.0 if is_whole else sum(self.shares[q] for q in self.active)
        to_come = self._num_left * self.shares[p] / together
        return max(1, math.ceil((self._used_before[p] + to_come) / self.num_lanes[p]))

    def end_step(self, agreed: Round) -> dict[int, tuple[State, State]]:
        """Take in what happened in a step. Returns the producers whose state changed: (before,
        now)."""
        self.consumed.update(agreed.consumed)
        self._num_skipped += sum(agreed.skipped.values())
        if self.feed.order == "fixed":
            for slots in self._slots:
                for _ in range(min(self.per_consumer, len(slots))):
                    self._planned[slots.popleft()] -= 1
            self._surplus.update(agreed.skipped)
        changes = {}
        for p, before in enumerate(self.state):
            now = self._next_state(p, agreed)
            if now is not before:
                self.state[p] = now
                self._turn[p] = 0.0  # who comes back does not claim what it missed
                changes[p] = (before, now)
        if changes or self.feed.order == "arrival":
            self._used_before = Counter()
            for (source, _), num in self.consumed.items():
                self._used_before[source.producer] += num
            used = self._used_before.total() + self._num_skipped
            self._num_left = max(0, self.num_batches - used)
        return changes

    def readmit_lost(self) -> list[int]:
        """The run goes on, and producers that were lost are there again, perhaps without what they
        had learned: they take part once they are ready. What they owed is not waited for, and
        their numbers go on. Returns them."""
        lost = [p for p, state in enumerate(self.state) if state is State.DEAD]
        for p in lost:
            self.state[p], self._turn[p] = State.ABSENT, 0.0
            sources = [Source(p, lane) for lane in range(self.num_lanes[p])]
            top = self._highest(p)
            for source in sources:
                self.ordered[source, 0] += top - self.numbers(source)  # lanes average: in step
                self._num_ordered[source], self._planned[source] = top, 0
                for c in range(self.num_consumers):
                    self.consumed[source, c] = self.ordered[source, c]
                    self._surplus[source, c] = 0
            self._told = {key: number for key, number in self._told.items() if key[0] != p}
        self._slots = [deque(s for s in slots if s.producer not in lost) for slots in self._slots]
        return lost

    def state_dict(self) -> memory.State:
        """Between two steps. Counts by source, in the order of `sources`, and rank."""
        sources, states = {s: i for i, s in enumerate(self.sources)}, list(State)
        return {
            "states": torch.tensor([states.index(state) for state in self.state]),
            "counts": torch.tensor(
                [[kept[s, c] for s in sources for c in range(self.num_consumers)]
                 for kept in (self.ordered, self.consumed, self._surplus)]
            ),
            "planned": torch.tensor([self._planned[source] for source in sources]),
            "slots": _rows(2, [(c, sources[s]) for c, q in enumerate(self._slots) for s in q]),
            "turn": torch.tensor(self._turn, dtype=torch.float64),
            "used_before": torch.tensor([self._used_before[p] for p in range(len(self.shares))]),
            "told": _rows(3, [(*key, number) for key, number in self._told.items()]),
            "next_slot": self._next_slot,
            "is_started": int(self._started),
            "num_left": self._num_left,
            "num_skipped": self._num_skipped,
        }  # fmt: skip

    def load_state_dict(self, state: memory.State) -> None:
        """The state of a plan of the same job; ValueError otherwise."""
        sources, num_producers = self.sources, len(self.shares)
        pairs = [(s, c) for s in sources for c in range(self.num_consumers)]
        counts = memory.whole_numbers(state, "counts", 3, len(pairs)).tolist()
        self.ordered, self.consumed, self._surplus = (
            Counter(dict(zip(pairs, row, strict=True))) for row in counts
        )
        self._num_ordered = Counter()
        for (source, _), number in self.ordered.items():
            self._num_ordered[source] += number
        states = memory.whole_numbers(state, "states", num_producers).tolist()
        self.state = [list(State)[number] for number in states]
        planned = memory.whole_numbers(state, "planned", len(sources)).tolist()
        self._planned = Counter(dict(zip(sources, planned, strict=True)))
        used_before = memory.whole_numbers(state, "used_before", num_producers).tolist()
        self._used_before = Counter(dict(enumerate(used_before)))
        self._slots = [deque() for _ in range(self.num_consumers)]
        for consumer, source in memory.whole_numbers(state, "slots", -1, 2).tolist():
            self._slots[consumer].append(sources[source])
        told = memory.whole_numbers(state, "told", -1, 3).tolist()
        self._told = {(p, number): num_planned for p, number, num_planned in told}
        turn = state["turn"]
        assert isinstance(turn, torch.Tensor)
        self._turn = turn.tolist()
        self._next_slot = memory.whole_number(state, "next_slot")
        self._started = bool(memory.whole_number(state, "is_started"))
        self._num_left = memory.whole_number(state, "num_left")
        self._num_skipped = memory.whole_number(state, "num_skipped")

    def _next_state(self, p: int, agreed: Round) -> State:
        state = self.state[p]
        if state is State.DEAD or agreed.dead[p]:
            return State.DEAD
        if agreed.slow[p] and state is State.ACTIVE:
            return State.SLOW
        if agreed.ready[p] == self.num_consumers and state in (State.ABSENT, State.SLOW):
            return State.ACTIVE
        return state


def _rows(width: int, rows: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """int64 [len(rows), width], of no rows too."""
    return torch.tensor(rows, dtype=torch.int64).view(-1, width)
