"""An encoder | decoder Transformer trained from scratch: AB-Net's baseline.
Loads and freezes nothing.

Vaswani et al., arXiv:1706.03762 ("base": hidden 512, 6 + 6 layers, 8 heads, 2048). Difference:
pre-LN (Xiong et al., arXiv:2002.04745), x + f(LN(x)), because it trains at learning rates and
warm-ups where post-LN diverges, so one setting works for all sizes here.

Shapes: R rows of the source, T rows of the target, H features, N rows of a decoding step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, TypeVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from xcloud.base.settings import Fraction, Positive, settings
from xcloud.contracts.model import BuildContext, Stage
from xcloud.models.attention import (
    CrossAttention,
    FixedCache,
    GrowingCache,
    Packing,
    SelfAttention,
)
from xcloud.models.decoding import Greedy, Search
from xcloud.models.encoder import check_heads
from xcloud.models.encoder_decoder import (
    SOURCE,
    TARGET,
    EncoderDecoder,
    SourceRows,
    SourceStage,
    TargetLayer,
    TargetSettings,
    TargetStage,
)
from xcloud.models.stages import seeded

Layer = TypeVar("Layer", bound=nn.Module)


def sinusoids(num_positions: int, hidden: int) -> Tensor:
    """[positions, H]: sine in even features, cosine in odd ones (section 3.5 of the paper)."""
    rate = torch.exp(torch.arange(0, hidden, 2) * (-math.log(10_000.0) / hidden))
    angle = torch.arange(num_positions)[:, None] * rate
    return torch.stack((angle.sin(), angle.cos()), 2).flatten(1)[:, :hidden]


class ScaledEmbeddings(nn.Module):
    """sqrt(H) * word + sinusoid. Sinusoids are recomputed, not saved."""

    positions: Tensor

    def __init__(self, vocab_size: int, hidden: int, max_length: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, hidden)
        nn.init.normal_(self.words.weight, std=hidden**-0.5)
        self.register_buffer("positions", sinusoids(max_length, hidden), persistent=False)
        self.scale = math.sqrt(hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids_R: Tensor, packing: Packing) -> Tensor:
        if packing.longest > self.positions.shape[0]:
            raise ValueError(
                f"got a text of {packing.longest} tokens; this network supports at most "
                f"{self.positions.shape[0]}. Lower the task's max_length."
            )
        return self._sum(ids_R, self.positions[packing.positions])

    def step(self, ids_N: Tensor, position: int) -> Tensor:
        return self._sum(ids_N, self.positions[position])

    def _sum(self, ids: Tensor, positions: Tensor) -> Tensor:
        rows: Tensor = self.dropout(self.words(ids) * self.scale + positions)
        return rows


class FeedForward(nn.Module):
    """up, ReLU, down."""

    def __init__(self, hidden: int, feed_forward: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, feed_forward)
        self.down = nn.Linear(feed_forward, hidden)
        for linear in (self.up, self.down):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.down(F.relu(self.up(rows)))
        return rows


class SourceLayer(nn.Module):
    """x + attention(LN(x)); x + feed(LN(x))."""

    def __init__(self, hidden: int, num_heads: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = SelfAttention(hidden, num_heads)
        self.feed_norm = nn.LayerNorm(hidden)
        self.feed = FeedForward(hidden, feed_forward)
        self.dropout = nn.Dropout(dropout)

    def forward(self, rows_RH: Tensor, packing: Packing) -> Tensor:
        attended = self.attention(self.attention_norm(rows_RH), packing)
        rows: Tensor = rows_RH + self.dropout(attended)
        rows = rows + self.dropout(self.feed(self.feed_norm(rows)))
        return rows


class CausalLayer(TargetLayer):
    """x + causal attention(LN(x)); x + cross-attention(LN(x), source); x + feed(LN(x))."""

    def __init__(self, hidden: int, num_heads: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = SelfAttention(hidden, num_heads)
        self.cross_norm = nn.LayerNorm(hidden)
        self.cross = CrossAttention(hidden, hidden, num_heads)
        self.feed_norm = nn.LayerNorm(hidden)
        self.feed = FeedForward(hidden, feed_forward)
        self.dropout = nn.Dropout(dropout)

    def open(self, source: SourceRows) -> FixedCache:
        return self.cross.open(source.rows, source.packing)

    def forward(self, rows_TH: Tensor, packing: Packing, source: FixedCache) -> Tensor:
        attended = self.attention(self.attention_norm(rows_TH), packing, causal=True)
        rows: Tensor = rows_TH + self.dropout(attended)
        rows = rows + self.dropout(self.cross(self.cross_norm(rows), packing, source))
        rows = rows + self.dropout(self.feed(self.feed_norm(rows)))
        return rows

    def step(self, rows_NH: Tensor, past: GrowingCache, source: FixedCache) -> Tensor:
        rows: Tensor = rows_NH + self.attention.step(self.attention_norm(rows_NH), past)
        rows = rows + self.cross.step(self.cross_norm(rows), source)
        rows = rows + self.feed(self.feed_norm(rows))
        return rows


class TiedHead(nn.Module):
    """words . LN(x): output weights tied to the target embedding."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)

    def forward(self, rows_TH: Tensor, words_VH: Tensor) -> Tensor:
        return F.linear(self.norm(rows_TH), words_VH)


