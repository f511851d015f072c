"""Language modelling: every next token of plain texts, or those of the answers in chats.
Tokens and packing are in causal_text.py; no network lives here.

Rows (corpus/rows.py) have one column: "text", or "messages", where each row is a chat.
Batch fields, int64 [B, S]: "text" token ids of prompts and answers; "types" which of the sample's
documents a token belongs to; "label" the token to be guessed at each place, of answers only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
from pydantic import Field
from torch import Tensor

from xcloud.base.errors import DataError
from xcloud.base.settings import settings
from xcloud.contracts.model import NO_LABEL, Batch
from xcloud.contracts.task import SPLITS, Scores, Split
from xcloud.tasks.causal_text import CausalTokenizer, Document, columns_of, pack, pieces_of
from xcloud.tasks.corpus.demo import DemoStories
from xcloud.tasks.corpus.folder import Folder, TextFile, read_lines
from xcloud.tasks.corpus.hub import Hub
from xcloud.tasks.corpus.rows import Corpus, Form, Rows, Table, Text, read
from xcloud.tasks.scores import ratio_error
from xcloud.tasks.text_task import TextTask, View
from xcloud.tasks.tokenizer import TokenizerChoice, TrainedTokenizer

TEXT, MESSAGES = "text", "messages"
FOLDER_NAME = "tokenizer"
LARGEST_LOSS = 700.0  # nats; exp of more is no float


@settings("task", kw_only=True)
class LanguageModelling(TextTask):
    """Documents, packed into samples of at most max_length tokens. A document that is longer is
    cut into several; a chat that is longer loses its end.

    tokenizer: the model's own, with its chat template; a TrainedTokenizer is trained on public
        sentences.
    A cloud that sees the labels but not the text reads the same file and keeps the answers only.
    """

    name: ClassVar[str] = "language_modelling"
    used_as: ClassVar[str] = "causal language model"
    form: ClassVar[Form] = Form(
        "train.txt (plain text) or train.jsonl (text or messages)",
        {"txt": "text", "jsonl": "json"},
    )
    column = TEXT
    tokenizer: TokenizerChoice = TrainedTokenizer()
    max_length: Annotated[int, Field(ge=8)] = 128

    def rows_of(self, table: Table) -> Rows:
        """A row is a document; empty ones are left out."""
        rows = read(table, {TEXT: self.column}, "task.column")
        return rows.take([i for i, text in enumerate(rows.texts[TEXT]) if text])

    def read(self) -> Corpus:
        """All splits, each with the column text or messages. Raises DataError."""
        return self.arrange(self.find(self.form), self.rows_of)

    def saved_text(self, folder: Path) -> CausalTokenizer:
        return CausalTokenizer.load(folder / FOLDER_NAME)

    def load(self, fields: frozenset[str], seed: int) -> LanguageData:
        """`seed` changes nothing: runs of several seeds learn and are scored on the same text."""
        self.check_fields(fields)
        if not fields and self.sizes is not None:
            return LanguageData(self, Corpus.unseen(self.sizes), {}, fields, None)
        corpus = self.read()
        tokenizer = CausalTokenizer.of(self.tokenizer, self.cache_dir)
        samples = {
            split: self._samples(corpus.splits[split], split, tokenizer) for split in SPLITS
        }
        self.check_rows({split: len(packed) for split, packed in samples.items()})
        return LanguageData(self, corpus, samples, fields, tokenizer)

    def _samples(
        self, rows: Rows, split: Split, tokenizer: CausalTokenizer
    ) -> list[list[Document]]:
        where = f"{self.describe()}, {split}"
        documents: list[Document] = tokenizer.texts(rows.texts.get(TEXT, ()))
        chats = rows.texts.get(MESSAGES, ())
        tokenizer.learns_chats |= bool(chats)
        for number, chat in enumerate(chats, start=1):
            documents.append(tokenizer.chat(chat, f"{where}, chat {number}"))
        samples = pack(pieces_of(documents, self.max_length, split=not chats), self.max_length)
        if not samples:
            raise DataError(f"{where}: nothing to guess; are its texts empty or its prompts long?")
        return samples


class LanguageData(View[LanguageModelling]):
    """One rank's view (TaskData): of fields that may not be seen here nothing was kept."""

    def __init__(
        self,
        task: LanguageModelling,
        corpus: Corpus,
        samples: Mapping[Split, Sequence[Sequence[Document]]],
        fields: frozenset[str],
        tokenizer: CausalTokenizer | None,
    ) -> None:
        rows = {split: len(packed) for split, packed in samples.items()} or corpus.counts
        vocabularies = {} if tokenizer is None else tokenizer.vocabularies
        seen = {name: ids for name, ids in vocabularies.items() if name in fields}
        super().__init__(task, corpus, rows, fields, seen, {})  # long texts go on: none is cut
        self._tables = {split: columns_of(packed, fields) for split, packed in samples.items()}
        self._documents = {
            split: [[document.number for document in sample] for sample in packed]
            for split, packed in samples.items()
        }
        self._num_tokens = sum(
            len(document.ids)
            for each in samples.values()
            for sample in each
            for document in sample
        )
        self._tokenizer = tokenizer if fields else None

    def describe(self) -> str:
        if not self._num_tokens:
            return super().describe()
        tokens = f"{self._num_tokens:,} tokens in samples of {self._task.max_length}"
        return f"{super().describe()}, {tokens}"

    def sentences(self, field: str) -> Sequence[Sequence[int]]:
        """The tokens of each training sample, special ones among them."""
        self.check_visible(field, "text field")
        return self._tables["train"][field]

    def batch(self, split: Split, ids: Tensor) -> Batch:
        tables = self._tables[split] if self._fields else {}
        return {"ids": ids, **{name: table.padded(ids) for name, table in tables.items()}}

    def weight(self, ids: Tensor) -> float:
        """Tokens that are guessed in these training samples."""
        self.check_visible("label")
        return float((self._tables["train"]["label"].padded(ids) != NO_LABEL).sum())

    def score(self, split: Split, predictions: dict[int, list[int]]) -> Scores:
        """Perplexity, and the mean loss in nats, of the guessed tokens of these samples; errors
        are over documents. Predicted are millionths of a nat and tokens of each document, or piece
        of one, in a sample."""
        self.check_predictions(split, predictions)
        order = sorted(predictions)
        found = [np.reshape(predictions[i], (-1, 2)) / (1e6, 1) for i in order]
        of_piece = [number for i in order for number in self._documents[split][i]]
        documents = np.zeros((max(of_piece) + 1, 2))
        np.add.at(documents, of_piece, np.concatenate(found))
        nats, tokens = documents.T
        loss, error = float(nats.sum() / tokens.sum()), ratio_error(nats, tokens)
        perplexity = math.exp(min(loss, LARGEST_LOSS))
        samples = {}
        for i, pieces in zip(order, found, strict=True):
            nats, tokens = pieces.sum(0)
            samples[i] = {"loss": round(float(nats / tokens), 6), "tokens": int(tokens)}
        return Scores(
            {"perplexity": round(perplexity, 4), "loss": round(loss, 6)},
            {"perplexity": round(perplexity * error, 4), "loss": round(error, 6)},
            samples,
        )

    def signature(self) -> dict[str, str]:
        guessed = "guessed tokens of the tokenizer, end tokens among them"
        return {
            "perplexity": f"exp of the mean loss over all {guessed}",
            "loss": f"nats, mean over all {guessed}",
        }

    def sample_outputs(self, split: Split, predictions: dict[int, list[int]], count: int) -> str:
        """A few samples with their perplexity: the whole text where it may be seen, else the
        answers."""
        assert self._tokenizer is not None
        lines = []
        for ident in sorted(predictions)[:count]:
            perplexity = self.score(split, {ident: predictions[ident]}).values["perplexity"]
            shown = self._tables[split]["text" if "text" in self._fields else "label"][ident]
            answer = self._tokenizer.decode(token for token in shown if token != NO_LABEL)
            lines.append(f"perplexity {perplexity}\n{answer}\n")
        return "\n".join(lines)

    def save_tokenizers(self, folder: Path) -> None:
        """tokenizer/, as transformers loads it, where text or labels are seen."""
        if self._tokenizer is not None:
            self._tokenizer.save(folder / FOLDER_NAME)


