"""Translation between two languages: data, tokenisation and scoring.

Shapes: B samples, S source positions, T target positions, bos and eos included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field
from torch import Tensor

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.placeholders import check_is_text
from xcloud.base.project import in_project
from xcloud.base.settings import NotNegative, Positive, ReadPath, settings
from xcloud.contracts.model import SPLITS, Cut, DataSplit, Scores
from xcloud.demo import NUM_ROWS, pairs
from xcloud.tasks.rows import Corpus, Demo, Form, GivenText, SplitTables, check_columns, read
from xcloud.tasks.scores import bootstrap_error
from xcloud.tasks.sources import read_lines
from xcloud.tasks.text_task import PairTable, TextTask, Tokenized, TokenTable, View, cuts_of
from xcloud.tasks.tokenizer import Tokenizer, TokenizerChoice, TrainedTokenizer

KEYS = "task.source, task.target, task.source_column or task.target_column"
FIELDS = ("source", "target")
SPECIAL_PER_SAMPLE = 2  # bos and eos


@settings("task", kw_only=True)
class Translation(TextTask):
    """Sentence pairs, from language `source` to language `target`.

    source: the language that is translated, as in names of files and columns.
    target: the language that it is translated to.
    source_column, target_column: the names of the columns; None: those of the languages.
    source_monolingual_file, target_monolingual_file: files of more texts in one language, one text
        a line (.gz may be packed), for tokenizers and for backbones to be pretrained on. Only a
        cloud that sees this side reads its file. Texts that are also in dev or test are left out.
    max_length: the largest number of tokens per side, bos and eos included. Longer sides are
        truncated independently and empty ones are kept, so that every cloud knows which samples
        exist.
    source_tokenizer, target_tokenizer: the tokenizer of each side.
    """

    fields = FIELDS
    source: GivenText = "es"
    target: GivenText = "en"
    source_column: GivenText | None = None
    target_column: GivenText | None = None
    source_monolingual_file: ReadPath | None = None
    target_monolingual_file: ReadPath | None = None
    source_tokenizer: TokenizerChoice = TrainedTokenizer()
    target_tokenizer: TokenizerChoice = TrainedTokenizer()
    max_length: Annotated[int, Field(ge=SPECIAL_PER_SAMPLE + 1)] = 64
    name: ClassVar[str] = "translation"
    used_as: ClassVar[str] = "translation task"
    agreed_names: ClassVar[tuple[str, ...]] = ("source", "target")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == self.target:
            raise ConfigError(f"task.source and task.target are both {self.source!r}; set two")

    def describe(self) -> str:
        return f"{self.data.source_name(self.form)} {self.source}→{self.target}"

    def check(self) -> None:
        super().check()
        for path in (self.source_monolingual_file, self.target_monolingual_file):
            if path is not None:
                check_is_text(Path(path).expanduser())
        _metrics(self.language)

    def check_tables(self, tables: SplitTables) -> None:
        for table in (table for parts in tables.tables.values() for table in parts[""]):
            # A line pair has the sides that lie here, and says itself which one is missing.
            if not set(table.columns()) <= {self.source, self.target}:  # no line pair
                check_columns(table, wanted=[*self._columns.values()], keys=KEYS)

    def agreed_settings(self) -> dict[str, object]:
        """The settings without tokenizers, which are private to the side that sees the text."""
        return {**super().agreed_settings(), "source": self.source, "target": self.target}

    @property
    def form(self) -> Form:
        expected = "train.tsv (first line: column names), train.jsonl, or "
        expected += f"train.{self.source} and train.{self.target}"
        return Form(expected, rows="sentence pairs", languages=(self.source, self.target))

    @property
    def language(self) -> str:
        """The target's language, as sacreBLEU calls it: zh of zh_CN."""
        return self.target.replace("_", "-").partition("-")[0].lower()

    @property
    def _columns(self) -> dict[str, str]:
        names = (self.source_column or self.source, self.target_column or self.target)
        return dict(zip(FIELDS, names, strict=True))

    def read(self, fields: frozenset[str]) -> Corpus:
        wanted = {key: column for key, column in self._columns.items() if key in fields}
        tables = self.data.find(self.form)
        corpus = self.arrange(
            tables,
            rows_of=lambda table: read(table, wanted=wanted, keys=KEYS),
            # Columns by language are read where none was chosen; neither is news to the user.
            used=lambda table: (*self._columns.values(), self.source, self.target),
        )
        further = {}
        remarks = []
        # Only sides that this rank sees: further texts are as private as the pairs.
        for key in sorted(wanted):
            further[key] = tables.further.get(getattr(self, key), ())
            if (path := getattr(self, f"{key}_monolingual_file")) is not None:
                further[key], remark = self._further_texts(key, path, corpus)
                remarks.append(remark)
        return replace(corpus, further=further, remarks=[*corpus.remarks, *remarks])

    def _further_texts(self, key: str, path: str, corpus: Corpus) -> tuple[list[str], str]:
        splits: tuple[DataSplit, ...] = ("dev", "test")
        # Read off the visible side alone. Kept in training, a text of dev or test would raise its
        # score.
        scored = {text for split in splits for text in corpus.splits[split].texts[key]}
        lines = [line.strip() for line in read_lines(Path(path).expanduser())]
        texts = [line for line in lines if line and line not in scored]
        if not texts:
            said = "no text in it that is not in dev or test"
            raise DataError(f"task.{key}_monolingual_file={path}: {said}")
        left_out = sum(line in scored for line in lines)
        remark = f"{len(texts):,} further texts in {getattr(self, key)}"
        return texts, remark + (f" ({left_out:,} of dev or test left out)" if left_out else "")

    def saved_text(self, folder: Path) -> TranslationText:
        return TranslationText.load(folder, self.max_length)

    def view(self, corpus: Corpus, fields: frozenset[str]) -> TranslationData:
        return TranslationData(task=self, corpus=corpus, fields=fields)


