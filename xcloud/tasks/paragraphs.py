"""Paragraphs with extractive questions (SQuAD 1.1, XQuAD), and the overlapping windows that long
ones are cut into, each with its question; spans within them.

Rows of a source are one of
    context, qas            a paragraph: [{"id", "question", "answers"}], an answer being its text,
                            or {"text": …, "start": character offset}
    id, context, question, answers    as on the hub: {"text": […], "answer_start": […]}
An answer without a start is placed at its first whole-word occurrence.

Maps between paragraph characters, paragraph tokens and positions in a window's batch row.
Shapes: N windows.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from xcloud.base.errors import DataError
from xcloud.tasks.corpus.rows import Rows, Table, chosen_rows
from xcloud.tasks.tables import PairTable, TokenTable, num_special
from xcloud.tasks.tokenizer import Tokenizer

KEYS = "task.path: a data set in the format of SQuAD"


class Question(NamedTuple):
    """answers: (text, character offset in the context); empty if not visible."""

    ident: str
    text: str
    answers: tuple[tuple[str, int], ...]


class Paragraph(NamedTuple):
    context: str
    questions: tuple[Question, ...]


def rows_of(table: Table) -> Rows:
    """Rows with the one column "paragraph"."""
    read = _paragraphs if "qas" in table.columns() else _grouped
    paragraphs = list(read(table))
    return Rows(len(paragraphs), {"paragraph": paragraphs})


def num_questions(paragraphs: Iterable[Paragraph]) -> int:
    return sum(len(paragraph.questions) for paragraph in paragraphs)


def size(rows: Rows) -> int:
    """Questions."""
    return num_questions(rows.texts["paragraph"])


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


def _paragraphs(table: Table) -> Iterable[Paragraph]:
    for number, (context, qas) in enumerate(table.rows(("context", "qas"), KEYS), start=1):
        where = f"{table.where}, paragraph {number}"
        try:
            questions = []
            for ident, qa in enumerate(qas):
                places = [_place(context, answer) for answer in qa["answers"]]
                _check_answered(places, qa["question"], where)
                if None in places:
                    missing = qa["answers"][places.index(None)]
                    raise DataError(
                        f"{where}: the answer {missing!r} is not at that place in its context"
                    )
                known = tuple(place for place in places if place is not None)
                questions.append(Question(str(qa.get("id", ident)), qa["question"], known))
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f'{where}: expected {{"context", "qas": [{{"id", "question", "answers"}}]}}, but '
                f"{error!r}"
            ) from error
        yield Paragraph(context, tuple(questions))


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


def _grouped(table: Table) -> list[Paragraph]:
    """Group rows (one question each) by consecutive equal contexts."""
    groups: list[tuple[str, list[Question]]] = []
    try:
        for ident, context, asked, answers in table.rows(
            ("id", "context", "question", "answers"), KEYS
        ):
            pairs = zip(answers["text"], answers["answer_start"], strict=True)
            if not groups or groups[-1][0] != context:
                groups.append((context, []))
            groups[-1][1].append(Question(ident, asked, tuple(pairs)))
            _check_answered(groups[-1][1][-1].answers, asked, table.where)
    except DataError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{table.where}: expected the columns id, context, question and answers (text, "
            f"answer_start), but {error!r}"
        ) from error
    return [Paragraph(context, tuple(questions)) for context, questions in groups]


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
