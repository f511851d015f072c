"""A BERT-type encoder fine-tuned for an understanding task, cut so that few features cross, and
the heads that answer the task. The cut, and what stands at it: split_point.py.

2 stages:  embeddings, lower blocks, V | S, U, upper blocks, head
3 stages:  embeddings, lower blocks, V | S, U, upper blocks | head     ("U-shape": with the first
           and the last stage in one cloud, text and labels both stay there)
The network is the same either way. Source: Shi et al., arXiv:2211.16703; Pan et al., ZTE
Technology Journal 2023(4), section 2.2.2.

Batch fields: "text", "types": int64 [B, S], padded on the right; "label": see Head.
Shapes: B samples, S positions of the longest sample, R rows (tokens that are not padding),
H features, K features that cross.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Positive, settings
from xcloud.contracts.model import (
    NO_TOKEN,
    Architecture,
    Batch,
    Boundary,
    BoundaryField,
    BuildContext,
    Head,
    Message,
    Stage,
    StageOutput,
)
from xcloud.models.backbone import PretrainedBackbone, PublicBackbone, Weights
from xcloud.models.calibration import basis_of, orthonormal_rows
from xcloud.models.encoder import Encoder, EncoderConfig, Packing
from xcloud.models.made_once import PublicTexts
from xcloud.models.split_point import Basis, Projection, Split, make_cut
from xcloud.models.stages import LABEL, TEXT, RowsStage, TextModel, rows_boundary, seeded

VALUE_SCALE = 1_000_000  # predictions are whole numbers: see contracts.model.Head
SCORE_SCALE = 10_000

Dropout = Annotated[float, Field(ge=0.0, le=0.99)]
Pooling = Literal["first", "mean"]


@settings("LowRankSplit")
class LowRankSplit(TextModel):
    """A SplitModel of 2 or 3 stages; see the module.

    backbone: every cloud must be able to build it without private text.
    output: the head's input: "sample", one row per sample (classes, a value), or "span", all rows.
        A setting, because the middle cloud does not see the task.
    public_text: for estimating a basis, if split.calibration=public.
    pooling: a sample's row is that of its first token, or the mean over its tokens.
    dropout: in the backbone and before the classifier. attention_dropout: 0 keeps attention on
        the fused kernel; BERT uses 0.1.
    max_answer_tokens: maximum length of a predicted span.
    """

    backbone: PretrainedBackbone | PublicBackbone
    split: Split
    output: Literal["sample", "span"] = "sample"
    public_text: PublicTexts | None = None
    pooling: Pooling = "first"
    dropout: Dropout = 0.1
    attention_dropout: Dropout = 0.0
    max_answer_tokens: Positive = 30

    def __post_init__(self) -> None:
        if self.public_text is None and self.split.needs_public_text:
            raise ConfigError(
                f"split.method={self.split.method} with anchor {self.split.anchor_kind} is "
                "estimated on public text: set model.public_text, split.calibration=own, or "
                "split.method=svd"
            )
        if not self.backbone.is_checkpoint:
            self._check_network(self.backbone.depth(), self.backbone.width())

    def describe(self) -> str:
        return f"{self.backbone.describe()}, {self.split.describe()}"

    def fields(self, stage: int, num_stages: int) -> frozenset[str]:
        """ConfigError unless there are 2 or 3 stages."""
        if num_stages not in (2, 3):
            raise ConfigError(
                "LowRankSplit has 2 stages (bottom, top with head) or 3 (bottom, middle, head), "
                f"got {num_stages}; see conf/cluster/two_clouds.yaml and u_shape.yaml"
            )
        return super().fields(stage, num_stages)

    def parts(self, stage: int, num_stages: int) -> frozenset[str]:
        return frozenset({"head"}) if stage == 2 else super().parts(stage, num_stages)

    def boundary(self, stage: int, num_stages: int, max_length: int) -> Boundary:
        """After stage 0 rows [R, K]; before a separate head [B, H or head_rank], or [R, …] for
        spans. ConfigError for a layer, rank or length that exceeds the backbone's."""
        split, whole = self.split, self.backbone.width()
        self._check_network(self.backbone.depth(), whole)
        self.backbone.check_length(max_length)
        if stage == 0:
            return rows_boundary(
                (split.rank if split.is_low_rank else None) or whole,
                max_length,
                whole=whole,
                gradient_returns=not split.freezes_bottom,
                start=split.start_specs(whole, max_length),
                is_constant=split.freezes_bottom,
            )
        width = split.kept_head_rank or whole
        if self.output == "sample":
            return Boundary((BoundaryField("pooled", (width,), torch.float32, replaces=whole),), 1)
        return rows_boundary(width, max_length, whole=whole)

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        if (about := context.architecture) is not None:
            head = Head(**about["head"]) if about["head"] is not None else None
            context = replace(context, head=head, max_length=int(about["max_length"]))
        if stage == 2:  # a separate head needs only the encoder's width
            return self._head_alone(context)
        if about is not None:
            weights, basis = Weights(EncoderConfig(**about["backbone"]), None), None
        else:
            weights = self.backbone.weights(TEXT, context)
            config = weights.config
            self._check_network(config.num_layers, config.hidden)
            sizes, lower = (config.vocab_size, config.hidden), partial(self.lower, weights)
            basis = basis_of(self.split, stage, sizes, lower, self.public_text, context)
        if stage == 0:
            return self._bottom(weights, basis, context)
        return self._top(weights, basis, context, is_last=num_stages == 2)

    def _check_network(self, num_layers: int | None, hidden: int) -> None:
        if num_layers is not None and self.split.block >= num_layers:
            raise ConfigError(
                f"split.layer must be 0..{num_layers - 1} or null: {self.backbone.describe()} has "
                f"{num_layers} blocks; got {self.split.layer}"
            )
        self.split.check_rank(hidden)

    def _bottom(self, weights: Weights, basis: Basis | None, context: BuildContext) -> Stage:
        split = self.split
        encoder = self._part(weights, range(split.block + 1), embeddings=True)
        layers = dict(encoder.layers)
        if cut := self._cut(encoder, 0, basis, context):
            if split.is_inside:
                del layers[str(split.block)]  # the cut has what is left of it
            layers["cut"] = cut
        # Networks with one type, such as RoBERTa, separate the texts by their eos ids.
        has_types, pad = weights.config.type_vocab_size > 1, context.vocabularies[TEXT].pad
        handed, frozen = split.handed_over(0, basis), split.freezes_bottom
        about = _about(context, backbone=asdict(weights.config))
        return RowsStage(about, encoder.embeddings, layers, TEXT, pad, has_types, handed, frozen)

    def lower(self, weights: Weights) -> Stage:
        """All up to the cut block and with it, for texts that end with NO_TOKEN."""
        encoder = self._part(weights, range(self.split.block + 1), embeddings=True)
        about, has_types = {"backbone": asdict(weights.config)}, weights.config.type_vocab_size > 1
        layers = dict(encoder.layers)
        return RowsStage(about, encoder.embeddings, layers, TEXT, NO_TOKEN, has_types)

    def _top(
        self, weights: Weights, basis: Basis | None, context: BuildContext, *, is_last: bool
    ) -> Stage:
        hidden, block = weights.config.hidden, self.split.block
        encoder = self._part(weights, range(block, weights.config.num_layers), embeddings=False)
        cut = self._cut(encoder, 1, basis, context)
        layers: dict[str, nn.Module] = {} if cut is None else {"cut": cut}
        layers |= {name: layer for name, layer in encoder.layers.items() if name != str(block)}
        way, widen = way_to_head(hidden, self.split.kept_head_rank, context.seed)
        answer = None
        if is_last:
            way, answer = nn.Sequential(way, widen), self._answer(hidden, context)
        pooling = self.pooling if self.output == "sample" else None
        about = _about(context, backbone=asdict(weights.config))
        return UpperStage(about, layers, pooling, way, answer)

    def _head_alone(self, context: BuildContext) -> Stage:
        about = context.architecture
        hidden = self.backbone.width() if about is None else int(about["hidden"])
        self.split.check_rank(hidden)
        answer = self._answer(hidden, context)
        way = way_to_head(hidden, self.split.kept_head_rank, context.seed)[1]
        return UpperStage(_about(context, hidden=hidden), {}, None, way, answer)

    def _part(self, weights: Weights, blocks: range, *, embeddings: bool) -> Encoder:
        dropout = 0.0 if embeddings and self.split.freezes_bottom else self.dropout
        attention_dropout = self.attention_dropout if dropout else 0.0
        config = replace(weights.config, dropout=dropout, attention_dropout=attention_dropout)
        with seeded(0, "replaced by the backbone's weights"):
            encoder = Encoder(config, blocks, embeddings=embeddings, head=False)
        if weights.tensors is not None:
            encoder.load_part(weights.tensors)
        return encoder

    def _cut(
        self, encoder: Encoder, stage: int, basis: Basis | None, context: BuildContext
    ) -> nn.Module | None:
        block = encoder.layer(self.split.block)
        return make_cut(self.split, stage, encoder.config.hidden, context.max_length, basis, block)

    def _answer(self, hidden: int, context: BuildContext) -> TextHead:
        head = context.head
        if head is None:
            raise ConfigError(
                "LowRankSplit needs an understanding task, and this is none: choose task=glue, "
                "classification, squad or xnli"
            )
        wanted = "span" if head.kind == "span" else "sample"
        if self.output != wanted:
            raise ConfigError(
                f"the task predicts {head.kind}, so set model.output={wanted} (now {self.output})"
            )
        if head.kind == "span":
            return SpanHead(hidden, self.max_answer_tokens, context.seed)
        pooler = self.backbone.pooler() if context.architecture is None else None
        return SampleHead(hidden, head, self.dropout, context.seed, pooler)


