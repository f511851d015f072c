"""One text or two into token ids, as a model reads them. Needs no corpus, knows no labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from xcloud.parallel.stage import Batch
from xcloud.tasks.pair_table import PairTable
from xcloud.tasks.tokenizer import Tokenizer


class TextPairs:
    """The tokenizer of an understanding task, and how long its samples may be."""

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        self.tokenizer, self._max_length = tokenizer, max_length

    @staticmethod
    def load(folder: Path, max_length: int) -> TextPairs:
        """From what `save` wrote. Raises DataError if it is not there."""
        return TextPairs(Tokenizer.load(folder / "text_tokenizer.json"), max_length)

    def save(self, folder: Path) -> None:
        self.tokenizer.save(folder / "text_tokenizer.json")

    def table(self, firsts: Sequence[str], seconds: Sequence[str] | None) -> PairTable:
        return PairTable.of_samples(
            self._encode(firsts), None if seconds is None else self._encode(seconds),
            self._max_length, self.tokenizer.token_ids, self.tokenizer.num_separators,
        )  # fmt: skip

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """A text that comes several times, as premises do, is cut into tokens once."""
        distinct = list(dict.fromkeys(texts))
        ids = dict(zip(distinct, self.tokenizer.encode(distinct), strict=True))
        return [ids[text] for text in texts]

    def batch(self, firsts: Sequence[str], seconds: Sequence[str] | None = None) -> Batch:
        """ids, text and types of texts that are in no corpus."""
        ids = torch.arange(len(firsts))
        text, types = self.table(firsts, seconds).padded(ids)
        return {"ids": ids, "text": text, "types": types}
