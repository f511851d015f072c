"""Where and how an encoder or a decoder is cut so that few features of a row cross: the settings,
and what stands at the boundary on either side. Stages are in low_rank_split.py and
causal_stage.py, the basis is estimated in calibration.py.

Shapes: R rows (tokens that are not padding), H features, K = rank features that cross, P anchor
positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, register_parametrization

from xcloud.base.errors import ConfigError
from xcloud.base.settings import NotNegative, Positive, settings
from xcloud.cluster.frame import TensorSpec
from xcloud.models.encoder import EncoderLayer, Packing

Anchor = Literal["none", "mean", "position"]


@settings("split")
class Split:
    """Where the encoder is cut, and how its output is reduced to `rank` features per row; each
    setting: docs/low-rank-split.md. Without a layer it is the unsplit reference model: full rows
    cross after block 0, and all other settings are ignored. The methods:

    svd: replace one linear layer of the block (`linear`) by W = U S V (truncated SVD), all three
        trained, and cut between S and V. The skip connection around that sub-layer is dropped,
        because its rows do not cross. As published: Shi et al., arXiv:2211.16703; Pan et al., ZTE
        2023(4), section 2.2.2.
    identity: the block is kept; its output h crosses as E h and continues as D E h, E with random
        orthonormal rows and D = E' initially: a low-rank identity path across the cut, after
        ResBM, arXiv:2604.11947. Difference: linear, with no other path.
    pca: as identity, but E and D start as the principal components of h around its mean.
    orthogonal: as pca, with E and D kept orthonormal during training; the mean of h at each
        position is subtracted before the cut and added after it, after MAPL, arXiv:2606.05484.
        Difference: MAPL's anchor is per token id, which the other cloud must not know.
    LoRA's down projection (section 1.2 of the paper) does not apply: in y = W x + B A x the other
        cloud needs W x besides A x, so x must cross in full, or W be dropped. Without W it is the
        svd cut with random initial weights.
    The anchor that is added after D is trained. With calibration=own the other cloud receives D
    and the anchor in one message before the first step, 4 K H bytes and 4 H or 4 P H.
    """

    layer: NotNegative | None
    rank: Positive | None = 8
    method: Literal["svd", "identity", "pca", "orthogonal"] = "svd"
    linear: Literal["feed_forward_output", "attention_output"] = "feed_forward_output"
    anchor: Anchor | None = None
    whiten: bool = False
    freeze_bottom: bool = False
    calibration: Literal["own", "public"] = "own"
    calibration_texts: Positive = 2000
    calibration_pairs: bool = False
    head_rank: Positive | None = None

    def __post_init__(self) -> None:
        unwhitened = {"whiten": (False,), "calibration": ("own",)}
        if self.method == "svd":
            why = "applies only to the methods identity, pca, orthogonal: remove it, or choose one"
            self._refuse(f"{why} of them", anchor=(None, "none"), **unwhitened)
        elif self.linear != "feed_forward_output":
            raise ConfigError(
                "split.linear says which linear layer split.method=svd replaces; "
                f"{self.method} cuts after the whole block: remove it"
            )
        if self.whiten and self.method in ("identity", "orthogonal"):
            raise ConfigError(
                "split.whiten scales the principal components of split.method=pca, not "
                f"{self.method}"
            )
        if self.rank is None:
            why = "has no effect if all features cross (split.rank=null): remove it"
            self._refuse(why, linear=("feed_forward_output",), anchor=(None,), **unwhitened)

    def _refuse(self, why: str, **usual: tuple[object, ...]) -> None:
        for name, allowed in usual.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"split.{name} {why}")

    @property
    def is_low_rank(self) -> bool:
        """Whether fewer features cross than there are."""
        return self.layer is not None and self.rank is not None

    @property
    def is_inside(self) -> bool:
        """Whether the cut is inside of its block, not after it."""
        return self.is_low_rank and self.method == "svd"

    @property
    def block(self) -> int:
        """The block that is cut, or after which rows cross."""
        return self.layer or 0

    @property
    def anchor_kind(self) -> Anchor:
        usual: dict[str, Anchor] = {
            "svd": "none",
            "identity": "none",
            "pca": "mean",
            "orthogonal": "position",
        }
        return self.anchor or usual[self.method]

    def num_places(self, max_length: int) -> int:
        """Anchors: none, one, or one for each position."""
        return {"none": 0, "mean": 1, "position": max_length}[self.anchor_kind]

    @property
    def is_measured(self) -> bool:
        """Whether a basis or an anchor is estimated before training."""
        is_given = self.method in ("svd", "identity") and self.anchor_kind == "none"
        return self.is_low_rank and not is_given

    @property
    def needs_public_text(self) -> bool:
        return self.is_measured and self.calibration == "public"

    @property
    def hands_over(self) -> bool:
        """Whether the owner estimates the basis and sends the other cloud its half."""
        return self.is_measured and self.calibration == "own"

    @property
    def freezes_bottom(self) -> bool:
        return self.layer is not None and self.freeze_bottom

    @property
    def kept_head_rank(self) -> int | None:
        return self.head_rank if self.layer is not None else None

    def describe(self) -> str:
        if self.layer is None:
            return "unsplit (split.layer=null: all other split settings are ignored)"
        if self.rank is None:
            return f"cut after block {self.layer}, full width"
        return f"cut in block {self.layer}, rank {self.rank} by {self.method}"

    def start_specs(self, hidden: int, max_length: int) -> tuple[TensorSpec, ...]:
        """What the owner sends before the first step: D [H, K] and the anchor [P, H]."""
        if not self.hands_over:
            return ()
        shapes = ((hidden, self.rank or 0), (self.num_places(max_length), hidden))
        return tuple(TensorSpec(shape, torch.float32) for shape in shapes)

    def handed_over(self, stage: int, basis: Basis | None) -> tuple[Tensor, ...]:
        """What a stage sends to the next one before the first step, as start_specs says."""
        if stage or basis is None or not self.hands_over:
            return ()
        return basis.decode, basis.anchor

    def check_rank(self, hidden: int) -> None:
        """Raise ConfigError if a rank exceeds the number of features."""
        crossing = {"rank": self.rank if self.is_low_rank else None}
        for name, rank in (crossing | {"head_rank": self.kept_head_rank}).items():
            if rank is not None and rank > hidden:
                raise ConfigError(
                    f"split.{name} is {rank}, but the model has {hidden} features; give at most "
                    f"{hidden}, or null to let all cross"
                )


@dataclass(frozen=True)
class Basis:
    """Initial values of the projections, from calibration.py: E [K, H], D [H, K], anchor [P, H].
    P is 0 without an anchor."""

    encode: Tensor
    decode: Tensor
    anchor: Tensor


def make_cut(
    split: Split,
    stage: int,
    hidden: int,
    max_length: int,
    basis: Basis | None,
    block: EncoderLayer | None = None,
) -> nn.Module | None:
    """What stands at the boundary after stage 0 on this stage's side, a module of (rows, packing);
    None where all features cross. basis None: to be filled from a file. block: the cut one, of
    which a cut inside of it consumes its side.
    """
    if stage > 1 or not split.is_low_rank:
        return None
    assert split.rank is not None
    if not split.is_inside:
        cut = Projection(split, bool(stage), hidden, max_length)
        if basis is not None and stage:
            cut.start(basis.decode, basis.anchor)
        elif basis is not None:
            cut.start(basis.encode, -basis.anchor @ basis.encode.T)
        return cut
    assert block is not None
    in_attention = split.linear == "attention_output"
    if stage:
        return SvdTop(block, split.rank, in_attention)
    if not in_attention:
        return FeedForwardBottom(block, split.rank)
    block.attention.output = _first_factor(block.attention.output, split.rank)
    return block.attention


class FeedForwardBottom(nn.Module):
    """V activation(up(x)), with x the attention output. `block.down` is V here."""

    def __init__(self, block: EncoderLayer, rank: int) -> None:
        super().__init__()
        self.block = block
        block.down = _first_factor(block.down, rank)
        del block.norm

    def forward(self, rows_RH: Tensor, packing: Packing) -> Tensor:
        block = self.block
        sent: Tensor = block.down(block.activation(block.up(block.attend(rows_RH, packing))))
        return sent


class SvdTop(nn.Module):
    """LN(U S z + b), of the replaced layer W; then, if that is attention's, the feed-forward
    sub-layer with its own skip connection."""

    def __init__(self, block: EncoderLayer, rank: int, in_attention: bool) -> None:
        super().__init__()
        linear = block.attention.output if in_attention else block.down
        self.s = nn.Linear(rank, rank, bias=False)
        self.u = nn.Linear(rank, linear.out_features)
        u, s, _ = factors(linear.weight, rank)
        with torch.no_grad():
            self.u.weight.copy_(u)
            self.u.bias.copy_(linear.bias)
            self.s.weight.copy_(s)
        del block.attention
        if not in_attention:
            del block.attention_norm, block.up, block.down
        self.block, self._in_attention = block, in_attention

    def forward(self, sent_RK: Tensor, packing: Packing) -> Tensor:
        block = self.block
        rows: Tensor = block.dropout(self.u(self.s(sent_RK)))
        if self._in_attention:
            return block.feed(block.attention_norm(rows))
        rows = block.norm(rows)
        return rows


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


class Projection(nn.Module):
    """Down: E h - E anchor; up: D z + anchor, which is trained. The matrix stays orthonormal if
    the split's method says so. Arbitrary values before `start`.

    shift: [P, out_features], one for all rows or for each position; P is 0 without an anchor.
    """

    def __init__(self, split: Split, is_up: bool, hidden: int, max_length: int) -> None:
        super().__init__()
        assert split.rank is not None
        ends = (split.rank, hidden) if is_up else (hidden, split.rank)
        self.linear = nn.Linear(*ends, bias=False)
        if split.method == "orthogonal":
            register_parametrization(self.linear, "weight", Orthonormal())
        shift = torch.zeros(split.num_places(max_length), ends[1])
        is_trained = is_up and len(shift) > 0
        self.shift = nn.Parameter(shift) if is_trained else nn.Buffer(shift)

    @torch.no_grad()
    def start(self, weight: Tensor, shift: Tensor) -> None:
        if is_parametrized(self.linear):
            self.linear.weight = weight  # through the parametrization
        else:
            self.linear.weight.copy_(weight)
        self.shift.copy_(shift)

    def forward(self, rows: Tensor, packing: Packing) -> Tensor:
        rows = self.linear(rows)
        if len(self.shift) < 2:
            return rows + self.shift if len(self.shift) else rows
        return rows + self.shift[packing.positions]


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
