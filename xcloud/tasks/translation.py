"""Translation between two languages: data, tokenisation and scoring.

Files, grammars and archives are read by corpus/; no networks here.
Shapes: B samples, S source positions, T target positions, bos and eos included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from xcloud.base.checks import check_int
from xcloud.base.errors import ConfigError, DataError
from xcloud.base.project import in_project
from xcloud.contracts.model import Batch, TokenIds
from xcloud.contracts.task import Split, UsedAs
from xcloud.tasks.corpus.demo_grammar import DemoGrammar
from xcloud.tasks.corpus.folder import Folder
from xcloud.tasks.corpus.pairs import Pairs
from xcloud.tasks.corpus.text import SPLITS, Corpus, Parallel, Sampling
from xcloud.tasks.corpus.wit3 import Wit3
from xcloud.tasks.settings import HUB, Group, settings_of
from xcloud.tasks.text_pairs import check_predictions, counted, digest_of
from xcloud.tasks.token_table import TokenTable
from xcloud.tasks.tokenizer import (
    PretrainedTokenizer,
    Tokenizer,
    TokenizerChoice,
    TrainedTokenizer,
)

FIELDS = ("source", "target")
SPECIAL_PER_SAMPLE = 2  # bos and eos


@dataclass(frozen=True)
class Translation:
    """Sentence pairs of `corpus`, from language `source` to language `target`.

    max_length: tokens per side, bos and eos included. Longer sides are truncated independently and
    empty ones are kept, so that every cloud knows which samples exist.
    cache_dir: for trained tokenizers; relative to the checkout.
    """

    used_as: ClassVar[UsedAs] = "translation task"

    corpus: Corpus
    source: str = "es"
    target: str = "en"
    source_tokenizer: TokenizerChoice = field(default_factory=TrainedTokenizer)
    target_tokenizer: TokenizerChoice = field(default_factory=TrainedTokenizer)
    max_length: int = 64
    cache_dir: str = ".cache"
    name: ClassVar[str] = "translation"

    def __post_init__(self) -> None:
        check_int("task.max_length", self.max_length, SPECIAL_PER_SAMPLE + 1)
        for key in FIELDS:
            if not isinstance(getattr(self, key), str) or not getattr(self, key):
                raise ConfigError(f"task.{key} must name a language or column, such as es")
        if self.source == self.target:
            raise ConfigError(f"task.source and task.target are both {self.source!r}")

    def saved_text(self, folder: Path) -> TranslationText:
        return TranslationText.load(folder, self.max_length)

    def describe(self) -> str:
        return f"{self.corpus.describe()} {self.source}→{self.target}"

    def check(self) -> None:
        """Raise DataError or ConfigError if the corpus is missing, before any rank starts."""
        self.corpus.check(self.source, self.target)
        _metrics(self.language)

    @property
    def language(self) -> str:
        """Of the target, as sacreBLEU calls it: zh of zh_CN."""
        return self.target.replace("_", "-").partition("-")[0].lower()

    def load(self, fields: frozenset[str], seed: int) -> TranslationData:
        """`seed` is ignored: all seeds train and are scored on the same rows."""
        if unknown := fields - set(FIELDS):
            raise ConfigError(f"translation has the fields source and target, not {unknown}")
        languages = {"source": self.source, "target": self.target}
        visible = frozenset(languages[key] for key in fields)
        parallel = self.corpus.read(self.source, self.target, visible)
        for split, rows in parallel.splits.items():
            if not rows.num_rows:
                raise DataError(f"{self.describe()}: the {split} split has no rows")
        cache_dir = in_project(self.cache_dir)
        choices = {"source": self.source_tokenizer, "target": self.target_tokenizer}
        tokenizers = {
            key: choices[key].prepare(parallel.texts(languages[key]), cache_dir)
            for key in FIELDS
            if key in fields
        }
        return TranslationData(self, parallel, tokenizers)


class TranslationText:
    """Encode and decode the available sides; needs no corpus."""

    def __init__(self, tokenizers: Mapping[str, Tokenizer], max_length: int) -> None:
        self._tokenizers = tokenizers
        self._max_tokens = max_length - SPECIAL_PER_SAMPLE

    @staticmethod
    def load(folder: Path, max_length: int) -> TranslationText:
        """Load what `save` wrote. Raises DataError if neither side is found."""
        paths = {key: folder / f"{key}_tokenizer.json" for key in FIELDS}
        found = {key: Tokenizer.load(path) for key, path in paths.items() if path.exists()}
        if not found:
            raise DataError(f"{folder}: no source_tokenizer.json or target_tokenizer.json here")
        return TranslationText(found, max_length)

    def save(self, folder: Path) -> None:
        for key, tokenizer in self._tokenizers.items():
            tokenizer.save(folder / f"{key}_tokenizer.json")

    @property
    def vocabularies(self) -> dict[str, TokenIds]:
        return {key: tokenizer.token_ids for key, tokenizer in self._tokenizers.items()}

    def tokenizer(self, key: str) -> Tokenizer:
        if key not in self._tokenizers:
            there = ", ".join(self._tokenizers) or "none"
            raise DataError(f"the {key} side is not visible here; visible: {there}")
        return self._tokenizers[key]

    def table(self, key: str, texts: Sequence[str]) -> TokenTable:
        return TokenTable(self.tokenizer(key).encode(texts), self._max_tokens)

    def source_batch(self, texts: Sequence[str]) -> Tensor:
        """int64 [B, S] for texts outside the corpus."""
        table = self.table("source", texts)
        return table.padded(torch.arange(len(texts)), self.tokenizer("source").token_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Target text of these ids, up to eos."""
        return self.tokenizer("target").decode(ids)


