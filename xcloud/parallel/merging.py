"""How the contributions of replicas become one. Pure tensor code: no links, no compression.

Every step is one multiplication or one addition for each value, in a fixed order, so the result
has the same bits in every replica, on any processor.

`Median`, `TrimmedMean` and `NormBound` are Byzantine-robust aggregators. They cost no bytes. What
they cost is accuracy where all are honest: variance, against the mean of R equally noisy
contributions, and bias where replicas differ because their data differ. Only `NormBound` uses
weights; a contribution of weight zero counts for none.
A contribution with a value that is not finite is left out by them (`Robust.bad` tells which); if
these are no minority, the result is NaN. Sum and mean hide nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from xcloud.base.errors import ConfigError
from xcloud.base.settings import settings
from xcloud.parallel.exchange import squared_norm


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


def mean_of(contributions: Iterable[Contribution], count: int) -> list[Tensor]:
    """weighted_mean of so many that count alike and may be made one after the other."""
    return _sum(contributions, [1.0 / count] * count)


class Robust(ABC):
    """A mean that a minority of bad replicas cannot move far."""

    needs = 3
    """Fewest replicas of which one may be bad."""

    def __call__(self, contributions: Sequence[Contribution]) -> list[Tensor]:
        bad = self.bad(contributions)
        counted = [c for i, c in enumerate(contributions) if c.weight and i not in bad]
        if len(counted) <= len(bad):
            return [torch.full_like(tensor, math.nan) for tensor in contributions[0].tensors]
        return self._merge(counted)

    def check(self, num_replicas: int) -> None:
        """Raise ConfigError if so few cannot outvote a bad one."""
        if num_replicas < self.needs:
            raise ConfigError(
                f"{self} needs {self.needs} replicas or more to outvote a bad one, got "
                f"{num_replicas}: of two that differ nobody can tell which is bad. Use the mean, "
                "or more clouds"
            )

    @staticmethod
    def bad(contributions: Sequence[Contribution]) -> list[int]:
        """Those with a value that is not finite."""
        return [i for i, c in enumerate(contributions) if not math.isfinite(_norm(c.tensors))]

    @abstractmethod
    def _merge(self, contributions: Sequence[Contribution]) -> list[Tensor]: ...


@settings("TrimmedMean")
class TrimmedMean(Robust):
    """The mean of each value without the floor(share * R) smallest and as many of the largest, at
    least one of either.

    Source: Yin et al., arXiv:1803.01498. Tolerates that many bad ones. Variance on Gaussian noise,
    one of either left out: 1.35 times that of the mean for 3 replicas (it is the median), 1.14
    for 5. Biased as the median is, but less.
    """

    share: Annotated[float, Field(ge=0, le=0.5)] = 0.2

    def _merge(self, contributions: Sequence[Contribution]) -> list[Tensor]:
        num = len(contributions)
        num_out = min((num - 1) // 2, max(1, math.floor(self.share * num)))
        merged = []
        for tensors in zip(*(c.tensors for c in contributions), strict=True):
            kept = torch.stack(tensors).sort(0).values[num_out : num - num_out]
            total = kept[0].clone()
            for tensor in kept[1:]:
                total += tensor
            merged.append(total.div_(len(kept)))
        return merged


@dataclass(frozen=True)
class Median(TrimmedMean):
    """The median of each value; of an even number of replicas the mean of the middle two.

    Source: Yin et al., arXiv:1803.01498. Tolerates any minority. Variance on Gaussian noise: 1.35
    times that of the mean for 3 replicas, 1.43 for 5, 1.57 for many. A value that only a few
    replicas change, such as the embedding of a word that one of them reads, does not move.
    """

    share: float = field(default=0.5, init=False, repr=False)


@settings("NormBound")
class NormBound(Robust):
    """The weighted mean of contributions scaled down to at most `factor` times their median norm.

    Source: Sun et al., arXiv:1911.07963. Tolerates a minority in size, not in direction: a bad
    replica of weight w moves the result by up to factor * w / sum(w) median norms in every merge.
    No variance and no bias as long as honest norms lie within the bound. The norm is of all
    tensors that are merged together: of one part, where replicas aggregate parts.
    """

    factor: Annotated[float, Field(ge=1)] = 2.0

    def _merge(self, contributions: Sequence[Contribution]) -> list[Tensor]:
        norms = [_norm(c.tensors) for c in contributions]
        ordered = sorted(norms)
        bound = self.factor * (ordered[(len(norms) - 1) // 2] + ordered[len(norms) // 2]) / 2
        total = sum(c.weight for c in contributions)
        return _sum(
            contributions,
            [
                c.weight / total * _rounded(min(1.0, bound / norm) if norm else 1.0)
                for c, norm in zip(contributions, norms, strict=True)
            ],
        )


def check_merge(merge: Merge, num_replicas: int) -> None:
    """Raise ConfigError if so few replicas cannot outvote a bad one."""
    if isinstance(merge, Robust):
        merge.check(num_replicas)


def can_merge(merge: Merge, num_contributions: int) -> bool:
    """Whether so many can outvote a bad one, where that is asked for."""
    return not isinstance(merge, Robust) or num_contributions >= merge.needs


def _sum(contributions: Iterable[Contribution], weights: Sequence[float]) -> list[Tensor]:
    """Adds up one contribution after the other; none of them need be there at once."""
    merged: list[Tensor] = []
    for contribution, weight in zip(contributions, weights, strict=True):
        if not merged:
            merged = [tensor * weight for tensor in contribution.tensors]
            continue
        for total, tensor in zip(merged, contribution.tensors, strict=True):
            # Not add(alpha=): a fused multiply-add rounds once, and not all processors have one.
            total += tensor if weight == 1.0 else tensor * weight
    return merged


def _norm(tensors: Sequence[Tensor]) -> float:
    """Of all values together, in float64; not finite if any of them is not."""
    return math.sqrt(sum(map(squared_norm, tensors)))


def _rounded(factor: float) -> float:
    """Down to 12 bits: a sum's last bits depend on the processor, and must not show."""
    mantissa, exponent = math.frexp(factor)
    return math.ldexp(math.floor(mantissa * 4096) / 4096, exponent)
