"""Monolingual and parallel text for pre-training: the demo grammar, a folder, or the hub.
Read as a stream; no tokenisation, no filtering.

A *part* of a source is a language ("es") or a language pair ("es-en", parallel text).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated

from pydantic import Field

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.settings import NotNegative, settings
from xcloud.demo_corpus import MAX_PAIRS
from xcloud.demo_corpus import pairs as demo_pairs
from xcloud.tasks.corpus.folder import TextFile, list_files
from xcloud.tasks.corpus.hub import HubTable, load_hub, not_loaded
from xcloud.tasks.corpus.rows import DEV_NAMES, Form, Text

HELD_OUT = (*DEV_NAMES, "test")
_cached_pairs = cache(demo_pairs)


def languages_of(part: str) -> tuple[str, ...]:
    """("es",) for "es", ("es", "en") for "es-en"."""
    return tuple(part.split("-")) if part.count("-") == 1 else (part,)


def stamp(paths: Iterable[Path]) -> str:
    """Paths, sizes and modification times of these files."""
    stats = [(path.resolve(), path.stat()) for path in paths]
    return " ".join(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats)


class TextSource:
    """A source of texts. Frozen, validated on construction, reads only in `read`."""

    def describe(self) -> str:
        """A short name, without reading anything."""
        raise NotImplementedError

    def check(self, parts: Sequence[str]) -> None:
        """Quick check: raise DataError or ConfigError if a part is missing."""
        raise NotImplementedError

    def identity(self, part: str) -> str:
        """Cache key: changes when the texts change."""
        raise NotImplementedError

    def read(self, part: str) -> Iterator[tuple[str, ...]]:
        """(text,) for a language, (text, translation) for a pair."""
        raise NotImplementedError

    def public_texts(self) -> Sequence[str] | None:
        """Public text for training the shared tokenizer; None if the source is private."""
        return None


@settings("text.source")
class DemoText(TextSource):
    """The Spanish-English demo grammar: parts es, en and es-en. Public, so every cloud can train
    the shared tokenizer on it. See DemoPairs.
    """

    num_texts: Annotated[int, Field(ge=2, le=MAX_PAIRS)] = 22_000
    corpus_seed: NotNegative = 7

    def describe(self) -> str:
        return "demo grammar"

    def check(self, parts: Sequence[str]) -> None:
        for part in parts:
            if part not in ("es", "en", "es-en", "en-es"):
                raise ConfigError(
                    f"the demo grammar has es, en and the pair es-en, got {part!r}; for other "
                    "languages set profile=files"
                )

    def identity(self, part: str) -> str:
        digest = hashlib.sha256("\n".join(map(str, self._pairs())).encode()).hexdigest()
        return f"demo {part} {digest}"

    def read(self, part: str) -> Iterator[tuple[str, ...]]:
        self.check([part])
        for es, en in self._pairs():
            sides = {"es": es, "en": en}
            yield tuple(sides[language] for language in languages_of(part))

    def public_texts(self) -> Sequence[str]:
        return [text for pair in self._pairs() for text in pair]

    def _pairs(self) -> tuple[tuple[str, str], ...]:
        return _cached_pairs(self.num_texts, self.corpus_seed)


@settings("text.source")
class FolderText(TextSource):
    """Files recognised by name; each may end in .gz. Held-out files (dev, val, valid, validation,
    test) are ignored.

    a language:  es.txt, train.es.txt, wiki.es.txt, train.es    one text per line
                 es.jsonl, train.es.jsonl    one object per line, the text under `text_key`
                 any .tsv with the columns lang and text: the rows of that language
    a pair:      train.es and train.en; a .tsv with the columns es and en, or with lang, text and
                 a column for the other language
    """

    path: Text
    text_key: Text = "text"

    def describe(self) -> str:
        return f"files in {Path(self.path).expanduser().resolve().name}"

    def check(self, parts: Sequence[str]) -> None:
        for part in parts:
            self._files(part)

    def identity(self, part: str) -> str:
        files = [path for file, *_ in self._files(part) for path in file.paths.values()]
        return f"files {self.text_key} {part} {stamp(files)}"

    def read(self, part: str) -> Iterator[tuple[str, ...]]:
        for file, columns, language in self._files(part):
            wanted = columns if language is None else ("lang", *columns)
            for row in file.rows(wanted, "text.source.text_key"):
                if language is None:
                    yield row
                elif row[0] == language:
                    yield row[1:]

    def _files(self, part: str) -> list[tuple[TextFile, tuple[str, ...], str | None]]:
        """The files of this part, the columns to read, and which `lang` the rows must have.
        Raises DataError if there are none."""
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise DataError(f"{folder} {what}; text.source.path must be a folder of texts")
        languages = languages_of(part)
        if len(languages) == 1:
            choose = partial(self._of_language, part)
            form = Form("", {"tsv": "table", "jsonl": "json", "txt": "lines", part: "lines"})
            expected = (
                f"{part}.txt, train.{part}.txt, train.{part}.jsonl, or a .tsv with the columns "
                "lang and text"
            )
        else:
            a, b = languages
            choose, form = partial(_of_pair, a, b), Form("", languages=(a, b))
            expected = f"train.{a} and train.{b}, or a .tsv with the columns {a} and {b}"
        files = [f for f in list_files(folder, form) if f.path.name.split(".")[0] not in HELD_OUT]
        chosen = [(file, *read) for file in files if (read := choose(file)) is not None]
        if not chosen:
            names = [p.name for p in sorted(folder.iterdir()) if p.is_file()]
            there = ", ".join(n for n in names if n.split(".")[0] not in HELD_OUT) or "none"
            raise DataError(
                f"{folder}: no text of {part!r}; expected {expected} (each may end in .gz); "
                f"found: {there}"
            )
        return chosen

    def _of_language(
        self, language: str, file: TextFile
    ) -> tuple[tuple[str, ...], str | None] | None:
        """Columns and `lang` of a file with texts of this language; None for another file."""
        *names, ending = file.path.name.removesuffix(".gz").split(".")
        if file.kind == "table":
            return (("text",), language) if {"lang", "text"} <= set(file.columns()) else None
        if ending == language or language in names:
            return ((self.text_key if file.kind == "json" else "",), None)
        return None


def _of_pair(a: str, b: str, file: TextFile) -> tuple[tuple[str, ...], str | None] | None:
    """Columns and `lang` of a file with pairs of these languages; None for another file."""
    columns = set(file.columns()) if file.kind == "table" else set(file.paths)
    if {a, b} <= columns:
        return ((a, b), None)
    if {"lang", "text", b} <= columns:
        return (("text", b), a)
    return ((a, "text"), b) if {"lang", "text", a} <= columns else None


@settings("text.source")
class HubText(TextSource):
    """Texts streamed from the Hugging Face hub, or from a local folder that `datasets` can read.

    name, config: such as "wikimedia/wikipedia" and "20231101.{language}"; column: of the text.
    pairs_name, pairs_config: such as "Helsinki-NLP/opus-100" and "{pair}", with rows
    {"translation": {"es": …, "en": …}}; null = no parallel text.
    """

    name: Text
    config: str | None = "{language}"
    column: str = "text"
    split: str = "train"
    revision: str | None = None
    pairs_name: str | None = None
    pairs_config: str | None = "{pair}"

    def describe(self) -> str:
        folder = _local(self.name)
        return self.name if folder is None else f"files in {folder.resolve().name}"

    def check(self, parts: Sequence[str]) -> None:
        """Checks settings only: the ranks access the hub when they read."""
        for part in parts:
            if len(languages_of(part)) == 2 and self.pairs_name is None:
                raise ConfigError(
                    f"the pair {part} needs parallel text: set text.source.pairs_name"
                )

    def identity(self, part: str) -> str:
        name = self.name if len(languages_of(part)) == 1 else self.pairs_name
        folder = _local(name or "")
        if folder is None:
            return f"hub {self!r} {part}"
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return f"hub {self!r} {part} {stamp(files)}"

    def read(self, part: str) -> Iterator[tuple[str, ...]]:
        columns, keys = languages_of(part), {"language": part, "pair": part}
        name, config = self.pairs_name or "", self.pairs_config
        if len(columns) == 1:
            columns, name, config = (self.column,), self.name, self.config
        try:
            config = config and config.format(**keys)
            loaded = load_hub(name, config, self.revision, self.split, streaming=True)
            for row in HubTable(loaded, name).rows(columns, "text.source.column"):
                yield tuple(cell or "" for cell in row)
        except DataError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            raise not_loaded(name, True, error) from error


def _local(name: str) -> Path | None:
    """The folder of this name; None for a hub name."""
    folder = Path(name).expanduser()
    return folder if name and folder.exists() else None
