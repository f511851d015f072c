"""What a run tells of its autopilot's switches."""

from __future__ import annotations

from xcloud.record.feature_figures import FeatureFigure

_TOLD = ("step", "choice", "before")

SWITCHES = FeatureFigure(
    kinds=("autopilot",),
    in_summary=lambda events: {"autopilot": [{n: one[n] for n in _TOLD} for one in events]},
    notice=lambda event: f"after step {event['step']} {event['choice']}; {event['reason']}",
    mark=lambda event: str(event["choice"]),
    is_of_steps=True,
)
