"""The basis of a cut, estimated before training: principal components and anchor.
On public text every cloud with the checkpoint computes it alone; on the owner's text the owner
computes it and sends the other cloud its half (Stage.hand_over).

Shapes: R rows (tokens that are not padding), H features, K = rank features, P anchor positions.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import Tensor

from xcloud.contracts.split_model import BuildContext
from xcloud.contracts.stage import Batch, TokenIds
from xcloud.errors import ConfigError
from xcloud.models.attention import Packing
from xcloud.models.backbone import Weights
from xcloud.models.encoder import Encoder
from xcloud.models.low_rank_cut import Basis, largest_entry_sign
from xcloud.models.seeding import seeded
from xcloud.models.split_point import Split, num_places
from xcloud.models.text_head import orthonormal_rows
from xcloud.models.text_source import PublicTexts

CODE_VERSION = 2  # part of the cache key: increase it when equal settings would give another basis
BATCH_TEXTS = 32
RARE_ROWS = 10.0  # shrinkage: a position seen this often weighs its own mean by one half


def random_basis(split: Split, hidden: int, seed: int) -> Basis:
    """E of random orthonormal rows, D = E', no anchor: split.method=identity."""
    assert split.rank is not None
    encode = orthonormal_rows(split.rank, hidden, seed, "cut", split.block)
    nothing = encode.new_zeros(0, hidden)
    return Basis(encode, encode.T.contiguous(), nothing, nothing @ encode.T)


def measured_basis(
    split: Split,
    weights: Weights,
    public: PublicTexts | None,
    context: BuildContext,
) -> Basis:
    """Basis and anchor, estimated on public text or (public None) on this cloud's training text.

    Cached as cache_dir/cuts/<hash>.safetensors. The hash covers settings, weights and text, and
    the run's seed if the basis starts at random.

    Raises ConfigError or DataError if the text does not fit the network.
    """
    assert weights.tensors is not None
    cache_dir, max_length = context.cache_dir, context.max_length
    ids = public.token_ids(cache_dir) if public is not None else context.vocabularies["text"]
    if ids.size > weights.config.vocab_size:
        raise ConfigError(
            f"the public text's tokenizer has {ids.size} token ids, but the encoder has "
            f"{weights.config.vocab_size}: give model.public_text the encoder's own tokenizer"
        )
    if public is not None:
        wanted = split.calibration_texts * (1 + split.calibration_pairs)
        sentences = public.sentences(wanted, cache_dir)
        said, texts = public.describe(), _Texts.of(split, sentences, ids, max_length)
    else:
        batch = context.samples(split.calibration_texts)
        said, texts = "the owner's", _Texts.of_batch(batch, ids.pad)
    drawn = context.seed if split.method == "identity" else None
    path = cache_dir / "cuts" / f"{_key(split, weights, texts, max_length, drawn)}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            context.report(
                f"cut in block {split.block}: measuring a basis on {len(texts.ids)} texts ({said})"
            )
            basis = _measure(split, weights, texts, context)
            unfinished = path.with_suffix(f".{os.getpid()}.tmp")
            save_file(asdict(basis), unfinished)
            unfinished.replace(path)
    return Basis(**load_file(path))


def blank_basis(split: Split, hidden: int, max_length: int) -> Basis:
    """A zero basis for the cloud that receives its half before the first step."""
    assert split.rank is not None
    places = num_places(split.anchor_kind, max_length)
    anchor = torch.zeros(places, hidden)
    encode = torch.zeros(split.rank, hidden)
    return Basis(encode, torch.zeros(hidden, split.rank), anchor, anchor @ encode.T)


