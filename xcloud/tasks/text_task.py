"""What tasks share: settings, checks, a rank's view; and text that every cloud has, for what all
must compute identically without seeing private text (a pretrained start, the basis of a cut).

A rank that sees no field opens no file: if task.sizes are not set, rank 0 tells them
(xcloud/rank/task_data.py). In a single process they are counted.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.project import in_project
from xcloud.base.settings import NotNegative, Positive, settings
from xcloud.contracts.model import Batch, Head, TokenIds
from xcloud.contracts.task import SPLITS, Scores, Split
from xcloud.demo_corpus import public_sentences
from xcloud.tasks.corpus.folder import read_lines
from xcloud.tasks.corpus.rows import Corpus, Form, Source, SplitTables, Text
from xcloud.tasks.tables import TokenTable
from xcloud.tasks.tokenizer import Tokenizer, TokenizerChoice

TOKENIZER_TEXTS, TOKENIZER_SEED = 10_000, 0


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

    def read(self, fields: frozenset[str] = frozenset(fields)) -> Corpus:
        """All splits, as far as these fields need them. Raises DataError."""
        raise NotImplementedError

    def read_for(self, fields: frozenset[str]) -> Corpus:
        """Only the row counts, if a rank sees no field and they are set. Raises ConfigError if a
        model reads fields that the task lacks."""
        self.check_fields(fields)
        return self.read(fields) if fields or self.sizes is None else Corpus.unseen(self.sizes)

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


T = TypeVar("T", bound=SourceTask)


class Tokenized:
    """The tokenizers of the visible text fields."""

    def __init__(self, tokenizers: Mapping[str, Any]) -> None:
        self._tokenizers = tokenizers

    @property
    def vocabularies(self) -> dict[str, TokenIds]:
        return {field: tokenizer.token_ids for field, tokenizer in self._tokenizers.items()}

    def tokenizer(self, field: str) -> Any:
        """Raises DataError for a text field that this rank does not see."""
        if field not in self._tokenizers:
            visible = ", ".join(sorted(self._tokenizers)) or "none"
            raise DataError(f"{field!r} is no text field visible here; visible: {visible}")
        return self._tokenizers[field]

    def save_tokenizers(self, folder: Path) -> None:
        """Write text_tokenizer.json, or that of any other visible text field."""
        for field, tokenizer in self._tokenizers.items():
            tokenizer.save(folder / f"{field}_tokenizer.json")


class View(Tokenized, Generic[T]):
    """One rank's view of a task: what all of them share (TaskData).

    tokenizers: of the visible text fields. columns: of each visible field, what a batch is made
    of. sizes: samples by split, where they are no rows.
    """

    head: Head | None = None

    def __init__(
        self,
        task: T,
        corpus: Corpus,
        fields: frozenset[str],
        tokenizers: Mapping[str, Any],
        columns: Mapping[str, Mapping[Split, TokenTable | Tensor]],
        sizes: Mapping[Split, int] | None = None,
    ) -> None:
        self._task, self._fields, self._tokenizers = task, fields, tokenizers
        self._columns, self._rows = columns, dict(sizes or corpus.counts)
        self._remarks, self._agreed = corpus.remarks, corpus.agreed

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
    def num_cut(self) -> Mapping[str, int]:
        tables = {name: self._columns[name].values() for name in self._tokenizers}
        return {name: sum(getattr(t, "num_cut", 0) for t in of) for name, of in tables.items()}

    def batch(self, split: Split, ids: Tensor) -> Batch:
        batch = {"ids": ids}
        for name, columns in self._columns.items():
            column = columns[split]
            batch[name] = column[ids] if isinstance(column, Tensor) else column.padded(ids)
        return batch

    def weight(self, ids: Tensor) -> float:
        """The number of samples."""
        return float(len(ids))

    def check_visible(self, field: str) -> None:
        """Raise DataError for a field that this rank does not see."""
        if field not in self._fields:
            visible = ", ".join(sorted(self._fields)) or "none"
            raise DataError(f"{field!r} is no field visible here; visible: {visible}")

    def check_predictions(self, split: Split, predictions: Mapping[int, object]) -> None:
        """Raise DataError if what they are compared with is not visible here, ValueError if there
        are none, or one is for no sample of the split."""
        self.check_visible(self._task.fields[-1])
        if not predictions:
            raise ValueError(f"no predictions to score on {split}")
        num = self._rows[split]
        if outside := [i for i in predictions if not 0 <= i < num]:
            raise ValueError(f"sample {outside[0]} is not in {split} (0..{num - 1})")

    def shown(self, split: Split, ident: int) -> Mapping[str, str]:
        """What a sample of Scores asks, if this rank sees it: texts by name."""
        return {}

    def sample_outputs(self, split: Split, scores: Scores, count: int) -> str:
        """The first samples that were scored, each with what it asks."""
        lines = []
        for ident, sample in islice(scores.samples.items(), count):
            said = {name: text for name, text in sample.items() if not isinstance(text, list)}
            entries = {**self.shown(split, ident), **said}.items()
            lines += [f"{name:10} {text}" for name, text in entries] + [""]
        return "\n".join(lines)


def counted(counts: Mapping[Split, int]) -> str:
    """ "1,000 train, 50 dev, 50 test"."""
    return ", ".join(f"{count:,} {split}" for split, count in counts.items())


def public_tokenizer(choice: TokenizerChoice, cache_dir: str) -> Tokenizer:
    """The tokenizer, trained on public sentences if needed."""
    texts = public_sentences(TOKENIZER_TEXTS, TOKENIZER_SEED) if choice.is_trained else ()
    return choice.prepare(texts, in_project(cache_dir))


@settings("public_text")
class PublicText:
    """Sentences of the demo grammar, or the lines of a file that every cloud has.

    tokenizer: same as the task's and the encoder's. path: one text per line, UTF-8, may be .gz;
    null: the demo grammar. seed: selects the sentences or lines.
    """

    tokenizer: TokenizerChoice
    path: Text | None = None
    seed: NotNegative = 0

    def describe(self) -> str:
        return "public sentences of the demo grammar" if self.path is None else self.path

    def token_ids(self, cache_dir: Path) -> TokenIds:
        return public_tokenizer(self.tokenizer, str(cache_dir)).token_ids

    def sentences(self, num: int, cache_dir: Path) -> Sequence[Sequence[int]]:
        return public_tokenizer(self.tokenizer, str(cache_dir)).encode(self._texts(num))

    def _texts(self, num: int) -> list[str]:
        if self.path is None:
            return public_sentences(num, self.seed)
        try:
            texts = [line.strip() for line in read_lines(Path(self.path).expanduser())]
        except DataError as error:
            raise DataError(
                f"public_text.path {error}; give a UTF-8 file with one text per line, the same in "
                "every cloud, or null for the demo grammar"
            ) from error
        lines = [line for line in texts if line]
        if len(lines) < num:
            raise DataError(
                f"public_text.path {self.path} has {len(lines)} lines, but {num} are needed: "
                "lower model.split.calibration_texts (twice as many lines are read with "
                "calibration_pairs) or the backbone's num_texts, or use a longer file"
            )
        return random.Random(self.seed).sample(lines, num)
