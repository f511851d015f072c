"""Language modelling: every next token of plain texts, or those of the answers in chats, packed
into samples. No network lives here.

Rows (corpus/rows.py) have one column: "text", or "messages", where each row is a chat.
Batch fields, int64 [B, S]: "text" token ids of prompts and answers; "types" which of the sample's
documents a token belongs to; "label" the token to be guessed at each place, of answers only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
from pydantic import Field
from torch import Tensor

from xcloud.base.errors import DataError
from xcloud.base.settings import settings
from xcloud.contracts.model import NO_LABEL, NO_TOKEN, TokenIds
from xcloud.contracts.task import SPLITS, Scores, Split
from xcloud.tasks.corpus.folder import Folder, TextFile, read_lines
from xcloud.tasks.corpus.hub import Hub
from xcloud.tasks.corpus.rows import Corpus, Form, Rows, SplitTables, Table, Text, read
from xcloud.tasks.scores import ratio_error
from xcloud.tasks.tables import Document, columns_of, pack, pieces_of
from xcloud.tasks.text_task import TextTask, View, public_tokenizer
from xcloud.tasks.tokenizer import (
    SPECIAL_TOKENS,
    PretrainedTokenizer,
    TokenizerChoice,
    TrainedTokenizer,
)

Chat = Sequence[Mapping[str, str]]
"""Messages, each with "role" (system, user, assistant …) and "content"."""

TEXT, MESSAGES = "text", "messages"
FOLDER_NAME = "tokenizer"
CHATS_FILE = "learned_chats"  # beside a tokenizer whose model has
LARGEST_LOSS = 700.0  # nats; exp of more is no float


class CausalTokenizer:
    """A tokenizer of transformers with an end-of-text token. Padding it needs none. Kept as a
    folder that AutoTokenizer loads, the chat template with it."""

    def __init__(self, pretrained: Any, name: str) -> None:
        if pretrained.eos_token_id is None:
            raise DataError(f"tokenizer {name}: has no end-of-text token (eos_token)")
        self._pretrained, self._name = pretrained, name
        self.learns_chats = False  # or it did: a prompt is then a question
        self._first = [] if pretrained.bos_token_id is None else [pretrained.bos_token_id]
        eos = pretrained.eos_token_id
        first = self._first[0] if self._first else eos
        self.token_ids = TokenIds(len(pretrained), NO_TOKEN, first, eos, NO_TOKEN)
        self.vocabularies = {"text": self.token_ids}

    @staticmethod
    def of(choice: TokenizerChoice, cache_dir: str) -> CausalTokenizer:
        """A pretrained model's, or one trained on public sentences. Raises DataError."""
        if isinstance(choice, PretrainedTokenizer):
            return CausalTokenizer(choice.load(), choice.name_or_path)
        from transformers import PreTrainedTokenizerFast

        pad, bos, eos, _, unknown = SPECIAL_TOKENS
        backend = public_tokenizer(choice, cache_dir).backend
        made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=backend, pad_token=pad, bos_token=bos, eos_token=eos,
            unk_token=unknown, clean_up_tokenization_spaces=False,
        )  # fmt: skip
        return CausalTokenizer(made, repr(choice))

    @staticmethod
    def load(folder: Path) -> CausalTokenizer:
        found = CausalTokenizer(PretrainedTokenizer(str(folder)).load(), str(folder))
        found.learns_chats = (folder / CHATS_FILE).exists()
        return found

    def save(self, folder: Path) -> None:
        self._pretrained.save_pretrained(folder)
        if self.learns_chats:
            (folder / CHATS_FILE).touch()

    def texts(self, texts: Sequence[str]) -> list[Document]:
        """Begin token (where there is one), text, end token: all to be guessed."""
        found = [[*self._first, *ids, self.token_ids.eos] for ids in self._encode(texts)]
        return [Document(ids, [True] * len(ids)) for ids in found]

    def chat(self, messages: Chat, where: str) -> Document:
        """Rendered by the tokenizer's own template; only the assistant's turns are to be guessed.
        What follows the last of them is left out. where: for messages.

        Prompt and answer are cut into tokens apart, as they are when a model is asked.
        """
        pieces: list[tuple[str, bool]] = []
        done = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked = self._render(messages[:number], True, where)
            answered = self._render(messages[: number + 1], False, where)
            if not (asked.startswith(done) and answered.startswith(asked)):
                raise DataError(
                    f"{where}: the chat template of {self._name} writes earlier turns anew when "
                    "an answer is added, so it cannot be told what the answer is; give chats with "
                    "one answer each, or a tokenizer whose template only appends"
                )
            pieces += [(asked[len(done) :], False), (answered[len(asked) :], True)]
            done = answered
        if not pieces:
            raise DataError(f"{where}: no message of the role assistant, so nothing to learn")
        document = Document([], [])
        encoded = self._encode([text for text, _ in pieces])
        for ids, (_, learned) in zip(encoded, pieces, strict=True):
            document.ids.extend(ids)
            document.learned.extend([learned] * len(ids))
        return document

    def prompt(self, text: str) -> list[int]:
        """What a model is given to go on from: a chat with one question if it has learned chats,
        else the begin token and the text."""
        if not self.learns_chats:
            return [*self._first, *self._encode([text])[0]] or [self.token_ids.eos]
        asked = self._render([{"role": "user", "content": text}], True, "prompt")
        return self._encode([asked])[0]

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._pretrained.decode(list(ids), skip_special_tokens=True)
        return text

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        backend = self._pretrained.backend_tokenizer
        return [e.ids for e in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _render(self, messages: Chat, ask: bool, where: str) -> str:
        if self._pretrained.chat_template is None:
            raise DataError(
                f"{where}: tokenizer {self._name} has no chat template; give plain text, or the "
                "tokenizer of a model made for chats"
            )
        try:
            text: str = self._pretrained.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=ask
            )
        except Exception as error:  # whatever the template raises
            raise DataError(f"{where}: the chat template refuses it: {error}") from error
        return text


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

    def read(self, fields: frozenset[str] = frozenset(TextTask.fields)) -> Corpus:
        """The column text or messages, for any field. Raises DataError."""
        tables = self.find(self.form)
        self.check_tables(tables)
        return self.arrange(tables, self.rows_of)

    def saved_text(self, folder: Path) -> CausalTokenizer:
        return CausalTokenizer.load(folder / FOLDER_NAME)

    def load(self, fields: frozenset[str], seed: int) -> LanguageData:
        """`seed` is ignored: all seeds train and are scored on the same rows."""
        return LanguageData(self, self.read_for(fields), fields)

    def samples(
        self, rows: Rows, split: Split, tokenizer: CausalTokenizer
    ) -> list[list[Document]]:
        """Documents packed. Raises DataError if none is to be guessed."""
        where = f"{self.describe()}, {split}"
        documents = tokenizer.texts(rows.texts.get(TEXT, ()))
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

    def __init__(self, task: LanguageModelling, corpus: Corpus, fields: frozenset[str]) -> None:
        self._tokenizer: CausalTokenizer | None = None
        samples: dict[Split, list[list[Document]]] = {}
        if corpus.splits["train"].texts:
            self._tokenizer = made = CausalTokenizer.of(task.tokenizer, task.cache_dir)
            samples = {s: task.samples(corpus.splits[s], s, made) for s in SPLITS}
        tables = {split: columns_of(packed) for split, packed in samples.items()}
        self._num_tokens = sum(of["text"].num_tokens for of in tables.values())
        columns = {name: {s: of[name] for s, of in tables.items()} for name in sorted(fields)}
        sizes = {split: len(packed) for split, packed in samples.items()}
        task.check_rows(sizes or corpus.counts)
        tokenizers = {"text": self._tokenizer} if "text" in fields else {}
        super().__init__(task, corpus, fields, tokenizers, columns, sizes)
        self._documents = {
            split: [[document.number for document in sample] for sample in packed]
            for split, packed in samples.items()
        }

    def describe(self) -> str:
        if not self._num_tokens:
            return super().describe()
        tokens = f"{self._num_tokens:,} tokens in samples of {self._task.max_length}"
        return f"{super().describe()}, {tokens}"

    def sentences(self, field: str) -> Sequence[Sequence[int]]:
        """The tokens of each training sample, special ones among them."""
        self.tokenizer(field)
        return list(self._columns[field]["train"])

    def weight(self, ids: Tensor) -> float:
        """Tokens that are guessed in these training samples."""
        self.check_visible("label")
        return float((self.batch("train", ids)["label"] != NO_LABEL).sum())

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

    def shown(self, split: Split, ident: int) -> Mapping[str, str]:
        """The whole text where it may be seen, else the answers."""
        name = "text" if "text" in self._fields else "label"
        row = self._columns[name][split][ident]
        assert self._tokenizer is not None
        return {name: self._tokenizer.decode(token for token in row if token != NO_LABEL)}

    def save_tokenizers(self, folder: Path) -> None:
        """tokenizer/, as transformers loads it, where text or labels are seen."""
        if self._tokenizer is not None and self._fields:
            self._tokenizer.save(folder / FOLDER_NAME)


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
        column = _column(file)
        if file.kind == "text":
            cells = self._documents(file)
            return Rows(len(cells), {TEXT: cells})
        cells = [cell for (cell,) in file.rows((column,), f"the key {column!r} in every line")]
        for number, cell in enumerate(cells, start=1):
            if not (isinstance(cell, str) if column == TEXT else _is_chat(cell)):
                raise DataError(
                    f'{file.where}, row {number}: neither "text" nor "messages" with role and '
                    "content as text"
                )
        return Rows(len(cells), {column: cells})

    def check_tables(self, tables: SplitTables) -> None:
        files = [cast(TextFile, file) for parts in tables.tables.values() for file in parts[""]]
        if len({_column(file) for file in files}) > 1:
            raise DataError(f"{self.where}: plain texts and chats are mixed; give one kind")

    def _documents(self, file: TextFile) -> list[str]:
        lines = list(read_lines(file.path))
        groups = [lines] if self.document == "file" else [[line] for line in lines]
        if self.document == "blank_line":
            groups = [list(group) for _, group in groupby(lines, lambda line: bool(line.strip()))]
        return [text for group in groups if (text := "\n".join(group).strip())]


def _column(file: TextFile) -> str:
    return MESSAGES if file.kind == "json" and MESSAGES in file.columns() else TEXT


def _is_chat(messages: Any) -> bool:
    """Whether it is a list of messages that have a role and content, as text."""
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        return False
    cells = [one.get(key) for one in messages for key in ("role", "content")]
    return bool(cells) and all(isinstance(cell, str) for cell in cells)
