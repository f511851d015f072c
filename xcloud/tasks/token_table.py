"""Token ids of many sentences in one flat tensor. Knows no text and no vocabulary.

Shapes: B samples, S positions, T all tokens of all sentences.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from xcloud.contracts.model import TokenIds


def write_table(sentences: Iterable[Sequence[int]], tokens: Path, offsets: Path) -> None:
    """Stream a table to two files: int32 tokens, int64 offsets."""
    ends = array("q", [0])
    with tokens.open("wb") as file:
        for sentence in sentences:
            array("i", sentence).tofile(file)
            ends.append(ends[-1] + len(sentence))
    with offsets.open("wb") as file:
        ends.tofile(file)


class TokenTable(Sequence[Sequence[int]]):
    """Sentences without special ids, truncated to `max_tokens`. 4 bytes per token, 8 per
    sentence."""

    def __init__(self, sentences: Sequence[Sequence[int]], max_tokens: int) -> None:
        cut = [sentence[:max_tokens] for sentence in sentences]
        self.num_cut = sum(len(sentence) > max_tokens for sentence in sentences)
        lengths = torch.tensor([len(sentence) for sentence in cut], dtype=torch.int64)
        self._offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        flat = [token for sentence in cut for token in sentence]
        self._flat_T = torch.tensor(flat, dtype=torch.int32)

    @classmethod
    def mapped(cls, tokens: Path, offsets: Path) -> TokenTable:
        """Memory-map files written by `write_table`; they must stay in place."""
        table = cls.__new__(cls)
        table._offsets = torch.from_file(
            str(offsets), size=offsets.stat().st_size // 8, dtype=torch.int64
        )
        size = tokens.stat().st_size // 4
        table._flat_T = torch.from_file(str(tokens), size=size, dtype=torch.int32)
        return table

    @property
    def num_tokens(self) -> int:
        return len(self._flat_T)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        start, end = self._offsets[index : index + 2].tolist()
        return self._flat_T[start:end].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        offsets, flat = self._offsets.tolist(), self._flat_T.tolist()
        for start, end in pairwise(offsets):
            yield flat[start:end]

    def lengths(self, ids: Tensor) -> Tensor:
        """int64 [B], special ids not counted."""
        return self._offsets[ids + 1] - self._offsets[ids]

    def gather(self, index_B: Tensor, position_BS: Tensor) -> Tensor:
        """int64 [B, S]: tokens at these positions of these sentences; 0 outside a sentence."""
        inside_BS = (position_BS >= 0) & (position_BS < self.lengths(index_B)[:, None])
        if not len(self._flat_T):
            return torch.zeros(inside_BS.shape, dtype=torch.int64)
        flat_BS = (self._offsets[index_B][:, None] + position_BS) * inside_BS
        return self._flat_T[flat_BS].long() * inside_BS

    def padded(self, ids: Tensor, special: TokenIds) -> Tensor:
        """int64 [B, S]: bos, sentence, eos, padded to the longest sample."""
        lengths_B = self.lengths(ids)
        if not len(ids):
            return torch.zeros((0, 2), dtype=torch.int64)
        positions_S = torch.arange(int(lengths_B.max()) + 2)
        inside_BS = (positions_S > 0) & (positions_S <= lengths_B[:, None])
        index_BS = (self._offsets[ids][:, None] + positions_S - 1) * inside_BS
        tokens_BS = torch.full(inside_BS.shape, special.pad, dtype=torch.int64)
        if len(self._flat_T):
            tokens_BS = torch.where(inside_BS, self._flat_T[index_BS].long(), special.pad)
        tokens_BS[:, 0] = special.bos
        tokens_BS.scatter_(1, lengths_B[:, None] + 1, special.eos)
        return tokens_BS
