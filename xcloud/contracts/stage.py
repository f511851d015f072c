"""The contract between a model's part (a stage) and whoever runs it. No network, no schedule.

Shapes: B samples in a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor, nn

from xcloud.comm.boundary import Boundary, BoundaryField, Message, Samples

__all__ = [
    "NO_LABEL",
    "NO_TOKEN",
    "Batch",
    "Boundary",
    "BoundaryField",
    "Head",
    "Message",
    "Stage",
    "StageOutput",
    "TokenIds",
]

Batch = Samples
"""Field name -> tensor, axis 0 = sample. Always has "ids", int64 [B]; else what may be seen."""


class StageOutput(NamedTuple):
    """What a stage sends on and what it loses. The last stage has a loss and sends nothing.

    loss: sum (not mean) over the micro-batch, scalar with graph; whoever runs the stage divides
    by the weight of the whole update, so that any cut into micro-batches gives the same gradient.
    """

    send: Message | None = None
    loss: Tensor | None = None


class Stage(nn.Module):
    """One part of a split model."""

    def hand_over(self) -> tuple[Tensor, ...]:
        """What the next stage must have before the first step, as its boundary's `start` says."""
        return ()

    def take_over(self, tensors: tuple[Tensor, ...]) -> None:
        """What the stage before handed over. Called only where its boundary has a `start`."""
        raise NotImplementedError

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        """Training and evaluation alike; `received` is None in the first stage."""
        raise NotImplementedError

    def tied(self) -> nn.Parameter | None:
        """What this stage trains as one with the pipeline's other end, where both begin equal."""
        return None

    def exported(self) -> Mapping[str, Tensor]:
        """What a file of the trained stage holds."""
        return self.state_dict()

    def load_exported(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what `exported` gave. Raises RuntimeError if it belongs to another architecture."""
        self.load_state_dict(tensors)

    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        """Last stage only: what the task scores, one list of token ids for each sample."""
        raise NotImplementedError


NO_TOKEN = -1
"""Behind the tokens of a text where a tokenizer has no padding: no id of any vocabulary."""
NO_LABEL = -100
"""Where nothing is to be guessed; what torch's losses ignore."""


@dataclass(frozen=True)
class TokenIds:
    """What a model must know of a tokenizer: its size and its special ids."""

    size: int
    pad: int
    bos: int
    eos: int
    mask: int


@dataclass(frozen=True)
class Head:
    """What the last stage of an understanding model must answer, known where labels are.

    kind      num_outputs  batch field "label"                       `predict` gives, per sample
    classes   classes      int64 [B], the class                      [class]
    value     1            float32 [B]                               [round(1e6 * value)]
    span      2 a token    int64 [B, 3]: first and last token of     [first, last,
                           the answer, first token that may be one    round(1e4 * score)]
    """

    kind: Literal["classes", "value", "span"]
    num_outputs: int
