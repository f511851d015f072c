"""AB-Net: two frozen BERT-type networks turned into a translator by trained adapters. Where their
weights come from: backbone.py.

Source: Guo et al., arXiv:2010.06138; split over clouds as in Pan et al., ZTE Technology Journal
2023(4), section 2.2.1. This is the autoregressive variant: the target BERT under a causal mask.

Shapes: R rows of the source, T rows of the target (tokens that are not padding), H features,
A adapter features.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xcloud.base.settings import Fraction, Positive, settings
from xcloud.comm.channel import Boundary
from xcloud.contracts.model import BASES, BuildContext, Stage
from xcloud.models.backbone import OwnBackbone, PretrainedBackbone, Weights
from xcloud.models.encoder import (
    Cache,
    CrossAttention,
    Encoder,
    EncoderConfig,
    EncoderLayer,
    Packing,
    check_heads,
)
from xcloud.models.stages import RowsStage, rows_boundary, seeded
from xcloud.models.transformer import SOURCE, TARGET, EncoderDecoder, TargetStage

HEADS = "AbNet.cross_attention_heads"


class Adapter(nn.Module):
    """In the encoder x + feed(LN(x)); in the decoder x = LN(x + cross-attention(x, source));
    x = LN(x + feed(x)). feed is up(relu(down(x))), H -> A -> H, near zero at the start, so that
    the pretrained network is unchanged."""

    def __init__(
        self, hidden: int, size: int, dropout: float, cross: CrossAttention | None = None
    ) -> None:
        super().__init__()
        if cross is not None:
            self.cross = cross
            self.cross_norm = nn.LayerNorm(hidden)
        self.norm = nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, size)
        self.up = nn.Linear(size, hidden)
        self.dropout = nn.Dropout(dropout)
        # Near zero and not zero: with a zero matrix `down` would get no gradient in the first
        # update.
        nn.init.normal_(self.up.weight, std=1e-3)
        nn.init.zeros_(self.up.bias)

    def forward(self, rows: Tensor, packing: Packing, cache: Cache | None) -> Tensor:
        if cache is None:
            return rows + self._feed(self.norm(rows))
        # Only a decoder's layer has a cache, and with it a source to attend to.
        attended = self.cross(rows, packing, cache)
        rows = self.cross_norm(rows + self.dropout(attended))
        return cast(Tensor, self.norm(rows + self._feed(rows)))

    def _feed(self, rows: Tensor) -> Tensor:
        return cast(Tensor, self.dropout(self.up(F.relu(self.down(rows)))))


class AdaptedLayer(nn.Module):
    """A frozen encoder layer followed by its adapter."""

    def __init__(self, layer: EncoderLayer, adapter: Adapter) -> None:
        super().__init__()
        self.frozen = layer
        self.adapter = adapter

    def forward(self, rows_RH: Tensor, packing: Packing, cache: Cache | None = None) -> Tensor:
        return cast(Tensor, self.adapter(self.frozen(rows_RH, packing, cache), packing, cache))


class AdaptedHead(nn.Module):
    """A head that adds a trained vector to each word's, [V, H], zero at first."""

    def __init__(self, head: nn.Module, words_VH: Tensor) -> None:
        super().__init__()
        self.head = head
        self.words = nn.Parameter(torch.zeros_like(words_VH))

    def forward(self, rows_RH: Tensor, words_VH: Tensor) -> Tensor:
        """[R, H] -> [R, V]. words_VH: the frozen tied embedding."""
        return cast(Tensor, self.head(rows_RH, words_VH + self.words))


