"""How a consumer takes from its producers: what a user says (Feed), and whose batch is consumed
when (ConsumptionPlan). Pure arithmetic: no links, no data.

Every rank of the consumer keeps the same plan and gives it the same `Round` after every step, so
they agree without another message; the first one sends the orders to the producers. A *source* is
one rank of a producer, by its number among those of all. A *slot* is the place of one batch in a
step.

Bounded run-ahead: of a source at most `run_ahead` batches are ordered and not yet consumed. A
producer makes nothing that was not ordered.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from dataclasses import replace
from enum import IntEnum
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import ConfigError
from xcloud.base.settings import settings
from xcloud.comm.state import State as Saved
from xcloud.comm.state import StatefulTree
from xcloud.features.one_way.layout import OneWayLayout

NOBODY = -1
"""In place of a consumer's rank: a batch that is only made, so that all ranks of the cloud stand
at the same number; it is kept until a rank of the consumer wants it."""


@settings("feed", dropped={"order": "fixed", "on_slow": "wait", "min_producers": None})
class Feed:
    """The settings by which the consumer takes batches from producers, in turn by their shares
    (docs/pretraining.md).

    run_ahead: the number of batches of one rank of a producer that may be ordered and not yet
        consumed. null = twice what one producer alone would have to give for a step, at least 8.
    slow_after_s: the seconds of silence after which the run says that it waits for a producer.
    on_dead: the reaction to a dead producer. redistribute = the others take over its share; stop =
        the run fails.
    """

    run_ahead: Annotated[int, Field(ge=1, le=4096)] | None = None
    slow_after_s: Annotated[float, Field(gt=0.0)] = 30.0
    on_dead: Literal["redistribute", "stop"] = "redistribute"

    @property
    def max_ahead(self) -> int:
        """The run_ahead as a number; see `fitted`."""
        return self.run_ahead or 8

    def fitted(self, layout: OneWayLayout, batches_per_step: int) -> Feed:
        """Return these settings with a run_ahead in place of null.

        Raises ConfigError if they do not fit together.
        """
        if batches_per_step % layout.num_consumers:
            raise ConfigError(
                f"training.batches_per_step is {batches_per_step}, which cannot be divided evenly "
                f"among the consumer's {layout.num_consumers} ranks; make it a multiple of "
                f"{layout.num_consumers}"
            )
        # Batches of each rank of the smallest producer, if it alone had to fill a step.
        # The others may die: a run-ahead that only works with all of them would hang then.
        fewest = min(map(len, layout.sources))
        # batches / ranks, rounded up, and one more where turns do not begin at the first rank.
        needed = -(-(batches_per_step + fewest - 1) // fewest)
        if self.run_ahead is not None and self.run_ahead < needed:
            raise ConfigError(
                f"feed.run_ahead is {self.run_ahead}, but one producer alone may have to give the "
                f"{batches_per_step} batches of a step; set it to {needed} or more, better "
                f"{2 * needed}"
            )
        return replace(self, run_ahead=self.run_ahead or max(8, 2 * needed))


class Presence(IntEnum):
    """The state of a producer, in the plan of every rank of the consumer and in reports."""

    ABSENT = 0  # not ready yet
    ACTIVE = 1
    SLOW = 2  # silent for too long; only in reports, for the run waits for it
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
    """The events of an attempt at a step: of one rank of the consumer, and of all once `packed` is
    added up.

    The fields below are views of `packed`.

    sums: the sums of the consumer's part.
    ready, dead: the number of ranks in which each producer is ready or dead.
    consumed, skipped: the number of batches, by source and rank.
    signal: the signal of the first rank, which tells what all ranks do after the step.
    """

    def __init__(self, num_producers: int, pairs: tuple[int, ...], num_sums: int) -> None:
        # One vector, so that a single all-reduce in float64 (exact for counts) agrees on
        # everything.
        sizes = [num_sums, *[num_producers] * 2, *[math.prod(pairs)] * 2, 1]
        self.packed = torch.zeros(sum(sizes), dtype=torch.float64)
        parts = torch.split(self.packed, sizes)
        self.sums, self.ready, self.dead, consumed, skipped, self.signal = parts
        self.consumed = consumed.view(pairs)
        self.skipped = skipped.view(pairs)


_KEPT = "state", "has_started", "_used_before", "_num_slots", "_num_skipped", "_num_used"


class ConsumptionPlan(StatefulTree):
    """The plan of whose batch is consumed when, the same in every rank of the consumer.

    num_batches: the number of batches that the consumer will use in all. Only Order.num_planned
        needs it.
    numbers: the number of the last batch ordered, by source. The first is 1.
    ordered, consumed: the batches ordered and consumed, by source and rank of the consumer.
    names: the names of the producers.
    turns: the number of batches that each producer is owed.
    promised: the value of Order.num_planned that was sent with each order, by producer and number.
    slots: the sources of the next batches, by rank of the consumer.
    """

    own_names = ("plan", "turns", "promised")

    def __init__(
        self, layout: OneWayLayout, batches_per_step: int, feed: Feed, num_batches: int = 0
    ) -> None:
        self.feed = feed
        self.num_consumers = layout.num_consumers
        self.per_consumer = batches_per_step // self.num_consumers  # batches of a step
        self.state = [Presence.ABSENT] * len(layout.producers)
        self.has_started = False  # all were ready once
        self.names = layout.producers
        self.producer_of = layout.producer_of
        self._sources = layout.sources
        self._shares = layout.shares
        self._num_batches = num_batches
        self.turns = [0.0] * len(self.state)
        self.promised: dict[tuple[int, int], int] = {}
        self._used_before = [0] * len(self.state)  # by producer, when the rest was last divided
        pairs = len(self.producer_of), self.num_consumers
        self._counts = np.zeros((2, *pairs), dtype=np.int64)
        self.ordered, self.consumed = self._counts
        # `ordered` and `consumed` are views of `_counts`, which checkpoints keep in one piece.
        self.numbers = self.ordered.sum(1)
        self.slots = [deque[int]() for _ in range(self.num_consumers)]
        self._num_slots = self._num_skipped = self._num_used = 0  # or skipped, then

    @property
    def active(self) -> list[int]:
        """The producers that feed."""
        return [p for p, state in enumerate(self.state) if state is Presence.ACTIVE]

    def round(self, num_sums: int = 0) -> Round:
        """Return a round in which nothing has happened."""
        return Round(num_producers=len(self.state), pairs=self.ordered.shape, num_sums=num_sums)

    def step_slots(self, consumer: int) -> list[int]:
        """Return the sources of this rank's next batches, in order.

        They are fewer than per_consumer only if no producer is active: then there is nothing to do
        but wait.
        """
        return list(self.slots[consumer])[: self.per_consumer]

    def orders(self) -> list[Order]:
        """Return what to order now, so that producers never idle and never run too far ahead."""
        # The first step waits for all producers, so that shares are right from the first batch on
        # and a run is the same each time.
        if not self.has_started:
            alive = sum(state is not Presence.DEAD for state in self.state)
            if not self.active or len(self.active) < alive:
                return []
            self.has_started = True
        orders: list[Order] = []
        planned = Counter(source for slots in self.slots for source in slots)
        while active := self.active:
            # Each slot owes every active producer its share of one batch, and the one that is owed
            # most gives it; of equals the first. The order follows from shares alone.
            whole = sum(self._shares[p] for p in active)
            consumer = self._num_slots % self.num_consumers
            owed = {p: self.turns[p] + self._shares[p] / whole for p in active}
            chosen = max(owed, key=lambda p: (owed[p], -p))
            sources = self._sources[chosen]
            # Ranks of a producer in turn, so that their numbers never differ by more than one.
            source = sources[self.numbers[sources].sum() % len(sources)]
            # A step's batches first, whatever the run-ahead; after that up to the run-ahead of the
            # source whose turn it is, which keeps the order free of who is fast.
            enough = all(len(slots) >= self.per_consumer for slots in self.slots)
            if enough and planned[source] >= self.feed.max_ahead:
                break
            for p, turns in owed.items():
                self.turns[p] = turns - (p == chosen)
            self.slots[consumer].append(source)
            self._num_slots += 1
            planned[source] += 1
            self.ordered[source, consumer] += 1
            self.numbers[source] += 1
            number = int(self.numbers[source])
            num_planned = self._promise(chosen, number)
            orders.append(Order(source, number, consumer, num_planned=num_planned))
            if self.numbers[sources].min() >= number:  # all ranks have been told
                del self.promised[chosen, number]
        return orders

    def _promise(self, p: int, number: int) -> int:
        """Return the batches that each rank of an active producer will have made at the end: what
        it gave, and its share of what is left among those that feed.

        It is the same for all ranks that make this number: ranks that average gradients need one
        learning rate.
        """
        together = 1.0  # of all, whose sum may be rounded
        if len(self.active) < len(self._shares):
            together = sum(self._shares[q] for q in self.active)
        num_left = max(0, self._num_batches - self._num_used)
        to_come = num_left * self._shares[p] / together if together else 0.0
        # `_used_before` counts up to the last change of producers: between changes the number
        # stays the same, and so does the learning rate's schedule that is made of it.
        expected = math.ceil((self._used_before[p] + to_come) / len(self._sources[p]))
        return self.promised.setdefault((p, number), max(1, expected))

    def levelling_orders(self) -> list[Order]:
        """Return orders for nobody, so that all ranks of a producer stand at the same number.

        They average their gradients, and must be level to save or to end.
        """
        return [
            Order(source, number, consumer=NOBODY, num_planned=self._promise(p, number))
            for p, state in enumerate(self.state)
            if state is not Presence.DEAD
            for source in self._sources[p]
            for number in range(self.numbers[source] + 1, self.numbers[self._sources[p]].max() + 1)
        ]

    def end_step(self, agreed: Round) -> dict[int, tuple[Presence, Presence]]:
        """Take in what happened in a step. Return the producers whose state changed: (before,
        now).

        Shares of what is left are divided again when a producer comes or goes.
        """
        consumed, skipped = (n.long().numpy() for n in (agreed.consumed, agreed.skipped))
        self.consumed += consumed
        self._num_skipped += int(skipped.sum())
        # Slots are gone whether their batches came or not: one that did not come is skipped.
        for slots in self.slots:
            for _ in range(min(self.per_consumer, len(slots))):
                slots.popleft()
        changes = {}
        for p, before in enumerate(self.state):
            now = before
            if agreed.dead[p]:  # one rank that has lost it suffices
                now = Presence.DEAD
            elif before is not Presence.DEAD and agreed.ready[p] == self.num_consumers:
                now = Presence.ACTIVE
            if now is not before:
                self.state[p] = now
                # Whoever comes or comes back starts even: nothing is owed for the time away.
                self.turns[p] = 0.0
                changes[p] = (before, now)
        if changes:
            self._used_before = [int(self.consumed[sources].sum()) for sources in self._sources]
            self._num_used = sum(self._used_before) + self._num_skipped
        return changes

    def readmit_lost(self) -> list[int]:
        """Let lost producers take part again in a resumed run, once they are ready. Return them.

        What they owed is not waited for, and their numbers continue.
        """
        lost = [p for p, state in enumerate(self.state) if state is Presence.DEAD]
        for p in lost:
            self.state[p] = Presence.ABSENT
            sources = self._sources[p]
            self.turns[p] = 0.0
            self.promised = {key: n for key, n in self.promised.items() if key[0] != p}
            highest = self.numbers[sources].max()
            # All ranks of it go on at one number. The orders that some ranks lack are booked on
            # the consumer's first rank, and below as consumed, so that no sum is off.
            self.ordered[sources, 0] += highest - self.numbers[sources]
            self.numbers[sources] = highest
            self.consumed[sources] = self.ordered[sources]
            self.slots = [deque(s for s in slots if s not in sources) for slots in self.slots]
        return lost

    def own(self) -> Saved:
        """Return the plan's state, between two steps."""
        plan = {name: getattr(self, name) for name in _KEPT}
        plan |= {"counts": self._counts.tolist(), "slots": [[*slots] for slots in self.slots]}
        promised = [(*key, number) for key, number in self.promised.items()]
        turns = torch.tensor(self.turns, dtype=torch.float64)
        return {"plan": packed(plan), "turns": turns, "promised": packed(promised)}

    def take(self, own: Saved) -> None:
        plan = unpacked(own, name="plan")
        counts = plan["counts"][:2]  # release 0.2 has a third
        if np.shape(counts) != self._counts.shape:
            raise ValueError("the plan was saved with other producers or ranks of the consumer")
        for name in _KEPT:
            setattr(self, name, plan[name])
        self.state = [Presence(number) for number in self.state]
        self._counts[:] = counts
        self.numbers = self.ordered.sum(1)
        self.turns = torch.as_tensor(own["turns"]).tolist()
        self.slots = [deque(slots) for slots in plan["slots"]]
        self.promised = {
            (p, number): planned for p, number, planned in unpacked(own, name="promised")
        }


def packed(value: object) -> Tensor:
    """Return numbers in lists and dicts as a value of a state; see `unpacked`."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def unpacked(own: Saved, name: str) -> Any:
    """Return what was `packed`. Raises ValueError if there is none."""
    if not isinstance(value := own.get(name), Tensor):
        raise ValueError(f"a state needs {name!r}, got {sorted(own)}; other settings saved it")
    return parsed_json(value.numpy().tobytes())
