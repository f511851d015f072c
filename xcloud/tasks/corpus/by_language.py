"""Labelled pairs in several languages: learned in one, tested in each. XNLI and PAWS-X.

Row i is the same pair in every language, so parts of a split are sampled alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xcloud.errors import ConfigError, DataError
from xcloud.tasks.corpus.files import DEV_NAMES, TextFile
from xcloud.tasks.corpus.hub import check_hub, is_local, load_hub
from xcloud.tasks.corpus.labelled import ColumnChoice, Columns, Sets, arranged
from xcloud.tasks.corpus.labelled_files import columns_of, list_tables, read_rows
from xcloud.tasks.corpus.labelled_hub import column_names, hub_rows
from xcloud.tasks.corpus.text import Parallel, Rows, Sampling
from xcloud.tasks.task import Split

LANGUAGE = re.compile(r"[a-z]{2,3}")


@dataclass(frozen=True)
class FilesByLanguage:
    """A folder with train.en.tsv (or train.tsv), dev.en.tsv, test.de.tsv, …, or as .jsonl.

    train_language: of train and dev. languages: those tested; None: all that have a test file.
    Without a training file the dev file of train_language is the training set, which is said.
    """

    path: str
    train_language: str = "en"
    languages: Sequence[str] | None = None
    columns: ColumnChoice = field(default_factory=ColumnChoice)
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise ConfigError("task.path must name the folder that holds the corpus")
        check_languages(self.train_language, self.languages)

    def describe(self) -> str:
        return f"files in {Path(self.path).expanduser().resolve().name}"

    def check(self) -> None:
        self._chosen()

    def read(self, visible: frozenset[str]) -> Parallel:
        train, dev, tests, stand_in = self._chosen()
        columns = self.columns.find(columns_of(train), str(train.paths[""]))
        splits: dict[Split, Sets] = {"train": {"": read_rows(train, columns, visible)}}
        if dev is not None:
            splits["dev"] = {"": read_rows(dev, columns, visible)}
        splits["test"] = {
            language: read_rows(file, columns, visible) for language, file in tests.items()
        }
        rows, remarks = arranged(splits, self.sampling, str(Path(self.path).expanduser()))
        if stand_in:
            remarks.insert(0, f"no training file: {train.label} is the training set")
        agreed = {
            "train": [train.name, *([dev.name] if dev else [])],
            "languages": list(tests),
            "columns": str(columns),
            "sampling": repr(self.sampling),
        }
        return Parallel(self.describe(), rows, [f"columns {columns}", *remarks], agreed)

    def _chosen(self) -> tuple[TextFile, TextFile | None, dict[str, TextFile], bool]:
        """Training file, dev file, test files by language, and whether dev stands in for train."""
        folder, here = Path(self.path).expanduser(), self.train_language
        files = list_tables(folder, f"train.{here}.tsv and test.{here}.tsv, test.de.tsv, …")
        by_name = {file.name: file for file in files}
        there = ", ".join(file.label for file in files) or "none"
        tests = {
            name.removeprefix("test."): file
            for name, file in by_name.items()
            if name.startswith("test.") and LANGUAGE.fullmatch(name.removeprefix("test."))
        }
        wanted = ordered(list(tests), here) if self.languages is None else self.languages
        if missing := [language for language in wanted if language not in tests]:
            raise DataError(
                f"{folder}: no test.{missing[0]}.tsv (or .jsonl) for task.languages; there are: "
                f"{there}"
            )
        if not wanted:
            raise DataError(f"{folder}: no test.LANGUAGE.tsv to test on; there are: {there}")
        dev = next((by_name[f"{n}.{here}"] for n in DEV_NAMES if f"{n}.{here}" in by_name), None)
        train = by_name.get(f"train.{here}") or by_name.get("train")
        if train is None and dev is None:
            raise DataError(
                f"{folder}: no train.{here}.tsv and no dev.{here}.tsv to learn from; there are: "
                f"{there}. Another language: task.train_language"
            )
        tested = {language: tests[language] for language in wanted}
        if train is not None:
            return train, dev, tested, False
        assert dev is not None
        return dev, None, tested, True


@dataclass(frozen=True)
class HubByLanguage:
    """A data set with one config for each language, such as facebook/xnli: train and validation
    are taken of train_language, test of every one of `languages`."""

    name: str
    train_language: str
    languages: Sequence[str]
    columns: ColumnChoice = field(default_factory=ColumnChoice)
    revision: str | None = None
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError("task.path must be a hub id such as owner/name, or a folder")
        check_languages(self.train_language, self.languages)
        if is_local(self.name):
            raise ConfigError(
                f"task.path={self.name} is a folder; the paper profile reads the hub. Take "
                "profile=files for a folder"
            )

    def describe(self) -> str:
        return self.name

    def check(self) -> None:
        check_hub(self.name, self.train_language, self.revision)

    def read(self, visible: frozenset[str]) -> Parallel:
        def rows(language: str, split: str, columns: Columns) -> Rows:
            loaded = load_hub(self.name, language, self.revision, split)
            where = f"{self.name} {language}, split {split}"
            return hub_rows(loaded, columns.visible(visible), column_names(loaded), where)

        here = self.train_language
        first: Any = load_hub(self.name, here, self.revision, "train")
        columns = self.columns.find(column_names(first), f"{self.name} {here}")
        splits: dict[Split, Sets] = {
            "train": {"": rows(here, "train", columns)},
            "dev": {"": rows(here, "validation", columns)},
            "test": {language: rows(language, "test", columns) for language in self.languages},
        }
        found, remarks = arranged(splits, self.sampling, self.name)
        agreed: Mapping[str, object] = {
            "revision": self.revision,
            "languages": list(self.languages),
            "columns": str(columns),
            "sampling": repr(self.sampling),
        }
        return Parallel(self.describe(), found, [f"columns {columns}", *remarks], agreed)


def check_languages(train_language: str, languages: Sequence[str] | None) -> None:
    if not isinstance(train_language, str) or not LANGUAGE.fullmatch(train_language):
        raise ConfigError(f"task.train_language must be a code such as en, got {train_language!r}")
    if languages is None:
        return
    if isinstance(languages, str) or not languages:
        raise ConfigError(f"task.languages must be a list such as [en, de], got {languages!r}")
    if wrong := [x for x in languages if not isinstance(x, str) or not LANGUAGE.fullmatch(x)]:
        raise ConfigError(f"task.languages: {wrong[0]!r} is no language code (quote 'no')")


def ordered(languages: Sequence[str], first: str) -> list[str]:
    """The language learned in first, the others by name."""
    return sorted(languages, key=lambda language: (language != first, language))
