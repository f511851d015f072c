"""Sample counts for a cloud that holds no samples, and what tasks that take them share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from xcloud.base.checks import check_int
from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.task import Split, Task
from xcloud.tasks.corpus.text import SPLITS
from xcloud.tasks.text_pairs import digest_of
from xcloud.tasks.tokenizer import PretrainedTokenizer, TokenizerChoice

Sizes = Mapping[Split, int] | None
"""task.sizes: samples of train, dev and test. A rank that sees no field opens no file: if sizes
are not set, rank 0 sends them (xcloud/rank/loading.py). In a single process they are counted."""


class DescribedCorpus(Protocol):
    def describe(self) -> str: ...
    def check(self) -> object: ...


class SizedTask:
    """What tasks with `sizes` have in common."""

    corpus: DescribedCorpus
    name: str
    tokenizer: TokenizerChoice
    max_length: int
    sizes: Sizes

    def describe(self) -> str:
        return f"{self.name} ({self.corpus.describe()})"

    def check(self) -> None:
        """Raise DataError or ConfigError if the corpus is missing, before any rank starts."""
        self.corpus.check()
        if isinstance(self.tokenizer, PretrainedTokenizer):
            self.tokenizer.check()

    def fingerprint(
        self, rows: Mapping[Split, int], agreed: Mapping[str, object], **more: object
    ) -> str:
        """Digest of settings and sizes. agreed: of the corpus; a rank without files knows no file
        names, so it does not count where `sizes` are set. more: further settings."""
        shared = {
            "task": self.name,
            "max_length": self.max_length,
            "tokenizer": repr(self.tokenizer),
            "rows": dict(rows),
            "corpus": dict(agreed) if self.sizes is None else None,
        }
        return digest_of(shared | more)


def asks_for_sizes(task: Task) -> bool:
    """Whether the task has `sizes` and they are not set."""
    return getattr(task, "sizes", ()) is None


def told_sizes(task: Task, sizes: Mapping[Split, int]) -> Task:
    """The task with these sizes, for ranks that read no field."""
    return replace(task, sizes=sizes)  # type: ignore[type-var]


def check_sizes(sizes: Sizes) -> None:
    if sizes is None:
        return
    if not isinstance(sizes, Mapping) or set(sizes) != set(SPLITS):
        raise ConfigError(
            "task.sizes must be null or name all three: {train: 5000, dev: 100, test: 500}; "
            f"got {sizes!r}"
        )
    for split in SPLITS:
        check_int(f"task.sizes.{split}", sizes[split], 1)


def check_found(sizes: Sizes, found: Mapping[Split, int], what: str) -> None:
    """Raise DataError if task.sizes differ from the data."""
    if sizes is not None and dict(sizes) != dict(found):
        said = ", ".join(f"{split}: {found[split]}" for split in SPLITS)
        raise DataError(f"{what}: task.sizes differ from the data, which has {{{said}}}")
