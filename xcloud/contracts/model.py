"""The protocols of tasks (data by sample id, and scores) and of models that can be split over
clouds, and the contract of one part (a stage) with whoever runs it. No tasks or models here, no
network, no schedule.

Shapes: B samples in a micro-batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from xcloud.comm.channel import Boundary, Message, Samples

Batch = Samples
"""Field name -> tensor on the host, axis 0 = sample. Always has "ids", int64 [B]; else what may be
seen. A stage brings to its device what it computes with (comm.devices.bring), so that it can read
lengths and places without waiting for a GPU."""
Follow = Callable[[Sequence[int]], Iterator[int]]
"""What yields the tokens that a trained model writes after some others."""

Architecture = Mapping[str, Any]
"""JSON values from which a stage can be built again without its weights."""

DocumentLoss = Callable[[Tensor, Tensor], Tensor]
"""Returns the loss of a micro-batch, a sum over its samples. It is given the nats of the guessed
tokens of each document, float64 [D], those of one sample after the other, and the samples' ids,
int64 [B]."""

BASES = "bases"
"""Key of an Architecture: digests of base models and public texts, by a name for messages."""


class StageOutput(NamedTuple):
    """The output of a stage: what it sends on and what it loses. The last stage has a loss and
    sends nothing.

    loss: sum (not mean) over the micro-batch, scalar with graph; the trainer divides
    by the weight of the whole update, so that any cut into micro-batches gives the same gradient.
    """

    send: Message | None = None
    loss: Tensor | None = None


def no_text(tokens: Sequence[int]) -> Iterator[int]:
    """Yield nothing (Follow): no model that writes text is at hand."""
    return iter(())


class Stage(nn.Module, ABC):
    """One part of a split model.

    architecture: the stage's architecture, empty where the model's settings define all of it.
        Under BASES it has digests of everything that the stage was built from, not only of its own
        part: every cloud must have the same.
    handed_over: the tensors that the next stage must have before the first step, as its boundary's
        `start` says.
    frozen: the stage has no dropout.
    """

    def __init__(
        self,
        architecture: Architecture | None = None,
        handed_over: tuple[Tensor, ...] = (),
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.architecture: Architecture = dict(architecture or {})
        self.handed_over = handed_over
        self._frozen = frozen

    @property
    def device(self) -> torch.device:
        """The device that the stage computes on."""
        return next(self.parameters()).device

    def train(self, mode: bool = True) -> Self:
        return super().train(mode and not self._frozen)

    def take_over(self, tensors: tuple[Tensor, ...]) -> None:
        """Take over what the stage before handed over. Called only where its boundary has a
        `start`."""
        raise TypeError(f"{type(self).__name__} has no take_over for its boundary's `start`")

    @abstractmethod
    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        """Training and evaluation alike; `received` is None in the first stage."""

    def follow(self, tokens: Sequence[int]) -> Iterator[int]:
        """Yield what a stage that is a whole language model writes after these tokens, without
        end or as far as it has positions. Other stages write nothing."""
        return iter(())

    def tied(self) -> nn.Parameter | None:
        """Return what this stage trains as one with the pipeline's other end, where both begin
        equal."""
        return None

    def exported(self) -> Mapping[str, Tensor]:
        """Return what a file of the trained stage holds."""
        return self.state_dict()

    def load_exported(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what `exported` gave. Raises RuntimeError if it belongs to another architecture."""
        self.load_state_dict(tensors)

    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        """Last stage only: what the task scores, one list of token ids for each sample."""
        raise TypeError(f"{type(self).__name__} has no predict, and is a last stage")


NO_TOKEN = -1
"""Behind the tokens of a text where a tokenizer has no padding: no id of any vocabulary."""
NO_LABEL = -100
"""Where nothing is to be guessed; what torch's losses ignore."""
NOT_FINITE = -1
"""In predictions, in place of a loss that is no number or infinite."""


@dataclass(frozen=True)
class TokenIds:
    """The facts of a tokenizer that a model must know: its size and its special ids."""

    size: int
    pad: int
    bos: int
    eos: int
    mask: int


@dataclass(frozen=True)
class Head:
    """The answer that the last stage of an understanding model gives, known where labels are.

    kind      num_outputs  batch field "label"                       `predict` gives, per sample
    classes   classes      int64 [B], the class                      [class]
    value     1            float32 [B]                               [round(1e6 * value)]
    span      2 a token    int64 [B, 3]: first and last token of     [first, last,
                           the answer, first token that may be one    round(1e4 * score)]
    """

    kind: Literal["classes", "value", "span"]
    num_outputs: int


@dataclass(frozen=True, kw_only=True)
class BuildPlace:
    """The place where a rank builds what it holds.

    group_rank: the index among the ranks that hold the same; the first fills the cache.
    barrier: a function that waits for the other ranks of the group.
    report: a function that shows one line of progress to the user.
    """

    seed: int
    device: torch.device
    cache_dir: Path
    report: Callable[[str], None]
    group_rank: int = 0
    barrier: Callable[[], None] = field(default=lambda: None)


