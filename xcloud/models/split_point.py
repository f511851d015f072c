"""Where and how an encoder or a decoder is cut so that few features of a row cross: the settings,
the projections at the boundary, and the basis that they start from. On public text every cloud
with the checkpoint estimates it alone; on the owner's text the owner does and sends the other
cloud its half (Stage.handed_over). The cut inside a block is low_rank_split.py's.

Shapes: R rows (tokens that are not padding), H features, K = rank features that cross, P anchor
positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, register_parametrization
from torch.nn.utils.rnn import pad_sequence

from xcloud.base.errors import ConfigError
from xcloud.base.settings import NotNegative, Positive, settings
from xcloud.contracts.model import NO_TOKEN, Batch, BuildContext, Stage, TokenIds
from xcloud.models.encoder import Packing
from xcloud.models.pretraining import PublicTexts
from xcloud.models.stages import TEXT, TYPES, seeded
from xcloud.net.frame import TensorSpec
from xcloud.pretrained import key_of, make_once

CODE_VERSION = 4  # part of the cache key: increase it when equal settings would give another basis
BATCH_TEXTS = 32
RARE_ROWS = 10.0  # shrinkage: a position seen this often weighs its own mean by one half

Anchor = Literal["none", "mean", "position"]
USUAL_ANCHOR = {"pca": "mean", "orthogonal": "position"}
PROJECTIONS = ("identity", "pca", "orthogonal")
OF_METHODS: dict[str, tuple[str, ...]] = {
    "linear": ("svd",),
    "whiten": ("pca",),
    "anchor": PROJECTIONS,
    "calibration": PROJECTIONS,
}


@settings("split")
class Split:
    """The point at which an encoder is split, with the reduction of its output to `rank` features
    a row.

    The methods:

    svd: replace one linear layer of the block (`linear`) by W = U S V (truncated SVD), all three
        trained, and cut between S and V. The skip connection around that sub-layer is dropped,
        because its rows do not cross. As published: Shi et al., arXiv:2211.16703; Pan et al., ZTE
        2023(4), section 2.2.2.
    identity: the block is kept; its output h crosses as E h and continues as D E h, E with random
        orthonormal rows and D = E' initially: a low-rank identity path across the cut, after
        ResBM, arXiv:2604.11947. Difference: linear, with no other path.
    pca: the same as identity, but E and D start as the principal components of h around its mean.
    orthogonal: the same as pca, with E and D kept orthonormal during training. The mean of h at
        each position is subtracted before the cut and added after it, as in MAPL,
        arXiv:2606.05484. Difference: MAPL's anchor is per token id, which the other cloud must
        not know.
    LoRA's down projection (section 1.2 of the paper) does not apply: in y = W x + B A x the other
        cloud needs W x besides A x, so x must cross in full, or W be dropped. Without W it is the
        svd cut with random initial weights.
    The anchor that is added after D is trained.

    layer: the number, from 0, of the block that is cut or behind which rows are reduced. None: the
        unsplit reference model, where full rows cross after block 0 and all other settings are
        ignored.
    rank: the number of features of a row that cross. None: all of them.
    method: the way in which rows are reduced, one of those above.
    linear: the linear layer that svd cuts.
    anchor: the vector that is subtracted before the cut and added after it: none, mean (of the
        rows) or position (a mean for each). None: none for identity, mean for pca, position for
        orthogonal.
    whiten: scale the features that cross to unit variance with pca, so that one quantisation scale
        fits all.
    freeze_bottom: train nothing before the cut, so that no gradient crosses it.
    calibration: the text on which a basis is estimated. own = the owner's training text; public =
        the same public text in every cloud.
    calibration_texts: the number of these texts.
    calibration_pairs: join public texts to pairs, for tasks with pairs.
    head_rank: the number of features of a row that cross to a separate head stage. None: all of
        them.
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
        # A setting that its method does not read must stay as it is by default: it would be
        # ignored without a word.
        usual = {setting.name: setting.default for setting in fields(self)}
        for name, methods in OF_METHODS.items():
            applies = self.rank is not None and self.method in methods
            if not applies and getattr(self, name) not in (usual[name], "none"):
                raise ConfigError(
                    f"split.{name} applies only to split.method={', '.join(methods)} with a rank: "
                    "remove it"
                )
        known: dict[str, object] = {"anchor": "none"}
        if self.layer is None:
            known |= {"rank": None, "head_rank": None, "freeze_bottom": False}
        elif self.rank is not None:
            known["anchor"] = self.anchor or USUAL_ANCHOR.get(self.method, "none")
        for name, value in known.items():  # what is left out or ignored, as if it had been given
            object.__setattr__(self, name, value)

    @property
    def is_inside(self) -> bool:
        """Return whether the cut is inside its block, not after it."""
        return self.rank is not None and self.method == "svd"

    @property
    def block(self) -> int:
        """The block that is cut, or after which rows cross."""
        return self.layer or 0

    def num_places(self, max_length: int) -> int:
        """Anchors: none, one, or one for each position."""
        return {"mean": 1, "position": max_length}.get(str(self.anchor), 0)

    @property
    def is_measured(self) -> bool:
        """Return whether a basis or an anchor is estimated before training."""
        return self.rank is not None and (self.method in USUAL_ANCHOR or self.anchor != "none")

    @property
    def needs_public_text(self) -> bool:
        return self.is_measured and self.calibration == "public"

    def describe(self) -> str:
        if self.layer is None:
            return "unsplit (split.layer=null: all other split settings are ignored)"
        if self.rank is None:
            return f"cut after block {self.layer}, full width"
        return f"cut in block {self.layer}, rank {self.rank} by {self.method}"

    def width(self, hidden: int) -> int:
        """Features that cross."""
        return hidden if self.rank is None else self.rank

    def start_specs(self, hidden: int, max_length: int) -> tuple[TensorSpec, ...]:
        """Return what an owner who estimates the basis sends before the first step: D [H, K] and
        the anchor [P, H]."""
        if not self.is_measured or self.needs_public_text:
            return ()
        shapes = ((hidden, self.width(hidden)), (self.num_places(max_length), hidden))
        return tuple(TensorSpec(shape, dtype=torch.float32) for shape in shapes)

    def check(self, num_blocks: int | None, hidden: int) -> None:
        """Raise ConfigError for a block that the model lacks, or more features than it has."""
        if num_blocks is not None and self.block >= num_blocks:
            raise ConfigError(
                f"model.split.layer must be 0..{num_blocks - 1} or null, got {self.layer}"
            )
        for name, rank in {"rank": self.rank, "head_rank": self.head_rank}.items():
            if rank is not None and rank > hidden:
                raise ConfigError(
                    f"split.{name} is {rank}, but the model has {hidden} features: lower it"
                )


