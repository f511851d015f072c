"""Monolingual and parallel text from a folder, for pre-training. No filtering."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from xcloud.base.errors import ConfigError, DataError
from xcloud.tasks.corpus.files import TextFile, json_rows, read_lines, table_rows
from xcloud.tasks.corpus.folder import is_usual_name, list_files
from xcloud.tasks.corpus.monolingual import languages_of, stamp
from xcloud.tasks.corpus.source import DEV_NAMES, Form

HELD_OUT = (*DEV_NAMES, "test")
Row = tuple[str, ...]
Reader = Callable[[], Iterator[Row]]
Found = tuple[tuple[Path, ...], Reader]  # one file or a line pair, and its reader


@dataclass(frozen=True)
class FolderText:
    """Files recognised by name; each may end in .gz. Held-out files (dev, val, valid, validation,
    test) are ignored.

    a language:  es.txt, train.es.txt, wiki.es.txt, train.es    one text per line
                 es.jsonl, train.es.jsonl    one object per line, the text under `text_key`
                 any .tsv with the columns lang and text: the rows of that language
    a pair:      train.es and train.en; a .tsv with the columns es and en, or with lang, text and
                 a column for the other language
    """

    path: str
    text_key: str = "text"

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise ConfigError("text.source.path must name the folder that holds the texts")
        if not isinstance(self.text_key, str) or not self.text_key:
            raise ConfigError(f"text.source.text_key must name a key, got {self.text_key!r}")

    def describe(self) -> str:
        return f"files in {Path(self.path).expanduser().resolve().name}"

    def check(self, parts: Sequence[str]) -> None:
        for part in parts:
            self._found(part)

    def identity(self, part: str) -> str:
        files = [path for paths, _ in self._found(part) for path in paths]
        return f"files {self.text_key} {part} {stamp(files)}"

    def read(self, part: str) -> Iterator[Row]:
        for _, reader in self._found(part):
            yield from reader()

    def public_texts(self) -> None:
        return None

    def _found(self, part: str) -> list[Found]:
        """The files of this part. Raises DataError if there are none."""
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise DataError(f"{folder} {what}; text.source.path must be a folder of texts")
        languages = languages_of(part)
        if len(languages) == 1:
            found = self._of_language(folder, part)
            expected = (
                f"{part}.txt, train.{part}.txt, train.{part}.jsonl, or a .tsv with the columns "
                "lang and text"
            )
        else:
            a, b = languages
            found = _of_pair(folder, a, b)
            expected = f"train.{a} and train.{b}, or a .tsv with the columns {a} and {b}"
        if not found:
            names = ", ".join(path.name for path in _files(folder)[:20]) or "none"
            raise DataError(
                f"{folder}: no text of {part!r}; expected {expected} (each may end in .gz); "
                f"found: {names}"
            )
        return found

    def _of_language(self, folder: Path, language: str) -> list[Found]:
        found: list[Found] = []
        for path in _files(folder):
            *names, ending = path.name.removesuffix(".gz").split(".")
            if ending == "tsv" and {"lang", "text"} <= set(_table(path).columns()):
                found.append(((path,), partial(_rows_of, path, language, ("text",))))
            elif ending == "jsonl" and language in names:
                found.append(((path,), partial(self._json_texts, path)))
            elif (ending == "txt" and language in names) or ending == language:
                found.append(((path,), partial(_lines, path)))
        return found

    def _json_texts(self, path: Path) -> Iterator[Row]:
        for number, row in json_rows(path):
            text = row.get(self.text_key) if isinstance(row, dict) else None
            if not isinstance(text, str):
                raise DataError(
                    f"{path}, line {number}: no JSON object with text under {self.text_key!r} "
                    "(text.source.text_key)"
                )
            yield (text,)


def _of_pair(folder: Path, a: str, b: str) -> list[Found]:
    found: list[Found] = []
    form = Form("", is_usual_name, languages=(a, b))
    for file in list_files(folder, form):
        paths, path = tuple(file.paths.values()), file.path
        if _is_held_out(path):
            continue
        columns = set(file.columns()) if file.kind == "table" else set()
        if file.kind == "lines" and len(file.paths) == 2:
            found.append((paths, partial(_line_pairs, file, a, b)))
        elif {a, b} <= columns:
            found.append((paths, partial(_rows_of, path, None, (a, b))))
        elif {"lang", "text", b} <= columns:
            found.append((paths, partial(_rows_of, path, a, ("text", b))))
        elif {"lang", "text", a} <= columns:
            found.append((paths, partial(_rows_of, path, b, (a, "text"))))
    return found


def _files(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.iterdir()) if p.is_file() and not _is_held_out(p)]


def _is_held_out(path: Path) -> bool:
    return path.name.split(".")[0] in HELD_OUT


def _table(path: Path) -> TextFile:
    return TextFile(path.name, "table", {"": path})


def _lines(path: Path) -> Iterator[Row]:
    return ((line,) for line in read_lines(path))


def _line_pairs(file: TextFile, a: str, b: str) -> Iterator[Row]:
    sides = [read_lines(file.paths[language]) for language in (a, b)]
    try:
        yield from zip(*sides, strict=True)
    except ValueError as error:
        raise DataError(f"{file.label}: the sides of a line pair differ in lines") from error


def _rows_of(path: Path, language: str | None, columns: Sequence[str]) -> Iterator[Row]:
    """These columns of a table; only rows whose `lang` is `language`, unless it is None."""
    header = _table(path).columns()
    places = [header.index(column) for column in columns]
    for cells in table_rows(path):
        if language is None or cells[header.index("lang")] == language:
            yield tuple(cells[place] for place in places)
