"""Classification and regression of texts or text pairs: columns, tokenisation and scoring.

Rows (rows.py) have the columns "first" and possibly "second" if text is visible, "label" if
labels are (labels.py), and "part" (the name of a row's set) in splits made of several sets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.settings import settings
from xcloud.base.wording import listed
from xcloud.contracts.model import SPLITS, Answers, DataSplit, Scores
from xcloud.demo import answers, inferences, reviews
from xcloud.tasks.labels import (
    CROSS_LINGUAL,
    ENTAILMENT,
    GLUE,
    KEYS,
    Benchmark,
    LabelSet,
    check_are_there,
)
from xcloud.tasks.rows import (
    DEV_NAMES,
    Corpus,
    Demo,
    Form,
    GivenText,
    Rows,
    RowTable,
    Size,
    SplitTables,
    Tables,
    name_of,
    read,
)
from xcloud.tasks.scores import MEANINGS, LabelKind, label_scores
from xcloud.tasks.sources import (
    HubTable,
    InFolder,
    OnHub,
    TextFile,
    list_files,
    load_hub,
    local_folder,
    said_of_commit,
)
from xcloud.tasks.text_task import PairTable, TextTask, View, cuts_of, public_tokenizer
from xcloud.tasks.tokenizer import PretrainedTokenizer, TokenizerChoice

Language = Annotated[str, Field(pattern="^[a-z]{2,3}$")]


@settings("task", kw_only=True)
class Classification(TextTask):
    """A class or a number for each text or pair. Samples longer than max_length are truncated, the
    longer text first.

    kind: the kind of label. classes = a class of each sample; value = a number.
    name: "classification" for texts of your own, or a benchmark, which has classes and scores.
    classes: the names of classes in label order; None: taken from the training labels.
    metrics: the names of scores, main one first; None: the defaults of the kind (`scores`).
    text_columns, label_column: the names of columns; None: the usual ones.
    tokenizer: a public tokenizer, the same in every cloud that reads text.
    """

    answers: ClassVar[Answers] = "sample"
    benchmarks: ClassVar[Mapping[str, Benchmark]] = GLUE
    name: str = "classification"
    kind: LabelKind = "classes"
    classes: Annotated[Sequence[str], Field(min_length=2)] | None = None
    metrics: Annotated[Sequence[str], Field(min_length=1)] | None = None
    text_columns: Annotated[Sequence[GivenText], Field(min_length=1, max_length=2)] | None = None
    label_column: GivenText | None = None
    tokenizer: TokenizerChoice = PretrainedTokenizer("minilm")
    # The least: special ids of a pair and a few tokens of both texts.
    max_length: Annotated[int, Field(ge=8)] = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        # Classes and scores of a benchmark are part of its name, so what is reported under it can
        # be compared.
        own = (self.kind, self.classes, self.metrics)
        if self.name not in ("classification", *self.benchmarks):
            names = ", ".join(self.benchmarks)
            raise ConfigError(f"task.name must be one of {names} in this profile; got {self.name}")
        if self.name in self.benchmarks and own != ("classes", None, None):
            said = "task.kind, task.classes and task.metrics follow from"
            raise ConfigError(f"{said} task.name={self.name}")
        given = self.classes
        if given is not None and (self.kind == "value" or len(set(given)) != len(given)):
            said = "at least two different names, and null with task.kind=value"
            raise ConfigError(f"task.classes must be {said}; got {list(given)}")
        # Read for its check: a score that the kind of label has not is refused here.
        _ = self.scores
        texts = self.text_columns
        allowed = " or ".join(map(str, self.known.num_texts))
        if texts is not None and len(texts) not in self.known.num_texts:
            raise ConfigError(f"task.text_columns must name {allowed} columns, got {list(texts)}")

    @property
    def known(self) -> Benchmark:
        own = Benchmark(
            classes=self.classes, metrics=self.metrics, num_texts=(1, 2), kind=self.kind
        )
        return self.benchmarks.get(self.name, own)

    @property
    def form(self) -> Form:
        is_known = self.name in self.benchmarks
        return Form(
            "train.tsv (first line: column names) or train.jsonl",
            rows="labelled texts",
            name=self.name,
            files=self.known.files,
            splits=self.known.hub_splits,
            config=self.name if is_known else None,
            hides_test=is_known,
        )

    @property
    def scores(self) -> Sequence[str]:
        """The names of the scores: those that are given, or accuracy for classes and both
        correlations for values."""
        kind = self.known.kind
        names = self.known.metrics
        there = MEANINGS[kind]
        if unknown := [name for name in names or () if name not in there]:
            said = f"{unknown[0]!r} is not a score for {kind}; choose from {', '.join(there)}"
            raise ConfigError(f"task.metrics: {said}")
        return names or (("accuracy",) if kind == "classes" else tuple(there))

    def check_tables(self, tables: SplitTables) -> None:
        """Raise DataError if the tables cannot be used. Reads the labels, too: what is wrong with
        one is said before any rank starts."""
        self.labels_of(self._read(tables, fields=frozenset({"label"})))

    def _usable(self, tables: SplitTables) -> tuple[SplitTables, dict[str, str]]:
        """Return the tables without an unlabelled test set, unless it was asked for, and the
        columns of train."""
        # Columns follow from train alone, so that a test set with other columns can't change what
        # is learned.
        splits = dict(tables.tables)
        remarks = [*tables.remarks]
        train = splits["train"][""][0]
        columns = self.known.columns(train, texts=self.text_columns or (), label=self.label_column)
        test = [table for joined in splits.get("test", {}).values() for table in joined]
        if hidden := [table for table in test if columns["label"] not in table.columns()]:
            if tables.test_key is not None:
                said = f"no column {columns['label']}, so it cannot be scored"
                raise DataError(f"{hidden[0].where}: {said}; choose another {tables.test_key}")
            del splits["test"]  # its labels are not public, as in GLUE
            remarks.append(f"{name_of(hidden[0])} has no column {columns['label']}: not used")
        return replace(tables, tables=splits, remarks=remarks), columns

    def read(self, fields: frozenset[str]) -> Corpus:
        return self._read(self.data.find(self.form), fields=fields)

    def _read(self, found: SplitTables, fields: frozenset[str]) -> Corpus:
        tables, columns = self._usable(found)
        # A rank without text still reads labels of its own, and one without labels counts rows by
        # its texts.
        hidden = set[str]() if fields & {"text", "types"} else {"first", "second"}
        hidden |= {"label"} - fields
        wanted = {name: column for name, column in columns.items() if name not in hidden}

        def rows_of(table: RowTable) -> Rows:
            # The same check for every table, also of a part: a label that is missing can be
            # neither learned nor scored.
            rows = read(table, wanted=wanted, keys=KEYS)
            check_are_there(rows.texts.get("label", ()), known=self.known, where=table.where)
            return rows

        corpus = self.arrange(
            tables, rows_of=rows_of, used=lambda table: columns.values(), dev_as_test=True
        )
        # Columns of the demo texts were chosen by nobody, so they are no news.
        if not self.data.names_columns:
            return corpus
        # Agreed: two clouds that read different columns of the same file would train on other
        # texts.
        *texts, label = columns.values()
        described = f"{' + '.join(texts)} → {label}"
        remarks = [f"columns {described}", *corpus.remarks]
        return replace(corpus, remarks=remarks, agreed={**corpus.agreed, "columns": described})

    def labels_of(self, corpus: Corpus) -> tuple[LabelSet, dict[DataSplit, Tensor]]:
        """Return what the labels of a corpus mean, and those of each split. Raises DataError."""
        # Labels of all splits together say what they mean, but the classes are those of train
        # alone.
        cells = {split: corpus.splits[split].texts["label"] for split in SPLITS}
        where = self.describe()
        labels = LabelSet.of(self.known, cells, corpus.train_set.texts["label"], where)
        return labels, {s: labels.parse(of, where=f"{where}, {s}") for s, of in cells.items()}

    def view(self, corpus: Corpus, fields: frozenset[str]) -> ClassificationData:
        return ClassificationData(task=self, corpus=corpus, fields=fields)

    def agreed_settings(self) -> dict[str, object]:
        classes = list(self.known.classes) if self.known.classes is not None else None
        more = {"kind": self.known.kind, "classes": classes, "metrics": list(self.scores)}
        return {**super().agreed_settings(), **more}


def _contradicting(cells: Mapping[DataSplit, Mapping[str, Sequence[str]]]) -> Iterator[str]:
    """Yield a remark for each split in which a text stands with different labels."""
    # Only a rank that sees texts and labels can tell; the others have no column of texts here.
    for split, of in cells.items():
        texts = [*zip(*(of[name] for name in ("first", "second") if name in of), strict=True)]
        labels: dict[tuple[str, ...], set[str]] = {}
        for text, label in zip(texts, of["label"], strict=False):
            labels.setdefault(text, set()).add(label)
        if num := sum(len(labels[text]) > 1 for text in texts):
            yield f"{split}: {num:,} of {len(texts):,} texts are also there with another label"


class ClassificationData(View[Classification]):
    """One rank's view (TaskData)."""

    def __init__(self, task: Classification, corpus: Corpus, fields: frozenset[str]) -> None:
        cells = {split: corpus.splits[split].texts for split in SPLITS}
        self._parts = {split: of["part"] for split, of in cells.items() if "part" in of}
        self._pairs: dict[DataSplit, PairTable] = {}
        self._label: LabelSet | None = None
        columns: dict[str, dict[DataSplit, Any]] = {}
        tokenizers = {}
        remarks: list[str] = []
        # Types are made of where a pair's texts end, so whoever sees them needs the texts' tokens.
        if fields & {"text", "types"}:
            tokenizers["text"] = tokenizer = public_tokenizer(
                task.tokenizer, cache_dir=task.cache_dir
            )
            for split, of in cells.items():
                sides = [of[name] for name in ("first", "second") if name in of]
                self._pairs[split] = PairTable.encoded(tokenizer, sides, most=task.max_length)
            columns["text"] = {split: pairs.tokens for split, pairs in self._pairs.items()}
            columns["types"] = {split: pairs.types() for split, pairs in self._pairs.items()}
        if "label" in fields:
            label, columns["label"] = task.labels_of(corpus)
            self._label = label
            self.head = label.head
            # Two people may well give a pair of sentences two similarities.
            if task.known.kind != "value":
                remarks += _contradicting(cells)
            remarks += [
                f"{split} labels ({label.describe(of)})" for split, of in columns["label"].items()
            ]
        cuts = {"texts cut": cuts_of(columns["text"])} if "text" in fields else {}
        super().__init__(task, corpus, fields, tokenizers, columns, remarks=remarks, cuts=cuts)

    def sentences(self, field: str) -> Sequence[Sequence[int]]:
        """Return first and second texts of the training pairs alike."""
        self.tokenizer(field)
        # All first texts, then all second ones: a basis or a start is made of both alike.
        samples = [self._pairs["train"].texts(i) for i in range(self._rows["train"])]
        return [texts[place] for place in range(2) for texts in samples if place < len(texts)]

    def score(self, split: DataSplit, predictions: dict[int, list[int]]) -> Scores:
        """Return the task's metrics, in percent, over the samples in `predictions`. If the split
        has parts: the main metric averaged over parts, then every metric of each part (accuracy,
        accuracy_en, accuracy_de …). Parts may be the same samples in several languages, so the
        error of the mean is over rows that are drawn in all parts alike."""
        self.check_predictions(split, predictions)
        label = self._label
        labels = self._columns["label"][split]
        parts = self._parts.get(split)
        assert label is not None and isinstance(labels, Tensor)
        samples: dict[int, dict[str, object]] = {}
        by_part: dict[str, list[tuple[float, float]]] = {}
        # Sorted, so that row i of every part is the same sample in all of them (label_scores).
        for i in sorted(predictions):
            right = float(labels[i])
            said = label.read(predictions[i])
            texts = {"prediction": label.show(said), "label": label.show(right)}
            samples[i] = {**texts, "correct": right == said}
            if parts is not None:
                samples[i]["part"] = parts[i]
            by_part.setdefault("" if parts is None else parts[i], []).append((right, said))
        values, errors = label_scores(self._task.scores, parts=by_part)
        return Scores(values, errors, samples)

    def signature(self) -> dict[str, str]:
        names = self._task.scores
        there = MEANINGS[self._task.known.kind]
        meanings = {name: there[name] for name in names}
        if self._parts:
            parts = dict.fromkeys(self._parts["test"])
            meanings |= {f"{name}_{part}": there[name] for name in names for part in parts}
            meanings[names[0]] = f"mean over {', '.join(parts)} of: {there[names[0]]}"
        return meanings

    def shown(self, split: DataSplit, ident: int) -> Mapping[str, str]:
        if "text" not in self._tokenizers:
            return {}
        texts = map(self._tokenizers["text"].decode, self._pairs[split].texts(ident))
        return dict(zip(("first", "second"), texts, strict=False))

    def save_tokenizers(self, folder: Path) -> None:
        """Write text_tokenizer.json if text is visible, labels.json if labels are."""
        super().save_tokenizers(folder)
        if self._label is not None:
            # What an index means is nowhere else: weights know numbers only.
            content = {"kind": self._task.known.kind, "classes": self._label.names}
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(content, ensure_ascii=False) + "\n"
            (folder / "labels.json").write_text(text, encoding="utf-8")


