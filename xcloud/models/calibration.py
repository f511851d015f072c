"""The basis of a cut, estimated before training: principal components and anchor.
On public text every cloud with the checkpoint computes it alone; on the owner's text the owner
computes it and sends the other cloud its half (Stage.hand_over).

Shapes: R rows (tokens that are not padding), H features, K = rank features, P anchor positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from xcloud.base.errors import ConfigError
from xcloud.contracts.model import Batch, BuildContext, TokenIds
from xcloud.hub import bytes_of, key_of, make_once
from xcloud.models.attention import Packing
from xcloud.models.backbone import Weights
from xcloud.models.encoder import Encoder
from xcloud.models.low_rank_cut import Basis, largest_entry_sign
from xcloud.models.low_rank_stages import orthonormal_rows
from xcloud.models.made_once import PublicTexts
from xcloud.models.split_point import Split
from xcloud.models.stages import seeded

CODE_VERSION = 3  # part of the cache key: increase it when equal settings would give another basis
BATCH_TEXTS = 32
RARE_ROWS = 10.0  # shrinkage: a position seen this often weighs its own mean by one half


class CutBlock(Protocol):
    """The block whose output is reduced, with all that comes before it.

    described, tensors: settings and weights that its output follows from, for the cache.
    """

    num_words: int
    hidden: int
    described: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def prepare(self, device: torch.device) -> None:
        """Before the first `rows`, which need not come: the basis may be in the cache."""

    def rows(self, ids_R: Tensor, types_R: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """Its output [R, H] without dropout, and the place [R] that the anchor of each row has."""


class EncoderBlock(CutBlock):
    """Block number `block` of an encoder."""

    def __init__(self, weights: Weights, block: int) -> None:
        assert weights.tensors is not None
        self._config, self._block = weights.config, block
        self.num_words, self.hidden = weights.config.vocab_size, weights.config.hidden
        self.described, self.tensors = asdict(weights.config), weights.tensors

    def prepare(self, device: torch.device) -> None:
        config = replace(self._config, dropout=0.0, attention_dropout=0.0)
        with seeded(0):
            self._encoder = Encoder(config, range(self._block + 1), head=False)
        self._encoder.load_part(self.tensors)
        self._encoder.to(device).eval().requires_grad_(False)

    def rows(self, ids_R: Tensor, types_R: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        encoder = self._encoder
        assert encoder.embeddings is not None
        known = types_R if self._config.type_vocab_size > 1 else None
        rows: Tensor = encoder.embeddings(ids_R, packing, known)
        for i in range(self._block + 1):
            rows = encoder.layer(i)(rows, packing)
        return rows, packing.positions


def basis_of(
    split: Split,
    stage: int,
    hidden: int,
    block: Callable[[], CutBlock],
    public: PublicTexts | None,
    context: BuildContext,
) -> Basis | None:
    """What the projections on both sides of the cut after stage 0 start from, equal in both
    clouds; None in other stages, and where no features are reduced.

    block: the cut block, built only where it is measured. public: where a basis is estimated on
    public text. In stage 1 a basis of the owner's text is zero: it comes before the first step.
    Raises ConfigError or DataError if the text does not fit the network.
    """
    if stage > 1 or not split.is_low_rank:
        return None
    if not split.is_measured:
        # E of random orthonormal rows, D = E', no anchor: split.method=identity.
        return _around(_random_rows(split, hidden, context.seed), torch.zeros(0, hidden))
    if stage and split.hands_over:
        assert split.rank is not None
        anchor = torch.zeros(split.num_places(context.max_length), hidden)
        return _around(torch.zeros(split.rank, hidden), anchor)
    return measured_basis(split, block(), public if split.needs_public_text else None, context)


def measured_basis(
    split: Split, cut: CutBlock, public: PublicTexts | None, context: BuildContext
) -> Basis:
    """Basis and anchor, estimated on public text or (public None) on this cloud's training text.

    Cached as cache_dir/cuts/<hash>.safetensors. The hash covers settings, weights and text, and
    the run's seed if the basis starts at random.
    """
    cache_dir, max_length = context.cache_dir, context.max_length
    ids = public.token_ids(cache_dir) if public is not None else context.vocabularies["text"]
    if ids.size > cut.num_words:
        raise ConfigError(
            f"the public text's tokenizer has {ids.size} token ids, but the model has "
            f"{cut.num_words}: give model.public_text the model's own tokenizer"
        )
    if public is not None:
        wanted = split.calibration_texts * (1 + split.calibration_pairs)
        sentences = public.sentences(wanted, cache_dir)
        whose, texts = public.describe(), _Texts.of(split, sentences, ids, max_length)
    else:
        batch = context.samples(split.calibration_texts)
        whose, texts = "the owner's", _Texts.of_batch(batch, ids.pad)
    drawn = context.seed if split.method == "identity" else None
    path = cache_dir / "cuts" / f"{_key(split, cut, texts, max_length, drawn)}.safetensors"

    def make(part: Path) -> None:
        context.report(
            f"cut in block {split.block}: measuring a basis on {len(texts.ids)} texts ({whose})"
        )
        save_file(asdict(_measure(split, cut, texts, context)), part)

    make_once(path, make)
    return Basis(**load_file(path))


def _random_rows(split: Split, hidden: int, seed: int) -> Tensor:
    assert split.rank is not None
    return orthonormal_rows(split.rank, hidden, seed, "cut", split.block)


def _around(encode: Tensor, anchor: Tensor) -> Basis:
    """With the transpose of E for D."""
    return Basis(encode, encode.T.contiguous(), anchor, anchor @ encode.T)


@dataclass(frozen=True)
class _Texts:
    """Texts with special ids, and the type of each token."""

    ids: Sequence[Sequence[int]]
    types: Sequence[Sequence[int]]

    @classmethod
    def of(
        cls, split: Split, sentences: Sequence[Sequence[int]], ids: TokenIds, max_length: int
    ) -> _Texts:
        """`bos a eos`, or `bos a eos b eos` for pairs, at most max_length tokens."""
        given = [list(s) for s in sentences]
        if not split.calibration_pairs:
            room = max_length - 2
            whole = [[ids.bos, *s[:room], ids.eos] for s in given]
            return cls(whole, [[0] * len(t) for t in whole])
        room = (max_length - 3) // 2
        firsts = [[ids.bos, *s[:room], ids.eos] for s in given[0::2]]
        pairs = [[*a, *b[:room], ids.eos] for a, b in zip(firsts, given[1::2], strict=False)]
        return cls(
            pairs,
            [[0] * len(a) + [1] * (len(t) - len(a)) for a, t in zip(firsts, pairs, strict=False)],
        )

    @classmethod
    def of_batch(cls, batch: Batch, pad: int) -> _Texts:
        """From a batch's "text" and "types", without padding."""
        text = batch["text"]
        ids, types = (
            [row[kept].tolist() for row, kept in zip(field, text != pad, strict=True)]
            for field in (text, batch["types"])
        )
        return cls(ids, types)

    def batches(self, order: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, Packing]]:
        """ids [R], types [R] and packing."""
        for start in range(0, len(order), BATCH_TEXTS):
            chosen = order[start : start + BATCH_TEXTS]
            rows = [torch.tensor(self.ids[i]) for i in chosen]
            types = [torch.tensor(self.types[i]) for i in chosen]
            packing = Packing(torch.tensor([len(row) for row in rows]))
            yield torch.cat(rows), torch.cat(types), packing


