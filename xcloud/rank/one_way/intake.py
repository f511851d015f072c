"""Which batches a rank of the consumer takes in a step, as planned or as they come, and what it
reports of them and of the producers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from xcloud.comm.step_clock import StepClock
from xcloud.job.one_way import OneWayExperiment
from xcloud.parallel.one_way.inbox import Arrived, Inbox
from xcloud.parallel.one_way.plan import ConsumptionPlan, Round, State
from xcloud.record.one_way_summary import COUNTS, precision_recall
from xcloud.record.reporter import Reporter

POLL_S = 0.2


class Intake:
    """group_rank: of this rank in its cloud. taken: batches by producer, since one last came or
    went."""

    def __init__(
        self, plan: ConsumptionPlan, inbox: Inbox, group_rank: int, clock: StepClock,
        events: ConsumerEvents,
    ) -> None:  # fmt: skip
        self._plan, self._inbox, self._group_rank = plan, inbox, group_rank
        self._clock, self._events = clock, events
        self.taken: Counter[int] = Counter()

    def collect(self, step: int) -> tuple[list[Arrived], Counter[int]]:
        """This rank's batches of a step, and by source those that did not come in time."""
        arrived: list[Arrived] = []
        skipped: Counter[int] = Counter()
        self._look_for_slow(step)
        with self._clock.during("wait"):
            if self._plan.feed.order == "fixed":
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
                    self.taken[one.producer] += 1
                    arrived.append(one)
            if not arrived and not skipped:
                self._await_a_change()
        return arrived, skipped

    def await_ordered(self) -> list[int]:
        """All that was ordered, so that it is in this rank's state. Returns producers that are too
        slow to wait for."""
        with self._clock.during("wait"):
            while due := self._inbox.due:
                if slow := [p for p in due if self._is_left_out(p)]:
                    return slow
                self._inbox.wait(POLL_S, lambda: not self._inbox.due)
        return []

    def look(self, mine: Round) -> None:
        """Which producers are ready, slow, gone."""
        for p in range(len(self._plan.state)):
            mine.ready[p] = self._inbox.is_ready(p)
            mine.slow[p] = self._is_left_out(p)
            mine.dead[p] = bool(self._inbox.end_of(p))

    def _is_slow(self, p: int) -> bool:
        return self._inbox.silent_s(p) > self._plan.feed.slow_after_s

    def _is_left_out(self, p: int) -> bool:
        return self._plan.feed.on_slow == "redistribute" and self._is_slow(p)

    def _await(self, step: int, source: int) -> Arrived | None:
        """The next batch of a source; None if it is too slow, or gone and used up."""
        p, inbox = self._plan.producer_of[source], self._inbox
        while True:
            has_ended = bool(inbox.end_of(p))  # first: what came before the end is still taken
            if (arrived := inbox.next_of(source)) is not None:
                return arrived
            if has_ended or self._plan.state[p] is State.SLOW:
                return None
            self._look_for_slow(step)
            if self._is_left_out(p):
                return None
            inbox.wait(POLL_S, lambda: inbox.has(source) or bool(inbox.end_of(p)))

    def _await_any(self, step: int) -> Arrived | None:
        """A batch of whoever has one, nearest to the shares; None if nothing more can be expected
        in this step."""
        inbox = self._inbox
        while True:
            due, here = inbox.due, inbox.here
            if (chosen := self._plan.choose(here, self.taken)) is not None:
                return inbox.next_from(chosen)
            self._look_for_slow(step)
            if all(self._is_left_out(p) for p in due):
                # Nobody else will come: shares do not matter any more.
                return inbox.next_from(here[0]) if here else None
            inbox.wait(POLL_S, lambda: inbox.here != here)  # noqa: B023

    def _await_a_change(self) -> None:
        """Nobody feeds at the moment: until one is ready, or gone."""
        inbox, states = self._inbox, enumerate(self._plan.state)
        idle = [p for p, state in states if state in (State.ABSENT, State.SLOW)]
        inbox.wait(POLL_S, lambda: any(inbox.is_ready(p) or inbox.end_of(p) for p in idle))

    def _look_for_slow(self, step: int) -> None:
        """Where the run waits for a slow producer, say so; elsewhere the plan does."""
        if self._plan.feed.on_slow == "wait":
            active = [p for p in self._plan.active if not self._inbox.end_of(p)]
            self._events.waits_for(step, {p for p in active if self._is_slow(p)})


