"""What a model must offer to be cut over clouds. No model lives here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from xcloud.parallel.stage import Batch, Border, Head, Stage, TokenIds


@dataclass(frozen=True)
class BuildContext:
    """What a rank hands to a model that builds one of its stages; only what this rank may see.

    vocabularies: field name -> special ids, for the visible fields only.
    sentences: field name -> token ids of that field's training texts, for pretraining a backbone.
    lane: position among the ranks that hold the same stage; lane 0 fills the cache.
    barrier: waits for the other lanes. report: one line of progress for the user.
    head: what the last stage must answer; None where labels are not seen, and in translation.
    samples: so many training samples, evenly spread, as a batch of the visible fields.
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
    head: Head | None = None
    samples: Callable[[int], Batch] = field(default=lambda count: {})


class SplitModel(Protocol):
    """A model that can be cut into `num_stages` stages, one after the other."""

    def describe(self) -> str:
        """Which model, in a few words."""

    def fields(self, stage: int, num_stages: int) -> frozenset[str]:
        """Batch fields that this stage reads. Decides what a cloud must be allowed to see."""

    def parts(self, stage: int, num_stages: int) -> frozenset[str]:
        """Names of the parts whose weights this stage holds (embeddings, layers, head …), for
        the rule about who may hold them."""

    def border(self, stage: int, num_stages: int, max_length: int) -> Border:
        """What crosses from `stage` to `stage + 1`, known without building anything."""

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        """The stage with its start weights: the same whatever the cluster, for the same seed."""

    def empty_stage(
        self,
        stage: int,
        num_stages: int,
        vocabularies: Mapping[str, TokenIds],
        max_length: int,
        architecture: Mapping[str, Any] | None = None,
    ) -> Stage:
        """The stage with weights that mean nothing yet, to be filled from an exported file.

        architecture: what the exported stage said of itself.
        """