def _key(split: Split, cut: CutBlock, texts: _Texts, max_length: int, seed: int | None) -> str:
    settings = {
        name: value
        for name, value in asdict(split).items()
        if name not in ("linear", "freeze_bottom", "head_rank", "anchor")
    }
    described = {
        "code": CODE_VERSION,
        "settings": settings | {"anchor": split.anchor_kind},
        "places": split.num_places(max_length),
        "config": cut.described,
        "seed": seed,
    }
    weights = (
        name.encode() + tensor.contiguous().numpy().tobytes()
        for name, tensor in sorted(cut.tensors.items())
    )
    return key_of(described, weights, bytes_of(texts.ids), bytes_of(texts.types))


def _measure(split: Split, cut: CutBlock, texts: _Texts, context: BuildContext) -> Basis:
    moments = _Moments(cut, texts, context.max_length, context.device)
    anchor = moments.anchor(split.num_places(context.max_length))
    if split.method == "identity":
        return _around(_random_rows(split, cut.hidden, context.seed), anchor)
    assert split.rank is not None
    encode, decode, share = moments.components(anchor, split.rank, split.whiten)
    context.report(
        f"cut in block {split.block}: {split.rank} features keep {100 * share:.1f} % of the "
        "variance"
    )
    return Basis(encode, decode, anchor, anchor @ encode.T)


class _Moments:
    """First and second moments of the block's output rows, in float64."""

    @torch.no_grad()
    def __init__(
        self, cut: CutBlock, texts: _Texts, max_length: int, device: torch.device
    ) -> None:
        hidden = cut.hidden
        cut.prepare(device)
        self.count_P = torch.zeros(max_length, dtype=torch.float64)
        self.sum_PH = torch.zeros(max_length, hidden, dtype=torch.float64)
        self.product_HH = torch.zeros(hidden, hidden, dtype=torch.float64)
        for ids, types, packing in texts.batches(range(len(texts.ids))):
            moved = Packing(packing.counts.to(device))
            rows, places = cut.rows(ids.to(device), types.to(device), moved)
            rows, places = rows.double().cpu(), places.cpu()
            self.count_P += torch.bincount(places, minlength=max_length)
            self.sum_PH.index_add_(0, places, rows)
            self.product_HH += rows.T @ rows

    def anchor(self, places: int) -> Tensor:
        """[P, H]: the mean row, or one per position, shrunk towards the overall mean if rare."""
        mean_H = self.sum_PH.sum(0) / self.count_P.sum()
        if places <= 1:
            return mean_H.float().expand(places, -1).contiguous()
        weighted = self.sum_PH + RARE_ROWS * mean_H
        return (weighted / (self.count_P + RARE_ROWS)[:, None]).float()

    def components(self, anchor: Tensor, rank: int, whiten: bool) -> tuple[Tensor, Tensor, float]:
        """E [K, H], D [H, K] and the share of the variance around the anchor they explain."""
        product = self.product_HH
        if len(anchor):
            around = anchor.double().expand(len(self.count_P), -1)
            mixed = self.sum_PH.T @ around
            squares = around.T @ (self.count_P[:, None] * around)
            product = product - mixed - mixed.T + squares
        covariance = product / self.count_P.sum()
        values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
        kept = values.flip(0)[:rank].clamp_min(0)
        basis_HK = vectors.flip(1)[:, :rank]
        basis_HK = basis_HK * largest_entry_sign(basis_HK)
        share = float(kept.sum() / values.clamp_min(0).sum())
        scale = kept.sqrt().clamp_min(1e-4 * float(kept[0].sqrt())) if whiten else kept * 0 + 1
        encode = (basis_HK / scale).T.float().contiguous()
        return encode, (basis_HK * scale).float().contiguous(), share
