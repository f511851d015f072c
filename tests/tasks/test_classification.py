"""Classification and regression: what each cloud sees, batches, scores, what is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.corpora import given
from tests.small_tokenizer import SmallTokenizer, small_tokenizer
from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.model import Head, Task, TaskData
from xcloud.tasks.classification import (
    Classification,
    ClassificationData,
    CrossLingual,
    DemoInference,
    DemoReviews,
    LanguageFolder,
)
from xcloud.tasks.labels import CROSS_LINGUAL, GLUE
from xcloud.tasks.sources import Folder
from xcloud.tasks.text_task import PairTable
from xcloud.tasks.tokenizer import Tokenizer, TrainedTokenizer

ALL = frozenset({"text", "types", "label"})
TEXT, LABEL, NONE = frozenset({"text", "types"}), frozenset({"label"}), frozenset[str]()


@pytest.fixture(scope="module")
def task() -> Classification:
    return given(Classification, DemoReviews, 
        name="qnli", num_train=60, num_dev=10, num_test=20, tokenizer=SmallTokenizer(),
        max_length=24,
    )  # fmt: skip


@pytest.fixture(scope="module")
def data(task: Classification) -> ClassificationData:
    return task.load(ALL, seed=1)


def test_it_is_a_task(task: Classification, data: ClassificationData) -> None:
    as_task: Task = task
    as_data: TaskData = data
    assert as_task.describe() == "qnli (demo questions and sentences)"
    assert as_data.describe() == (
        "qnli (demo questions and sentences): 60 train, 10 dev, 20 test, "
        "train labels (entailment 35, not_entailment 25), "
        "dev labels (entailment 5, not_entailment 5), "
        "test labels (entailment 12, not_entailment 8)"
    )
    assert as_data.head == Head("classes", 2)
    assert as_data.vocabularies.keys() == {"text"}
    assert as_data.weight(torch.arange(7)) == 7.0


def test_a_batch_is_two_texts_with_types_and_a_label(data: ClassificationData) -> None:
    ids = torch.tensor([5, 0, 59])
    batch = data.batch("train", ids)
    special = data.vocabularies["text"]
    assert set(batch) == {"ids", "text", "types", "label"}
    assert batch["label"].dtype == torch.int64 and batch["text"].shape[1] <= 24
    for row, types in zip(batch["text"].tolist(), batch["types"].tolist(), strict=True):
        assert row[0] == special.bos and row.count(special.eos) == 2
        first, end = row.index(special.eos), len(row) - 1 - row[::-1].index(special.eos)
        expected = [0] * (first + 1) + [1] * (end - first) + [0] * (len(row) - end - 1)
        assert types == expected
        assert all(token == special.pad for token in row[end + 1 :])


def test_each_rank_keeps_only_what_it_may_see(
    task: Classification, data: ClassificationData
) -> None:
    views = {fields: task.load(fields, seed=2) for fields in (TEXT, LABEL, NONE)}
    assert {view.fingerprint() for view in views.values()} == {data.fingerprint()}
    ids = torch.arange(4)
    for fields, view in views.items():
        batch, whole = view.batch("train", ids), data.batch("train", ids)
        assert set(batch) == {"ids", *fields}
        assert all(torch.equal(batch[name], whole[name]) for name in batch)
        assert view.num_samples("test") == 20
    assert views[TEXT].head is None and views[LABEL].head == Head("classes", 2)
    for fields in (LABEL, NONE):
        view = views[fields]
        assert not view.vocabularies and not view._pairs
        with pytest.raises(DataError, match="is no field visible here"):
            view.sentences("text")
    for fields in (TEXT, NONE):
        assert "label" not in views[fields]._columns
        with pytest.raises(DataError, match="'label' is no field visible here"):
            views[fields].score("test", {0: [1]})


def test_settings_and_sizes_change_the_fingerprint(
    task: Classification, data: ClassificationData
) -> None:
    for other in (
        replace(task, max_length=25),
        replace(task, data=replace(task.data, num_train=61)),
        replace(task, tokenizer=SmallTokenizer(2)),
    ):
        assert other.load(NONE, 1).fingerprint() != data.fingerprint()


def test_scores_work_from_labels_alone(task: Classification) -> None:
    view = task.load(LABEL, seed=1)
    labels = view.batch("test", torch.arange(20))["label"].tolist()
    assert view.score("test", {i: [label] for i, label in enumerate(labels)}).values == {
        "accuracy": 100.0
    }
    half = {i: [label if i < 5 else 1 - label] for i, label in enumerate(labels[:10])}
    assert view.score("test", half).values == {"accuracy": 50.0}
    assert view.signature() == {"accuracy": "share of correct classes, percent"}
    shown = view.sample_outputs("test", view.score("test", half), 1)
    assert "prediction" in shown and "?" not in shown, "its text is not visible here"
    for wrong in ({}, {20: [0]}):
        with pytest.raises(ValueError):
            view.score("test", wrong)


def test_samples_show_text_where_it_is_seen(data: ClassificationData) -> None:
    shown = data.sample_outputs("test", data.score("test", {0: [0], 1: [1]}), 2)
    assert "?" in shown and "entailment" in shown
    assert shown.count("label") == 2


def test_sentences_are_both_texts_without_special_ids(data: ClassificationData) -> None:
    sentences = data.sentences("text")
    special = data.vocabularies["text"]
    assert len(sentences) == 120
    assert not {special.bos, special.eos, special.pad} & {t for s in sentences for t in s}


def test_a_trained_model_can_be_used_later(task: Classification, tmp_path: Path) -> None:
    whole = task.load(ALL, 1)
    task.load(TEXT, 1).save_tokenizers(tmp_path)
    assert not (tmp_path / "labels.json").exists()
    task.load(LABEL, 1).save_tokenizers(tmp_path)
    labels = json.loads((tmp_path / "labels.json").read_text())
    assert labels == {"kind": "classes", "classes": ["entailment", "not_entailment"]}
    tokenizer = Tokenizer.load(tmp_path / "text_tokenizer.json")
    texts = task.read(frozenset({"text"})).splits["dev"].texts
    sides = [texts[name][:3] for name in ("first", "second")]
    table = PairTable.encoded(tokenizer, sides, task.max_length)
    batch = whole.batch("dev", torch.arange(3))
    for found, trained in ((table.tokens, "text"), (table.types(), "types")):
        assert torch.equal(found.padded(torch.arange(3)), batch[trained])


def test_a_cloud_that_sees_nothing_needs_no_file_where_sizes_are_given(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, num in (("train", 30), ("dev", 4), ("test", 5)):
        lines = [f"words {i}\t{i % 2}" for i in range(num)]
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines]))
    sizes = {"train": 30, "dev": 4, "test": 5}

    def view(path: Path, fields: frozenset[str], sizes: dict[str, int]) -> ClassificationData:
        task = given(Classification, Folder, 
            name="sst2", path=str(path), tokenizer=SmallTokenizer(), sizes=sizes  # type: ignore[arg-type]
        )  # fmt: skip
        return task.load(fields, 1)

    owner, other = view(folder, ALL, sizes), view(tmp_path / "nowhere", NONE, sizes)
    assert owner.fingerprint() == other.fingerprint()
    assert other.num_samples("train") == 30
    assert set(other.batch("train", torch.arange(3))) == {"ids"}
    with pytest.raises(DataError, match=r"which has \{train: 30"):
        view(folder, LABEL, {**sizes, "test": 6})
    for wrong in ({"train": 3}, {**sizes, "dev": 0}):
        with pytest.raises(ConfigError, match=r"task\.sizes"):
            view(folder, NONE, wrong)


def write(folder: Path, rows: list[tuple[str, str]], name: str = "train") -> None:
    text = "\n".join(["text\tlabel", *(f"{text}\t{label}" for text, label in rows)])
    (folder / f"{name}.tsv").write_text(text)


def own(folder: Path, **settings: object) -> ClassificationData:
    task = given(
        Classification,
        Folder,
        path=str(folder),
        tokenizer=SmallTokenizer(),
        dev_share=2,
        test_share=2,
        **settings,
    )  # type: ignore[arg-type]
    return task.load(ALL, 1)


def test_labels_by_name_or_by_number(tmp_path: Path) -> None:
    write(tmp_path, [("a", "no"), ("b", "yes")] * 10)
    by_name = own(tmp_path)
    assert by_name.head == Head("classes", 2)
    write(tmp_path, [("a", "0"), ("b", "2")] * 10)
    assert own(tmp_path).head == Head("classes", 3)
    write(tmp_path, [("a", "0"), ("b", "1")] * 10)
    by_index = own(tmp_path, classes=["no", "yes"])
    assert set(by_index.batch("train", torch.arange(16))["label"].tolist()) == {0, 1}
    assert "train labels (no 9, yes 7, by number)" in by_index.describe()
    write(tmp_path, [("a", "no"), ("b", "maybe")] * 10)
    with pytest.raises(DataError, match=r"unknown labels: 'maybe'; the classes are 'no', 'yes'"):
        own(tmp_path, classes=["no", "yes"])
    write(tmp_path, [("a", "same")] * 10)
    with pytest.raises(DataError, match="1 different labels"):
        own(tmp_path)


MIXED: dict[str, tuple[list[str], list[str]]] = {
    "a name and an index": (["no", "1"], ["no", "yes"]),
    "numbers that are names, and one that is none": (["0", "1", "2"], ["1", "2"]),
}


@pytest.mark.parametrize("case", MIXED)
def test_labels_that_are_names_in_some_rows_and_indices_in_others_are_refused(
    case: str, tmp_path: Path
) -> None:
    labels, classes = MIXED[case]
    write(tmp_path, [("a", label) for label in labels] * 8)
    with pytest.raises(DataError, match=r"some labels are names .* others their num"):
        own(tmp_path, classes=classes)


def test_a_mixture_is_refused_where_each_split_alone_would_do(tmp_path: Path) -> None:
    write(tmp_path, [("a", "no"), ("b", "yes")] * 8)
    write(tmp_path, [("a", "0"), ("b", "1")], "test")
    with pytest.raises(DataError, match="some labels are names of classes"):
        own(tmp_path, classes=["no", "yes"])


LOOK_ALIKE = {
    "an unseen character": ("yes", "yes\u200b", r"U\+200B"),
    "a mark of direction": ("yes", "\u200eyes", r"U\+200E"),
    "a byte order mark": ("yes", "\ufeffyes", r"U\+FEFF"),
    "a soft hyphen": ("cooperate", "co\u00adoperate", r"U\+00AD"),
    "composed and decomposed": ("sch\u00f6n", "scho\u0308n", r"U\+0308.* \(U\+00F6\)"),
    "full width": ("yes", "\uff59\uff45\uff53", r"U\+FF59"),
    "a ligature": ("file", "\ufb01le", r"U\+FB01"),
    "case": ("yes", "Yes", "'Yes' and 'yes'"),
    "case that grows": ("strasse", "Stra\u00dfe", r"U\+00DF"),
    "a hard blank": ("very good", "very\u00a0good", r"U\+00A0"),
    "two blanks": ("very good", "very  good", "'very  good' and 'very good'"),
    "zeros in front": ("1", "01", "'01' and '1'"),
    "zeros behind": ("1", "1.0", "'1' and '1.0'"),
    "other digits": ("1", "\u0661", r"U\+0661"),
    "a letter of another script": ("pos", "p\u043es", r"U\+043E"),
    "a dash": ("not-true", "not\u2011true", r"U\+2011"),
    "what joins words": ("not_true", "not true", "'not true' and 'not_true'"),
    "a quote": ("isn't", "isn\u2019t", r"U\+2019"),
    "a sign": ("0", "-0", "'-0' and '0'"),
    "a power of ten": ("1", "1e0", "'1' and '1e0'"),
    "a truth value": ("1", "True", "'1' and 'True'"),
}


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("case", LOOK_ALIKE)
def test_labels_that_look_alike_are_no_two_classes(case: str, split: str, tmp_path: Path) -> None:
    first, second, said = LOOK_ALIKE[case]
    labels = {"train": [first, "no"], "test": [first, "no"]}
    labels[split].append(second)
    for name, of in labels.items():
        write(tmp_path, [("a", label) for label in of] * 8, name)
    with pytest.raises(DataError, match=f"{said}.*look alike"):
        own(tmp_path)
    named = sorted({*labels["train"], *labels["test"]})
    assert own(tmp_path, classes=named).head == Head("classes", 3)  # somebody wants them


def test_labels_that_differ_to_a_reader_are_classes(tmp_path: Path) -> None:
    labels = ["A", "A+", "A-", "B", "1.5", "15", "C#", "C", "no", "n", "o"]
    write(tmp_path, [("a", label) for label in labels] * 8, "train")
    assert own(tmp_path).head.num_outputs == len(labels)


@pytest.mark.parametrize(
    "labels", [["01", "02"], ["007", "7a"], ["\u0661", "\u0662"], ["1.10", "1.1"]]
)
def test_codes_are_names_of_classes_and_no_numbers(labels: list[str], tmp_path: Path) -> None:
    write(tmp_path, [("a", label) for label in labels] * 10)
    assert own(tmp_path).head == Head("classes", 2)
    assert all(label in own(tmp_path).describe() for label in labels)


def test_of_many_classes_those_are_told_that_have_samples(tmp_path: Path) -> None:
    write(tmp_path, [("a", "3"), ("b", "900")] * 10)
    assert "train labels (3 9, 900 7, none of 0, 1, 2, 4, 5 and 894 more classes" in (
        own(tmp_path).describe()
    )
    write(tmp_path, [("a", str(n)) for n in range(100)])
    assert " and 66 more classes, none of " in own(tmp_path).describe()


@pytest.mark.parametrize("cell", ["", "-", "-1", "nan", "NaN", "null", "<NA>"])
@pytest.mark.parametrize("kind", ["classes", "value"])
def test_a_missing_label_is_refused_with_its_row_and_how_many_there_are(
    cell: str, kind: str, tmp_path: Path
) -> None:
    rows = [("a", "0"), ("b", "1")] * 10
    rows[3] = rows[7] = ("c", cell)
    write(tmp_path, rows)
    if (kind, cell) == ("value", "-1"):  # a number like others
        assert own(tmp_path, kind=kind).num_samples("train") == 16
        return
    wanted = rf"train\.tsv: 2 of 20 rows have no label; the first is row 4, with '{cell}'"
    with pytest.raises(DataError, match=wanted):
        own(tmp_path, kind=kind)
    with pytest.raises(DataError, match=wanted):  # whichever rows are drawn
        own(tmp_path, kind=kind, max_train_samples=2)


def test_minus_one_is_a_class_where_it_is_named(tmp_path: Path) -> None:
    write(tmp_path, [("a", "-1"), ("b", "1")] * 10)
    with pytest.raises(DataError, match=r"if '-1' is a class, name it .* in task\.classes"):
        own(tmp_path)
    assert "train labels (-1 9, 1 7)" in own(tmp_path, classes=["-1", "1"]).describe()


def test_texts_that_stand_there_with_different_labels_are_told(tmp_path: Path) -> None:
    for split, labels in (("train", "aab"), ("dev", "ab"), ("test", "ba")):
        write(
            tmp_path, [("one" if n < 2 else "two", label) for n, label in enumerate(labels)], split
        )
    said = own(tmp_path).describe()
    assert "dev: 2 of 2 texts are also there with another label" in said
    assert "of 3 texts stand" not in said


@pytest.mark.parametrize("num_drawn", range(2, 5))
def test_classes_are_those_of_the_whole_training_file(num_drawn: int, tmp_path: Path) -> None:
    write(tmp_path, [("a", "no"), ("b", "yes")] * 10 + [("c", "rare")])
    found = own(tmp_path, max_train_samples=num_drawn)
    assert found.head == Head("classes", 3) and "rare" in found.describe()


def test_hidden_test_labels_are_said(tmp_path: Path) -> None:
    write(tmp_path, [("a", "0"), ("b", "1")] * 10)
    write(tmp_path, [("a", "0"), ("b", "1")], "dev")
    write(tmp_path, [("a", "-1")] * 3, "test")
    with pytest.raises(
        DataError, match=r"3 of 3 rows have no label.*'-1'.*task.data.test_file=dev"
    ):
        own(tmp_path)
    assert own(tmp_path, test_file="dev").num_samples("test") == 2


def test_values_are_learned_and_scored_as_they_stand(tmp_path: Path) -> None:
    write(tmp_path, [(f"t{i}", str(i / 4)) for i in range(24)])
    write(tmp_path, [(f"t{i}", str(float(i))) for i in range(4)], "test")
    data = own(tmp_path, kind="value")
    assert data.head == Head("value", 1)
    batch = data.batch("test", torch.arange(4))
    assert batch["label"].dtype == torch.float32 and batch["label"].tolist() == [0, 1, 2, 3]
    said = {0: [500_000], 1: [2_000_000], 2: [1_000_000], 3: [3_500_000]}
    assert data.score("test", said).values == pytest.approx(
        {"pearson": 78.0720058, "spearman": 80.0}
    )
    write(tmp_path, [("t", "high")] * 4, "test")
    with pytest.raises(DataError, match=r"row 1: the label 'high' is not a number"):
        own(tmp_path, kind="value")


def test_every_glue_task_has_its_own_score(tmp_path: Path) -> None:
    main = {name: next(iter(task.metrics)) for name, task in GLUE.items()}
    assert main == {
        "sst2": "accuracy", "cola": "matthews", "mrpc": "f1", "qnli": "accuracy", "qqp": "f1",
        "stsb": "pearson", "mnli": "accuracy", "rte": "accuracy", "wnli": "accuracy",
    }  # fmt: skip
    for name in GLUE:
        task = given(Classification, Folder, name=name, path=str(tmp_path))
        assert task.scores[0] == main[name] and task.name == name
    alone = [name for name, task in GLUE.items() if task.num_texts != (2,)]
    assert alone == ["sst2", "cola"] and GLUE["sst2"].num_texts == GLUE["cola"].num_texts == (1,)
    assert all(task.num_texts == (2,) for task in CROSS_LINGUAL.values())


def test_languages_are_scored_apart_and_their_mean_first() -> None:
    task = given(
        CrossLingual,
        DemoInference,
        num_train=20,
        num_dev=4,
        num_test=12,
        tokenizer=SmallTokenizer(),
        max_length=48,
    )
    data = task.load(LABEL, 1)
    assert data.num_samples("test") == 24 and data.num_samples("train") == 20
    labels = data.batch("test", torch.arange(24))["label"].tolist()
    assert labels[::2] == labels[1::2]  # the same pairs in both languages
    said = {i: [labels[i] if i % 2 == 0 or i < 6 else 7] for i in range(24)}
    assert data.score("test", said).values == {
        "accuracy": 62.5, "accuracy_en": 100.0, "accuracy_es": 25.0
    }  # fmt: skip
    assert list(data.signature()) == ["accuracy", "accuracy_en", "accuracy_es"]
    assert data.signature()["accuracy"].startswith("mean over en, es of")
    assert list(data.score("dev", {0: [0]}).values) == ["accuracy"]
    only = given(CrossLingual, DemoInference, train_language="es", languages=["en"], num_test=5,
                                   num_train=5, num_dev=1)  # fmt: skip
    assert only.load(LABEL, 1).num_samples("test") == 5
    for settings, said_ in [
        ({"languages": ["de"]}, "en, es"),
        ({"name": "pawsx"}, "one of xnli in"),
    ]:
        with pytest.raises(ConfigError, match=said_):
            given(CrossLingual, DemoInference, **settings)
    with pytest.raises(ConfigError, match=r"task\.name must be one of xnli, pawsx"):
        given(CrossLingual, LanguageFolder, name="xnil", path="somewhere")


@pytest.mark.parametrize(
    ("there", "trained", "remarks"),
    [
        (
            ["train.en", "train", "dev.en", "validation.en"],
            ["train.en", "dev.en"],
            ["not read, beside what is: dev.de.tsv, train.tsv, validation.en.tsv"],
        ),
        (
            ["train", "validation.en"],
            ["train", "validation.en"],
            ["not read, beside what is: dev.de.tsv"],
        ),
        (
            ["dev.en", "validation.en"],
            ["dev.en"],
            [
                "no training file: dev.en.tsv is the training set",
                "not read, beside what is: dev.de.tsv, validation.en.tsv",
            ],
        ),
    ],
)
def test_one_file_a_split_is_taken_from_a_folder_of_languages(
    tmp_path: Path, there: list[str], trained: list[str], remarks: list[str]
) -> None:
    for name in [*there, "dev.de", "test.de", "test.en"]:
        (tmp_path / f"{name}.tsv").touch()
    task = given(CrossLingual, LanguageFolder, path=str(tmp_path))
    found = task.data.find(task.form)
    assert found.facts == {"train": trained, "languages": ["en", "de"]}
    sets = {split: list(tables) for split, tables in found.tables.items()}
    expected = {"train": [""], "dev": [""], "test": ["en", "de"]}
    if len(trained) == 1:
        del expected["dev"]
    assert sets == expected and found.remarks == remarks


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_length": 4}, "task.max_length"),
        ({"kind": "class"}, "task.kind"),
        ({"metrics": ["acuracy"]}, "'acuracy' is not a score for classes; choose from accuracy"),
        ({"metrics": "accuracy"}, "task.metrics must be a list"),
        ({"kind": "value", "metrics": ["f1"]}, "not a score for value"),
        ({"classes": ["a"]}, "task.classes must be a list"),
        ({"classes": ["a", "a"]}, "two different names"),
        ({"name": "sst2", "classes": ["a", "b"]}, "follow from task.name=sst2"),
        ({"classes": "ab"}, "task.classes must be a list"),
        ({"classes": ["a", "b"], "kind": "value"}, "null with task.kind=value"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        given(Classification, Folder, path="x", **settings)


def test_wrong_fields_and_demo_names_are_refused(task: Classification) -> None:
    with pytest.raises(ConfigError, match="text, types, label"):
        task.load(frozenset({"source"}), 1)
    with pytest.raises(ConfigError, match=r"must be one of sst2, qnli in this profile; got mrpc"):
        given(Classification, DemoReviews, name="mrpc")


def test_a_trained_tokenizer_learns_from_public_sentences_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str] = []
    ready = small_tokenizer()

    def prepare(self: object, texts: list[str], cache_dir: Path) -> object:
        seen.extend(texts)
        return ready

    monkeypatch.setattr(TrainedTokenizer, "prepare", prepare)
    monkeypatch.setattr("xcloud.tasks.text_task.TOKENIZER_TEXTS", 50)
    write(tmp_path, [("confidential", "0"), ("confidential", "1")] * 10)
    given(Classification, Folder, path=str(tmp_path), tokenizer=TrainedTokenizer(500)).load(ALL, 1)
    assert len(seen) == 50 and "confidential" not in " ".join(seen)
