"""Sentence pairs from any source: which column is which language."""

from __future__ import annotations

from dataclasses import dataclass, field

from xcloud.contracts.task import Split
from xcloud.errors import DataError
from xcloud.tasks.corpus.folder import is_usual_name
from xcloud.tasks.corpus.source import Form, Found, Source
from xcloud.tasks.corpus.text import Parallel, Rows, Sampling


@dataclass(frozen=True)
class Pairs:
    """A Corpus. source_column, target_column: if not named like the languages. A missing dev or
    test set is held out of train by `sampling`."""

    source: Source
    source_column: str | None = None
    target_column: str | None = None
    sampling: Sampling = field(default_factory=Sampling)

    def describe(self) -> str:
        return self.source.describe()

    def check(self, source: str, target: str) -> None:
        if self.source.check():
            self._find(source, target)

    def read(self, source: str, target: str, visible: frozenset[str]) -> Parallel:
        found = self._find(source, target)
        columns = {source: self.source_column or source, target: self.target_column or target}
        wanted = {language: columns[language] for language in sorted(visible)}
        keys = "task.source, task.target or, on the hub, task.source_column, task.target_column"
        splits: dict[Split, Rows] = {
            split: Rows.joined(table.read(wanted, keys) for table in parts[""])
            for split, parts in found.splits.items()
        }
        if not splits["train"].num_rows:
            raise DataError(f"{self.source.where}: the training set has no rows")
        splits, remarks = self.sampling.apply(splits, self.source.where)
        agreed = {**found.facts, "sampling": repr(self.sampling)}
        return Parallel(self.describe(), splits, remarks, agreed)

    def _find(self, source: str, target: str) -> Found:
        expected = (
            "train.tsv (first line: column names), train.jsonl, or "
            f"train.{source} and train.{target}"
        )
        return self.source.find(Form(expected, is_usual_name, languages=(source, target)))
