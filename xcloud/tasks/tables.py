"""Token ids of many samples in flat tensors. Knows no text and no vocabulary.

    TokenTable   rows of any lengths
    PairTable    single texts or pairs, joined as a checkpoint expects:
        bos a eos            types 0 0 0
        bos a eos b eos      types 0 0 0 1 1      (num_separators eos between a and b)

Shapes: B samples, S positions, N rows of the table.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import overload

import numpy as np
import torch
from torch import Tensor

from xcloud.contracts.model import TokenIds


def write_table(rows: Iterable[Sequence[int]], tokens: Path, offsets: Path) -> None:
    """Stream a table to two files: int32 tokens, int64 offsets."""
    ends = array("q", [0])
    with tokens.open("wb") as file:
        for row in rows:
            array("i", row).tofile(file)
            ends.append(ends[-1] + len(row))
    with offsets.open("wb") as file:
        ends.tofile(file)


class TokenTable(Sequence[Sequence[int]]):
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
    def of_texts(
        cls, texts: Sequence[Sequence[int]], max_length: int, special: TokenIds
    ) -> TokenTable:
        """Rows are bos, text, eos; longer texts are truncated."""
        room = max_length - num_special(False, 0)
        table = cls(([special.bos, *text[:room], special.eos] for text in texts), special.pad)
        table.num_cut = sum(len(text) > room for text in texts)
        return table

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

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
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
    """Single texts, or pairs if every second text is given, with their special ids.

    second_at: int64 [N], position of the first token of the second text; the length of the row in
    single texts. num_cut: samples that were longer than max_length.
    """

    def __init__(
        self,
        texts: Iterable[tuple[Sequence[int], Sequence[int] | None]],
        special: TokenIds,
        num_separators: int,
        num_cut: int = 0,
    ) -> None:
        starts: list[int] = []

        def rows() -> Iterator[list[int]]:
            for first, second in texts:
                row = [special.bos, *first, special.eos]
                if second is not None:
                    row += [special.eos] * (num_separators - 1)
                starts.append(len(row))
                yield row if second is None else [*row, *second, special.eos]

        self.tokens = TokenTable(rows(), special.pad)
        self.second_at, self.num_cut = torch.tensor(starts, dtype=torch.int64), num_cut
        self._num_separators = num_separators  # 1 for single texts

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
        room = max(0, max_length - num_special(seconds is not None, num_separators))
        if seconds is None:
            num_cut = sum(len(text) > room for text in firsts)
            return PairTable(((text[:room], None) for text in firsts), special, 1, num_cut)
        pairs = list(zip(firsts, seconds, strict=True))
        num_cut = sum(len(first) + len(second) > room for first, second in pairs)
        return PairTable(
            (cut_pair(first, second, room) for first, second in pairs),
            special, num_separators, num_cut,
        )  # fmt: skip

    def texts(self, index: int) -> list[list[int]]:
        """The sample's one or two texts, truncated, without special ids."""
        row, start = self.tokens[index], int(self.second_at[index])
        first = row[1 : start - self._num_separators]
        return [first] if start == len(row) else [first, row[start:-1]]

    def padded(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, types), int64 [B, S] each, padded to the longest sample."""
        tokens_BS = self.tokens.padded(ids)
        position_S = torch.arange(tokens_BS.shape[1])
        before_BS = position_S < self.second_at[ids][:, None]
        inside_BS = position_S < self.tokens.lengths(ids)[:, None]
        return tokens_BS, (inside_BS & ~before_BS).long()


def cut_pair(
    first: Sequence[int], second: Sequence[int], room: int
) -> tuple[Sequence[int], Sequence[int]]:
    """The shorter text may use half the room plus whatever the longer one leaves."""
    kept = min(len(first), max(room - len(second), room - room // 2))
    return first[:kept], second[: room - kept]


def num_special(paired: bool, num_separators: int) -> int:
    """Special ids per sample: bos, eos and, in a pair, the separators."""
    return 2 + (num_separators if paired else 0)