class Orthonormal(nn.Module):
    """Q of X = QR (of X' if X is wide), R with positive diagonal. Equals X if X is orthonormal,
    and is invariant to scaling X, so weight decay has no effect."""

    def forward(self, x: Tensor) -> Tensor:
        tall = x if x.shape[0] >= x.shape[1] else x.T
        factor, triangle = torch.linalg.qr(tall)
        # A positive diagonal makes the factorization unique, so that a small step of X is a small
        # step of Q.
        unique: Tensor = factor * triangle.diagonal().sign()
        return unique if x.shape[0] >= x.shape[1] else unique.T

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


class Basis(NamedTuple):
    """The start of projections: D [H, K], anchor [P, H], E [K, H]. P is 0 without an anchor."""

    decode: Tensor
    anchor: Tensor
    encode: Tensor


class Projection(nn.Module):
    """Down: E h - E anchor; up: D z + anchor, which is trained. The matrix stays orthonormal if
    the split's method says so. Arbitrary values before `start`.

    shift: [P, out_features], one for all rows or for each position.
    """

    def __init__(self, split: Split, is_up: bool, hidden: int, max_length: int) -> None:
        super().__init__()
        ends = (split.width(hidden), hidden) if is_up else (hidden, split.width(hidden))
        self.linear = nn.Linear(*ends, bias=False)
        if split.method == "orthogonal":
            register_parametrization(self.linear, "weight", Orthonormal())
        shift = torch.zeros(split.num_places(max_length), ends[1])
        self._is_up = is_up
        is_trained = is_up and len(shift) > 0
        # Down it is -E anchor, a constant that follows from both.
        self.shift = nn.Parameter(shift) if is_trained else nn.Buffer(shift)
        # Digests of public text that every cloud measures its basis on, and of the network.
        self.measured_on: dict[str, str] = {}

    @torch.no_grad()
    def start(self, decode: Tensor, anchor: Tensor, encode: Tensor | None = None) -> None:
        """From a Basis, of which the far side of the owner's text is given no E."""
        weight = decode
        shift = anchor
        if not self._is_up:
            assert encode is not None
            weight = encode
            shift = -anchor @ encode.T
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


