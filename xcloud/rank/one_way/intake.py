"""Which batches a rank of the consumer takes in a step: as planned, or as they come."""

from __future__ import annotations

from collections import Counter

from xcloud.comm.step_clock import StepClock
from xcloud.parallel.one_way.feed import Feed
from xcloud.parallel.one_way.inbox import Arrived, Inbox
from xcloud.parallel.one_way.plan import ConsumptionPlan, Source, State
from xcloud.rank.one_way.events import ConsumerEvents

POLL_S = 0.2


class Intake:
    """group_rank: of this rank in its cloud. taken: batches by producer, since one last came or
    went."""

    def __init__(
        self,
        plan: ConsumptionPlan,
        inbox: Inbox,
        group_rank: int,
        clock: StepClock,
        events: ConsumerEvents,
    ) -> None:
        self._plan, self._inbox, self._group_rank = plan, inbox, group_rank
        self._clock, self._events = clock, events
        self.taken: Counter[int] = Counter()

    @property
    def _feed(self) -> Feed:
        return self._plan.feed

    @property
    def _redistributes(self) -> bool:
        return self._feed.on_slow == "redistribute"

    @property
    def _producers(self) -> range:
        return range(self._plan.num_producers)

    def is_slow(self, p: int) -> bool:
        return self._inbox.silent_s(p) > self._feed.slow_after_s

    def collect(self, step: int) -> tuple[list[Arrived], Counter[Source]]:
        """This rank's batches of a step, and those that did not come in time."""
        arrived: list[Arrived] = []
        skipped: Counter[Source] = Counter()
        self._look_for_slow(step)
        with self._clock.during("wait"):
            if self._feed.order == "fixed":
                for source in self._plan.step_slots(self._group_rank):
                    one = self._await(step, source)
                    if one is None:
                        skipped[source] += 1
                    else:
                        arrived.append(one)
            else:
                while len(arrived) < self._plan.per_consumer:
                    if (one := self._await_any(step)) is None:
                        break
                    self.taken[one.source.producer] += 1
                    arrived.append(one)
            if not arrived and not skipped:
                self._await_a_change()
        return arrived, skipped

    def await_ordered(self) -> list[int]:
        """All that was ordered, so that it is in this rank's state. Returns producers that are too
        slow to wait for."""
        with self._clock.during("wait"):
            while not self._inbox.is_whole():
                slow = [p for p in self._producers if self.is_slow(p)]
                if slow and self._redistributes:
                    return slow
                self._inbox.wait(POLL_S, self._inbox.is_whole)
        return []

    def flags(self) -> tuple[list[int], list[int], list[int]]:
        """Of each producer whether it is ready, slow, gone; for Round."""
        slow = [self._redistributes and self.is_slow(p) for p in self._producers]
        return (
            [int(self._inbox.is_ready(p)) for p in self._producers],
            [int(is_slow) for is_slow in slow],
            [int(self._inbox.has_ended(p)) for p in self._producers],
        )

    def _await(self, step: int, source: Source) -> Arrived | None:
        """The next batch of a source; None if it is too slow, or gone and used up."""
        p, inbox = source.producer, self._inbox
        while True:
            has_ended = inbox.has_ended(p)  # first: what came before the end is still taken
            if (arrived := inbox.take(source)) is not None:
                return arrived
            if has_ended or self._plan.state[p] is State.SLOW:
                return None
            self._look_for_slow(step)
            if self._redistributes and self.is_slow(p):
                return None
            inbox.wait(POLL_S, lambda: inbox.has(source) or inbox.has_ended(p))

    def _await_any(self, step: int) -> Arrived | None:
        """A batch of whoever has one, nearest to the shares; None if nothing more can be expected
        in this step."""
        while True:
            due = [p for p in self._producers if self._inbox.is_due(p)]
            ready = self._inbox.with_batches()
            chosen = self._plan.choose(ready, self.taken)
            if chosen is not None:
                return self._inbox.take_of(chosen)
            self._look_for_slow(step)
            if self._redistributes:
                due = [p for p in due if not self.is_slow(p)]
            if not due:
                # Nobody else will come: shares do not matter any more.
                return self._inbox.take_of(ready[0]) if ready else None
            self._inbox.wait(POLL_S, lambda: self._inbox.with_batches() != ready)  # noqa: B023

    def _await_a_change(self) -> None:
        """Nobody feeds at the moment: until one is ready, or gone."""
        inbox, states = self._inbox, self._plan.state
        idle = [p for p in self._producers if states[p] in (State.ABSENT, State.SLOW)]
        inbox.wait(POLL_S, lambda: any(inbox.is_ready(p) or inbox.has_ended(p) for p in idle))

    def _look_for_slow(self, step: int) -> None:
        """Where the run waits for a slow producer, say so; elsewhere the plan does."""
        if not self._redistributes:
            active = [p for p in self._plan.active if not self._inbox.has_ended(p)]
            self._events.waits_for(step, [p for p in active if self.is_slow(p)])
