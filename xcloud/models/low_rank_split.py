"""A BERT-type encoder fine-tuned for an understanding task, cut so that few features cross.
Settings of the cut: split_point.py; its parts: low_rank_cut.py; its stages: low_rank_stages.py.

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
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Positive, settings
from xcloud.contracts.model import Boundary, BoundaryField, BuildContext, Head, Stage
from xcloud.models.backbone import PretrainedBackbone, PublicBackbone, Weights
from xcloud.models.calibration import EncoderBlock, basis_of
from xcloud.models.encoder import Encoder, EncoderConfig
from xcloud.models.low_rank_cut import Basis, make_bottom, make_top
from xcloud.models.low_rank_stages import (
    BottomStage,
    HeadPart,
    Pooling,
    TopPart,
    UpperStage,
    make_head,
    way_to_head,
)
from xcloud.models.made_once import PublicTexts
from xcloud.models.split_point import Split
from xcloud.models.stages import TEXT, TextModel, rows_boundary, seeded

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
        check_stage(stage, num_stages)
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
        self._check_network(weights.config.num_layers, weights.config.hidden)
        basis = None
        if self.split.method != "svd":
            block = EncoderBlock(weights, self.split.block)
            hidden, public = weights.config.hidden, self.public_text
            basis = basis_of(self.split, stage, hidden, lambda: block, public, context)
        built = self._stage(stage, num_stages, weights, basis, context, pooler)
        return built.to(context.device)

    def empty_stage(
        self, stage: int, num_stages: int, context: BuildContext, architecture: Mapping[str, Any]
    ) -> Stage:
        check_stage(stage, num_stages)
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
        is_last = stage == num_stages - 1
        about = {
            "backbone": asdict(weights.config),
            "max_length": context.max_length,
            "head": asdict(context.head) if context.head is not None and is_last else None,
        }
        if stage == 0:
            return self._bottom(weights, basis, context, about)
        top = self._top(weights, basis, context)
        head = self._head(weights.config.hidden, context, pooler) if is_last else None
        return UpperStage(top, head, about)

    def _head_alone(
        self, hidden: int, context: BuildContext, pooler: Mapping[str, Tensor] | None
    ) -> Stage:
        part = self._head(hidden, context, pooler)
        assert context.head is not None
        return UpperStage(None, part, {"hidden": hidden, "head": asdict(context.head)})

    def _part(self, weights: Weights, blocks: range, *, embeddings: bool) -> Encoder:
        dropout = 0.0 if embeddings and self.split.freezes_bottom else self.dropout
        attention_dropout = self.attention_dropout if dropout else 0.0
        config = replace(weights.config, dropout=dropout, attention_dropout=attention_dropout)
        with seeded(0, "replaced by the backbone's weights"):
            encoder = Encoder(config, blocks, embeddings=embeddings, head=False)
        if weights.tensors is not None:
            encoder.load_part(weights.tensors)
        return encoder

    def _bottom(
        self,
        weights: Weights,
        basis: Basis | None,
        context: BuildContext,
        about: Mapping[str, Any],
    ) -> Stage:
        at = self.split.block
        encoder = self._part(weights, range(at + 1), embeddings=True)
        assert encoder.embeddings is not None
        return BottomStage(
            encoder.embeddings,
            {str(i): encoder.layer(i) for i in range(at)},
            make_bottom(self.split, encoder.layer(at), context.max_length, basis),
            context.vocabularies[TEXT].pad,
            self.split.freezes_bottom,
            about,
            basis.handed_over(self.split, 0) if basis is not None else (),
        )

    def _top(self, weights: Weights, basis: Basis | None, context: BuildContext) -> TopPart:
        at, num_layers = self.split.block, weights.config.num_layers
        encoder = self._part(weights, range(at, num_layers), embeddings=False)
        hidden, rank = weights.config.hidden, self.split.kept_head_rank
        return TopPart(
            make_top(self.split, encoder.layer(at), context.max_length, basis),
            {str(i): encoder.layer(i) for i in range(at + 1, num_layers)},
            self.pooling if self.output == "sample" else None,
            way_to_head(hidden, rank, context.seed)[0],
        )

    def _head(
        self, hidden: int, context: BuildContext, pooler: Mapping[str, Tensor] | None
    ) -> HeadPart:
        head, seed, rank = context.head, context.seed, self.split.kept_head_rank
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
        return HeadPart(
            way_to_head(hidden, rank, seed)[1],
            make_head(hidden, head, self.dropout, self.max_answer_tokens, seed, pooler),
        )


def check_stage(stage: int, num_stages: int) -> None:
    """Raise ConfigError unless there are 2 or 3 stages."""
    if num_stages not in (2, 3):
        raise ConfigError(
            f"LowRankSplit has 2 stages (bottom, top with head) or 3 (bottom, middle, head), got "
            f"{num_stages}; see conf/cluster/two_clouds.yaml and u_shape.yaml"
        )
    assert 0 <= stage < num_stages
