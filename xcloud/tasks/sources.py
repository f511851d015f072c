"""Folders and data sets of the hub as sources: which files or splits are train, dev and test, and
their formats. No filtering.

In a folder the format follows from the file name (any may end in .gz):
    train.tsv              tab-separated, no quoting; the header names the columns: es, en
    train.jsonl, .json     one object per line: {"es": …, "en": …} or {"translation": {"es": …}}
    train.es, train.en     one sentence per line, aligned by row; also train.es-en.es
Rows of `datasets` (which no longer runs scripts), from a hub id or a local folder of parquet or
jsonl, are columns or {"translation": {"es": …, "en": …}}.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import Field

from xcloud.base.errors import DataError
from xcloud.base.settings import settings
from xcloud.contracts.model import SPLITS, Split
from xcloud.hub import go_offline_if_unreachable
from xcloud.tasks.rows import (
    DEV_NAMES,
    FileKind,
    Form,
    Names,
    Source,
    SplitTables,
    Table,
    Tables,
    Text,
    check_columns,
    name_of,
)

Language = Annotated[str, Field(pattern="^[a-z]{2,3}$")]
Languages = Annotated[Sequence[Language], Field(min_length=1)]
BATCH_ROWS = 1000


def read_lines(path: Path) -> Iterator[str]:
    """Lines without their ending, from plain or gzipped UTF-8. Only a line feed ends one: a U+2028
    or a lone carriage return inside a text must not misalign the sides."""
    opened: Callable[..., IO[str]] = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            for line in file:
                yield line.removesuffix("\n").removesuffix("\r")
    except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        what = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "cannot be read"
        raise DataError(f"{path}: {what} ({error})") from error


@dataclass(frozen=True)
class TextFile:
    """A Table: one file, or the files of a line pair. name: without suffixes. kind: squad is one
    JSON value, {"data": [{"paragraphs": [row, …]}]}; text is running text, which its task cuts
    into documents. read: the texts of a side of a line pair."""

    name: str
    kind: FileKind
    paths: Mapping[str, Path]  # language -> file for lines; "" -> file for the others
    read: Callable[[Path], Iterable[str]] = read_lines

    @property
    def names(self) -> list[str]:
        return [self.name, *(path.name for path in self.paths.values())]

    @property
    def path(self) -> Path:
        return next(iter(self.paths.values()))

    @property
    def where(self) -> str:
        return str(self.path)

    def columns(self) -> list[str]:
        if self.kind == "lines":
            return list(self.paths)
        if self.kind == "table":
            return next(read_lines(self.path), "").split("\t")
        return list(next((row for _, row in self._records()), {}))

    def rows(self, columns: Sequence[str], keys: str) -> Iterator[tuple[Any, ...]]:
        if self.kind == "lines":
            yield from self._line_rows(columns)
            return
        if self.kind == "table":
            check_columns(self, columns, keys)
        for where, row in self._records():
            if missing := [column for column in columns if row.get(column) is None]:
                said = f"no text under {missing[0]!r}; its keys: {', '.join(row) or 'none'}"
                raise DataError(f"{where}: {said}. Choose with {keys}")
            yield tuple([row[column] for column in columns])

    def _line_rows(self, sides: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Opens only these sides. A rank that sees neither counts the rows of one."""
        if missing := [side for side in sides if side not in self.paths]:
            raise DataError(f"{self.path}: its other side, {self.name}.{missing[0]}, is missing")
        paths = [self.paths[side] for side in sides] or [self.path]
        for row in zip_longest(*map(self.read, paths)):
            if None in row:
                counts = [f"{p.name} {sum(1 for _ in self.read(p)):,}" for p in sorted(paths)]
                said = f"the sides of a line pair differ in lines: {' and '.join(counts)}"
                raise DataError(f"{self.path.parent}: {said}")
            yield row if sides else ()

    def _records(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(location, cells by column) of each row."""
        if self.kind == "squad":
            for number, row in enumerate(_squad_paragraphs(self.path), start=1):
                yield f"{self.path}, paragraph {number}", row
            return
        lines = enumerate(read_lines(self.path), start=1)
        header = next(lines, (0, ""))[1].split("\t") if self.kind == "table" else []
        for where, line in ((f"{self.path}, line {number}", line) for number, line in lines):
            if header:
                cells = line.split("\t")
                if len(cells) != len(header):
                    said = f"{len(cells)} columns, but the header has {len(header)}"
                    raise DataError(f"{where}: {said}; texts must not contain tabs")
                yield where, dict(zip(header, cells, strict=True))
            elif line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    said = f"not JSON ({error.msg}); expected one object per line"
                    raise DataError(f"{where}: {said}") from error
                row = row.get("translation", row) if isinstance(row, dict) else {}
                yield where, row if isinstance(row, dict) else {}


def _squad_paragraphs(path: Path) -> list[Mapping[str, Any]]:
    try:
        whole = json.loads("\n".join(read_lines(path)))
        return [row for article in whole["data"] for row in article["paragraphs"]]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        said = f'not of the form {{"data": [{{"paragraphs": [...]}}]}} ({error!r})'
        raise DataError(f"{path}: {said}; one paragraph per line must be named .jsonl") from error


@settings("task", kw_only=True)
class InFolder(Source):
    """path: of the folder that holds the corpus."""

    path: Text

    @property
    def where(self) -> str:
        return str(Path(self.path).expanduser())

    def source_name(self) -> str:
        return f"files in {Path(self.where).resolve().name}"


@settings("task", kw_only=True)
class Folder(InFolder):
    """A folder with train, dev (val, valid, validation) and test files, recognised by name.
    train_file, dev_file, test_file: override the files of a split: a name, a pattern such as
        "newstest20*.tsv.gz", or a list of these.
    language: selects among train.en.tsv, train.de.tsv, …; files without a language always match.
    """

    train_file: Names = None
    dev_file: Names = None
    test_file: Names = None
    language: Text = "en"

    def find(self) -> SplitTables:
        files = list_files(Path(self.where), self.form)
        tables = self.choose(files, "task.{}_file", self.form.expected)
        names = {s: [f.names[0] for f in chain(*of.values())] for s, of in tables.items()}
        key = None if self.test_file is None else "task.test_file"
        return SplitTables(tables, {"files": names}, test_key=key)

    def is_usual(self, name: str, split: Split) -> bool:
        stem, _, language = name.rpartition(".")
        if stem not in ("train", "test", *DEV_NAMES):
            stem, language = name, self.language
        if split == "test":  # test, test_2016_flickr, test-2; but not testimony
            named = stem.startswith("test") and not stem[4:5].isalpha()
        else:
            named = stem in (DEV_NAMES if split == "dev" else ("train",))
        return named and language == self.language


def list_files(folder: Path, form: Form, key: str = "task.path") -> list[TextFile]:
    """Files of these formats in the folder, sorted by name. Opens none. key: for messages."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {what}; {key} must be a folder with {form.expected}")
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


