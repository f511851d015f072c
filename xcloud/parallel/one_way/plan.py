"""Whose batch is consumed when: the plan of a one-way job. Pure arithmetic: no links, no data.

Every rank of the consumer keeps the same plan and gives it the same `Round` after every step, so
they agree without another message; the first one sends the orders to the producers. A *source* is
one rank of a producer. A *slot* is the place of one batch in a step.

Bounded run-ahead: of a source at most `run_ahead` batches are ordered and not yet consumed. A
producer makes nothing that was not ordered.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from xcloud.comm.state import State as Saved
from xcloud.comm.state import whole_number, whole_numbers
from xcloud.parallel.one_way.feed import Feed, Shares

NOBODY = -1
"""In the place of a consumer's rank: a batch that is only made, so that all ranks of the cloud
stand at the same number; it is kept until a rank of the consumer wants it."""


class State(Enum):
    """Of a producer, in the plan of every rank of the consumer."""

    ABSENT = "absent"  # not ready yet
    ACTIVE = "active"
    SLOW = "slow"  # silent for too long
    DEAD = "dead"


class Source(NamedTuple):
    """group_rank: of the rank, in its cloud."""

    producer: int
    group_rank: int


class Order(NamedTuple):
    """Make batch `number` and send it to rank `consumer` of the consumer.

    num_planned: batches that each rank of the producer will make in all, as planned now; the same
    for all that make this number.
    """

    source: Source
    number: int
    consumer: int
    num_planned: int


Pair = tuple[Source, int]
"""A source and a rank of the consumer."""


@dataclass
class Round:
    """What happened in an attempt at a step: of one rank of the consumer, and, added up, of all.

    skipped, consumed: batches. ready: in how many ranks the producer is there, or is no longer
    behind. slow, dead: likewise. sums: of the consumer's part. signal: of the first rank, what
    all do after the step.
    """

    consumed: Mapping[Pair, int]
    skipped: Mapping[Pair, int]
    ready: Sequence[int]
    slow: Sequence[int]
    dead: Sequence[int]
    sums: Sequence[float] = ()
    signal: int = 0

    def pack(self, pairs: Sequence[Pair]) -> Tensor:
        """float64 [sums + 3 * producers + 2 * pairs + 1], to be added up."""
        counts = [some.get(pair, 0) for some in (self.consumed, self.skipped) for pair in pairs]
        numbers = [*self.sums, *self.ready, *self.slow, *self.dead, *counts, self.signal]
        return torch.tensor(numbers, dtype=torch.float64)

    @classmethod
    def unpack(cls, packed: Tensor, pairs: Sequence[Pair], num_producers: int) -> Round:
        sizes = [*[num_producers] * 3, len(pairs), len(pairs), 1]
        sums, *numbers = torch.split(packed, [len(packed) - sum(sizes), *sizes])
        ready, slow, dead, *counts, signal = (part.long().tolist() for part in numbers)
        consumed, skipped = (dict(zip(pairs, some, strict=True)) for some in counts)
        return cls(consumed, skipped, ready, slow, dead, sums.tolist(), *signal)


class _Slots:
    """order=fixed: by rank of the consumer, the sources of its next batches. surplus: batches that
    came too late for their slots and still wait to be used."""

    def __init__(self, num_consumers: int) -> None:
        self.queues: list[deque[Source]] = [deque() for _ in range(num_consumers)]
        self.surplus: Counter[Pair] = Counter()
        self.next_number = 0

    @property
    def planned(self) -> Counter[Source]:
        return Counter(source for queue in self.queues for source in queue)

    def add(self, source: Source) -> None:
        self.queues[self.next_consumer].append(source)
        self.next_number += 1

    @property
    def next_consumer(self) -> int:
        return self.next_number % len(self.queues)

    def end_step(self, per_consumer: int, skipped: Mapping[Pair, int]) -> None:
        for queue in self.queues:
            for _ in range(min(per_consumer, len(queue))):
                queue.popleft()
        self.surplus.update(skipped)


class ConsumptionPlan:
    """group_sizes: ranks of each producer. num_batches: that the consumer will use in all; only
    Order.num_planned needs it."""

    def __init__(
        self,
        shares: Sequence[float],
        group_sizes: Sequence[int],
        num_consumers: int,
        batches_per_step: int,
        feed: Feed,
        num_batches: int = 0,
    ) -> None:
        self.group_sizes, self.num_consumers, self.feed = group_sizes, num_consumers, feed
        self.per_consumer = batches_per_step // num_consumers  # batches of a step in each rank
        self.state = [State.ABSENT] * len(shares)
        self.ordered: Counter[Pair] = Counter()
        self._num_ordered: Counter[Source] = Counter()
        self.consumed: Counter[Pair] = Counter()
        self.has_started = False  # enough were ready; the run does not wait for those to come
        self._num_skipped = 0
        self._shares, self._slots = Shares(shares, group_sizes, num_batches), _Slots(num_consumers)

    @property
    def num_producers(self) -> int:
        return len(self.state)

    @property
    def sources(self) -> list[Source]:
        return [source for p in range(self.num_producers) for source in self._of(p)]

    @property
    def pairs(self) -> list[Pair]:
        return [(source, c) for source in self.sources for c in range(self.num_consumers)]

    @property
    def active(self) -> list[int]:
        return [p for p, state in enumerate(self.state) if state is State.ACTIVE]

    @property
    def is_exhausted(self) -> bool:
        """Nobody is left who could ever feed again."""
        return all(state is State.DEAD for state in self.state)

    def _of(self, p: int) -> list[Source]:
        return [Source(p, group_rank) for group_rank in range(self.group_sizes[p])]

    def numbers(self, source: Source) -> int:
        """Batches ordered of a source so far; they are numbered from 1."""
        return self._num_ordered[source]

    def step_slots(self, consumer: int) -> list[Source]:
        """order=fixed: the sources of this rank's next batches, in order. Fewer than per_consumer
        only if no producer is active: then there is nothing to do but wait."""
        return list(self._slots.queues[consumer])[: self.per_consumer]

    def choose(self, ready: Sequence[int], taken: Mapping[int, int]) -> int | None:
        """order=arrival: the producer to take from, of those with a batch ready; None = better
        wait. taken: batches this rank took since a producer last came or went, by producer."""
        able = [p for p, s in enumerate(self.state) if s in (State.ACTIVE, State.SLOW)]
        waits = self.feed.on_slow == "wait" and len(able) > 1
        most_ahead = self.feed.most_ahead if waits else float("inf")
        return self._shares.nearest(ready, able, taken, most_ahead)

    def orders(self) -> list[Order]:
        """What to order now, so that the producers never idle and never run too far ahead."""
        if not self.has_started:
            alive = sum(state is not State.DEAD for state in self.state)
            wanted = self.feed.min_producers or self.num_producers
            if not self.active or len(self.active) < min(wanted, alive):
                return []
            self.has_started = True
        return self._orders_in_turn() if self.feed.order == "fixed" else self._orders_by_need()

    def _orders_in_turn(self) -> list[Order]:
        orders: list[Order] = []
        slots, planned = self._slots, self._slots.planned
        while active := self.active:
            chosen, consumer = self._shares.next(active), slots.next_consumer
            late = [s for s in self._of(chosen) if slots.surplus[s, consumer] > 0]
            total = sum(self.numbers(source) for source in self._of(chosen))
            source = late[0] if late else Source(chosen, total % self.group_sizes[chosen])
            enough = all(len(queue) >= self.per_consumer for queue in slots.queues)
            if enough and planned[source] >= self.feed.most_ahead:
                break
            self._shares.give(chosen, active)
            slots.add(source)
            planned[source] += 1
            if late:
                slots.surplus[source, consumer] -= 1
            else:
                orders.append(self._order(source, consumer))
        return orders

    def _orders_by_need(self) -> list[Order]:
        orders: list[Order] = []
        sources = [source for p in self.active for source in self._of(p)]
        consumers = range(self.num_consumers)
        open_ = {
            (s, c): self.ordered[s, c] - self.consumed[s, c] for s in sources for c in consumers
        }
        to_come = [sum(open_[s, c] for s in sources) for c in consumers]
        room = {s: self.feed.most_ahead - sum(open_[s, c] for c in consumers) for s in sources}
        # One each in turn, to the rank with the least to come, so that none runs dry.
        while any(left > 0 for left in room.values()):
            for source in (source for source in sources if room[source] > 0):
                consumer = min(consumers, key=lambda c: (to_come[c], open_[source, c], c))
                room[source] -= 1
                to_come[consumer] += 1
                open_[source, consumer] += 1
                orders.append(self._order(source, consumer))
        return orders

    def _order(self, source: Source, consumer: int) -> Order:
        self.ordered[source, consumer] += 1
        self._num_ordered[source] += 1
        p, number = source.producer, self.numbers(source)
        num_planned = self._shares.promise(p, number, self.active)
        if all(self.numbers(other) >= number for other in self._of(p)):
            del self._shares.promised[p, number]
        return Order(source, number, consumer, num_planned)

    def levelling_orders(self) -> list[Order]:
        """For nobody: so that all ranks of a producer, which average their gradients, stand at
        the same number, to save or to end."""
        return [
            Order(source, number, NOBODY, self._shares.promise(p, number, self.active))
            for p, state in enumerate(self.state)
            if state is not State.DEAD
            for source in self._of(p)
            for number in range(self.numbers(source) + 1, self._highest(p) + 1)
        ]

    def _highest(self, p: int) -> int:
        return max(map(self.numbers, self._of(p)))

    def end_step(self, agreed: Round) -> dict[int, tuple[State, State]]:
        """Take in what happened in a step. Returns the producers whose state changed: (before,
        now). Shares of what is left are divided anew when a producer comes or goes; with
        order=arrival, where they are not kept, after every step."""
        self.consumed.update(agreed.consumed)
        self._num_skipped += sum(agreed.skipped.values())
        if self.feed.order == "fixed":
            self._slots.end_step(self.per_consumer, agreed.skipped)
        changes = {}
        for p, before in enumerate(self.state):
            now = self._next_state(p, agreed)
            if now is not before:
                self.state[p] = now
                self._shares.turns[p] = 0.0
                changes[p] = (before, now)
        if changes or self.feed.order == "arrival":
            used: Counter[int] = Counter()
            for (source, _), num in self.consumed.items():
                used[source.producer] += num
            self._shares.divide_anew(used, self._num_skipped)
        return changes

    def _next_state(self, p: int, agreed: Round) -> State:
        state = self.state[p]
        if state is State.DEAD or agreed.dead[p]:
            return State.DEAD
        if agreed.slow[p] and state is State.ACTIVE:
            return State.SLOW
        if agreed.ready[p] == self.num_consumers and state in (State.ABSENT, State.SLOW):
            return State.ACTIVE
        return state

    def readmit_lost(self) -> list[int]:
        """Producers that were lost are there again in a resumed run, perhaps without what they had
        learned: they take part once they are ready. What they owed is not waited for, and their
        numbers continue. Returns them."""
        lost = [p for p, state in enumerate(self.state) if state is State.DEAD]
        for p in lost:
            self.state[p], top = State.ABSENT, self._highest(p)
            self._shares.forget(p)
            for source in self._of(p):
                self.ordered[source, 0] += top - self.numbers(source)
                self._num_ordered[source] = top
                for c in range(self.num_consumers):
                    self.consumed[source, c] = self.ordered[source, c]
                    self._slots.surplus[source, c] = 0
        self._slots.queues = [
            deque(s for s in queue if s.producer not in lost) for queue in self._slots.queues
        ]
        return lost

    def state_dict(self) -> Saved:
        """Between two steps. Counts by source, in the order of `sources`, and rank."""
        places, states = {s: i for i, s in enumerate(self.sources)}, list(State)
        slots, shares = self._slots, self._shares
        counted = (self.ordered, self.consumed, slots.surplus)
        queued = [(c, places[s]) for c, queue in enumerate(slots.queues) for s in queue]
        return {
            "states": torch.tensor([states.index(state) for state in self.state]),
            "counts": torch.tensor([[some[pair] for pair in self.pairs] for some in counted]),
            "slots": _rows(2, queued),
            "turn": torch.tensor(shares.turns, dtype=torch.float64),
            "used_before": torch.tensor(
                [shares.used_before[p] for p in range(self.num_producers)]
            ),
            "promised": _rows(3, [(*key, number) for key, number in shares.promised.items()]),
            "next_slot": slots.next_number,
            "is_started": int(self.has_started),
            "num_used": shares.num_used,
            "num_skipped": self._num_skipped,
        }

    def load_state_dict(self, state: Saved) -> None:
        """The state of a plan of the same job; ValueError otherwise."""
        sources, pairs, slots, shares = self.sources, self.pairs, self._slots, self._shares
        counts = whole_numbers(state, "counts", 3, len(pairs)).tolist()
        self.ordered, self.consumed, slots.surplus = (
            Counter(dict(zip(pairs, row, strict=True))) for row in counts
        )
        self._num_ordered = Counter()
        for (source, _), number in self.ordered.items():
            self._num_ordered[source] += number
        states = whole_numbers(state, "states", self.num_producers).tolist()
        self.state = [list(State)[number] for number in states]
        used_before = whole_numbers(state, "used_before", self.num_producers).tolist()
        shares.used_before = Counter(dict(enumerate(used_before)))
        slots.queues = [deque() for _ in range(self.num_consumers)]
        for consumer, source in whole_numbers(state, "slots", -1, 2).tolist():
            slots.queues[consumer].append(sources[source])
        promised = whole_numbers(state, "promised", -1, 3).tolist()
        shares.promised = {(p, number): num_planned for p, number, num_planned in promised}
        turns = state["turn"]
        assert isinstance(turns, Tensor)
        shares.turns = turns.tolist()
        slots.next_number = whole_number(state, "next_slot")
        self.has_started = bool(whole_number(state, "is_started"))
        shares.num_used = whole_number(state, "num_used")
        self._num_skipped = whole_number(state, "num_skipped")


def _rows(width: int, rows: Sequence[tuple[int, ...]]) -> Tensor:
    """int64 [len(rows), width], of no rows too."""
    return torch.tensor(rows, dtype=torch.int64).view(-1, width)
