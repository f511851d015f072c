"""Folders as sources: which files are train, dev and test. Formats: files.py."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.task import Split
from xcloud.tasks.corpus.files import TextFile
from xcloud.tasks.corpus.source import DEV_NAMES, Form, Found, OwnNames
from xcloud.tasks.corpus.text import SPLITS

Names = str | Sequence[str] | None
LANGUAGE = re.compile(r"[a-z]{2,3}")


@dataclass(frozen=True)
class _Path:
    """Common part of the folder sources."""

    path: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise ConfigError("task.path must name the folder that holds the corpus")

    @property
    def where(self) -> str:
        return str(Path(self.path).expanduser())

    def describe(self) -> str:
        return f"files in {Path(self.where).resolve().name}"

    def check(self) -> bool:
        return True


@dataclass(frozen=True)
class Folder(_Path):
    """A folder with train, dev (val, valid, validation) and test files, recognised by name.

    train_file, dev_file, test_file: override the files of a split: a name, a pattern such as
    "newstest20*.tsv.gz", or a list of these.
    """

    train_file: Names = None
    dev_file: Names = None
    test_file: Names = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._asked()

    def find(self, form: Form) -> Found:
        chosen = self._choose(list_files(Path(self.where), form), form, self._asked())
        facts = {
            "files": {split: [file.name for file in files] for split, files in chosen.items()}
        }
        splits = {split: self._parts(split, files) for split, files in chosen.items()}
        return Found(splits, None if self.test_file is None else "task.test_file", facts)

    def _asked(self) -> dict[Split, list[str]]:
        """File patterns requested for each split."""
        return {s: patterns_of(getattr(self, f"{s}_file"), f"task.{s}_file") for s in SPLITS}

    def _parts(self, split: Split, files: Sequence[TextFile]) -> Mapping[str, Sequence[TextFile]]:
        return {"": files}

    def _choose(
        self, files: Sequence[TextFile], form: Form, asked: Mapping[Split, Sequence[str]]
    ) -> dict[Split, list[TextFile]]:
        """The files of each split: those requested, else the one with a usual name.

        dev and test may have none. Raises DataError if a choice is missing or ambiguous.
        """
        there = ", ".join(file.label for file in files) or "none"
        chosen: dict[Split, list[TextFile]] = {}
        for split in SPLITS:
            for pattern in asked[split]:
                found = [file for file in files if matches(file, pattern)]
                if not found:
                    raise DataError(
                        f"{self.where}: no file for task.{split}_file={pattern}; found: {there}"
                    )
                new = [file for file in found if file not in chosen.get(split, [])]
                chosen.setdefault(split, []).extend(new)
        taken = [file for parts in chosen.values() for file in parts]
        if twice := [file.label for file in taken if taken.count(file) > 1]:
            raise DataError(f"{self.where}: {twice[0]} is used for two splits; check task.*_file")
        for split in SPLITS:
            if split in chosen:
                continue
            found = [f for f in files if f not in taken and form.is_usual(f.name, split)]
            if len(found) > 1:
                raise DataError(
                    f"{self.where}: several files for {split}: "
                    f"{', '.join(f.label for f in found)}; choose with task.{split}_file=NAME"
                )
            if found:
                chosen[split] = found
        if "train" not in chosen:
            raise DataError(
                f"{self.where}: no training file; expected {form.expected}; found: {there}. "
                "Choose with task.train_file=NAME (missing dev or test is held out of it)"
            )
        return chosen


@dataclass(frozen=True)
class LabelledFolder(Folder):
    """A Folder that may have files per language, or corpus-specific names.

    language: selects among train.en.tsv, train.de.tsv, …; files without a language always match.
    own_names: used where no file was requested.
    """

    language: str = "en"
    own_names: OwnNames = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.language, str) or not self.language:
            raise ConfigError(f"task.language must be a code such as en, got {self.language!r}")

    def _choose(
        self, files: Sequence[TextFile], form: Form, asked: Mapping[Split, Sequence[str]]
    ) -> dict[Split, list[TextFile]]:
        names = {file.name for file in files}
        own = {s: list(n) for s, n in self.own_names.items() if not asked[s] and set(n) <= names}

        def is_usual(name: str, split: Split) -> bool:
            stem, _, language = name.rpartition(".")
            if stem in ("train", "test", *DEV_NAMES):
                return language == self.language and form.is_usual(stem, split)
            return form.is_usual(name, split)

        return super()._choose(files, Form(form.expected, is_usual), {**asked, **own})

    def _parts(self, split: Split, files: Sequence[TextFile]) -> Mapping[str, Sequence[TextFile]]:
        names = self.own_names.get(split, {})
        parts: dict[str, list[TextFile]] = {}
        for file in files:
            parts.setdefault(names.get(file.name, ""), []).append(file)
        return {"": files} if "" in parts else parts  # parts only if every file has one


@dataclass(frozen=True)
class FolderByLanguage(_Path):
    """A folder with train.en.tsv (or train.tsv), dev.en.tsv, test.de.tsv, …, or as .jsonl.

    train_language: of train and dev. languages: tested ones; None: all with a test file.
    Without a training file, the dev file of train_language is used and a remark says so.
    """

    train_language: str = "en"
    languages: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_languages(self.train_language, self.languages)

    def find(self, form: Form) -> Found:
        here = self.train_language
        expected = f"train.{here}.tsv and test.{here}.tsv, test.de.tsv, …"
        files = list_files(Path(self.where), Form(expected, form.is_usual))
        by_name = {file.name: file for file in files}
        there = ", ".join(file.label for file in files) or "none"
        tests = {
            name.removeprefix("test."): file
            for name, file in by_name.items()
            if name.startswith("test.") and LANGUAGE.fullmatch(name.removeprefix("test."))
        }
        ordered = sorted(tests, key=lambda language: (language != here, language))
        wanted = ordered if self.languages is None else self.languages
        if missing := [language for language in wanted if language not in tests]:
            raise DataError(
                f"{self.where}: no test.{missing[0]}.tsv (or .jsonl) for task.languages; "
                f"found: {there}"
            )
        if not wanted:
            raise DataError(f"{self.where}: no test.LANGUAGE.tsv; found: {there}")
        dev = next((by_name[f"{n}.{here}"] for n in DEV_NAMES if f"{n}.{here}" in by_name), None)
        train = by_name.get(f"train.{here}") or by_name.get("train")
        remarks = []
        if train is None and dev is not None:
            remarks = [f"no training file: {dev.label} is the training set"]
            train, dev = dev, None
        if train is None:
            raise DataError(
                f"{self.where}: no train.{here}.tsv and no dev.{here}.tsv to train on; found: "
                f"{there}. For another language set task.train_language"
            )
        splits: dict[Split, Mapping[str, Sequence[TextFile]]] = {"train": {"": [train]}}
        if dev is not None:
            splits["dev"] = {"": [dev]}
        splits["test"] = {language: [tests[language]] for language in wanted}
        facts = {"train": [train.name, *([dev.name] if dev else [])], "languages": list(wanted)}
        return Found(splits, "task.languages", facts, remarks)


def check_languages(train_language: str, languages: Sequence[str] | None) -> None:
    if not isinstance(train_language, str) or not LANGUAGE.fullmatch(train_language):
        raise ConfigError(f"task.train_language must be a code such as en, got {train_language!r}")
    if languages is None:
        return
    if isinstance(languages, str) or not languages:
        raise ConfigError(f"task.languages must be a list such as [en, de], got {languages!r}")
    if wrong := [x for x in languages if not isinstance(x, str) or not LANGUAGE.fullmatch(x)]:
        raise ConfigError(f"task.languages: {wrong[0]!r} is not a language code (quote 'no')")


def patterns_of(names: Names, setting: str) -> list[str]:
    patterns = [] if names is None else [names] if isinstance(names, str) else list(names)
    if not all(isinstance(name, str) and name for name in patterns):
        raise ConfigError(f"{setting} must be a file name or a list of them, got {names!r}")
    return patterns


def matches(file: TextFile, pattern: str) -> bool:
    names = [file.name, *(path.name for path in file.paths.values())]
    return any(fnmatch(name, pattern) for name in names)


def is_usual_name(name: str, split: Split) -> bool:
    if split == "test":  # test, test_2016_flickr, test-2; but not testimony
        return name == "test" or (name.startswith("test") and not name[4:5].isalpha())
    return name in (DEV_NAMES if split == "dev" else ("train",))


def list_files(folder: Path, form: Form) -> list[TextFile]:
    """Files of these formats in the folder, sorted by name. Opens none."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {what}; task.path must be a folder with {form.expected}")
    tables: list[TextFile] = []
    pairs: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()):
        name, _, ending = path.name.removesuffix(".gz").rpartition(".")
        if not path.is_file():
            continue
        if ending in form.endings:
            tables.append(TextFile(name, form.endings[ending], {"": path}))
        elif ending in form.languages:
            source, target = form.languages
            for pair in (f".{source}-{target}", f".{target}-{source}"):
                name = name.removesuffix(pair)
            if ending in pairs.setdefault(name, {}):
                both = f"{pairs[name][ending].name} and {path.name}"
                raise DataError(f"{folder}: {both} are both that side; remove one")
            pairs[name][ending] = path
    return tables + [TextFile(name, "lines", paths) for name, paths in pairs.items()]
