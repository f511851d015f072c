"""Folders as sources: which files are train, dev and test, and their formats. No filtering.

The format follows from the file name (any may end in .gz):
    train.tsv              tab-separated, no quoting; the header names the columns: es, en
    train.jsonl, .json     one object per line: {"es": …, "en": …} or {"translation": {"es": …}}
    train.es, train.en     one sentence per line, aligned by row; also train.es-en.es
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import Field

from xcloud.base.errors import DataError
from xcloud.base.settings import settings
from xcloud.contracts.task import Split
from xcloud.tasks.corpus.rows import (
    DEV_NAMES,
    FileKind,
    Form,
    Names,
    Source,
    SplitTables,
    Text,
    check_columns,
)

Language = Annotated[str, Field(pattern="^[a-z]{2,3}$")]
Languages = Annotated[Sequence[Language], Field(min_length=1)]


def read_lines(path: Path) -> Iterator[str]:
    """Lines without their ending, from plain or gzipped UTF-8. Raises DataError otherwise.

    Only a line feed ends a line: a U+2028 or a lone carriage return inside a text must not
    misalign the sides.
    """
    opened: Callable[..., IO[str]] = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            for line in file:
                yield line.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error})") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


@dataclass(frozen=True)
class TextFile:
    """A Table: one file, or the files of a line pair. name: without suffixes.

    kind: squad is one JSON value, {"data": [{"paragraphs": [row, …]}]}; text is running text,
    which its task cuts into documents. read: the texts of a side of a line pair.
    """

    name: str
    kind: FileKind
    paths: Mapping[str, Path]  # language -> file for lines; "" -> file for the others
    read: Callable[[Path], Iterable[str]] = read_lines

    @property
    def names(self) -> list[str]:
        return [self.name, *(path.name for path in self.paths.values())]

    @property
    def path(self) -> Path:
        """The file, or the first of a line pair."""
        return next(iter(self.paths.values()))

    @property
    def where(self) -> str:
        return str(self.path)

    def columns(self) -> list[str]:
        """Column names: the header, or the first object's keys."""
        if self.kind == "lines":
            return list(self.paths)
        if self.kind == "table":
            return next(read_lines(self.path), "").split("\t")
        return list(next((row for _, row in self._records()), {}))

    def rows(self, columns: Sequence[str], keys: str) -> Iterator[tuple[Any, ...]]:
        """See Table."""
        if self.kind == "lines":
            yield from self._line_rows(columns)
            return
        if self.kind == "table":
            check_columns(self, columns, keys)
        for where, row in self._records():
            if missing := [column for column in columns if row.get(column) is None]:
                raise DataError(
                    f"{where}: no text under {missing[0]!r}; its keys: "
                    f"{', '.join(row) or 'none'}. Choose with {keys}"
                )
            yield tuple([row[column] for column in columns])

    def _line_rows(self, sides: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Opens only these sides. A rank that sees neither counts the rows of one."""
        if missing := [side for side in sides if side not in self.paths]:
            raise DataError(f"{self.path}: its other side, {self.name}.{missing[0]}, is missing")
        paths = [self.paths[side] for side in sides] or [self.path]
        for row in zip_longest(*map(self.read, paths)):
            if None in row:
                counts = {path.name: sum(1 for _ in self.read(path)) for path in paths}
                raise DataError(
                    f"{self.path.parent}: the sides of a line pair differ in lines: "
                    + " and ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
                )
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
                    raise DataError(
                        f"{where}: {len(cells)} columns, but the header has {len(header)}; texts "
                        "must not contain tabs"
                    )
                yield where, dict(zip(header, cells, strict=True))
            elif line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(
                        f"{where}: not JSON ({error.msg}); expected one object per line"
                    ) from error
                row = row.get("translation", row) if isinstance(row, dict) else {}
                yield where, row if isinstance(row, dict) else {}


def _squad_paragraphs(path: Path) -> list[Mapping[str, Any]]:
    try:
        whole = json.loads("\n".join(read_lines(path)))
        return [row for article in whole["data"] for row in article["paragraphs"]]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(
            f'{path}: not of the form {{"data": [{{"paragraphs": [...]}}]}} ({error!r}); '
            "a file with one paragraph per line must be named .jsonl"
        ) from error


@settings("task", kw_only=True)
class InFolder(Source):
    """path: of the folder that holds the corpus."""

    path: Text

    @property
    def where(self) -> str:
        return str(Path(self.path).expanduser())

    def source_name(self) -> str:
        return f"files in {Path(self.where).resolve().name}"

    def check_source(self, form: Form) -> SplitTables:
        return self.find(form)


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

    def find(self, form: Form) -> SplitTables:
        files = list_files(Path(self.where), form)
        tables = self.choose(files, "task.{}_file", form.expected)
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
