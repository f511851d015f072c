"""One encoder block cut in two so that few features of a row cross: the parts on either side.
Not the stages around them (low_rank_split.py), and no measuring of a basis (calibration.py).

Shapes: R rows (tokens that are not padding), H features, F features inside the feed-forward
sub-layer, K = rank features that cross, P places of an anchor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, register_parametrization

from xcloud.checks import check_choice, check_int
from xcloud.errors import ConfigError
from xcloud.models.attention import Packing
from xcloud.models.encoder import EncoderLayer

METHODS = ("svd", "identity", "pca", "orthogonal")
LINEARS = ("feed_forward_output", "attention_output")
ANCHORS = ("none", "mean", "position")
USUAL_ANCHOR = {"svd": "none", "identity": "none", "pca": "mean", "orthogonal": "position"}


@dataclass(frozen=True)
class Split:
    """Where the encoder is cut, and what is done so that only `rank` features of a row cross.

    layer: block that is cut, from 0. null: the unsplit model, the reference: rows cross whole
        behind block 0, and nothing below acts.
    rank: features that cross; null: all of them cross behind the block, and nothing is lost.
    method:
      svd: one linear layer of the block, W = U S V by truncated SVD, all three trained, cut
        between S and V; the skip connection around that sub-layer is gone: its rows stay behind.
        As published: Shi et al., arXiv:2211.16703; Pan et al., ZTE 2023(4), section 2.2.2.
      identity: the block stays whole; its output h crosses as E h and goes on as D E h, E with
        random orthonormal rows, D = E' at the start: a low-rank identity path across the cut,
        after ResBM, arXiv:2604.11947. Difference: linear, nothing beside that path.
      pca: as identity, but E and D are the principal components of h on public text.
      orthogonal: as pca, and E and D stay orthonormal while they are trained; the mean of h at
        each position is taken out before and put back behind, after MAPL, arXiv:2606.05484.
        Difference: MAPL's anchor is that of the token, which the other cloud must not know.
      LoRA's down projection (section 1.2 of the paper) is none of them: in y = W x + B A x the
      other cloud needs W x besides A x, so x must cross whole, or W be given up. Given up, it is
      the cut of svd with weights that know nothing at the start.
    linear: which W (svd only): the last of the feed-forward sub-layer, or that of attention.
    anchor: what is taken out before E and put back behind D: none, mean (of h on public text),
        position (its mean at each position); null = none for identity, mean for pca, position for
        orthogonal. Trained behind D.
    whiten: scale the features that cross to variance 1 on public text, so that one scale fits all
        of them when they are quantised.
    freeze_bottom: all before the cut, V or E included, keeps its weights, without dropout: then no
        gradient comes back over the border.
    calibration_texts: public texts that basis and anchor are measured on; no private text is.
    calibration_pairs: whether these come as pairs (a task of text pairs).
    warm_start_steps: after that, E, D and anchor are trained for so many steps on public texts so
        that the last hidden rows are those of the unsplit model. Every cloud computes both by
        itself, from the public checkpoint and the public text: nothing crosses.
    head_rank: features of what crosses to the head where that is a stage of its own; null = all.
        The bottleneck is part of the model whatever the number of stages.
    """

    layer: int | None
    rank: int | None = 8
    method: Literal["svd", "identity", "pca", "orthogonal"] = "svd"
    linear: Literal["feed_forward_output", "attention_output"] = "feed_forward_output"
    anchor: Literal["none", "mean", "position"] | None = None
    whiten: bool = False
    freeze_bottom: bool = False
    calibration_texts: int = 2000
    calibration_pairs: bool = False
    warm_start_steps: int = 0
    head_rank: int | None = None

    def __post_init__(self) -> None:
        if self.layer is not None:
            check_int("split.layer", self.layer, 0)
        for name in ("rank", "head_rank"):
            if getattr(self, name) is not None:
                check_int(f"split.{name}", getattr(self, name), 1)
        check_choice("split.method", self.method, METHODS)
        check_choice("split.linear", self.linear, LINEARS)
        check_choice("split.anchor", self.anchor, (None, *ANCHORS))
        for name in ("whiten", "freeze_bottom", "calibration_pairs"):
            check_choice(f"split.{name}", getattr(self, name), (True, False))
        check_int("split.calibration_texts", self.calibration_texts, 1)
        check_int("split.warm_start_steps", self.warm_start_steps, 0)
        if self.method == "svd":
            usual = {"anchor": (None, "none"), "whiten": (False,), "warm_start_steps": (0,)}
            for name, allowed in usual.items():
                if getattr(self, name) not in allowed:
                    raise ConfigError(
                        f"split.{name} belongs to the methods {', '.join(METHODS[1:])}; svd has "
                        f"none: leave it out, or choose one of them"
                    )
        elif self.linear != "feed_forward_output":
            raise ConfigError(
                "split.linear says which linear layer split.method=svd replaces; "
                f"{self.method} cuts behind the whole block: leave it out"
            )
        if self.whiten and self.method in ("identity", "orthogonal"):
            raise ConfigError(
                f"split.whiten scales the principal components of split.method=pca, not "
                f"{self.method}"
            )

    @property
    def is_low_rank(self) -> bool:
        """Whether anything is left out at the cut."""
        return self.layer is not None and self.rank is not None

    @property
    def block(self) -> int:
        """The block that the cut is in, or behind."""
        return self.layer or 0

    @property
    def anchor_kind(self) -> str:
        return self.anchor or USUAL_ANCHOR[self.method]

    @property
    def needs_public_text(self) -> bool:
        """Whether a basis or an anchor is measured before training."""
        if not self.is_low_rank:
            return False
        measured = self.method in ("pca", "orthogonal") or self.anchor_kind != "none"
        return measured or self.warm_start_steps > 0

    @property
    def kept_head_rank(self) -> int | None:
        return self.head_rank if self.layer is not None else None

    def describe(self) -> str:
        if self.layer is None:
            return "unsplit (split.layer=null: rank and method do not act)"
        if self.rank is None:
            return f"cut behind block {self.layer}, full width"
        return f"cut in block {self.layer}, rank {self.rank} by {self.method}"


class BottomCut(nn.Module):
    """The cut block's part before the border: rows [R, H] -> what crosses [R, K]."""

    def forward(self, rows_RH: Tensor, packing: Packing) -> Tensor:
        raise NotImplementedError


