"""A BERT-type encoder fine-tuned for an understanding task, cut so that few features cross: after
a block (split_point.py), or inside of one, which is here. Heads: stages.py.

2 stages:  embeddings, lower blocks, V | S, U, upper blocks, head
3 stages:  embeddings, lower blocks, V | S, U, upper blocks | head     ("U-shape": with the first
           and the last stage in one cloud, text and labels both stay there)
The network is the same either way. Source: Shi et al., arXiv:2211.16703; Pan et al., ZTE
Technology Journal 2023(4), section 2.2.2.

Shapes: R rows (tokens that are not padding), H features, K features that cross.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Positive, settings
from xcloud.comm.channel import Boundary, BoundaryField
from xcloud.contracts.model import BASES, NO_TOKEN, BuildContext, Head, Stage
from xcloud.models.backbone import PretrainedBackbone, PublicBackbone, Weights
from xcloud.models.encoder import Encoder, EncoderConfig, EncoderLayer, Packing
from xcloud.models.pretraining import PublicTexts
from xcloud.models.split_point import Split, largest_entry_sign, orthonormal_rows, projection_at
from xcloud.models.stages import (
    TEXT,
    Pooling,
    RowsStage,
    SampleHead,
    SpanHead,
    TextHead,
    TextModel,
    UpperStage,
    rows_boundary,
    seeded,
)

Dropout = Annotated[float, Field(ge=0.0, le=0.99)]


@settings("LowRankSplit")
class LowRankSplit(TextModel):
    """A SplitModel of 2 or 3 stages; see the module.

    backbone: the encoder. Every cloud must be able to build it without private text.
    output: the head's input: "sample", one row per sample (classes, a value), or "span", all rows.
        It is a setting because the middle cloud does not see the task.
    public_text: the public text for estimating a basis, if split.calibration=public.
    pooling: the row of a sample that the head reads: that of its first token, or the mean over its
        tokens.
    dropout: the dropout in the backbone and before the classifier.
    attention_dropout: the dropout in attention. 0 keeps attention on the fused kernel; BERT uses
        0.1.
    max_answer_tokens: the largest number of tokens in a predicted span.
    split: the split point of the encoder, and the method that reduces its rows there.
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
            raise ConfigError("split.calibration=public needs model.public_text: set it, or own")
        # A checkpoint's sizes are in its files, which `boundary` reads.
        if not self.backbone.is_checkpoint:
            self.split.check(self.backbone.depth(), self.backbone.width())

    def describe(self) -> str:
        return f"{self.backbone.label}, {self.split.describe()}"

    def fields(self, stage: int, num_stages: int) -> frozenset[str]:
        if num_stages not in (2, 3):
            raise ConfigError(
                f"LowRankSplit has 2 stages (cluster=two_clouds) or 3 (u_shape), got {num_stages}"
            )
        return super().fields(stage, num_stages)

    def parts(self, stage: int, num_stages: int) -> frozenset[str]:
        if stage == 2:
            return frozenset({"head"})
        return super().parts(stage, num_stages)

    def boundary(self, stage: int, num_stages: int, max_length: int) -> Boundary:
        """Return what crosses after a stage: rows [R, K] after stage 0; before a separate head
        [B, H or head_rank], or [R, …] for spans. Raises ConfigError if a layer, rank or length
        exceeds the backbone's."""
        split = self.split
        whole = self.backbone.width()
        split.check(self.backbone.depth(), whole)
        self.backbone.check_length(max_length)
        if stage == 0:
            return rows_boundary(
                split.width(whole),
                max_length,
                whole=whole,
                gradient_returns=not split.freeze_bottom,
                start=split.start_specs(whole, max_length),
                is_constant=split.freeze_bottom,
            )
        width = split.head_rank or whole
        if self.output == "sample":
            return Boundary(
                fields=(
                    BoundaryField(
                        name="pooled", features=(width,), dtype=torch.float32, replaces=whole
                    ),
                ),
                max_rows_per_sample=1,
            )
        return rows_boundary(width, max_length, whole=whole)

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        split = self.split
        given = context.architecture
        if given is not None:
            head = given["head"] and Head(**given["head"])
            context = replace(context, head=head, max_length=int(given["max_length"]))
        answers = context.head and asdict(context.head)
        # The middle cloud does not see the task: whoever serves the stages reads the head from
        # here.
        about: dict[str, Any] = {"head": answers, "max_length": context.max_length}
        if stage == 2:  # a separate head needs only the encoder's width
            hidden = self.backbone.width() if given is None else int(given["hidden"])
            split.check(None, hidden)
            widen = way_to_head(hidden, rank=split.head_rank, seed=context.seed)[1]
            answer = self._answer(hidden, context)
            about[BASES] = {} if given is None else given[BASES]
            if given is None and self.backbone.is_checkpoint and self.output == "sample":
                about[BASES] = self.backbone.digests(TEXT, context)  # its pooler is in the head
            return UpperStage(
                architecture=about | {"hidden": hidden},
                layers={},
                pooling=None,
                way=widen,
                answer=answer,
            )
        if given is not None:
            weights = Weights(config=EncoderConfig(**given["backbone"]), tensors=None)
        else:
            weights = self.backbone.weights(TEXT, context)
        about[BASES] = dict(weights.bases if given is None else given[BASES])
        config = weights.config
        num_blocks = config.num_layers
        hidden = config.hidden
        split.check(num_blocks, hidden)
        about["backbone"] = asdict(config)
        # The cut block is in both stages at first: a cut inside of it takes half of it on each
        # side.
        blocks = range(split.block, num_blocks) if stage else range(split.block + 1)
        encoder = self._part(weights, blocks, is_bottom=stage == 0)
        layers = dict(encoder.layers)
        cut_block = encoder.layer(split.block)
        if stage or split.is_inside:
            del layers[str(split.block)]  # the stage below or the cut has it
        handed: tuple[Tensor, ...] = ()
        if split.is_inside:
            cut: nn.Module | None = cut_inside(split, stage, block=cut_block)
        else:
            sizes = (config.vocab_size, hidden)
            lower = partial(self.lower, weights)
            cut, handed = projection_at(
                split, stage, sizes, lower=lower, public=self.public_text, context=context
            )
            about[BASES] |= {} if cut is None else cut.measured_on
        # The cut stands last in the lower stage and first in the upper one, among the layers.
        ends = {} if cut is None else {"cut": cut}
        if stage == 0:
            # Networks with one type, such as RoBERTa, separate the texts by their eos ids.
            has_types = config.type_vocab_size > 1
            pad = context.vocabularies[TEXT].pad
            words = encoder.embeddings
            frozen = split.freeze_bottom
            return RowsStage(
                architecture=about,
                embeddings=words,
                layers=layers | ends,
                field=TEXT,
                pad=pad,
                has_types=has_types,
                handed_over=handed,
                frozen=frozen,
            )
        # With two stages nothing crosses between way and head, and both stand here.
        way, widen = way_to_head(hidden, rank=split.head_rank, seed=context.seed)
        end: TextHead | None = None
        if num_stages == 2:
            way = nn.Sequential(way, widen)
            end = self._answer(hidden, context)
        pooling = self.pooling if self.output == "sample" else None
        return UpperStage(
            architecture=about, layers=ends | layers, pooling=pooling, way=way, answer=end
        )

    def lower(self, weights: Weights) -> Stage:
        """All up to the cut block and with it, for texts that end with NO_TOKEN."""
        encoder = self._part(weights, blocks=range(self.split.block + 1), is_bottom=True)
        about = {"backbone": asdict(weights.config)}
        has_types = weights.config.type_vocab_size > 1
        layers = dict(encoder.layers)
        return RowsStage(
            architecture=about,
            embeddings=encoder.embeddings,
            layers=layers,
            field=TEXT,
            pad=NO_TOKEN,
            has_types=has_types,
        )

    def _part(self, weights: Weights, blocks: range, is_bottom: bool) -> Encoder:
        drops = (self.dropout, self.attention_dropout)
        # A frozen bottom without dropout makes the same rows in every epoch, which may then be
        # kept.
        dropout, in_attention = (0.0, 0.0) if is_bottom and self.split.freeze_bottom else drops
        config = replace(weights.config, dropout=dropout, attention_dropout=in_attention)
        # Building draws weights; that must not move the run's random numbers.
        with seeded(0, "replaced by the backbone's weights"):
            encoder = Encoder(config, layers=blocks, embeddings=is_bottom, head=False)
        if weights.tensors is not None:
            encoder.load_part(weights.tensors)
        return encoder

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
            return SpanHead(hidden, max_answer_tokens=self.max_answer_tokens, seed=context.seed)
        # A checkpoint's pooler was trained to make a text's row; of an export it is in the file.
        pooler = self.backbone.pooler() if context.architecture is None else None
        return SampleHead(hidden, head, dropout=self.dropout, seed=context.seed, pooler=pooler)


