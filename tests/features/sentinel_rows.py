"""The rows of this feature in tables that tests share (feature_rows.py)."""

from __future__ import annotations

from tests.feature_rows import FeatureRows, Shown, Told
from xcloud.features.sentinel.figures import DEPARTURES

DEPARTURE = {
    "step": 5, "sender": 1, "peer": "cloud b", "stream": "activations", "statistic": "norm",
    "value": 12.345, "usual": 1.0, "deviation": 0.25,
}  # fmt: skip
FORWARD = {
    "step": 7, "sender": 1, "peer": "b", "stream": "forward 0", "statistic": "mean",
    "value": 2.34567, "usual": 0.1, "deviation": 0.056,
}  # fmt: skip

ROWS = FeatureRows(
    figure=DEPARTURES,
    shown=[
        Shown(
            {"departures": [{"statistic": "mean", "peer": "b", "step": 7}, {}]},
            [("sudden departures", "2", "first: mean of b in step 7; docs/security.md")],
            {"departures": 2.0},
        ),
        Shown(
            {"departures": [DEPARTURE, {**DEPARTURE, "step": 9}]},
            [("sudden departures", "2", "first: norm of cloud b in step 5; docs/security.md")],
            {"departures": 2.0},
        ),
        Shown({"departures": []}),
    ],
    told=[
        Told(
            [{"event": "departure", **FORWARD}],
            {"departures": [FORWARD]},
            ["step 7: what rank 1 (b) sends, forward 0, has changed suddenly: mean 2.35, usual is "
             "0.1 ± 0.056"],
            calls=[("departure", 7)],
        ),
        Told(
            [{"event": "departure", **DEPARTURE}],
            {"departures": [DEPARTURE]},
            ["step 5: what rank 1 (cloud b) sends, activations, has changed suddenly: norm 12.3, "
             "usual is 1 ± 0.25"],
            calls=[("departure", 5)],
        ),
    ],
    settings={
        "xcloud.security.policy.Visibility": {
            "on_departure": "one of alarm, stop, ignore or null = null",
        },
    },
)  # fmt: skip