@settings("task", kw_only=True)
class CrossLingual(Classification):
    """Text pairs trained in one language and tested in others: XNLI and PAWS-X. Scores: mean
    accuracy over the tested languages, then accuracy per language.

    train_language: the language of train and dev.
    languages: the tested languages; None: all that there are.
    """

    benchmarks: ClassVar[Mapping[str, Benchmark]] = CROSS_LINGUAL
    name: str = "xnli"
    train_language: Language = "en"
    languages: Annotated[Sequence[Language], Field(min_length=1)] | None = None

    @property
    def form(self) -> Form:
        here = self.train_language
        return Form(
            f"train.{here}.tsv and test.{here}.tsv, test.de.tsv, …",
            rows="labelled texts by language",
            name=self.name,
            hub=self.known.hub,
            train_language=here,
            test_languages=self.languages or (),
        )


@settings("task.data", kw_only=True)
class LanguageFolder(InFolder):
    """Your own pairs in several languages, or XNLI or PAWS-X: a folder with train.en.tsv (or
    train.tsv), dev.en.tsv, test.de.tsv, …, or as .jsonl. Without a training file, the dev file of
    task.train_language is used and a remark says so."""

    rows = "labelled texts by language"

    def find(self, form: Form) -> SplitTables:
        where = self.where(form)
        here = form.train_language
        files = dict[str, TextFile]()
        for file in list_files(Path(where), form):
            # train.en.tsv and train.en.jsonl have one name and could both be meant.
            if (other := files.setdefault(file.name, file)) is not file:
                both = f"{name_of(other)} and {name_of(file)}"
                raise DataError(f"{where}: {both} are both {file.name}; remove one")
        found = f"found: {listed(map(name_of, files.values()))}"
        tested = [name[5:] for name in files if re.fullmatch(r"test\.[a-z]{2,3}", name)]
        # The training language first: its scores head the table.
        tested.sort(key=lambda language: (language != here, language))
        wanted = list(form.test_languages) or tested or ["LANGUAGE"]
        if missing := [language for language in wanted if language not in tested]:
            said = f"no test.{missing[0]}.tsv (or .jsonl) for task.languages"
            raise DataError(f"{where}: {said}; {found}")
        # In this order: the training set's own name, one without a language, and dev where neither
        # is there.
        trained = [name for name in (f"train.{here}", "train") if name in files][:1]
        dev = [name for name in (f"{one}.{here}" for one in DEV_NAMES) if name in files][:1]
        if not (names := [*trained, *dev]):
            said = f"no train.{here}.tsv and no dev.{here}.tsv to train on (task.train_language)"
            raise DataError(f"{where}: {said}; {found}")
        remark = f"no training file: {name_of(files[names[0]])} is the training set"
        # zip ends with the shorter one: a single file is the training set, and dev is held out of
        # it.
        tables: Tables = {s: {"": [files[name]]} for s, name in zip(SPLITS, names, strict=False)}
        tables["test"] = {language: [files[f"test.{language}"]] for language in wanted}
        return SplitTables(
            tables,
            facts={"train": names, "languages": wanted},
            remarks=[*([] if trained else [remark]), *self.say_unread(tables, form)],
            test_key="task.languages",
        )


