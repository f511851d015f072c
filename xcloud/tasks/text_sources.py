"""Monolingual and parallel text for pre-training: the demo texts, a folder, or the hub, as a
stream without filtering; and text that every cloud has, for what all must compute identically
without seeing private text (a pretrained start, the basis of a cut).

A *part* of a source is a language ("es") or a language pair ("es-en", parallel text).
"""

from __future__ import annotations

import hashlib
import logging
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.settings import HubName, Labelled, ReadPath, SharedTextPath, settings
from xcloud.base.wording import listed
from xcloud.contracts.model import TokenIds
from xcloud.demo import NUM_ROWS, pairs, public_sentences
from xcloud.pretrained import kept_digest
from xcloud.tasks.rows import DEV_NAMES, FileKind, Form, GivenText, RowTable, name_of, unread_keys
from xcloud.tasks.sources import (
    HubTable,
    TextFile,
    check_data_files,
    list_files,
    load_hub,
    local_folder,
    quotes_kept,
    read_lines,
    unread_remarks,
)
from xcloud.tasks.text_task import public_tokenizer
from xcloud.tasks.tokenizer import TokenizerChoice

log = logging.getLogger(__name__)

LANGUAGE = re.compile(r"[a-z]{2,3}\Z")  # a column of that name is of a language
HELD_OUT = re.compile(rf"({'|'.join(DEV_NAMES)}|test)(?![a-z])")


def languages_of(part: str) -> tuple[str, ...]:
    """("es",) for "es", ("es", "en") for "es-en"."""
    if part.count("-") == 1:
        return tuple(part.split("-"))
    return (part,)


def say_unread(table: RowTable, used: Sequence[str]) -> None:
    """Write to this rank's own log which keys of a table nobody uses, and whether quotes stay in
    its texts: what texts are like is nobody else's matter."""
    for remark in unread_keys([table], used=lambda _: used) + quotes_kept([table]):
        log.warning(remark)


def named_digests(paths: Iterable[Path], cache_dir: Path) -> str:
    """Return names and digests of these files: what they hold, wherever they lie."""
    return " ".join(f"{path.name} {kept_digest(path, cache_dir)}" for path in paths)


class TextSource(Labelled, ABC):
    """A source of texts. Frozen, validated on construction, reads only in `read`."""

    @abstractmethod
    def check(self, parts: Sequence[str]) -> None:
        """Quick check: raise DataError or ConfigError if a part is missing."""

    @abstractmethod
    def identity(self, part: str, cache_dir: Path) -> str:
        """Return what the texts are known by, for a cache: another for other texts. cache_dir:
        where digests of files are kept."""

    @abstractmethod
    def read(self, part: str) -> Iterator[tuple[str, ...]]:
        """(text,) for a language, (text, translation) for a pair."""

    def public_texts(self) -> Sequence[str] | None:
        """Public text for training the shared tokenizer; None if the source is private."""
        return None


@settings("text.source")
class DemoText(TextSource):
    """The Spanish and English demo texts, which are public: parts es, en and es-en.

    num_texts: the number of sentence pairs to use, which is also the number of texts in each
        language.
    """

    num_texts: Annotated[int, Field(ge=2, le=NUM_ROWS["pairs"])] = 22_000

    label_form = "demo texts"

    def check(self, parts: Sequence[str]) -> None:
        if odd := [part for part in parts if part not in ("es", "en", "es-en", "en-es")]:
            said = "the demo has es, en and the pair es-en, got"
            raise ConfigError(f"{said} {odd[0]!r}; for other languages set profile=files")

    def identity(self, part: str, cache_dir: Path) -> str:
        digest = hashlib.sha256("\n".join(map(str, pairs(self.num_texts))).encode()).hexdigest()
        return f"demo {part} {digest}"

    def read(self, part: str) -> Iterator[tuple[str, ...]]:
        self.check([part])
        for es, en in pairs(self.num_texts):
            # languages_of orders the sides as the part does.
            sides = {"es": es, "en": en}
            yield tuple(sides[language] for language in languages_of(part))

    def public_texts(self) -> Sequence[str]:
        return _demo_texts(self.num_texts)


@cache
def _demo_texts(num_pairs: int) -> Sequence[str]:
    """Every setting that must be public asks for them as it is built."""
    return tuple(text for pair in pairs(num_pairs) for text in pair)