def way_to_head(hidden: int, rank: int | None, seed: int) -> tuple[nn.Module, nn.Module]:
    """H -> K before the boundary to the head, K -> H after it: a low-rank identity path, linear,
    at first orthonormal rows and their transpose. Rank None: all features cross."""
    if rank is None:
        return nn.Identity(), nn.Identity()
    rows_KH = orthonormal_rows(rank, hidden, seed, "way to the head")
    return filled(rows_KH), filled(rows_KH.T, bias=torch.zeros(hidden))


@torch.no_grad()
def filled(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    linear.weight.copy_(weight)
    if bias is not None:
        linear.bias.copy_(bias)
    return linear


def cut_inside(split: Split, stage: int, block: EncoderLayer) -> nn.Module:
    """This stage's side of a block that is cut between S and V; it consumes the block."""
    assert split.rank is not None
    in_attention = split.linear == "attention_output"
    if stage:
        return SvdTop(block, rank=split.rank, in_attention=in_attention)
    if not in_attention:
        return FeedForwardBottom(block, rank=split.rank)
    # V takes the place of W; its bias stands behind U, on the other side.
    block.attention.output = filled(factors(block.attention.output.weight, rank=split.rank)[2])
    return block.attention


class FeedForwardBottom(nn.Module):
    """V activation(up(x)), with x the attention output. `block.down` is V here."""

    def __init__(self, block: EncoderLayer, rank: int) -> None:
        super().__init__()
        self.block = block
        block.down = filled(factors(block.down.weight, rank)[2])
        # What the other side computes goes, so that it is neither trained nor saved twice.
        del block.norm

    def forward(self, rows_RH: Tensor, packing: Packing) -> Tensor:
        block = self.block
        return cast(
            Tensor, block.down(block.activation(block.up(block.attend(rows_RH, packing=packing))))
        )


class SvdTop(nn.Module):
    """LN(U S z + b), of the replaced layer W; then, if that is attention's, the feed-forward
    sub-layer with its own skip connection."""

    def __init__(self, block: EncoderLayer, rank: int, in_attention: bool) -> None:
        super().__init__()
        linear = block.attention.output if in_attention else block.down
        u, s, _ = factors(linear.weight, rank)
        self.s = filled(s)
        self.u = filled(u, bias=linear.bias)
        del block.attention
        if not in_attention:
            del block.attention_norm, block.up, block.down
        self.block = block
        self._in_attention = in_attention

    def forward(self, sent_RK: Tensor, packing: Packing) -> Tensor:
        block = self.block
        rows: Tensor = block.dropout(self.u(self.s(sent_RK)))
        if self._in_attention:
            return block.feed(block.attention_norm(rows))
        rows = block.norm(rows)
        return rows


@torch.no_grad()
def factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """U [m, K], S [K, K], V [K, d] of W [m, d], from the exact SVD in float64. The largest entry
    of each column of U is positive, so that clouds computing it separately agree on signs."""
    # On the CPU in float64: each cloud computes it for itself and must come to the same.
    u, s, v = torch.linalg.svd(weight.double().cpu(), full_matrices=False)
    sign = largest_entry_sign(u[:, :rank])
    return (
        (u[:, :rank] * sign).float(),
        torch.diag(s[:rank]).float(),
        (v[:rank] * sign[:, None]).float().contiguous(),
    )