@dataclass(frozen=True)
class HubTable:
    """A Table: one split of a data set, map-style or streaming."""

    dataset: Any
    where: str
    names: Sequence[str] = ()

    @property
    def _names(self) -> list[str]:
        return list(self.dataset.column_names or next(iter(self.dataset), {}))

    def columns(self) -> list[str]:
        if "translation" not in self._names:
            return self._names
        return list(next(iter(self.dataset), {"translation": {}})["translation"])

    def rows(self, columns: Sequence[str], keys: str) -> Iterator[tuple[Any, ...]]:
        """See Table. Loads only these columns; a rank that sees none counts the rows of any."""
        with _reading(self.where):
            check_columns(self, columns, keys)
            nested = "translation" in self._names
            kept = ["translation"] if nested else list(dict.fromkeys(columns)) or self._names[:1]
            for batch in self.dataset.select_columns(kept).iter(batch_size=BATCH_ROWS):
                found = batch[kept[0]]
                cells = {c: [row.get(c) for row in found] for c in columns} if nested else batch
                rows = zip(*(cells[c] for c in columns), strict=True)
                yield from rows if columns else [()] * len(found)


@settings("task", kw_only=True)
class OnHub(Source):
    """path: such as "Helsinki-NLP/opus-100", or a folder. revision: null: the newest. A hub data
    set is public: `datasets` caches all columns on disk, and a rank loads the visible ones."""

    path: Text
    revision: str | None = None

    @property
    def where(self) -> str:
        return self.path

    def source_name(self) -> str:
        return self.where

    @property
    def data_set(self) -> str | None:
        """The data set's config to check for."""
        raise NotImplementedError

    def check_source(self) -> None:
        """Raise DataError if the hub is out of reach and the data set is not cached."""
        if local_folder(self.where) is None and not go_offline_if_unreachable():
            load_hub(self.where, self.data_set, revision=self.revision)


