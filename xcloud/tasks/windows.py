"""Overlapping windows over long paragraphs, each with its question; spans within them.

Maps between paragraph characters, paragraph tokens and positions in a window's batch row.
Shapes: N windows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch

from xcloud.base.errors import DataError
from xcloud.tasks.corpus.paragraphs import Paragraph
from xcloud.tasks.pair_table import PairTable, num_special
from xcloud.tasks.token_table import TokenTable
from xcloud.tasks.tokenizer import Tokenizer


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