def _about(context: BuildContext, **more: object) -> dict[str, object]:
    head = None if context.head is None else asdict(context.head)
    return {"head": head, "max_length": context.max_length, **more}


class UpperStage(Stage):
    """What stands after the boundary, upper blocks, pooling, the way to the head and the head. A
    separate head has the last two only, and the stage before it all but the head.

    layers: modules of (rows, packing) -> rows. pooling: None keeps all rows. way: see way_to_head.
    """

    def __init__(
        self,
        architecture: Architecture,
        layers: Mapping[str, nn.Module],
        pooling: Pooling | None,
        way: nn.Module,
        answer: TextHead | None,
    ) -> None:
        super().__init__(architecture)
        self.layers = nn.ModuleDict(layers)
        self._pooling, self.way, self.answer = pooling, way, answer

    def take_over(self, tensors: tuple[Tensor, ...]) -> None:
        cast(Projection, self.layers["cut"]).start(*tensors)

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        rows, packing = self._rows(received)
        if self.answer is not None:
            return StageOutput(loss=self.answer.loss(self.answer(rows), batch[LABEL], packing))
        if self._pooling is not None:
            return StageOutput({"pooled": rows.float()})
        assert packing is not None
        return StageOutput({"counts": packing.counts.to(torch.int16), "hidden": rows.float()})

    @torch.no_grad()
    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        assert self.answer is not None
        rows, packing = self._rows(received)
        return self.answer.predict(self.answer(rows), batch[LABEL], packing)

    def _rows(self, received: Message | None) -> tuple[Tensor, Packing | None]:
        """[B, H], or [R, H] without pooling, with the packing if it is known here."""
        assert received is not None
        if "counts" not in received:
            return self.way(received["pooled"]), None
        packing, rows = Packing(received["counts"]), received["hidden"]
        for layer in self.layers.values():
            rows = layer(rows, packing)
        if self._pooling is not None:
            rows = pool(rows, packing, self._pooling)
        return self.way(rows), packing


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
