"""A toy whose first and last stage hold a matrix in common."""

from __future__ import annotations

import torch
from torch import nn

from tests.pipelines import D, ToyStage
from xcloud.comm.channel import Message
from xcloud.contracts.model import Batch, StageOutput


class TiedToy(ToyStage):
    """The same matrix stands before the first stage and behind the last."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage, num_stages)
        draw = torch.Generator().manual_seed(9)
        self.words = None
        if self.is_first or self.is_last:
            self.words = nn.Parameter(torch.randn(D, D, generator=draw) / 3)

    def tied(self) -> nn.Parameter | None:
        return self.words

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        if self.is_first:
            assert self.words is not None
            batch = {**batch, "x": batch["x"] @ self.words}
        if self.is_last:
            assert self.words is not None and received is not None
            received = {**received, "hidden": received["hidden"] @ self.words.T}
        return super().forward(received, batch)
