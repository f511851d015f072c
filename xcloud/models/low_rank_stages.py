"""The stages of a cut encoder, and the heads of understanding tasks: pooling, bottleneck, scores,
loss and prediction. They are built by low_rank_split.py.

Shapes: B samples, S positions of the longest sample, R rows (tokens that are not padding),
H features, K features that cross to the next stage.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xcloud.contracts.model import Batch, Head, Message, StageOutput
from xcloud.models.attention import Packing
from xcloud.models.encoder import Embeddings
from xcloud.models.low_rank_cut import BottomCut, ProjectionTop, TopCut
from xcloud.models.stages import DescribedStage, seeded

VALUE_SCALE = 1_000_000  # predictions are whole numbers: see contracts.stage.Head
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
    return nn.Sequential(OrderedDict(down=down)), nn.Sequential(OrderedDict(up=up))


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
        with seeded(seed, "pooler"):
            self.dense = fresh_linear(hidden, hidden)
        with seeded(seed, "classifier"):
            self.classifier = fresh_linear(hidden, head.num_outputs)
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
        with seeded(seed, "classifier"):
            self.classifier = fresh_linear(hidden, 2)

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


def fresh_linear(in_features: int, out_features: int) -> nn.Linear:
    """BERT's initialisation: normal with std 0.02, bias zero."""
    linear = nn.Linear(in_features, out_features)
    nn.init.normal_(linear.weight, std=0.02)
    nn.init.zeros_(linear.bias)
    return linear


def make_head(
    hidden: int,
    head: Head,
    dropout: float,
    max_answer_tokens: int,
    seed: int,
    pooler: Mapping[str, Tensor] | None,
) -> TextHead:
    if head.kind == "span":
        return SpanHead(hidden, max_answer_tokens, seed)
    return SampleHead(hidden, head, dropout, seed, pooler)


class BottomStage(DescribedStage):
    """Embeddings, lower blocks, and the cut block up to the boundary. Reads "text" and "types".

    frozen: no training and no dropout.
    """

    def __init__(
        self,
        embeddings: Embeddings,
        blocks: Mapping[str, nn.Module],
        cut: BottomCut,
        pad: int,
        frozen: bool,
        architecture: Mapping[str, Any],
        handed_over: tuple[Tensor, ...] = (),
    ) -> None:
        super().__init__(architecture, handed_over, frozen)
        self.embeddings = embeddings
        self.blocks = nn.ModuleDict(blocks)
        self.cut = cut
        self.pad = pad
        if frozen:
            self.requires_grad_(False)

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        assert received is None
        packing = Packing.of(batch["text"], self.pad)
        # Networks with one type, such as RoBERTa, separate the texts by their eos ids.
        has_types = self.embeddings.types.num_embeddings > 1
        types = packing.pack(batch["types"]) if has_types else None
        rows = self.embeddings(packing.pack(batch["text"]), packing, types)
        for block in self.blocks.values():
            rows = block(rows, packing)
        sent = self.cut(rows, packing)
        return StageOutput({"counts": packing.counts.to(torch.int16), "hidden": sent.float()})


class TopPart(nn.Module):
    """The cut block after the boundary, upper blocks, pooling, and the bottleneck to the head.

    pooling: None keeps all rows. narrow: see way_to_head.
    """

    def __init__(
        self,
        cut: TopCut,
        blocks: Mapping[str, nn.Module],
        pooling: Pooling | None,
        narrow: nn.Module,
    ) -> None:
        super().__init__()
        self.cut = cut
        self.blocks = nn.ModuleDict(blocks)
        self.pooling = pooling
        self.narrow = narrow

    def take_over(self, tensors: tuple[Tensor, ...]) -> None:
        decode, anchor = tensors
        assert isinstance(self.cut, ProjectionTop)
        self.cut.start(decode, anchor)

    def forward(self, sent_RK: Tensor, packing: Packing) -> Tensor:
        """[R, K] -> [B, H or head_rank], or [R, H or head_rank] without pooling."""
        rows = self.cut(sent_RK, packing)
        for block in self.blocks.values():
            rows = block(rows, packing)
        if self.pooling is not None:
            rows = pool(rows, packing, self.pooling)
        narrow: Tensor = self.narrow(rows)
        return narrow


class HeadPart(nn.Module):
    """The head and what precedes it. widen: see way_to_head."""

    def __init__(self, widen: nn.Module, answer: TextHead) -> None:
        super().__init__()
        self.widen = widen
        self.answer = answer

    def forward(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.answer(self.widen(rows))
        return scores


class UpperStage(DescribedStage):
    """What comes after the cut. top: None in a separate head, which receives its rows.
    head: in the last stage only.
    """

    def __init__(
        self, top: TopPart | None, head: HeadPart | None, architecture: Mapping[str, Any]
    ) -> None:
        super().__init__(architecture)
        self.top = top
        self.head = head

    def take_over(self, tensors: tuple[Tensor, ...]) -> None:
        assert self.top is not None
        self.top.take_over(tensors)

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        assert received is not None
        rows, packing = self._rows(received)
        if self.head is not None:
            answer = self.head.answer
            return StageOutput(loss=answer.loss(self.head(rows), batch["label"], packing))
        assert self.top is not None
        if self.top.pooling is not None:
            return StageOutput({"pooled": rows.float()})
        return StageOutput({"counts": received["counts"], "hidden": rows.float()})

    @torch.no_grad()
    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        assert self.head is not None and received is not None
        rows, packing = self._rows(received)
        return self.head.answer.predict(self.head(rows), batch["label"], packing)

    def _rows(self, received: Message) -> tuple[Tensor, Packing | None]:
        packing = Packing(received["counts"]) if "counts" in received else None
        if packing is None:
            return received["pooled"], None
        rows = received["hidden"]
        return (rows if self.top is None else self.top(rows, packing)), packing