@dataclass(frozen=True)
class _Texts:
    """Texts with special ids, and the number of type-0 tokens in each."""

    ids: Sequence[Sequence[int]]
    first_tokens: Sequence[int]
    pad: int

    @classmethod
    def of(
        cls, split: Split, sentences: Sequence[Sequence[int]], ids: TokenIds, max_length: int
    ) -> _Texts:
        """`bos a eos`, or `bos a eos b eos` for pairs, at most max_length tokens."""
        given = [list(s) for s in sentences]
        if not split.calibration_pairs:
            room = max_length - 2
            whole = [[ids.bos, *s[:room], ids.eos] for s in given]
            return cls(whole, [len(t) for t in whole], ids.pad)
        room = (max_length - 3) // 2
        firsts = [[ids.bos, *s[:room], ids.eos] for s in given[0::2]]
        pairs = [[*a, *b[:room], ids.eos] for a, b in zip(firsts, given[1::2], strict=False)]
        return cls(pairs, [len(a) for a in firsts[: len(pairs)]], ids.pad)

    @classmethod
    def of_batch(cls, batch: Batch, pad: int) -> _Texts:
        """From a batch's "text" and "types", without padding."""
        rows: list[list[int]] = []
        first_tokens: list[int] = []
        for tokens, types in zip(batch["text"], batch["types"], strict=True):
            there = tokens != pad
            rows.append(tokens[there].tolist())
            first_tokens.append(int((types[there] == 0).sum()))
        return cls(rows, first_tokens, pad)

    def batches(self, order: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, Packing]]:
        """ids [R], types [R] and packing."""
        for start in range(0, len(order), BATCH_TEXTS):
            chosen = order[start : start + BATCH_TEXTS]
            rows = [torch.tensor(self.ids[i]) for i in chosen]
            types = [(torch.arange(len(self.ids[i])) >= self.first_tokens[i]) for i in chosen]
            packing = Packing(torch.tensor([len(row) for row in rows]))
            yield torch.cat(rows), torch.cat(types).long(), packing


def _key(split: Split, weights: Weights, texts: _Texts, max_length: int, seed: int | None) -> str:
    settings = {
        name: value
        for name, value in asdict(split).items()
        if name not in ("linear", "freeze_bottom", "head_rank", "anchor")
    }
    described = {
        "code": CODE_VERSION,
        "settings": settings | {"anchor": split.anchor_kind},
        "places": num_places(split.anchor_kind, max_length),
        "config": asdict(weights.config),
        "seed": seed,
    }
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    assert weights.tensors is not None
    for name, tensor in sorted(weights.tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    for text, first in zip(texts.ids, texts.first_tokens, strict=True):
        digest.update(array("q", [len(text), first, *text]).tobytes())
    return digest.hexdigest()[:32]


def _measure(
    split: Split,
    weights: Weights,
    texts: _Texts,
    context: BuildContext,
) -> Basis:
    max_length, device = context.max_length, context.device
    assert weights.tensors is not None and split.rank is not None
    config = replace(weights.config, dropout=0.0, attention_dropout=0.0)
    with seeded(0):
        encoder = Encoder(config, head=False)
    encoder.load_part(weights.tensors)
    encoder.to(device).eval().requires_grad_(False)
    places = num_places(split.anchor_kind, max_length)
    moments = _Moments(encoder, split.block, texts, max_length, device)
    anchor = moments.anchor(places)
    if split.method == "identity":
        encode = orthonormal_rows(split.rank, config.hidden, context.seed, "cut", split.block)
        decode = encode.T.contiguous()
    else:
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
        self, encoder: Encoder, block: int, texts: _Texts, max_length: int, device: torch.device
    ) -> None:
        hidden = encoder.config.hidden
        self.count_P = torch.zeros(max_length, dtype=torch.float64)
        self.sum_PH = torch.zeros(max_length, hidden, dtype=torch.float64)
        self.product_HH = torch.zeros(hidden, hidden, dtype=torch.float64)
        for ids, types, packing in texts.batches(range(len(texts.ids))):
            there = Packing(packing.counts.to(device))
            rows = _rows(encoder, ids, types, there, block).double().cpu()
            self.count_P += torch.bincount(packing.positions, minlength=max_length)
            self.sum_PH.index_add_(0, packing.positions, rows)
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


def _rows(encoder: Encoder, ids: Tensor, types: Tensor, packing: Packing, block: int) -> Tensor:
    """[R, H]: output rows of this block."""
    assert encoder.embeddings is not None
    device = packing.counts.device
    known = types.to(device) if encoder.config.type_vocab_size > 1 else None
    rows: Tensor = encoder.embeddings(ids.to(device), packing, known)
    for i in range(block + 1):
        rows = encoder.layer(i)(rows, packing)
    return rows