class TranslationData:
    """One rank's view (TaskData); texts of an invisible side are not kept."""

    def __init__(
        self, task: Translation, parallel: Parallel, tokenizers: Mapping[str, Tokenizer]
    ) -> None:
        self._task, self._parallel_name = task, parallel.name
        self._remarks, self._agreed = parallel.remarks, parallel.agreed
        self._rows = {split: parallel.splits[split].num_rows for split in SPLITS}
        self.text = TranslationText(tokenizers, task.max_length)
        languages = {"source": task.source, "target": task.target}
        self._tables = {
            (split, key): self.text.table(key, parallel.splits[split].texts[languages[key]])
            for split in SPLITS
            for key in tokenizers
        }
        self._learnable = {
            key: self.text.table(key, parallel.texts(languages[key])) for key in tokenizers
        }
        # Raw, for scoring: references are neither truncated nor tokenised.
        self._references: dict[Split, Sequence[str]] = {}
        if "target" in tokenizers:
            evaluated: tuple[Split, ...] = ("dev", "test")
            self._references = {s: parallel.splits[s].texts[task.target] for s in evaluated}

    def describe(self) -> str:
        parts = [
            f"{self._parallel_name} {self._task.source}→{self._task.target}",
            f"{sum(self._rows.values()):,} pairs ({counted(self._rows)})",
            *self._remarks,
        ]
        return ", ".join(parts)

    def fingerprint(self) -> str:
        """Excludes tokenizers, which are private to the side that sees the text."""
        shared = {
            "task": self._task.name,
            "source": self._task.source,
            "target": self._task.target,
            "max_length": self._task.max_length,
            "rows": self._rows,
            "corpus": dict(self._agreed),
        }
        return digest_of(shared)

    def num_samples(self, split: Split) -> int:
        return self._rows[split]

    @property
    def text_fields(self) -> frozenset[str]:
        return frozenset(self.text.vocabularies)

    @property
    def num_cut(self) -> dict[str, int]:
        return {
            name: sum(self._tables[split, name].num_cut for split in SPLITS)
            for name in self.text_fields
        }

    @property
    def head(self) -> None:
        return None

    def vocabulary(self, field: str) -> TokenIds:
        return self.text.tokenizer(field).token_ids

    def sentences(self, field: str) -> Sequence[Sequence[int]]:
        self.text.tokenizer(field)  # refuses an invisible side
        return self._learnable[field]

    def batch(self, split: Split, ids: Tensor) -> Batch:
        batch = {"ids": ids}
        for key, special in self.text.vocabularies.items():
            batch[key] = self._tables[split, key].padded(ids, special)
        return batch

    def weight(self, ids: Tensor) -> float:
        """Target tokens to predict in these training samples: T without bos and padding."""
        return float(self._table("train", "target").lengths(ids).sum() + len(ids))

    def score(self, split: Split, predictions: dict[int, list[int]]) -> dict[str, float]:
        """Cased sacreBLEU BLEU and chrF (0..100) over the samples in `predictions`."""
        references = self._reference_texts(split)
        check_predictions(predictions, split, len(references), "sample")
        order = sorted(predictions)
        outputs = [self.text.decode(predictions[i]) for i in order]
        wanted = [[references[i] for i in order]]
        return {
            name: round(metric.corpus_score(outputs, wanted).score, 4)
            for name, metric in _metrics(self._task.language).items()
        }

    def signature(self) -> dict[str, str]:
        return _signatures(self._task.language)

    def sample_outputs(self, split: Split, predictions: dict[int, list[int]], count: int) -> str:
        references = self._reference_texts(split)
        lines = []
        for ident in sorted(predictions)[:count]:
            if (split, "source") in self._tables:
                source = self._tables[split, "source"][ident]
                lines.append(f"source     {self.text.tokenizer('source').decode(source)}")
            lines.append(f"reference  {references[ident]}")
            lines.append(f"output     {self.text.decode(predictions[ident])}\n")
        return "\n".join(lines)

    def save_tokenizers(self, folder: Path) -> None:
        self.text.save(folder)

    def _table(self, split: Split, key: str) -> TokenTable:
        self.text.tokenizer(key)  # refuses an invisible side
        return self._tables[split, key]

    def _reference_texts(self, split: Split) -> Sequence[str]:
        self.text.tokenizer("target")
        if split not in self._references:
            raise ValueError(f"only dev and test are scored, not {split}")
        return self._references[split]


