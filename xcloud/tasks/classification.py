"""Classification and regression of texts or text pairs: columns, tokenisation and scoring.

Rows come from a source (corpus/), labels are defined in labels.py; no networks here.
Rows (corpus/rows.py) have the columns "first" and possibly "second" if text is visible, "label" if
labels are visible, and "part" (the name of a row's set) in splits made of several sets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.settings import settings
from xcloud.contracts.task import SPLITS, Answers, Scores, Split
from xcloud.tasks.corpus.demo import DemoByLanguage, DemoLabelled
from xcloud.tasks.corpus.folder import Folder, FolderByLanguage, Languages
from xcloud.tasks.corpus.hub import Hub, HubByLanguage
from xcloud.tasks.corpus.rows import Corpus, Form, OwnNames, Rows, SplitTables, Text, read
from xcloud.tasks.labels import (
    CROSS_LINGUAL,
    GLUE,
    KEYS,
    Benchmark,
    Labels,
    chosen_columns,
)
from xcloud.tasks.public_text import public_tokenizer
from xcloud.tasks.scores import MEANINGS, Kind, label_scores, metrics_of
from xcloud.tasks.tables import PairTable
from xcloud.tasks.text_task import TextData, TextTask, pair_table
from xcloud.tasks.tokenizer import PretrainedTokenizer, Tokenizer, TokenizerChoice


@settings("task", kw_only=True)
class Classification(TextTask):
    """A class (kind classes) or a number (kind value) for each text or pair.

    name: "classification" for texts of your own, or a benchmark, which has classes and scores.
    classes: names in label order; None: taken from the training labels.
    metrics: names of scores, main one first; None: the defaults of the kind (metrics_of).
    text_columns, label_column: None: by usual names.
    Longer samples than max_length are truncated, the longer text first.
    """

    answers: ClassVar[Answers] = "sample"
    form: ClassVar[Form] = Form("train.tsv (first line: column names) or train.jsonl")
    name: str = "classification"
    kind: Kind = "classes"
    classes: Annotated[Sequence[str], Field(min_length=2)] | None = None
    metrics: Annotated[Sequence[str], Field(min_length=1)] | None = None
    text_columns: Annotated[Sequence[Text], Field(min_length=1, max_length=2)] | None = None
    label_column: Text | None = None
    tokenizer: TokenizerChoice = PretrainedTokenizer("minilm")
    # The least: special ids of a pair and a few tokens of both texts.
    max_length: Annotated[int, Field(ge=8)] = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        own = (self.kind, self.classes, self.metrics)
        if self.name not in ("classification", *self.benchmarks):
            raise ConfigError(
                f"task.name must be one of {', '.join(self.benchmarks)}, got {self.name!r}"
            )
        if self.name in self.benchmarks and own != ("classes", None, None):
            raise ConfigError(
                f"task.kind, task.classes and task.metrics follow from task.name={self.name}"
            )
        names = self.classes
        if names is not None and (self.kind == "value" or len(set(names)) != len(names)):
            raise ConfigError(
                "task.classes must be at least two different names, and null with "
                f"task.kind=value; got {list(names)}"
            )
        _ = self.scores
        given, allowed = self.text_columns, self.known.num_texts
        if given is not None and len(given) not in allowed:
            raise ConfigError(
                f"task.text_columns must name {' or '.join(map(str, allowed))} columns here, got "
                f"{list(given)}"
            )

    @property
    def benchmarks(self) -> Mapping[str, Benchmark]:
        """Those whose rows this source can give, by name."""
        return GLUE

    @property
    def known(self) -> Benchmark:
        own = Benchmark(self.classes, self.metrics, (1, 2), kind=self.kind)
        return self.benchmarks.get(self.name, own)

    @property
    def scores(self) -> Sequence[str]:
        """Names, main one first."""
        return metrics_of(self.known.kind, self.known.metrics)

    def check_tables(self, tables: SplitTables) -> None:
        self._usable(tables)

    def _usable(self, tables: SplitTables) -> tuple[SplitTables, dict[str, str]]:
        """Without an unlabelled test set, unless it was asked for, and the columns of train."""
        splits = dict(tables.tables)
        train = splits["train"][""][0]
        columns = chosen_columns(train, self.text_columns or (), self.label_column, self.known)
        test = [table for joined in splits.get("test", {}).values() for table in joined]
        if hidden := [table for table in test if columns["label"] not in table.columns()]:
            if tables.test_key is not None:
                raise DataError(
                    f"{hidden[0].where}: no column {columns['label']}, so it cannot be scored; "
                    f"choose another {tables.test_key}"
                )
            del splits["test"]  # its labels are not public, as in GLUE
        if splits.get("dev") == splits.get("test"):
            splits.pop("dev", None)  # task.test=validation: dev is then held out of train
        return replace(tables, tables=splits), columns

    def read(self, visible: frozenset[str]) -> Corpus:
        """visible: a subset of {"text", "label"}; nothing else is kept. Raises DataError."""
        tables, columns = self._usable(self.find(self.form))
        hidden = {"first", "second"} if "text" not in visible else set[str]()
        hidden |= {"label"} - visible
        wanted = {name: column for name, column in columns.items() if name not in hidden}
        *texts, label = columns.values()
        described = f"{' + '.join(texts)} → {label}"
        corpus = self.arrange(tables, lambda table: read(table, wanted, KEYS), dev_as_test=True)
        chosen = self.facts(columns=described)
        remarks = [f"columns {described}"] if chosen else []
        return replace(
            corpus, remarks=[*remarks, *corpus.remarks], agreed={**corpus.agreed, **chosen}
        )

    def load(self, fields: frozenset[str], seed: int) -> ClassificationData:
        """`seed` is ignored: all seeds train and are scored on the same rows."""
        self.check_fields(fields)
        visible = frozenset({"text"} if fields & {"text", "types"} else ()) | (fields & {"label"})
        if not visible and self.sizes is not None:
            corpus = Corpus.unseen(self.sizes)
        else:
            corpus = self.read(visible)
            self.check_rows(corpus.counts)
        tokenizer = public_tokenizer(self.tokenizer, self.cache_dir) if "text" in visible else None
        labels = self._labels(corpus.splits["train"]) if "label" in visible else None
        return ClassificationData(self, corpus, fields, tokenizer, labels)

    def agreed_settings(self) -> dict[str, object]:
        classes = None if self.known.classes is None else list(self.known.classes)
        more = {"kind": self.known.kind, "classes": classes, "metrics": list(self.scores)}
        return {**super().agreed_settings(), **more}

    def _labels(self, train: Rows) -> Labels:
        if self.known.kind == "classes" and self.known.classes is None:
            return Labels.of_cells(train.texts["label"], f"{self.describe()}, train")
        return Labels(None if self.known.classes is None else tuple(self.known.classes))


class ClassificationData(TextData[Classification]):
    """One rank's view (TaskData)."""

    def __init__(
        self,
        task: Classification,
        corpus: Corpus,
        fields: frozenset[str],
        tokenizer: Tokenizer | None,
        label: Labels | None,
    ) -> None:
        self._label = label
        self.head = None if label is None else label.head
        tables: dict[Split, PairTable] = {}
        labels: dict[Split, Tensor] = {}
        self._parts: dict[Split, Sequence[str]] = {}
        for split in SPLITS:
            columns = corpus.splits[split].texts
            if tokenizer is not None:
                texts = (columns["first"], columns.get("second"))
                tables[split] = pair_table(tokenizer, task.max_length, *texts)
            if label is not None:
                labels[split] = label.parse(columns["label"], f"{task.describe()}, {split}")
            if "part" in columns:
                self._parts[split] = columns["part"]
        super().__init__(task, corpus, corpus.counts, fields, tokenizer, tables, labels)

    def describe(self) -> str:
        names = self._task.known.classes
        named = f", labels are those of {self._task.name}: {', '.join(names)}" if names else ""
        return super().describe() + named

    def sentences(self, field: str) -> Sequence[Sequence[int]]:
        """First and second texts of the training pairs alike."""
        self.check_visible(field, "text field")
        table = self._tables["train"]
        samples = [table.texts(i) for i in range(self._rows["train"])]
        return [texts[place] for place in range(2) for texts in samples if place < len(texts)]

    def score(self, split: Split, predictions: dict[int, list[int]]) -> Scores:
        """The task's metrics, in percent, over the samples in `predictions`.

        If the split has parts: the main metric averaged over parts, then every metric of each
        part (accuracy, accuracy_en, accuracy_de …). Parts may be the same samples in several
        languages, so the error of the mean is over rows that are drawn in all parts alike.
        """
        self.check_predictions(split, predictions)
        labels, label = self._labels[split], self._label
        assert label is not None  # as check_predictions has found
        pairs = {i: (float(labels[i]), label.read(predictions[i])) for i in sorted(predictions)}
        parts = self._parts.get(split)
        samples: dict[int, dict[str, object]] = {}
        by_part: dict[str, list[tuple[float, float]]] = {}
        for i, (right, said) in pairs.items():
            texts = {"prediction": label.show(said), "label": label.show(right)}
            samples[i] = {**texts, "correct": right == said}
            if parts is not None:
                samples[i]["part"] = parts[i]
            by_part.setdefault("" if parts is None else parts[i], []).append((right, said))
        values, errors = label_scores(self._task.scores, by_part)
        return Scores(values, errors, samples)

    def signature(self) -> dict[str, str]:
        names, there = self._task.scores, MEANINGS[self._task.known.kind]
        meanings = {name: there[name] for name in names}
        if self._parts:
            parts = dict.fromkeys(self._parts["test"])
            meanings |= {f"{name}_{part}": there[name] for name in names for part in parts}
            meanings[names[0]] = f"mean over {', '.join(parts)} of: {there[names[0]]}"
        return meanings

    def sample_outputs(self, split: Split, predictions: dict[int, list[int]], count: int) -> str:
        labels, label, lines = self._labels[split], self._label, []
        assert label is not None
        for ident in sorted(predictions)[:count]:
            if self._tokenizer is None:
                lines.append(f"sample  {ident} of {split}; its text is not visible in this cloud")
            else:
                texts = map(self._tokenizer.decode, self._tables[split].texts(ident))
                lines += [
                    f"{head:8}{text}" for head, text in zip(("text", ""), texts, strict=False)
                ]
            lines.append(f"label   {label.show(float(labels[ident]))}")
            lines.append(f"output  {label.show(label.read(predictions[ident]))}\n")
        return "\n".join(lines)

    def save_tokenizers(self, folder: Path) -> None:
        """Write text_tokenizer.json if text is visible, labels.json if labels are."""
        super().save_tokenizers(folder)
        if self._label is not None:
            content = {"kind": self._task.known.kind, "classes": self._label.names}
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(content, ensure_ascii=False) + "\n"
            (folder / "labels.json").write_text(text, encoding="utf-8")


