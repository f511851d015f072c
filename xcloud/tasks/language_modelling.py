"""Language modelling: every next token of plain texts, or those of the answers in chats.
Where texts come from is corpus/documents.py, packing is packing.py; no network lives here.

Batch fields, int64 [B, S]: "text" token ids of prompts and answers; "types" which of the sample's
documents a token belongs to; "label" the token to be guessed at each place, of answers only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from xcloud.base.checks import check_int
from xcloud.base.errors import DataError
from xcloud.contracts.model import NO_LABEL, Batch, TokenIds
from xcloud.contracts.task import Split, UsedAs
from xcloud.tasks.causal_tokenizer import CausalTokenizer, Document
from xcloud.tasks.classification import check_fields
from xcloud.tasks.corpus.documents import (
    MESSAGES,
    TEXT,
    DemoStories,
    DocumentFolder,
    Documents,
    HubDocuments,
)
from xcloud.tasks.corpus.text import SPLITS, Parallel, Rows
from xcloud.tasks.packing import PackedTable, pack, pieces_of
from xcloud.tasks.settings import HUB, SAMPLES, Group, settings_of
from xcloud.tasks.sizes import SizedTask, Sizes, check_found, check_sizes
from xcloud.tasks.text_pairs import check_predictions, counted
from xcloud.tasks.tokenizer import PretrainedTokenizer, TokenizerChoice, TrainedTokenizer

MIN_LENGTH = 8
FOLDER_NAME = "tokenizer"
LARGEST_LOSS = 700.0  # nats; exp of more is no float


@dataclass(frozen=True)
class LanguageModelling(SizedTask):
    """Documents of `corpus`, packed into samples of at most max_length tokens. A document that is
    longer is cut into several; a chat that is longer loses its end.

    tokenizer: the model's own, with its chat template; a TrainedTokenizer is trained on public
        sentences. sizes: see sizes.py. cache_dir: where trained tokenizers are kept.
    A cloud that sees the labels but not the text reads the same file and keeps the answers only.
    """

    used_as: ClassVar[UsedAs] = "causal language model"

    corpus: Documents
    tokenizer: TokenizerChoice = field(default_factory=TrainedTokenizer)
    max_length: int = 128
    sizes: Sizes = None
    cache_dir: str = ".cache"
    name: str = field(default="language_modelling", init=False)

    def __post_init__(self) -> None:
        check_int("task.max_length", self.max_length, MIN_LENGTH)
        check_sizes(self.sizes)

    def saved_text(self, folder: Path) -> CausalTokenizer:
        return CausalTokenizer.load(folder / FOLDER_NAME)

    def load(self, fields: frozenset[str], seed: int) -> LanguageData:
        """`seed` changes nothing: runs of several seeds learn and are scored on the same text."""
        check_fields(self.name, fields)
        if not fields and self.sizes is not None:
            unseen = {split: Rows(self.sizes[split], {}) for split in SPLITS}
            return LanguageData(self, Parallel(self.corpus.describe(), unseen), {}, fields, None)
        corpus = self.corpus.read()
        tokenizer = CausalTokenizer.of(self.tokenizer, self.cache_dir)
        tables = {
            split: self._table(corpus.splits[split], split, tokenizer, fields) for split in SPLITS
        }
        found = {split: len(table) for split, table in tables.items()}
        check_found(self.sizes, found, self.describe())
        return LanguageData(self, corpus, tables, fields, tokenizer)

    def _table(
        self, rows: Rows, split: Split, tokenizer: CausalTokenizer, fields: frozenset[str]
    ) -> PackedTable:
        where = f"{self.describe()}, {split}"
        documents: list[Document] = tokenizer.texts(rows.texts.get(TEXT, ()))
        chats = rows.texts.get(MESSAGES, ())
        tokenizer.learns_chats |= bool(chats)
        for number, chat in enumerate(chats, start=1):
            documents.append(tokenizer.chat(json.loads(chat), f"{where}, chat {number}"))
        pieces = pieces_of(documents, self.max_length, split=not chats)
        table = PackedTable(pack(pieces, self.max_length), fields)
        if not len(table):
            raise DataError(f"{where}: nothing to guess; are its texts empty or its prompts long?")
        return table


class LanguageData:
    """One rank's view (TaskData): of fields that may not be seen here nothing was kept."""

    def __init__(
        self,
        task: LanguageModelling,
        corpus: Parallel,
        tables: Mapping[Split, PackedTable],
        fields: frozenset[str],
        tokenizer: CausalTokenizer | None,
    ) -> None:
        self._task, self._tables, self._fields = task, tables, fields
        self._tokenizer = tokenizer
        self._remarks, self._agreed = corpus.remarks, corpus.agreed
        self._rows = {
            split: len(tables[split]) if tables else corpus.splits[split].num_rows
            for split in SPLITS
        }

    def describe(self) -> str:
        said = f"{self._task.describe()}: {counted(self._rows)} of {self._task.max_length} tokens"
        tokens = sum(table.num_tokens for table in self._tables.values())
        return ", ".join([said, f"{tokens:,} tokens in all", *self._remarks])

    def fingerprint(self) -> str:
        return self._task.fingerprint(self._rows, self._agreed)

    def num_samples(self, split: Split) -> int:
        return self._rows[split]

    @property
    def text_fields(self) -> frozenset[str]:
        return self._fields & {"text"}

    @property
    def num_cut(self) -> dict[str, int]:
        return {}  # long texts go on in the next sample

    @property
    def head(self) -> None:
        return None

    def vocabulary(self, field: str) -> TokenIds:
        return self._seen(field, "text").token_ids

    def sentences(self, field: str) -> Sequence[Sequence[int]]:
        """The tokens of each training sample, special ones among them."""
        self._seen(field, "text")
        table = self._tables["train"]
        return [table.of("text", number) for number in range(len(table))]

    def batch(self, split: Split, ids: Tensor) -> Batch:
        return {"ids": ids, **(self._tables[split].padded(ids) if self._fields else {})}

    def weight(self, ids: Tensor) -> float:
        """Tokens that are guessed in these training samples."""
        self._seen("label", "label")
        return float(self._tables["train"].num_guessed(ids))

    def score(self, split: Split, predictions: dict[int, list[int]]) -> dict[str, float]:
        """Perplexity, and the mean loss in nats, of the guessed tokens of these samples."""
        check_predictions(predictions, split, self._rows[split], "sample")
        nats, tokens = _summed(predictions)
        loss = nats / tokens
        perplexity = math.exp(min(loss, LARGEST_LOSS))
        return {"perplexity": round(perplexity, 4), "loss": round(loss, 6)}

    def signature(self) -> dict[str, str]:
        guessed = "guessed tokens of the tokenizer, end tokens among them"
        return {
            "perplexity": f"exp of the mean loss over all {guessed}",
            "loss": f"nats, mean over all {guessed}",
        }

    def sample_outputs(self, split: Split, predictions: dict[int, list[int]], count: int) -> str:
        """A few samples with their perplexity: the whole text where it may be seen, else the
        answers."""
        tokenizer = self._seen("label", "label")
        table = self._tables[split]
        lines = []
        for ident in sorted(predictions)[:count]:
            perplexity = self.score(split, {ident: predictions[ident]})["perplexity"]
            if "text" in self._fields:
                shown = table.of("text", ident)
            else:
                shown = [token for token in table.of("label", ident) if token != NO_LABEL]
            lines.append(f"perplexity {perplexity}\n{tokenizer.decode(shown)}\n")
        return "\n".join(lines)

    def save_tokenizers(self, folder: Path) -> None:
        """tokenizer/, as transformers loads it, where text or labels are seen."""
        if self._tokenizer is not None and self._fields:
            self._tokenizer.save(folder / FOLDER_NAME)

    def _seen(self, field: str, wanted: str) -> CausalTokenizer:
        if field != wanted or wanted not in self._fields or self._tokenizer is None:
            visible = ", ".join(sorted(self._fields)) or "none"
            raise DataError(f"{field!r} is not {wanted} seen here; visible: {visible}")
        return self._tokenizer


