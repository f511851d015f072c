"""What tasks share: settings, checks, a rank's view; for single texts and pairs also tokenising.

A rank that sees no field opens no file: if task.sizes are not set, rank 0 sends them
(xcloud/rank/loading.py). In a single process they are counted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.settings import Positive, settings
from xcloud.contracts.model import Batch, Head, TokenIds
from xcloud.contracts.task import SPLITS, Split
from xcloud.tasks.corpus.rows import Corpus, Form, Source, SplitTables
from xcloud.tasks.tables import PairTable
from xcloud.tasks.tokenizer import Tokenizer, TokenizerChoice


@settings("task", kw_only=True)
class SourceTask(Source):
    """What the settings of all tasks share.

    fields: the last one is what is predicted. max_length: in tokens, special ids included.
    cache_dir: for trained tokenizers; relative to the checkout.
    """

    fields: ClassVar[tuple[str, ...]]
    max_length: Positive
    cache_dir: str = ".cache"

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def form(self) -> Form:
        """The files that the task reads."""
        raise NotImplementedError

    def describe(self) -> str:
        return f"{self.name} ({self.source_name()})"

    def check(self) -> None:
        """Raise DataError or ConfigError if the corpus is missing, before any rank starts."""
        if (tables := self.check_source(self.form)) is not None:
            self.check_tables(tables)

    def check_tables(self, tables: SplitTables) -> None:
        """Raise DataError if they cannot be used. Reads no text."""

    def check_fields(self, fields: frozenset[str]) -> None:
        """Raise ConfigError if a model reads fields that the task lacks."""
        if unknown := fields - {*self.fields}:
            raise ConfigError(
                f"the task {self.name} has the fields {', '.join(self.fields)}, but the model "
                f"reads {', '.join(sorted(unknown))}; choose another model (model=…)"
            )

    def check_rows(self, rows: Mapping[Split, int]) -> None:
        """Raise DataError if a split is empty."""
        for split, count in rows.items():
            if not count:
                raise DataError(f"{self.describe()}: the {split} split has no rows")

    def agreed_settings(self) -> dict[str, object]:
        """Part of the fingerprint, beside name, max_length, row counts and corpus."""
        return {}


@settings("task", kw_only=True)
class TextTask(SourceTask):
    """Settings of a task with the fields text, types and label.

    tokenizer: public. A TrainedTokenizer is trained on public_sentences, not on the task's texts,
        because a vocabulary reveals its training text.
    sizes: samples of train, dev and test, for ranks that read none. null: rank 0 sends them.
    """

    fields = ("text", "types", "label")
    tokenizer: TokenizerChoice
    sizes: Mapping[Split, Positive] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sizes is not None and set(self.sizes) != set(SPLITS):
            raise ConfigError(
                "task.sizes must be null or name all three: {train: 5000, dev: 100, test: 500}; "
                f"got {self.sizes!r}"
            )

    def check(self) -> None:
        super().check()
        self.tokenizer.check()

    def check_rows(self, rows: Mapping[Split, int]) -> None:
        """Raise DataError if a split is empty or task.sizes differ from the data."""
        super().check_rows(rows)
        if self.sizes is not None and dict(self.sizes) != dict(rows):
            there = ", ".join(f"{split}: {rows[split]}" for split in SPLITS)
            raise DataError(
                f"{self.describe()}: task.sizes differ from the data, which has {{{there}}}"
            )

    def agreed_settings(self) -> dict[str, object]:
        """A rank without files knows no file names, so the corpus does not count where sizes are
        set."""
        tokenizer: dict[str, object] = {"tokenizer": repr(self.tokenizer)}
        return tokenizer if self.sizes is None else {**tokenizer, "corpus": None}


def pair_table(
    tokenizer: Tokenizer, max_length: int, firsts: Sequence[str], seconds: Sequence[str] | None
) -> PairTable:
    """Tokenise texts or pairs. Repeated texts, such as premises, are tokenised once."""

    def encoded(texts: Sequence[str]) -> list[list[int]]:
        distinct = list(dict.fromkeys(texts))
        ids = dict(zip(distinct, tokenizer.encode(distinct), strict=True))
        return [ids[text] for text in texts]

    return PairTable.of_samples(
        encoded(firsts), None if seconds is None else encoded(seconds), max_length,
        tokenizer.token_ids, tokenizer.num_separators,
    )  # fmt: skip


T = TypeVar("T", bound=SourceTask)
U = TypeVar("U", bound=TextTask)


class View(Generic[T]):
    """One rank's view of a task: what all of them share (TaskData).

    vocabularies: of the visible text fields. num_cut: as in TaskData.
    """

    head: Head | None = None

    def __init__(
        self,
        task: T,
        corpus: Corpus,
        rows: Mapping[Split, int],
        fields: frozenset[str],
        vocabularies: Mapping[str, TokenIds],
        num_cut: Mapping[str, int],
    ) -> None:
        self._task, self._rows, self._fields = task, dict(rows), fields
        self._remarks, self._agreed = corpus.remarks, corpus.agreed
        self._vocabularies, self.num_cut = vocabularies, num_cut

    def describe(self) -> str:
        return ", ".join([f"{self._task.describe()}: {counted(self._rows)}", *self._remarks])

    def fingerprint(self) -> str:
        shared = {
            "task": self._task.name,
            "max_length": self._task.max_length,
            "rows": self._rows,
            "corpus": dict(self._agreed),
        }
        described = json.dumps(shared | self._task.agreed_settings(), sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()

    def num_samples(self, split: Split) -> int:
        return self._rows[split]

    @property
    def text_fields(self) -> frozenset[str]:
        return frozenset(self._vocabularies)

    def vocabulary(self, field: str) -> TokenIds:
        self.check_visible(field, "text field")
        return self._vocabularies[field]

    def check_visible(self, field: str, kind: str = "field") -> None:
        """Raise DataError for a field, or a text field, that this rank does not see."""
        there = self._fields if kind == "field" else self.text_fields
        if field not in there:
            visible = ", ".join(sorted(there)) or "none"
            raise DataError(f"{field!r} is no {kind} visible here; visible: {visible}")

    def check_predictions(self, split: Split, predictions: Mapping[int, object]) -> None:
        """Raise DataError if what they are compared with is not visible here, ValueError if there
        are none, or one is for no sample of the split."""
        self.check_visible(self._task.fields[-1])
        if not predictions:
            raise ValueError(f"no predictions to score on {split}")
        num = self._rows[split]
        if outside := [i for i in predictions if not 0 <= i < num]:
            raise ValueError(f"sample {outside[0]} is not in {split} (0..{num - 1})")


class TextData(View[U]):
    """One rank's view of labelled texts (most of TaskData); invisible fields are not kept.
    tokenizer is None and tables is empty if text is not visible; labels likewise."""

    def __init__(
        self,
        task: U,
        corpus: Corpus,
        rows: Mapping[Split, int],
        fields: frozenset[str],
        tokenizer: Tokenizer | None,
        tables: Mapping[Split, PairTable],
        labels: Mapping[Split, Tensor],
    ) -> None:
        self._tokenizer = tokenizer if "text" in fields else None
        vocabularies = {} if self._tokenizer is None else {"text": self._tokenizer.token_ids}
        num_cut = dict.fromkeys(vocabularies, sum(table.num_cut for table in tables.values()))
        super().__init__(task, corpus, rows, fields, vocabularies, num_cut)
        self._tables, self._labels = tables, labels

    def batch(self, split: Split, ids: Tensor) -> Batch:
        batch = {"ids": ids}
        if self._tables:
            columns = zip(("text", "types"), self._tables[split].padded(ids), strict=True)
            batch |= {name: column for name, column in columns if name in self._fields}
        if self._labels:
            batch["label"] = self._labels[split][ids]
        return batch

    def weight(self, ids: Tensor) -> float:
        """The number of samples."""
        return float(len(ids))

    def save_tokenizers(self, folder: Path) -> None:
        """Write text_tokenizer.json if text is visible."""
        if self._tokenizer is not None:
            self._tokenizer.save(folder / "text_tokenizer.json")


def counted(counts: Mapping[Split, int]) -> str:
    """ "1,000 train, 50 dev, 50 test"."""
    return ", ".join(f"{count:,} {split}" for split, count in counts.items())