@settings("task", kw_only=True)
class FolderClassification(Folder, Classification):
    """Your own labelled texts, or a benchmark of GLUE, in the folder `path`."""

    @property
    def own_names(self) -> OwnNames:
        return self.known.files


@settings("task", kw_only=True)
class HubClassification(Hub, Classification):
    """A labelled data set from the hub, or a folder in the same format. A benchmark's dev set
    becomes its test set, and dev is held out of train."""

    @property
    def data_set(self) -> str | None:
        return self.name if self.config is None and self.hides_test else self.config

    @property
    def own_names(self) -> OwnNames:
        return self.known.hub_splits

    @property
    def hides_test(self) -> bool:
        return self.name in self.benchmarks


@settings("task", kw_only=True)
class DemoClassification(DemoLabelled, Classification):
    """Embedded film reviews, also for sst2; for qnli questions with sentences."""

    @property
    def pairs(self) -> bool:
        return self.name == "qnli"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name not in ("classification", "sst2", "qnli"):
            raise ConfigError(
                f"task.name={self.name}: the demo has sst2 and qnli only; for {self.name} use "
                "profile=files with task.path=DIR, or profile=paper"
            )


@settings("task", kw_only=True)
class CrossLingual(Classification):
    """Text pairs trained in one language and tested in others: XNLI and PAWS-X. Scores: mean
    accuracy over the tested languages, then accuracy per language."""

    name: str = "xnli"

    @property
    def benchmarks(self) -> Mapping[str, Benchmark]:
        return CROSS_LINGUAL


@settings("task", kw_only=True)
class FolderCrossLingual(FolderByLanguage, CrossLingual):
    """The task from files in the folder `path`."""


@settings("task", kw_only=True)
class HubCrossLingual(HubByLanguage, CrossLingual):
    """The task from the hub. path, languages: null: the benchmark's own."""

    path: Text | None = None  # type: ignore[assignment]
    languages: Languages | None = None

    @property
    def where(self) -> str:
        return self.path or self.known.hub

    @property
    def tested(self) -> Sequence[str]:
        return self.languages or self.known.languages


@settings("task", kw_only=True)
class DemoCrossLingual(DemoByLanguage, CrossLingual):
    """Embedded inference pairs in English and Spanish; num_test pairs in each language."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name != "xnli":
            raise ConfigError(f"task.name={self.name}: the demo has xnli only; use profile=files")
