"""Text file formats: .tsv, .jsonl or line pairs, plain or gzipped. No filtering.

The format follows from the file name (any may end in .gz):
    train.tsv              tab-separated, no quoting; the header names the columns: es, en
    train.jsonl, .json     one object per line: {"es": …, "en": …} or {"translation": {"es": …}}
    train.es, train.en     one sentence per line, aligned by row; also train.es-en.es
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

from xcloud.base.errors import DataError
from xcloud.tasks.corpus.rows import FileKind, check_columns


@dataclass(frozen=True)
class TextFile:
    """A Table: one file, or the files of a line pair. `name` has no suffixes.

    kind: squad is one JSON value, {"data": [{"paragraphs": [row, …]}]}; text is running text,
    which its task cuts into documents.
    """

    name: str
    kind: FileKind
    paths: dict[str, Path]  # language -> file for lines; "" -> file for the others

    @property
    def label(self) -> str:
        return " + ".join(path.name for path in self.paths.values())

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
        row = next((row for _, row in self.records()), None)
        return list(row.get("translation", row)) if isinstance(row, dict) else []

    def rows(self, columns: Sequence[str], keys: str) -> Iterator[tuple[Any, ...]]:
        """See Table."""
        if self.kind == "table":
            return self._table_rows(columns, keys)
        return self._line_rows(columns) if self.kind == "lines" else self._json_rows(columns, keys)

    def records(self) -> Iterator[tuple[str, Any]]:
        """(location, parsed value) of each non-empty line; of kind squad, of each paragraph."""
        if self.kind != "squad":
            lines = enumerate(read_lines(self.path), start=1)
            for where, text in ((f"{self.path}, line {n}", t) for n, t in lines if t.strip()):
                try:
                    yield where, json.loads(text)
                except json.JSONDecodeError as error:
                    raise DataError(
                        f"{where}: not JSON ({error.msg}); expected one object per line"
                    ) from error
            return
        try:
            whole = json.loads("\n".join(read_lines(self.path)))
            paragraphs = [row for article in whole["data"] for row in article["paragraphs"]]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise DataError(
                f'{self.path}: not of the form {{"data": [{{"paragraphs": [...]}}]}} ({error!r}); '
                "a file with one paragraph per line must be named .jsonl"
            ) from error
        yield from ((f"{self.path}, paragraph {i}", p) for i, p in enumerate(paragraphs, start=1))

    def _table_rows(self, columns: Sequence[str], keys: str) -> Iterator[tuple[str, ...]]:
        header = self.columns()
        check_columns(self, columns, keys)
        places = [header.index(column) for column in columns]
        lines = enumerate(read_lines(self.path), start=1)
        next(lines, None)
        for number, line in lines:
            cells = line.split("\t")
            if len(cells) != len(header):
                raise DataError(
                    f"{self.path}, line {number}: {len(cells)} columns, but the header has "
                    f"{len(header)}; texts must not contain tabs"
                )
            yield tuple([cells[place] for place in places])

    def _json_rows(self, columns: Sequence[str], keys: str) -> Iterator[tuple[Any, ...]]:
        for where, record in self.records():
            row = record.get("translation", record) if isinstance(record, dict) else {}
            row = row if isinstance(row, dict) else {}
            for column in columns:
                if row.get(column) is None:
                    raise DataError(
                        f"{where}: no text under {column!r}; its keys: "
                        f"{', '.join(row) or 'none'}. Choose with {keys}"
                    )
            yield tuple([row[column] for column in columns])

    def _line_rows(self, sides: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Opens only these sides. A rank that sees neither counts the rows of one."""
        for side in sides:
            if side not in self.paths:
                raise DataError(f"{self.path}: its other side, {self.name}.{side}, is missing")
        if not sides:
            yield from (() for _ in read_lines(self.path))
        paths = [self.paths[side] for side in sides]
        for row in zip_longest(*map(read_lines, paths)):
            if None in row:
                counts = {path.name: sum(1 for _ in read_lines(path)) for path in paths}
                raise DataError(
                    f"{self.path.parent}: the sides of a line pair differ in lines: "
                    + " and ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
                )
            yield row


def read_lines(path: Path) -> Iterator[str]:
    """Lines without their ending, from plain or gzipped UTF-8. Raises DataError otherwise.

    Only a line feed ends a line: a U+2028 or a lone carriage return inside a text must not
    misalign the sides.
    """
    try:
        file: IO[str]
        if path.suffix == ".gz":
            file = gzip.open(path, "rt", encoding="utf-8-sig", newline="\n")
        else:
            file = path.open(encoding="utf-8-sig", newline="\n")
        with file:
            for line in file:
                yield line.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error})") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
