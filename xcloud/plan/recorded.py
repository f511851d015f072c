"""What the plan of a run predicted, in the files of the run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xcloud.record.timeline import Box, Flight, Lane, Timeline, write_trace

PLAN_FILE = "plan.json"
PREDICTED_FILE = "predicted.json"  # the step that a plan foresaw, as a trace


def write_predicted(run_dir: Path, timeline: Timeline, strategy: str) -> None:
    """The step of a plan, as a trace for Perfetto that holds the timeline itself as well."""
    lanes = [asdict(lane) | {"boxes": lane.boxes} for lane in timeline.lanes]
    flights = [[*between, some] for between, some in timeline.flights.items()]
    own = {"lanes": lanes, "flights": flights}
    write_trace(run_dir / PREDICTED_FILE, timeline, {"plan": strategy, "timeline": own})


def read_predicted(run_dir: Path) -> Timeline | None:
    """None for a run without a predicted step."""
    path = run_dir / PREDICTED_FILE
    if not path.exists():
        return None
    about = json.loads(path.read_text(encoding="utf-8"))["otherData"]
    own = about["timeline"]
    lanes = (lane | {"boxes": tuple(Box(*box) for box in lane["boxes"])} for lane in own["lanes"])
    return Timeline(
        about["step"],
        tuple(Lane(**lane) for lane in lanes),
        {
            (here, there): tuple(Flight(*one) for one in some)
            for here, there, some in own["flights"]
        },
        about["clocks"],
    )


def predicted_of(run_dir: Path) -> dict[str, Any]:
    """For the summary of a run: what its plan predicted; empty for a run without one."""
    try:
        found = json.loads((run_dir / PLAN_FILE).read_text(encoding="utf-8"))
        step_s = float(found["predicted_step_time_s"])
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    told: dict[str, Any] = {"predicted_step_time_s": round(step_s, 6)}
    if epochs := found["chosen"].get("over_epochs"):
        told["predicted_over_epochs"] = {name: round(epochs[name], 6) for name in epochs}
    return told
