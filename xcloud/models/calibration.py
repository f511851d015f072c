"""The basis of a cut, estimated before training: principal components and anchor.
On public text every cloud with the checkpoint computes it alone; on the owner's text the owner
computes it and sends the other cloud its half (Stage.hand_over).

Shapes: R rows (tokens that are not padding), H features, K = rank features, P anchor positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from xcloud.base.errors import ConfigError
from xcloud.contracts.model import NO_TOKEN, Batch, BuildContext, Stage, TokenIds
from xcloud.hub import key_of, make_once
from xcloud.models.encoder import Packing
from xcloud.models.made_once import PublicTexts
from xcloud.models.split_point import Basis, Split, largest_entry_sign
from xcloud.models.stages import TEXT, TYPES, seeded

CODE_VERSION = 4  # part of the cache key: increase it when equal settings would give another basis
BATCH_TEXTS = 32
RARE_ROWS = 10.0  # shrinkage: a position seen this often weighs its own mean by one half


def basis_of(
    split: Split,
    stage: int,
    sizes: tuple[int, int],
    lower: Callable[[], Stage],
    public: PublicTexts | None,
    context: BuildContext,
) -> Basis | None:
    """What the projections on both sides of the cut after stage 0 start from, equal in both
    clouds; None in other stages, and where no features are reduced.

    sizes: the network's words and features. lower: see measured_basis; built only where a basis is
    measured. public: where it is estimated on public text. In stage 1 a basis of the owner's text
    is zero: it comes before the first step.
    Raises ConfigError or DataError if the text does not fit the network.
    """
    if stage > 1 or not split.is_low_rank or split.is_inside:
        return None
    assert split.rank is not None
    hidden, places = sizes[1], split.num_places(context.max_length)
    if not split.is_measured:
        encode = orthonormal_rows(split.rank, hidden, context.seed, "cut", split.block)
    elif stage and split.hands_over:
        encode = torch.zeros(split.rank, hidden)
    else:
        text = public if split.needs_public_text else None
        return measured_basis(split, lower(), sizes, text, context)
    return Basis(encode, encode.T.contiguous(), torch.zeros(places, hidden))


def measured_basis(
    split: Split,
    lower: Stage,
    sizes: tuple[int, int],
    public: PublicTexts | None,
    context: BuildContext,
) -> Basis:
    """Estimated on public text or (public None) on this cloud's training text.

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
        whose, batch = public.describe(), _public_batch(split, public, ids, context)
    else:
        whose, batch = "the owner's", dict(context.samples(split.calibration_texts))
        batch[TEXT] = batch[TEXT].masked_fill(batch[TEXT] == ids.pad, NO_TOKEN)
    measured = replace(split, freeze_bottom=False, head_rank=None, anchor=split.anchor_kind)
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
    path = cache_dir / "cuts" / f"{key_of(described, data)}.safetensors"

    def make(part: Path) -> None:
        context.report(
            f"cut in block {split.block}: measuring a basis on {len(batch[TEXT])} texts ({whose})"
        )
        save_file(asdict(_measure(split, lower, hidden, batch, context)), part)

    make_once(path, make)
    return Basis(**load_file(path))


def orthonormal_rows(rank: int, hidden: int, seed: int, *names: str | int) -> Tensor:
    """[K, H], random but reproducible from seed and names."""
    with seeded(seed, *names):
        drawn = torch.randn(hidden, rank, dtype=torch.float64)
    columns: Tensor = torch.linalg.qr(drawn)[0]
    return columns.T.float().contiguous()


def _public_batch(
    split: Split, public: PublicTexts, ids: TokenIds, context: BuildContext
) -> Batch:
    """`bos a eos`, or `bos a eos b eos` for pairs, at most max_length tokens."""
    num_parts = 1 + split.calibration_pairs
    room = (context.max_length - 1 - num_parts) // num_parts
    sentences = public.sentences(split.calibration_texts * num_parts, context.cache_dir)
    parts = [torch.tensor([*sentence[:room], ids.eos]) for sentence in sentences]
    bos, texts, types = torch.tensor([ids.bos]), [], []
    for several in zip(*(parts[n::num_parts] for n in range(num_parts)), strict=False):
        texts.append(torch.cat([bos, *several]))
        numbers = [torch.full_like(part, number) for number, part in enumerate(several)]
        types.append(torch.cat([torch.zeros_like(bos), *numbers]))
    return {
        TEXT: pad_sequence(texts, batch_first=True, padding_value=NO_TOKEN),
        TYPES: pad_sequence(types, batch_first=True),
    }


def _measure(
    split: Split, lower: Stage, hidden: int, batch: Batch, context: BuildContext
) -> Basis:
    assert split.rank is not None
    moments = _Moments(lower.to(context.device).eval(), hidden, batch, context)
    anchor = moments.anchor(split.num_places(context.max_length))
    if split.method == "identity":
        encode = orthonormal_rows(split.rank, hidden, context.seed, "cut", split.block)
        return Basis(encode, encode.T.contiguous(), anchor)
    encode, decode, share = moments.components(anchor, split.rank, split.whiten)
    context.report(
        f"cut in block {split.block}: {split.rank} features keep {100 * share:.1f} % of the "
        "variance"
    )
    return Basis(encode, decode, anchor)


class _Moments:
    """First and second moments of the block's output rows, in float64."""

    @torch.no_grad()
    def __init__(self, lower: Stage, hidden: int, batch: Batch, context: BuildContext) -> None:
        self.count_P = torch.zeros(context.max_length, dtype=torch.float64)
        self.sum_PH = torch.zeros(context.max_length, hidden, dtype=torch.float64)
        self.product_HH = torch.zeros(hidden, hidden, dtype=torch.float64)
        for first in range(0, len(batch[TEXT]), BATCH_TEXTS):
            some = slice(first, first + BATCH_TEXTS)
            texts = {name: batch[name][some].to(context.device) for name in (TEXT, TYPES)}
            sent = lower(None, texts).send
            rows = sent["hidden"].double().cpu()
            places = sent["places"] if "places" in sent else Packing(sent["counts"]).positions
            places = places.long().cpu()
            self.count_P += torch.bincount(places, minlength=context.max_length)
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
