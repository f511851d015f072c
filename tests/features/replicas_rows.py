"""The rows of this feature in tables that tests share (feature_rows.py)."""

from __future__ import annotations

from tests.feature_rows import FeatureRows, Shown, Told
from xcloud.features.replicas.figures import MERGES

ROWS = FeatureRows(
    figure=MERGES,
    shown=[
        Shown(
            {"merges": {"whole": 5, "partial": 2, "clouds_late": 3, "clouds_lost": 1,
                        "clouds_back": 4}},
            [("merges", "7", "2 without a cloud; clouds: 3 late, 1 lost, 4 back")],
        ),
        Shown(
            {"merges": {"whole": 7, "partial": 2, "clouds_late": 3, "clouds_lost": 1,
                        "clouds_back": 0}},
            [("merges", "9", "2 without a cloud; clouds: 3 late, 1 lost, 0 back")],
        ),
    ],
    told=[
        Told(
            [*({"event": "merge", "step": step} for step in (1, 2, 3)),
             *({"event": "partial_merge", "step": step} for step in (4, 5)),
             *({"event": "absence", "what": what}
               for what in ("late", "left", "late", "back", "back"))],
            {"merges": {"whole": 3, "partial": 2, "clouds_late": 2, "clouds_lost": 1,
                        "clouds_back": 2}},
        ),
    ],
    of_rank_0={
        "merge": "step weights",
        "partial_merge": "step weights",
        "absence": "absent ranks what step",
    },
    settings={
        "xcloud.features.replicas.gradient_averaging.GradientAveraging": {
            "delay": "one of 0, 1 = 0",
            "feedback": "one of True, False or a number in (0, 1] = true",
            "check_every": "a whole number >= 0 = 100",
            "merge": "a Robust or null = null",
        },
        "xcloud.features.replicas.late.GoOn": {
            "wait_s": "a number in (0, inf) = 600.0",
            "restart_s": "a number in [0, inf) or null = null",
        },
        "xcloud.features.replicas.late.Skip": {"wait_s": "a number in (0, inf) = 600.0"},
        "xcloud.features.replicas.late.Wait": {"wait_s": "a number in (0, inf) = 600.0"},
        "xcloud.features.replicas.local_updates.LocalUpdates": {
            "every": "a whole number >= 1 = 50",
            "weigh": "one of samples, tokens, equal = samples",
            "fragments": "a whole number >= 1 = 1",
            "overlap": "a whole number >= 0 = 0",
            "mix": "a number in [0, 0.999999] = 0.0",
            "max_s": "a number in (0, inf) or null = null",
            "max_tokens": "a whole number >= 1 or null = null",
            "feedback": "one of True, False or a number in (0, 1] = true",
            "merge": "a Robust or null = null",
        },
        "xcloud.features.replicas.merging.NormBound": {"factor": "a number in [1, inf) = 2.0"},
        "xcloud.features.replicas.merging.TrimmedMean": {"share": "a number in [0, 0.5] = 0.2"},
        "xcloud.features.replicas.outer_optimizer.OuterOptimizer": {
            "learning_rate": "a number in (0, inf) = 0.7",
            "momentum": "a number in [0, 0.999999] = 0.9",
            "nesterov": "one of True, False = true",
        },
    },
)  # fmt: skip
