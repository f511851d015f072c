"""What the papers report for settings that our sweeps contain. Numbers only from the sources.

Source: Pan, Hou, Yang, Yu, Xiang, ZTE Technology Journal 2023(4), section 2.2.1 and Table 2:
IWSLT'14 Es-En, ERNIE-M-base and BERT-base, 2 clouds x 8 V100.
"""

from __future__ import annotations

from dataclasses import dataclass

from xcloud.sweep.results import Row

NOTE = (
    "paper: IWSLT'14 Es→En, ERNIE-M and BERT, 16 V100 (Pan et al. 2023, Table 2): other data, "
    "models and machines, so its BLEU never compares with ours in absolute terms; shares of the "
    "uncompressed step time do, with care."
)
DIFFERENCE_NOTE = "−4.19 is a difference as published; the score itself is not."


@dataclass(frozen=True)
class Published:
    """quality: as printed there. share: of the uncompressed step time."""

    quality: str
    share: float | None = None


EXPERIMENTS = ("abnet_iwslt", "abnet_table2")
LOCAL = Published("43.19")  # "ABNet-Local"
FROM_SCRATCH = Published("39.60")  # Transformer-Base
ACROSS_CLOUDS = {
    "fp16(svd(0.6))+int8": Published("41.92", 0.32),  # "ABNet-Cloud", the best of Table 2
    "fp16(svd(0.2))+int8": Published("−4.19", 0.19),
}


def published_for(row: Row) -> Published | None:
    settings = row.settings
    if settings.get("name") not in EXPERIMENTS:
        return None
    if settings.get("model") == "Transformer":
        return FROM_SCRATCH
    if settings.get("model") == "AbNet" and settings.get("cluster.name") == "local":
        return LOCAL
    return ACROSS_CLOUDS.get(row.compression) if settings.get("model") == "AbNet" else None
