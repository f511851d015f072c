"""Classification and regression of texts or text pairs: data, tokenisation and scoring.

Texts are read by corpus/, labels are defined in answers.py; no networks here.
Shapes: B samples, S positions, special ids included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from xcloud.base.checks import check_choice, check_int
from xcloud.base.errors import ConfigError, DataError
from xcloud.base.project import in_project
from xcloud.contracts.model import Head
from xcloud.contracts.task import Answers, Split
from xcloud.demo_corpus import public_sentences
from xcloud.tasks.answers import Answer, Classes, Score, Value, scores_of
from xcloud.tasks.corpus.demo_labelled import DemoReviews
from xcloud.tasks.corpus.labelled import Kind, Labelled, LabelledCorpus
from xcloud.tasks.corpus.text import SPLITS, Parallel, Rows
from xcloud.tasks.label_scores import MEANINGS
from xcloud.tasks.pair_table import PairTable
from xcloud.tasks.settings import COLUMNS, DEMO, FOLDER, HUB, SAMPLES, Group, settings_of
from xcloud.tasks.sizes import SizedTask, Sizes, check_found, check_sizes
from xcloud.tasks.text_pairs import TextData, TextPairs, check_predictions, counted
from xcloud.tasks.tokenizer import (
    PretrainedTokenizer,
    Tokenizer,
    TokenizerChoice,
    TrainedTokenizer,
)

FIELDS = frozenset({"text", "types", "label"})
MIN_LENGTH = 8  # special ids of a pair and a few tokens of both texts
TOKENIZER_TEXTS, TOKENIZER_SEED = 10_000, 0


@dataclass(frozen=True)
class Classification(SizedTask):
    """A class (kind classes) or a number (kind value) for each text or pair of `corpus`.

    classes: names in label order; None: taken from the training labels.
    metrics: names of scores, main one first; None: the defaults of the kind (scores_of).
    max_length: in tokens, special ids included; longer samples are truncated, longer text first.
    tokenizer: public. A TrainedTokenizer is trained on public_sentences, not on the task's texts,
    because a vocabulary reveals its training text.
    sizes: see sizes.py. cache_dir: for trained tokenizers; relative to the checkout.
    """

    answers: ClassVar[Answers] = "sample"
    corpus: LabelledCorpus
    name: str = "classification"
    kind: Kind = "classes"
    classes: Sequence[str] | None = None
    metrics: Sequence[str] | None = None
    tokenizer: TokenizerChoice = field(default_factory=lambda: PretrainedTokenizer("minilm"))
    max_length: int = 128
    sizes: Sizes = None
    cache_dir: str = ".cache"

    def __post_init__(self) -> None:
        check_int("task.max_length", self.max_length, MIN_LENGTH)
        check_choice("task.kind", self.kind, ("classes", "value"))
        check_sizes(self.sizes)
        _ = self.scores
        if self.classes is None:
            return
        names = self.classes
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"task.classes must be a list of names, got {names!r}")
        if self.kind == "value" or len(set(names)) != len(names) or len(names) < 2:
            raise ConfigError(
                f"task.classes must be at least two different names, and null with "
                f"task.kind=value; got {list(names)}"
            )

    @property
    def scores(self) -> Mapping[str, Score]:
        return scores_of(self.kind, self.metrics)

    def load(self, fields: frozenset[str], seed: int) -> ClassificationData:
        """`seed` is ignored: all seeds train and are scored on the same rows."""
        check_fields(self.name, fields)
        visible = frozenset({"text"} if fields & {"text", "types"} else ()) | (fields & {"label"})
        if not visible and self.sizes is not None:
            unseen = {split: Rows(self.sizes[split], {}) for split in SPLITS}
            corpus = Parallel(self.corpus.describe(), unseen)
        else:
            corpus = self.corpus.read(visible)
        found = {split: corpus.splits[split].num_rows for split in SPLITS}
        check_found(self.sizes, found, self.describe())
        for split, count in found.items():
            if not count:
                raise DataError(f"{self.describe()}: the {split} split has no rows")
        tokenizer = public_tokenizer(self.tokenizer, self.cache_dir) if "text" in visible else None
        answer = self._answer(corpus.splits["train"]) if "label" in visible else None
        return ClassificationData(self, corpus, fields, tokenizer, answer)

    def _answer(self, train: Rows) -> Answer:
        if self.kind == "value":
            return Value()
        if self.classes is not None:
            return Classes(tuple(self.classes))
        return Classes.found_in(train.texts["label"], f"{self.describe()}, train")


def check_fields(name: str, fields: frozenset[str]) -> None:
    """Raise ConfigError if a model reads fields that understanding tasks lack."""
    if unknown := fields - FIELDS:
        raise ConfigError(
            f"the task {name} has the fields text, types and label, but the model reads "
            f"{', '.join(sorted(unknown))}; choose a model for understanding (model=…)"
        )


def public_tokenizer(choice: TokenizerChoice, cache_dir: str) -> Tokenizer:
    """The tokenizer, trained on public sentences if needed."""
    trained = isinstance(choice, TrainedTokenizer)
    texts = public_sentences(TOKENIZER_TEXTS, TOKENIZER_SEED) if trained else ()
    return choice.prepare(texts, in_project(cache_dir))


class ClassificationData(TextData):
    """One rank's view (TaskData)."""

    def __init__(
        self,
        task: Classification,
        corpus: Parallel,
        fields: frozenset[str],
        tokenizer: Tokenizer | None,
        answer: Answer | None,
    ) -> None:
        self._task, self._answer = task, answer
        self._remarks, self._agreed = corpus.remarks, corpus.agreed
        text = None if tokenizer is None else TextPairs(tokenizer, task.max_length)
        tables: dict[Split, PairTable] = {}
        labels: dict[Split, Tensor] = {}
        self._parts: dict[Split, Sequence[str]] = {}
        for split in SPLITS:
            columns = corpus.splits[split].texts
            if text is not None:
                tables[split] = text.table(columns["first"], columns.get("second"))
            if answer is not None:
                where = f"{task.describe()}, {split}"
                labels[split] = answer.parse(columns["label"], where)
            if "part" in columns:
                self._parts[split] = columns["part"]
        rows = {split: corpus.splits[split].num_rows for split in SPLITS}
        super().__init__(fields, rows, text, tables, labels)

    def describe(self) -> str:
        classes = self._task.classes
        named = [f"labels are those of {self._task.name}: {', '.join(classes)}"] if classes else []
        rows = f"{self._task.describe()}: {counted(self._rows)}"
        return ", ".join([rows, *self._remarks, *named])

    def fingerprint(self) -> str:
        task = self._task
        classes = None if task.classes is None else list(task.classes)
        more = {"kind": task.kind, "classes": classes, "metrics": list(task.scores)}
        return task.fingerprint(self._rows, self._agreed, **more)

    @property
    def head(self) -> Head | None:
        return None if self._answer is None else self._answer.head

    def sentences(self, field: str) -> Sequence[Sequence[int]]:
        """First and second texts of the training pairs alike."""
        self._texts(field)
        table = self._tables["train"]
        texts = [table.first(i) for i in range(len(table))]
        if table.seconds is not None:
            texts += [table.second(i) for i in range(len(table))]
        return texts

    def score(self, split: Split, predictions: dict[int, list[int]]) -> dict[str, float]:
        """The task's metrics, in percent, over the samples in `predictions`.

        If the split has parts: the main metric averaged over parts, then every metric of each
        part (accuracy, accuracy_en, accuracy_de …).
        """
        labels, answer = self._known_labels(split)
        check_predictions(predictions, split, len(labels), "sample")
        scores = self._task.scores
        pairs = {i: (float(labels[i]), answer.read(predictions[i])) for i in sorted(predictions)}
        if split not in self._parts:
            return _scored(scores, list(pairs.values()))
        by_part: dict[str, list[tuple[float, float]]] = {}
        for ident, pair in pairs.items():
            by_part.setdefault(self._parts[split][ident], []).append(pair)
        values = {part: _scored(scores, found) for part, found in by_part.items()}
        main = next(iter(scores))
        mean = sum(found[main] for found in values.values()) / len(values)
        return {main: round(mean, 4)} | {
            f"{name}_{part}": found[name] for name in scores for part, found in values.items()
        }

    def signature(self) -> dict[str, str]:
        names = list(self._task.scores)
        said = {name: MEANINGS[name] for name in names}
        if self._parts:
            parts = dict.fromkeys(self._parts["test"])
            said |= {f"{name}_{part}": MEANINGS[name] for name in names for part in parts}
            said[names[0]] = f"mean over {', '.join(parts)} of: {MEANINGS[names[0]]}"
        return said

    def sample_outputs(self, split: Split, predictions: dict[int, list[int]], count: int) -> str:
        labels, answer = self._known_labels(split)
        lines = []
        for ident in sorted(predictions)[:count]:
            if self.text is None or "text" not in self._fields:
                lines.append(f"sample  {ident} of {split}; its text is not visible in this cloud")
            else:
                table, decode = self._tables[split], self.text.tokenizer.decode
                lines.append(f"text    {decode(table.first(ident))}")
                if table.seconds is not None:
                    lines.append(f"        {decode(table.second(ident))}")
            lines.append(f"label   {answer.show(float(labels[ident]))}")
            lines.append(f"output  {answer.show(answer.read(predictions[ident]))}\n")
        return "\n".join(lines)

    def save_tokenizers(self, folder: Path) -> None:
        """Write text_tokenizer.json if text is visible, labels.json if labels are."""
        super().save_tokenizers(folder)
        if self._answer is not None:
            names = self._answer.names if isinstance(self._answer, Classes) else None
            content = {"kind": self._task.kind, "classes": names}
            path = folder / "labels.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")

    def _known_labels(self, split: Split) -> tuple[Tensor, Answer]:
        if self._answer is None:
            raise DataError("labels are not visible here, so nothing can be scored")
        return self._labels[split], self._answer


