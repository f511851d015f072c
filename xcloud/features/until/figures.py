"""Steps and seconds to the target of training.until."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xcloud.base.units import human_seconds
from xcloud.record.events import Columns
from xcloud.record.feature_figures import FeatureFigure, Row

STEADY_STEPS = 10
STEADY_WINDOWS = 3


def steady_step_s(step_s: Sequence[float]) -> float | None:
    """Return the mean of the first three windows of ten steps whose means differ by 1 % at most,
    as the makers of Protocol NanoGPT time a run; the median where there are none."""
    whole = STEADY_WINDOWS * STEADY_STEPS
    for first in range(0, len(step_s) - whole + 1, STEADY_STEPS):
        several = step_s[first : first + whole]
        means = [
            statistics.fmean(several[n : n + STEADY_STEPS]) for n in range(0, whole, STEADY_STEPS)
        ]
        # 1 %, as the runs that the board compares with are timed.
        if max(means) <= 1.01 * min(means):
            return statistics.fmean(several)
    return statistics.median(step_s) if step_s else None


def _of_steps(steps: Columns, summary: Mapping[str, Any]) -> dict[str, Any]:
    if (num_steps := summary.get("steps_to_target")) is None:
        return {}
    # Timed as the makers of Protocol NanoGPT do, so that rows of the board compare.
    steady_s = steady_step_s(steps["step_s"][summary["num_warmup_steps_left_out"] :])
    time_s = None if steady_s is None else num_steps * steady_s
    return {"steady_step_s": steady_s, "time_to_target_s": time_s}


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
    of_steps=_of_steps,
    rows=_rows,
    metrics=lambda summary: (
        (name, float(summary[name]))
        for name in ("steps_to_target", "time_to_target_s")
        if summary.get(name) is not None
    ),
    is_of_steps=True,
)
