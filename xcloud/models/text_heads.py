"""What answers an understanding task: pooling, the way to the head, scores, loss and prediction.
Stages are in low_rank_split.py.

Shapes: B samples, S positions of the longest sample, R rows (tokens that are not padding),
H features, K features that cross to the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xcloud.contracts.model import Head
from xcloud.models.attention import Packing
from xcloud.models.stages import seeded

VALUE_SCALE = 1_000_000  # predictions are whole numbers: see contracts.model.Head
SCORE_SCALE = 10_000

Pooling = Literal["first", "mean"]


def pool(rows_RH: Tensor, packing: Packing, how: Pooling) -> Tensor:
    """One row per sample, [B, H]: the first token's, or the mean over tokens."""
    counts = packing.counts
    if how == "first":
        return rows_RH.index_select(0, counts.cumsum(0) - counts)
    samples_R = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    empty = rows_RH.new_zeros(len(counts), rows_RH.shape[1])
    return empty.index_add(0, samples_R, rows_RH) / counts[:, None]


def way_to_head(hidden: int, rank: int | None, seed: int) -> tuple[nn.Module, nn.Module]:
    """H -> K before the boundary to the head, K -> H after it: a low-rank identity path, linear,
    at first orthonormal rows and their transpose. Rank None: all features cross."""
    if rank is None:
        return nn.Identity(), nn.Identity()
    rows_KH = orthonormal_rows(rank, hidden, seed, "way to the head")
    down, up = nn.Linear(hidden, rank, bias=False), nn.Linear(rank, hidden)
    with torch.no_grad():
        down.weight.copy_(rows_KH)
        up.weight.copy_(rows_KH.T)
        nn.init.zeros_(up.bias)
    return down, up


def orthonormal_rows(rank: int, hidden: int, seed: int, *names: str | int) -> Tensor:
    """[K, H], random but reproducible from seed and names."""
    with seeded(seed, *names):
        drawn = torch.randn(hidden, rank, dtype=torch.float64)
    columns: Tensor = torch.linalg.qr(drawn)[0]
    return columns.T.float().contiguous()


class SampleHead(nn.Module):
    """linear(dropout(tanh(dense(x)))), x one row per sample [B, H] (BERT's pooler and
    classifier, Devlin et al., arXiv:1810.04805). pooler: the checkpoint's weights for `dense`.
    """

    def __init__(
        self,
        hidden: int,
        head: Head,
        dropout: float,
        seed: int,
        pooler: Mapping[str, Tensor] | None,
    ) -> None:
        super().__init__()
        self.is_value = head.kind == "value"
        self.dense = fresh_linear(hidden, hidden, seed, "pooler")
        self.classifier = fresh_linear(hidden, head.num_outputs, seed, "classifier")
        if pooler is not None:
            self.dense.load_state_dict(dict(pooler))
        self.dropout = nn.Dropout(dropout)

    def forward(self, rows_BH: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.dropout(torch.tanh(self.dense(rows_BH))))
        return scores.float()

    def loss(self, scores: Tensor, label: Tensor, packing: Packing | None) -> Tensor:
        if self.is_value:
            return F.mse_loss(scores[:, 0], label, reduction="sum")
        return F.cross_entropy(scores, label, reduction="sum")

    def predict(self, scores: Tensor, label: Tensor, packing: Packing | None) -> list[list[int]]:
        if self.is_value:
            return [[round(VALUE_SCALE * value)] for value in scores[:, 0].tolist()]
        return [[best] for best in scores.argmax(1).tolist()]


class SpanHead(nn.Module):
    """Scores for the first and the last token of the answer, [R, 2].

    loss: mean of the two cross-entropies over the sample's tokens, summed over samples.
    predict: the span with the highest sum of both scores, of at most `max_answer_tokens`, within
    the half-open interval from label[:, 2] to the final eos.
    """

    def __init__(self, hidden: int, max_answer_tokens: int, seed: int) -> None:
        super().__init__()
        self.max_answer_tokens = max_answer_tokens
        self.classifier = fresh_linear(hidden, 2, seed, "classifier")

    def forward(self, rows_RH: Tensor) -> Tensor:
        scores: Tensor = self.classifier(rows_RH)
        return scores.float()

    def loss(self, scores: Tensor, label: Tensor, packing: Packing | None) -> Tensor:
        assert packing is not None
        grid_BS2 = packing.unpack(scores)
        if packing.mask is not None:
            grid_BS2 = grid_BS2.masked_fill(~packing.mask[:, 0, 0, :, None], -torch.inf)
        first = F.cross_entropy(grid_BS2[..., 0], label[:, 0], reduction="sum")
        last = F.cross_entropy(grid_BS2[..., 1], label[:, 1], reduction="sum")
        return (first + last) / 2

    def predict(self, scores: Tensor, label: Tensor, packing: Packing | None) -> list[list[int]]:
        assert packing is not None
        grid_BS2 = packing.unpack(scores)
        places_S = torch.arange(packing.longest, device=scores.device)
        allowed_BS = (places_S >= label[:, 2:]) & (places_S < packing.counts[:, None] - 1)
        assert allowed_BS.any(1).all(), "a sample has no token that could be an answer"
        grid_BS2 = grid_BS2.masked_fill(~allowed_BS[:, :, None], -torch.inf)
        length_SS = places_S[None, :] - places_S[:, None] + 1
        fits_SS = (length_SS >= 1) & (length_SS <= self.max_answer_tokens)
        answers = []
        for first_S, last_S in zip(*grid_BS2.unbind(2), strict=True):
            sums_SS = first_S[:, None] + last_S  # of one sample: of all it may not fit memory
            best, cell = sums_SS.masked_fill(~fits_SS, -torch.inf).flatten().max(0)
            place = divmod(int(cell), packing.longest)
            answers.append([*place, round(SCORE_SCALE * float(best))])
        return answers


TextHead = SampleHead | SpanHead
"""Rows -> scores; `loss` sums over samples, `predict` is as contracts.model.Head says."""


def fresh_linear(in_features: int, out_features: int, seed: int, name: str) -> nn.Linear:
    """BERT's initialisation: normal with std 0.02, bias zero."""
    with seeded(seed, name):
        linear = nn.Linear(in_features, out_features)
        nn.init.normal_(linear.weight, std=0.02)
    nn.init.zeros_(linear.bias)
    return linear
