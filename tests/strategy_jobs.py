"""Clouds and batches for tests of strategies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.trainers import Rank
from xcloud.layout import Cloud, ClusterLayout


def clouds(count: int, num_ranks: Sequence[int] | int = 1) -> ClusterLayout:
    numbers = [num_ranks] * count if isinstance(num_ranks, int) else num_ranks
    return ClusterLayout({f"c{i}": Cloud(numbers[i]) for i in range(count)}, "free")


def values(job: Sequence[Rank], stage: int) -> list[Tensor]:
    """The stage's parameters in every rank that holds it, as one vector each."""
    found = [r.trainer.pipeline.stages.get(stage) for r in job]
    return [
        torch.cat([p.detach().reshape(-1) for p in s.parameters()]) for s in found if s is not None
    ]
