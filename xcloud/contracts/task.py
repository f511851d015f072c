"""The task protocols: data by sample id, and scores. No tasks here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from xcloud.contracts.model import Batch, Head, TokenIds

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")
Answers = Literal["sample", "span"]
"""What an understanding task predicts: one label per sample, or a span in it."""


@dataclass(frozen=True)
class Scores:
    """Of a split. values: by name, the main one first. errors: the standard error of each, over
    samples. samples: by id, figures and texts of each for `scores.jsonl`."""

    values: Mapping[str, float]
    errors: Mapping[str, float] = field(default_factory=dict)
    samples: Mapping[int, Mapping[str, object]] = field(default_factory=dict)


class TaskData(Protocol):
    """One rank's view of a task: only the fields visible to its cloud are read.

    Sample ids run from 0 to num_samples(split) - 1 and mean the same sample in every cloud.
    """

    def describe(self) -> str:
        """Corpus, sizes and languages in one line."""

    def fingerprint(self) -> str:
        """Hex digest of what all clouds must agree on (settings and sizes, no private text)."""

    def num_samples(self, split: Split) -> int: ...

    @property
    def vocabularies(self) -> Mapping[str, TokenIds]:
        """Of the visible fields that hold token ids."""

    @property
    def num_cut(self) -> Mapping[str, int]:
        """Samples whose text was cut to max_length, by visible text field."""

    @property
    def head(self) -> Head | None:
        """What the last stage predicts; None if labels are not visible, and in translation."""

    def sentences(self, field: str) -> Sequence[Sequence[int]]:
        """Token ids of the training texts of a visible field, without special ids."""

    def batch(self, split: Split, ids: Tensor) -> Batch:
        """The visible fields of these samples, padded to the longest; the same in every epoch.
        ids: int64 [B]."""

    def weight(self, ids: Tensor) -> float:
        """Weight of these training samples in the loss, such as their target tokens."""

    def score(self, split: Split, predictions: dict[int, list[int]]) -> Scores:
        """Quality of the predictions of a whole split, by sample id."""

    def save_tokenizers(self, folder: Path) -> None:
        """Write the visible fields' tokenizers, to use a trained model without the corpus."""

    def signature(self) -> dict[str, str]:
        """How each score was computed, by its name."""

    def sample_outputs(self, split: Split, scores: Scores, count: int) -> str:
        """A few predictions with their references, for display."""


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


def asks_for_sizes(task: Task) -> bool:
    """Whether ranks that read no field can be given the row counts, as `task.sizes`, which is not
    set."""
    return getattr(task, "sizes", ()) is None


def with_sizes(task: Task, sizes: Mapping[Split, int]) -> Task:
    return replace(task, sizes=sizes)  # type: ignore[type-var]