class ConsumerEvents:
    """leads: of the first rank, which speaks of the producers and of sums over all ranks."""

    def __init__(self, job: OneWayExperiment, reporter: Reporter, leads: bool) -> None:
        self._feed, self._layout, self._names = job.feed, job.cluster, job.cluster.producers
        self._reporter, self._leads = reporter, leads
        self._other_bytes = 0
        self._noted_slow: set[int] = set()

    def note(self, line: str) -> None:
        if self._leads:
            self._reporter.note(line)

    def producer(self, step: int, p: int, state: State, what: str) -> None:
        if self._leads:
            name = self._names[p]
            self._reporter.event("producer", producer=name, state=state.name.lower(), step=step)
            self._reporter.note(f"producer {name} {what} (step {step})")

    def waits_for(self, step: int, slow: set[int]) -> None:
        """These are slow, and are waited for; said once of each, and when it sends again."""
        what = f"has sent nothing for {self._feed.slow_after_s:g} s; waiting for it"
        for p in sorted(slow - self._noted_slow):
            self.producer(step, p, State.SLOW, f"{what} (feed.on_slow=wait)")
        for p in sorted(self._noted_slow - slow):
            self.producer(step, p, State.ACTIVE, "sends again")
        self._noted_slow = slow

    def changed(
        self, step: int, p: int, before: State, now: State, active: Sequence[int], why_gone: str
    ) -> None:
        """active: the producers that feed from now on. why_gone: of a dead one."""
        others = [self._names[q] for q in active if q != p]
        over = f"; {', '.join(others)} take over its share" if others else "; nobody else feeds"
        if now is State.ACTIVE:
            what = "is ready" if before is State.ABSENT else "has caught up"
        elif now is State.SLOW:
            what = f"has sent nothing for {self._feed.slow_after_s:g} s{over}"
        else:
            what = f"is gone ({why_gone}){over if self._feed.on_dead != 'stop' else ''}"
        self.producer(step, p, now, what)

    def step(
        self,
        step: int,
        clock: StepClock,
        used: Sequence[Arrived],
        skipped: Mapping[int, int],
        other_bytes: int,
        sums: Mapping[str, float],
        is_skipped: bool,
    ) -> None:
        """This rank's event of a step, which ends here. The first rank reports the sums, but not
        of a skipped update, where they need not be numbers.

        other_bytes: sent and received so far besides batches. skipped: by producer.
        """
        taken: Counter[str] = Counter()
        fed_bytes: Counter[str] = Counter()
        line_s: dict[str, float] = {}
        for arrived in used:
            name = self._names[arrived.producer]
            taken[name] += 1
            if self._layout.crosses_clouds:
                fed_bytes[name] += arrived.num_bytes
                wan = self._layout.wan_between(self._layout.ranks_in(name)[0], 0)
                if wan is not None and wan.profile is not None:
                    line_s[name] = line_s.get(name, 0.0) + wan.profile.line_s(arrived.num_bytes)
        event: dict[str, Any] = {
            "step": step,
            "step_s": round(clock.end_step(), 6),
            **{kind: round(seconds, 6) for kind, seconds in clock.seconds.items()},
            "sent": {"forward": fed_bytes.total(), "other": other_bytes - self._other_bytes},
            "taken": taken,
            "skipped": {self._names[p]: number for p, number in skipped.items()},
            "fed_bytes": fed_bytes,
            "line_s": line_s,
        }
        self._other_bytes = other_bytes
        if self._leads:
            event["samples"], event["tokens"] = round(sums["samples"]), round(sums["tokens"])
        if self._leads and not is_skipped:
            event["loss"] = sums["loss_sum"] / sums["weight"]
            event["counts"] = {name: sums[name] for name in COUNTS}
            event["values"] = precision_recall(sums)
        self._reporter.event("step", **event)
