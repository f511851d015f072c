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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from xcloud.base.errors import DataError
from xcloud.tasks.corpus.source import check_columns
from xcloud.tasks.corpus.text import Rows


@dataclass(frozen=True)
class TextFile:
    """A Table: one file, or the files of a line pair. `name` has no suffixes."""

    name: str
    kind: Literal["table", "json", "lines"]
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
        row = next((row for _, row in json_rows(self.path)), None)
        return list(row) if isinstance(row, dict) else []

    def read(self, wanted: Mapping[str, str], keys: str, number: str | None = None) -> Rows:
        """See Table."""
        if self.kind == "table":
            return self._read_table(wanted, keys)
        return (
            self._read_lines(wanted)
            if self.kind == "lines"
            else self._read_json(wanted, keys, number)
        )

    def _read_table(self, wanted: Mapping[str, str], keys: str) -> Rows:
        header = self.columns()
        check_columns(self, [*wanted.values()], keys)
        places = {name: header.index(column) for name, column in wanted.items()}
        texts: dict[str, list[str]] = {name: [] for name in wanted}
        num_rows = 0
        for cells in table_rows(self.path):
            num_rows += 1
            # Other columns are dropped line by line: this cloud may not see them.
            for name, place in places.items():
                texts[name].append(cells[place].strip())
        return Rows(num_rows, texts)

    def _read_json(self, wanted: Mapping[str, str], keys: str, number: str | None) -> Rows:
        texts: dict[str, list[str]] = {name: [] for name in wanted}
        num_rows = 0
        for line, found in json_rows(self.path):
            row = found if isinstance(found, dict) else {}
            row = row.get("translation", row)
            row = row if isinstance(row, dict) else {}
            for name, column in wanted.items():
                text = row.get(column)
                if column == number and isinstance(text, int | float):
                    text = str(text)
                if not isinstance(text, str):
                    raise DataError(
                        f"{self.path}, line {line}: no text under {column!r}; its keys: "
                        f"{', '.join(row) or 'none'}. Choose with {keys}"
                    )
                texts[name].append(text.strip())
            num_rows += 1
        return Rows(num_rows, texts)

    def _read_lines(self, wanted: Mapping[str, str]) -> Rows:
        """Opens only the visible sides. A rank that sees neither counts the rows of one."""
        for side in wanted.values():
            if side not in self.paths:
                raise DataError(f"{self.path}: its other side, {self.name}.{side}, is missing")
        if not wanted:
            return Rows(sum(1 for _ in read_lines(self.path)), {})
        paths = {name: self.paths[side] for name, side in wanted.items()}
        texts = {name: [line.strip() for line in read_lines(path)] for name, path in paths.items()}
        counts = {paths[name].name: len(side) for name, side in texts.items()}
        if len(set(counts.values())) > 1:
            said = " and ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
            raise DataError(
                f"{self.path.parent}: the sides of a line pair differ in lines: {said}"
            )
        return Rows(next(iter(counts.values())), texts)


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


def table_rows(path: Path) -> Iterator[list[str]]:
    """Cells of each line after the header. Raises DataError if their number differs."""
    lines = read_lines(path)
    width = len(next(lines, "").split("\t"))
    for number, line in enumerate(lines, start=2):
        cells = line.split("\t")
        if len(cells) != width:
            raise DataError(
                f"{path}, line {number}: {len(cells)} columns, but the header has {width}; "
                "texts must not contain tabs"
            )
        yield cells


def json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number, parsed value) of each non-empty line."""
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}, line {number}: not JSON ({error.msg}); expected one object per line"
            ) from error
