"""Shared by all source -> target models: the cut, the boundary, the loss and the prediction.
The layers come from abnet.py and transformer.py.

Stages 0..n-2 hold the encoder layers, the last stage holds the decoder. Only stage 0 reads the
source text, only the last the target text; the encoder's hidden rows cross the boundaries.
Batch fields "source" and "target": int64 [B, S], `bos x1 .. xn eos`, padded on the right.
A layer is a module of (rows [R, H], packing) -> rows [R, H]; in the decoder it also takes its
LayerCache. In a decoding step there is one row for each hypothesis.

Shapes: B samples, R rows of the source, T rows of the target (tokens that are not padding),
H features, V token ids, N rows of a decoding step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Fraction, Positive, settings
from xcloud.contracts.model import (
    Architecture,
    Batch,
    Boundary,
    BuildContext,
    Message,
    Stage,
    StageOutput,
)
from xcloud.models.attention import Cache, CrossAttention, LayerCache, Packing
from xcloud.models.decoding import Greedy, Search
from xcloud.models.stages import DescribedStage, rows_boundary

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
        self._check_stage(stage, num_stages)
        if stage == 0:
            return frozenset({SOURCE})
        return frozenset({TARGET}) if stage == num_stages - 1 else frozenset()

    def parts(self, stage: int, num_stages: int) -> frozenset[str]:
        if stage == num_stages - 1:
            return frozenset({"target_embeddings", "decoder", "head"})
        return frozenset({"encoder", "source_embeddings"} if stage == 0 else {"encoder"})

    def boundary(self, stage: int, num_stages: int, max_length: int) -> Boundary:
        self._check_stage(stage, num_stages)
        return rows_boundary(self.source_width(), max_length)

    def source_width(self) -> int:
        """Features of the encoder's rows."""
        raise NotImplementedError

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        self._check_stage(stage, num_stages)
        return self._stage(stage, num_stages, context, None).to(context.device)

    def empty_stage(
        self, stage: int, num_stages: int, context: BuildContext, architecture: Architecture
    ) -> Stage:
        return self._stage(stage, num_stages, context, architecture)

    def _stage(
        self, stage: int, num_stages: int, context: BuildContext, architecture: Architecture | None
    ) -> Stage:
        """architecture: of an exported stage that is built without its weights."""
        raise NotImplementedError

    def _check_stage(self, stage: int, num_stages: int) -> None:
        if num_stages < 2:
            raise ConfigError(
                f"{type(self).__name__} is cut into encoder | decoder, so it needs 2 stages or "
                f"more, got {num_stages}; with a single cloud put both stages there"
            )
        assert 0 <= stage < num_stages

    def encoder_layers(self, num_layers: int, stage: int, num_stages: int) -> range:
        """Of a stage: as encoder_layers_per_stage says, else evenly, the first ones one more."""
        num_parts, counts = num_stages - 1, self.encoder_layers_per_stage
        if num_parts > num_layers:
            raise ConfigError(
                f"{num_layers} encoder layers cannot be spread over {num_parts} stages; use at "
                f"most {num_layers + 1} clouds, or an encoder of {num_parts} layers or more"
            )
        if counts is None:
            share, over = divmod(num_layers, num_parts)
            counts = [share + (part < over) for part in range(num_parts)]
        if len(counts) != num_parts or sum(counts) != num_layers:
            raise ConfigError(
                f"{type(self).__name__}.encoder_layers_per_stage must be {num_parts} counts (one "
                "per stage except the last) that add up to the encoder's "
                f"{num_layers} layers, got {list(counts)}"
            )
        first = sum(counts[:stage])
        return range(first, first + counts[stage])


class SourceRows(NamedTuple):
    """The received encoder rows [R, H] and their packing."""

    rows: Tensor
    packing: Packing

    @classmethod
    def of(cls, received: Message | None) -> SourceRows:
        assert received is not None, "only stage 0 receives nothing"
        return cls(received["hidden"], Packing(received["counts"]))


class TargetStage(DescribedStage):
    """The decoder, the loss and the prediction.

    loss: sum over the target tokens, eos included and bos not, of cross-entropy with label
    smoothing e: -(1-e) log p(y) - e/V * sum over V of log p (Szegedy et al.,
    arXiv:1512.00567; fairseq spreads e over the other V-1 ids).
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
        assert int(target_BS[0, 0]) == self._ids.bos, "a target must start with bos"
        # eos is not an input, bos not an output: one row fewer than tokens.
        packing = Packing((target_BS != self._ids.pad).sum(1) - 1)
        caches = self.open(SourceRows.of(received))
        scores = self.scores(packing.pack(target_BS), packing, caches)
        loss = F.cross_entropy(
            scores.float(),
            packing.pack(target_BS[:, 1:]),
            label_smoothing=self.settings.label_smoothing,
            reduction="sum",
        )
        return StageOutput(loss=loss)

    def open(self, source: SourceRows) -> list[LayerCache]:
        """What each layer's cross-attention sees."""
        crosses = (part for part in self.layers.modules() if isinstance(part, CrossAttention))
        return [LayerCache(cross.open(*source)) for cross in crosses]

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
        source = SourceRows.of(received)
        was_training = self.training
        self.eval()
        try:
            decoding = self.settings.decoding
            limits = decoding.limits(source.packing.counts, self._max_length - 1)
            return decoding.search(CachedDecoder(self, source), limits, self._ids)
        finally:
            self.train(was_training)


class CachedDecoder:
    """A TargetStage as a decoding.StepDecoder, one token at a time."""

    def __init__(self, stage: TargetStage, source: SourceRows) -> None:
        self._stage, self._position = stage, 0
        self._caches = [replace(cache, past=Cache()) for cache in stage.open(source)]

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
