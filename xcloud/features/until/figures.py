"""Steps and seconds to the target of training.until."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from xcloud.base.units import human_seconds
from xcloud.record.feature_figures import FeatureFigure, Row


def _rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    if (steps := summary.get("steps_to_target")) is None:
        return
    remark = str(summary["target"])
    if (steady_s := summary.get("steady_step_s")) is not None:
        took_s = human_seconds(summary["time_to_target_s"])
        remark += f": {took_s} at a steady {human_seconds(steady_s)} a step"
    yield "steps to target", str(steps), remark


TARGET = FeatureFigure(
    kinds=("target",),
    in_summary=lambda events: {
        "target": events[-1]["target"],
        "steps_to_target": int(events[-1]["step"]),
    },
    rows=_rows,
    metrics=lambda summary: (
        (name, float(summary[name]))
        for name in ("steps_to_target", "time_to_target_s")
        if summary.get(name) is not None
    ),
    is_of_steps=True,
)