@settings("task.data", kw_only=True)
class LanguageHub(OnHub):
    """A data set of the hub with one config per language, such as facebook/xnli: train and
    validation of task.train_language, test of every language.

    dataset: the data set; null: that of the benchmark.
    """

    rows = "labelled texts by language"

    def check(self, form: Form) -> None:
        super().check(form)
        # One folder has one configuration, and here each language is one.
        if local_folder(self.where(form)):
            said = "is a folder, but this profile reads the hub; use profile=files for a folder"
            raise ConfigError(f"task.data.dataset={self.where(form)} {said}")

    def data_set(self, form: Form) -> str:
        return form.train_language

    def find(self, form: Form) -> SplitTables:
        where = self.where(form)

        def table(language: str, split: str) -> list[HubTable]:
            loaded = load_hub(where, config=language, revision=self.revision, split=split)
            return [HubTable(dataset=loaded, where=f"{where} {language}, split {split}")]

        here = form.train_language
        tested = list(form.test_languages or CROSS_LINGUAL[form.name].languages)
        train = table(here, "train")
        tables: Tables = {
            "train": {"": train},
            "dev": {"": table(here, "validation")},
            "test": {language: table(language, "test") for language in tested},
        }
        facts = {"revision": self.revision, "languages": tested}
        remarks = said_of_commit(where, train)
        return SplitTables(tables, facts, remarks, test_key="task.languages")


