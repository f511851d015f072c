"""An encoder block cut in two so that few features per row cross: the parts on either side.
Settings are in split_point.py, stages in split_stages.py, basis estimation in calibration.py.

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
from xcloud.models.split_point import Split, num_places


class Places(Protocol):
    """Where rows stand, for anchors of their own: Packing has it."""

    @property
    def positions(self) -> Tensor:
        """int64 [R]."""


class BottomCut(nn.Module):
    """The cut block before the boundary: rows [R, H] -> sent [R, K]."""

    def forward(self, rows_RH: Tensor, packing: Packing) -> Tensor:
        raise NotImplementedError


class TopCut(nn.Module):
    """The cut block after the boundary: sent [R, K] -> the block's rows [R, H]."""

    def forward(self, sent_RK: Tensor, packing: Packing) -> Tensor:
        raise NotImplementedError


class WholeBottom(BottomCut):
    """The block itself; all its rows cross."""

    def __init__(self, block: EncoderLayer) -> None:
        super().__init__()
        self.block = block

    def forward(self, rows_RH: Tensor, packing: Packing) -> Tensor:
        rows: Tensor = self.block(rows_RH, packing)
        return rows


class WholeTop(TopCut):
    def forward(self, sent_RK: Tensor, packing: Packing) -> Tensor:
        return sent_RK


class FeedForwardBottom(BottomCut):
    """V activation(up(x)), with x the attention output. `block.down` is V here."""

    def __init__(self, block: EncoderLayer) -> None:
        super().__init__()
        self.block = block
        del block.norm

    def forward(self, rows_RH: Tensor, packing: Packing) -> Tensor:
        block = self.block
        attended = block.attend(rows_RH, packing)
        sent: Tensor = block.down(block.activation(block.up(attended)))
        return sent


class FeedForwardTop(TopCut):
    """LN(U S z + b)."""

    def __init__(self, block: EncoderLayer, rank: int) -> None:
        super().__init__()
        self.s = nn.Linear(rank, rank, bias=False)
        self.u = nn.Linear(rank, block.down.out_features)
        self.norm, self.dropout = block.norm, block.dropout

    def forward(self, sent_RK: Tensor, packing: Packing) -> Tensor:
        rows: Tensor = self.norm(self.dropout(self.u(self.s(sent_RK))))
        return rows


class AttentionBottom(BottomCut):
    """V of the attended values. `attention.output` is V here."""

    def __init__(self, block: EncoderLayer) -> None:
        super().__init__()
        self.attention = block.attention

    def forward(self, rows_RH: Tensor, packing: Packing) -> Tensor:
        sent: Tensor = self.attention(rows_RH, packing)
        return sent


class AttentionTop(TopCut):
    """x = LN(U S z + b); then the feed-forward sub-layer with its own skip connection."""

    def __init__(self, block: EncoderLayer, rank: int) -> None:
        super().__init__()
        self.s = nn.Linear(rank, rank, bias=False)
        self.u = nn.Linear(rank, block.down.out_features)
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


class ProjectionBottom(BottomCut):
    """E (h - anchor), h the block's output. offset: E anchor [P, K], or [0, K] without anchor.

    block: None where it lies elsewhere, and its rows are what comes in.
    """

    def __init__(
        self, block: EncoderLayer | None, hidden: int, rank: int, places: int, orthonormal: bool
    ) -> None:
        super().__init__()
        self.block = block
        self.encode = nn.Linear(hidden, rank, bias=False)
        self.register_buffer("offset", torch.zeros(places, rank))
        if orthonormal:
            register_parametrization(self.encode, "weight", Orthonormal())

    def forward(self, rows_RH: Tensor, packing: Packing) -> Tensor:
        rows = rows_RH if self.block is None else self.block(rows_RH, packing)
        return self.reduce(rows, packing)

    def reduce(self, rows_RH: Tensor, places: Places) -> Tensor:
        """[R, K] of the block's output."""
        sent: Tensor = self.encode(rows_RH)
        offset = self.get_buffer("offset")
        return sent - at_places(offset, places) if len(offset) else sent


