"""A long paragraph cut into windows that overlap, each beside the question; and spans in them.

Between characters of a paragraph, its tokens, and positions of a window's batch row.
Shapes: N windows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch

from xcloud.tasks.corpus.paragraphs import Paragraph
from xcloud.tasks.pair_table import PairTable, num_special
from xcloud.tasks.token_table import TokenTable
from xcloud.tasks.tokenizer import Tokenizer


@dataclass(frozen=True)
class Windows:
    """The windows of a split, in the order of the questions.

    question_of: N, number of the window's question. offsets: of each paragraph, the first and the
    behind-last character of each of its tokens. paragraph_of: number of a question's paragraph.
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
        """max_length: tokens of a window, special ids and question included, which keeps
        max_question tokens. stride: from the start of a window to that of the next."""
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
        """First and last token of the answer in this window, 0 and 0 where it is not whole in it,
        and the first token of the paragraph."""
        begin, start, length = self._place(window)
        tokens = self.offsets[self.paragraph_of[self.question_of[window]]]
        text, first_char = answer
        first = bisect_right(tokens, first_char, key=itemgetter(1))  # ends behind the first one
        last = bisect_left(tokens, first_char + len(text), key=itemgetter(0)) - 1
        if not start <= first <= last < start + length:
            return 0, 0, begin
        return begin + first - start, begin + last - start, begin

    def span(self, window: int, first: int, last: int) -> tuple[int, int]:
        """First and behind-last character of a predicted span in its paragraph; (0, 0) where it
        is no span of the paragraph."""
        begin, start, length = self._place(window)
        first, last = first - begin, min(last - begin, length - 1)
        if not 0 <= first <= last:
            return 0, 0
        tokens = self.offsets[self.paragraph_of[self.question_of[window]]]
        return tokens[start + first][0], tokens[start + last][1]

    def _place(self, window: int) -> tuple[int, int, int]:
        """Position of its first token of the paragraph, number of that token, how many there are."""
        table = self.table
        begin = int(table.first_length[window]) + 1 + table.num_separators
        return begin, int(table.second_start[window]), int(table.second_length[window])


def window_starts(length: int, fits: int, stride: int) -> list[int]:
    """First tokens of the windows of `fits` tokens that cover a text of `length` tokens."""
    step, starts = min(stride, fits), [0]
    while starts[-1] + fits < length:
        starts.append(starts[-1] + step)
    return starts
