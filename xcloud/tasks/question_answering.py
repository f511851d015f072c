"""Extractive question answering (SQuAD 1.1): windows, spans and scores.

A sample is a window: the question and as much of the paragraph as fits. A long paragraph yields
several overlapping windows; the answer is the best-scoring span over all windows of a question.
Paragraphs are read by corpus/paragraphs.py.
Shapes: B samples (windows), S positions, N windows of a split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from xcloud.base.checks import check_int
from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.model import Head
from xcloud.contracts.task import Answers, Split
from xcloud.tasks.answer_scores import exact_match, word_f1
from xcloud.tasks.classification import check_fields, public_tokenizer
from xcloud.tasks.corpus.folder import Folder
from xcloud.tasks.corpus.hub import HubSet
from xcloud.tasks.corpus.paragraphs import (
    DemoParagraphs,
    Paragraph,
    ParagraphCorpus,
    Paragraphs,
    Question,
    Reading,
    num_questions,
)
from xcloud.tasks.corpus.text import SPLITS
from xcloud.tasks.pair_table import num_special
from xcloud.tasks.settings import DEMO, SAMPLES, Group, settings_of
from xcloud.tasks.sizes import SizedTask, Sizes, check_found, check_sizes
from xcloud.tasks.text_pairs import TextData, TextPairs, check_predictions, counted
from xcloud.tasks.tokenizer import PretrainedTokenizer, Tokenizer, TokenizerChoice
from xcloud.tasks.windows import Windows

LEAST_CONTEXT = 8  # paragraph tokens per window


@dataclass(frozen=True)
class QuestionAnswering(SizedTask):
    """Find the span of a paragraph that answers a question.

    max_length: tokens per window, question and special ids included. max_question: longer
    questions are truncated. stride: tokens between the starts of consecutive windows.
    tokenizer, cache_dir: as in Classification. sizes: windows per split, see sizes.py.

    Answers cannot be located or scored without their paragraph: a rank that reads labels must also
    read the text, as when the first and the last stage have one owner.
    """

    answers: ClassVar[Answers] = "span"
    corpus: ParagraphCorpus
    name: str = "squad"
    tokenizer: TokenizerChoice = field(default_factory=lambda: PretrainedTokenizer("minilm"))
    max_length: int = 384
    max_question: int = 64
    stride: int = 128
    sizes: Sizes = None
    cache_dir: str = ".cache"

    def __post_init__(self) -> None:
        check_int("task.max_question", self.max_question, 1)
        check_int("task.stride", self.stride, 1)
        least = self.max_question + num_special(True, 2) + LEAST_CONTEXT
        if isinstance(self.max_length, int) and self.max_length < least:
            raise ConfigError(
                f"task.max_length is {self.max_length}, too short for a question of "
                f"task.max_question={self.max_question} tokens and some of the paragraph; set "
                f"it to at least {least}, or lower task.max_question"
            )
        check_int("task.max_length", self.max_length, 1)
        check_sizes(self.sizes)

    def load(self, fields: frozenset[str], seed: int) -> QuestionAnsweringData:
        """`seed` is ignored: all seeds train and are scored on the same rows."""
        check_fields(self.name, fields)
        if "label" in fields and not fields & {"text", "types"}:
            raise ConfigError(
                f"{self.name}: a rank of this layout reads labels but not text, and an answer "
                "cannot be located or scored without its text. Give the first and "
                "the last stage to one owner, as in cluster.clouds={owner: {stages: [0, 2]}, "
                "other: {stages: [1]}}"
            )
        if not fields and self.sizes is not None:
            return QuestionAnsweringData(self, fields, None, self.sizes)
        reading = self.corpus.read()
        for split in SPLITS:
            if not num_questions(reading.splits[split]):
                raise DataError(f"{self.describe()}: the {split} split has no questions")
        tokenizer = public_tokenizer(self.tokenizer, self.cache_dir)
        windows = {s: self._windows(reading.splits[s], tokenizer) for s in SPLITS}
        found = {split: len(windows[split].table) for split in SPLITS}
        check_found(self.sizes, found, self.describe())
        if not fields:  # this rank keeps only the counts
            bare = Reading(reading.name, {}, reading.remarks, reading.agreed)
            return QuestionAnsweringData(self, fields, bare, found)
        return QuestionAnsweringData(self, fields, reading, found, tokenizer, windows)

    def _windows(self, paragraphs: Sequence[Paragraph], tokenizer: Tokenizer) -> Windows:
        return Windows.of(paragraphs, tokenizer, self.max_length, self.max_question, self.stride)


class QuestionAnsweringData(TextData):
    """One rank's view (TaskData): everything, or only the sizes if it sees no field."""

    def __init__(
        self,
        task: QuestionAnswering,
        fields: frozenset[str],
        reading: Reading | None,
        sizes: dict[Split, int] | Sizes,
        tokenizer: Tokenizer | None = None,
        windows: dict[Split, Windows] | None = None,
    ) -> None:
        assert sizes is not None
        self._task = task
        self._remarks = () if reading is None else reading.remarks
        self._agreed = {} if reading is None else dict(reading.agreed)
        self._windows = windows or {}
        self._paragraphs = reading.splits if windows and reading is not None else {}
        labels: dict[Split, Tensor] = {}
        if "label" in fields:
            for split, found in self._windows.items():
                asked = [q for p in self._paragraphs[split] for q in p.questions]
                places = [
                    found.label(window, asked[question].answers[0])
                    for window, question in enumerate(found.question_of)
                ]
                labels[split] = torch.tensor(places, dtype=torch.int64).view(-1, 3)
        text = None if tokenizer is None else TextPairs(tokenizer, task.max_length)
        tables = {split: found.table for split, found in self._windows.items()}
        super().__init__(fields, sizes, text, tables, labels)

    def describe(self) -> str:
        parts = [f"{self._task.describe()}: windows {counted(self._rows)}"]
        if self._paragraphs:
            asked = {split: num_questions(found) for split, found in self._paragraphs.items()}
            parts.append(f"questions {counted(asked)}")
        return "; ".join([*parts, *self._remarks])

    def fingerprint(self) -> str:
        task = self._task
        more = {"max_question": task.max_question, "stride": task.stride}
        return task.fingerprint(self._rows, self._agreed, **more)

    @property
    def head(self) -> Head | None:
        return Head("span", 2) if "label" in self._fields else None

    def sentences(self, field: str) -> Sequence[Sequence[int]]:
        """Training questions and the paragraph parts of their windows."""
        self._texts(field)
        windows = self._windows["train"]
        questions = [list(tokens) for tokens in windows.table.firsts]
        return questions + [windows.table.second(i) for i in range(len(windows.table))]

    def score(self, split: Split, predictions: dict[int, list[int]]) -> dict[str, float]:
        """F1 and exact match in percent, over questions with a window in `predictions`."""
        asked = self._questions(split)
        check_predictions(predictions, split, self._rows[split], "window")
        answers = self._answers(split, predictions)
        references = {i: [text for text, _ in asked[i].answers] for i in answers}
        f1 = sum(word_f1(text, references[i]) for i, text in answers.items())
        exact = sum(exact_match(text, references[i]) for i, text in answers.items())
        return {
            "f1": round(f1 / len(answers), 4),
            "exact_match": round(exact / len(answers), 4),
        }

    def signature(self) -> dict[str, str]:
        compared = "lowercase, without punctuation and articles; the best reference counts"
        return {
            "f1": f"F1 of words, mean over questions, percent; {compared}",
            "exact_match": f"share of exact answers, percent; {compared}",
        }

    def sample_outputs(self, split: Split, predictions: dict[int, list[int]], count: int) -> str:
        asked, lines = self._questions(split), []
        for question, answer in list(self._answers(split, predictions).items())[:count]:
            right = " | ".join(dict.fromkeys(text for text, _ in asked[question].answers))
            lines.append(f"question   {asked[question].text}")
            lines.append(f"reference  {right}\noutput     {answer}\n")
        return "\n".join(lines)

    def _answers(self, split: Split, predictions: dict[int, list[int]]) -> dict[int, str]:
        """Question number -> text of its best span over all windows."""
        self._questions(split)
        windows = self._windows[split]
        best: dict[int, int] = {}  # question -> window
        for window in sorted(predictions):
            question = windows.question_of[window]
            held = best.get(question)
            if held is None or predictions[window][2] > predictions[held][2]:
                best[question] = window
        answers = {}
        for question, window in best.items():
            start, stop = windows.span(window, *predictions[window][:2])
            context = self._paragraphs[split][windows.paragraph_of[question]].context
            answers[question] = context[start:stop].strip()
        return answers

    def _questions(self, split: Split) -> list[Question]:
        if "label" not in self._fields:
            raise DataError("labels are not visible here, so nothing can be scored")
        return [q for paragraph in self._paragraphs[split] for q in paragraph.questions]