class TopCut(nn.Module):
    """The cut block's part behind the border: what crossed [R, K] -> the block's rows [R, H]."""

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
    """V activation(up(x)), x behind attention. `block.down` is V here."""

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
    """The Q of X = QR (of X' where X is wide), R with a positive diagonal: X itself where it is
    orthonormal already, and the same for any multiple of X, so that weight decay does nothing.
    """

    def forward(self, x: Tensor) -> Tensor:
        tall = x if x.shape[0] >= x.shape[1] else x.T
        factor, triangle = torch.linalg.qr(tall)
        unique: Tensor = factor * triangle.diagonal().sign()
        return unique if x.shape[0] >= x.shape[1] else unique.T

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


class ProjectionBottom(BottomCut):
    """E (h - anchor), h the block's output. offset: E anchor [P, K], or [0, K] without one."""

    def __init__(self, block: EncoderLayer, rank: int, places: int, orthonormal: bool) -> None:
        super().__init__()
        self.block = block
        self.encode = nn.Linear(block.down.out_features, rank, bias=False)
        self.register_buffer("offset", torch.zeros(places, rank))
        if orthonormal:
            register_parametrization(self.encode, "weight", Orthonormal())

    def forward(self, rows_RH: Tensor, packing: Packing) -> Tensor:
        sent: Tensor = self.encode(self.block(rows_RH, packing))
        offset = self.get_buffer("offset")
        return sent - at_places(offset, packing) if len(offset) else sent


