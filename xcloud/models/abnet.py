"""AB-Net: two frozen BERT-type networks turned into a translator by trained adapters.
No search (decoding.py), no backbone loading (backbone.py).

Source: Guo et al., arXiv:2010.06138; split over clouds as in Pan et al., ZTE Technology Journal
2023(4), section 2.2.1. This is the autoregressive variant: the target BERT under a causal mask.

Shapes: R rows of the source, T rows of the target (tokens that are not padding), H features,
A adapter features.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xcloud.base.settings import Fraction, Positive, settings
from xcloud.contracts.model import BuildContext, Stage
from xcloud.models.backbone import OwnBackbone, PretrainedBackbone, Weights
from xcloud.models.encoder import (
    CrossAttention,
    Encoder,
    EncoderConfig,
    EncoderLayer,
    LayerCache,
    Packing,
    check_heads,
)
from xcloud.models.stages import RowsStage, seeded
from xcloud.models.transformer import SOURCE, TARGET, EncoderDecoder, TargetStage


class Adapter(nn.Module):
    """In the encoder x + feed(LN(x)); in the decoder x = LN(x + cross-attention(x, source));
    x = LN(x + feed(x)). feed is up(relu(down(x))), H -> A -> H, near zero at the start, so that
    the pretrained network is unchanged."""

    def __init__(
        self, hidden: int, size: int, dropout: float, cross: CrossAttention | None = None
    ) -> None:
        super().__init__()
        if cross is not None:
            self.cross, self.cross_norm = cross, nn.LayerNorm(hidden)
        self.norm = nn.LayerNorm(hidden)
        self.down, self.up = nn.Linear(hidden, size), nn.Linear(size, hidden)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.up.weight, std=1e-3)
        nn.init.zeros_(self.up.bias)

    def forward(self, rows: Tensor, packing: Packing, cache: LayerCache | None) -> Tensor:
        if cache is None:
            rows = rows + self._feed(self.norm(rows))
            return rows
        attended = self.cross(rows, packing, cache.source)
        rows = self.cross_norm(rows + self.dropout(attended))
        rows = self.norm(rows + self._feed(rows))
        return rows

    def _feed(self, rows: Tensor) -> Tensor:
        added: Tensor = self.dropout(self.up(F.relu(self.down(rows))))
        return added


class AdaptedLayer(nn.Module):
    """A frozen encoder layer followed by its adapter; in the decoder under a causal mask."""

    def __init__(self, layer: EncoderLayer, adapter: Adapter) -> None:
        super().__init__()
        self.frozen = layer
        self.adapter = adapter

    def forward(
        self, rows_RH: Tensor, packing: Packing, cache: LayerCache | None = None
    ) -> Tensor:
        past = cache.past if cache else None
        rows = self.frozen(rows_RH, packing, cache is not None, past)
        adapted: Tensor = self.adapter(rows, packing, cache)
        return adapted


class AdaptedHead(nn.Module):
    """A head that adds a trained vector to each word's, [V, H], zero at first."""

    def __init__(self, head: nn.Module, words_VH: Tensor) -> None:
        super().__init__()
        self.head = head
        self.words = nn.Parameter(torch.zeros_like(words_VH))

    def forward(self, rows_RH: Tensor, words_VH: Tensor) -> Tensor:
        """[R, H] -> [R, V]. words_VH: the frozen tied embedding."""
        scores: Tensor = self.head(rows_RH, words_VH + self.words)
        return scores