@settings("Transformer")
class Transformer(EncoderDecoder):
    """Encoder | decoder from scratch; a SplitModel. Each side has its own vocabulary, because
    neither may see the other's; the target embedding is tied to the output.

    encoder_layers_per_stage: layers of each stage but the last; null spreads them evenly.
    """

    hidden: Positive = 512
    num_encoder_layers: Positive = 6
    num_decoder_layers: Positive = 6
    num_heads: Positive = 8
    feed_forward: Positive = 2048
    dropout: Fraction = 0.1
    label_smoothing: Annotated[float, Field(ge=0.0, le=0.99)] = 0.1
    encoder_layers_per_stage: Sequence[Positive] | None = None
    decoding: Search = field(default_factory=Greedy)

    def __post_init__(self) -> None:
        check_heads("Transformer.num_heads", self.num_heads, self.hidden)

    def describe(self) -> str:
        layers = f"{self.num_encoder_layers} + {self.num_decoder_layers} layers"
        return f"Transformer from scratch, {layers} x {self.hidden}"

    def source_width(self) -> int:
        return self.hidden

    def _stage(
        self,
        stage: int,
        num_stages: int,
        context: BuildContext,
        architecture: Mapping[str, Any] | None,
    ) -> Stage:
        """The settings determine the architecture."""
        is_last = stage == num_stages - 1
        name, end = (TARGET, "decoder") if is_last else (SOURCE, "encoder")

        def layer(kind: Callable[[int, int, int, float], Layer], i: int) -> Layer:
            # One random stream per layer: initial weights do not depend on the layout.
            with seeded(context.seed, f"{end} layer", i):
                return kind(self.hidden, self.num_heads, self.feed_forward, self.dropout)

        embeddings = None
        if ids := context.vocabularies[name] if is_last or stage == 0 else None:
            with seeded(context.seed, f"{end} ends"):
                shape = (ids.size, self.hidden, context.max_length)
                embeddings = ScaledEmbeddings(*shape, self.dropout)
        if not is_last:
            numbers = self.encoder_layers(self.num_encoder_layers, stage, num_stages)
            layers = {str(i): layer(SourceLayer, i) for i in numbers}
            norm = nn.LayerNorm(self.hidden) if stage == num_stages - 2 else None
            return SourceStage(embeddings, layers, norm, ids, {})
        assert ids is not None and embeddings is not None
        decoder = {str(i): layer(CausalLayer, i) for i in range(self.num_decoder_layers)}
        settings = TargetSettings(ids, context.max_length, self.label_smoothing, self.decoding)
        return TargetStage(embeddings, decoder, TiedHead(self.hidden), settings, {})
