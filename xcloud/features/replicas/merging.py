"""Merges, which make one of the contributions of replicas, and ways to cut tensors into parts of
about equal size: runs of neighbours (fragments merged in turn, stages), whole tensors or rows of
them (shares that the ranks of a cloud carry across). Pure tensor code: no links, no compression.

Every step of a merge is one multiplication or one addition for each value, in a fixed order, so
the result has the same bits in every replica, on any processor.

`Median`, `TrimmedMean` and `NormBound` are Byzantine-robust aggregators. They cost bytes, as every
replica must merge all contributions itself (averaging.py), and where all are honest accuracy:
variance, against the mean of R equally noisy contributions, and bias where replicas differ because
their data differ. Only `NormBound` uses weights; a contribution of weight zero counts for none.
They skip a contribution with a value that is not finite; if such are no minority, the result is
NaN. Sum and mean hide nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from xcloud.base.errors import ConfigError
from xcloud.base.settings import settings
from xcloud.pipeline.exchange import RankGroup, squared_norm


class Contribution(NamedTuple):
    """The tensors that one replica adds, in a fixed order, and how much they count."""

    tensors: list[Tensor]
    weight: float


Merge = Callable[[Sequence[Contribution]], list[Tensor]]
"""Contributions in the order of their replicas → tensors of their own storage."""


def weighted_sum(contributions: Sequence[Contribution]) -> list[Tensor]:
    """Return sum_r w_r x_r. A value that is not finite makes the sum so."""
    return sum_up(contributions, weights=[c.weight for c in contributions])


def weighted_mean(contributions: Sequence[Contribution]) -> list[Tensor]:
    """Return sum_r w_r x_r / sum_r w_r; NaN if all weights are zero."""
    weights = [c.weight for c in contributions]
    total = sum(weights) or math.nan
    return sum_up(contributions, weights=[weight / total for weight in weights])


class Robust(ABC):
    """A mean that a minority of bad replicas cannot move far."""

    needs = 3
    """Fewest replicas of which one may be bad."""

    def __call__(self, contributions: Sequence[Contribution]) -> list[Tensor]:
        finite = [c for c in contributions if math.isfinite(_norm(c.tensors))]
        counted = [c for c in finite if c.weight]
        # Those that are not finite count as bad: they must be fewer than the rest.
        if len(counted) <= len(contributions) - len(finite):
            return [torch.full_like(tensor, math.nan) for tensor in contributions[0].tensors]
        return self._merge(counted)

    def check(self, num_replicas: int) -> None:
        """Raise ConfigError if so few cannot outvote a bad one."""
        if num_replicas < self.needs:
            raise ConfigError(
                f"{self} needs {self.needs} replicas or more to outvote a bad one, got "
                f"{num_replicas}; use the mean, or more clouds"
            )

    @abstractmethod
    def _merge(self, contributions: Sequence[Contribution]) -> list[Tensor]: ...


@settings("TrimmedMean")
class TrimmedMean(Robust):
    """The mean of each value without the floor(share * R) smallest and as many of the largest, at
    least one of either.

    Source: Yin et al., arXiv:1803.01498. Tolerates that many bad ones. Variance on Gaussian noise,
    one of either left out: 1.35 times that of the mean for 3 replicas, 1.14 for 5.
    share: the share of the replicas that is left out at each end.
    """

    share: Annotated[float, Field(ge=0, le=0.5)] = 0.2

    def _merge(self, contributions: Sequence[Contribution]) -> list[Tensor]:
        num = len(contributions)
        # At least one at either end, and at least one or two left: with share 0.5 this is the
        # median.
        num_out = min((num - 1) // 2, max(1, math.floor(self.share * num)))
        merged = []
        for tensors in zip(*(c.tensors for c in contributions), strict=True):
            kept = torch.stack(tensors).sort(0).values[num_out : num - num_out]
            total = kept[0].clone()
            for tensor in kept[1:]:
                total += tensor
            merged.append(total.div_(len(kept)))
        return merged


@settings("Median")
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
    No variance and no bias as long as honest norms lie within the bound. The norm covers
    all tensors that are merged together. Where the ranks of a cloud carry shares, it covers one
    share.
    factor: the highest norm that counts in full, in median norms.
    """

    factor: Annotated[float, Field(ge=1)] = 2.0

    def _merge(self, contributions: Sequence[Contribution]) -> list[Tensor]:
        norms = [_norm(c.tensors) for c in contributions]
        ordered = sorted(norms)
        # The middle norm, or the mean of the middle two.
        bound = self.factor * (ordered[(len(norms) - 1) // 2] + ordered[len(norms) // 2]) / 2
        total = sum(c.weight for c in contributions)
        factors = [_rounded(min(1.0, bound / norm) if norm else 1.0) for norm in norms]
        weights = [c.weight / total * f for c, f in zip(contributions, factors, strict=True)]
        return sum_up(contributions, weights)


def sum_up(contributions: Iterable[Contribution], weights: Sequence[float]) -> list[Tensor]:
    """Add up one contribution after the other; none of them need be there at once."""
    merged: list[Tensor] = []
    for contribution, weight in zip(contributions, weights, strict=True):
        if not merged:
            merged = [tensor * weight for tensor in contribution.tensors]
            continue
        for total, tensor in zip(merged, contribution.tensors, strict=True):
            # Not add(alpha=): a fused multiply-add rounds once, and not all processors have one.
            total.add_(tensor if weight == 1.0 else tensor * weight)
    return merged


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(map(squared_norm, tensors)))


def _rounded(factor: float) -> float:
    """Round down to 12 bits: a sum's last bits depend on the processor, and must not show."""
    mantissa, exponent = math.frexp(factor)
    return math.ldexp(math.floor(mantissa * 4096) / 4096, exponent)


@dataclass(frozen=True)
class RowPiece:
    """A run of rows, first .. last - 1, of tensor number `index`; a scalar has one row."""

    name: str
    index: int
    first: int
    last: int
    shape: torch.Size

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a view of these rows."""
        tensor = tensors[self.index]
        return tensor[self.first : self.last] if tensor.dim() else tensor


def contiguous(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Split positions 0..len(sizes) - 1 into `count` runs of about equal sum, none empty."""
    whole = sum(sizes)
    done = 0
    runs: list[list[int]] = [[]]
    for position, size in enumerate(sizes):
        runs_left = count - len(runs)
        positions_left = len(sizes) - position
        # The next run begins where its boundary is nearer to this tensor's start than to its end.
        is_due = (done + size / 2) * count >= whole * len(runs)
        if runs[-1] and runs_left and (is_due or positions_left <= runs_left):
            runs.append([])
        runs[-1].append(position)
        done += size
    return runs


def by_tensor(shapes: Mapping[str, torch.Size], num_shares: int) -> list[list[RowPiece]]:
    """Deal whole tensors into shares of about equal sum; a share may be empty."""
    whole = [
        RowPiece(name, index, first=0, last=shape[0] if shape else 1, shape=shape)
        for index, (name, shape) in enumerate(shapes.items())
    ]
    shares: list[list[RowPiece]] = [[] for _ in range(num_shares)]
    sums = [0] * num_shares
    # The largest first, each to the lightest share so far: as even as whole tensors allow.
    for piece in sorted(whole, key=lambda piece: -piece.shape.numel()):
        lightest = sums.index(min(sums))
        shares[lightest].append(piece)
        sums[lightest] += piece.shape.numel()
    return [sorted(share, key=lambda piece: piece.index) for share in shares]


def by_rows(shapes: Mapping[str, torch.Size], num_shares: int) -> list[list[RowPiece]]:
    """Deal every row of every tensor into exactly one share, in order.

    Shares differ by a row's size, and may be empty. A tensor without values is in the share where
    it falls, whole.
    """
    total = sum(shape.numel() for shape in shapes.values())
    shares: list[list[RowPiece]] = [[] for _ in range(num_shares)]
    seen = 0
    for index, (name, shape) in enumerate(shapes.items()):
        num_rows = shape[0] if shape else 1
        last = 0
        width = shape.numel() // max(num_rows, 1)
        while True:
            middle = seen + width / 2  # of the row: it goes where its middle lies
            share = min(num_shares - 1, int(num_shares * middle / max(total, 1)))
            first = last
            last = num_rows
            if width and share < num_shares - 1:
                ends_at = total * (share + 1) / num_shares
                # At least one row, so that the loop always ends.
                last = min(num_rows, max(first + 1, first + round((ends_at - seen) / width)))
            rows = torch.Size((last - first, *shape[1:])) if shape else shape
            label = f"{name}[{first}:{last}]" if last - first != num_rows else name
            shares[share].append(
                RowPiece(name=label, index=index, first=first, last=last, shape=rows)
            )
            seen += (last - first) * width
            if last == num_rows:
                break
    return shares


def joined(pieces: Iterable[tuple[RowPiece, Tensor]], count: int) -> list[Tensor]:
    """Join pieces, given in order, to the `count` tensors that they were cut from."""
    rows: list[list[Tensor]] = [[] for _ in range(count)]
    for piece, tensor in pieces:
        rows[piece.index].append(tensor)
    return [torch.cat(own) if len(own) > 1 else own[0] for own in rows]


def gather_shares(
    group: RankGroup, shares: Sequence[Sequence[RowPiece]], mine: Sequence[Tensor], like: Tensor
) -> list[tuple[RowPiece, Tensor]]:
    """Return all pieces with their tensors, in every rank of the group.

    The first ranks of the group hold a share each.
    mine: this rank's share; empty without one.
    like: a tensor of the same dtype and device.
    """
    if len(group.ranks) == 1:
        return list(zip(shares[0], mine, strict=True))
    # Gathered, not summed: adding zeros would change the sign of a zero.
    sizes = [[piece.shape.numel() for piece in share] for share in shares]
    # Shares differ in size, and a gather wants equal rows: the shorter ones end in zeros.
    row = like.new_zeros(max(map(sum, sizes)))
    if mine:
        flat = torch.cat([tensor.reshape(-1) for tensor in mine])
        row[: len(flat)] = flat
    rows = [group.from_leader(row)] if len(shares) == 1 else group.gather(row)
    return [
        (piece, tensor.view(piece.shape))
        for share, own, row in zip(shares, sizes, rows, strict=False)
        for piece, tensor in zip(share, torch.split(row[: sum(own)], own), strict=True)
    ]
