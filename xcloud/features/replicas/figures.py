"""The metrics of the merges of a run's replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from xcloud.record.events import Event
from xcloud.record.feature_figures import FeatureFigure, Row

MERGED = {
    "merge": "whole",
    "partial_merge": "partial",
    "late": "clouds_late",
    "left": "clouds_lost",
    "back": "clouds_back",
}
"""What is counted of merges: an event, or what an absence is, and its name in the summary."""


def _merges(events: list[Event]) -> dict[str, Any]:
    found = Counter(event.get("what", event["event"]) for event in events)
    return {"merges": {name: found[what] for what, name in MERGED.items()}}


def _merge_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    if merges := summary.get("merges"):
        counts = ", ".join(
            f"{merges[f'clouds_{what}']} {what}" for what in ("late", "lost", "back")
        )
        remark = f"{merges['partial']} without a cloud; clouds: {counts}"
        yield "merges", str(merges["whole"] + merges["partial"]), remark


MERGES = FeatureFigure(
    kinds=("merge", "partial_merge", "absence"),
    in_summary=_merges,
    rows=_merge_rows,
    is_of_steps=True,
)
