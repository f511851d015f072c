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

from xcloud.record.events import TIMES, Event, StepTotals, add_to
from xcloud.record.summary import RunStatistics, Summary

LAST_STEPS = 50
COUNTS = ("true_positives", "false_positives", "false_negatives")


def precision_recall(counts: Mapping[str, float]) -> dict[str, float]:
    """Precision and recall of "replaced"; each is left out if its denominator is 0."""
    hits, wrong, missed = (counts.get(name, 0.0) for name in COUNTS)
    found = {}
    if hits + wrong:
        found["precision"] = hits / (hits + wrong)
    if hits + missed:
        found["recall"] = hits / (hits + missed)
    return found


class OneWayStatistics(RunStatistics):
    """shares, num_lanes: of each producer, by its cloud."""

    def __init__(
        self,
        num_consumers: int,
        shares: Mapping[str, float],
        num_lanes: Mapping[str, int],
    ) -> None:
        super().__init__(num_consumers)
        self._shares, self._num_lanes = dict(shares), dict(num_lanes)
        self._taken: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._line_s: Counter[str] = Counter()
        self._tokens = 0.0
        self._step_time_s = 0.0
        self._made: Counter[str] = Counter()
        self._loss: dict[str, float | None] = {}
        self._skipped_updates: Counter[str] = Counter()
        self._seconds: dict[str, dict[str, float]] = {kind: {} for kind in TIMES}
        self._pending: dict[str, dict[str, float]] = {kind: {} for kind in TIMES}
        self._states: dict[str, Counter[str]] = {name: Counter() for name in shares}
        self._last_state: dict[str, str] = {}
        self._num_finished: Counter[str] = Counter()
        self._counts: deque[dict[str, float]] = deque(maxlen=LAST_STEPS)

    def feed(self, event: Event) -> StepTotals | None:
        kind = event["event"]
        if kind == "step":
            self._taken.update(event["taken"])
            self._skipped.update(event["skipped"])
            self._bytes.update(event["fed_bytes"])
            self._line_s.update(event["line_s"])
            if "counts" in event:
                self._counts.append(event["counts"])
        elif kind == "fed":
            name = event["cloud"]
            self._made[name] += event["num_batches"]
            self._loss[name] = event.get("loss", self._loss.get(name))  # absent: all were skipped
            for time in TIMES:
                add_to(self._pending[time], {name: event.get(time, 0.0)})
                add_to(self._seconds[time], {name: event.get(time, 0.0)})
        elif kind == "producer":
            self._states[event["producer"]][event["state"]] += 1
            self._last_state[event["producer"]] = event["state"]
        elif kind == "finish":
            self._num_finished[event["cloud"]] += 1
        return super().feed(event)

    def _count_skipped(self, event: Event) -> None:
        """Count a producer's update for the producer, and the consumer's for the run."""
        if event["cloud"] in self._num_lanes:
            self._skipped_updates[event["cloud"]] += 1
        else:
            super()._count_skipped(event)

    def _count(self, totals: StepTotals) -> None:
        # Every producer in every step, so that all means and curves have the same length.
        for name, lanes in self._num_lanes.items():
            totals.num_ranks[name] = lanes
            for kind in TIMES:
                seconds = self._pending[kind].pop(name, 0.0)
                totals.seconds.setdefault(kind, {})[name] = seconds
        self._tokens += totals.tokens
        self._step_time_s += totals.step_s
        super()._count(totals)

    def summary(self, **known: Any) -> Summary:
        if self.num_steps:  # reported after the last step
            for kind in TIMES:
                add_to(self._rest.seconds[kind], self._pending[kind])
                self._pending[kind].clear()
        summary = super().summary(**known)
        use = {n: _ratio(self._line_s[n], self._step_time_s) for n in self._shares}
        busiest = max((u for u in use.values() if u is not None), default=None)
        summary["link_utilisation"] = {"forward": busiest, "backward": None}
        consumed = sum(self._bytes.values())
        batches = sum(self._taken.values())
        sums: Counter[str] = Counter()
        for counts in self._counts:
            sums.update(counts)
        summary["feed"] = {
            **{name: None for name in ("precision", "recall")},
            **{name: round(value, 4) for name, value in precision_recall(sums).items()},
            "bytes_per_token": _ratio(consumed, self._tokens, 4),
            "num_batches": batches,
            "num_skipped": sum(self._skipped.values()),
            "producers": {
                name: {
                    "share": round(share, 4),
                    "share_taken": _ratio(self._taken[name], batches, 4),
                    "num_batches": self._taken[name],
                    "num_made": self._made[name],
                    "num_skipped": self._skipped[name],
                    "num_skipped_updates": self._skipped_updates[name],
                    "loss": self._loss.get(name),
                    "compute_s_per_batch": self._per_batch("compute_s", name),
                    "waiting_s_per_batch": self._per_batch("waiting_s", name),
                    "link_utilisation": use[name],
                    "state": self._last_state.get(name, "absent"),
                    "num_slow": self._states[name]["slow"],
                    "num_dead": self._states[name]["dead"],
                    "finished": self._num_finished[name] == self._num_lanes[name],
                }
                for name, share in self._shares.items()
            },
        }
        return summary

    def _per_batch(self, kind: str, name: str) -> float | None:
        return _ratio(self._seconds[kind].get(name, 0.0), self._made[name], 6)


def _ratio(above: float, below: float, digits: int = 3) -> float | None:
    return round(above / below, digits) if above and below else None