@dataclass(frozen=True, kw_only=True)
class BuildContext(BuildPlace):
    """The context that a rank passes to a model that builds one of its stages; only what the rank
    may see.

    vocabularies: the special ids of each field, visible fields only.
    sentences: a function that returns the token ids of a field's training texts, for pretraining a
        backbone.
    setting: the dotted name of what is being built, by which messages name its settings.
    head: the head of the last stage; None if labels are not visible, and in translation.
    document_loss: the loss by which the last stage of a causal language model learns; None: the
        nats of all guessed tokens.
    samples: a function that returns a batch of n evenly spaced training samples, visible fields
        only.
    deal: a function that a model calls with each block of the stage as soon as the block is
        complete, if it can build block by block. It deals the block over the ranks that share the
        stage, where they do, and moves it to the device.
    architecture: the architecture of an exported stage, from whose file the stage will be filled.
    """

    vocabularies: Mapping[str, TokenIds]
    sentences: Callable[[str], Sequence[Sequence[int]]]
    max_length: int
    setting: str = "model.backbone"
    head: Head | None = None
    document_loss: DocumentLoss | None = None
    samples: Callable[[int], Batch] = field(default=lambda count: {})
    deal: Callable[[nn.Module], None] = field(default=lambda block: None)
    architecture: Architecture | None = None


@runtime_checkable
class SplitModel(Protocol):
    """A model that can be cut into `num_stages` consecutive stages."""

    def describe(self) -> str:
        """A short description of the model."""

    def fields(self, stage: int, num_stages: int) -> frozenset[str]:
        """Batch fields this stage reads, which its cloud must be allowed to see."""

    def boundary(self, stage: int, num_stages: int, max_length: int) -> Boundary:
        """Return what crosses from `stage` to `stage + 1`, without building anything."""

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        """The stage with its initial weights, which depend on the seed but not on the cluster; or,
        where the context has an exported stage's architecture, arbitrary ones."""


DataSplit = Literal["train", "dev", "test"]


@runtime_checkable
class ModelOfParts(SplitModel, Protocol):
    """A model that names the parts of which its stages consist, as rules on who may hold them
    need."""

    def parts(self, stage: int, num_stages: int) -> frozenset[str]:
        """Names of the parts whose weights this stage holds (embeddings, layers, head …)."""


SPLITS: tuple[DataSplit, ...] = ("train", "dev", "test")
Answers = Literal["sample", "span"]
"""What an understanding task predicts: one label per sample, or a span in it."""


@dataclass(frozen=True)
class Scores:
    """The scores of a split.

    values: the scores by name, the main one first.
    errors: the standard error of each score, over samples. One that is not a number is left out:
        a single sample tells nothing of the error.
    samples: the metrics and texts of each sample for `scores.jsonl`, by id.
    """

    values: Mapping[str, float]
    errors: Mapping[str, float] = field(default_factory=dict)
    samples: Mapping[int, Mapping[str, object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {name: error for name, error in self.errors.items() if not math.isnan(error)}
        object.__setattr__(self, "errors", known)


class Cut(NamedTuple):
    """How many of the texts of a split did not fit, and were shortened or left out. setting: what
    they did not fit."""

    num: int
    of: int
    setting: str


NumCut = Mapping[str, Mapping[DataSplit, Cut]]
"""What did not fit, by what became of it ("source texts cut", "chats left out"), then by split."""


class TaskData(Protocol):
    """One rank's view of a task: only the fields visible to its cloud are read.

    Sample ids run from 0 to num_samples(split) - 1 and mean the same sample in every cloud.
    """

    def describe(self) -> str:
        """Corpus, sizes and languages in one line."""

    def fingerprint(self) -> str:
        """Hex digest of what all clouds must agree on (settings and sizes, no private text)."""

    def own_digests(self) -> Mapping[str, str]:
        """Return a digest of each thing that this rank has read, by a name for messages: texts and
        labels by split, tokenizers. They tell this rank's private data from those of its earlier
        attempts; nobody else is shown them."""

    def shared_digests(self) -> Mapping[str, str]:
        """Return digests of what every cloud that reads it must have alike and may show the
        others: public tokenizers, by a name for messages."""

    def num_samples(self, split: DataSplit) -> int: ...

    @property
    def vocabularies(self) -> Mapping[str, TokenIds]:
        """The vocabularies of the visible fields that hold token ids."""

    @property
    def num_cut(self) -> NumCut:
        """The numbers of what did not fit, of visible fields. What does not occur is not in it."""

    @property
    def head(self) -> Head | None:
        """The head that the last stage has; None if labels are not visible, and in translation."""

    def sentences(self, field: str) -> Sequence[Sequence[int]]:
        """Token ids of the training texts of a visible field, without special ids."""

    def batch(self, split: DataSplit, ids: Tensor) -> Batch:
        """The visible fields of these samples, padded to the longest; the same in every epoch.
        ids: int64 [B]."""

    def weight(self, ids: Tensor) -> float:
        """Weight of these training samples in the loss, such as their target tokens."""

    def score(self, split: DataSplit, predictions: dict[int, list[int]]) -> Scores:
        """Quality of the predictions of a whole split, by sample id."""

    def save_tokenizers(self, folder: Path) -> None:
        """Write the visible fields' tokenizers, to use a trained model without the corpus."""

    def signature(self) -> dict[str, str]:
        """How each score was computed, by its name."""

    def sample_outputs(
        self, split: DataSplit, scores: Scores, count: int, follow: Follow = no_text
    ) -> str:
        """Return a few predictions with their references, for display; empty if none can be shown.

        follow: yields what the trained model writes after some tokens; nothing where this rank
            does not hold the whole model.
        """


@runtime_checkable
class Task(Protocol):
    """A task as configured."""

    @property
    def max_length(self) -> int:
        """Longest sample, in tokens, special ids included."""

    def describe(self) -> str:
        """Name of the corpus in a few words, without reading it."""

    def check(self) -> None:
        """Quick check: raise DataError if data that `load` reads is missing."""

    def load(self, fields: frozenset[str], seed: int) -> TaskData:
        """Read only these fields. Raises DataError: what is missing and how to get it."""
