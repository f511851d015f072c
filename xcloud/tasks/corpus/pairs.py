"""Sentence pairs from any source: which column is which language."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.task import Split
from xcloud.tasks.corpus.files import read_lines
from xcloud.tasks.corpus.folder import is_usual_name
from xcloud.tasks.corpus.source import Form, Found, Source, check_columns
from xcloud.tasks.corpus.text import Parallel, Rows, Sampling

KEYS = "task.source, task.target or, on the hub, task.source_column, task.target_column"


@dataclass(frozen=True)
class Pairs:
    """A Corpus. source_column, target_column: if not named like the languages. A missing dev or
    test set is held out of train by `sampling`.

    source_monolingual_file, target_monolingual_file: further texts of one language, one in a line
    (.gz may be packed), for tokenizers and for backbones to be pretrained on. Only a cloud that
    sees this side reads its file. Lines that are also in dev or test are left out.
    """

    source: Source
    source_column: str | None = None
    target_column: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    source_monolingual_file: str | None = None
    target_monolingual_file: str | None = None

    def __post_init__(self) -> None:
        for side in ("source", "target"):
            path = getattr(self, f"{side}_monolingual_file")
            if path is not None and (not isinstance(path, str) or not path):
                raise ConfigError(
                    f"task.{side}_monolingual_file must be the path of a text file or null, "
                    f"got {path!r}"
                )

    def describe(self) -> str:
        return self.source.describe()

    def check(self, source: str, target: str) -> None:
        if not self.source.check():
            return
        for parts in self._find(source, target).splits.values():
            for table in parts[""]:
                check_columns(table, [*self._columns(source, target).values()], KEYS)

    def read(self, source: str, target: str, visible: frozenset[str]) -> Parallel:
        found = self._find(source, target)
        columns = self._columns(source, target)
        wanted = {language: columns[language] for language in sorted(visible)}
        splits: dict[Split, Rows] = {
            split: Rows.joined(table.read(wanted, KEYS) for table in parts[""])
            for split, parts in found.splits.items()
        }
        if not splits["train"].num_rows:
            raise DataError(f"{self.source.where}: the training set has no rows")
        splits, remarks = self.sampling.apply(splits, self.source.where)
        agreed = {**found.facts, "sampling": repr(self.sampling)}
        monolingual = {}
        for side, language in (("source", source), ("target", target)):
            path = getattr(self, f"{side}_monolingual_file")
            if path is not None and language in visible:
                monolingual[language], remark = _further_texts(side, path, language, splits)
                remarks.append(remark)
        return Parallel(self.describe(), splits, remarks, agreed, monolingual)

    def _columns(self, source: str, target: str) -> dict[str, str]:
        return {source: self.source_column or source, target: self.target_column or target}

    def _find(self, source: str, target: str) -> Found:
        expected = (
            "train.tsv (first line: column names), train.jsonl, or "
            f"train.{source} and train.{target}"
        )
        return self.source.find(Form(expected, is_usual_name, languages=(source, target)))


def _further_texts(
    side: str, path: str, language: str, splits: Mapping[Split, Rows]
) -> tuple[list[str], str]:
    """Lines of the file that are neither empty nor in dev or test, and a remark for the user."""
    scored = {text for split in ("dev", "test") for text in splits[split].texts[language]}
    lines = [line.strip() for line in read_lines(Path(path).expanduser())]
    texts = [line for line in lines if line and line not in scored]
    if not texts:
        raise DataError(
            f"task.{side}_monolingual_file={path}: no text in it that is not in dev or test"
        )
    left_out = sum(line in scored for line in lines)
    remark = f"{len(texts):,} further texts in {language}"
    return texts, remark + (f" ({left_out:,} of dev or test left out)" if left_out else "")
