"""What a figure is that a feature adds to a run. It is written down once, in the feature's folder:
which events it is made of, what the summary has of it, what is shown and tracked of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xcloud.record.events import Event

Row = tuple[str, str, str]
"""A line of the closing table: label, value, remark."""


def _nothing(summary: Mapping[str, Any]) -> Iterator[Any]:
    return iter(())


def _nothing_of(events: list[Event]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class FeatureFigure:
    """A figure that a feature adds to those of a run.

    kinds: names of its events; none where its part of the summary is measured after the run.
    in_summary: make its part of the summary of all its events; called where there are any.
    otherwise: its part of the summary without any.
    rows: make its rows of the closing table of a summary, which may lack the figure.
    metrics: the same for a tracker, as (name, value).
    notice: make the line that a user sees at one of its events, as it comes.
    mark: make the word at the event's step in the picture of step times.
    is_of_steps: its events have a step, and count no longer once the run has resumed from an
        earlier one.
    """

    kinds: Sequence[str] = ()
    in_summary: Callable[[list[Event]], dict[str, Any]] = _nothing_of
    otherwise: Mapping[str, Any] = field(default_factory=dict)
    rows: Callable[[Mapping[str, Any]], Iterator[Row]] = _nothing
    metrics: Callable[[Mapping[str, Any]], Iterator[tuple[str, float]]] = _nothing
    notice: Callable[[Event], str] | None = None
    mark: Callable[[Event], str] | None = None
    is_of_steps: bool = False


def _refused_reports(events: list[Event]) -> dict[str, Any]:
    return {"refused_reports": {str(event["sender"]): int(event["num"]) for event in events}}


def _refused_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    if refused := summary.get("refused_reports"):
        senders = ", ".join(f"{num} of rank {rank}" for rank, num in refused.items())
        yield "reports refused", str(sum(refused.values())), f"{senders}; see the notes of the run"


REFUSED_REPORTS = FeatureFigure(
    kinds=("refused_reports",), in_summary=_refused_reports, rows=_refused_rows
)


def _lines(events: list[Event]) -> dict[str, Any]:
    names = ("to", "round_trip_s", "bandwidth_bits_per_s", "num_cuts")
    return {"lines": [{name: event.get(name) for name in names} for event in events]}


def _line_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    for line in summary.get("lines", ()):
        round_trip = "round trip not measured"
        if line["round_trip_s"] is not None:
            round_trip = f"{1e3 * line['round_trip_s']:.3g} ms round trip"
        carried = "never filled"
        if line["bandwidth_bits_per_s"] is not None:
            carried = f"{1e-6 * line['bandwidth_bits_per_s']:.3g} Mbit/s while full"
        yield f"line to {line['to']}", round_trip, f"{carried}; cut {line['num_cuts']} times"


def _line_metrics(summary: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for line in summary.get("lines", ()):
        for name in ("round_trip_s", "bandwidth_bits_per_s", "num_cuts"):
            if line[name] is not None:
                yield f"line.{line['to']}.{name}", float(line[name])


LINES = FeatureFigure(kinds=("line",), in_summary=_lines, rows=_line_rows, metrics=_line_metrics)
"""What rank 0 has measured of its sealed lines."""
