"""Extractive question answering (SQuAD 1.1): windows, spans and scores.

A sample is a window: the question and as much of the paragraph as fits. A long paragraph yields
several overlapping windows; the answer is the best-scoring span over all windows of a question.

Rows of a source (SQuAD 1.1, XQuAD) are one of
    context, qas                  a paragraph: [{"question", "answers"}], an answer being its text,
                                  or {"text": …, "start": character offset}
    context, question, answers    as on the hub: {"text": […], "answer_start": […]}
An answer without a start is placed at its first whole-word occurrence.

Shapes: B samples (windows), S positions, N windows of a split.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.settings import Positive, settings
from xcloud.contracts.model import Head
from xcloud.contracts.task import SPLITS, Answers, Scores, Split
from xcloud.tasks.corpus.demo import DemoParagraphs
from xcloud.tasks.corpus.folder import Folder
from xcloud.tasks.corpus.hub import Hub
from xcloud.tasks.corpus.rows import Corpus, Form, Rows, Table, chosen_rows
from xcloud.tasks.public_text import public_tokenizer
from xcloud.tasks.scores import bootstrap_error, exact_match, ratio_error, word_f1
from xcloud.tasks.tables import PairTable, num_special
from xcloud.tasks.text_task import TextData, TextTask, counted
from xcloud.tasks.tokenizer import PretrainedTokenizer, Tokenizer, TokenizerChoice

KEYS = "task.path: a data set in the format of SQuAD"
VERSION = re.compile(r"-v\d+(\.\d+)*$")
LEAST_CONTEXT = 8  # paragraph tokens per window


class Question(NamedTuple):
    """answers: (text, character offset in the context)."""

    text: str
    answers: tuple[tuple[str, int], ...]


class Paragraph(NamedTuple):
    context: str
    questions: tuple[Question, ...]


def rows_of(table: Table) -> Rows:
    """Rows with the one column "paragraph"."""
    paragraphs = list(_paragraphs(table))
    return Rows(len(paragraphs), {"paragraph": paragraphs})


def size(rows: Rows) -> int:
    """Questions."""
    return sum(len(paragraph.questions) for paragraph in rows.texts["paragraph"])


def sample(rows: Rows, most: int, seed: int) -> Rows:
    """A seeded sample of questions, with their paragraphs."""
    chosen, number, kept = set(chosen_rows(size(rows), most, seed)), 0, []
    for paragraph in rows.texts["paragraph"]:
        questions = paragraph.questions
        asked = tuple(q for i, q in enumerate(questions, start=number) if i in chosen)
        number += len(questions)
        if asked:
            kept.append(Paragraph(paragraph.context, asked))
    return Rows(len(kept), {"paragraph": kept})


def _paragraphs(table: Table) -> Iterator[Paragraph]:
    try:
        for number, (context, qas) in enumerate(_records(table), start=1):
            where = f"{table.where}, paragraph {number}"
            yield Paragraph(context, tuple(_question(context, qa, where) for qa in qas))
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f'{table.where}: expected {{"context", "qas": [{{"question", "answers"}}]}}, or '
            f"the columns context, question, answers, but {error!r}"
        ) from error


def _records(table: Table) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """context, qas; rows of one question each are grouped by consecutive equal contexts."""
    if "qas" in table.columns():
        yield from table.rows(("context", "qas"), KEYS)
        return
    rows = table.rows(("context", "question", "answers"), KEYS)
    for context, asked in groupby(rows, key=itemgetter(0)):
        yield context, [
            {"question": question, "answers": [
                {"text": text, "start": start}
                for text, start in zip(answers["text"], answers["answer_start"], strict=True)
            ]}
            for _, question, answers in asked
        ]  # fmt: skip


def _question(context: str, qa: Mapping[str, Any], where: str) -> Question:
    if not qa["answers"]:
        raise DataError(
            f"{where}: the question {qa['question']!r} has no answer; SQuAD 2.0's unanswerable "
            "questions are not supported"
        )
    return Question(qa["question"], tuple(_place(context, a, where) for a in qa["answers"]))


def _place(context: str, answer: Any, where: str) -> tuple[str, int]:
    """The answer's text and character offset."""
    if isinstance(answer, str):
        whole = re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", context)
        text, start = answer, whole.start() if whole else context.find(answer)
    else:
        text, start = answer["text"], answer.get("start", answer.get("answer_start"))
        if start is None:
            return _place(context, text, where)
    if answer == "" or start < 0 or context[start : start + len(text)] != text:
        raise DataError(f"{where}: the answer {answer!r} is not at that place in its context")
    return text, start


