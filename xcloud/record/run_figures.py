"""The figures that every run has beside those of its steps. A new one is a row of OF_EVERY_RUN:
summary, closing table, tracker and tables of sweeps follow from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xcloud.base.units import human_bytes, human_seconds
from xcloud.record.evaluation import EVALUATION_FIGURE
from xcloud.record.events import Event
from xcloud.record.feature_figures import FeatureFigure, Row


def _refused_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    if refused := summary.get("refused_reports"):
        senders = ", ".join(f"{num} of rank {rank}" for rank, num in refused.items())
        yield "reports refused", str(sum(refused.values())), f"{senders}; see the notes of the run"


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


OF_EVERY_RUN: Sequence[FeatureFigure] = (
    # What rank 0 has measured of its sealed lines.
    FeatureFigure(kinds=("line",), in_summary=_lines, rows=_line_rows, metrics=_line_metrics),
    FeatureFigure(
        kinds=("refused_reports",),
        in_summary=lambda events: {
            "refused_reports": {str(event["sender"]): int(event["num"]) for event in events}
        },
        rows=_refused_rows,
    ),
    EVALUATION_FIGURE,
)
