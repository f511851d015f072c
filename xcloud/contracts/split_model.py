"""The protocol of models that can be split over clouds. No models here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import nn

from xcloud.contracts.stage import Batch, Boundary, Head, Stage, TokenIds


@dataclass(frozen=True)
class BuildContext:
    """What a rank passes to a model that builds one of its stages; only what the rank may see.

    vocabularies: field name -> special ids, visible fields only.
    sentences: field name -> token ids of that field's training texts, for pretraining a backbone.
    lane: index among the ranks that hold the same stage; lane 0 fills the cache.
    barrier: waits for the other lanes. report: one line of progress for the user.
    setting: dotted name of what is being built, to name its settings in messages.
    head: what the last stage predicts; None if labels are not visible, and in translation.
    samples: n -> a batch of n evenly spaced training samples, visible fields only.
    deal: called with each block of the stage as soon as it is complete, by a model that can build
        block by block: deals it over the ranks that share the stage, where they do, and moves it
        to the device.
    """

    seed: int
    device: torch.device
    cache_dir: Path
    vocabularies: Mapping[str, TokenIds]
    sentences: Callable[[str], Sequence[Sequence[int]]]
    max_length: int
    lane: int
    barrier: Callable[[], None]
    report: Callable[[str], None]
    setting: str = "model.backbone"
    head: Head | None = None
    samples: Callable[[int], Batch] = field(default=lambda count: {})
    deal: Callable[[nn.Module], None] = field(default=lambda block: None)


class SplitModel(Protocol):
    """A model that can be cut into `num_stages` consecutive stages."""

    def describe(self) -> str:
        """A short description of the model."""

    def fields(self, stage: int, num_stages: int) -> frozenset[str]:
        """Batch fields this stage reads, which its cloud must be allowed to see."""

    def parts(self, stage: int, num_stages: int) -> frozenset[str]:
        """Names of the parts whose weights this stage holds (embeddings, layers, head …), to check
        who may hold them."""

    def boundary(self, stage: int, num_stages: int, max_length: int) -> Boundary:
        """What crosses from `stage` to `stage + 1`, without building anything."""

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        """The stage with its initial weights, which depend on the seed but not on the cluster."""

    def empty_stage(
        self,
        stage: int,
        num_stages: int,
        vocabularies: Mapping[str, TokenIds],
        max_length: int,
        architecture: Mapping[str, Any] | None = None,
    ) -> Stage:
        """The stage with arbitrary weights, to be filled from an exported file.

        architecture: the exported stage's `architecture`.
        """


@runtime_checkable
class FreelyCut(Protocol):
    """A model of equal blocks that may be cut behind any of them, so that a planner can choose.
    Its setting is `blocks_per_stage`: a count for each stage but the last."""

    def num_blocks(self, max_length: int) -> int:
        """0 where other settings say where the model is cut."""

    def block_counts(self, num_stages: int, max_length: int) -> list[int]:
        """Of each stage, as its settings say now."""

    def with_block_counts(self, counts: Sequence[int]) -> Self:
        """counts: of each stage."""