class ProjectionTop(TopCut):
    """D z + anchor. anchor: [P, H], or [0, H] without one."""

    def __init__(self, hidden: int, rank: int, places: int, orthonormal: bool) -> None:
        super().__init__()
        self.decode = nn.Linear(rank, hidden, bias=False)
        self.anchor = nn.Parameter(torch.zeros(places, hidden), requires_grad=places > 0)
        if orthonormal:
            register_parametrization(self.decode, "weight", Orthonormal())

    def forward(self, sent_RK: Tensor, packing: Packing) -> Tensor:
        rows: Tensor = self.decode(sent_RK)
        return rows + at_places(self.anchor, packing) if len(self.anchor) else rows


def at_places(table: Tensor, packing: Packing) -> Tensor:
    """A table's line for each row: one line for all, or one for each position."""
    return table if len(table) == 1 else table[packing.positions]


def num_places(anchor: str, max_length: int) -> int:
    return {"none": 0, "mean": 1, "position": max_length}[anchor]


@dataclass(frozen=True)
class Basis:
    """Start of a projection: E [K, H], D [H, K], anchor [P, H], offset [P, K] = E anchor; made by
    calibration.py. P is 0 without an anchor.
    """

    encode: Tensor
    decode: Tensor
    anchor: Tensor
    offset: Tensor


def make_bottom(split: Split, block: EncoderLayer, max_length: int) -> BottomCut:
    """The part before the border, out of `block`, which is used up. U, S, V or E, D: `start_…`."""
    if not split.is_low_rank:
        return WholeBottom(block)
    assert split.rank is not None
    if split.method != "svd":
        places = num_places(split.anchor_kind, max_length)
        return ProjectionBottom(block, split.rank, places, split.method == "orthogonal")
    if split.linear == "attention_output":
        v = nn.Linear(block.attention.output.in_features, split.rank, bias=False)
        block.attention.output = v
        return AttentionBottom(block)
    block.down = nn.Linear(block.down.in_features, split.rank, bias=False)
    return FeedForwardBottom(block)


def make_top(split: Split, block: EncoderLayer, max_length: int) -> TopCut:
    """The part behind the border, out of `block`, which is used up."""
    if not split.is_low_rank:
        return WholeTop()
    assert split.rank is not None
    if split.method != "svd":
        places = num_places(split.anchor_kind, max_length)
        return ProjectionTop(
            block.down.out_features, split.rank, places, split.method == "orthogonal"
        )
    if split.linear == "attention_output":
        return AttentionTop(block, split.rank)
    return FeedForwardTop(block, split.rank)


def replaced_linear(split: Split, block: EncoderLayer) -> nn.Linear:
    """W of split.method=svd."""
    return block.down if split.linear == "feed_forward_output" else block.attention.output


@torch.no_grad()
def factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """U [m, K], S [K, K], V [K, d] of W [m, d], from the exact SVD in float64. The largest entry
    of each column of U is positive, so that clouds which compute them apart agree on the signs.
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
    """Give V or E its start. linear: W as it was, for svd; basis: for the other methods."""
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
    """Give U, S and the bias of W, or D and anchor, their start."""
    if isinstance(cut, FeedForwardTop | AttentionTop):
        assert split.rank is not None and linear is not None
        u, s, _ = factors(linear.weight, split.rank)
        cut.u.weight.copy_(u)
        cut.u.bias.copy_(linear.bias)
        cut.s.weight.copy_(s)
    elif isinstance(cut, ProjectionTop):
        assert basis is not None
        _set_weight(cut.decode, basis.decode)
        cut.anchor.copy_(basis.anchor)


def _set_weight(linear: nn.Linear, weight: Tensor) -> None:
    if is_parametrized(linear):
        linear.weight = weight  # through the parametrization
    else:
        linear.weight.copy_(weight)


def check_rank(split: Split, hidden: int) -> None:
    """Raise ConfigError when more features than there are would cross."""
    if split.is_low_rank:
        assert split.rank is not None
        if split.rank > hidden:
            raise ConfigError(
                f"split.rank is {split.rank}, but the encoder has {hidden} features; give at most "
                f"{hidden}, or null to let all cross"
            )
    if split.kept_head_rank is not None and split.kept_head_rank > hidden:
        raise ConfigError(
            f"split.head_rank is {split.head_rank}, but the encoder has {hidden} features; give "
            f"at most {hidden}, or null"
        )
