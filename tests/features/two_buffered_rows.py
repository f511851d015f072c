"""The rows of this feature in tables that tests share (feature_rows.py)."""

from __future__ import annotations

from tests.feature_rows import FeatureRows

ROWS = FeatureRows(
    settings={
        "xcloud.features.two_buffered.schedule.TwoBuffered": {
            "num_micro_batches": "a whole number >= 1 = 4",
            "predict": "one of True, False = true",
        },
    },
)  # fmt: skip
