"""What a rank of the consumer reports of its steps and of the producers: events, and lines for
the user. No decisions here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from xcloud.comm.step_clock import StepClock
from xcloud.job.one_way import OneWayExperiment
from xcloud.parallel.one_way.inbox import Arrived
from xcloud.parallel.one_way.plan import State
from xcloud.record.one_way_summary import COUNTS, precision_recall
from xcloud.record.reporter import Reporter


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
