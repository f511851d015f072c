"""An encoder | decoder Transformer trained from scratch: AB-Net's baseline.
Loads and freezes nothing.

Vaswani et al., arXiv:1706.03762 ("base": hidden 512, 6 + 6 layers, 8 heads, 2048). Difference:
pre-LN (Xiong et al., arXiv:2002.04745), x + f(LN(x)), because it trains at learning rates and
warm-ups where post-LN diverges, so one setting works for all sizes here.

Shapes: R rows of the source, T rows of the target, H features.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xcloud.base.settings import Positive, settings
from xcloud.contracts.model import Architecture, BuildContext, Stage
from xcloud.models.attention import CrossAttention, LayerCache, Packing, SelfAttention
from xcloud.models.encoder import check_heads
from xcloud.models.encoder_decoder import SOURCE, TARGET, EncoderDecoder, TargetStage
from xcloud.models.stages import RowsStage, seeded


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
        packing.check(len(self.positions))
        words = self.words(ids_R) * self.scale
        rows: Tensor = self.dropout(words + self.positions[packing.positions])
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


class Layer(nn.Module):
    """x + attention(LN(x)); x + feed(LN(x)). crosses: in a decoder attention is causal, and
    x + cross-attention(LN(x), source) comes in between."""

    def __init__(
        self, hidden: int, num_heads: int, feed_forward: int, dropout: float, crosses: bool
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = SelfAttention(hidden, num_heads)
        if crosses:
            self.cross_norm = nn.LayerNorm(hidden)
            self.cross = CrossAttention(hidden, hidden, num_heads)
        self.feed_norm = nn.LayerNorm(hidden)
        self.feed = FeedForward(hidden, feed_forward)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, rows_RH: Tensor, packing: Packing, cache: LayerCache | None = None
    ) -> Tensor:
        past = cache.past if cache else None
        attended = self.attention(self.attention_norm(rows_RH), packing, cache is not None, past)
        rows: Tensor = rows_RH + self.dropout(attended)
        if cache is not None:
            attended = self.cross(self.cross_norm(rows), packing, cache.source)
            rows = rows + self.dropout(attended)
        rows = rows + self.dropout(self.feed(self.feed_norm(rows)))
        return rows


class LastNorm(nn.LayerNorm):
    """Of the encoder; a layer of its last stage."""

    def forward(self, rows_RH: Tensor, packing: Packing | None = None) -> Tensor:
        return super().forward(rows_RH)


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
    """

    hidden: Positive = 512
    num_encoder_layers: Positive = 6
    num_decoder_layers: Positive = 6
    num_heads: Positive = 8
    feed_forward: Positive = 2048

    def __post_init__(self) -> None:
        check_heads("Transformer.num_heads", self.num_heads, self.hidden)

    def describe(self) -> str:
        layers = f"{self.num_encoder_layers} + {self.num_decoder_layers} layers"
        return f"Transformer from scratch, {layers} x {self.hidden}"

    def source_width(self) -> int:
        return self.hidden

    def _stage(
        self, stage: int, num_stages: int, context: BuildContext, architecture: Architecture | None
    ) -> Stage:
        """The settings determine the architecture."""
        is_last = stage == num_stages - 1
        name, end = (TARGET, "decoder") if is_last else (SOURCE, "encoder")

        def layers(numbers: range) -> dict[str, Layer]:
            made = {}
            for i in numbers:
                # One random stream per layer: initial weights do not depend on the layout.
                with seeded(context.seed, f"{end} layer", i):
                    sizes = (self.hidden, self.num_heads, self.feed_forward)
                    made[str(i)] = Layer(*sizes, self.dropout, crosses=is_last)
            return made

        embeddings = None
        if ids := context.vocabularies[name] if is_last or stage == 0 else None:
            with seeded(context.seed, f"{end} ends"):
                shape = (ids.size, self.hidden, context.max_length)
                embeddings = ScaledEmbeddings(*shape, self.dropout)
        if not is_last:
            numbers = self.encoder_layers(self.num_encoder_layers, stage, num_stages)
            encoder: dict[str, nn.Module] = {**layers(numbers)}
            if stage == num_stages - 2:
                encoder["norm"] = LastNorm(self.hidden)
            return RowsStage({}, embeddings, encoder, SOURCE, ids.pad if ids else 0)
        assert embeddings is not None
        decoder, head = layers(range(self.num_decoder_layers)), TiedHead(self.hidden)
        return TargetStage(embeddings, decoder, head, self, context, {})