def projection_at(
    split: Split,
    stage: int,
    sizes: tuple[int, int],
    lower: Callable[[], Stage],
    public: PublicTexts | None,
    context: BuildContext,
) -> tuple[Projection | None, tuple[Tensor, ...]]:
    """Return what stands at the boundary after stage 0 on this stage's side, None if nothing, and
    what the stage hands over. Both clouds' start from one basis; of an exported stage it is to be
    filled from its file, and on the other side of the owner's text by what the owner hands over.

    sizes: the network's words and features. lower, public: see measured_basis.
    Raises ConfigError or DataError if the text does not fit the network.
    """
    if stage > 1 or split.rank is None or split.is_inside:
        return None, ()
    hidden = sizes[1]
    max_length = context.max_length
    cut = Projection(split, is_up=bool(stage), hidden=hidden, max_length=max_length)
    specs = split.start_specs(hidden, max_length)
    if stage and specs:
        # Zeros of the right shapes: what the owner of the text hands over replaces them before the
        # first step.
        cut.start(*(torch.zeros(spec.shape) for spec in specs))
    if context.architecture is not None or (stage and specs):
        return cut, ()
    if split.is_measured:
        text = public if split.needs_public_text else None
        basis, digest = measured_basis(
            split, lower=lower(), sizes=sizes, public=text, context=context
        )
        if text is not None:
            cut.measured_on = {"public text of the cut, and blocks below it": digest}
    else:
        encode = orthonormal_rows(split.width(hidden), hidden, context.seed, "cut", split.block)
        basis = Basis(decode=encode.T.contiguous(), anchor=torch.zeros(0, hidden), encode=encode)
    cut.start(*basis)
    return cut, (basis.decode, basis.anchor) if specs else ()


def measured_basis(
    split: Split,
    lower: Stage,
    sizes: tuple[int, int],
    public: PublicTexts | None,
    context: BuildContext,
) -> tuple[Basis, str]:
    """Estimate a basis on public text or (public None) on this cloud's training text. Return it
    and a digest of what it was measured on.

    lower: all up to the cut block and with it, as a first stage for texts that end with NO_TOKEN.
    Cached as cache_dir/cuts/<hash>.safetensors; the hash covers settings, weights and text, and
    the run's seed if the basis starts at random.
    """
    cache_dir, (num_words, hidden) = context.cache_dir, sizes
    ids = public.token_ids(cache_dir) if public is not None else context.vocabularies[TEXT]
    if ids.size > num_words:
        raise ConfigError(
            f"the public text's tokenizer has {ids.size} token ids, but the model has "
            f"{num_words}: give model.public_text the model's own tokenizer"
        )
    if public is not None:
        whose = public.label
        batch = public_batch(split, public, ids, context=context)
    else:
        whose = "the owner's"
        batch = dict(context.samples(split.calibration_texts))
        # Padding is no text: it must not count in the moments.
        batch[TEXT] = batch[TEXT].masked_fill(batch[TEXT] == ids.pad, NO_TOKEN)
    # Settings that do not change the basis must not change its name in the cache.
    measured = replace(split, freeze_bottom=False, head_rank=None)
    described = {
        "code": CODE_VERSION,
        "settings": asdict(measured),
        "places": split.num_places(context.max_length),
        "config": lower.architecture,
        "seed": context.seed if split.method == "identity" else None,
    }
    tensors = lower.state_dict() | {name: batch[name] for name in (TEXT, TYPES)}
    data = (
        f"{name} {list(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes()
        for name, tensor in sorted(tensors.items())
    )
    key = key_of(described, data)
    path = cache_dir / "cuts" / f"{key}.safetensors"

    def make(part: Path) -> None:
        cut = f"cut in block {split.block}"
        context.report(f"{cut}: measuring a basis on {len(batch[TEXT])} texts ({whose})")
        moments = _Moments(
            lower=lower.to(context.device).eval(), hidden=hidden, batch=batch, context=context
        )
        anchor = moments.anchor(split.num_places(context.max_length))
        rank = split.width(hidden)
        if split.method == "identity":
            encode = orthonormal_rows(rank, hidden, context.seed, "cut", split.block)
            decode = encode.T.contiguous()
        else:
            encode, decode, share = moments.components(anchor, rank, whiten=split.whiten)
            context.report(f"{cut}: {rank} features keep {100 * share:.1f} % of the variance")
        save_file({"encode": encode, "decode": decode, "anchor": anchor}, part)

    make_once(path, make)
    return Basis(**load_file(path)), key


