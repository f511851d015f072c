"""Whether a thing is what it was: what a run reads, changed between two attempts at it, or in one
of its clouds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from xcloud.tasks.classification import FolderClassification
from xcloud.tasks.language_modelling import FolderLanguageModelling
from xcloud.tasks.question_answering import FolderQuestionAnswering
from xcloud.tasks.text_task import SourceTask
from xcloud.tasks.tokenizer import TrainedTokenizer
from xcloud.tasks.translation import FolderTranslation

SPLITS = {"train": 30, "dev": 4, "test": 4}
OTHER = {"cat": "dog", "yes": "no"}  # as long, and as many rows


def translation(folder: Path, word: str, answer: str, split: str) -> None:
    lines = [f"{word} {n} aqui\t{n} {answer} here" for n in range(SPLITS[split])]
    (folder / f"{split}.tsv").write_text("\n".join(["es\ten", *lines]) + "\n")


def classification(folder: Path, word: str, answer: str, split: str) -> None:
    lines = [f"{word} {n}\t{answer if n == 1 else 'yes no'.split()[n % 2]}" for n in
             range(SPLITS[split])]  # fmt: skip
    (folder / f"{split}.tsv").write_text("\n".join(["text\tlabel", *lines]) + "\n")


def answering(folder: Path, word: str, answer: str, split: str) -> None:
    rows = []
    for n in range(SPLITS[split]):
        context = f"{word} {n} says yes or says no today"
        answers = [{"text": answer, "start": context.index(answer)}]
        rows.append({"context": context, "qas": [{"question": "what", "answers": answers}]})
    (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def texts(folder: Path, word: str, answer: str, split: str) -> None:
    (folder / f"{split}.txt").write_text("\n\n".join([f"a {word} sat"] * SPLITS[split]))


TOKENIZER = TrainedTokenizer(vocab_size=290)
TASKS: dict[
    str, tuple[Callable[[Path, str, str, str], None], Callable[[str, str], SourceTask]]
] = {
    "translation": (
        translation,
        lambda path, cache: FolderTranslation(
            path=path,
            source_tokenizer=TOKENIZER,
            target_tokenizer=TOKENIZER,
            cache_dir=cache,
        ),
    ),
    "classification": (
        classification,
        lambda path, cache: FolderClassification(
            path=path, tokenizer=TOKENIZER, max_length=16, cache_dir=cache
        ),
    ),
    "question answering": (
        answering,
        lambda path, cache: FolderQuestionAnswering(
            path=path,
            tokenizer=TOKENIZER,
            max_length=64,
            max_question=8,
            stride=16,
            cache_dir=cache,
        ),
    ),
    "language modelling": (
        texts,
        lambda path, cache: FolderLanguageModelling(
            path=path, tokenizer=TOKENIZER, max_length=32, cache_dir=cache
        ),
    ),
}


@pytest.mark.parametrize(
    ("name", "split", "changes", "said"),
    [
        ("translation", "train", "cat", {"source of train", "the source tokenizer"}),
        ("translation", "train", "yes", {"target of train", "the target tokenizer"}),
        ("translation", "dev", "cat", {"source of dev"}),
        ("translation", "test", "yes", {"target of test"}),
        ("classification", "train", "cat", {"first of train"}),
        ("classification", "train", "yes", {"label of train"}),
        ("classification", "test", "yes", {"label of test"}),
        ("question answering", "train", "yes", {"answers of train"}),
        ("question answering", "test", "cat", {"context of test"}),
        ("language modelling", "train", "cat", {"text of train"}),
        ("language modelling", "test", "cat", {"text of test"}),
    ],
)
def test_data_of_equal_size_are_told_apart_here_and_not_shown_to_others(
    name: str, split: str, changes: str, said: set[str], tmp_path: Path
) -> None:
    write, task_of = TASKS[name]
    found = []
    for attempt in ("before", "after"):
        (folder := tmp_path / attempt).mkdir()
        for one in SPLITS:
            other = OTHER if attempt == "after" and one == split else {}
            word = other.get("cat", "cat") if changes == "cat" else "cat"
            answer = other.get("yes", "yes") if changes == "yes" else "yes"
            write(folder, word, answer, one)
        task = task_of(str(folder), str(tmp_path / "cache"))
        found.append(task.load(frozenset(task.fields), 1))
    before, after = found
    digests, others = before.own_digests(), after.own_digests()
    assert digests.keys() == others.keys()
    differing = {key for key in digests if digests[key] != others[key]}
    assert differing == said
    assert before.fingerprint() == after.fingerprint()


def test_the_order_of_rows_and_where_one_ends_are_part_of_a_digest() -> None:
    from xcloud.tasks.rows import digest_of

    columns = [["ab", "c"], ["a", "bc"], ["c", "ab"], ["abc"], ["ab", "c", ""], [["ab", "c"]]]
    assert len({digest_of(cells) for cells in columns}) == len(columns)


@pytest.mark.parametrize("name", TASKS)
def test_a_rank_that_reads_nothing_has_nothing_to_compare(name: str, tmp_path: Path) -> None:
    write, task_of = TASKS[name]
    for split in SPLITS:
        write(tmp_path, "cat", "yes", split)
    data = task_of(str(tmp_path), str(tmp_path / "cache")).load(frozenset(), 1)
    assert data.own_digests() == {} == data.shared_digests()
