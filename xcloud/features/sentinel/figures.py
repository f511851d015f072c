"""What a run tells of sudden departures of what arrives from other clouds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from xcloud.record.events import Event
from xcloud.record.feature_figures import FeatureFigure, Row

_TOLD = ("step", "sender", "peer", "stream", "statistic", "value", "usual", "deviation")


def _rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    if departures := summary.get("departures"):
        first = departures[0]
        remark = f"first: {first['statistic']} of {first['peer']} in step {first['step']}"
        yield "sudden departures", str(len(departures)), f"{remark}; docs/security.md"


def _metrics(summary: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    if departures := summary.get("departures"):
        yield "departures", float(len(departures))


def _notice(event: Event) -> str:
    usual = f"{event['usual']:.3g} ± {event['deviation']:.2g}"
    return (
        f"step {event['step']}: what rank {event['sender']} ({event['peer']}) sends, "
        f"{event['stream']}, has changed suddenly: {event['statistic']} {event['value']:.3g}, "
        f"usual is {usual}"
    )


DEPARTURES = FeatureFigure(
    kinds=("departure",),
    in_summary=lambda events: {"departures": [{n: one[n] for n in _TOLD} for one in events]},
    rows=_rows,
    metrics=_metrics,
    notice=_notice,
    notified=("peer", "sender", "stream", "statistic", "step"),
    is_of_steps=True,
    reported={
        "departure": "step:whole sender:whole peer:text stream:text statistic:text value:figure "
        "usual:figure deviation:number"
    },
)
