"""The rows of this feature in tables that tests share (feature_rows.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.feature_rows import FeatureRows, Shown, Told
from xcloud.features.weight_patches.codec import bits_of
from xcloud.features.weight_patches.figures import WEIGHTS
from xcloud.features.weight_patches.objects import decode, encode
from xcloud.features.weight_patches.settings import Patches


def wrote(is_whole: bool, num_bytes: int, num_values: int) -> dict[str, Any]:
    return {"event": "weights_written", "is_whole": is_whole, "num_bytes": num_bytes,
            "num_values": num_values, "pause_s": 0.5, "write_s": 0.25}  # fmt: skip


def weight_objects() -> tuple[list[bytes], Callable[[bytes], object]]:
    drawn = torch.Generator().manual_seed(1)
    first, second = ({"w": bits_of(torch.randn(40, 9, generator=drawn))} for _ in range(2))
    about = {"run": "r s1", "attempt": 1, "stage": 0, "is_last": False}
    whole = encode(first, None, {"lora": True}, {"t/a": b"{}"}, step=1, base=None, **about)
    patch = encode(second, first, {}, {}, step=2, base=1, **about)
    before = decode(whole, before=None)
    return [whole, patch], lambda data: decode(data, before=before)


ROWS = FeatureRows(
    figure=WEIGHTS,
    shown=[
        Shown(
            {"weight_patches": {"num_patches": 9, "patch_bytes": 1e6, "num_snapshots": 2,
                                "snapshot_bytes": 3e6, "share_of_whole": 0.125, "pause_s": None}},
            [("weight patches", "9", "1.00 MB, 12.5 % of whole weights; 2 snapshots, 3.00 MB; "
              "docs/follow-weights.md")],
            {"weight_patches.num_patches": 9.0, "weight_patches.patch_bytes": 1000000.0,
             "weight_patches.num_snapshots": 2.0, "weight_patches.snapshot_bytes": 3000000.0,
             "weight_patches.share_of_whole": 0.125},
        ),
        Shown(
            {"weight_patches": {"share_of_whole": 0.0625, "patch_bytes": 2000, "num_patches": 4,
                                "num_snapshots": 1, "snapshot_bytes": 3e6, "pause_s": None}},
            [("weight patches", "4", "2.00 kB, 6.2 % of whole weights; 1 snapshots, 3.00 MB; "
              "docs/follow-weights.md")],
            {"weight_patches.share_of_whole": 0.0625, "weight_patches.patch_bytes": 2000.0,
             "weight_patches.num_patches": 4.0, "weight_patches.num_snapshots": 1.0,
             "weight_patches.snapshot_bytes": 3e6},
        ),
    ],
    told=[
        Told(
            [wrote(True, 2000, 1000), wrote(False, 300, 1000), wrote(False, 100, 1000)],
            {"weight_patches": {
                "num_patches": 2, "patch_bytes": 400, "num_snapshots": 1, "snapshot_bytes": 2000,
                "share_of_whole": 0.1, "pause_s": 1.5, "write_s": 0.75}},
        ),
        Told(
            [wrote(True, 200, 100), wrote(False, 30, 100), wrote(False, 10, 100)],
            {"weight_patches": {
                "num_patches": 2, "patch_bytes": 40, "num_snapshots": 1, "snapshot_bytes": 200,
                "share_of_whole": 0.1, "pause_s": 1.5, "write_s": 0.75}},
        ),
        Told(
            [wrote(True, 200, 100)],
            {"weight_patches": {
                "num_patches": 0, "patch_bytes": 0, "num_snapshots": 1, "snapshot_bytes": 200,
                "share_of_whole": None, "pause_s": 0.5, "write_s": 0.25}},
        ),
    ],
    groups={"training.patches": Patches},
    misfits={"patches": (["training.patches.every=30"],
                         r"training\.patches\.every=30 is more than")},
    left_out_of_trials={"training.patches.every": 0},
    parsers={"weight_objects": weight_objects},
    settings={
        "xcloud.features.weight_patches.settings.Patches": {
            "every": "a whole number >= 0 = 0",
            "whole_every": "a whole number >= 1 = 20",
            "url": "a text or null = null",
            "reader": "a text or null = null",
        },
    },
)  # fmt: skip
