"""The stages of a cut encoder. They are built by low_rank_split.py.

Shapes: B samples, S positions, R rows (tokens that are not padding), H features, K features that
cross.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from xcloud.contracts.model import Batch, Message, Stage, StageOutput
from xcloud.models.attention import Packing
from xcloud.models.encoder import Embeddings
from xcloud.models.low_rank_cut import BottomCut, ProjectionTop, TopCut
from xcloud.models.text_head import Pooling, TextHead, pool


class BottomStage(Stage):
    """Embeddings, lower blocks, and the cut block up to the boundary. Reads "text" and "types".

    frozen: no training and no dropout.
    architecture: JSON values to rebuild the stage without its backbone.
    """

    def __init__(
        self,
        embeddings: Embeddings,
        blocks: Mapping[str, nn.Module],
        cut: BottomCut,
        pad: int,
        frozen: bool,
        architecture: Mapping[str, Any],
        handed_over: tuple[Tensor, ...] = (),
    ) -> None:
        super().__init__()
        self.handed_over = handed_over
        self.embeddings = embeddings
        self.blocks = nn.ModuleDict(blocks)
        self.cut = cut
        self.pad, self.frozen = pad, frozen
        self.architecture = dict(architecture)
        if frozen:
            self.requires_grad_(False)

    def hand_over(self) -> tuple[Tensor, ...]:
        """D [H, K] and anchor [P, H], if estimated in this cloud alone."""
        return self.handed_over

    def train(self, mode: bool = True) -> BottomStage:
        super().train(mode and not self.frozen)
        return self

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        assert received is None
        packing = Packing.of(batch["text"], self.pad)
        # Networks with one type, such as RoBERTa, tell the texts apart by their eos ids.
        has_types = self.embeddings.types.num_embeddings > 1
        types = packing.pack(batch["types"]) if has_types else None
        rows = self.embeddings(packing.pack(batch["text"]), packing, types)
        for block in self.blocks.values():
            rows = block(rows, packing)
        sent = self.cut(rows, packing)
        return StageOutput({"counts": packing.counts.to(torch.int16), "hidden": sent.float()})


class TopPart(nn.Module):
    """The cut block after the boundary, upper blocks, pooling, and the bottleneck to the head.

    pooling: None keeps all rows. narrow: a Bottleneck, or nn.Identity.
    """

    def __init__(
        self,
        cut: TopCut,
        blocks: Mapping[str, nn.Module],
        pooling: Pooling | None,
        narrow: nn.Module,
    ) -> None:
        super().__init__()
        self.cut = cut
        self.blocks = nn.ModuleDict(blocks)
        self.pooling = pooling
        self.narrow = narrow

    def take_over(self, tensors: tuple[Tensor, ...]) -> None:
        decode, anchor = tensors
        assert isinstance(self.cut, ProjectionTop)
        self.cut.start(decode, anchor)

    def forward(self, sent_RK: Tensor, packing: Packing) -> Tensor:
        """[R, K] -> [B, H or head_rank], or [R, H or head_rank] without pooling."""
        rows = self.cut(sent_RK, packing)
        for block in self.blocks.values():
            rows = block(rows, packing)
        if self.pooling is not None:
            rows = pool(rows, packing, self.pooling)
        narrow: Tensor = self.narrow(rows)
        return narrow


class HeadPart(nn.Module):
    """The head and what precedes it. widen: the inverse of TopPart.narrow."""

    def __init__(self, widen: nn.Module, answer: TextHead) -> None:
        super().__init__()
        self.widen = widen
        self.answer = answer

    def forward(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.answer(self.widen(rows))
        return scores


class MiddleStage(Stage):
    """Everything between the cut and the head. Reads no fields."""

    def __init__(self, top: TopPart, architecture: Mapping[str, Any]) -> None:
        super().__init__()
        self.top = top
        self.architecture = dict(architecture)

    def take_over(self, tensors: tuple[Tensor, ...]) -> None:
        self.top.take_over(tensors)

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        assert received is not None
        rows = self.top(received["hidden"], Packing(received["counts"])).float()
        if self.top.pooling is not None:
            return StageOutput({"pooled": rows})
        return StageOutput({"counts": received["counts"], "hidden": rows})


class HeadStage(Stage):
    """The head; with 2 stages also everything between it and the cut. Reads "label"."""

    def __init__(
        self, top: TopPart | None, head: HeadPart, architecture: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.top = top
        self.head = head
        self.architecture = dict(architecture)

    def take_over(self, tensors: tuple[Tensor, ...]) -> None:
        assert self.top is not None
        self.top.take_over(tensors)

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        scores, packing = self._scores(received)
        return StageOutput(loss=self.head.answer.loss(scores, batch["label"], packing))

    @torch.no_grad()
    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        scores, packing = self._scores(received)
        return self.head.answer.predict(scores, batch["label"], packing)

    def _scores(self, received: Message | None) -> tuple[Tensor, Packing | None]:
        assert received is not None
        packing = Packing(received["counts"]) if "counts" in received else None
        rows = received["pooled"] if packing is None else received["hidden"]
        if self.top is not None:
            assert packing is not None
            rows = self.top(rows, packing)
        return self.head(rows), packing