@dataclass(frozen=True)
class Windows:
    """The windows of a split, in question order.

    asked: each question, with its context. question_of: [N], of each window. starts: [N], number
    of its first paragraph token. offsets: [N], the half-open character span of every token of its
    paragraph.
    """

    table: PairTable
    asked: Sequence[tuple[str, Question]]
    question_of: Sequence[int]
    starts: Sequence[int]
    offsets: Sequence[Sequence[tuple[int, int]]]

    @staticmethod
    def of(
        paragraphs: Sequence[Paragraph],
        tokenizer: Tokenizer,
        max_length: int,
        max_question: int,
        stride: int,
    ) -> Windows:
        """max_length: tokens per window, special ids and question included; questions are
        truncated to max_question. stride: tokens between the starts of consecutive windows."""
        asked = [(p.context, question) for p in paragraphs for question in p.questions]
        questions = enumerate(tokenizer.encode([question.text for _, question in asked]))
        encoded = tokenizer.encode_with_offsets([p.context for p in paragraphs])
        room = max_length - num_special(True, tokenizer.num_separators)
        texts, question_of, starts, offsets = [], [], [], []
        for paragraph, (ids, spans) in zip(paragraphs, encoded, strict=True):
            if not ids:
                raise DataError(f"a paragraph has no words: {paragraph.context!r}")
            for number, question in islice(questions, len(paragraph.questions)):
                head = question[:max_question]
                fits = room - len(head)
                for start in window_starts(len(ids), fits, stride):
                    texts.append((head, ids[start : start + fits]))
                    question_of.append(number)
                    starts.append(start)
                    offsets.append(spans)
        table = PairTable(texts, tokenizer.token_ids, tokenizer.num_separators)
        return Windows(table, asked, question_of, starts, offsets)

    def label(self, window: int) -> tuple[int, int, int]:
        """Positions of the first answer's first and last token in this window (0 and 0 if not
        fully inside), and of the paragraph's first token."""
        begin, end, tokens = self._place(window)
        text, first_char = self.asked[self.question_of[window]][1].answers[0]
        first = bisect_right(tokens, first_char, key=itemgetter(1))  # ends after it
        last = bisect_left(tokens, first_char + len(text), key=itemgetter(0)) - 1
        shift = begin - self.starts[window]
        inside = begin <= first + shift <= last + shift < end
        return (first + shift, last + shift, begin) if inside else (0, 0, begin)

    def answer(self, window: int, first: int, last: int) -> str:
        """The text from position to position; empty if it begins outside the paragraph."""
        begin, end, tokens = self._place(window)
        last = min(last, end - 1)
        if not begin <= first <= last:
            return ""
        shift = begin - self.starts[window]
        context = self.asked[self.question_of[window]][0]
        return context[tokens[first - shift][0] : tokens[last - shift][1]].strip()

    def _place(self, window: int) -> tuple[int, int, Sequence[tuple[int, int]]]:
        """The half-open range of positions of paragraph tokens, and the paragraph's spans."""
        begin, length = int(self.table.second_at[window]), len(self.table.tokens[window])
        return begin, length - 1, self.offsets[window]


def window_starts(length: int, fits: int, stride: int) -> list[int]:
    """Start tokens of windows of `fits` tokens that cover a text of `length` tokens."""
    step = min(stride, fits)
    return list(range(0, max(0, length - fits) + step, step))


@settings("task", kw_only=True)
class QuestionAnswering(TextTask):
    """Find the span of a paragraph that answers a question.

    max_length: tokens per window, question and special ids included. max_question: longer
    questions are truncated. stride: tokens between the starts of consecutive windows.
    sizes: windows per split. Shares and splits count paragraphs, so that splits share no context;
    limits count questions.

    Answers cannot be located or scored without their paragraph: a rank that reads labels must also
    read the text, as when the first and the last stage have one owner.
    """

    answers: ClassVar[Answers] = "span"
    name: ClassVar[str] = "squad"
    form: ClassVar[Form] = Form(
        "train.jsonl (a paragraph a line) or train-v1.1.json", {"jsonl": "json", "json": "squad"}
    )
    tokenizer: TokenizerChoice = PretrainedTokenizer("minilm")
    max_length: Positive = 384
    max_question: Positive = 64
    stride: Positive = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.max_question + num_special(True, 2) + LEAST_CONTEXT
        if self.max_length < least:
            raise ConfigError(
                f"task.max_length is {self.max_length}, too short for a question of "
                f"task.max_question={self.max_question} tokens and some of the paragraph; set "
                f"it to at least {least}, or lower task.max_question"
            )

    def read(self) -> Corpus:
        """Rows with the column "paragraph". Raises DataError."""
        tables = self.find(self.form)
        return self.arrange(
            tables, rows_of, dev_as_test=True, size=size, sample=sample, unit="questions"
        )

    def agreed_settings(self) -> dict[str, object]:
        lengths = {"max_question": self.max_question, "stride": self.stride}
        return {**super().agreed_settings(), **lengths}

    def load(self, fields: frozenset[str], seed: int) -> QuestionAnsweringData:
        """`seed` is ignored: all seeds train and are scored on the same rows."""
        self.check_fields(fields)
        if "label" in fields and not fields & {"text", "types"}:
            raise ConfigError(
                f"{self.name}: a rank of this layout reads labels but not text, and an answer "
                "cannot be located or scored without its text. Give the first and "
                "the last stage to one owner, as in cluster.clouds={owner: {stages: [0, 2]}, "
                "other: {stages: [1]}}"
            )
        if not fields and self.sizes is not None:
            return QuestionAnsweringData(self, Corpus.unseen(self.sizes), self.sizes, fields)
        corpus = self.read()
        tokenizer = public_tokenizer(self.tokenizer, self.cache_dir)
        lengths = (self.max_length, self.max_question, self.stride)
        windows = {
            split: Windows.of(rows.texts["paragraph"], tokenizer, *lengths)
            for split, rows in corpus.splits.items()
        }
        sizes = {split: len(windows[split].starts) for split in SPLITS}
        self.check_rows(sizes)
        if not fields:  # this rank keeps only the counts
            return QuestionAnsweringData(self, corpus, sizes, fields)
        return QuestionAnsweringData(self, corpus, sizes, fields, tokenizer, windows)


