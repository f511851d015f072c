"""What a run tells of the weights that it has written for followers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from xcloud.base.units import human_bytes, human_percent
from xcloud.record.events import Event
from xcloud.record.feature_figures import FeatureFigure, Row

NAME = "weight_patches"
_BYTES_A_VALUE = 2  # in BF16


def _summed(events: list[Event]) -> dict[str, Any]:
    by_kind = {
        is_whole: [event for event in events if bool(event["is_whole"]) is is_whole]
        for is_whole in (False, True)
    }
    num_bytes = {
        is_whole: sum(int(event["num_bytes"]) for event in own)
        for is_whole, own in by_kind.items()
    }
    # What the patches would have been as whole weights.
    whole_bytes = sum(_BYTES_A_VALUE * int(event["num_values"]) for event in by_kind[False])
    return {
        NAME: {
            "num_patches": len(by_kind[False]),
            "patch_bytes": num_bytes[False],
            "num_snapshots": len(by_kind[True]),
            "snapshot_bytes": num_bytes[True],
            "share_of_whole": num_bytes[False] / whole_bytes if whole_bytes else None,
            "pause_s": sum(float(event["pause_s"]) for event in events),
            "write_s": sum(float(event["write_s"]) for event in events),
        }
    }


def _rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    if found := summary.get(NAME):
        share = human_percent(found["share_of_whole"], digits=1)
        size = human_bytes(found["patch_bytes"])
        whole = f"{found['num_snapshots']} snapshots, {human_bytes(found['snapshot_bytes'])}"
        remark = f"{size}, {share} of whole weights; {whole}; docs/follow-weights.md"
        yield "weight patches", str(found["num_patches"]), remark


WEIGHTS = FeatureFigure(
    kinds=("weights_written",),
    in_summary=_summed,
    rows=_rows,
    metrics=lambda summary: (
        (f"{NAME}.{name}", float(value))
        for name, value in summary.get(NAME, {}).items()
        if value is not None
    ),
    is_of_steps=True,
    reported={
        "weights_written": "step:whole stage:whole num_bytes:whole is_whole:whole "
        "num_values:whole pause_s:number write_s:number"
    },
)
