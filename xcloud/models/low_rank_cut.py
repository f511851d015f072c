"""An encoder block cut in two so that few features per row cross: the parts on either side.
Settings are in split_point.py, stages in low_rank_stages.py, basis estimation in calibration.py.

Shapes: R rows (tokens that are not padding), H features, F features inside the feed-forward
sub-layer, K = rank features that cross, P anchor positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, register_parametrization

from xcloud.models.attention import Packing
from xcloud.models.encoder import EncoderLayer
from xcloud.models.split_point import Split


class Places(Protocol):
    """Where rows stand, for anchors of their own: Packing has it."""

    @property
    def positions(self) -> Tensor:
        """int64 [R]."""


@dataclass(frozen=True)
class Basis:
    """Initial values of a projection, from calibration.py: E [K, H], D [H, K], anchor [P, H],
    offset [P, K] = E anchor. P is 0 without an anchor.
    """

    encode: Tensor
    decode: Tensor
    anchor: Tensor
    offset: Tensor

    def handed_over(self, split: Split, stage: int) -> tuple[Tensor, ...]:
        """What this stage sends to the next one before the first step; see Split.start_specs."""
        return (self.decode, self.anchor) if stage == 0 and split.hands_over else ()


class WholeBottom(nn.Module):
    """The block itself; all its rows cross."""

    def __init__(self, block: EncoderLayer) -> None:
        super().__init__()
        self.block = block

    def forward(self, rows_RH: Tensor, packing: Packing) -> Tensor:
        rows: Tensor = self.block(rows_RH, packing)
        return rows


class WholeTop(nn.Module):
    def forward(self, sent_RK: Tensor, packing: Packing) -> Tensor:
        return sent_RK


class FeedForwardBottom(nn.Module):
    """V activation(up(x)), with x the attention output. `block.down` is V here."""

    def __init__(self, block: EncoderLayer, rank: int) -> None:
        super().__init__()
        self.block = block
        block.down = _first_factor(block.down, rank)
        del block.norm

    def forward(self, rows_RH: Tensor, packing: Packing) -> Tensor:
        block = self.block
        attended = block.attend(rows_RH, packing)
        sent: Tensor = block.down(block.activation(block.up(attended)))
        return sent


class AttentionBottom(nn.Module):
    """V of the attended values. `attention.output` is V here."""

    def __init__(self, block: EncoderLayer, rank: int) -> None:
        super().__init__()
        self.attention = block.attention
        self.attention.output = _first_factor(block.attention.output, rank)

    def forward(self, rows_RH: Tensor, packing: Packing) -> Tensor:
        sent: Tensor = self.attention(rows_RH, packing)
        return sent


class _SvdTop(nn.Module):
    """U S z + b, of the replaced layer W."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.s = nn.Linear(rank, rank, bias=False)
        self.u = nn.Linear(rank, linear.out_features)
        u, s, _ = factors(linear.weight, rank)
        with torch.no_grad():
            self.u.weight.copy_(u)
            self.u.bias.copy_(linear.bias)
            self.s.weight.copy_(s)


class FeedForwardTop(_SvdTop):
    """LN(U S z + b)."""

    def __init__(self, block: EncoderLayer, rank: int) -> None:
        super().__init__(block.down, rank)
        self.norm, self.dropout = block.norm, block.dropout

    def forward(self, sent_RK: Tensor, packing: Packing) -> Tensor:
        rows: Tensor = self.norm(self.dropout(self.u(self.s(sent_RK))))
        return rows


class AttentionTop(_SvdTop):
    """x = LN(U S z + b); then the feed-forward sub-layer with its own skip connection."""

    def __init__(self, block: EncoderLayer, rank: int) -> None:
        super().__init__(block.attention.output, rank)
        self.block = block
        del block.attention

    def forward(self, sent_RK: Tensor, packing: Packing) -> Tensor:
        block = self.block
        attended = block.attention_norm(block.dropout(self.u(self.s(sent_RK))))
        return block.feed(attended)


class Orthonormal(nn.Module):
    """Q of X = QR (of X' if X is wide), R with positive diagonal. Equals X if X is orthonormal,
    and is invariant to scaling X, so weight decay has no effect.
    """

    def forward(self, x: Tensor) -> Tensor:
        tall = x if x.shape[0] >= x.shape[1] else x.T
        factor, triangle = torch.linalg.qr(tall)
        unique: Tensor = factor * triangle.diagonal().sign()
        return unique if x.shape[0] >= x.shape[1] else unique.T

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


