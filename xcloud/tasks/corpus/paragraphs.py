"""Paragraphs with extractive questions: SQuAD 1.1, XQuAD. No tokenisation.

    train.jsonl      a paragraph per line: {"context": …, "qas": [{"id", "question", "answers"}]},
                     an answer being its text, or {"text": …, "start": character offset}
    train-v1.1.json  the official format, {"data": [{"paragraphs": [{"context", "qas"}]}]}
An answer without a start is placed at its first whole-word occurrence.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from xcloud.base.errors import DataError
from xcloud.contracts.task import Split
from xcloud.tasks.corpus.demo_labelled import DemoSizes, demo_stories
from xcloud.tasks.corpus.files import TextFile, json_rows, read_lines
from xcloud.tasks.corpus.folder import is_usual_name
from xcloud.tasks.corpus.hub import HubTable
from xcloud.tasks.corpus.source import Form, Found, Source, Table
from xcloud.tasks.corpus.text import SPLITS, Sampling, chosen_rows

EXPECTED = "train.jsonl (a paragraph a line) or train-v1.1.json"
VERSION = re.compile(r"-v\d+(\.\d+)*$")


class Question(NamedTuple):
    """answers: (text, character offset in the context); empty if not visible."""

    ident: str
    text: str
    answers: tuple[tuple[str, int], ...]


class Paragraph(NamedTuple):
    context: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Reading:
    """A corpus of paragraphs. remarks, agreed: as in Parallel."""

    name: str
    splits: Mapping[Split, Sequence[Paragraph]]
    remarks: Sequence[str] = ()
    agreed: Mapping[str, object] = field(default_factory=dict)


class ParagraphCorpus(Protocol):
    """A source of paragraphs. Frozen, validated on construction, reads only in `read`."""

    def describe(self) -> str: ...

    def check(self) -> None:
        """Quick check: raise DataError if data is missing."""

    def read(self) -> Reading:
        """Raises DataError."""


@dataclass(frozen=True)
class Paragraphs:
    """A ParagraphCorpus from a folder (dev-v1.1.json is accepted too) or a hub data set.

    sampling: shares count paragraphs, so that splits share no context; limits count questions.
    """

    source: Source
    sampling: Sampling = field(default_factory=Sampling)

    def describe(self) -> str:
        return self.source.describe()

    def check(self) -> None:
        if self.source.check():
            self._find()

    def read(self) -> Reading:
        found = self._find()
        splits: dict[Split, Sequence[Paragraph]] = {
            split: [p for tables in parts.values() for t in tables for p in paragraphs_of(t)]
            for split, parts in found.splits.items()
        }
        rows, remarks = arranged(splits, self.sampling, self.source.where)
        agreed = {**found.facts, "sampling": repr(self.sampling)}
        return Reading(self.describe(), rows, remarks, agreed)

    def _find(self) -> Found:
        return self.source.find(Form(EXPECTED, _is_usual, {"jsonl": "json", "json": "json"}))


@dataclass(frozen=True)
class DemoParagraphs:
    """Short generated stories with three questions each; sizes count questions."""

    sizes: DemoSizes = field(default_factory=lambda: DemoSizes(3_000, 300, 900))

    def describe(self) -> str:
        return "demo stories"

    def check(self) -> None:
        """Nothing to check."""

    def read(self) -> Reading:
        splits: dict[Split, Sequence[Paragraph]] = {}
        stories_of = demo_stories(self.sizes)
        for split, stories in stories_of.items():
            paragraphs = []
            for number, story in enumerate(stories):
                questions = (
                    Question(f"{split}{number}.{i}", asked, ((answer, start),))
                    for i, (asked, answer, start) in enumerate(story.questions)
                )
                paragraphs.append(Paragraph(story.text, tuple(questions)))
            splits[split] = paragraphs
        # The text is public, so a digest of it can show that all clouds run the same grammar.
        digest = hashlib.sha256(repr(stories_of).encode()).hexdigest()
        remarks = [f"seed {self.sizes.seed}"]
        return Reading(self.describe(), splits, remarks, {"demo": digest})


def arranged(
    splits: Mapping[Split, Sequence[Paragraph]], sampling: Sampling, where: str
) -> tuple[dict[Split, Sequence[Paragraph]], list[str]]:
    """As labelled.arranged, but held out by paragraph: without a test set, dev becomes test."""
    found, remarks = dict(splits), []
    if "test" not in found and "dev" in found:
        found["test"] = found.pop("dev")
        remarks.append("test: the dev set, as there is no test set")
    train = found["train"]
    if not train:
        raise DataError(f"{where}: the training set has no paragraphs")
    for split, rows in sampling.held_out(found, len(train), where, "paragraphs").items():
        found[split] = [train[row] for row in rows]
        if split != "train":
            remarks.append(
                f"{split}: {len(rows)} paragraphs held out of train, seed {sampling.seed}"
            )
    for split in SPLITS:
        most = sampling.max_train_pairs if split == "train" else sampling.max_eval_pairs
        before = num_questions(found[split])
        if most is not None and most < before:
            found[split] = _sampled(found[split], before, most, sampling.seed)
            remarks.append(f"{split}: a sample of its {before:,} questions, seed {sampling.seed}")
    return found, remarks


def num_questions(paragraphs: Iterable[Paragraph]) -> int:
    return sum(len(paragraph.questions) for paragraph in paragraphs)


def _sampled(paragraphs: Sequence[Paragraph], there: int, most: int, seed: int) -> list[Paragraph]:
    chosen, number, kept = set(chosen_rows(there, most, seed)), 0, []
    for paragraph in paragraphs:
        count = len(paragraph.questions)
        questions = tuple(q for i, q in enumerate(paragraph.questions) if number + i in chosen)
        number += count
        if questions:
            kept.append(Paragraph(paragraph.context, questions))
    return kept


def paragraphs_of(table: Table) -> list[Paragraph]:
    if isinstance(table, HubTable):
        return _grouped(table)
    assert isinstance(table, TextFile)
    return read_paragraphs(table.path)


def read_paragraphs(path: Path) -> list[Paragraph]:
    """From a .jsonl or an official .json file, plain or gzipped."""
    if not path.name.removesuffix(".gz").endswith(".json"):
        return [_paragraph(row, f"{path}, line {number}") for number, row in json_rows(path)]
    try:
        whole = json.loads("\n".join(read_lines(path)))
        rows = [row for article in whole["data"] for row in article["paragraphs"]]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(
            f'{path}: not of the form {{"data": [{{"paragraphs": [...]}}]}} ({error!r}); '
            "a file with one paragraph per line must be named .jsonl"
        ) from error
    return [_paragraph(row, f"{path}, paragraph {i}") for i, row in enumerate(rows, start=1)]


def _paragraph(row: Any, where: str) -> Paragraph:
    try:
        context, questions = row["context"], []
        for number, qa in enumerate(row["qas"]):
            places = [_place(context, answer) for answer in qa["answers"]]
            _check_answered(places, qa["question"], where)
            if None in places:
                missing = qa["answers"][places.index(None)]
                raise DataError(
                    f"{where}: the answer {missing!r} is not at that place in its context"
                )
            known = tuple(place for place in places if place is not None)
            questions.append(Question(str(qa.get("id", number)), qa["question"], known))
        return Paragraph(context, tuple(questions))
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f'{where}: expected {{"context", "qas": [{{"id", "question", "answers"}}]}}, but '
            f"{error!r}"
        ) from error


def _check_answered(answers: Sequence[object], question: str, where: str) -> None:
    if not answers:
        raise DataError(
            f"{where}: the question {question!r} has no answer; SQuAD 2.0's unanswerable "
            "questions are not supported"
        )


def _place(context: str, answer: Any) -> tuple[str, int] | None:
    """The answer's text and character offset; None if it is not there."""
    if isinstance(answer, str):
        text, start = answer, None
    else:
        text, start = answer["text"], answer.get("start", answer.get("answer_start"))
    if start is not None:
        return (text, start) if context[start : start + len(text)] == text else None
    whole = re.search(rf"(?<!\w){re.escape(text)}(?!\w)", context)
    at = whole.start() if whole else context.find(text)
    return (text, at) if text and at >= 0 else None


def _grouped(table: HubTable) -> list[Paragraph]:
    """Group rows (one question each) by consecutive equal contexts."""
    names = ("id", "context", "question", "answers")
    found: list[tuple[str, list[Question]]] = []
    try:
        for batch in table.batches(names):
            columns = (batch[name] for name in names)
            for ident, context, asked, answers in zip(*columns, strict=True):
                pairs = zip(answers["text"], answers["answer_start"], strict=True)
                if not found or found[-1][0] != context:
                    found.append((context, []))
                found[-1][1].append(Question(ident, asked, tuple(pairs)))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{table.where}: expected the columns id, context, question and answers (text, "
            f"answer_start), but {error!r}"
        ) from error
    for question in (question for _, questions in found for question in questions):
        _check_answered(question.answers, question.text, table.where)
    return [Paragraph(context, tuple(questions)) for context, questions in found]


def _is_usual(name: str, split: Split) -> bool:
    return is_usual_name(VERSION.sub("", name), split)
