"""Labelled texts in a folder: .tsv or .jsonl, plain or gzipped, one file a split.

    train.tsv   the first line names the columns: sentence, label
    train.jsonl one object a line: {"sentence1": …, "sentence2": …, "label": …}
A file of one of several languages is named train.en.tsv, dev.en.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from xcloud.errors import ConfigError, DataError
from xcloud.tasks.corpus.files import (
    DEV_NAMES,
    Names,
    TextFile,
    choose_files,
    is_usual_name,
    patterns_of,
    read_json_lines,
    read_lines,
    read_table,
)
from xcloud.tasks.corpus.labelled import ColumnChoice, Columns, Sets, arranged, renamed
from xcloud.tasks.corpus.text import Parallel, Rows, Sampling
from xcloud.tasks.task import Split

EXPECTED = "train.tsv (first line: column names) or train.jsonl"
COLUMN_KEYS = "task.text_columns and task.label_column"
NO_FILES: Mapping[Split, Mapping[str, str]] = {}


@dataclass(frozen=True)
class LabelledFiles:
    """A folder with train, dev (val, valid, validation) and test files, told by their names.

    train_file, dev_file, test_file: other files: a name, a pattern, or a list of them.
    language: which of train.en.tsv, train.de.tsv, … is meant; files without one are for all.
    own_names: split -> file name -> part, for a corpus that names its files in its own way; they
    count where no file was asked for. A part "" is none: the files make up one split.
    """

    path: str
    train_file: Names = None
    dev_file: Names = None
    test_file: Names = None
    columns: ColumnChoice = field(default_factory=ColumnChoice)
    language: str = "en"
    own_names: Mapping[Split, Mapping[str, str]] = field(default_factory=lambda: NO_FILES)
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise ConfigError("task.path must name the folder that holds the corpus")
        if not isinstance(self.language, str) or not self.language:
            raise ConfigError(f"task.language must be a code such as en, got {self.language!r}")
        for name in ("train_file", "dev_file", "test_file"):
            patterns_of(getattr(self, name), f"task.{name}")

    def describe(self) -> str:
        return f"files in {Path(self.path).expanduser().resolve().name}"

    def check(self) -> None:
        self._chosen()

    def read(self, visible: frozenset[str]) -> Parallel:
        chosen, columns = self._chosen()
        splits: dict[Split, Sets] = {}
        for split, files in chosen.items():
            of = self.own_names.get(split, {})
            by_part: dict[str, list[Rows]] = {}
            for file in files:
                rows = read_rows(file, columns, visible)
                by_part.setdefault(of.get(file.name, ""), []).append(rows)
            if len(by_part) > 1 and "" in by_part:  # some have a part: then the split has none
                by_part = {"": [rows for found in by_part.values() for rows in found]}
            splits[split] = {part: Rows.joined(found) for part, found in by_part.items()}
        folder = str(Path(self.path).expanduser())
        found_rows, remarks = arranged(splits, self.sampling, folder)
        names = {split: [file.name for file in files] for split, files in chosen.items()}
        agreed = {"files": names, "columns": str(columns), "sampling": repr(self.sampling)}
        return Parallel(self.describe(), found_rows, [f"columns {columns}", *remarks], agreed)

    def _chosen(self) -> tuple[dict[Split, list[TextFile]], Columns]:
        """The labelled files of each split, and their columns."""
        folder = Path(self.path).expanduser()
        files = list_tables(folder, EXPECTED)
        names = {file.name for file in files}
        asked: dict[Split, Names] = {
            "train": self.train_file, "dev": self.dev_file, "test": self.test_file
        }  # fmt: skip
        for split, own in self.own_names.items():
            if asked[split] is None and set(own) <= names:
                asked[split] = list(own)
        chosen = choose_files(folder, files, asked, self._is_usual, EXPECTED)
        first = chosen["train"][0]
        columns = self.columns.find(columns_of(first), str(first.paths[""]))
        test = chosen.get("test", [])
        if any(columns.label not in columns_of(file) for file in test):
            if self.test_file is not None:
                raise DataError(
                    f"{test[0].paths['']}: no column {columns.label}, so nothing to score by; "
                    "choose another task.test_file"
                )
            del chosen["test"]  # a test set whose labels are kept back, as GLUE's
        return chosen, columns

    def _is_usual(self, name: str, split: Split) -> bool:
        stem, _, language = name.rpartition(".")
        if stem in ("train", "test", *DEV_NAMES):
            return language == self.language and is_usual_name(stem, split)
        return is_usual_name(name, split)


def list_tables(folder: Path, expected: str) -> list[TextFile]:
    """Every .tsv, .jsonl and .json file of this folder, sorted by name. Opens none of them."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {what}; task.path must be a folder with {expected}")
    files = []
    for path in sorted(folder.iterdir()):
        name, _, ending = path.name.removesuffix(".gz").rpartition(".")
        if path.is_file() and ending in ("tsv", "jsonl", "json"):
            kind: Literal["table", "json"] = "table" if ending == "tsv" else "json"
            files.append(TextFile(name, kind, {"": path}))
    return files


def columns_of(file: TextFile) -> list[str]:
    """What the first line names."""
    path = file.paths[""]
    first = next(islice(read_lines(path), 1), "")
    if file.kind == "table":
        return first.split("\t")
    try:
        row = json.loads(first)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line 1: not JSON ({error.msg}); one object a line") from error
    return list(row) if isinstance(row, dict) else []


def read_rows(file: TextFile, columns: Columns, visible: frozenset[str]) -> Rows:
    wanted = columns.visible(visible)
    names, path = frozenset(wanted.values()), file.paths[""]
    if file.kind == "table":
        return renamed(read_table(path, names, COLUMN_KEYS), wanted)
    numbers = frozenset({columns.label})
    return renamed(read_json_lines(path, names, COLUMN_KEYS, numbers), wanted)
