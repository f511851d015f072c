"""Paragraphs with extractive questions (SQuAD 1.1, XQuAD), and the overlapping windows that long
ones are cut into, each with its question; spans within them.

Rows of a source are one of
    context, qas                  a paragraph: [{"question", "answers"}], an answer being its text,
                                  or {"text": …, "start": character offset}
    context, question, answers    as on the hub: {"text": […], "answer_start": […]}
An answer without a start is placed at its first whole-word occurrence.

Maps between paragraph characters, paragraph tokens and positions in a window's batch row.
Shapes: N windows.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from xcloud.base.errors import DataError
from xcloud.tasks.corpus.rows import Rows, Table, chosen_rows
from xcloud.tasks.tables import PairTable, TokenTable, num_special
from xcloud.tasks.tokenizer import Tokenizer

KEYS = "task.path: a data set in the format of SQuAD"


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
    places = []
    for answer in qa["answers"]:
        place = _place(context, answer)
        if place is None:
            raise DataError(f"{where}: the answer {answer!r} is not at that place in its context")
        places.append(place)
    if not places:
        raise DataError(
            f"{where}: the question {qa['question']!r} has no answer; SQuAD 2.0's unanswerable "
            "questions are not supported"
        )
    return Question(qa["question"], tuple(places))


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


@dataclass(frozen=True)
class Windows:
    """The windows of a split, in question order.

    question_of: [N], each window's question. paragraph_of: each question's paragraph.
    offsets: per paragraph, the half-open character span of each token.
    """

    table: PairTable
    question_of: Sequence[int]
    paragraph_of: Sequence[int]
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
        asked = [q.text for paragraph in paragraphs for q in paragraph.questions]
        questions = TokenTable(tokenizer.encode(asked), max_question)
        encoded = tokenizer.encode_with_offsets([p.context for p in paragraphs])
        longest = max((len(ids) for ids, _ in encoded), default=0)
        contexts = TokenTable([ids for ids, _ in encoded], longest)

        room = max_length - num_special(True, tokenizer.num_separators)
        lengths = questions.lengths(torch.arange(len(questions))).tolist()
        question_of, paragraph_of, starts, counts = [], [], [], []
        question = 0
        for number, paragraph in enumerate(paragraphs):
            length = len(encoded[number][0])
            if not length:
                raise DataError(f"paragraph {number} has no words: {paragraph.context!r}")
            for _ in paragraph.questions:
                fits = room - lengths[question]
                for start in window_starts(length, fits, stride):
                    question_of.append(question)
                    starts.append(start)
                    counts.append(min(fits, length - start))
                paragraph_of.append(number)
                question += 1
        first_of = torch.tensor(question_of, dtype=torch.int64)
        table = PairTable(
            tokenizer.token_ids, tokenizer.num_separators,
            questions, first_of, questions.lengths(first_of),
            contexts, torch.tensor(paragraph_of, dtype=torch.int64)[first_of],
            torch.tensor(starts, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64),
        )  # fmt: skip
        return Windows(table, question_of, paragraph_of, [offsets for _, offsets in encoded])

    def label(self, window: int, answer: tuple[str, int]) -> tuple[int, int, int]:
        """Positions of the answer's first and last token in this window (0 and 0 if not fully
        inside), and of the paragraph's first token."""
        begin, start, length = self._place(window)
        tokens = self.offsets[self.paragraph_of[self.question_of[window]]]
        text, first_char = answer
        first = bisect_right(tokens, first_char, key=itemgetter(1))  # ends after it
        last = bisect_left(tokens, first_char + len(text), key=itemgetter(0)) - 1
        if not start <= first <= last < start + length:
            return 0, 0, begin
        return begin + first - start, begin + last - start, begin

    def span(self, window: int, first: int, last: int) -> tuple[int, int]:
        """Half-open character span of a prediction in its paragraph; (0, 0) if it lies outside the
        paragraph."""
        begin, start, length = self._place(window)
        first, last = first - begin, min(last - begin, length - 1)
        if not 0 <= first <= last:
            return 0, 0
        tokens = self.offsets[self.paragraph_of[self.question_of[window]]]
        return tokens[start + first][0], tokens[start + last][1]

    def _place(self, window: int) -> tuple[int, int, int]:
        """Position of the window's first paragraph token, its token number, and token count."""
        table = self.table
        begin = int(table.first_length[window]) + 1 + table.num_separators
        return begin, int(table.second_start[window]), int(table.second_length[window])


def window_starts(length: int, fits: int, stride: int) -> list[int]:
    """Start tokens of windows of `fits` tokens that cover a text of `length` tokens."""
    step, starts = min(stride, fits), [0]
    while starts[-1] + fits < length:
        starts.append(starts[-1] + step)
    return starts
