"""Which batches a rank of the consumer takes in a step, as planned or as they come, and what it
reports of them and of the producers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xcloud.comm.step_clock import StepClock
from xcloud.contracts.one_way_parts import precision_recall
from xcloud.job.one_way import OneWayExperiment
from xcloud.parallel.one_way import ConsumptionPlan, Round, State
from xcloud.rank.one_way.inbox import Arrived, Inbox
from xcloud.record.events import add_to
from xcloud.record.reporter import Reporter

POLL_S = 0.2


@dataclass
class Intake:
    """Of one rank of the consumer. taken: batches by producer, since one last came or went. used,
    skipped: of this step so far, batches, and by name of the producer how many it did without.

    The first rank speaks of the producers, and of sums over all ranks.
    """

    job: OneWayExperiment
    reporter: Reporter
    plan: ConsumptionPlan
    inbox: Inbox
    group_rank: int
    clock: StepClock
    taken: Counter[int] = field(default_factory=Counter)
    used: list[Arrived] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    _other_bytes: int = 0
    _noted_slow: set[int] = field(default_factory=set)

    def collect(self, step: int, mine: Round) -> list[Arrived]:
        """Of this rank, for a step; noted in `mine` with those that did not come in time."""
        arrived: list[Arrived] = []
        late: Counter[int] = Counter()  # by source
        self._look_for_slow(step)
        with self.clock.during("wait"):
            if self.plan.feed.order == "fixed":
                for source in self.plan.step_slots(self.group_rank):
                    if (one := self._await(step, source)) is None:
                        late[source] += 1
                    else:
                        arrived.append(one)
            else:
                while len(arrived) < self.plan.per_consumer:
                    if (one := self._await_any(step)) is None:
                        break
                    self.taken[one.producer] += 1
                    arrived.append(one)
            if not arrived and not late:
                self._await_a_change()
        for one in arrived:
            mine.consumed[one.source, self.group_rank] += 1
        for source, number in late.items():
            mine.skipped[source, self.group_rank] = number
            self.skipped[self._names[self.plan.producer_of[source]]] += number
        self.used += arrived
        return arrived

    def await_ordered(self) -> list[int]:
        """All that was ordered, so that it is in this rank's state. Returns producers that are too
        slow to wait for."""
        with self.clock.during("wait"):
            while due := self.inbox.due:
                if slow := [p for p in due if self._is_left_out(p)]:
                    return slow
                self.inbox.wait(POLL_S, lambda: not self.inbox.due)
        return []

    def look(self, mine: Round) -> None:
        """Which producers are ready, slow, gone."""
        for p in range(len(self.plan.state)):
            mine.ready[p] = self.inbox.is_ready(p)
            mine.slow[p] = self._is_left_out(p)
            mine.dead[p] = bool(self.inbox.end_of(p))

    def _is_slow(self, p: int) -> bool:
        return self.inbox.silent_s(p) > self.plan.feed.slow_after_s

    def _is_left_out(self, p: int) -> bool:
        return self.plan.feed.on_slow == "redistribute" and self._is_slow(p)

    def _await(self, step: int, source: int) -> Arrived | None:
        """The next batch of a source; None if it is too slow, or gone and used up."""
        p, inbox = self.plan.producer_of[source], self.inbox
        while True:
            has_ended = bool(inbox.end_of(p))  # first: what came before the end is still taken
            if (arrived := inbox.next_of(source)) is not None:
                return arrived
            if has_ended or self.plan.state[p] is State.SLOW:
                return None
            self._look_for_slow(step)
            if self._is_left_out(p):
                return None
            inbox.wait(POLL_S, lambda: inbox.has(source) or bool(inbox.end_of(p)))

    def _await_any(self, step: int) -> Arrived | None:
        """A batch of whoever has one, nearest to the shares; None if nothing more can be expected
        in this step."""
        inbox = self.inbox
        while True:
            due, here = inbox.due, inbox.here
            if (chosen := self.plan.choose(here, self.taken)) is not None:
                return inbox.next_from(chosen)
            self._look_for_slow(step)
            if all(self._is_left_out(p) for p in due):
                # Nobody else will come: shares do not matter any more.
                return inbox.next_from(here[0]) if here else None
            inbox.wait(POLL_S, lambda: inbox.here != here)  # noqa: B023

    def _await_a_change(self) -> None:
        """Nobody feeds at the moment: until one is ready, or gone."""
        inbox, states = self.inbox, enumerate(self.plan.state)
        idle = [p for p, state in states if state in (State.ABSENT, State.SLOW)]
        inbox.wait(POLL_S, lambda: any(inbox.is_ready(p) or inbox.end_of(p) for p in idle))

    def _look_for_slow(self, step: int) -> None:
        """Where the run waits for a slow producer, say so once, and when it sends again; elsewhere
        the plan does."""
        if self.plan.feed.on_slow != "wait":
            return
        active = [p for p in self.plan.active if not self.inbox.end_of(p)]
        slow = {p for p in active if self._is_slow(p)}
        for p in sorted(slow - self._noted_slow):
            self.producer(
                step, p, State.SLOW, f"{self._silent}; waiting for it (feed.on_slow=wait)"
            )
        for p in sorted(self._noted_slow - slow):
            self.producer(step, p, State.ACTIVE, "sends again")
        self._noted_slow = slow

    # --- what this rank reports
    @property
    def _names(self) -> Sequence[str]:
        return self.job.cluster.producers

    @property
    def _silent(self) -> str:
        return f"has sent nothing for {self.job.feed.slow_after_s:g} s"

    def note(self, line: str) -> None:
        if self.group_rank == 0:
            self.reporter.note(line)

    def producer(self, step: int, p: int, state: State, what: str) -> None:
        if self.group_rank == 0:
            name = self._names[p]
            self.reporter.event("producer", producer=name, state=state.name.lower(), step=step)
            self.reporter.note(f"producer {name} {what} (step {step})")

    def changed(self, step: int, p: int, before: State, now: State, why_gone: str) -> None:
        """why_gone: of a dead one."""
        others = [self._names[q] for q in self.plan.active if q != p]
        over = f"; {', '.join(others)} take over its share" if others else "; nobody else feeds"
        if now is State.ACTIVE:
            what = "is ready" if before is State.ABSENT else "has caught up"
        elif now is State.SLOW:
            what = self._silent + over
        else:
            what = f"is gone ({why_gone}){over if self.job.feed.on_dead != 'stop' else ''}"
        self.producer(step, p, now, what)

    def end_step(
        self, step: int, other_bytes: int, sums: Mapping[str, float], is_skipped: bool
    ) -> None:
        """Report it. sums: over all ranks; of a skipped update they need not be numbers.
        other_bytes: sent and received so far besides batches."""
        taken: Counter[str] = Counter()
        fed_bytes: Counter[str] = Counter()
        line_s: dict[str, float] = {}
        layout = self.job.cluster
        for arrived in self.used:
            name = self._names[arrived.producer]
            taken[name] += 1
            if layout.crosses_clouds:
                fed_bytes[name] += arrived.num_bytes
                wan = layout.wan_between(layout.ranks_in(name)[0], 0)
                if wan is not None and wan.profile is not None:
                    add_to(line_s, {name: wan.profile.line_s(arrived.num_bytes)})
        event: dict[str, Any] = {
            "step": step,
            "step_s": round(self.clock.end_step(), 6),
            **{kind: round(seconds, 6) for kind, seconds in self.clock.seconds.items()},
            "sent": {"forward": fed_bytes.total(), "other": other_bytes - self._other_bytes},
            "taken": taken,
            "skipped": self.skipped,
            "fed_bytes": fed_bytes,
            "line_s": line_s,
        }
        if self.group_rank == 0:
            event["samples"], event["tokens"] = round(sums["samples"]), round(sums["tokens"])
            if not is_skipped:
                event["loss"] = sums["loss_sum"] / sums["weight"]
                event["values"] = precision_recall(sums)
        self.reporter.event("step", **event)
        self._other_bytes, self.used, self.skipped = other_bytes, [], Counter()