@settings("task.data", kw_only=True)
class DemoReviews(Demo):
    """Film reviews (label 1 is positive, 0 negative), also for sst2; for qnli questions with
    sentences (entailment if the sentence answers the question).

    num_train, num_dev, num_test: the number of rows of each split.
    """

    rows = "labelled texts"
    num_train: Size = 8_000
    num_dev: Size = 500
    num_test: Size = 1_000

    def check(self, form: Form) -> None:
        super().check(form)
        if form.name in GLUE and form.name not in ("sst2", "qnli"):
            raise ConfigError(
                f"task.name must be one of sst2, qnli in this profile; got {form.name}"
            )

    def source_name(self, form: Form) -> str:
        return "demo questions and sentences" if form.name == "qnli" else "demo film reviews"

    def find(self, form: Form) -> SplitTables:
        if form.name != "qnli":
            liked = reviews(self.total)
            rows = [(text, str(int(positive))) for text, positive in liked]
            return self.generated(("sentence", "label"), rows, samples=liked)
        # Questions and sentences are drawn anew, as reviews have none.
        asked = answers(self.total)
        labelled = [(*texts, ENTAILMENT[0 if yes else 1]) for *texts, yes in asked]
        # The classes of QNLI in the order of its labels.
        return self.generated(("question", "sentence", "label"), rows=labelled, samples=asked)