OWN = Group(QuestionAnswering, ("corpus", "name"))
FILES = Group(Folder)
HUB_SET = Group(HubSet, ("train", "dev", "test", "own_names", "hidden_test"))


@settings_of(
    DEMO, OWN, num_train=3_000, num_dev=300, num_test=900, max_length=128, max_question=32,
    stride=48,
)  # fmt: skip
def squad_from_demo(**settings: Any) -> QuestionAnswering:
    """Demo stories with questions; sizes count questions."""
    return OWN.make(settings, corpus=DemoParagraphs(DEMO.make(settings)))


@settings_of(FILES, SAMPLES, OWN)
def squad_from_files(**settings: Any) -> QuestionAnswering:
    """Paragraphs in the folder `path`. max_*_samples count questions."""
    sampling = SAMPLES.make(settings)
    return OWN.make(settings, corpus=Paragraphs(FILES.make(settings), sampling))


@settings_of(HUB_SET, SAMPLES, OWN, path="rajpurkar/squad")
def squad_from_hub(**settings: Any) -> QuestionAnswering:
    """A hub data set in the format of SQuAD 1.1, one question per row."""
    sampling = SAMPLES.make(settings)
    return OWN.make(settings, corpus=Paragraphs(HUB_SET.make(settings), sampling))
