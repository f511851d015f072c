"""What a task must offer: data by sample id, and a score. No task lives here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from xcloud.parallel.stage import Batch, Head, TokenIds

Split = Literal["train", "dev", "test"]
Answers = Literal["sample", "span"]
"""What a task of text understanding asks for: something of each sample, or a span in it."""


class TaskData(Protocol):
    """One rank's view of a task: only the fields that its cloud may see are ever read.

    Sample ids run from 0 to num_samples(split) - 1 and mean the same sample in every cloud.
    """

    def describe(self) -> str:
        """Corpus, sizes and languages in one line."""

    def fingerprint(self) -> str:
        """Hex digest of what every cloud must agree on (settings and sizes, no private text)."""

    def num_samples(self, split: Split) -> int: ...

    @property
    def text_fields(self) -> frozenset[str]:
        """The visible fields that are token ids, and so have a vocabulary."""

    @property
    def head(self) -> Head | None:
        """What the last stage must answer; None where labels are not seen, and in translation."""

    def vocabulary(self, field: str) -> TokenIds:
        """Raises DataError for a field that is no text or may not be seen here."""

    def sentences(self, field: str) -> Sequence[Sequence[int]]:
        """Token ids of the training texts of a visible field, without special ids."""

    def batch(self, split: Split, ids: Tensor) -> Batch:
        """The visible fields of these samples, padded to the longest. ids: int64 [B]."""

    def weight(self, ids: Tensor) -> float:
        """How much these training samples count in the loss (target tokens, say)."""

    def score(self, split: Split, predictions: dict[int, list[int]]) -> dict[str, float]:
        """Quality of the predictions of a whole split, by sample id."""

    def save_tokenizers(self, folder: Path) -> None:
        """Write what turns the visible fields' text into ids and back, to use a trained model
        without the corpus."""

    def signature(self) -> dict[str, str]:
        """How each score was computed, by its name."""

    def sample_outputs(self, split: Split, predictions: dict[int, list[int]], count: int) -> str:
        """A few predictions beside their references, for a person to read."""


class Task(Protocol):
    """A task as configured."""

    @property
    def max_length(self) -> int:
        """Longest sample, in tokens, special ids included."""

    def describe(self) -> str:
        """Which corpus, in a few words; known without reading it."""

    def check(self) -> None:
        """Raise DataError if what `load` reads is missing, as far as that is seen at once."""

    def load(self, fields: frozenset[str], seed: int) -> TaskData:
        """Read the data of these fields only. Raises DataError: what is missing, how to get it."""