@dataclass(eq=False)
class TranslationText(Tokenized):
    """Encode and decode the available sides; needs no corpus."""

    _tokenizers: Mapping[str, Tokenizer]
    _max_length: int

    @staticmethod
    def load(folder: Path, max_length: int) -> TranslationText:
        """Load what `save_tokenizers` wrote. Raises DataError if neither side is found."""
        paths = {key: folder / f"{key}_tokenizer.json" for key in FIELDS}
        found = {key: Tokenizer.load(path) for key, path in paths.items() if path.exists()}
        if not found:
            raise DataError(f"{folder}: no source_tokenizer.json or target_tokenizer.json here")
        return TranslationText(found, max_length)

    def table(self, key: str, texts: Sequence[str]) -> TokenTable:
        # A side is a single text: bos, tokens, eos.
        return PairTable.encoded(self.tokenizer(key), sides=[texts], most=self._max_length).tokens

    def decode(self, ids: Sequence[int]) -> str:
        """Target text of these ids, up to eos."""
        return str(self.tokenizer("target").decode(ids))


class TranslationData(View[Translation], TranslationText):
    """One rank's view (TaskData); texts of an invisible side are not kept."""

    def __init__(self, task: Translation, corpus: Corpus, fields: frozenset[str]) -> None:
        choices: dict[str, TokenizerChoice]
        choices = {key: getattr(task, f"{key}_tokenizer") for key in FIELDS if key in fields}
        cache_dir = in_project(task.cache_dir)
        # A tokenizer sees what training sees and nothing of dev and test.
        tokenizers = {
            key: one.prepare([*corpus.splits["train"].texts[key], *corpus.further[key]], cache_dir)
            for key, one in choices.items()
        }
        # View's constructor has other arguments, so both are called by name.
        TranslationText.__init__(self, tokenizers, task.max_length)
        texts = {key: {s: corpus.splits[s].texts[key] for s in SPLITS} for key in tokenizers}
        self._tables = {
            key: {split: self.table(key, column) for split, column in of.items()}
            for key, of in texts.items()
        }
        self._further = {key: self.table(key, corpus.further[key]) for key in tokenizers}
        # Raw, for scoring: references are neither truncated nor tokenised.
        self.references = texts.get("target", {})
        cuts = {f"{key} texts cut": cuts_of(tables) for key, tables in self._tables.items()}
        for key, table in self._further.items():
            further = Cut(num=table.num_cut, of=len(table), setting="task.max_length")
            cuts[f"further {key} texts cut"] = {"train": further}
        View.__init__(self, task, corpus, fields, tokenizers, self._tables, cuts=cuts)

    def sentences(self, field: str) -> Sequence[Sequence[int]]:
        """Return the token ids of a side of the training pairs, and of further texts."""
        self.tokenizer(field)
        tables = self._tables[field]["train"], self._further[field]
        # Without bos and eos: backbones are pretrained on sentences alone.
        return [row[1:-1] for table in tables for row in table]

    def weight(self, ids: Tensor) -> float:
        """Target tokens to predict in these training samples: T without bos and padding."""
        self.tokenizer("target")
        # Every token but bos is predicted, eos too.
        return float((self._tables["target"]["train"].lengths(ids) - 1).sum())

    def score(self, split: DataSplit, predictions: dict[int, list[int]]) -> Scores:
        """Cased sacreBLEU BLEU and chrF (0..100) over the samples in `predictions`. Both follow
        from sums of counts over sentences, which a sample's line has too (bleu_counts …)."""
        self.check_predictions(split, predictions)
        samples: dict[int, dict[str, Any]] = {
            i: {"prediction": self.decode(predictions[i]), "reference": self.references[split][i]}
            for i in sorted(predictions)
        }
        values = {}
        errors = {}
        # Sorted by sample above, so predictions and references stand in the same order.
        outputs, wanted = zip(*map(dict.values, samples.values()), strict=True)
        for name, metric in _metrics(self._task.language).items():
            values[name], errors[name], sentences = _score(
                metric, outputs=outputs, references=wanted
            )
            for sample, (score, counts) in zip(samples.values(), sentences, strict=True):
                sample |= {name: score, f"{name}_counts": counts}
        return Scores(values, errors, samples)

    def signature(self) -> dict[str, str]:
        metrics = _metrics(self._task.language)
        for metric in metrics.values():
            metric.corpus_score(["a"], [["a"]])  # sets the reference count of the signature
        return {name: str(metric.get_signature()) for name, metric in metrics.items()}

    def shown(self, split: DataSplit, ident: int) -> Mapping[str, str]:
        if "source" not in self._tables:
            return {}
        return {"source": self.tokenizer("source").decode(self._tables["source"][split][ident])}