@settings("task.data", kw_only=True)
class DemoInference(Demo):
    """Premise and hypothesis in English and Spanish: trained in one, tested in both.

    num_train, num_dev: the number of pairs of each split.
    num_test: the number of pairs of the test set in each language.
    """

    rows = "labelled texts by language"
    title = "demo inference"
    num_train: Size = 8_000
    num_dev: Size = 500
    num_test: Size = 1_000

    def check(self, form: Form) -> None:
        super().check(form)
        asked = {
            "name": (form.name, ("xnli",)),
            "train_language": (form.train_language, ("en", "es")),
            # Keys as the user set them, to be named in the error.
            **{f"languages[{n}]": (x, ("en", "es")) for n, x in enumerate(form.test_languages)},
        }
        for key, (value, there) in asked.items():
            if value not in there:
                raise ConfigError(
                    f"task.{key} must be one of {', '.join(there)} in this profile; got {value!r}"
                )

    def find(self, form: Form) -> SplitTables:
        pairs = inferences(self.total)
        here = form.train_language
        names = ("premise", "hypothesis", "label")
        made = {
            x: self.generated(
                names, rows=[(*texts[x], relation) for texts, relation in pairs], samples=pairs
            )
            # Every language has the same rows, so train of one and test of the other share none.
            for x in (here, "es" if here == "en" else "en")
        }
        test = {x: made[x].tables["test"][""] for x in form.test_languages or made}
        return replace(made[here], tables={**made[here].tables, "test": test})