class QuestionAnsweringData(TextData[QuestionAnswering]):
    """One rank's view (TaskData): everything, or only the sizes if it sees no field."""

    def __init__(
        self,
        task: QuestionAnswering,
        corpus: Corpus,
        sizes: Mapping[Split, int],
        fields: frozenset[str],
        tokenizer: Tokenizer | None = None,
        windows: Mapping[Split, Windows] | None = None,
    ) -> None:
        self._windows = dict(windows or {})
        tables = {split: made.table for split, made in self._windows.items()}
        labels = {}
        if "label" in fields:
            self.head = Head("span", 2)
            labels = {
                split: torch.tensor([made.label(i) for i in range(sizes[split])])
                for split, made in self._windows.items()
            }
        super().__init__(task, corpus, sizes, fields, tokenizer, tables, labels)

    def describe(self) -> str:
        asked = {split: len(made.asked) for split, made in self._windows.items()}
        questions = [f"questions {counted(asked)}"] if asked else []
        windows = f"{self._task.describe()}: windows {counted(self._rows)}"
        return "; ".join([windows, *questions, *self._remarks])

    def sentences(self, field: str) -> Sequence[Sequence[int]]:
        """Training questions and the paragraph parts of their windows."""
        self.check_visible(field, "text field")
        windows = self._windows["train"]
        texts = [windows.table.texts(i) for i in range(self._rows["train"])]
        questions = dict(zip(windows.question_of, texts, strict=True))
        return [text[0] for text in questions.values()] + [text[1] for text in texts]

    def score(self, split: Split, predictions: dict[int, list[int]]) -> Scores:
        """F1 and exact match in percent, over questions with a window in `predictions`."""
        self.check_predictions(split, predictions)
        samples: dict[int, dict[str, Any]] = {}
        for number, (question, answer) in self._answers(split, predictions).items():
            references = [text for text, _ in question.answers]
            samples[number] = {
                "prediction": answer,
                "reference": references[0],
                "f1": word_f1(answer, references),
                "exact_match": exact_match(answer, references),
            }
        f1, exact = (np.array([s[k] for s in samples.values()]) for k in ("f1", "exact_match"))
        f1_error = bootstrap_error(len(f1), lambda counts: float(np.average(f1, weights=counts)))
        return Scores(
            {"f1": round(float(f1.mean()), 4), "exact_match": round(float(exact.mean()), 4)},
            {"f1": round(f1_error, 4), "exact_match": round(ratio_error(exact, 1), 4)},
            samples,
        )

    def signature(self) -> dict[str, str]:
        compared = "lowercase, without punctuation and articles; the best reference counts"
        return {
            "f1": f"F1 of words, mean over questions, percent; {compared}",
            "exact_match": f"share of exact answers, percent; {compared}",
        }

    def sample_outputs(self, split: Split, predictions: dict[int, list[int]], count: int) -> str:
        lines = []
        for question, answer in islice(self._answers(split, predictions).values(), count):
            right = " | ".join(dict.fromkeys(text for text, _ in question.answers))
            lines.append(f"question   {question.text}")
            lines.append(f"reference  {right}\noutput     {answer}\n")
        return "\n".join(lines)

    def _answers(
        self, split: Split, predictions: dict[int, list[int]]
    ) -> dict[int, tuple[Question, str]]:
        """By number each question, and its best span over all windows."""
        windows = self._windows[split]
        best: dict[int, int] = {}  # question -> window
        for window in sorted(predictions):
            question = windows.question_of[window]
            held = best.get(question)
            if held is None or predictions[window][2] > predictions[held][2]:
                best[question] = window
        return {
            question: (
                windows.asked[question][1],
                windows.answer(window, *predictions[window][:2]),
            )
            for question, window in best.items()
        }


@settings("task", kw_only=True)
class DemoQuestionAnswering(DemoParagraphs, QuestionAnswering):
    """Demo stories with questions."""


@settings("task", kw_only=True)
class FolderQuestionAnswering(Folder, QuestionAnswering):
    """Paragraphs in the folder `path`; dev-v1.1.json is accepted too."""

    def _is_usual(self, name: str, split: Split) -> bool:
        return super()._is_usual(VERSION.sub("", name), split)


@settings("task", kw_only=True)
class HubQuestionAnswering(Hub, QuestionAnswering):
    """A hub data set in the format of SQuAD 1.1, one question per row."""
