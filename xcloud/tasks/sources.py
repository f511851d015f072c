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

import csv
import gzip
import json
import os
import re
import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, groupby, islice, zip_longest
from pathlib import Path
from typing import IO, Any, Literal, cast

from xcloud.base.bounded import MAX_LINE, MAX_WHOLE, bounded_lines, parsed_json, read_json
from xcloud.base.errors import ConfigError, DataError
from xcloud.base.placeholders import (
    check_is_data,
    check_is_json,
    check_is_no_dead_link,
    check_is_text,
)
from xcloud.base.settings import HubName, ReadPath, settings
from xcloud.base.wording import listed, quoted
from xcloud.contracts.model import SPLITS, DataSplit
from xcloud.pretrained import go_offline_if_unreachable
from xcloud.tasks.data_cards import cards_of, check_card, check_features
from xcloud.tasks.rows import (
    DEV_NAMES,
    FileKind,
    Form,
    GivenText,
    Names,
    RowTable,
    Source,
    SplitTables,
    Tables,
    check_columns,
    check_is_no_header,
)

BATCH_ROWS = 1000
NOTHING: tuple[object, ...] = (None, "", [], {})  # what a cell holds that says nothing
SAVED = ("dataset_dict.json", "state.json")  # what save_to_disk leaves in a folder
MAX_COLUMNS = 1000  # of a .csv that are read as they stand
MAX_WORDS = 300  # characters of another library's message
NAMED_AS_SET = re.compile(rf"({'|'.join(('train', 'test', *DEV_NAMES))})(?![a-z])")
SECOND_COPY = re.compile(r"( ?\(\d+\)| - copy( \(\d+\))?| copy( \d+)?|~)(?=$|\.)", re.IGNORECASE)
# Endings of files that may hold data: what has one of them and is not read is said.
DATA_ENDINGS = frozenset(
    ("csv", "tsv", "json", "jsonl", "ndjson", "txt", "parquet", "arrow", "feather", "xlsx", "ods",
     "zip", "tar", "bz2", "xz", "zst", "7z")
)  # fmt: skip

# Formats that `datasets` reads as text, of which UTF-8 is checked before it does.
TEXT_ENDINGS = ("csv", "tsv", "json", "jsonl", "ndjson", "txt")