class ProjectionBottom(nn.Module):
    """E (h - anchor), h the block's output. offset: E anchor [P, K], or [0, K] without anchor.

    block: None where it lies elsewhere, and its rows are what comes in. basis: None leaves
    arbitrary values, to be filled from a file.
    """

    def __init__(
        self,
        split: Split,
        hidden: int,
        max_length: int,
        basis: Basis | None,
        block: EncoderLayer | None = None,
    ) -> None:
        super().__init__()
        assert split.rank is not None
        self.block = block
        self.encode = nn.Linear(hidden, split.rank, bias=False)
        self.register_buffer("offset", torch.zeros(split.num_places(max_length), split.rank))
        if split.method == "orthogonal":
            register_parametrization(self.encode, "weight", Orthonormal())
        if basis is not None:
            _set_weight(self.encode, basis.encode)
            self.get_buffer("offset").copy_(basis.offset)

    def forward(self, rows_RH: Tensor, packing: Packing) -> Tensor:
        rows = rows_RH if self.block is None else self.block(rows_RH, packing)
        return self.reduce(rows, packing)

    def reduce(self, rows_RH: Tensor, places: Places) -> Tensor:
        """[R, K] of the block's output."""
        sent: Tensor = self.encode(rows_RH)
        offset = self.get_buffer("offset")
        return sent - at_places(offset, places) if len(offset) else sent


class ProjectionTop(nn.Module):
    """D z + anchor. anchor: [P, H], or [0, H] if none. basis: as of ProjectionBottom."""

    def __init__(self, split: Split, hidden: int, max_length: int, basis: Basis | None) -> None:
        super().__init__()
        assert split.rank is not None
        places = split.num_places(max_length)
        self.decode = nn.Linear(split.rank, hidden, bias=False)
        self.anchor = nn.Parameter(torch.zeros(places, hidden), requires_grad=places > 0)
        if split.method == "orthogonal":
            register_parametrization(self.decode, "weight", Orthonormal())
        if basis is not None:
            self.start(basis.decode, basis.anchor)

    @torch.no_grad()
    def start(self, decode_HK: Tensor, anchor_PH: Tensor) -> None:
        _set_weight(self.decode, decode_HK)
        self.anchor.copy_(anchor_PH)

    def forward(self, sent_RK: Tensor, places: Places) -> Tensor:
        rows: Tensor = self.decode(sent_RK)
        return rows + at_places(self.anchor, places) if len(self.anchor) else rows


BottomCut = WholeBottom | FeedForwardBottom | AttentionBottom | ProjectionBottom
"""The cut block before the boundary: rows [R, H] -> sent [R, K]."""
TopCut = WholeTop | FeedForwardTop | AttentionTop | ProjectionTop
"""The cut block after the boundary: sent [R, K] -> the block's rows [R, H]."""


def at_places(table: Tensor, places: Places) -> Tensor:
    """Table entry per row: one entry for all rows, or one per position."""
    return table if len(table) == 1 else table[places.positions]


def make_bottom(
    split: Split, block: EncoderLayer, max_length: int, basis: Basis | None
) -> BottomCut:
    """The part before the boundary; consumes `block`."""
    if not split.is_low_rank:
        return WholeBottom(block)
    assert split.rank is not None
    if split.method != "svd":
        return ProjectionBottom(split, block.down.out_features, max_length, basis, block)
    kind = AttentionBottom if split.linear == "attention_output" else FeedForwardBottom
    return kind(block, split.rank)


def make_top(split: Split, block: EncoderLayer, max_length: int, basis: Basis | None) -> TopCut:
    """The part after the boundary; consumes `block`."""
    if not split.is_low_rank:
        return WholeTop()
    assert split.rank is not None
    if split.method != "svd":
        return ProjectionTop(split, block.down.out_features, max_length, basis)
    kind = AttentionTop if split.linear == "attention_output" else FeedForwardTop
    return kind(block, split.rank)


@torch.no_grad()
def factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """U [m, K], S [K, K], V [K, d] of W [m, d], from the exact SVD in float64. The largest entry
    of each column of U is positive, so that clouds computing it separately agree on signs.
    """
    u, s, v = torch.linalg.svd(weight.double().cpu(), full_matrices=False)
    sign = largest_entry_sign(u[:, :rank])
    return (
        (u[:, :rank] * sign).float(),
        torch.diag(s[:rank]).float(),
        (v[:rank] * sign[:, None]).float().contiguous(),
    )


def largest_entry_sign(columns: Tensor) -> Tensor:
    """Sign of the entry of largest magnitude in each column."""
    return columns.gather(0, columns.abs().argmax(0, keepdim=True))[0].sign()


def _first_factor(linear: nn.Linear, rank: int) -> nn.Linear:
    """V of a layer W."""
    v = nn.Linear(linear.in_features, rank, bias=False)
    with torch.no_grad():
        v.weight.copy_(factors(linear.weight, rank)[2])
    return v


@torch.no_grad()
def _set_weight(linear: nn.Linear, weight: Tensor) -> None:
    if is_parametrized(linear):
        linear.weight = weight  # through the parametrization
    else:
        linear.weight.copy_(weight)
