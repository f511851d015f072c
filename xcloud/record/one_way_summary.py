"""Summarise a one-way job: the figures of any run (summary.py), and under "feed" each producer's
contribution and waiting. No torch.

How the figures are made:
- A step is the consumer's; its time and the waiting of the consumer (starvation) are of its ranks.
- A producer's seconds are per consumer step and rank, so that clouds are comparable; its waiting
  is back-pressure: nothing was ordered. They are reported about once a second and attributed to
  the next complete step, so sums are exact and single steps are not.
- `sent.forward` of a step counts the whole frames of the batches it used; `other` is everything
  else that crossed meanwhile: orders, reports.
- `bytes_per_token` = those frames / the tokens in them; null where nothing crosses clouds.
- `finished`: every rank of the producer has finished, so its model is exported.
- precision and recall of replaced tokens are over the last 50 steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from xcloud.cluster.one_way_layout import OneWayLayout
from xcloud.record.events import TIMES, Event, StepCollector, StepTotals, add_to
from xcloud.record.summary import RunStatistics, Summary, ratio

LAST_STEPS = 50
COUNTS = ("true_positives", "false_positives", "false_negatives")


def precision_recall(counts: Mapping[str, float]) -> dict[str, float]:
    """Precision and recall of "replaced"; each is left out if its denominator is 0."""
    hits, wrong, missed = (counts.get(name, 0.0) for name in COUNTS)
    scores = {}
    if hits + wrong:
        scores["precision"] = hits / (hits + wrong)
    if hits + missed:
        scores["recall"] = hits / (hits + missed)
    return scores


class FeedCollector(StepCollector):
    """Steps of the consumer, with the producers' seconds since the step before."""

    def __init__(self, layout: OneWayLayout) -> None:
        super().__init__(layout.num_consumers)
        self.group_sizes = {name: layout.clouds[name].num_ranks for name in layout.producers}
        self.pending: dict[str, dict[str, float]] = {kind: {} for kind in TIMES}

    def feed(self, event: Event) -> StepTotals | None:
        if event["event"] == "resume":  # what was fed to steps that are done again
            self.pending = {kind: {} for kind in TIMES}
        if event["event"] == "fed":
            for kind in TIMES:
                add_to(self.pending[kind], {event["cloud"]: event.get(kind, 0.0)})
        totals = super().feed(event)
        if totals is not None:
            add_to(
                totals.numbers, {("num_ranks", n): size for n, size in self.group_sizes.items()}
            )
            for kind in TIMES:
                # Every producer in every step: all means and curves have the same length.
                fed = dict.fromkeys(self.group_sizes, 0.0) | self.pending[kind]
                totals.numbers |= {(kind, name): seconds for name, seconds in fed.items()}
                self.pending[kind] = {}
        return totals


class OneWayStatistics(RunStatistics):
    """Figures of a run, and what each producer had in it."""

    def __init__(self, layout: OneWayLayout) -> None:
        self._feed = FeedCollector(layout)
        super().__init__(self._feed)
        self._shares = dict(zip(layout.producers, layout.shares, strict=True))
        self._made: Counter[str] = Counter()
        self._loss: dict[str, float | None] = {}
        self._counts: deque[Counter[str]] = deque(maxlen=LAST_STEPS)
        self._seconds: dict[str, dict[str, float]] = {kind: {} for kind in TIMES}

    def feed(self, event: Event) -> StepTotals | None:
        if event["event"] == "fed":
            name = event["cloud"]
            self._made[name] += event["num_batches"]
            self._loss[name] = event.get("loss", self._loss.get(name))  # absent: all were skipped
            for kind in TIMES:
                add_to(self._seconds[kind], {name: event.get(kind, 0.0)})
        totals = super().feed(event)
        if totals is not None:
            self._counts.append(Counter(totals.sums("counts")))
        return totals

    def seconds(self, kind: str, first: int) -> dict[str, float]:
        sums = super().seconds(kind, first)
        if self.num_steps:  # what was reported after the last step counts, too
            add_to(sums, self._feed.pending[kind])
        return sums

    def num_skipped(self) -> int:
        """The consumer's updates; a producer's are its own."""
        skipped = self.events("skipped_update")
        return sum(event["cloud"] not in self._shares for event in skipped)

    def summary(self, **facts: Any) -> Summary:
        summary = super().summary(**facts)
        steps = self.steps
        line_s, elapsed_s = steps.sums("line_s"), sum(steps["step_s"])
        use = {name: ratio(line_s.get(name) or None, elapsed_s) for name in self._shares}
        busiest = max((u for u in use.values() if u is not None), default=None)
        summary["link_utilisation"] = {"forward": busiest, "backward": None}
        taken, skipped = Counter(steps.sums("taken")), Counter(steps.sums("skipped"))
        num_bytes = sum(steps.sums("fed_bytes").values())
        counts = sum(self._counts, Counter[str]())
        scores = precision_recall(counts)
        summary["feed"] = {
            **{name: None for name in ("precision", "recall")},
            **{name: round(value, 4) for name, value in scores.items()},
            "bytes_per_token": ratio(num_bytes or None, steps.sum("tokens"), 4),
            "num_batches": int(taken.total()),
            "num_skipped": int(skipped.total()),
            "producers": {
                name: {
                    "share": round(share, 4),
                    "share_taken": ratio(taken[name] or None, taken.total(), 4),
                    "num_batches": int(taken[name]),
                    "num_skipped": int(skipped[name]),
                    "link_utilisation": use[name],
                    **self._producer(name),
                }
                for name, share in self._shares.items()
            },
        }
        return summary

    def _producer(self, name: str) -> dict[str, Any]:
        made = self._made[name]
        states = [e["state"] for e in self.events("producer") if e["producer"] == name]
        own = Counter(
            event["event"]
            for event in self.events("skipped_update", "finish")
            if event["cloud"] == name
        )
        return {
            "num_made": made,
            "num_skipped_updates": own["skipped_update"],
            "loss": self._loss.get(name),
            **{
                f"{kind}_per_batch": ratio(self._seconds[kind].get(name) or None, made, 6)
                for kind in ("compute_s", "waiting_s")
            },
            "state": states[-1] if states else "absent",
            "num_slow": states.count("slow"),
            "num_dead": states.count("dead"),
            "finished": own["finish"] == self._feed.group_sizes[name],
        }