def _score(
    metric: Any, outputs: Sequence[str], references: Sequence[str]
) -> tuple[float, float, list[tuple[float, list[int]]]]:
    """A metric of sacreBLEU, its error, and of each sentence the metric with the counts whose sums
    give it. In the steps of corpus_score and of sacreBLEU's own bootstrap, which is slower."""
    # Private functions of sacreBLEU: counts of each sentence, of which the corpus's score is made.
    # Its public ones give only the sum.
    counts = metric._extract_corpus_statistics(outputs, [references])
    score = metric._compute_score_from_stats
    table_NC = np.array(counts, np.float64)

    sentences = [(score(own).score, own) for own in counts]
    return (
        metric._aggregate_and_compute(counts).score,
        # A resample weighs the counts of each sentence by how often it was drawn.
        bootstrap_error(
            len(counts),
            lambda drawn_N: float(score(np.einsum("n,nc->c", drawn_N, table_NC)).score),
        ),
        sentences,
    )


@cache
def _metrics(language: str) -> dict[str, Any]:
    """language: of the target, which says how BLEU cuts text into words."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    try:
        # force: suppresses the warning about tokenised text; scores are unchanged.
        return {"bleu": BLEU(trg_lang=language, force=True), "chrf": CHRF()}
    except RuntimeError:  # its words are cut by a library of its own
        said = "sacreBLEU needs a library that is not installed to cut it into words; run"
        raise ConfigError(
            f"task.target={language}: {said}: pip install 'sacrebleu[{language}]'"
        ) from None


@settings("task.data", kw_only=True)
class DemoPairs(Demo):
    """Different sentence pairs of 4 to 25 words. No sentence occurs twice in either language, so
    the splits are disjoint.

    num_pairs: the number of pairs in train, dev and test together.
    num_dev: the number of these pairs in the dev set.
    num_test: the number of these pairs in the test set.
    num_monolingual: the number of other sentences in each language, without a translation, which
        occur in no pair. They serve tokenizers and backbones to be pretrained on.
    """

    rows = "sentence pairs"
    title = "demo texts"
    num_pairs: Positive = 24_000
    num_dev: Positive = 1_000
    num_test: Positive = 1_000
    num_monolingual: NotNegative = 0

    def __post_init__(self) -> None:
        least = self.num_dev + self.num_test + 1
        # A further text belongs to a pair of its own, of which one side is used.
        most = NUM_ROWS["pairs"] - 2 * self.num_monolingual
        if not least <= self.num_pairs <= most:
            raise ConfigError(
                f"task.data.num_pairs must be {least}..{most}: at least one more than num_dev and "
                "num_test together, and at most what twice num_monolingual leaves of "
                f"{NUM_ROWS['pairs']}; got {self.num_pairs}"
            )

    @property
    def num_train(self) -> int:
        return self.num_pairs - self.num_dev - self.num_test

    def check_source(self, form: Form) -> None:
        if {*form.languages} != {"es", "en"}:
            got = "got source={!r}, target={!r}".format(*form.languages)
            raise ConfigError(
                f"the demo has es and en only, {got}; set profile=files and task.data.path"
            )

    def find(self, form: Form) -> SplitTables:
        self.check_source(form)
        # Pairs first, so that more further texts change none of them.
        num = self.num_pairs
        extra = self.num_monolingual
        every = pairs(num + 2 * extra)
        # Of the other pairs one half lends its Spanish, the other half its English.
        further = {
            "es": [es for es, _ in every[num : num + extra]],
            "en": [en for _, en in every[num + extra :]],
        }
        made = self.generated(("es", "en"), rows=every[:num], samples=every)
        more = [f"{extra:,} further sentences in each language"] * bool(extra)
        return replace(made, remarks=[*more, *made.remarks], further=further)
