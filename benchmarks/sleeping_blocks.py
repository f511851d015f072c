"""A model of equal blocks that sleep in place of computing, so that steps take the same on a busy
machine: what is left of an error of a prediction is the planner's own. Messages and compressors
are those of a small language model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.toy import ToyModel
from xcloud.comm.channel import Boundary, BoundaryField, Message
from xcloud.contracts.model import Batch, BuildContext, Stage, StageOutput

ROWS, WIDTH = 64, 256  # of a sample
CALL_S, SAMPLE_S = 1e-3, 1.5e-3  # of a block's forward; a backward takes twice as long
HEAD_S = 2e-3  # of a sample


@dataclass(frozen=True)
class SleepingBlocks(ToyModel):
    blocks: int = 6
    blocks_per_stage: Sequence[int] | None = None

    def describe(self) -> str:
        return f"{self.blocks} sleeping blocks"

    def fields(self, stage: int, num_stages: int) -> frozenset[str]:
        return frozenset({"target"})

    def num_blocks(self, max_length: int) -> int:
        return self.blocks

    def block_counts(self, num_stages: int, max_length: int) -> list[int]:
        own = self.blocks_per_stage
        if own is None:
            own = [self.blocks // num_stages] * (num_stages - 1)
        return [*own, self.blocks - sum(own)]

    def with_block_counts(self, counts: Sequence[int]) -> SleepingBlocks:
        return replace(self, blocks_per_stage=tuple(counts[:-1]))

    def boundary(self, stage: int, num_stages: int, max_length: int) -> Boundary:
        return Boundary((BoundaryField("hidden", (ROWS, WIDTH), torch.float32),), max_length)

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        count = self.block_counts(num_stages, context.max_length)[stage]
        return SleepingStage(count, stage == 0, stage == num_stages - 1)


class SleepingStage(Stage):
    def __init__(self, blocks: int, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.blocks, self.is_first, self.is_last = blocks, is_first, is_last
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        size = len(batch["ids"])
        hidden = torch.randn(size, ROWS, WIDTH) if received is None else received["hidden"]
        work_s = self.blocks * (CALL_S + size * SAMPLE_S) + self.is_last * size * HEAD_S
        slept: Tensor = _Sleep.apply(hidden * self.scale, work_s)  # type: ignore[no-untyped-call]
        if self.is_last:
            return StageOutput(loss=slept.square().mean() * size)
        return StageOutput(send={"hidden": slept})

    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        return [[0]] * len(batch["ids"])


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return gradient, None
