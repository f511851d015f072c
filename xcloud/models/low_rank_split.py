"""A BERT-type encoder fine-tuned for an understanding task, cut so that few features cross.
The cut, and what stands at it: split_point.py; the heads: text_heads.py.

2 stages:  embeddings, lower blocks, V | S, U, upper blocks, head
3 stages:  embeddings, lower blocks, V | S, U, upper blocks | head     ("U-shape": with the first
           and the last stage in one cloud, text and labels both stay there)
The network is the same either way. Source: Shi et al., arXiv:2211.16703; Pan et al., ZTE
Technology Journal 2023(4), section 2.2.2.

Batch fields: "text", "types": int64 [B, S], padded on the right; "label": see Head.
Shapes: B samples, S positions, R rows (tokens that are not padding), H features, K = rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Literal

import torch
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
from xcloud.models.attention import Packing
from xcloud.models.backbone import PretrainedBackbone, PublicBackbone, Weights
from xcloud.models.calibration import basis_of
from xcloud.models.encoder import Encoder, EncoderConfig
from xcloud.models.made_once import PublicTexts
from xcloud.models.split_point import Basis, ProjectionTop, Split, make_cut
from xcloud.models.stages import LABEL, TEXT, RowsStage, TextModel, rows_boundary, seeded
from xcloud.models.text_heads import Pooling, SampleHead, SpanHead, TextHead, pool, way_to_head

Dropout = Annotated[float, Field(ge=0.0, le=0.99)]


@settings("LowRankSplit")
class LowRankSplit(TextModel):
    """A SplitModel of 2 or 3 stages; see the module.

    backbone: the pretrained encoder, which every cloud must be able to build without private
        text: a PretrainedBackbone or a PublicBackbone.
    split: where and how it is cut.
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
        check_stage(stage, num_stages)
        return super().fields(stage, num_stages)

    def parts(self, stage: int, num_stages: int) -> frozenset[str]:
        return frozenset({"head"}) if stage == 2 else super().parts(stage, num_stages)

    def boundary(self, stage: int, num_stages: int, max_length: int) -> Boundary:
        """After stage 0: counts and rows [R, K], 4 K bytes per token; no gradient returns to a
        frozen bottom. Before a separate head: [B, H or head_rank], or [R, …] for spans.
        ConfigError for a layer, rank or length that exceeds the backbone's.
        """
        check_stage(stage, num_stages)
        split, whole = self.split, self.backbone.width()
        self._check_network(self.backbone.depth(), whole)
        self.backbone.check_length(max_length)
        if stage == 0:
            width = split.rank if split.is_low_rank else None
            return rows_boundary(
                width or whole,
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
        check_stage(stage, num_stages)
        pooler = None
        if stage == num_stages - 1 and self.output == "sample":
            pooler = self.backbone.pooler()
        if stage == 2:  # a separate head needs only the encoder's width
            width = self.backbone.width()
            self.split.check_rank(width)
            return self._head_alone(width, context, pooler).to(context.device)
        weights = self.backbone.weights(TEXT, context)
        config = weights.config
        self._check_network(config.num_layers, config.hidden)
        sizes, lower = (config.vocab_size, config.hidden), partial(self.lower, weights)
        basis = basis_of(self.split, stage, sizes, lower, self.public_text, context)
        built = self._stage(stage, num_stages, weights, basis, context, pooler)
        return built.to(context.device)

    def empty_stage(
        self, stage: int, num_stages: int, context: BuildContext, architecture: Architecture
    ) -> Stage:
        head = Head(**architecture["head"]) if architecture["head"] is not None else None
        context = replace(context, head=head)
        if stage == 2:
            return self._head_alone(int(architecture["hidden"]), context, None)
        context = replace(context, max_length=int(architecture["max_length"]))
        weights = Weights(EncoderConfig(**architecture["backbone"]), None)
        return self._stage(stage, num_stages, weights, None, context, None)

    def _check_network(self, num_layers: int | None, hidden: int) -> None:
        if num_layers is not None and self.split.block >= num_layers:
            raise ConfigError(
                f"split.layer must be 0..{num_layers - 1} or null: {self.backbone.describe()} has "
                f"{num_layers} blocks; got {self.split.layer}"
            )
        self.split.check_rank(hidden)

    def _stage(
        self,
        stage: int,
        num_stages: int,
        weights: Weights,
        basis: Basis | None,
        context: BuildContext,
        pooler: Mapping[str, Tensor] | None,
    ) -> Stage:
        is_last, split = stage == num_stages - 1, self.split
        config, max_length = weights.config, context.max_length
        about = {
            "backbone": asdict(config),
            "max_length": max_length,
            "head": asdict(context.head) if context.head is not None and is_last else None,
        }
        at = split.block
        numbers = range(at, config.num_layers) if stage else range(at + 1)
        encoder = self._part(weights, numbers, embeddings=stage == 0)
        cut = make_cut(split, stage, config.hidden, max_length, basis, encoder.layer(at))
        end = [] if cut is None else [("cut", cut)]
        whole = numbers[1:] if stage else numbers[:-1] if split.is_inside else numbers
        blocks: list[tuple[str, nn.Module]] = [(str(i), encoder.layer(i)) for i in whole]
        if stage == 0:
            # Networks with one type, such as RoBERTa, separate the texts by their eos ids.
            has_types, pad = config.type_vocab_size > 1, context.vocabularies[TEXT].pad
            handed, frozen = split.handed_over(stage, basis), split.freezes_bottom
            layers = dict(blocks + end)
            return RowsStage(
                about, encoder.embeddings, layers, TEXT, pad, has_types, handed, frozen
            )
        pooling = self.pooling if self.output == "sample" else None
        way, widen = way_to_head(config.hidden, split.kept_head_rank, context.seed)
        answer = None
        if is_last:
            way, answer = nn.Sequential(way, widen), self._answer(config.hidden, context, pooler)
        return UpperStage(about, dict(end + blocks), pooling, way, answer)

    def lower(self, weights: Weights) -> Stage:
        """All up to the cut block and with it, for texts that end with NO_TOKEN."""
        numbers = range(self.split.block + 1)
        encoder = self._part(weights, numbers, embeddings=True)
        layers = {str(i): encoder.layer(i) for i in numbers}
        about = {"backbone": asdict(weights.config)}
        has_types = weights.config.type_vocab_size > 1
        return RowsStage(about, encoder.embeddings, layers, TEXT, NO_TOKEN, has_types)

    def _head_alone(
        self, hidden: int, context: BuildContext, pooler: Mapping[str, Tensor] | None
    ) -> Stage:
        answer = self._answer(hidden, context, pooler)
        assert context.head is not None
        about = {"hidden": hidden, "head": asdict(context.head)}
        way = way_to_head(hidden, self.split.kept_head_rank, context.seed)[1]
        return UpperStage(about, {}, None, way, answer)

    def _part(self, weights: Weights, blocks: range, *, embeddings: bool) -> Encoder:
        dropout = 0.0 if embeddings and self.split.freezes_bottom else self.dropout
        attention_dropout = self.attention_dropout if dropout else 0.0
        config = replace(weights.config, dropout=dropout, attention_dropout=attention_dropout)
        with seeded(0, "replaced by the backbone's weights"):
            encoder = Encoder(config, blocks, embeddings=embeddings, head=False)
        if weights.tensors is not None:
            encoder.load_part(weights.tensors)
        return encoder

    def _answer(
        self, hidden: int, context: BuildContext, pooler: Mapping[str, Tensor] | None
    ) -> TextHead:
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
        return SampleHead(hidden, head, self.dropout, context.seed, pooler)


def check_stage(stage: int, num_stages: int) -> None:
    """Raise ConfigError unless there are 2 or 3 stages."""
    if num_stages not in (2, 3):
        raise ConfigError(
            f"LowRankSplit has 2 stages (bottom, top with head) or 3 (bottom, middle, head), got "
            f"{num_stages}; see conf/cluster/two_clouds.yaml and u_shape.yaml"
        )
    assert 0 <= stage < num_stages


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
        self._pooling = pooling
        self.way = way
        self.answer = answer

    def take_over(self, tensors: tuple[Tensor, ...]) -> None:
        cut = self.layers["cut"]
        assert isinstance(cut, ProjectionTop)
        cut.start(*tensors)

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
            rows: Tensor = self.way(received["pooled"])
            return rows, None
        packing, rows = Packing(received["counts"]), received["hidden"]
        for layer in self.layers.values():
            rows = layer(rows, packing)
        if self._pooling is not None:
            rows = pool(rows, packing, self._pooling)
        return self.way(rows), packing
