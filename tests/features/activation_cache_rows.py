"""The rows of this feature in tables that tests share (feature_rows.py)."""

from __future__ import annotations

from tests.feature_rows import FeatureRows

ROWS = FeatureRows(left_out_of_trials={"training.activation_cache_mb": 0})
