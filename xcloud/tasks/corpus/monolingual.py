"""Monolingual and parallel text for pre-training: the demo grammar or the hub (files:
text_folder.py). No tokenisation.

A *part* of a source is a language ("es") or a language pair ("es-en", parallel text).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from xcloud.base.checks import check_int
from xcloud.base.errors import ConfigError, DataError
from xcloud.demo_corpus import MAX_PAIRS
from xcloud.demo_corpus import pairs as demo_pairs
from xcloud.tasks.corpus.hub import load_hub, not_loaded

_cached_pairs = cache(demo_pairs)


def languages_of(part: str) -> tuple[str, ...]:
    """("es",) for "es", ("es", "en") for "es-en"."""
    return tuple(part.split("-")) if part.count("-") == 1 else (part,)


def stamp(paths: Iterable[Path]) -> str:
    """Paths, sizes and modification times of these files."""
    stats = [(path.resolve(), path.stat()) for path in paths]
    return " ".join(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats)


@runtime_checkable
class TextSource(Protocol):
    """A source of texts. Frozen, validated on construction, reads only in `read`."""

    def describe(self) -> str:
        """A short name, without reading anything."""

    def check(self, parts: Sequence[str]) -> None:
        """Quick check: raise DataError or ConfigError if a part is missing."""

    def identity(self, part: str) -> str:
        """Cache key: changes when the texts change."""

    def read(self, part: str) -> Iterator[tuple[str, ...]]:
        """(text,) for a language, (text, translation) for a pair."""

    def public_texts(self) -> Sequence[str] | None:
        """Public text for training the shared tokenizer; None if the source is private."""


@dataclass(frozen=True)
class DemoText:
    """The Spanish-English demo grammar: parts es, en and es-en. Public, so every cloud can train
    the shared tokenizer on it. See DemoGrammar.
    """

    num_texts: int = 22_000
    corpus_seed: int = 7

    def __post_init__(self) -> None:
        check_int("text.source.num_texts", self.num_texts, 2, MAX_PAIRS)
        check_int("text.source.corpus_seed", self.corpus_seed, 0)

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


@dataclass(frozen=True)
class HubText:
    """Texts streamed from the Hugging Face hub, or from a local folder that `datasets` can read.

    name, config: such as "wikimedia/wikipedia" and "20231101.{language}"; column: of the text.
    pairs_name, pairs_config: such as "Helsinki-NLP/opus-100" and "{pair}", with rows
    {"translation": {"es": …, "en": …}}; null = no parallel text.
    """

    name: str
    config: str | None = "{language}"
    column: str = "text"
    split: str = "train"
    revision: str | None = None
    pairs_name: str | None = None
    pairs_config: str | None = "{pair}"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError("text.source.name must be a data set on the hub, such as owner/name")

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
        languages = languages_of(part)
        if len(languages) == 1:
            config = self.config and self.config.format(language=part)
            for row in self._stream(self.name, config):
                yield (_text(row, self.column, self.name),)
            return
        assert self.pairs_name is not None
        config = self.pairs_config and self.pairs_config.format(pair=part)
        for row in self._stream(self.pairs_name, config):
            sides = row.get("translation", row)
            yield tuple(_text(sides, language, self.pairs_name) for language in languages)

    def public_texts(self) -> None:
        return None

    def _stream(self, name: str, config: str | None) -> Iterator[Mapping[str, Any]]:
        try:
            yield from load_hub(name, config, self.revision, self.split, streaming=True)
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, DataError):
                raise
            raise not_loaded(name, True, error) from error


def _local(name: str) -> Path | None:
    """The folder of this name; None for a hub name."""
    folder = Path(name).expanduser()
    return folder if name and folder.exists() else None


def _text(row: Mapping[str, Any], column: str, name: str) -> str:
    if not isinstance(row.get(column), str):
        raise DataError(f"{name}: no text under {column!r}; there are: {', '.join(row)}")
    return str(row[column])
