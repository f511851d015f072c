"""Seeded choices. No words live here."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from operator import itemgetter
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """Choices reproducible on every machine and Python version: uses only random()."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def below(self, bound: int) -> int:
        return int(self._random() * bound)

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self._random() * len(options))]

    def common(self, options: Sequence[T]) -> T:
        """Prefer early options, like word frequencies (weight 1 / (8 + rank))."""
        total = _running_weights(len(options))
        return options[bisect(total, self._random() * total[-1])]

    def weighted(self, options: Sequence[tuple[T, float]]) -> T:
        total = list(accumulate(map(itemgetter(1), options)))
        return options[bisect(total, self._random() * total[-1])][0]


@cache
def _running_weights(count: int) -> list[float]:
    return list(accumulate(1 / (8 + rank) for rank in range(count)))
