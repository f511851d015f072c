"""A tokenizer made in milliseconds, for tests of tasks. BERT's pair form, or RoBERTa's."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from xcloud.demo import pairs as demo_pairs
from xcloud.tasks.tokenizer import Tokenizer, TokenizerChoice, TrainedTokenizer


@cache
def small_tokenizer(num_separators: int = 1) -> Tokenizer:
    texts = [en for _, en in demo_pairs(300)]
    texts += ["abcdefghijklmnopqrstuvwxyz .,!?'0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZáéíóúñ"]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = TrainedTokenizer(600, "wordpiece", lowercase=True).prepare(texts, Path(folder))
    tokenizer.num_separators = num_separators
    return tokenizer


@dataclass(frozen=True)
class SmallTokenizer(TokenizerChoice):
    """TokenizerChoice."""

    num_separators: int = 1

    def prepare(self, texts: Sequence[str], cache_dir: Path) -> Tokenizer:
        return small_tokenizer(self.num_separators)