@settings("text.source")
class FolderText(TextSource):
    """Files recognised by name; each may end in .gz. Held-out files (dev, val, valid, validation,
    test, also test_2016, dev-1) are ignored.

    a language:  es.txt, train.es.txt, wiki.es.txt, train.es    one text per line
                 es.jsonl, train.es.jsonl    one object per line, the text under `text_key`
                 any .tsv with the columns lang and text: the rows of that language
    a pair:      train.es and train.en; a .tsv with the columns es and en, or with lang, text and
                 a column for the other language.

    path: the folder.
    text_key: the name of the text in a line of .jsonl.
    """

    path: ReadPath
    text_key: GivenText = "text"

    @property
    def label(self) -> str:
        return f"files in {Path(self.path).expanduser().resolve().name}"

    def check(self, parts: Sequence[str]) -> None:
        """Check the files of these parts, and log which others of the folder nobody reads."""
        taken = set[str]()
        for part in parts:
            for file, *_ in self._files(part):
                file.check()
                taken |= {path.name for path in file.paths.values()}
        folder = Path(self.path).expanduser()
        if folder.is_dir():
            taken |= {path.name for path in folder.iterdir() if HELD_OUT.match(path.name)}
            languages = {language for part in parts for language in languages_of(part)}
            for remark in unread_remarks(folder, {"tsv", "jsonl", "txt", *languages}, taken):
                log.warning("%s: %s", folder, remark)

    def identity(self, part: str, cache_dir: Path) -> str:
        files = [path for file, *_ in self._files(part) for path in file.paths.values()]
        return f"files {self.text_key} {part} {named_digests(files, cache_dir)}"

    def read(self, part: str) -> Iterator[tuple[str, ...]]:
        for file, columns, language in self._files(part):
            wanted = ("lang", *columns) if language is not None else columns
            for row in file.rows(wanted, keys="text.source.text_key"):
                # A table by language has rows of all languages, of which this part's are kept.
                if language is None:
                    yield row
                elif row[0] == language:
                    yield row[1:]
            # Columns with names of languages are those of other parts.
            say_unread(file, used=("lang", "text", *columns, *filter(LANGUAGE.match, file.seen)))

    def _files(self, part: str) -> list[tuple[TextFile, tuple[str, ...], str | None]]:
        """The files of this part, the columns to read, and which `lang` the rows must have."""
        languages = languages_of(part)
        if len(languages) == 1:
            expected = f"{part}.txt, train.{part}.txt, train.{part}.jsonl, or a .tsv with the "
            expected += "columns lang and text"
            kinds: dict[str, FileKind] = {"tsv": "table", "jsonl": "json", "txt": "lines"}
            form = Form(expected, endings={**kinds, part: "lines"})
        else:
            a, b = languages
            expected = f"train.{a} and train.{b}, or a .tsv with the columns {a} and {b}"
            form = Form(expected, languages=languages)
        folder = Path(self.path).expanduser()
        files = list_files(folder, form, key="text.source.path")
        # list_files knows nothing of splits: text for pre-training must not hold what a task is
        # scored on.
        files = [file for file in files if not HELD_OUT.match(file.path.name)]
        # The first way that fits: a file with a column for each language is read by it, even if it
        # has `lang`, too.
        chosen = [(file, *way) for file in files for way in self._ways(file, languages)[:1]]
        if not chosen:
            there = listed(map(name_of, files))
            said = f"no text of {part!r}; expected {expected} (each may end in .gz)"
            raise DataError(f"{folder}: {said}; found: {there}")
        return chosen

    def _ways(
        self, file: TextFile, languages: Sequence[str]
    ) -> list[tuple[tuple[str, ...], str | None]]:
        """How a file can be read for these languages: columns, and the `lang` of their rows."""
        # A file whose name says its language has one text a row. A table's columns say it.
        if len(languages) == 1 and file.kind != "table":
            named = languages[0] in file.path.name.removesuffix(".gz").split(".")
            if named:
                return [((self.text_key if file.kind == "json" else "",), None)]
            return []
        ways: list[tuple[tuple[str, ...], str | None]] = [(("text",), languages[0])]
        if len(languages) == 2:
            a, b = languages
            # Parallel text by language: the text is in one language, and a column of the other's
            # name has its translation.
            ways = [((a, b), None), (("text", b), a), ((a, "text"), b)]
        there = set(file.columns()) if file.kind == "table" else set(file.paths)
        return [way for way in ways if {*way[0], *(["lang"] if way[1] else [])} <= there]