def read_lines(path: Path, max_line: int = MAX_LINE) -> Iterator[str]:
    """Yield lines without their ending, from plain or gzipped UTF-8. Only a line feed ends one: a
    U+2028 or a lone carriage return inside a text must not misalign the sides. Raises DataError
    for a file that is no text, or stands for one."""
    check_is_text(path)
    opened: Callable[..., IO[str]] = gzip.open if path.suffix == ".gz" else open
    try:
        # utf-8-sig: programs on Windows begin a file with a mark of the byte order, which would be
        # part of the first column's name.
        with opened(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(bounded_lines(file, path, max_line), start=1):
                # check_is_text looks at the beginning of a file alone.
                if "\0" in line:
                    raise DataError(f"{path}, line {number}: a zero byte, so it is no text")
                # Files that were joined have a mark of the byte order in the middle, too. A
                # carriage return before the line feed is the ending of Windows; any other stays in
                # the text.
                yield line.removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")
    except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        what = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "cannot be read"
        raise DataError(f"{path}: {what} ({error})") from error


@dataclass
class QuotedCells:
    """The cells of a table that were read and stand in quotes as a .csv has them: the first and
    the last character is a quote, and those between come in pairs.

    where: the place of the first one.
    """

    num_quoted: int = 0
    num_cells: int = 0
    where: str = ""

    def note(self, cells: Iterable[str | None], where: str) -> None:
        for cell in cells:
            self.num_cells += 1
            is_quoted = cell is not None and len(cell) > 1 and cell[0] == cell[-1] == '"'
            if cell is not None and is_quoted and '"' not in cell[1:-1].replace('""', ""):
                self.num_quoted += 1
                self.where = self.where or where

    def in_words(self) -> list[str]:
        """Return a remark, or none if no cell stands in quotes."""
        if not self.num_quoted:
            return []
        return [
            f"{Path(self.where).name}: the first of {self.num_quoted:,} cells in quotes, of "
            f"{self.num_cells:,}; a .tsv is read without quoting, so they are part of the texts"
        ]


def quotes_kept(tables: Iterable[RowTable]) -> list[str]:
    """Return a remark on each table that was read and has cells in quotes."""
    files = (table for table in tables if isinstance(table, TextFile))
    return [remark for file in files for remark in file.quotes.in_words()]


@dataclass(frozen=True)
class TextFile:
    """A RowTable of one file, or of the files of a line pair.

    name: the file's name without suffixes.
    kind: squad is one JSON value, {"data": [{"paragraphs": [row, …]}]}; lines are the sides of a
        line pair, and text is running text, whose documents are the rows.
    read: a function that returns the texts of a side of a line pair, or the documents of a text.
    quotes: what was read of a table last that stands in quotes.
    """

    name: str
    kind: FileKind
    paths: Mapping[str, Path]  # column -> file for lines and text; "" -> file for the others
    read: Callable[[Path], Iterable[str]] = read_lines
    seen: Counter[str] = field(default_factory=Counter, compare=False)
    quotes: QuotedCells = field(default_factory=QuotedCells, compare=False)

    @property
    def names(self) -> list[str]:
        return [self.name, *(path.name for path in self.paths.values())]

    @property
    def path(self) -> Path:
        return next(iter(self.paths.values()))

    @property
    def where(self) -> str:
        return str(self.path)

    def check(self) -> None:
        """Raise DataError if its form is not what its name says. Reads its beginning only."""
        for path in self.paths.values():
            check_is_text(path)
        if self.kind != "text":
            self.columns()

    def columns(self) -> list[str]:
        if self.kind in ("lines", "text"):
            return list(self.paths)
        if self.kind == "table":
            names = next(read_lines(self.path), "").split("\t")
            # A .csv reader would take the quotes off; here they would be part of every name, and
            # of every text.
            if all(len(name) > 2 and name[0] == name[-1] == '"' for name in names):
                said = "the names in its first line are in quotes, and a .tsv is read without"
                raise DataError(f"{self.path}: {said}; write it without quoting, or as .jsonl")
        else:
            names = list(next((row for _, row in self._records()), {}))
        if not any(names):
            raise DataError(f"{self.path} is empty, or its first line is")
        return names

    def rows(
        self, columns: Sequence[str], keys: str, optional: Sequence[str] = ()
    ) -> Iterator[tuple[Any, ...]]:
        self.seen.clear()
        vars(self.quotes).update(vars(QuotedCells()))
        if self.kind in ("lines", "text"):
            yield from self._line_rows(columns)
            return
        # Only one key is wanted of a .jsonl, and its rows may differ in others, so each row is
        # checked by itself below.
        if self.kind == "table":
            check_columns(self, wanted=columns, keys=keys)
        for where, row in self._records():
            # Counted whether it was asked for or not: that is how a user hears of columns that
            # nobody reads.
            self.seen.update(key for key, cell in row.items() if cell not in NOTHING)
            if missing := [column for column in columns if row.get(column) is None]:
                said = f"no text under {missing[0]!r}; its keys: {listed(row)}"
                raise DataError(f"{where}: {said}. Choose with {keys}")
            cells = [row.get(column) for column in (*columns, *optional)]
            # Only what this rank sees: the other texts are nobody's matter here.
            if self.kind == "table":
                self.quotes.note(cells, where=where)
            yield tuple(cells)

    def _line_rows(self, sides: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Yield the lines of these sides, and open no other. A rank that sees neither counts the
        rows of one."""
        if missing := [side for side in sides if side not in self.paths]:
            raise DataError(f"{self.path}: its other side, {self.name}.{missing[0]}, is missing")
        paths = [self.paths[side] for side in sides] or [self.path]
        # zip_longest fills the shorter side with None, which no line of a file is.
        for row in zip_longest(*map(self.read, paths)):
            if None in row:
                # Counted anew, as the two were read in step only up to here.
                counts = [f"{p.name} {sum(1 for _ in self.read(p)):,}" for p in sorted(paths)]
                said = f"the sides of a line pair differ in lines: {' and '.join(counts)}"
                raise DataError(f"{self.path.parent}: {said}")
            check_is_no_header(str(self.path), names=sides, cells=row)
            yield row if sides else ()

    def _records(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        if self.kind == "squad":
            for number, row in enumerate(_squad_paragraphs(self.path), start=1):
                yield f"{self.path}, paragraph {number}", row
            return
        lines = enumerate(read_lines(self.path), start=1)
        if self.kind == "table":
            yield from self._table_rows(lines)
            return
        for where, line in ((f"{self.path}, line {number}", line) for number, line in lines):
            if not line.strip():
                continue
            # A whole file as one array is what `json.dump` of a list writes.
            if line.lstrip().startswith("["):
                said = "a JSON array is no object; expected one per line: jq -c '.[]' OLD > NEW"
                raise DataError(f"{where}: {said}")
            row = _parsed(line, where, what="not JSON", expected="expected one object per line")
            if not isinstance(row, dict):
                raise DataError(f"{where}: {quoted(row)} is no object; expected one per line")
            inside = row.get("translation")
            # The form of translations on the hub.
            if isinstance(inside, dict):
                self.seen.update(key for key in row if key != "translation")
                row = inside
            check_is_no_header(where, names=[*row], cells=[*row.values()])
            yield where, row

    def _table_rows(
        self, lines: Iterator[tuple[int, str]]
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the rows below the header. Empty lines at the end are passed over where there are
        several columns; of a single column each is an empty cell."""
        header = next(lines, (0, ""))[1].split("\t")
        # An editor leaves empty lines at the end of a file. One between rows would shift the
        # numbers of the rows that follow, on this side only.
        empty: int | None = None  # the first of the empty lines before this one
        for number, line in lines:
            if not line.strip(" ") and len(header) > 1:
                empty = empty or number
                continue
            if empty is not None:
                raise DataError(f"{self.path}, line {empty}: empty, and rows follow; remove it")
            where = f"{self.path}, line {number}"
            cells = line.split("\t")
            if len(cells) != len(header):
                said = f"{len(cells)} columns, but the header has {len(header)}"
                said += "; a text holds no tab or line break, not even in quotes"
                # Files of old Macs end lines so. Read as one line, all of them would be columns of
                # one row.
                if "\r" in line:
                    said += "; some lines end with a carriage return only"
                raise DataError(f"{where}: {said}")
            check_is_no_header(where, names=header, cells=cells)
            yield where, dict(zip(header, cells, strict=True))


def _parsed(text: str, where: str, what: str, expected: str) -> Any:
    """Return a value of JSON. Raises DataError, also for half of a surrogate pair, which no
    tokenizer takes.

    where: the place of the text, for messages.
    what: the words for a text that is no JSON.
    """
    try:
        value = parsed_json(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: {what} ({error.msg}); {expected}") from error
    except ValueError as error:
        raise DataError(f"{where}: {error}; {expected}") from error
    # Only an escape can hold half of a pair, as the file itself is UTF-8: most lines need no
    # second look.
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            said = f"{half} is one half of a character, and the other is missing"
            raise DataError(f"{where}: {said}: a text was cut there; take it out") from error
    return value


def _squad_paragraphs(path: Path) -> list[Mapping[str, Any]]:
    what = 'not of the form {"data": [{"paragraphs": [...]}]}'
    expected = "one paragraph per line must be named .jsonl"
    text = "\n".join(read_lines(path, max_line=MAX_WHOLE))
    whole = _parsed(text, where=str(path), what=what, expected=expected)
    try:
        return [row for article in whole["data"] for row in article["paragraphs"]]
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: {what} ({quoted(error)}); {expected}") from error


def read_documents(
    path: Path, document: Literal["blank_line", "line", "file"] = "blank_line"
) -> list[str]:
    """Return the documents of a file of running text. document: what ends one."""
    lines = list(read_lines(path))
    if document == "file":
        groups = [lines]
    elif document == "line":
        groups = [[line] for line in lines]
    else:
        # Lines of blanks alone end a document too, and two of them are one end.
        groups = [list(group) for _, group in groupby(lines, lambda line: bool(line.strip()))]
    texts = ("\n".join(group).strip("\r\n") for group in groups)  # blanks indent a line
    return [text for text in texts if text.strip()]


@settings("task.data", kw_only=True)
class InFolder(Source):
    """A corpus in a folder.

    path: the folder that holds the corpus.
    """

    path: ReadPath

    def where(self, form: Form) -> str:
        return str(Path(self.path).expanduser())

    def source_name(self, form: Form) -> str:
        return f"files in {Path(self.path).expanduser().resolve().name}"

    def check_source(self, form: Form) -> SplitTables:
        """Raise DataError if a file is missing, or its form is not what its name says."""
        found = self.find(form)
        for table in chain.from_iterable(chain(*of.values()) for of in found.tables.values()):
            cast(TextFile, table).check()
        return found

    def say_unread(self, tables: Tables, form: Form) -> list[str]:
        """Return a remark on the files of the folder that no split takes."""
        chosen = [one for of in tables.values() for sets in of.values() for one in sets]
        taken = {name for one in chosen for name in one.names[1:]}  # the first has no ending
        return unread_remarks(Path(self.where(form)), {*form.endings, *form.languages}, taken)


@settings("task.data", kw_only=True)
class Folder(InFolder):
    """A folder with train, dev (val, valid, validation) and test files, recognised by name. Each
    may end in .gz.

    train_file, dev_file, test_file: the files of a split, in place of those recognised by name: a
        name, a pattern such as "newstest20*.tsv.gz", or a list of these.
    language: the language that selects among train.en.tsv, train.de.tsv, …. Files without a
        language always match.
    document: the end of a document in a .txt of running text: blank_line (an empty line; the
        default there), line, or file.
    """

    train_file: Names = None
    dev_file: Names = None
    test_file: Names = None
    language: GivenText = "en"
    document: Literal["blank_line", "line", "file"] | None = None

    def check(self, form: Form) -> None:
        super().check(form)
        if self.document is not None and "text" not in form.endings.values():
            raise ConfigError(
                f"task.data.document is {self.document!r}, and this task reads no running text: "
                "set it to null"
            )

    def files(self, form: Form) -> list[TextFile]:
        """Return the files of this form. Opens none."""
        read = partial(read_documents, document=self.document or "blank_line")
        # list_files knows no settings, so files of running text get their reader here.
        return [
            replace(file, read=read) if file.kind == "text" else file
            for file in list_files(Path(self.where(form)), form)
        ]

    def find(self, form: Form) -> SplitTables:
        files = self.files(form)
        for file in files:
            self._check_is_no_copy(file, form)
        tables = self.choose(
            files,
            form,
            key="task.data.{}_file",
            own_names=form.files,
            expected=form.expected,
            unread=unread_files(Path(self.where(form)), form),
        )
        names = {s: [f.names[0] for f in chain(*of.values())] for s, of in tables.items()}
        key = None if self.test_file is None else "task.data.test_file"
        return SplitTables(
            tables, facts={"files": names}, remarks=self.say_unread(tables, form), test_key=key
        )

    def _check_is_no_copy(self, file: TextFile, form: Form) -> None:
        """Raise DataError for a file that a browser or a desktop has named as a second one, unless
        it is asked for: it may be an older or a newer set than the one beside it."""
        name = SECOND_COPY.sub("", file.name)
        for split in SPLITS:
            asked: Names = getattr(self, f"{split}_file")
            # Only where the copy would be taken for the split: any other file may be called as it
            # likes.
            if name != file.name and asked is None and self.is_usual(name, split, form):
                raise DataError(
                    f"{file.where} has the name of a second download or copy: rename or remove "
                    f"it, or choose the set with task.data.{split}_file=NAME"
                )

    def is_usual(self, name: str, split: DataSplit, form: Form) -> bool:
        if form.version is not None:
            name = form.version.sub("", name)
        name = name.lower()
        stem, _, language = name.rpartition(".")
        if stem not in ("train", "test", *DEV_NAMES):
            stem = name
            language = self.language
        if split == "test":  # test, test_2016_flickr, test-2; but not testimony
            named = stem.startswith("test") and not stem[4:5].isalpha()
        else:
            # dev_2 or train-old are no usual names; of test sets there are several a corpus, by
            # year.
            named = stem in (DEV_NAMES if split == "dev" else ("train",))
        return named and language == self.language


def list_files(folder: Path, form: Form, key: str = "task.data.path") -> list[TextFile]:
    """Return the files of these formats in the folder, sorted by name. Opens none. key: for
    messages."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {what}; {key} must be a folder with {form.expected}")
    tables: list[TextFile] = []
    pairs: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith("._"):  # what macOS keeps beside a file
            continue
        name, _, ending = path.name.removesuffix(".gz").rpartition(".")
        if ending.lower() in form.endings:
            ending = ending.lower()
        if ending in form.endings or ending in form.languages:
            # A link that leads nowhere is no file, and would be passed over as if the set did not
            # exist.
            check_is_no_dead_link(path)
        if not path.is_file():
            continue
        if ending in form.endings:
            kind = form.endings[ending]
            column = "text" if kind == "text" else ""
            tables.append(TextFile(name, kind, paths={column: path}))
        elif ending in form.languages:
            source, target = form.languages
            # train.es-en.es and train.en-es.en are the two sides of "train".
            for pair in (f".{source}-{target}", f".{target}-{source}"):
                name = name.removesuffix(pair)
            if ending in pairs.setdefault(name, {}):
                both = f"{pairs[name][ending].name} and {path.name}"
                raise DataError(f"{folder}: {both} are both that side; remove one")
            pairs[name][ending] = path
    return tables + [TextFile(name, kind="lines", paths=paths) for name, paths in pairs.items()]


def unread_files(folder: Path, form: Form) -> list[str]:
    """Return names of files in the folder that hold data by their ending, but in another form."""
    names = []
    for path in sorted(folder.iterdir()):
        ending = path.name.lower().removesuffix(".gz").rpartition(".")[2]
        if path.name.startswith("._") or not path.is_file():
            continue
        if ending in DATA_ENDINGS - form.endings.keys():
            names.append(path.name)
    return names


def unread_remarks(
    folder: Path, endings: Collection[str], taken: Collection[str], pattern: str = "*"
) -> list[str]:
    """Return a remark on the files of a folder that hold data, by their ending or because they are
    named as a set is, and that nobody reads.

    endings: the endings of the files that are read there.
    taken: the names of those that are read, below the folder.
    pattern: the files to look at: all in the folder, or with "**/*" those in folders below, too.
    """
    names = []
    for path in sorted(folder.glob(pattern)):
        name = path.name.lower()
        ending = name.removesuffix(".gz").rpartition(".")[2]
        is_data = ending in endings or ending in DATA_ENDINGS
        # train.jsonl.bak and train.jsonl.old: the name of a set, with any ending.
        is_named = NAMED_AS_SET.match(name) is not None
        # What macOS keeps beside a file begins with "._".
        inside = str(path.relative_to(folder))
        is_other = inside not in taken and not path.name.startswith("._")
        if is_other and (is_data or is_named) and path.is_file():
            names.append(inside)
    return [f"not read, beside what is: {listed(names)}"] if names else []


@dataclass(frozen=True)
class HubTable:
    """A RowTable: one split of a data set, map-style or streaming."""

    dataset: Any
    where: str
    names: Sequence[str] = ()

    @property
    def _names(self) -> list[str]:
        return list(self.dataset.column_names or next(iter(self.dataset), {}))

    @property
    def commit(self) -> str | None:
        """Return the commit of the hub that the rows are from; None for a folder's. `datasets`
        caches what it has read in a folder of that name."""
        for file in getattr(self.dataset, "cache_files", ()):
            name = Path(file["filename"]).parent.name
            if re.fullmatch("[0-9a-f]{40}", name):
                return name
        return None

    @property
    def seen(self) -> dict[str, int]:
        """Return the names of all columns; how many of their cells hold something is unknown, as
        only those that are used are loaded."""
        names = self._names
        if self._inside is not None:
            names = [*self._inside, *(name for name in names if name != "translation")]
        return dict.fromkeys(names, 0)

    @cached_property
    def _inside(self) -> list[str] | None:
        """Return the languages in a column "translation" that holds objects; None without one."""
        if "translation" not in self._names:
            return None
        first = next(iter(self.dataset), {"translation": None})["translation"]
        return list(first) if isinstance(first, dict) else None

    def columns(self) -> list[str]:
        with _reading(self.where):
            if self._inside is None:
                return self._names
            return self._inside

    def rows(
        self, columns: Sequence[str], keys: str, optional: Sequence[str] = ()
    ) -> Iterator[tuple[Any, ...]]:
        """Yield rows as RowTable does. Loads only these columns; a rank that sees none counts the
        rows of any."""
        with _reading(self.where):
            # `datasets` answers for a missing column with a key error that names no file.
            check_columns(self, wanted=columns, keys=keys)
            nested = self._inside is not None
            # Objects of Arrow are read whole: a column "translation" holds both languages.
            if nested:
                kept = ["translation"]
            else:
                there = (name for name in optional if name in self._names)
                # A rank that sees no column reads the first one, to count.
                kept = list(dict.fromkeys((*columns, *there))) or self._names[:1]
            for batch in self.dataset.select_columns(kept).iter(batch_size=BATCH_ROWS):
                found = batch[kept[0]]
                if nested:
                    cells = {c: [row and row.get(c) for row in found] for c in columns}
                else:
                    cells = batch
                if not columns:
                    yield from [()] * len(found)
                    continue
                none = [None] * len(found)
                wanted = [cells[c] for c in columns] + [cells.get(c, none) for c in optional]
                # check_is_no_header looks at wanted columns alone: an optional one may be empty.
                for row in zip(*wanted, strict=True):
                    check_is_no_header(self.where, names=columns, cells=row[: len(columns)])
                    yield tuple(map(_without_nulls, row))


def said_of_commit(name: str, tables: Sequence[HubTable]) -> list[str]:
    """Return a remark on which commit of a data set was read, which task.data.revision pins."""
    return [f"{name} is read at commit {table.commit}" for table in tables[:1] if table.commit]


def _without_nulls(cell: Any) -> Any:
    """Return a cell without the keys that Arrow adds to objects, empty, because other rows have
    them: a tool would have the parameters of all others."""
    if isinstance(cell, dict):
        return {key: _without_nulls(one) for key, one in cell.items() if one is not None}
    return [_without_nulls(one) for one in cell] if isinstance(cell, list) else cell


@settings("task.data", kw_only=True)
class OnHub(Source):
    """A data set of the hub. It is public: `datasets` caches all columns on disk, and a rank loads
    the visible ones.

    dataset: its name, such as "Helsinki-NLP/opus-100", or a folder that holds it: as on the hub,
        of parquet or other files, or written by save_to_disk.
    revision: the commit, tag or branch; None: the newest.
    """

    dataset: HubName | None = None
    revision: str | None = None

    @property
    def is_public(self) -> bool:
        return local_folder(self.dataset or "") is None

    def where(self, form: Form) -> str:
        return self.dataset or form.hub

    def check(self, form: Form) -> None:
        super().check(form)
        if not self.where(form):
            raise ConfigError(
                "task.data.dataset must name a data set of the hub or a folder; got null"
            )

    @abstractmethod
    def data_set(self, form: Form) -> str | None:
        """Return the data set's config to check for."""

    def check_source(self, form: Form) -> None:
        """Raise DataError if the hub is out of reach and the data set is not cached."""
        where = self.where(form)
        folder = local_folder(where)
        # A folder may hold what only stands for data: pointers of LFS, pages of an error.
        if folder is not None:
            check_data_files(folder)
        # Without the network what is in the cache is loaded, which fails here and not in a rank.
        elif not go_offline_if_unreachable():
            load_hub(where, config=self.data_set(form), revision=self.revision)


@settings("task.data", kw_only=True)
class Hub(OnHub):
    """A Hugging Face data set, or a local folder in the same format. config: such as "en-es".
    train, dev, test: the names of splits; null: train, validation (valid, dev) and test, if
        present."""

    config: str | None = None
    train: str | None = None
    dev: str | None = None
    test: str | None = None

    def data_set(self, form: Form) -> str | None:
        return form.config if self.config is None else self.config

    def source_name(self, form: Form) -> str:
        name = self.where(form)
        if local_folder(name):
            name = Path(name).name
        config = self.data_set(form)
        return f"{name} {config}" if config else name

    def is_usual(self, name: str, split: DataSplit, form: Form) -> bool:
        is_hidden = split == "test" and form.hides_test
        return not is_hidden and super().is_usual(name, split, form)

    def find(self, form: Form) -> SplitTables:
        where = self.where(form)
        config = self.data_set(form)
        there = [
            HubTable(dataset=of, where=f"{where}, split {name}", names=[name])
            for name, of in load_hub(where, config, revision=self.revision).items()
        ]
        tables = self.choose(
            there, form, key="task.data.{}", own_names=form.splits, expected="a split train"
        )
        key = None if self.test is None else "task.data.test"
        facts = {"config": config, "revision": self.revision}
        remarks = said_of_commit(where, there)
        if (folder := local_folder(where)) is not None and not is_saved(folder):
            chosen = [one for of in tables.values() for sets in of.values() for one in sets]
            splits = {one.names[0] for one in chosen}
            remarks += self._say_unread(folder, config, splits)
        return SplitTables(tables, facts, remarks, test_key=key)

    def _say_unread(self, folder: Path, config: str | None, splits: Collection[str]) -> list[str]:
        """Return a remark on the files of data in a folder that are of none of these splits."""
        import datasets

        with _reading(str(folder)):
            found = datasets.load_dataset_builder(str(folder), config).config.data_files or {}
        start = os.path.abspath(folder)
        taken = [
            os.path.relpath(str(file), start)
            for split, files in found.items()
            if str(split) in splits
            for file in files
        ]
        # What an older `datasets` wrote of a data set beside it.
        return unread_remarks(folder, (), {*taken, "dataset_infos.json"}, pattern="**/*")


def is_saved(folder: Path) -> bool:
    """Return whether save_to_disk wrote a folder, or part of one."""
    return any((folder / file).is_file() for file in SAVED)


def check_data_files(folder: Path) -> None:
    """Raise DataError if a file of data below a folder is a placeholder for it, or is no UTF-8
    text where its ending promises text, or a .csv whose columns something else separates."""
    for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
        ending = path.name.lower().removesuffix(".gz").rpartition(".")[2]
        if ending not in DATA_ENDINGS or path.is_dir():
            continue
        if ending not in TEXT_ENDINGS:
            check_is_data(path)
            continue
        check_is_text(path)
        # A semicolon between names is what spreadsheets write where a comma is decimal. `datasets`
        # would read one column.
        first = next(read_lines(path, max_line=MAX_WHOLE), "") if ending == "csv" else ""
        for separator, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "|")):
            if separator in first and "," not in first:
                raise DataError(
                    f"{path}: its first line has {name} between names, and no comma; write it "
                    "with commas (most programs ask when they save a .csv), or as .jsonl"
                )
        if ending == "csv":
            names, row = [*islice(csv.reader(read_lines(path, MAX_WHOLE)), 2), [], []][:2]
            # pandas takes the first cell of each row for the row's name then, and every other one
            # for the column before its own.
            if len(row) > len(names):
                raise DataError(
                    f"{path}: its first line names {len(names)} columns, and its first row has "
                    f"{len(row)} cells; name each column"
                )


def local_folder(name: str) -> Path | None:
    """Return the folder that a name means; None for a name on the hub."""
    folder = Path(name).expanduser()
    return folder if name and folder.exists() else None


def load_hub(name: str, config: str | None, streaming: bool = False, **which: str | None) -> Any:
    """Load a data set by split name, or one split. which: revision, split."""
    folder = local_folder(name)
    # Never ask the network about a local folder.
    reached = folder is not None or go_offline_if_unreachable()
    import datasets

    # Streaming reads local files in place: no invisible columns are copied to a cache.
    streaming = streaming or folder is not None
    with _reading(name, reached):
        if folder is not None and is_saved(folder):
            return _saved(datasets, folder, split=which.get("split"))
        revision = which.get("revision")
        # Cards first: what one names `datasets` would fetch, whichever machine or address it is.
        for card in cards_of(name, folder, revision, reached=reached):
            check_card(card, name)
        how: dict[str, Any] = dict(which)
        if "revision" in which or folder is not None:
            # The builder lists the files that would be read, without opening one.
            made = datasets.load_dataset_builder(str(folder or name), config, revision=revision)
            _check_data_files(made, folder, name)
            # Of cells of a .csv pandas would make numbers and gaps: 1.10 would be 1.1, and 01, NA
            # and None would be lost.
            if "converters" in vars(made.config) and made.config.features is None:
                how |= {"converters": dict.fromkeys(range(MAX_COLUMNS), str), "na_filter": False}
        loaded = datasets.load_dataset(str(folder or name), config, streaming=streaming, **how)
        for one in loaded.values() if isinstance(loaded, dict) else [loaded]:
            # Features name the kinds of columns that would be opened as files; of .jsonl they are
            # known only while rows are read.
            check_features(getattr(one, "features", None), name)
        return loaded


def _check_saved(folder: Path) -> None:
    """Raise DataError if what save_to_disk wrote names files that lie elsewhere."""
    # load_from_disk opens whatever its lists name, "../x" included.
    for path in (folder / SAVED[0], folder / SAVED[1], *sorted(folder.glob(f"*/{SAVED[1]}"))):
        if not path.is_file():
            continue
        check_is_json(path)
        described = read_json(path)
        names = [one.get("filename") for one in described.get("_data_files") or ()]
        for name in (*names, *(described.get("splits") or ())):
            if not isinstance(name, str) or Path(name).name != name:
                raise DataError(f"{path} names {quoted(name)}, which is no file beside it")
            if name in names and not (path.parent / name).is_file():
                raise DataError(f"{path.parent / name} is missing, which {path.name} names")


def _saved(datasets: Any, folder: Path, split: str | None) -> Any:
    """Return what save_to_disk wrote, by split, or one split. A set without splits is train."""
    _check_saved(folder)
    found = datasets.load_from_disk(str(folder))
    if isinstance(found, datasets.Dataset):
        found = {"train": found}
    if split is None:
        return found
    if split not in found:
        raise DataError(f"{folder} has no split {split!r}, but {listed(found)}")
    return found[split]


def _check_data_files(made: Any, folder: Path | None, name: str) -> None:
    """Raise DataError if the data set's own README.md lists data elsewhere: files of this machine
    or addresses. What `datasets` would open lies in the folder, or in the repository.

    made: the builder of `datasets`.
    """
    start = f"hf://datasets/{name}@" if folder is None else os.path.abspath(folder) + os.sep
    for split, files in (made.config.data_files or {}).items():
        for file in files:
            # normpath takes "..", which would lead out of the folder behind a beginning that fits.
            place = str(file) if folder is None else os.path.normpath(str(file))
            if not place.startswith(start):
                raise DataError(f"{name}: its {split} names {file}, no file of its own")


@contextmanager
def _reading(name: str, reached: bool = True) -> Iterator[None]:
    """Raise errors of `datasets` as one line; of a stream they come when its rows are read."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        said = " ".join(str(error).split())[:MAX_WORDS]
        if not reached:
            said = "the hub cannot be reached and no copy is in the cache; load it once with "
            said += "network access, or give a folder of parquet or jsonl files"
        raise DataError(f"{name}: {said}") from error
