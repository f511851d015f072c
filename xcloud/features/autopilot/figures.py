"""What a run tells of its autopilot's switches."""

from __future__ import annotations

from typing import Any

from xcloud.record.events import Event
from xcloud.record.feature_figures import FeatureFigure


def _switches(events: list[Event]) -> dict[str, Any]:
    names = ("step", "choice", "before")
    return {"autopilot": [{name: event[name] for name in names} for event in events]}


SWITCHES = FeatureFigure(
    kinds=("autopilot",),
    in_summary=_switches,
    notice=lambda event: f"after step {event['step']} {event['choice']}; {event['reason']}",
    mark=lambda event: str(event["choice"]),
    is_of_steps=True,
)
