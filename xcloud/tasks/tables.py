"""Token ids of many samples in flat tensors. Knows no text and no vocabulary.

    TokenTable   single sentences, without special ids
    PairTable    single texts or pairs, joined as a checkpoint expects:
        bos a eos            types 0 0 0
        bos a eos b eos      types 0 0 0 1 1      (num_separators eos between a and b)

Shapes: B samples, S positions, N samples in the table, T all tokens of all sentences.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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

    def gather(self, index_B: Tensor, position_BS: Tensor, outside: int = 0) -> Tensor:
        """int64 [B, S]: tokens at these positions of these sentences."""
        inside_BS = (position_BS >= 0) & (position_BS < self.lengths(index_B)[:, None])
        if not len(self._flat_T):
            return torch.full(inside_BS.shape, outside, dtype=torch.int64)
        flat_BS = (self._offsets[index_B][:, None] + position_BS) * inside_BS
        return torch.where(inside_BS, self._flat_T[flat_BS].long(), outside)

    def padded(self, ids: Tensor, special: TokenIds) -> Tensor:
        """int64 [B, S]: bos, sentence, eos, padded to the longest sample."""
        if not len(ids):
            return torch.zeros((0, 2), dtype=torch.int64)
        lengths_B = self.lengths(ids)
        positions_S = torch.arange(int(lengths_B.max()) + 2) - 1
        tokens_BS = self.gather(ids, positions_S, special.pad)
        tokens_BS[:, 0] = special.bos
        tokens_BS.scatter_(1, lengths_B[:, None] + 1, special.eos)
        return tokens_BS


@dataclass(frozen=True)
class PairTable:
    """Sample i is sentence `first_of[i]` of `firsts`, cut to `first_length[i]` tokens, and
    `second_length[i]` tokens of sentence `second_of[i]` of `seconds`, from `second_start[i]` on.

    Samples may share a sentence (windows of one paragraph). seconds None: single texts.
    All tensors int64 [N]. num_cut: samples that were longer than max_length.
    """

    special: TokenIds
    num_separators: int
    firsts: TokenTable
    first_of: Tensor
    first_length: Tensor
    seconds: TokenTable | None
    second_of: Tensor
    second_start: Tensor
    second_length: Tensor
    num_cut: int = 0

    def __len__(self) -> int:
        return len(self.first_of)

    @staticmethod
    def of_samples(
        firsts: Sequence[Sequence[int]],
        seconds: Sequence[Sequence[int]] | None,
        max_length: int,
        special: TokenIds,
        num_separators: int,
    ) -> PairTable:
        """One sample per text or pair. A pair that exceeds max_length (special ids included) is
        truncated at the end of its longer text, until both are equally long."""
        room = max_length - num_special(seconds is not None, num_separators)
        table = TokenTable(firsts, max(0, room))
        each = torch.arange(len(table))
        first_length = table.lengths(each)
        none = torch.zeros(len(table), dtype=torch.int64)
        if seconds is None:
            return PairTable(
                special, num_separators, table, each, first_length, None, none, none, none,
                table.num_cut,
            )  # fmt: skip
        second_table = TokenTable(seconds, max(0, room))
        second_length = second_table.lengths(each)
        # The shorter text may use half the room plus whatever the longer one leaves.
        half = room // 2
        first_length = first_length.minimum((room - second_length).clamp(min=room - half))
        second_length = second_length.minimum(room - first_length)
        return PairTable(
            special, num_separators, table, each, first_length,
            second_table, each, none, second_length,
            sum(len(a) + len(b) > room for a, b in zip(firsts, seconds, strict=True)),
        )  # fmt: skip

    def first(self, index: int) -> list[int]:
        """Tokens of a sample's first text, truncated."""
        return self.firsts[int(self.first_of[index])][: int(self.first_length[index])]

    def second(self, index: int) -> list[int]:
        """Tokens of a sample's second text, truncated; empty for single texts."""
        if self.seconds is None:
            return []
        start, length = int(self.second_start[index]), int(self.second_length[index])
        return self.seconds[int(self.second_of[index])][start : start + length]

    def second_at(self, ids: Tensor) -> Tensor:
        """int64 [B]: position of the first token of the second text."""
        return self.first_length[ids] + 1 + self.num_separators

    def padded(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, types), int64 [B, S] each, padded to the longest sample."""
        paired = self.seconds is not None
        first_B, second_B = self.first_length[ids], self.second_length[ids]
        total_B = first_B + second_B + num_special(paired, self.num_separators)
        position_S = torch.arange(int(total_B.max()) if len(ids) else 2)
        end_B = total_B[:, None] - 1
        tokens_BS = torch.full((len(ids), len(position_S)), self.special.pad, dtype=torch.int64)
        types_BS = torch.zeros_like(tokens_BS)

        tokens_BS[position_S <= end_B] = self.special.eos  # bos and the texts are filled in below
        in_first_BS = (position_S >= 1) & (position_S <= first_B[:, None])
        at_BS = (position_S - 1).expand_as(tokens_BS)
        tokens_BS = torch.where(
            in_first_BS, self.firsts.gather(self.first_of[ids], at_BS), tokens_BS
        )
        if self.seconds is not None:
            begin_B = self.second_at(ids)[:, None]
            in_second_BS = (position_S >= begin_B) & (position_S < end_B)
            at_BS = position_S - begin_B + self.second_start[ids][:, None]
            second_BS = self.seconds.gather(self.second_of[ids], at_BS)
            tokens_BS = torch.where(in_second_BS, second_BS, tokens_BS)
            types_BS[(position_S >= begin_B) & (position_S <= end_B)] = 1
        tokens_BS[:, 0] = self.special.bos
        return tokens_BS, types_BS


def num_special(paired: bool, num_separators: int) -> int:
    """Special ids per sample: bos, eos and, in a pair, the separators."""
    return 2 + (num_separators if paired else 0)