def orthonormal_rows(rank: int, hidden: int, seed: int, *names: str | int) -> Tensor:
    """[K, H], random but reproducible from seed and names."""
    with seeded(seed, *names):
        drawn = torch.randn(hidden, rank, dtype=torch.float64)
    columns: Tensor = torch.linalg.qr(drawn)[0]
    return columns.T.float().contiguous()


def largest_entry_sign(columns: Tensor) -> Tensor:
    """Sign of the entry of largest magnitude in each column, on which clouds that compute the
    columns apart agree."""
    return columns.gather(0, columns.abs().argmax(0, keepdim=True))[0].sign()


def public_batch(split: Split, public: PublicTexts, ids: TokenIds, context: BuildContext) -> Batch:
    """`bos a eos`, or `bos a eos b eos` for pairs, at most max_length tokens."""
    num_parts = 1 + split.calibration_pairs
    room = (context.max_length - 1 - num_parts) // num_parts
    sentences = public.sentences(split.calibration_texts * num_parts, context.cache_dir)
    parts = [torch.tensor([*sentence[:room], ids.eos]) for sentence in sentences]
    bos = torch.tensor([ids.bos])
    texts = []
    types = []
    for several in zip(*(parts[n::num_parts] for n in range(num_parts)), strict=False):
        texts.append(torch.cat([bos, *several]))
        numbers = [torch.full_like(part, number) for number, part in enumerate(several)]
        types.append(torch.cat([torch.zeros_like(bos), *numbers]))
    return {
        TEXT: pad_sequence(texts, batch_first=True, padding_value=NO_TOKEN),
        TYPES: pad_sequence(types, batch_first=True),
    }


class _Moments:
    """First and second moments of the block's output rows, in float64."""

    @torch.no_grad()
    def __init__(self, lower: Stage, hidden: int, batch: Batch, context: BuildContext) -> None:
        self.count_P = torch.zeros(context.max_length, dtype=torch.float64)
        self.sum_PH = torch.zeros(context.max_length, hidden, dtype=torch.float64)
        self.product_HH = torch.zeros(hidden, hidden, dtype=torch.float64)
        several = (torch.split(batch[name], BATCH_TEXTS) for name in (TEXT, TYPES))
        for text, types in zip(*several, strict=True):
            sent = lower(None, {TEXT: text, TYPES: types}).send
            rows = sent["hidden"].double().cpu()
            places = sent["places"] if "places" in sent else Packing(sent["counts"]).positions
            places = places.long()
            self.count_P += torch.bincount(places, minlength=context.max_length)
            self.sum_PH.index_add_(0, places, rows)
            self.product_HH += rows.T @ rows

    def anchor(self, places: int) -> Tensor:
        """[P, H]: the mean row, or one per position, shrunk towards the overall mean if rare."""
        mean_H = self.sum_PH.sum(0) / self.count_P.sum()
        if places <= 1:
            return mean_H.float().expand(places, -1).contiguous()
        # As if each position had been seen RARE_ROWS times more, with the overall mean.
        weighted = self.sum_PH + RARE_ROWS * mean_H
        return (weighted / (self.count_P + RARE_ROWS)[:, None]).float()

    def components(self, anchor: Tensor, rank: int, whiten: bool) -> tuple[Tensor, Tensor, float]:
        """E [K, H], D [H, K] and the share of the variance around the anchor they explain."""
        product = self.product_HH
        if len(anchor):
            around = anchor.double().expand(len(self.count_P), -1)
            mixed = self.sum_PH.T @ around
            # sum (h - a)(h - a)' from sums of h and h h' by position: rows need not be kept.
            product = product - mixed - mixed.T + around.T @ (self.count_P[:, None] * around)
        covariance = product / self.count_P.sum()
        # Rounding leaves it not quite symmetric.
        values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
        kept = values.flip(0)[:rank].clamp_min(0)
        basis_HK = vectors.flip(1)[:, :rank]
        # The sign of an eigenvector is free; clouds that estimate it alone must agree on it.
        basis_HK = basis_HK * largest_entry_sign(basis_HK)
        share = float(kept.sum() / values.clamp_min(0).sum())
        # A direction of hardly any variance would else be blown up without bound.
        scale = kept.sqrt().clamp_min(1e-4 * float(kept[0].sqrt())) if whiten else kept * 0 + 1
        encode = (basis_HK / scale).T.float().contiguous()
        return encode, (basis_HK * scale).float().contiguous(), share