class ProjectionTop(TopCut):
    """D z + anchor. anchor: [P, H], or [0, H] if none."""

    def __init__(self, hidden: int, rank: int, places: int, orthonormal: bool) -> None:
        super().__init__()
        self.decode = nn.Linear(rank, hidden, bias=False)
        self.anchor = nn.Parameter(torch.zeros(places, hidden), requires_grad=places > 0)
        if orthonormal:
            register_parametrization(self.decode, "weight", Orthonormal())

    @torch.no_grad()
    def start(self, decode_HK: Tensor, anchor_PH: Tensor) -> None:
        _set_weight(self.decode, decode_HK)
        self.anchor.copy_(anchor_PH)

    def forward(self, sent_RK: Tensor, places: Places) -> Tensor:
        rows: Tensor = self.decode(sent_RK)
        return rows + at_places(self.anchor, places) if len(self.anchor) else rows


def at_places(table: Tensor, places: Places) -> Tensor:
    """Table entry per row: one entry for all rows, or one per position."""
    return table if len(table) == 1 else table[places.positions]


@dataclass(frozen=True)
class Basis:
    """Initial values of a projection, from calibration.py: E [K, H], D [H, K], anchor [P, H],
    offset [P, K] = E anchor. P is 0 without an anchor.
    """

    encode: Tensor
    decode: Tensor
    anchor: Tensor
    offset: Tensor


def projection_bottom(
    split: Split, block: EncoderLayer | None, hidden: int, max_length: int
) -> ProjectionBottom:
    assert split.rank is not None
    places = num_places(split.anchor_kind, max_length)
    return ProjectionBottom(block, hidden, split.rank, places, split.method == "orthogonal")


def projection_top(split: Split, hidden: int, max_length: int) -> ProjectionTop:
    assert split.rank is not None
    places = num_places(split.anchor_kind, max_length)
    return ProjectionTop(hidden, split.rank, places, split.method == "orthogonal")


def make_bottom(split: Split, block: EncoderLayer, max_length: int) -> BottomCut:
    """The part before the boundary; consumes `block`. Initial values of V or E: start_bottom."""
    if not split.is_low_rank:
        return WholeBottom(block)
    assert split.rank is not None
    if split.method != "svd":
        return projection_bottom(split, block, block.down.out_features, max_length)
    if split.linear == "attention_output":
        v = nn.Linear(block.attention.output.in_features, split.rank, bias=False)
        block.attention.output = v
        return AttentionBottom(block)
    block.down = nn.Linear(block.down.in_features, split.rank, bias=False)
    return FeedForwardBottom(block)


def make_top(split: Split, block: EncoderLayer, max_length: int) -> TopCut:
    """The part after the boundary; consumes `block`."""
    if not split.is_low_rank:
        return WholeTop()
    assert split.rank is not None
    if split.method != "svd":
        return projection_top(split, block.down.out_features, max_length)
    if split.linear == "attention_output":
        return AttentionTop(block, split.rank)
    return FeedForwardTop(block, split.rank)


def replaced_linear(split: Split, block: EncoderLayer) -> nn.Linear:
    """W of split.method=svd."""
    return block.down if split.linear == "feed_forward_output" else block.attention.output


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


@torch.no_grad()
def start_bottom(
    cut: BottomCut, split: Split, linear: nn.Linear | None, basis: Basis | None
) -> None:
    """Initialise V or E. linear: the original W, for svd; basis: for the other methods."""
    if isinstance(cut, FeedForwardBottom | AttentionBottom):
        assert split.rank is not None and linear is not None
        v = cut.block.down if isinstance(cut, FeedForwardBottom) else cut.attention.output
        v.weight.copy_(factors(linear.weight, split.rank)[2])
    elif isinstance(cut, ProjectionBottom):
        assert basis is not None
        _set_weight(cut.encode, basis.encode)
        cut.get_buffer("offset").copy_(basis.offset)


@torch.no_grad()
def start_top(cut: TopCut, split: Split, linear: nn.Linear | None, basis: Basis | None) -> None:
    """Initialise U, S and the bias from W, or D and anchor from the basis."""
    if isinstance(cut, FeedForwardTop | AttentionTop):
        assert split.rank is not None and linear is not None
        u, s, _ = factors(linear.weight, split.rank)
        cut.u.weight.copy_(u)
        cut.u.bias.copy_(linear.bias)
        cut.s.weight.copy_(s)
    elif isinstance(cut, ProjectionTop):
        assert basis is not None
        cut.start(basis.decode, basis.anchor)


def _set_weight(linear: nn.Linear, weight: Tensor) -> None:
    if is_parametrized(linear):
        linear.weight = weight  # through the parametrization
    else:
        linear.weight.copy_(weight)
