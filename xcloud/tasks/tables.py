"""Token ids of many samples in flat tensors. Knows no text and no vocabulary.

    TokenTable   rows of any lengths
    PairTable    single texts or pairs, joined as a checkpoint expects:
        bos a eos            types 0 0 0
        bos a eos b eos      types 0 0 0 1 1      (num_separators eos between a and b)

    Document     part of a row; `pack` fills rows with whole ones, for a causal language model

Shapes: B samples, S positions, N rows of the table.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from xcloud.contracts.model import NO_LABEL, NO_TOKEN, TokenIds

OPEN = 64  # samples that a document is tried in; more fill little better


def write_table(rows: Iterable[Sequence[int]], tokens: Path, offsets: Path) -> None:
    """Stream a table to two files: int32 tokens, int64 offsets."""
    ends = array("q", [0])
    with tokens.open("wb") as file:
        for row in rows:
            array("i", row).tofile(file)
            ends.append(ends[-1] + len(row))
    with offsets.open("wb") as file:
        ends.tofile(file)


class TokenTable:
    """Rows of tokens; `pad` fills up the shorter ones of a batch. 4 bytes per token, 8 per row.
    num_cut: texts that were longer than a row may be."""

    num_cut = 0

    def __init__(self, rows: Iterable[Sequence[int]], pad: int = 0) -> None:
        flat, ends = array("i"), [0]
        for row in rows:
            flat.extend(row)
            ends.append(len(flat))
        self._flat = torch.from_numpy(np.asarray(flat))
        self._offsets = torch.tensor(ends)
        self._pad = pad

    @classmethod
    def mapped(cls, tokens: Path, offsets: Path) -> TokenTable:
        """Memory-map files written by `write_table`; they must stay in place."""
        table = cls(())
        num_rows, num_tokens = offsets.stat().st_size // 8, tokens.stat().st_size // 4
        table._offsets = torch.from_file(str(offsets), size=num_rows, dtype=torch.int64)
        table._flat = torch.from_file(str(tokens), size=num_tokens, dtype=torch.int32)
        return table

    @property
    def num_tokens(self) -> int:
        return len(self._flat)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> list[int]:
        start, end = self._offsets[range(len(self))[index] :][:2].tolist()
        return self._flat[start:end].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        flat = self._flat.tolist()
        return (flat[start:end] for start, end in pairwise(self._offsets.tolist()))

    def lengths(self, ids: Tensor) -> Tensor:
        """int64 [B]."""
        return self._offsets[ids + 1] - self._offsets[ids]

    def padded(self, ids: Tensor) -> Tensor:
        """int64 [B, S], S being the longest of these rows."""
        lengths_B1 = self.lengths(ids)[:, None]
        position_S = torch.arange(int(lengths_B1.max()) if len(ids) else 2)
        inside_BS = position_S < lengths_B1
        tokens_BS = torch.full(inside_BS.shape, self._pad)
        places_BS = self._offsets[ids][:, None] + position_S
        tokens_BS[inside_BS] = self._flat[places_BS[inside_BS]].long()
        return tokens_BS


class PairTable:
    """Single texts, or pairs where second ones are given, with their special ids.

    A sample that exceeds max_length (special ids included) is truncated; a pair at the end of its
    longer text, until both are equally long. second_at: position of each sample's first token of
    the second text; the length of the row in single texts.
    """

    def __init__(
        self,
        firsts: Sequence[Sequence[int]],
        seconds: Sequence[Sequence[int]] | None,
        max_length: int,
        special: TokenIds,
        num_separators: int = 1,
    ) -> None:
        self._num_separators = 1 if seconds is None else num_separators
        room = max(0, max_length - num_special(seconds is not None, num_separators))
        pairs = list(zip(firsts, seconds or [()] * len(firsts), strict=True))
        self.second_at: list[int] = []

        def rows() -> Iterator[list[int]]:
            for pair in pairs:
                first, second = cut_pair(*pair, room)
                row = [special.bos, *first, *[special.eos] * self._num_separators]
                self.second_at.append(len(row))
                yield row if seconds is None else [*row, *second, special.eos]

        self.tokens = TokenTable(rows(), special.pad)
        self.tokens.num_cut = sum(len(first) + len(second) > room for first, second in pairs)

    def types(self) -> TokenTable:
        """For each token the text that it belongs to, 0 or 1."""
        lengths = self.tokens.lengths(torch.arange(len(self.tokens))).tolist()
        starts = zip(self.second_at, lengths, strict=True)
        return TokenTable([0] * start + [1] * (length - start) for start, length in starts)

    def texts(self, index: int) -> list[list[int]]:
        """The sample's one or two texts, truncated, without special ids."""
        row, start = self.tokens[index], self.second_at[index]
        first = row[1 : start - self._num_separators]
        return [first] if start == len(row) else [first, row[start:-1]]


def cut_pair(
    first: Sequence[int], second: Sequence[int], room: int
) -> tuple[Sequence[int], Sequence[int]]:
    """The shorter text may use half the room plus whatever the longer one leaves."""
    kept = min(len(first), max(room - len(second), room - room // 2))
    return first[:kept], second[: room - kept]


def num_special(paired: bool, num_separators: int) -> int:
    """Special ids per sample: bos, eos and, in a pair, the separators."""
    return 2 + (num_separators if paired else 0)


class Document(NamedTuple):
    """learned: for each token, whether a model is to guess it. number: of the document that a
    piece is of."""

    ids: list[int]
    learned: list[bool]
    number: int = 0

    def labels(self) -> list[int]:
        """At each place the token that follows, if it is to be guessed."""
        following = zip(self.ids[1:], self.learned[1:], strict=True)
        return [*(token if learned else NO_LABEL for token, learned in following), NO_LABEL]


def pieces_of(documents: Iterable[Document], max_length: int, split: bool) -> Iterator[Document]:
    """Documents of at most max_length tokens with something to guess. split: a longer one becomes
    several; else its end is lost, as a chat's second half is no chat."""
    for number, (ids, learned, _) in enumerate(documents):
        for start in range(0, len(ids) if split else 1, max_length):
            piece = slice(start, start + max_length)
            if any(learned[piece][1:]):
                yield Document(ids[piece], learned[piece], number)


def pack(documents: Iterable[Document], max_length: int) -> list[list[Document]]:
    """Samples of whole documents: each goes into the first of the last OPEN samples that has room.
    The same for the same documents in every cloud."""
    samples: list[list[Document]] = []
    room: list[int] = []
    for document in documents:
        size = len(document.ids)
        first = max(0, len(samples) - OPEN)
        place = next((i for i in range(first, len(samples)) if room[i] >= size), len(samples))
        if place == len(samples):
            samples.append([])
            room.append(max_length)
        samples[place].append(document)
        room[place] -= size
    return samples


def columns_of(samples: Sequence[Sequence[Document]]) -> dict[str, TokenTable]:
    """By field: each sample as a row, and what fills up a batch."""
    texts = ([token for document in sample for token in document.ids] for sample in samples)
    types = ([n for n, document in enumerate(sample) for _ in document.ids] for sample in samples)
    labels = ([token for document in sample for token in document.labels()] for sample in samples)
    return {
        "text": TokenTable(texts, NO_TOKEN),
        "types": TokenTable(types),
        "label": TokenTable(labels, NO_LABEL),
    }
