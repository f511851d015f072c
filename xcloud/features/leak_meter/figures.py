"""What the summary's leak figures (meter.py) are in the closing table and for a tracker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from xcloud.base.units import human_number, human_percent
from xcloud.record.feature_figures import FeatureFigure, Row

MEASURED = (
    *("label_leak_auc", "label_leak_auc_gradient", "label_leak_auc_activation"),
    *("token_recovery", "averaging_token_recovery", "token_recovery_baseline"),
    *("averaging_token_recovery_baseline", "averaging_order_recovery"),
)


def _leak_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    if summary.get("label_leak_auc") is not None:
        parts = {k: summary.get(f"label_leak_auc_{k}") for k in ("gradient", "activation")}
        known = [f"{kind}s {value:.3f}" for kind, value in parts.items() if value is not None]
        remark = ", ".join([*known, "0.5 = nothing leaks"])
        yield "label leak, AUC", human_number(summary["label_leak_auc"], form=".3f"), remark
    for name, label in {"": "tokens recovered", "averaging_": "tokens read in averages"}.items():
        if (recovered := summary.get(f"{name}token_recovery")) is not None:
            baseline = human_percent(summary[f"{name}token_recovery_baseline"], digits=1)
            remark = f"{baseline} without looking"
            if name and (order := summary.get("averaging_order_recovery")) is not None:
                remark += f", word order {human_percent(order, digits=1)}"
            yield label, human_percent(recovered, digits=1), remark


LEAKS = FeatureFigure(
    rows=_leak_rows,
    metrics=lambda summary: (
        (name, summary[name]) for name in MEASURED if summary.get(name) is not None
    ),
)
