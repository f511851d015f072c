"""Plain texts and chats for a causal language model: the embedded stories, a folder, or the hub.
Nothing here cuts text into tokens.

Rows (text.py) have one column: "text", or "messages", where each row is a chat as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from xcloud.base.checks import check_choice, check_int
from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.task import Split
from xcloud.demo_corpus import stories
from xcloud.tasks.corpus.files import TextFile, json_rows, read_lines
from xcloud.tasks.corpus.folder import Folder, is_usual_name, list_files
from xcloud.tasks.corpus.hub import HubSet
from xcloud.tasks.corpus.source import Form
from xcloud.tasks.corpus.text import Parallel, Rows, Sampling

TEXT, MESSAGES = "text", "messages"
FORM = Form(
    "train.txt (plain text) or train.jsonl (text or messages)",
    is_usual_name,
    {"txt": "lines", "jsonl": "json"},
)


class Documents(Protocol):
    """Where documents come from. Frozen, checked when built, reads nothing before `read`."""

    def describe(self) -> str:
        """In a few words, without reading it."""

    def check(self) -> object:
        """Raise DataError at once if files are missing. Keeps no text, asks no network."""

    def read(self) -> Parallel:
        """All splits, each with the column text or messages. Raises DataError."""


@dataclass(frozen=True)
class DemoStories:
    """Embedded English paragraphs of four events; no files, no network."""

    num_train: int = 3000
    num_dev: int = 200
    num_test: int = 400
    corpus_seed: int = 7

    def __post_init__(self) -> None:
        for name in ("num_train", "num_dev", "num_test"):
            check_int(f"task.{name}", getattr(self, name), 1)
        check_int("task.corpus_seed", self.corpus_seed, 0)

    def describe(self) -> str:
        return "demo stories"

    def check(self) -> None:
        """It is embedded."""

    def read(self) -> Parallel:
        counts: dict[Split, int] = {
            "dev": self.num_dev, "test": self.num_test, "train": self.num_train
        }  # fmt: skip
        texts = [story.text for story in stories(sum(counts.values()), self.corpus_seed)]
        splits: dict[Split, Rows] = {}
        for split, count in counts.items():
            splits[split] = Rows(count, {TEXT: texts[:count]})
            del texts[:count]
        return Parallel(self.describe(), splits)


@dataclass(frozen=True)
class DocumentFolder(Folder):
    """train, dev (val, valid, validation) and test files; each may end in .gz.

    .txt: plain text, UTF-8. document: what one is there: blank_line (it ends at an empty line),
        line, or file.
    .jsonl: an object a line, {"text": "…"} or {"messages": [{"role": "user", "content": "…"},
        {"role": "assistant", "content": "…"}]}. All files are of one of the two kinds.
    """

    document: Literal["blank_line", "line", "file"] = "blank_line"
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("task.document", self.document, ("blank_line", "line", "file"))

    def check(self) -> bool:
        self._chosen()
        return True

    def read(self) -> Parallel:
        chosen = self._chosen()
        splits: dict[Split, Rows] = {}
        for split, files in chosen.items():
            columns: dict[str, list[str]] = {}
            for file in files:
                for column, text in self._documents(file):
                    columns.setdefault(column, []).append(text)
            if len(columns) > 1:
                raise DataError(
                    f"{self.where}, {split}: plain texts and chats are mixed; give one kind"
                )
            splits[split] = Rows(sum(map(len, columns.values())), columns)
        if len({name for rows in splits.values() for name in rows.texts}) > 1:
            raise DataError(f"{self.where}: some splits are chats and some are plain texts")
        result, remarks = self.sampling.apply(splits, self.where)
        if self.document == "blank_line":
            remarks = [*remarks, *(
                f"{split} has {text.count(chr(10)) + 1} lines and no blank one, so it is one "
                "document: is task.document=line meant?"
                for split, rows in splits.items() for text in rows.texts.get(TEXT, ())
                if rows.num_rows == len(chosen[split]) == 1 and "\n" in text
            )]  # fmt: skip
        names = {split: [file.path.name for file in files] for split, files in chosen.items()}
        return Parallel(self.describe(), result, remarks, {"files": names})

    def _chosen(self) -> dict[Split, list[TextFile]]:
        return self._choose(list_files(Path(self.where), FORM), FORM, self._asked())

    def _documents(self, file: TextFile) -> Iterator[tuple[str, str]]:
        if file.kind == "json":
            yield from (_of_json(row, f"{file.path}, line {n}") for n, row in json_rows(file.path))
            return
        lines: list[str] = []
        for line in read_lines(file.path):
            ends = self.document == "line" or (self.document == "blank_line" and not line.strip())
            lines.append(line)
            if ends:
                yield from _text(lines)
                lines = []
        yield from _text(lines)


def _text(lines: list[str]) -> Iterator[tuple[str, str]]:
    text = "\n".join(lines).strip()
    if text:
        yield TEXT, text


def _of_json(row: Any, where: str) -> tuple[str, str]:
    row = row if isinstance(row, dict) else {}
    if isinstance(row.get(TEXT), str):
        return TEXT, row[TEXT]
    messages = row.get(MESSAGES)
    good = isinstance(messages, list) and all(
        isinstance(m, dict)
        and isinstance(m.get("role"), str)
        and isinstance(m.get("content"), str)
        for m in messages
    )
    if not good or not messages:
        raise DataError(
            f'{where}: neither "text" nor "messages" with role and content as text; its keys: '
            f"{', '.join(row) or 'none'}"
        )
    return MESSAGES, json.dumps(messages)


@dataclass(frozen=True)
class HubDocuments:
    """Plain texts of a data set of the hub, such as Salesforce/wikitext: a row is a document, and
    empty rows are left out. column: where the text is."""

    source: HubSet
    column: str = "text"
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if not isinstance(self.column, str) or not self.column:
            raise ConfigError(f"task.column must name a column, got {self.column!r}")

    def describe(self) -> str:
        return self.source.describe()

    def check(self) -> None:
        self.source.check()

    def read(self) -> Parallel:
        found = self.source.find(FORM)
        splits: dict[Split, Rows] = {}
        for split, parts in found.splits.items():
            tables = [table for tables in parts.values() for table in tables]
            rows = Rows.joined(t.read({TEXT: self.column}, "task.column") for t in tables)
            texts = [text for text in rows.texts[TEXT] if text]
            splits[split] = Rows(len(texts), {TEXT: texts})
        result, remarks = self.sampling.apply(splits, self.describe())
        facts: Mapping[str, object] = found.facts
        return Parallel(self.describe(), result, [*found.remarks, *remarks], facts)