@settings("text.source")
class HubText(TextSource):
    """Texts streamed from the Hugging Face hub, or from a local folder that `datasets` can read.

    name, config: the data set and its configuration, such as "wikimedia/wikipedia" and
        "20231101.{language}".
    column: the column of the text.
    pairs_name, pairs_config: the data set of parallel text and its configuration, such as
        "Helsinki-NLP/opus-100" and "{pair}", with rows {"translation": {"es": …, "en": …}}.
        null = no parallel text.
    split: the split of the data set.
    revision: the commit, tag or branch of the data set; null: the newest.
    """

    name: HubName
    config: str | None = "{language}"
    column: str = "text"
    split: str = "train"
    revision: str | None = None
    pairs_name: HubName | None = None
    pairs_config: str | None = "{pair}"

    @property
    def label(self) -> str:
        folder = local_folder(self.name)
        return f"files in {folder.resolve().name}" if folder else self.name

    def check(self, parts: Sequence[str]) -> None:
        """Checks settings and local files only: the ranks access the hub when they read."""
        if (pairs := [p for p in parts if len(languages_of(p)) == 2]) and self.pairs_name is None:
            said = "needs parallel text: set text.source.pairs_name"
            raise ConfigError(f"the pair {pairs[0]} {said}")
        for name in (self.name, self.pairs_name):
            if (folder := local_folder(name or "")) is not None:
                check_data_files(folder)

    def identity(self, part: str, cache_dir: Path) -> str:
        name = self.name if len(languages_of(part)) == 1 else self.pairs_name
        folder = local_folder(name or "")
        files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder else []
        return f"hub {self!r} {part} {named_digests(files, cache_dir)}".rstrip()

    def read(self, part: str) -> Iterator[tuple[str, ...]]:
        columns = languages_of(part)
        name = self.pairs_name or ""
        config = self.pairs_config
        if len(columns) == 1:
            columns = (self.column,)
            name = self.name
            config = self.config
        # A configuration without a placeholder is taken as it is, and None stays None.
        config = config and config.format(language=part, pair=part)
        loaded = load_hub(name, config, streaming=True, revision=self.revision, split=self.split)
        table = HubTable(dataset=loaded, where=name)
        for row in table.rows(columns, keys="text.source.column"):
            # null is a text that is missing, and counts as an empty one.
            yield tuple(cell or "" for cell in row)
        say_unread(table, used=columns)


@settings("public_text")
class PublicText:
    """Public sentences of the demo texts, or lines of a file that every cloud has.

    tokenizer: the same as the task's and the encoder's.
    path: a file with one text per line, UTF-8, may be .gz; null for the demo texts.
    """

    tokenizer: TokenizerChoice
    path: SharedTextPath | None = None

    @property
    def label(self) -> str:
        if self.path is None:
            return "public sentences of the demo texts"
        return self.path

    def token_ids(self, cache_dir: Path) -> TokenIds:
        return public_tokenizer(self.tokenizer, cache_dir=str(cache_dir)).token_ids

    def sentences(self, num: int, cache_dir: Path) -> Sequence[Sequence[int]]:
        return public_tokenizer(self.tokenizer, cache_dir=str(cache_dir)).encode(self._texts(num))

    def _texts(self, num: int) -> list[str]:
        if self.path is None:
            return public_sentences(num)
        try:
            texts = [line.strip() for line in read_lines(Path(self.path).expanduser())]
        except DataError as error:
            said = "give a UTF-8 file with one text per line, the same in every cloud"
            raise DataError(f"public_text.path {error}; {said}") from error
        lines = [line for line in texts if line]
        if len(lines) < num:
            raise DataError(
                f"public_text.path {self.path} has {len(lines)} lines, but {num} are needed: "
                "lower model.split.calibration_texts (calibration_pairs read twice as many) or "
                "the backbone's num_texts, or use a longer file"
            )
        # All clouds read these lines, so the draw has a seed of its own, not the run's: basis and
        # start stay what they are for every seed.
        return random.Random(0).sample(lines, num)