@settings("AbNet")
class AbNet(EncoderDecoder):
    """Encoder with adapters | decoder with cross-attention adapters; a SplitModel.

    encoder, decoder: sources of the frozen networks, one per cloud; widths may differ.
    dropout: in the adapters. backbone_dropout: in the frozen networks during training (0.1 in
    AB-Net's code). train_head: train the output head's transform and bias. A head missing from the
    checkpoint is always trained; the tied embedding never is. word_adapters: add to the frozen
    vectors of source words and of words to be predicted a trained one each, [vocabulary, hidden];
    not in AB-Net, whose backbones have seen every word often.
    Why these defaults: es-en captions, 3 + 3 layers x 128, 600 updates, one seed: BLEU 16.4;
    with backbone_dropout=0.1 13.7 and 5 % slower; with train_head=false 14.1. Signal adapters: the
    demo, 400 updates, one seed: 69.9, of predicted words only 61.0, without 31.2.
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
            self._check_heads(self.decoder.hidden)

    def _check_heads(self, hidden: int) -> None:
        check_heads("AbNet.cross_attention_heads", self.cross_attention_heads, hidden)

    def describe(self) -> str:
        return (
            f"AB-Net, adapters of {self.adapter_size}, encoder {self.encoder.describe()}, "
            f"decoder {self.decoder.describe()}"
        )

    def fields(self, stage: int, num_stages: int) -> frozenset[str]:
        """Stage 0 reads the source, the last the target. Stages in between read nothing, unless
        they pretrain their backbone on source text, which their cloud must then be allowed to see.
        """
        if 0 < stage < num_stages - 1 and self.encoder.needs_sentences:
            return frozenset({SOURCE})
        return super().fields(stage, num_stages)

    def source_width(self) -> int:
        return self.encoder.width()

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        is_last, architecture = stage == num_stages - 1, context.architecture
        side, backbone = ("decoder", self.decoder) if is_last else ("encoder", self.encoder)
        if architecture is None:
            where = replace(context, setting=f"model.{side}")
            weights = backbone.weights(TARGET if is_last else SOURCE, where)
            if is_last and context.group_rank == 0 and not weights.have_head:
                context.report("the decoder's checkpoint has no tied output head: training one")
        else:
            weights = Weights(EncoderConfig(**architecture["backbone"]), None)
        frozen = replace(weights.config, dropout=self.backbone_dropout, attention_dropout=0.0)
        if not is_last:
            parts = self.encoder_layers(frozen.num_layers, stage, num_stages)
            return self._source_stage(weights, frozen, parts, context)
        width = architecture["source_hidden"] if architecture else self.encoder.width()
        return self._target_stage(weights, frozen, width, context)

    def _source_stage(
        self, weights: Weights, config: EncoderConfig, parts: range, context: BuildContext
    ) -> Stage:
        with seeded(context.seed, "encoder"):
            encoder = Encoder(config, parts, embeddings=0 in parts, head=False)
        if weights.tensors is not None:
            encoder.load_part(weights.tensors)
        encoder.requires_grad_(False)
        if self.word_adapters and encoder.embeddings is not None:
            encoder.embeddings.adapt_words()
        layers = {}
        for i in parts:
            # One random stream per layer: initial weights do not depend on the layout.
            with seeded(context.seed, "encoder adapter", i):
                adapter = Adapter(config.hidden, self.adapter_size, self.dropout)
            layers[str(i)] = AdaptedLayer(encoder.layer(i), adapter)
        about = {"backbone": asdict(weights.config)}
        ids = context.vocabularies.get(SOURCE)
        return RowsStage(about, encoder.embeddings, layers, SOURCE, ids.pad if ids else 0)

    def _target_stage(
        self, weights: Weights, config: EncoderConfig, source_hidden: int, context: BuildContext
    ) -> Stage:
        self._check_heads(config.hidden)
        with seeded(context.seed, "decoder"):
            decoder = Encoder(config)
        assert decoder.embeddings is not None and decoder.head is not None
        if weights.tensors is not None:
            own_head = {} if weights.have_head else decoder.state_dict()
            decoder.load_part({**own_head, **weights.tensors})
        decoder.requires_grad_(False)
        decoder.head.requires_grad_(self.train_head or not weights.have_head)
        head: nn.Module = decoder.head
        if self.word_adapters:
            head = AdaptedHead(head, decoder.embeddings.words.weight)
        layers = {}
        for i in range(config.num_layers):
            with seeded(context.seed, "decoder adapter", i):
                cross = CrossAttention(config.hidden, source_hidden, self.cross_attention_heads)
                adapter = Adapter(config.hidden, self.adapter_size, self.dropout, cross)
            layers[str(i)] = AdaptedLayer(decoder.layer(i), adapter)
        about = {"backbone": asdict(weights.config), "source_hidden": source_hidden}
        return TargetStage(decoder.embeddings, layers, head, self, context, about)
