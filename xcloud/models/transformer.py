"""Source -> target models, cut into encoder | decoder: what they share, and the Transformer that
is trained from scratch. AB-Net is in abnet.py.

Stages 0..n-2 hold the encoder layers, the last stage holds the decoder. Only stage 0 reads the
source text, only the last the target text; the encoder's hidden rows cross the boundaries.
Batch fields "source" and "target": int64 [B, S], `bos x1 .. xn eos`, padded on the right.
A layer is a module of (rows [R, H], packing) -> rows [R, H]; in the decoder it also takes its
LayerCache. In a decoding step there is one row for each hypothesis.

Shapes: B samples, R rows of the source, T rows of the target (tokens that are not padding),
H features, V token ids, N rows of a decoding step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Fraction, Positive, settings
from xcloud.comm.boundary import Boundary, Message
from xcloud.contracts.model import Architecture, Batch, BuildContext, Stage, StageOutput
from xcloud.models.decoding import Greedy, Search
from xcloud.models.encoder import (
    Cache,
    CrossAttention,
    LayerCache,
    Packing,
    SelfAttention,
    check_heads,
)
from xcloud.models.stages import RowsStage, rows_boundary, seeded

SOURCE, TARGET = "source", "target"


@settings("model", kw_only=True)
class EncoderDecoder:
    """The cut of a SplitModel into encoder | decoder.

    encoder_layers_per_stage: layers of each stage but the last; null spreads them evenly.
    """

    dropout: Fraction = 0.1
    label_smoothing: Annotated[float, Field(ge=0.0, le=0.99)] = 0.1
    encoder_layers_per_stage: Sequence[Positive] | None = None
    decoding: Search = field(default_factory=Greedy)

    def fields(self, stage: int, num_stages: int) -> frozenset[str]:
        """Stage 0 reads the source, the last stage the target, the others nothing."""
        if num_stages < 2:
            raise ConfigError(
                f"{type(self).__name__} is cut into encoder | decoder: it needs 2 stages or more, "
                f"got {num_stages}"
            )
        if stage == 0:
            return frozenset({SOURCE})
        return frozenset({TARGET}) if stage == num_stages - 1 else frozenset()

    def parts(self, stage: int, num_stages: int) -> frozenset[str]:
        if stage == num_stages - 1:
            return frozenset({"target_embeddings", "decoder", "head"})
        return frozenset({"encoder", "source_embeddings"} if stage == 0 else {"encoder"})

    def boundary(self, stage: int, num_stages: int, max_length: int) -> Boundary:
        return rows_boundary(self.source_width(), max_length)

    def source_width(self) -> int:
        """Features of the encoder's rows."""
        raise NotImplementedError

    def encoder_layers(self, num_layers: int, stage: int, num_stages: int) -> range:
        """Of a stage: as encoder_layers_per_stage says, else evenly, the first ones one more."""
        num_parts, counts = num_stages - 1, self.encoder_layers_per_stage
        if counts is None:
            if num_parts > num_layers:
                raise ConfigError(
                    f"{num_layers} encoder layers cannot be spread over {num_parts} stages"
                )
            share, over = divmod(num_layers, num_parts)
            counts = [share + (part < over) for part in range(num_parts)]
        if len(counts) != num_parts or sum(counts) != num_layers:
            raise ConfigError(
                f"{type(self).__name__}.encoder_layers_per_stage must be {num_parts} counts (no "
                f"last stage's) that add up to {num_layers} layers, got {list(counts)}"
            )
        first = sum(counts[:stage])
        return range(first, first + counts[stage])


class TargetStage(Stage):
    """The decoder, the loss and the prediction.

    loss: sum over the target tokens, eos included and bos not, of cross-entropy with label
    smoothing e: -(1-e) log p(y) - e/V * sum over V of log p (Szegedy et al., arXiv:1512.00567).
    embeddings: has `words`, [V, H]. head: (rows [T, H], words [V, H]) -> scores [T, V].
    """

    def __init__(
        self,
        embeddings: nn.Module,
        layers: Mapping[str, nn.Module],
        head: nn.Module,
        settings: EncoderDecoder,
        context: BuildContext,
        architecture: Architecture,
    ) -> None:
        super().__init__(architecture)
        self.embeddings = embeddings
        self.layers = nn.ModuleDict(layers)
        self.head = head
        self.settings = settings
        self._ids, self._max_length = context.vocabularies[TARGET], context.max_length

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        target_BS = batch[TARGET]
        assert received is not None
        assert int(target_BS[0, 0]) == self._ids.bos, "a target must start with bos"
        # eos is not an input, bos not an output: one row fewer than tokens.
        packing = Packing((target_BS != self._ids.pad).sum(1) - 1)
        scores = self.scores(packing.pack(target_BS), packing, self.open(received))
        loss = F.cross_entropy(
            scores.float(),
            packing.pack(target_BS[:, 1:]),
            label_smoothing=self.settings.label_smoothing,
            reduction="sum",
        )
        return StageOutput(loss=loss)

    def open(self, received: Message) -> list[LayerCache]:
        """What each layer's cross-attention sees of the encoder's rows."""
        packing = Packing(received["counts"])
        crosses = (part for part in self.layers.modules() if isinstance(part, CrossAttention))
        return [LayerCache(cross.open(received["hidden"], packing)) for cross in crosses]

    def scores(self, ids_T: Tensor, packing: Packing, caches: Sequence[LayerCache]) -> Tensor:
        """Next-token scores [T, V], given each row and those before it."""
        rows = self.embeddings(ids_T, packing)
        for layer, cache in zip(self.layers.values(), caches, strict=True):
            rows = layer(rows, packing, cache)
        scores: Tensor = self.head(rows, self.get_parameter("embeddings.words.weight"))
        return scores

    @torch.no_grad()
    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        """Target ids without bos and eos. Ignores the batch; no dropout."""
        assert received is not None
        was_training = self.training
        self.eval()
        decoding = self.settings.decoding
        limits = decoding.limits(received["counts"].long(), self._max_length - 1)
        answers = decoding.search(CachedDecoder(self, received), limits, self._ids)
        self.train(was_training)
        return answers


class CachedDecoder:
    """A TargetStage as a decoding.StepDecoder, one token at a time."""

    def __init__(self, stage: TargetStage, received: Message) -> None:
        self._stage, self._position = stage, 0
        self._caches = [replace(cache, past=Cache()) for cache in stage.open(received)]

    def step(self, tokens_N: Tensor) -> Tensor:
        packing = Packing(torch.ones_like(tokens_N), torch.full_like(tokens_N, self._position))
        self._position += 1
        return self._stage.scores(tokens_N, packing, self._caches)

    def keep(self, rows: Tensor, sentences: Tensor | None = None) -> None:
        for cache in self._caches:
            assert cache.past is not None
            cache.past.keep(rows)
            if sentences is not None:
                cache.source.keep(sentences)


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
        up, down = nn.Linear(hidden, feed_forward), nn.Linear(feed_forward, hidden)
        for linear in (up, down):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        self.feed = nn.Sequential(up, nn.ReLU(), down)
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

    Vaswani et al., arXiv:1706.03762 ("base": hidden 512, 6 + 6 layers, 8 heads, 2048). Difference:
    pre-LN (Xiong et al., arXiv:2002.04745), x + f(LN(x)), because it trains at learning rates and
    warm-ups where post-LN diverges, so one setting works for all sizes here.
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

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
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
