"""What a run used, in all its attempts: bytes that left each cloud, hours of its ranks, and with
prices the money. Steps that were repeated after a restart count as often as they were made."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from xcloud.base.units import human_bytes, human_duration
from xcloud.layout import Price
from xcloud.record.events import MAX_TIME_S, Event
from xcloud.record.feature_figures import FeatureFigure, Row

HOUR_S = 3600.0
GB = 1e9


@dataclass
class Usage:
    """Feed it every event of a run, in order and once.

    prices: those of clouds that have any.
    """

    prices: Mapping[str, Price]
    _egress_bytes: Counter[str] = field(default_factory=Counter)
    _rank_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _last_at_s: dict[int, float] = field(default_factory=dict)  # of the attempt of each rank

    def feed(self, event: Event) -> None:
        """Take in an event. A rank's time runs from where it begins to load to its last event."""
        rank = event.get("rank")
        cloud = event.get("cloud")
        if rank is None or cloud is None:
            return
        at_s = event.get("t")
        # A clock that is far off would make years of hours.
        if at_s is not None and abs(at_s) < MAX_TIME_S:
            is_first = event["event"] == "phase" and event.get("name") == "loading"
            # An attempt begins anew with loading: the time between two attempts is paid by nobody.
            since_s = at_s if is_first else self._last_at_s.get(rank, at_s)
            self._rank_s[cloud] += max(0.0, at_s - since_s)
            # Events of two threads of a rank may come in the other order.
            self._last_at_s[rank] = max(at_s, since_s)
        if event["event"] == "step":
            self._egress_bytes[cloud] += sum(event.get("sent", {}).values())
            # What a line sent once more after a cut leaves the cloud again.
            self._egress_bytes[cloud] += event.get("sent_again", 0)
            # Producers report no steps: what they sent is told by whom they feed.
            for producer, num_bytes in event.get("fed_bytes", {}).items():
                self._egress_bytes[producer] += num_bytes
        elif event["event"] == "sent_outside":
            self._egress_bytes[cloud] += event["num_bytes"]

    def summary(self) -> dict[str, Any]:
        """Return its part of the summary."""
        clouds = list(dict.fromkeys([*self._rank_s, *self._egress_bytes]))
        egress_bytes = {cloud: round(self._egress_bytes[cloud]) for cloud in clouds}
        rank_hours = {cloud: self._rank_s[cloud] / HOUR_S for cloud in clouds}
        found: dict[str, Any] = {"egress_bytes": egress_bytes, "rank_hours": rank_hours}
        # A cost of clouds without a price would be too low without a word.
        priced = [cloud for cloud in clouds if cloud in self.prices]
        if priced:
            compute = {name: self.prices[name].hour * rank_hours[name] for name in priced}
            egress = {name: self.prices[name].gb_out * egress_bytes[name] / GB for name in priced}
            total = sum(compute.values()) + sum(egress.values())
            found["cost"] = {"compute": compute, "egress": egress, "total": total}
        return found


def _rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    for cloud, num_bytes in summary.get("egress_bytes", {}).items():
        seconds = HOUR_S * summary["rank_hours"][cloud]
        remark = f"in all attempts; its ranks ran {human_duration(seconds)} together"
        yield f"left {cloud}", human_bytes(num_bytes), remark
    if cost := summary.get("cost"):
        parts = [
            f"{cloud} {cost['compute'][cloud]:.3g} for ranks and {cost['egress'][cloud]:.3g} for "
            "bytes"
            for cloud in cost["compute"]
        ]
        yield "cost", f"{cost['total']:.3g}", "; ".join(parts)


def _metrics(summary: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    if "egress_bytes" in summary:
        yield "egress_bytes", sum(summary["egress_bytes"].values())
        yield "rank_hours", sum(summary["rank_hours"].values())
    if "cost" in summary:
        yield "cost", summary["cost"]["total"]


USAGE = FeatureFigure(rows=_rows, metrics=_metrics)
