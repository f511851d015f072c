"""Figures that features add to a run. Each is written down once: which events it is made of, what
the summary has of it, its rows in the closing table, and its values for a tracker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xcloud.base.units import human_number
from xcloud.record.events import Event, body

Row = tuple[str, str, str]
"""A line of the closing table: label, value, remark."""


def _nothing(summary: Mapping[str, Any]) -> Iterator[Any]:
    return iter(())


@dataclass(frozen=True)
class FeatureFigure:
    """A figure that a feature adds to those of a run.

    kinds: names of its events.
    in_summary: make its part of the summary of all its events; called where there are any.
    rows: make its rows of the closing table of a summary, which may lack the figure.
    metrics: the same for a tracker, as (name, value).
    is_of_steps: its events have a step, and count no longer once the run has resumed from an
        earlier one.
    """

    kinds: Sequence[str]
    in_summary: Callable[[list[Event]], dict[str, Any]]
    rows: Callable[[Mapping[str, Any]], Iterator[Row]] = _nothing
    metrics: Callable[[Mapping[str, Any]], Iterator[tuple[str, float]]] = _nothing
    is_of_steps: bool = False


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


def _switches(events: list[Event]) -> dict[str, Any]:
    names = ("step", "choice", "before")
    return {"autopilot": [{name: event[name] for name in names} for event in events]}


def _privacy(events: list[Event]) -> dict[str, Any]:
    return {"privacy": body(events[-1])}


def _privacy_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    if (privacy := summary.get("privacy")) is not None:
        remark = f"by {privacy['unit']}, delta {privacy['delta']:g}"
        if (sampled := privacy["epsilon_if_sampled"]) is not None:
            remark += f"; {sampled:.2f} if batches were random and secret"
        yield "privacy, epsilon", human_number(privacy["epsilon"], form=".2f"), remark


def _privacy_metrics(summary: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    epsilon = (summary.get("privacy") or {}).get("epsilon")
    if epsilon is not None:
        yield "epsilon", epsilon


def _refused_reports(events: list[Event]) -> dict[str, Any]:
    return {"refused_reports": {str(event["sender"]): int(event["num"]) for event in events}}


def _refused_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    if refused := summary.get("refused_reports"):
        senders = ", ".join(f"{num} of rank {rank}" for rank, num in refused.items())
        yield "reports refused", str(sum(refused.values())), f"{senders}; see the notes of the run"


FEATURE_FIGURES = (
    FeatureFigure(
        kinds=("merge", "partial_merge", "absence"),
        in_summary=_merges,
        rows=_merge_rows,
        is_of_steps=True,
    ),
    FeatureFigure(kinds=("autopilot",), in_summary=_switches, is_of_steps=True),
    FeatureFigure(
        kinds=("privacy",), in_summary=_privacy, rows=_privacy_rows, metrics=_privacy_metrics
    ),
    FeatureFigure(kinds=("refused_reports",), in_summary=_refused_reports, rows=_refused_rows),
)