@settings("task", kw_only=True)
class DemoLanguageModelling(DemoStories, LanguageModelling):
    """The embedded stories: no files, no network."""


@settings("task", kw_only=True)
class HubLanguageModelling(Hub, LanguageModelling):
    """Plain texts of a data set of the hub, such as Salesforce/wikitext.
    column: where they are."""

    column: Text = TEXT


@settings("task", kw_only=True)
class FolderLanguageModelling(Folder, LanguageModelling):
    """Your own plain texts or chats in the folder `path`; each file may end in .gz.

    .txt: plain text, UTF-8. document: what one is there: blank_line (it ends at an empty line),
        line, or file.
    .jsonl: an object a line, {"text": "…"} or {"messages": [{"role": "user", "content": "…"},
        {"role": "assistant", "content": "…"}]}. All files are of one of the two kinds.
    """

    document: Literal["blank_line", "line", "file"] = "blank_line"

    def rows_of(self, table: Table) -> Rows:
        file = cast(TextFile, table)
        if file.kind == "text":
            texts = list(self._documents(file))
            return Rows(len(texts), {TEXT: texts})
        column = _column(file)
        cells = [cell for (cell,) in file.rows((column,), f"the key {column!r} in every line")]
        for number, cell in enumerate(cells, start=1):
            if not (isinstance(cell, str) if column == TEXT else _is_chat(cell)):
                raise DataError(
                    f'{file.where}, row {number}: neither "text" nor "messages" with role and '
                    "content as text"
                )
        return Rows(len(cells), {column: cells})

    def read(self) -> Corpus:
        tables = self.find(self.form)
        files = [cast(TextFile, file) for parts in tables.tables.values() for file in parts[""]]
        if len({_column(file) for file in files}) > 1:
            raise DataError(f"{self.where}: plain texts and chats are mixed; give one kind")
        corpus = self.arrange(tables, self.rows_of)
        if self.document != "blank_line":
            return corpus
        alone = [split for split, parts in tables.tables.items() if len(parts[""]) == 1]
        whole = [
            f"{split} has {text.count(chr(10)) + 1} lines and no blank one, so it is one "
            "document: is task.document=line meant?"
            for split, texts in ((s, corpus.splits[s].texts.get(TEXT, ())) for s in alone)
            for text in texts
            if len(texts) == 1 and "\n" in text
        ]
        return replace(corpus, remarks=[*corpus.remarks, *whole])

    def _documents(self, file: TextFile) -> Iterator[str]:
        lines: list[str] = []
        for line in read_lines(file.path):
            ends = self.document == "line" or (self.document == "blank_line" and not line.strip())
            lines.append(line)
            if ends:
                yield from _text(lines)
                lines = []
        yield from _text(lines)


def _column(file: TextFile) -> str:
    return MESSAGES if file.kind == "json" and MESSAGES in file.columns() else TEXT


def _text(lines: list[str]) -> list[str]:
    text = "\n".join(lines).strip()
    return [text] if text else []


def _is_chat(messages: Any) -> bool:
    def is_message(one: Any) -> bool:
        return isinstance(one, dict) and all(
            isinstance(one.get(key), str) for key in ("role", "content")
        )

    return isinstance(messages, list) and bool(messages) and all(map(is_message, messages))
