"""The rows of this feature in tables that tests share (feature_rows.py)."""

from __future__ import annotations

from tests.feature_rows import FeatureRows, Shown
from xcloud.features.leak_meter.figures import LEAKS

ROWS = FeatureRows(
    figure=LEAKS,
    shown=[
        Shown(
            {"label_leak_auc": 0.75, "label_leak_auc_activation": 0.5, "token_recovery": 0.5,
             "token_recovery_baseline": 0.125, "averaging_token_recovery": 0.25,
             "averaging_token_recovery_baseline": 0.1, "averaging_order_recovery": 0.9},
            [("label leak, AUC", "0.750", "activations 0.500, 0.5 = nothing leaks"),
             ("tokens recovered", "50.0 %", "12.5 % without looking"),
             ("tokens read in averages", "25.0 %", "10.0 % without looking, word order 90.0 %")],
            {"label_leak_auc": 0.75, "label_leak_auc_activation": 0.5, "token_recovery": 0.5,
             "averaging_token_recovery": 0.25, "token_recovery_baseline": 0.125,
             "averaging_token_recovery_baseline": 0.1, "averaging_order_recovery": 0.9},
        ),
        Shown({}),
        Shown(
            {"label_leak_auc": 0.75, "label_leak_auc_gradient": 0.8, "token_recovery": 0.5,
             "token_recovery_baseline": 0.125, "averaging_token_recovery": 0.25,
             "averaging_token_recovery_baseline": 0.1, "averaging_order_recovery": 0.05},
            [("label leak, AUC", "0.750", "gradients 0.800, 0.5 = nothing leaks"),
             ("tokens recovered", "50.0 %", "12.5 % without looking"),
             ("tokens read in averages", "25.0 %", "10.0 % without looking, word order 5.0 %")],
            {"label_leak_auc": 0.75, "label_leak_auc_gradient": 0.8, "token_recovery": 0.5,
             "token_recovery_baseline": 0.125, "averaging_token_recovery": 0.25,
             "averaging_token_recovery_baseline": 0.1, "averaging_order_recovery": 0.05},
        ),
    ],
    left_out_of_trials={"security.meter": None},
    settings={
        "xcloud.features.leak_meter.meter.LeakMeter": {
            "last_steps": "a whole number >= 1 = 50",
            "max_rows": "a whole number >= 100 = 20000",
            "keep": "one of True, False = false",
        },
    },
)  # fmt: skip
