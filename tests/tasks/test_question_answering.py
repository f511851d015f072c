"""SQuAD: windows, places of answers, scores, and who must see what."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.corpora import given
from tests.small_tokenizer import SmallTokenizer, small_tokenizer
from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.model import Head, Task, TaskData
from xcloud.tasks.question_answering import (
    DemoQuestions,
    QuestionAnswering,
    QuestionAnsweringData,
    Windows,
    rows_of,
    window_starts,
)
from xcloud.tasks.rows import Rows
from xcloud.tasks.scores import bootstrap_error
from xcloud.tasks.sources import Folder, Hub, list_files

ALL, NONE = frozenset({"text", "types", "label"}), frozenset[str]()
SMALL: dict[str, Any] = {
    "num_train": 30,
    "num_dev": 6,
    "num_test": 9,
    "tokenizer": SmallTokenizer(),
    "max_length": 40,
    "max_question": 16,
    "stride": 8,
}


@pytest.fixture(scope="module")
def data() -> QuestionAnsweringData:
    return given(QuestionAnswering, DemoQuestions, **SMALL).load(ALL, 1)


def right_answers(data: QuestionAnsweringData, split: str) -> dict[int, list[int]]:
    """What a perfect model says of each window."""
    ids = torch.arange(data.num_samples(split))  # type: ignore[arg-type]
    labels = data.batch(split, ids)["label"].tolist()  # type: ignore[arg-type]
    return {i: [first or begin, last or begin, 9 if first else -9]
            for i, (first, last, begin) in enumerate(labels)}  # fmt: skip


def test_it_is_a_task_whose_samples_are_windows(data: QuestionAnsweringData) -> None:
    task: Task = given(QuestionAnswering, DemoQuestions, **SMALL)
    as_data: TaskData = data
    assert task.describe() == "squad (demo stories)"
    assert as_data.head == Head("span", 2)
    assert as_data.num_samples("train") > 30
    assert "questions 30 train, 6 dev, 9 test" in as_data.describe()
    assert as_data.weight(torch.arange(5)) == 5.0
    batch = as_data.batch("train", torch.arange(8))
    assert batch["text"].shape == batch["types"].shape and batch["text"].shape[1] <= 40
    assert batch["label"].shape == (8, 3) and batch["label"].dtype == torch.int64


def test_labels_point_at_the_answer_and_every_answer_is_in_a_window(
    data: QuestionAnsweringData,
) -> None:
    decode = small_tokenizer().decode
    ids = torch.arange(data.num_samples("train"))
    batch, found = data.batch("train", ids), dict[int, str]()
    for i, (first, last, begin) in enumerate(batch["label"].tolist()):
        assert batch["types"][i, begin] == 1 and batch["types"][i, begin - 1] == 0
        if first:
            assert begin <= first <= last
            text = decode(batch["text"][i, first : last + 1].tolist())
            found[data.windows["train"].question_of[i]] = text
        else:
            assert last == 0
    answers = data.windows["train"].asked.texts["answers"]
    assert sorted(found) == list(range(30))
    for number, text in found.items():
        assert text.lower() == answers[number][0][0].lower()


def test_a_perfect_model_scores_100_and_a_wrong_one_less(data: QuestionAnsweringData) -> None:
    perfect = right_answers(data, "test")
    assert data.score("test", perfect).values == {"f1": 100.0, "exact_match": 100.0}
    assert list(data.signature()) == ["f1", "exact_match"]
    spoilt = {i: [b, b, 99] for i, (_, _, b) in enumerate(
        data.batch("test", torch.arange(len(perfect)))["label"].tolist())}  # fmt: skip
    assert data.score("test", spoilt).values["exact_match"] < 60
    found = data.score("test", {**perfect, **{i: spoilt[i] for i in range(len(spoilt) // 2)}})
    f1 = np.array([sample["f1"] for sample in found.samples.values()], float)
    assert f1.std() > 0
    drawn = bootstrap_error(len(f1), lambda counts: float((counts * f1).sum() / counts.sum()))
    assert found.errors["f1"] == pytest.approx(drawn, abs=1e-4), "over resampled questions"
    exact = np.array([sample["exact_match"] for sample in found.samples.values()], float)
    assert found.errors["exact_match"] == pytest.approx(exact.std() / len(exact) ** 0.5)
    shown = data.sample_outputs("test", found, 2)
    assert shown.count("question") == 2 and "reference" in shown
    for wrong in ({}, {len(perfect): [0, 0, 1]}):
        with pytest.raises(ValueError, match=r"no predictions|is not in test"):
            data.score("test", wrong)
    for nonsense in ([0, 0, 5], [90, 95, 5], [12, 8, 5]):
        said = {i: nonsense for i in perfect}
        assert data.score("test", said).values["exact_match"] < 30


def test_the_best_span_over_the_windows_of_a_question_counts() -> None:
    tokenizer = small_tokenizer()
    context = " ".join(f"{word} the" for word in "abcdefghijklmnopqrst")
    place = context.index("p the")
    cells = {"context": [context], "question": ["where?"], "answers": [[("p the", place)]]}
    windows = Windows.of(Rows(1, cells), tokenizer, max_length=24, max_question=8, stride=6)
    assert len(windows.starts) > 2
    labels = [windows.label(w) for w in range(len(windows.starts))]
    holding = [w for w, (first, _, _) in enumerate(labels) if first]
    assert 0 < len(holding) < len(labels)
    for w in holding:
        assert windows.answer(w, *labels[w][:2]) == "p the"
    begin = labels[0][2]
    assert windows.answer(0, begin - 1, begin) == ""
    assert context.startswith(windows.answer(0, begin, 99))


def test_a_question_of_just_max_question_tokens_is_not_cut() -> None:
    tokenizer = small_tokenizer()
    cells = {"context": ["a b c"], "question": ["where a b?"], "answers": [[("b", 2)]]}
    length = len(tokenizer.encode(["where a b?"])[0])
    for most, num in ((length - 1, 1), (length, 0), (length + 1, 0)):
        lengths = {"max_length": 40, "max_question": most, "stride": 6}
        assert Windows.of(Rows(1, cells), tokenizer, **lengths).num_long == num


@pytest.mark.parametrize(
    ("length", "fits", "stride", "starts"),
    [(5, 10, 4, [0]), (10, 10, 4, [0]), (11, 10, 4, [0, 4]), (20, 10, 4, [0, 4, 8, 12]),
     (20, 6, 99, [0, 6, 12, 18])],
)  # fmt: skip
def test_windows_cover_the_text(length: int, fits: int, stride: int, starts: list[int]) -> None:
    assert window_starts(length, fits, stride) == starts


def test_text_and_labels_must_be_seen_by_one_rank() -> None:
    task = given(QuestionAnswering, DemoQuestions, **SMALL)
    with pytest.raises(ConfigError, match="Give the first and the last stage to one owner"):
        task.load(frozenset({"label"}), 1)
    with pytest.raises(ConfigError, match="text, types, label"):
        task.load(frozenset({"target"}), 1)


def test_a_rank_that_sees_nothing_keeps_the_sizes_alone(data: QuestionAnsweringData) -> None:
    view = given(QuestionAnswering, DemoQuestions, **SMALL).load(NONE, 1)
    assert view.fingerprint() == data.fingerprint()
    assert view.num_samples("test") == data.num_samples("test")
    assert set(view.batch("train", torch.arange(3))) == {"ids"}
    assert view.head is None and not view.vocabularies
    assert not view.windows and not view._columns
    with pytest.raises(DataError, match="is no field visible here"):
        view.sentences("text")
    with pytest.raises(DataError, match="'label' is no field visible here"):
        view.score("test", {0: [1, 1, 1]})


def row(context: str, *answers: Any, question: str = "what?") -> dict[str, Any]:
    return {"context": context, "qas": [{"id": "x", "question": question, "answers": answers}]}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "\n".join(map(json.dumps, rows)) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def test_answers_are_placed_by_their_start_or_as_whole_words(tmp_path: Path) -> None:
    rows = [
        row("In 1903 and 3 more", "3"),
        row("Japanese Japan", {"text": "Japan", "start": 0}),
        row("Japanese Japan", {"text": "Japan", "answer_start": 9}),
        row("unsuccessfully", "success"),
    ]
    for name in ("train", "dev", "test"):
        write(tmp_path / f"{name}.jsonl.gz", rows)
    read = (
        given(QuestionAnswering, Folder, path=str(tmp_path))
        .read(ALL)
        .splits["train"]
        .texts["answers"]
    )
    assert [answers[0][1] for answers in read] == [12, 0, 9, 2]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (row("a b", "c"), "paragraph 1: the answer 'c' is not at that place"),
        (row("a b", {"text": "b", "start": 0}), "is not at that place in its context"),
        (row("a b"), "has no answer; SQuAD 2.0"),
        (
            {"context": "a", "question": "q", "answers": ["a"], "is_impossible": True},
            "has no answer; SQuAD 2.0",
        ),
        (
            {"context": "a", "qas": [{"question": "q", "answers": ["a"], "is_impossible": True}]},
            "has no answer; SQuAD 2.0",
        ),
        ({"context": "a", "qas": [{}]}, 'qas has {}. Expected {"context", "qas"'),
        (
            {"context": "a", "qas": [{"question": None, "answers": ["a"]}]},
            "question is None, which",
        ),
        ({"text": "a"}, "no text under 'context'; its keys: text"),
        ({"context": "a", "qas": {}}, "qas is {}, which is no list"),
        ({"context": "a 1", "question": "q", "answers": [1]}, "the answer 1 is of another form"),
        ({"context": "a", "question": "q", "answers": 1}, "answers is 1. Expected"),
        ({"context": "a", "question": "q", "answers": {"texts": []}}, "is of another form"),
        ({"context": "a", "question": "q", "answers": [{"text": "a", "start": "0"}]}, "another f"),
    ],
)
def test_malformed_paragraphs_are_named(
    tmp_path: Path, content: dict[str, Any], said: str
) -> None:
    write(tmp_path / "train.jsonl", [content])
    with pytest.raises(DataError) as raised:
        given(QuestionAnswering, Folder, path=str(tmp_path)).load(ALL, 1)
    assert said in str(raised.value) and "\n" not in str(raised.value)


PLACED = [{"text": "b c", "answer_start": 2}, {"text": "c", "answer_start": 4}]
ANSWERS: dict[str, Any] = {
    "a list of objects": PLACED,
    "an object of lists": {"text": ["b c", "c"], "answer_start": [2, 4]},
    "starts by their short name": [{"text": "b c", "start": 2}, {"text": "c", "start": 4}],
    "texts": ["b c", "c"],
    "an object of texts": {"text": ["b c", "c"]},
}


@pytest.mark.parametrize("form", ANSWERS)
@pytest.mark.parametrize("is_flat", [True, False], ids=["rows", "qas"])
def test_every_form_of_answers_is_read_in_rows_and_in_paragraphs(
    form: str, is_flat: bool, tmp_path: Path
) -> None:
    asked = {"question": "q", "answers": ANSWERS[form]}
    content = {"context": "a b c", **(asked if is_flat else {"qas": [asked]})}
    write(tmp_path / "train.jsonl", [content])
    [table] = list_files(tmp_path, QuestionAnswering.form)
    assert rows_of(table).texts["answers"] == [[("b c", 2), ("c", 4)]]


def test_the_official_files_without_a_test_set(tmp_path: Path) -> None:
    def official(name: str, num: int) -> None:
        paragraphs = [row(f"{name} number {i} here.", f"{i}") for i in range(num)]
        content = {"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}
        (tmp_path / f"{name}-v1.1.json").write_text(json.dumps(content))

    official("train", 40)
    official("dev", 5)
    data = given(
        QuestionAnswering, Folder, path=str(tmp_path), dev_share=3, tokenizer=SmallTokenizer()
    ).load(ALL, 1)
    assert [data.num_samples(s) for s in ("train", "dev", "test")] == [37, 3, 5]
    assert "test: the dev set, as there is no labelled test set" in data.describe()
    few = given(
        QuestionAnswering,
        Folder,
        path=str(tmp_path),
        max_train_samples=6,
        max_eval_samples=2,
        tokenizer=SmallTokenizer(),
        dev_share=3,
    )
    found = few.load(ALL, 1)
    assert [found.num_samples(s) for s in ("train", "dev", "test")] == [6, 2, 2]
    (tmp_path / "train-v1.1.json").write_text('{"a": 1}\n')
    with pytest.raises(DataError, match=r"must be named \.jsonl"):
        given(QuestionAnswering, Folder, path=str(tmp_path)).load(ALL, 1)


def test_the_hubs_form_in_a_folder(tmp_path: Path) -> None:
    for name, num in (("train", 60), ("validation", 4)):
        rows = [
            {"id": f"{name}{i}", "context": f"c {i // 2} here", "question": "q?",
             "answers": {"text": ["here"], "answer_start": [len(f"c {i // 2} ")]}}
            for i in range(num)
        ]  # fmt: skip
        write(tmp_path / f"{name}.jsonl", rows)
    reading = given(QuestionAnswering, Hub, dataset=str(tmp_path)).read(ALL)
    assert [reading.splits[s].num_rows for s in ("train", "dev", "test")] == [58, 2, 4]
    assert reading.splits["test"].texts["context"][2:] == ["c 1 here"] * 2
    unanswerable = {"text": [], "answer_start": []}
    write(tmp_path / "train.jsonl", [{"id": "1", "context": "c", "question": "why?",
                                      "answers": unanswerable}] * 9)  # fmt: skip
    with pytest.raises(DataError, match=r"^[^(]*: the question 'why\?' has no answer; SQuAD 2\.0"):
        given(QuestionAnswering, Hub, dataset=str(tmp_path)).read(ALL)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_length": 71, "max_question": 60}, "task.max_length is 71, .* to at least 72"),
        ({"max_question": 0}, "task.max_question"),
        ({"stride": 0}, "task.stride"),
        ({"max_length": "long"}, "task.max_length"),
        ({"sizes": {"train": 5}}, "task.sizes"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        given(QuestionAnswering, DemoQuestions, **settings)
