"""What a run tells of its privacy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from xcloud.base.units import human_number
from xcloud.record.events import body
from xcloud.record.feature_figures import FeatureFigure, Row


def _privacy_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    if (privacy := summary.get("privacy")) is not None:
        remark = f"by {privacy['unit']}, delta {privacy['delta']:g}"
        if (sampled := privacy["epsilon_if_sampled"]) is not None:
            remark += f"; {sampled:.2f} if batches were random and secret"
        yield "privacy, epsilon", human_number(privacy["epsilon"], form=".2f"), remark


def _privacy_metrics(summary: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    epsilon = (summary.get("privacy") or {}).get("epsilon")
    if epsilon is not None:
        yield "epsilon", epsilon


GUARANTEE = FeatureFigure(
    kinds=("privacy",),
    in_summary=lambda events: {"privacy": body(events[-1])},
    otherwise={"privacy": None},
    rows=_privacy_rows,
    metrics=_privacy_metrics,
)
