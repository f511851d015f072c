"""The metrics of the producers of a one-way job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from xcloud.base.units import human_number, human_percent
from xcloud.record.events import TIMES
from xcloud.record.feature_figures import FeatureFigure, Row


def _feed_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of a one-way job: each producer's share."""
    if (feed := summary.get("feed")) is None:
        return
    per_token = human_number(feed["bytes_per_token"], form=".2f")
    yield "bytes per token", per_token, "between clouds, counted"
    for name, producer in feed["producers"].items():
        state = f", {producer['state']}" * (producer["state"] in ("slow", "dead"))
        loss = human_number(producer["loss"], form=".3f")
        remark = f"{producer['num_batches']} batches, loss {loss}{state}"
        yield f"fed by {name}", human_percent(producer["share_taken"] or 0, digits=1), remark
    if feed["num_skipped"]:
        yield "batches missed", str(feed["num_skipped"]), "of slow or lost producers"


_TIMES = " ".join(f"{name}:number" for name in TIMES)
PRODUCERS = FeatureFigure(
    kinds=("producer",),
    rows=_feed_rows,
    metrics=lambda summary: (
        (name, summary["feed"][name])
        for name in ("bytes_per_token", "num_skipped")
        if summary.get("feed", {}).get(name) is not None
    ),
    is_of_steps=True,
    reported={"fed": f"num_batches:whole samples:whole tokens:whole {_TIMES} | loss:figure"},
)
"""Its part of the summary is made by OneWayStatistics (job.py), of more than these events."""