@settings("task", kw_only=True)
class Hub(OnHub):
    """A Hugging Face data set, or a local folder in the same format. config: such as "en-es".
    train, dev, test: split names; null: train, validation (valid, dev) and test, if present."""

    config: str | None = None
    train: str | None = None
    dev: str | None = None
    test: str | None = None

    @property
    def data_set(self) -> str | None:
        return self.config

    def source_name(self) -> str:
        name = Path(self.where).name if local_folder(self.where) else self.where
        return f"{name} {self.data_set}" if self.data_set else name

    def find(self) -> SplitTables:
        loaded = load_hub(self.where, self.data_set, revision=self.revision)
        there = [
            HubTable(of, f"{self.where}, split {name}", [name]) for name, of in loaded.items()
        ]
        facts = {"config": self.data_set, "revision": self.revision}
        key = None if self.test is None else "task.test"
        return SplitTables(self.choose(there, "task.{}", "a split train"), facts, test_key=key)


@settings("task", kw_only=True)
class FolderOfLanguages(InFolder):
    """A folder with train.en.tsv (or train.tsv), dev.en.tsv, test.de.tsv, …, or as .jsonl.
    train_language: of train and dev. languages: tested ones; None: all with a test file. Without a
    training file, the dev file of train_language is used and a remark says so."""

    train_language: Language = "en"
    languages: Languages | None = None

    def find(self) -> SplitTables:
        here = self.train_language
        expected = f"train.{here}.tsv and test.{here}.tsv, test.de.tsv, …"
        files = {file.name: file for file in list_files(Path(self.where), Form(expected))}
        found = f"found: {', '.join(map(name_of, files.values())) or 'none'}"
        tested = [name[5:] for name in files if re.fullmatch(r"test\.[a-z]{2,3}", name)]
        tested.sort(key=lambda language: (language != here, language))
        wanted = self.languages or tested or ["LANGUAGE"]
        if missing := [language for language in wanted if language not in tested]:
            said = f"no test.{missing[0]}.tsv (or .jsonl) for task.languages"
            raise DataError(f"{self.where}: {said}; {found}")
        trained = [name for name in (f"train.{here}", "train") if name in files][:1]
        dev = [name for name in (f"{one}.{here}" for one in DEV_NAMES) if name in files][:1]
        if not (names := [*trained, *dev]):
            said = f"no train.{here}.tsv and no dev.{here}.tsv to train on (task.train_language)"
            raise DataError(f"{self.where}: {said}; {found}")
        remark = f"no training file: {name_of(files[names[0]])} is the training set"
        tables: Tables = {s: {"": [files[name]]} for s, name in zip(SPLITS, names, strict=False)}
        tables["test"] = {language: [files[f"test.{language}"]] for language in wanted}
        facts = {"train": names, "languages": list(wanted)}
        return SplitTables(tables, facts, [] if trained else [remark], "task.languages")


@settings("task", kw_only=True)
class HubOfLanguages(OnHub):
    """A data set of the hub with one config per language, such as facebook/xnli: train and
    validation of train_language, test of every language."""

    train_language: Language = "en"
    languages: Languages | None = None

    @property
    def own_languages(self) -> Sequence[str]:
        """Those that are tested if task.languages names none."""
        raise NotImplementedError

    @property
    def data_set(self) -> str:
        return self.train_language

    def find(self) -> SplitTables:
        def table(language: str, split: str) -> list[Table]:
            loaded = load_hub(self.where, language, revision=self.revision, split=split)
            return [HubTable(loaded, f"{self.where} {language}, split {split}")]

        here, tested = self.train_language, list(self.languages or self.own_languages)
        tables: Tables = {
            "train": {"": table(here, "train")},
            "dev": {"": table(here, "validation")},
            "test": {language: table(language, "test") for language in tested},
        }
        facts = {"revision": self.revision, "languages": tested}
        return SplitTables(tables, facts, test_key="task.languages")


def local_folder(name: str) -> Path | None:
    """None for a name on the hub."""
    folder = Path(name).expanduser()
    return folder if name and folder.exists() else None


def load_hub(name: str, config: str | None, streaming: bool = False, **which: str | None) -> Any:
    """Split name -> data set, or only one. which: revision, split."""
    folder = local_folder(name)
    # Never ask the network about a local folder.
    reached = folder is not None or go_offline_if_unreachable()
    import datasets

    # Streaming reads local files in place: no invisible columns are copied to a cache.
    streaming = streaming or folder is not None
    with _reading(name, reached):
        return datasets.load_dataset(str(folder or name), config, streaming=streaming, **which)


@contextmanager
def _reading(name: str, reached: bool = True) -> Iterator[None]:
    """Errors in one line; of a stream they come when its rows are read."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        said = " ".join(str(error).split())[:300]
        if not reached:
            said = "the hub cannot be reached and no copy is in the cache; load it once with "
            said += "network access, or give a folder of parquet or jsonl files"
        raise DataError(f"{name}: {said}") from error
