"""A BERT-type encoder fine-tuned for an understanding task, cut so that few features cross.
Settings of the cut: split_point.py; its parts: low_rank_cut.py; the head: text_head.py.

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
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from xcloud.base.checks import check_choice, check_int, check_number
from xcloud.base.errors import ConfigError
from xcloud.cluster.frame import TensorSpec
from xcloud.contracts.model import Boundary, BoundaryField, BuildContext, Head, Stage, TokenIds
from xcloud.models.backbone import PretrainedBackbone, PublicBackbone, Weights
from xcloud.models.calibration import EncoderBlock, blank_basis, measured_basis, random_basis
from xcloud.models.encoder import Encoder, EncoderConfig
from xcloud.models.low_rank_cut import (
    Basis,
    make_bottom,
    make_top,
    replaced_linear,
    start_bottom,
    start_top,
)
from xcloud.models.made_once import PublicTexts
from xcloud.models.seeding import seeded
from xcloud.models.split_point import Split, check_rank, num_places
from xcloud.models.split_stages import BottomStage, HeadPart, HeadStage, MiddleStage, TopPart
from xcloud.models.text_head import Bottleneck, Pooling, Widening, make_head

TEXT, TYPES, LABEL = "text", "types", "label"


@dataclass(frozen=True)
class LowRankSplit:
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
    dropout: float = 0.1
    attention_dropout: float = 0.0
    max_answer_tokens: int = 30

    def __post_init__(self) -> None:
        if not isinstance(self.backbone, PretrainedBackbone | PublicBackbone):
            raise ConfigError(
                "LowRankSplit.backbone must be a PretrainedBackbone or a PublicBackbone, which "
                f"every cloud can build without seeing the text; got {self.backbone!r}"
            )
        if not isinstance(self.split, Split):
            raise ConfigError(f"LowRankSplit.split must be a Split, got {self.split!r}")
        check_choice("LowRankSplit.output", self.output, ("sample", "span"))
        check_choice("LowRankSplit.pooling", self.pooling, ("first", "mean"))
        check_number("LowRankSplit.dropout", self.dropout, 0, 0.99)
        check_number("LowRankSplit.attention_dropout", self.attention_dropout, 0, 0.99)
        check_int("LowRankSplit.max_answer_tokens", self.max_answer_tokens, 1)
        if self.public_text is None and self.split.needs_public_text:
            raise ConfigError(
                f"split.method={self.split.method} with anchor {self.split.anchor_kind} is "
                "estimated on public text: set model.public_text, split.calibration=own, or "
                "split.method=svd"
            )
        if isinstance(self.backbone, PublicBackbone):
            self._check_network(self.backbone.depth(), self.backbone.width())

    def describe(self) -> str:
        return f"{self.backbone.describe()}, {self.split.describe()}"

    def fields(self, stage: int, num_stages: int) -> frozenset[str]:
        check_stage(stage, num_stages)
        read = frozenset({TEXT, TYPES}) if stage == 0 else frozenset[str]()
        return read | {LABEL} if stage == num_stages - 1 else read

    def parts(self, stage: int, num_stages: int) -> frozenset[str]:
        """Parts held: embeddings in stage 0, the head in the last, layers where present."""
        check_stage(stage, num_stages)
        if stage == num_stages - 1:
            return frozenset({"head"} if num_stages == 3 else {"layers", "head"})
        return frozenset({"embeddings", "layers"} if stage == 0 else {"layers"})

    def boundary(self, stage: int, num_stages: int, max_length: int) -> Boundary:
        """After stage 0: counts and rows [R, K], 4 K bytes per token; no gradient returns to a
        frozen bottom. Before a separate head: [B, H or head_rank], or [R, …] for spans.
        ConfigError for a layer, rank or length that exceeds the backbone's.
        """
        check_stage(stage, num_stages)
        self._check_network(self.backbone.depth(), self.backbone.width())
        if isinstance(self.backbone, PretrainedBackbone):
            self.backbone.check_length(max_length)
        counts = BoundaryField("counts", (), torch.int16)
        if stage == 0:
            width = self.split.rank if self.split.is_low_rank else None
            whole = self.backbone.width()
            hidden = BoundaryField(
                "hidden", (width or whole,), torch.float32, rows="counted", replaces=whole
            )
            start: tuple[TensorSpec, ...] = ()
            if self.split.hands_over:
                places = num_places(self.split.anchor_kind, max_length)
                shapes = ((whole, self.split.rank or 0), (places, whole))
                start = tuple(TensorSpec(shape, torch.float32) for shape in shapes)
            frozen = self._freezes_bottom
            return Boundary((counts, hidden), max_length, not frozen, start, is_constant=frozen)
        whole = self.backbone.width()
        features = (self.split.kept_head_rank or whole,)
        if self.output == "sample":
            pooled = BoundaryField("pooled", features, torch.float32, replaces=whole)
            return Boundary((pooled,), 1)
        hidden = BoundaryField("hidden", features, torch.float32, rows="counted", replaces=whole)
        return Boundary((counts, hidden), max_length)

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        check_stage(stage, num_stages)
        if stage == 2:  # a separate head needs only the encoder's width
            pooler = self.backbone.pooler() if self.output == "sample" else None
            width = self.backbone.width()
            check_rank(self.split, width)
            alone = self._head_alone(context.head, width, context.seed, pooler)
            return alone.to(context.device)
        weights = self.backbone.weights(TEXT, context)
        self._check_network(weights.config.num_layers, weights.config.hidden)
        basis = self._basis(stage, weights, context)
        built = self._stage(
            stage,
            num_stages,
            weights,
            basis,
            context.vocabularies.get(TEXT),
            context.head,
            context.max_length,
            context.seed,
            with_pooler=True,
        )
        return built.to(context.device)

    def empty_stage(
        self,
        stage: int,
        num_stages: int,
        vocabularies: Mapping[str, TokenIds],
        max_length: int,
        architecture: Mapping[str, Any] | None = None,
    ) -> Stage:
        """The stage with arbitrary weights, to be filled by load_state_dict.

        architecture: the trained stage's `architecture`, required because only it describes the
        head. ConfigError without it.
        """
        check_stage(stage, num_stages)
        if architecture is None:
            raise ConfigError(
                "a LowRankSplit stage is rebuilt from the architecture in its exported file, "
                "and this file has none"
            )
        head = Head(**architecture["head"]) if architecture["head"] is not None else None
        if stage == 2:
            return self._head_alone(head, int(architecture["hidden"]), 0, None)
        return self._stage(
            stage,
            num_stages,
            Weights(EncoderConfig(**architecture["backbone"]), None),
            None,
            vocabularies.get(TEXT),
            head,
            int(architecture["max_length"]),
            0,
        )

    @property
    def _freezes_bottom(self) -> bool:
        return self.split.layer is not None and self.split.freeze_bottom

    def _check_network(self, num_layers: int | None, hidden: int) -> None:
        if num_layers is not None and self.split.block >= num_layers:
            raise ConfigError(
                f"split.layer must be 0..{num_layers - 1} or null: {self.backbone.describe()} has "
                f"{num_layers} blocks; got {self.split.layer}"
            )
        check_rank(self.split, hidden)

    def _basis(self, stage: int, weights: Weights, context: BuildContext) -> Basis | None:
        """Initial basis of both sides of the cut, equal in both clouds; None for svd."""
        if not self.split.is_low_rank or self.split.method == "svd":
            return None
        if not self.split.is_measured:
            return random_basis(self.split, weights.config.hidden, context.seed)
        if self.split.needs_public_text:
            return self._measured(weights, self.public_text, context)
        if stage > 0:  # received before the first step
            return blank_basis(self.split, weights.config.hidden, context.max_length)
        return self._measured(weights, None, context)

    def _measured(
        self, weights: Weights, public: PublicTexts | None, context: BuildContext
    ) -> Basis:
        return measured_basis(self.split, EncoderBlock(weights, self.split.block), public, context)

    def _stage(
        self,
        stage: int,
        num_stages: int,
        weights: Weights,
        basis: Basis | None,
        ids: TokenIds | None,
        head: Head | None,
        max_length: int,
        seed: int,
        *,
        with_pooler: bool = False,
    ) -> Stage:
        is_last = stage == num_stages - 1
        about = {
            "backbone": asdict(weights.config),
            "max_length": max_length,
            "head": asdict(head) if head is not None and is_last else None,
        }
        if stage == 0:
            assert ids is not None, "stage 0 reads the text"
            return self._bottom(weights, basis, ids, max_length, about)
        top = self._top(weights, basis, max_length, seed)
        if not is_last:
            return MiddleStage(top, about)
        pooler = self.backbone.pooler() if with_pooler and self.output == "sample" else None
        return HeadStage(top, self._head(head, weights.config.hidden, seed, pooler), about)

    def _head_alone(
        self, head: Head | None, hidden: int, seed: int, pooler: Mapping[str, Tensor] | None
    ) -> HeadStage:
        part = self._head(head, hidden, seed, pooler)
        assert head is not None
        return HeadStage(None, part, {"hidden": hidden, "head": asdict(head)})

    def _part(
        self, weights: Weights, blocks: range, *, embeddings: bool, dropout: float
    ) -> Encoder:
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
        ids: TokenIds,
        max_length: int,
        about: Mapping[str, Any],
    ) -> BottomStage:
        at = self.split.block
        dropout = 0.0 if self._freezes_bottom else self.dropout
        encoder = self._part(weights, range(at + 1), embeddings=True, dropout=dropout)
        assert encoder.embeddings is not None
        block = encoder.layer(at)
        linear = replaced_linear(self.split, block)
        cut = make_bottom(self.split, block, max_length)
        if weights.tensors is not None:
            start_bottom(cut, self.split, linear, basis)
        return BottomStage(
            encoder.embeddings,
            {str(i): encoder.layer(i) for i in range(at)},
            cut,
            ids.pad,
            self._freezes_bottom,
            about,
            (basis.decode, basis.anchor) if basis is not None and self.split.hands_over else (),
        )

    def _top(self, weights: Weights, basis: Basis | None, max_length: int, seed: int) -> TopPart:
        at, num_layers = self.split.block, weights.config.num_layers
        encoder = self._part(
            weights, range(at, num_layers), embeddings=False, dropout=self.dropout
        )
        block = encoder.layer(at)
        linear = replaced_linear(self.split, block)
        cut = make_top(self.split, block, max_length)
        if weights.tensors is not None:
            start_top(cut, self.split, linear, basis)
        rank = self.split.kept_head_rank
        return TopPart(
            cut,
            {str(i): encoder.layer(i) for i in range(at + 1, num_layers)},
            self.pooling if self.output == "sample" else None,
            Bottleneck(weights.config.hidden, rank, seed) if rank is not None else nn.Identity(),
        )

    def _head(
        self, head: Head | None, hidden: int, seed: int, pooler: Mapping[str, Tensor] | None
    ) -> HeadPart:
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
        rank = self.split.kept_head_rank
        return HeadPart(
            Widening(hidden, rank, seed) if rank is not None else nn.Identity(),
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
