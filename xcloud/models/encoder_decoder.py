"""Shared by all source -> target models: the cut, the boundary, the loss and the prediction.
The layers come from abnet.py and transformer.py.

Stages 0..n-2 hold the encoder layers, the last stage holds the decoder. Only stage 0 reads the
source text, only the last the target text; the encoder's hidden rows cross the boundaries.
Batch fields "source" and "target": int64 [B, S], `bos x1 .. xn eos`, padded on the right.

Shapes: B samples, R rows of the source, T rows of the target (tokens that are not padding),
H features, V token ids, N rows of a decoding step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xcloud.base.errors import ConfigError
from xcloud.contracts.model import (
    Batch,
    Boundary,
    BuildContext,
    Message,
    Stage,
    StageOutput,
    TokenIds,
)
from xcloud.models.attention import FixedCache, GrowingCache, Packing
from xcloud.models.decoding import Search
from xcloud.models.stages import DescribedStage, rows_boundary

SOURCE, TARGET = "source", "target"


class EncoderDecoder:
    """The cut of a SplitModel into encoder | decoder."""

    encoder_layers_per_stage: Sequence[int] | None

    def fields(self, stage: int, num_stages: int) -> frozenset[str]:
        """Stage 0 reads the source, the last stage the target, the others nothing."""
        self.check_stage(stage, num_stages)
        if stage == 0:
            return frozenset({SOURCE})
        return frozenset({TARGET}) if stage == num_stages - 1 else frozenset()

    def parts(self, stage: int, num_stages: int) -> frozenset[str]:
        """Parts whose weights a stage holds."""
        self.check_stage(stage, num_stages)
        if stage == num_stages - 1:
            return frozenset({"target_embeddings", "decoder", "head"})
        return frozenset({"encoder", "source_embeddings"} if stage == 0 else {"encoder"})

    def boundary(self, stage: int, num_stages: int, max_length: int) -> Boundary:
        self.check_stage(stage, num_stages)
        return rows_boundary(self.source_width(), max_length)

    def source_width(self) -> int:
        """Features of the encoder's rows."""
        raise NotImplementedError

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        self.check_stage(stage, num_stages)
        return self._stage(stage, num_stages, context, None).to(context.device)

    def empty_stage(
        self, stage: int, num_stages: int, context: BuildContext, architecture: Mapping[str, Any]
    ) -> Stage:
        self.check_stage(stage, num_stages)
        return self._stage(stage, num_stages, context, architecture)

    def _stage(
        self,
        stage: int,
        num_stages: int,
        context: BuildContext,
        architecture: Mapping[str, Any] | None,
    ) -> Stage:
        """architecture: of an exported stage that is built without its weights."""
        raise NotImplementedError

    def check_stage(self, stage: int, num_stages: int) -> None:
        """Raise ConfigError unless there are at least two stages."""
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


class SourceStage(DescribedStage):
    """Part of the encoder. layers: modules of (rows [R, H], packing) -> rows [R, H].

    embeddings: in stage 0 only. norm: the encoder's final norm, if any.
    """

    def __init__(
        self,
        embeddings: nn.Module | None,
        layers: Mapping[str, nn.Module],
        norm: nn.Module | None,
        ids: TokenIds | None,
        architecture: Mapping[str, Any],
    ) -> None:
        super().__init__(architecture)
        self.embeddings = embeddings
        self.layers = nn.ModuleDict(layers)
        self.norm = norm
        self.ids = ids

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        if self.embeddings is not None:
            assert self.ids is not None and received is None
            packing = Packing.of(batch[SOURCE], self.ids.pad)
            rows = self.embeddings(packing.pack(batch[SOURCE]), packing)
        else:
            rows, packing = SourceRows.of(received)
        for layer in self.layers.values():
            rows = layer(rows, packing)
        if self.norm is not None:
            rows = self.norm(rows)
        return StageOutput({"counts": packing.counts.to(torch.int16), "hidden": rows.float()})


class TargetLayer(nn.Module):
    """A decoder layer with cross-attention, for whole texts or one token at a time."""

    def open(self, source: SourceRows) -> FixedCache:
        """Cross-attention's keys and values of the source sentences."""
        raise NotImplementedError

    def forward(self, rows_TH: Tensor, packing: Packing, source: FixedCache) -> Tensor:
        raise NotImplementedError

    def step(self, rows_NH: Tensor, past: GrowingCache, source: FixedCache) -> Tensor:
        raise NotImplementedError