@cache
def _metrics(language: str) -> dict[str, Any]:
    """language: of the target, which says how BLEU cuts text into words."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    try:
        # force: suppresses the warning about tokenised text; scores are unchanged.
        return {"bleu": BLEU(trg_lang=language, force=True), "chrf": CHRF()}
    except RuntimeError:  # its words are cut by a library of its own
        raise ConfigError(
            f"task.target={language}: sacreBLEU cuts this language into words with a library that "
            f"is not installed; run: pip install 'sacrebleu[{language}]'"
        ) from None


@cache
def _signatures(language: str) -> dict[str, str]:
    for metric in _metrics(language).values():
        metric.corpus_score(["a"], [["a"]])  # sets the reference count of the signature
    return {name: str(metric.get_signature()) for name, metric in _metrics(language).items()}


OWN = Group(Translation, ("corpus",))
GRAMMAR = Group(DemoGrammar, ("num_dev", "num_test"), seed="corpus_seed")
FILES = Group(Folder)
ARCHIVE = Group(Wit3, ("sampling",))
COLUMNS = Group(Pairs, ("source", "sampling"))
MONOLINGUAL = Group(Pairs, ("source", "sampling", "source_column", "target_column"))
SAMPLING = Group(Sampling, ("unit",), seed="split_seed")


@settings_of(
    GRAMMAR, OWN, source_tokenizer=TrainedTokenizer(2000), target_tokenizer=TrainedTokenizer(2000)
)
def translation_from_demo(**settings: Any) -> Translation:
    """The embedded Spanish-English demo: no files, no network."""
    return OWN.make(settings, corpus=GRAMMAR.make(settings))


@settings_of(
    FILES,
    MONOLINGUAL,
    SAMPLING,
    OWN,
    source_tokenizer=TrainedTokenizer(8000),
    target_tokenizer=TrainedTokenizer(8000),
)
def translation_from_files(**settings: Any) -> Translation:
    """Your own parallel corpus in the folder `path`."""
    sampling = SAMPLING.make(settings)
    corpus = MONOLINGUAL.make(settings, source=FILES.make(settings), sampling=sampling)
    return OWN.make(settings, corpus=corpus)


@settings_of(
    ARCHIVE,
    SAMPLING,
    OWN,
    source_tokenizer=PretrainedTokenizer("FacebookAI/xlm-roberta-base"),
    target_tokenizer=PretrainedTokenizer("google-bert/bert-base-cased"),
    max_length=128,
)
def translation_from_paper(**settings: Any) -> Translation:
    """IWSLT'14 from its original archive in the folder `path`; see Wit3.

    By default the tokenizers of the recipe's pretrained models.
    """
    return OWN.make(settings, corpus=ARCHIVE.make(settings, sampling=SAMPLING.make(settings)))


@settings_of(
    HUB,
    COLUMNS,
    SAMPLING,
    OWN,
    source_tokenizer=TrainedTokenizer(8000),
    target_tokenizer=TrainedTokenizer(8000),
)
def translation_from_hub(**settings: Any) -> Translation:
    """A Hugging Face data set, or a folder in the same format."""
    sampling = SAMPLING.make(settings)
    corpus = COLUMNS.make(settings, source=HUB.make(settings), sampling=sampling)
    return OWN.make(settings, corpus=corpus)
