"""How the contributions of replicas become one. Pure tensor code: no links, no compression.

Every step is one multiplication or one addition for each value, in the order of the replicas, so
the result has the same bits in every replica, on any processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor


class Contribution(NamedTuple):
    """What one replica adds: tensors in a fixed order, and how much they count."""

    tensors: list[Tensor]
    weight: float


Merge = Callable[[Sequence[Contribution]], list[Tensor]]
"""Contributions in the order of their replicas → tensors of their own storage."""


def weighted_sum(contributions: Sequence[Contribution]) -> list[Tensor]:
    """sum_r w_r x_r. A value that is not finite makes the sum so."""
    return _sum(contributions, [c.weight for c in contributions])


def weighted_mean(contributions: Sequence[Contribution]) -> list[Tensor]:
    """sum_r w_r x_r / sum_r w_r; NaN if all weights are zero."""
    weights = [c.weight for c in contributions]
    total = sum(weights) or math.nan
    return _sum(contributions, [weight / total for weight in weights])


def _sum(contributions: Sequence[Contribution], weights: Sequence[float]) -> list[Tensor]:
    merged = []
    for tensors in zip(*(c.tensors for c in contributions), strict=True):
        total = tensors[0] * weights[0]
        for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
            # Not add(alpha=): a fused multiply-add rounds once, and not all processors have one.
            total += tensor if weight == 1.0 else tensor * weight
        merged.append(total)
    return merged