class TargetEmbeddings(Protocol):
    """Token ids -> rows, for whole texts or one position; `words` is [V, H]."""

    words: nn.Embedding

    def __call__(self, ids_T: Tensor, packing: Packing, /) -> Tensor: ...

    def step(self, ids_N: Tensor, position: int) -> Tensor: ...


@dataclass(frozen=True)
class TargetSettings:
    """Settings of the last stage, besides its network."""

    ids: TokenIds
    max_length: int
    label_smoothing: float
    decoding: Search


class TargetStage(DescribedStage):
    """The decoder, the loss and the prediction.

    loss: sum over the target tokens, eos included and bos not, of cross-entropy with label
    smoothing e: -(1-e) log p(y) - e/V * sum over V of log p (Szegedy et al.,
    arXiv:1512.00567; fairseq spreads e over the other V-1 ids).
    head: (rows [T, H], words [V, H]) -> scores [T, V].
    """

    def __init__(
        self,
        embeddings: TargetEmbeddings,
        layers: Mapping[str, TargetLayer],
        head: nn.Module,
        settings: TargetSettings,
        architecture: Mapping[str, Any],
    ) -> None:
        super().__init__(architecture)
        self.embeddings = embeddings
        self.layers = nn.ModuleDict(layers)
        self.head = head
        self.settings = settings

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        source = SourceRows.of(received)
        target_BS = batch[TARGET]
        self._check_first(target_BS)
        # eos is not an input, bos not an output: one row fewer than tokens.
        packing = Packing((target_BS != self.settings.ids.pad).sum(1) - 1)
        scores = self.scores(packing.pack(target_BS), packing, source)
        loss = F.cross_entropy(
            scores.float(),
            packing.pack(target_BS[:, 1:]),
            label_smoothing=self.settings.label_smoothing,
            reduction="sum",
        )
        return StageOutput(loss=loss)

    def scores(self, ids_T: Tensor, packing: Packing, source: SourceRows) -> Tensor:
        """Next-token scores [T, V], given each row and those before it."""
        rows = self.embeddings(ids_T, packing)
        for layer in self.target_layers():
            rows = layer(rows, packing, layer.open(source))
        scores: Tensor = self.head(rows, self.embeddings.words.weight)
        return scores

    def target_layers(self) -> list[TargetLayer]:
        return cast(list[TargetLayer], list(self.layers.values()))

    @torch.no_grad()
    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        """Target ids without bos and eos. Ignores the batch; no dropout."""
        source = SourceRows.of(received)
        was_training = self.training
        self.eval()
        try:
            decoding = self.settings.decoding
            limits = decoding.limits(source.packing.counts, self.settings.max_length - 1)
            return decoding.search(CachedDecoder(self, source), limits, self.settings.ids)
        finally:
            self.train(was_training)

    def _check_first(self, target_BS: Tensor) -> None:
        assert target_BS.shape[0] and target_BS.shape[1] > 1
        assert int(target_BS[0, 0]) == self.settings.ids.bos, "a target must start with bos"


class CachedDecoder:
    """A TargetStage as a decoding.StepDecoder, one token at a time."""

    def __init__(self, stage: TargetStage, source: SourceRows) -> None:
        self._stage, self._layers = stage, stage.target_layers()
        self._pasts = [GrowingCache() for _ in self._layers]
        self._sources = [layer.open(source) for layer in self._layers]
        self._position = 0

    def step(self, tokens_N: Tensor) -> Tensor:
        rows = self._stage.embeddings.step(tokens_N, self._position)
        for layer, past, source in zip(self._layers, self._pasts, self._sources, strict=True):
            rows = layer.step(rows, past, source)
        self._position += 1
        scores: Tensor = self._stage.head(rows, self._stage.embeddings.words.weight)
        return scores

    def keep(self, rows: Tensor, sentences: Tensor | None = None) -> None:
        for past in self._pasts:
            past.keep(rows)
        if sentences is not None:
            for source in self._sources:
                source.keep(sentences)
