"""What a figure is that a feature adds to a run. It is written down once, in the feature's folder:
which events it is made of, what the summary has of it, what is shown and tracked of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xcloud.base.units import human_bytes, human_seconds
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
    notified: fields of one of its events that the user's own command is given (launch.on_event);
        none: it is not called.
    mark: make the word at the event's step in the picture of step times.
    is_of_steps: its events have a step, and count no longer once the run has resumed from an
        earlier one.
    reported: fields of its events that ranks other than 0 report, by kind, as intake.py writes
        them.
    """

    kinds: Sequence[str] = ()
    in_summary: Callable[[list[Event]], dict[str, Any]] = _nothing_of
    otherwise: Mapping[str, Any] = field(default_factory=dict)
    rows: Callable[[Mapping[str, Any]], Iterator[Row]] = _nothing
    metrics: Callable[[Mapping[str, Any]], Iterator[tuple[str, float]]] = _nothing
    notice: Callable[[Event], str] | None = None
    notified: Sequence[str] = ()
    mark: Callable[[Event], str] | None = None
    is_of_steps: bool = False
    reported: Mapping[str, str] = field(default_factory=dict)


def _refused_reports(events: list[Event]) -> dict[str, Any]:
    return {"refused_reports": {str(event["sender"]): int(event["num"]) for event in events}}


def _refused_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    if refused := summary.get("refused_reports"):
        senders = ", ".join(f"{num} of rank {rank}" for rank, num in refused.items())
        yield "reports refused", str(sum(refused.values())), f"{senders}; see the notes of the run"


REFUSED_REPORTS = FeatureFigure(
    kinds=("refused_reports",), in_summary=_refused_reports, rows=_refused_rows
)


_COUNTED = ("num_cuts", "num_outages", "outage_s", "sent_again_bytes")
_MEASURED = ("round_trip_s", "bandwidth_bits_per_s")


def _lines(events: list[Event]) -> dict[str, Any]:
    """Return one entry for each peer: counts of all attempts, and what was measured last."""
    lines: dict[str, dict[str, Any]] = {}
    for event in events:
        line = lines.setdefault(str(event["to"]), {"to": event["to"], **dict.fromkeys(_MEASURED)})
        for name in _MEASURED:
            if event.get(name) is not None:
                line[name] = event[name]
        for name in _COUNTED:
            if event.get(name) is not None:
                line[name] = line.get(name, 0) + event[name]
    return {"lines": [*lines.values()]}


def _line_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    for line in summary.get("lines", ()):
        round_trip = "round trip not measured"
        if line["round_trip_s"] is not None:
            round_trip = f"{1e3 * line['round_trip_s']:.3g} ms round trip"
        carried = "never filled"
        if line["bandwidth_bits_per_s"] is not None:
            carried = f"{1e-6 * line['bandwidth_bits_per_s']:.3g} Mbit/s while full"
        remarks = [carried, _outages(line)]
        if line.get("sent_again_bytes"):
            again = human_bytes(line["sent_again_bytes"])
            remarks.append(f"sent {again} again after cuts, which the bytes above leave out")
        yield f"line to {line['to']}", round_trip, "; ".join(remarks)


def _outages(line: Mapping[str, Any]) -> str:
    """Return how often a line was down and for how long, in words."""
    num = line.get("num_outages")
    if num is None:  # a run of an earlier release, which counted connections
        return f"{line['num_cuts']} connections cut"
    if num == 0:
        return "never down"
    times = "once" if num == 1 else f"{num} times"
    return f"down {times}, {human_seconds(line['outage_s'])}"


def _line_metrics(summary: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for line in summary.get("lines", ()):
        for name in (*_MEASURED, *_COUNTED):
            if line.get(name) is not None:
                yield f"line.{line['to']}.{name}", float(line[name])


LINES = FeatureFigure(kinds=("line",), in_summary=_lines, rows=_line_rows, metrics=_line_metrics)
"""What rank 0 has measured of its sealed lines."""
