"""Whose batch is consumed when: the plan of a one-way job. Pure arithmetic: no links, no data.

Every rank of the consumer keeps the same plan and gives it the same `Round` after every step, so
they agree without another message; the first one sends the orders to the producers. A *source* is
one rank of a producer, by its number among those of all. A *slot* is the place of one batch in a
step.

Bounded run-ahead: of a source at most `run_ahead` batches are ordered and not yet consumed. A
producer makes nothing that was not ordered.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from xcloud.cluster.one_way_layout import OneWayLayout
from xcloud.comm.state import State as Saved
from xcloud.comm.state import Stateful, StatefulParts, rows_of, whole_numbers
from xcloud.parallel.one_way.feed import Feed, Shares

NOBODY = -1
"""In the place of a consumer's rank: a batch that is only made, so that all ranks of the cloud
stand at the same number; it is kept until a rank of the consumer wants it."""


class State(IntEnum):
    """Of a producer, in the plan of every rank of the consumer."""

    ABSENT = 0  # not ready yet
    ACTIVE = 1
    SLOW = 2  # silent for too long
    DEAD = 3


class Order(NamedTuple):
    """Make batch `number` and send it to rank `consumer` of the consumer.

    num_planned: batches that each rank of the producer will make in all, as planned now; the same
    for all that make this number.
    """

    source: int
    number: int
    consumer: int
    num_planned: int


class Round:
    """What happened in an attempt at a step: of one rank of the consumer, and, once `packed` is
    added up, of all. The others are views of it.

    ready: in how many ranks the producer is there, or is no longer behind. slow, dead: likewise.
    consumed, skipped: batches, by source and rank. sums: of the consumer's part. signal: of the
    first rank, what all do after the step.
    """

    def __init__(self, num_producers: int, pairs: tuple[int, int], num_sums: int) -> None:
        sizes = [num_sums, *[num_producers] * 3, *[pairs[0] * pairs[1]] * 2, 1]
        self.packed = torch.zeros(sum(sizes), dtype=torch.float64)
        parts = torch.split(self.packed, sizes)
        self.sums, self.ready, self.slow, self.dead, consumed, skipped, self.signal = parts
        self.consumed, self.skipped = consumed.view(pairs), skipped.view(pairs)


class ConsumptionPlan(StatefulParts):
    """num_batches: that the consumer will use in all; only Order.num_planned needs it.

    numbers: of the last batch ordered, by source; the first is 1. ordered, consumed: batches, by
    source and rank of the consumer. surplus, with order=fixed: of
    these that came too late for their slots and still wait to be used. slots, with order=fixed: by
    rank of the consumer, the sources of its next batches.
    """

    own_names = ("states", "counts", "slots", "numbers")

    def __init__(
        self, layout: OneWayLayout, batches_per_step: int, feed: Feed, num_batches: int = 0
    ) -> None:
        self.feed, self.num_consumers = feed, layout.num_consumers
        self.per_consumer = batches_per_step // self.num_consumers  # batches of a step
        self.state = [State.ABSENT] * len(layout.producers)
        self.has_started = False  # enough were ready; the run does not wait for those to come
        self.producer_of = layout.producer_of
        self._sources, self._shares = layout.sources, Shares(layout, num_batches)
        pairs = len(self.producer_of), self.num_consumers
        self._counts = np.zeros((3, *pairs), dtype=np.int64)
        self.ordered, self.consumed, self.surplus = self._counts
        self.numbers = self.ordered.sum(1)
        self.slots = [deque[int]() for _ in range(self.num_consumers)]
        self._num_slots = self._num_skipped = 0

    @property
    def active(self) -> list[int]:
        return [p for p, state in enumerate(self.state) if state is State.ACTIVE]

    @property
    def is_exhausted(self) -> bool:
        """Nobody is left who could ever feed again."""
        return all(state is State.DEAD for state in self.state)

    def round(self, num_sums: int = 0) -> Round:
        """In which nothing has happened."""
        pairs = len(self.producer_of), self.num_consumers
        return Round(len(self.state), pairs, num_sums)

    def step_slots(self, consumer: int) -> list[int]:
        """order=fixed: the sources of this rank's next batches, in order. Fewer than per_consumer
        only if no producer is active: then there is nothing to do but wait."""
        return list(self.slots[consumer])[: self.per_consumer]

    def choose(self, ready: Sequence[int], taken: Mapping[int, int]) -> int | None:
        """order=arrival: the producer to take from, of those with a batch ready: who has given
        least for its share among those that are able to feed. None = better wait. taken: batches
        this rank took since a producer last came or went, by producer."""
        able = [p for p, s in enumerate(self.state) if s in (State.ACTIVE, State.SLOW)]
        shares, total = self._shares.shares, sum(taken.get(p, 0) for p in able) + 1
        whole = sum(shares[p] for p in able) or 1.0
        ahead = {p: taken.get(p, 0) + 1 - total * shares[p] / whole for p in ready}
        if self.feed.on_slow == "wait" and len(able) > 1:
            most = self.feed.most_ahead
            ahead = {p: a for p, a in ahead.items() if a <= most or p not in able}
        return min(ahead, key=lambda p: (ahead[p], p), default=None)

    def orders(self) -> list[Order]:
        """What to order now, so that the producers never idle and never run too far ahead."""
        if not self.has_started:
            alive = sum(state is not State.DEAD for state in self.state)
            wanted = self.feed.min_producers or len(self.state)
            if not self.active or len(self.active) < min(wanted, alive):
                return []
            self.has_started = True
        return self._orders_in_turn() if self.feed.order == "fixed" else self._orders_by_need()

    def _orders_in_turn(self) -> list[Order]:
        orders: list[Order] = []
        planned = Counter(source for slots in self.slots for source in slots)
        while active := self.active:
            owed, consumer = self._shares.owed(active), self._num_slots % self.num_consumers
            chosen = max(owed, key=lambda p: (owed[p], -p))
            sources = self._sources[chosen]
            late = [source for source in sources if self.surplus[source, consumer] > 0]
            source = late[0] if late else sources[self.numbers[sources].sum() % len(sources)]
            enough = all(len(slots) >= self.per_consumer for slots in self.slots)
            if enough and planned[source] >= self.feed.most_ahead:
                break
            self._shares.give(chosen, owed)
            self.slots[consumer].append(source)
            self._num_slots += 1
            planned[source] += 1
            if late:
                self.surplus[source, consumer] -= 1
            else:
                orders.append(self._order(chosen, source, consumer))
        return orders

    def _orders_by_need(self) -> list[Order]:
        orders: list[Order] = []
        sources = [(p, source) for p in self.active for source in self._sources[p]]
        open_ = self.ordered - self.consumed
        to_come = sum(open_[source] for _, source in sources)
        room = {source: self.feed.most_ahead - open_[source].sum() for _, source in sources}
        # One each in turn, to the rank with the least to come, so that none runs dry.
        while any(left > 0 for left in room.values()):
            for p, source in ((p, source) for p, source in sources if room[source] > 0):
                keys = [(to_come[c], open_[source, c], c) for c in range(self.num_consumers)]
                consumer = min(keys)[-1]
                room[source] -= 1
                to_come[consumer] += 1
                open_[source, consumer] += 1
                orders.append(self._order(p, source, consumer))
        return orders

    def _order(self, p: int, source: int, consumer: int) -> Order:
        self.ordered[source, consumer] += 1
        self.numbers[source] += 1
        number = int(self.numbers[source])
        num_planned = self._shares.promise(p, number, self.active)
        if self.numbers[self._sources[p]].min() >= number:
            del self._shares.promised[p, number]
        return Order(source, number, consumer, num_planned)

    def levelling_orders(self) -> list[Order]:
        """For nobody: so that all ranks of a producer, which average their gradients, stand at
        the same number, to save or to end."""
        return [
            Order(source, number, NOBODY, self._shares.promise(p, number, self.active))
            for p, state in enumerate(self.state)
            if state is not State.DEAD
            for source in self._sources[p]
            for number in range(self.numbers[source] + 1, self.numbers[self._sources[p]].max() + 1)
        ]

    def end_step(self, agreed: Round) -> dict[int, tuple[State, State]]:
        """Take in what happened in a step. Returns the producers whose state changed: (before,
        now). Shares of what is left are divided anew when a producer comes or goes; with
        order=arrival, where they are not kept, after every step."""
        consumed, skipped = (n.long().numpy() for n in (agreed.consumed, agreed.skipped))
        self.consumed += consumed
        self._num_skipped += int(skipped.sum())
        if self.feed.order == "fixed":
            for slots in self.slots:
                for _ in range(min(self.per_consumer, len(slots))):
                    slots.popleft()
            self.surplus += skipped
        changes = {}
        for p, before in enumerate(self.state):
            now = self._next_state(p, agreed)
            if now is not before:
                self.state[p] = now
                self._shares.turns[p] = 0.0
                changes[p] = (before, now)
        if changes or self.feed.order == "arrival":
            used = [int(self.consumed[sources].sum()) for sources in self._sources]
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
            self.state[p], sources = State.ABSENT, self._sources[p]
            self._shares.forget(p)
            highest = self.numbers[sources].max()
            self.ordered[sources, 0] += highest - self.numbers[sources]
            self.numbers[sources] = highest
            self.consumed[sources], self.surplus[sources] = self.ordered[sources], 0
            self.slots = [deque(s for s in slots if s not in sources) for slots in self.slots]
        return lost

    def parts(self) -> dict[str, Stateful]:
        return {"shares": self._shares}

    def own(self) -> Saved:
        """Between two steps."""
        slots = [(c, source) for c, some in enumerate(self.slots) for source in some]
        return {
            "states": torch.tensor([int(state) for state in self.state]),
            "counts": torch.tensor(self._counts),
            "slots": rows_of(2, slots),
            "numbers": torch.tensor([self._num_slots, self._num_skipped, int(self.has_started)]),
        }

    def take(self, own: Saved) -> None:
        states = whole_numbers(own, "states", len(self.state)).tolist()
        self.state = [State(number) for number in states]
        self._counts[:] = whole_numbers(own, "counts", *self._counts.shape).numpy()
        self.numbers = self.ordered.sum(1)
        for slots in self.slots:
            slots.clear()
        for consumer, source in whole_numbers(own, "slots", -1, 2).tolist():
            self.slots[consumer].append(source)
        numbers = whole_numbers(own, "numbers", 3).tolist()
        self._num_slots, self._num_skipped, self.has_started = *numbers[:2], bool(numbers[2])