def _summed(predictions: Mapping[int, list[int]]) -> tuple[float, int]:
    """Nats and guessed tokens of [millionths of a nat, tokens] of each sample."""
    pairs = predictions.values()
    return sum(nats for nats, _ in pairs) / 1e6, sum(tokens for _, tokens in pairs)


OWN = Group(LanguageModelling, ("corpus",))
STORIES = Group(DemoStories)
FILES = Group(DocumentFolder, ("sampling",))


@settings_of(STORIES, OWN, tokenizer=TrainedTokenizer(2000))
def language_modelling_from_demo(**settings: Any) -> LanguageModelling:
    """The embedded stories: no files, no network."""
    return OWN.make(settings, corpus=STORIES.make(settings))


@settings_of(
    FILES, SAMPLES, OWN, tokenizer=PretrainedTokenizer("Qwen/Qwen2.5-0.5B"), max_length=512
)
def language_modelling_from_files(**settings: Any) -> LanguageModelling:
    """Your own plain texts or chats in the folder `path`."""
    return OWN.make(settings, corpus=FILES.make(settings, sampling=SAMPLES.make(settings)))


@settings_of(HUB, SAMPLES, OWN, tokenizer=PretrainedTokenizer("Qwen/Qwen2.5-0.5B"), max_length=512)
def language_modelling_from_hub(column: str = "text", **settings: Any) -> LanguageModelling:
    """Plain texts of a data set of the Hugging Face hub."""
    corpus = HubDocuments(HUB.make(settings), column, SAMPLES.make(settings))
    return OWN.make(settings, corpus=corpus)
