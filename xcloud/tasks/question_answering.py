"""Extractive question answering (SQuAD 1.1): windows, spans and scores.

A sample is a window: the question and as much of the paragraph as fits. A long paragraph yields
several overlapping windows; the answer is the best-scoring span over all windows of a question.
Paragraphs and windows are made in paragraphs.py.
Scores: Rajpurkar et al., arXiv:1606.05250, section 6.1. Answers are lowercased and stripped of
ASCII punctuation, English articles and extra spaces before they are compared.
Shapes: B samples (windows), S positions, N windows of a split.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.settings import Positive, settings
from xcloud.contracts.model import Head
from xcloud.contracts.task import SPLITS, Answers, Scores, Split
from xcloud.tasks.corpus.demo import DemoParagraphs
from xcloud.tasks.corpus.folder import Folder
from xcloud.tasks.corpus.hub import Hub
from xcloud.tasks.corpus.rows import Corpus, Form
from xcloud.tasks.paragraphs import (
    Paragraph,
    Question,
    Windows,
    rows_of,
    sample,
    size,
)
from xcloud.tasks.public_text import public_tokenizer
from xcloud.tasks.scores import ratio_error
from xcloud.tasks.tables import num_special
from xcloud.tasks.text_task import TextData, TextTask, check_predictions, counted
from xcloud.tasks.tokenizer import PretrainedTokenizer, Tokenizer, TokenizerChoice

VERSION = re.compile(r"-v\d+(\.\d+)*$")
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
LEAST_CONTEXT = 8  # paragraph tokens per window


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
            return QuestionAnsweringData(self, fields, Corpus({}), self.sizes)
        corpus = self.read()
        tokenizer = public_tokenizer(self.tokenizer, self.cache_dir)
        lengths = (self.max_length, self.max_question, self.stride)
        windows = {
            split: Windows.of(rows.texts["paragraph"], tokenizer, *lengths)
            for split, rows in corpus.splits.items()
        }
        sizes = {split: len(windows[split].table) for split in SPLITS}
        self.check_rows(sizes)
        if not fields:  # this rank keeps only the counts
            return QuestionAnsweringData(self, fields, corpus, sizes)
        return QuestionAnsweringData(self, fields, corpus, sizes, tokenizer, windows)


class QuestionAnsweringData(TextData[QuestionAnswering]):
    """One rank's view (TaskData): everything, or only the sizes if it sees no field."""

    def __init__(
        self,
        task: QuestionAnswering,
        fields: frozenset[str],
        corpus: Corpus,
        sizes: Mapping[Split, int],
        tokenizer: Tokenizer | None = None,
        windows: Mapping[Split, Windows] | None = None,
    ) -> None:
        self._windows = dict(windows or {})
        self.head = Head("span", 2) if "label" in fields else None
        self._asked: dict[Split, list[tuple[str, Question]]] = {}  # each with its context
        for split in self._windows:
            paragraphs: Sequence[Paragraph] = corpus.splits[split].texts["paragraph"]
            self._asked[split] = [(p.context, q) for p in paragraphs for q in p.questions]
        labels: dict[Split, Tensor] = {}
        if "label" in fields:
            for split, made in self._windows.items():
                places = [
                    made.label(window, self._asked[split][question][1].answers[0])
                    for window, question in enumerate(made.question_of)
                ]
                labels[split] = torch.tensor(places, dtype=torch.int64).view(-1, 3)
        tables = {split: made.table for split, made in self._windows.items()}
        super().__init__(task, corpus, fields, sizes, tokenizer, tables, labels)

    def describe(self) -> str:
        asked = {split: len(questions) for split, questions in self._asked.items()}
        questions = [f"questions {counted(asked)}"] if asked else []
        windows = f"{self._task.describe()}: windows {counted(self._rows)}"
        return "; ".join([windows, *questions, *self._remarks])

    def sentences(self, field: str) -> Sequence[Sequence[int]]:
        """Training questions and the paragraph parts of their windows."""
        self._text(field)
        windows = self._windows["train"]
        questions = [list(tokens) for tokens in windows.table.firsts]
        return questions + [windows.table.second(i) for i in range(len(windows.table))]

    def score(self, split: Split, predictions: dict[int, list[int]]) -> Scores:
        """F1 and exact match in percent, over questions with a window in `predictions`."""
        asked = self._questions(split)
        check_predictions(predictions, split, self._rows[split], "window")
        samples: dict[int, dict[str, Any]] = {}
        for number, answer in self._answers(split, predictions).items():
            references = [text for text, _ in asked[number][1].answers]
            samples[number] = {
                "prediction": answer,
                "reference": references[0],
                "f1": word_f1(answer, references),
                "exact_match": exact_match(answer, references),
            }
        of = {name: [each[name] for each in samples.values()] for name in ("f1", "exact_match")}
        return Scores(
            {name: round(sum(each) / len(each), 4) for name, each in of.items()},
            {name: round(ratio_error(each, 1), 4) for name, each in of.items()},
            samples,
        )

    def signature(self) -> dict[str, str]:
        compared = "lowercase, without punctuation and articles; the best reference counts"
        return {
            "f1": f"F1 of words, mean over questions, percent; {compared}",
            "exact_match": f"share of exact answers, percent; {compared}",
        }

    def sample_outputs(self, split: Split, predictions: dict[int, list[int]], count: int) -> str:
        asked, lines = self._questions(split), []
        for number, answer in list(self._answers(split, predictions).items())[:count]:
            question = asked[number][1]
            right = " | ".join(dict.fromkeys(text for text, _ in question.answers))
            lines.append(f"question   {question.text}")
            lines.append(f"reference  {right}\noutput     {answer}\n")
        return "\n".join(lines)

    def _answers(self, split: Split, predictions: dict[int, list[int]]) -> dict[int, str]:
        """Question number -> text of its best span over all windows."""
        asked, windows = self._questions(split), self._windows[split]
        best: dict[int, int] = {}  # question -> window
        for window in sorted(predictions):
            question = windows.question_of[window]
            held = best.get(question)
            if held is None or predictions[window][2] > predictions[held][2]:
                best[question] = window
        answers = {}
        for question, window in best.items():
            start, stop = windows.span(window, *predictions[window][:2])
            answers[question] = asked[question][0][start:stop].strip()
        return answers

    def _questions(self, split: Split) -> list[tuple[str, Question]]:
        if "label" not in self._fields:
            raise DataError("labels are not visible here, so nothing can be scored")
        return self._asked[split]


def normalised(answer: str) -> str:
    """Normalise an answer for comparison: "The  Denver Broncos!" -> "denver broncos"."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """100 if the answer equals one of the references, else 0."""
    return 100.0 * any(normalised(answer) == normalised(right) for right in references)


def word_f1(answer: str, references: Sequence[str]) -> float:
    """F1 over the words shared with a reference; best reference."""
    return max(_f1(normalised(answer).split(), normalised(r).split()) for r in references)


def _f1(words: list[str], right: list[str]) -> float:
    shared = sum((Counter(words) & Counter(right)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(words), shared / len(right)
    return 100.0 * 2 * precision * recall / (precision + recall)


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
