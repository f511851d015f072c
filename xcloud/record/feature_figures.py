"""What a figure of a run is. It is written down once: which events or steps it is made of, what
the summary has of it, what is shown and tracked of it. Those of a feature stand in its folder,
those that every run has in run_figures.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xcloud.record.events import Columns, Event

Row = tuple[str, str, str]
"""A line of the closing table: label, value, remark."""


@dataclass(frozen=True)
class FeatureFigure:
    """A figure of a run, or a few that belong together.

    kinds: names of its events; none where its part of the summary is measured after the run.
    in_summary: make its part of the summary of all its events; called where there are any.
    otherwise: its part of the summary without any.
    of_steps: make its part of the summary of the numbers of all steps, and of what the summary
        has up to here.
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
    in_summary: Callable[[list[Event]], dict[str, Any]] = lambda events: {}
    otherwise: Mapping[str, Any] = field(default_factory=dict)
    of_steps: Callable[[Columns, Mapping[str, Any]], dict[str, Any]] = lambda steps, summary: {}
    rows: Callable[[Mapping[str, Any]], Iterator[Row]] = lambda summary: iter(())
    metrics: Callable[[Mapping[str, Any]], Iterator[tuple[str, float]]] = lambda summary: iter(())
    notice: Callable[[Event], str] | None = None
    notified: Sequence[str] = ()
    mark: Callable[[Event], str] | None = None
    is_of_steps: bool = False
    reported: Mapping[str, str] = field(default_factory=dict)