def _scored(scores: Mapping[str, Score], pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    right, predicted = [a for a, _ in pairs], [b for _, b in pairs]
    return {name: round(score(right, predicted), 4) for name, score in scores.items()}


OWN = Group(Classification, ("corpus", "name"))


@settings_of(DEMO, OWN, max_length=64)
def classification_from_demo(**settings: Any) -> Classification:
    """The embedded film reviews."""
    if (kind := settings.get("kind", "classes")) != "classes":
        raise ConfigError(
            f"task.kind={kind}: the demo has only classes; set profile=files for values"
        )
    return OWN.make(settings, corpus=DemoReviews(DEMO.make(settings)))


@settings_of(FOLDER, COLUMNS, SAMPLES, OWN)
def classification_from_files(**settings: Any) -> Classification:
    """Your own labelled texts in the folder `path`."""
    return OWN.make(settings, corpus=_labelled(FOLDER, settings))


@settings_of(HUB, COLUMNS, SAMPLES, OWN)
def classification_from_hub(**settings: Any) -> Classification:
    """A labelled data set from the hub, or a folder in the same format."""
    return OWN.make(settings, corpus=_labelled(HUB, settings))


def _labelled(source: Group[Any], settings: Mapping[str, Any]) -> Labelled:
    sampling = SAMPLES.make(settings)
    return Labelled(source.make(settings), COLUMNS.make(settings), sampling)
