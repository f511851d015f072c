"""The rows of this feature in tables that tests share (feature_rows.py)."""

from __future__ import annotations

from tests.feature_rows import FeatureRows, Shown, Told
from xcloud.features.until.figures import TARGET

ROWS = FeatureRows(
    figure=TARGET,
    shown=[
        Shown(
            {"target": "bleu >= 40", "steps_to_target": 1500, "steady_step_s": 0.4,
             "time_to_target_s": 600.0},
            [("steps to target", "1500", "bleu >= 40: 600 s at a steady 400 ms a step")],
            {"steps_to_target": 1500.0, "time_to_target_s": 600.0},
        ),
        Shown(
            {"target": "bleu >= 30", "steps_to_target": 40, "steady_step_s": 0.5,
             "time_to_target_s": 20.0},
            [("steps to target", "40", "bleu >= 30: 20.0 s at a steady 500 ms a step")],
            {"steps_to_target": 40.0, "time_to_target_s": 20.0},
        ),
        Shown({"target": "bleu >= 30", "steps_to_target": None}),
    ],
    told=[
        Told(
            [{"event": "target", "target": "bleu >= 40", "step": 1500.0}],
            {"target": "bleu >= 40", "steps_to_target": 1500},
        ),
    ],
    of_rank_0={"target": "step target"},
    settings={
        "xcloud.features.until.settings.Until": {
            "metric": "a text = ",
            "at_most": "a number or null = null",
            "at_least": "a number or null = null",
            "every": "a whole number >= 1 = 25",
        },
        "xcloud.pipeline.settings.Training": {"until": "an Until or null = null"},
    },
)  # fmt: skip