@settings("AbNet")
class AbNet(EncoderDecoder):
    """Encoder with adapters | decoder with cross-attention adapters; a SplitModel.

    Why these defaults. On es-en captions with 3 + 3 layers x 128, 600 updates and one seed BLEU is
    16.4; with backbone_dropout=0.1 it is 13.7 and a step takes 5 % longer; with train_head=false
    it is 14.1. On the demo, 400 updates and one seed, word adapters give 69.9, those of predicted
    words alone 61.0, none 31.2.

    encoder: the source of the frozen network of the first cloud.
    decoder: the source of the frozen network of the second cloud. Its width may differ.
    adapter_size: the number of features inside an adapter's feed-forward network.
    cross_attention_heads: the number of attention heads of a decoder's adapter.
    dropout: the share of features that is zeroed in the adapters in training.
    backbone_dropout: the same in the frozen networks (0.1 in AB-Net's code).
    label_smoothing: the share of the target's probability that is spread over the vocabulary.
    decoding: the method of searching for translations.
    train_head: train the output head's transform and bias. A head missing from the checkpoint is
        always trained; the tied embedding never is.
    word_adapters: add to the frozen vectors of source words and of words to be predicted a trained
        one each, [vocabulary, hidden]; not in AB-Net, whose backbones have seen every word often.
    """

    encoder: OwnBackbone | PretrainedBackbone
    decoder: OwnBackbone | PretrainedBackbone
    adapter_size: Positive = 512
    cross_attention_heads: Positive = 8
    backbone_dropout: Fraction = 0.0
    train_head: bool = True
    word_adapters: bool = False

    def __post_init__(self) -> None:
        if self.decoder.hidden is not None:  # else it is checked when loaded
            check_heads(HEADS, num_heads=self.cross_attention_heads, whole=self.decoder.hidden)

    def describe(self) -> str:
        return (
            f"AB-Net, adapters of {self.adapter_size}, encoder {self.encoder.label}, "
            f"decoder {self.decoder.label}"
        )

    def fields(self, stage: int, num_stages: int) -> frozenset[str]:
        """Stage 0 reads the source, the last the target. Stages in between read nothing, unless
        they pretrain their backbone on source text, which their cloud must then be allowed to see.
        """
        if 0 < stage < num_stages - 1 and self.encoder.needs_sentences:
            return frozenset({SOURCE})
        return super().fields(stage, num_stages)

    def boundary(self, stage: int, num_stages: int, max_length: int) -> Boundary:
        return rows_boundary(self.encoder.width(), max_length)

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        # The last stage holds the whole decoder; all before it share the encoder's layers.
        is_last = stage == num_stages - 1
        about = context.architecture
        side, backbone = ("decoder", self.decoder) if is_last else ("encoder", self.encoder)
        if about is None:
            where = replace(context, setting=f"model.{side}")
            weights = backbone.weights(TARGET if is_last else SOURCE, where)
            if is_last and context.group_rank == 0 and not weights.have_head:
                context.report("the decoder's checkpoint has no tied output head: training one")
        else:
            # Built for an export, whose tensors come from a file: no checkpoint is looked for.
            weights = Weights(config=EncoderConfig(**about["backbone"]), tensors=None)
        # Attention without dropout stays on the fused kernel.
        config = replace(weights.config, dropout=self.backbone_dropout, attention_dropout=0.0)
        hidden = config.hidden
        parts = range(config.num_layers)
        width = 0
        if is_last:
            check_heads(HEADS, num_heads=self.cross_attention_heads, whole=hidden)
            width = about["source_hidden"] if about else self.encoder.width()
        else:
            parts = self.encoder_layers(config.num_layers, stage, num_stages)
        # Drawn weights stay only where a checkpoint has no head; the rest is filled just below.
        with seeded(context.seed, side):
            frozen = Encoder(config, layers=parts, embeddings=is_last or 0 in parts, head=is_last)
        if weights.tensors is not None:
            frozen.load_part(weights.tensors)
        frozen.requires_grad_(False)
        layers = {}
        for i in parts:
            # One random stream per layer: initial weights do not depend on the layout.
            with seeded(context.seed, f"{side} adapter", i):
                heads = self.cross_attention_heads
                cross = None
                if is_last:
                    cross = CrossAttention(hidden, source_hidden=width, num_heads=heads)
                adapter = Adapter(
                    hidden, size=self.adapter_size, dropout=self.dropout, cross=cross
                )
            layers[str(i)] = AdaptedLayer(layer=frozen.layer(i), adapter=adapter)
        bases = dict(weights.bases if about is None else about[BASES])
        made: dict[str, Any] = {"backbone": asdict(weights.config), BASES: bases}
        # The middle stages have neither embeddings nor head.
        embeddings = frozen.embeddings
        head = frozen.head
        if head is None or embeddings is None:
            if self.word_adapters and embeddings is not None:
                # A second vector of each word, trained and zero at first.
                zeros_VH = torch.zeros_like(embeddings.words.weight)
                embeddings.word_adapter = nn.Embedding(len(zeros_VH), hidden, _weight=zeros_VH)
            ids = context.vocabularies.get(SOURCE)
            return RowsStage(
                architecture=made,
                embeddings=embeddings,
                layers=layers,
                field=SOURCE,
                pad=ids.pad if ids else 0,
            )
        head.requires_grad_(self.train_head or not weights.have_head)
        last: nn.Module = head
        if self.word_adapters:
            last = AdaptedHead(head, words_VH=embeddings.words.weight)
        made["source_hidden"] = width
        return TargetStage(
            embeddings, layers, head=last, settings=self, context=context, architecture=made
        )
