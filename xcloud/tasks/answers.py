"""Label types: a class or a value. Converts table cells to numbers and predictions to labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.model import Head
from xcloud.tasks.label_scores import CLASS_SCORES, VALUE_SCORES

VALUE_UNIT = 1e-6  # predictions are in these units; see Head
MOST_CLASSES = 1000


@dataclass(frozen=True)
class Classes:
    """Named classes. A cell holds the name or its index in `names`."""

    names: tuple[str, ...]

    @staticmethod
    def found_in(cells: Sequence[str], where: str) -> Classes:
        """Numbers 0..n-1 if all cells are numbers, else their names in alphabetical order."""
        found = set(cells)
        if all(cell.isdecimal() for cell in found):
            most = max(int(cell) for cell in found)
            if len(found) > 1 and most < MOST_CLASSES:
                return Classes(tuple(str(number) for number in range(most + 1)))
        if not 2 <= len(found) <= MOST_CLASSES:
            raise DataError(
                f"{where}: {len(found):,} different labels ({_some(found)}); expected 2 to "
                f"{MOST_CLASSES} classes. Is task.label_column right? For numeric targets set "
                "task.kind=value"
            )
        return Classes(tuple(sorted(found)))

    @property
    def head(self) -> Head:
        return Head("classes", len(self.names))

    def parse(self, cells: Sequence[str], where: str) -> Tensor:
        """One number per cell. Raises DataError for an invalid label."""
        numbers = {name: number for number, name in enumerate(self.names)}
        by_number = {str(number): number for number in range(len(self.names))}
        known = by_number | numbers
        if unknown := set(cells) - known.keys():
            hidden = unknown == {"-1"}
            said = (
                "its labels are hidden (-1); test on the dev set (task.test_file=dev or "
                "task.test=validation)"
                if hidden
                else f"unknown labels: {_some(unknown)}; the classes are "
                f"{', '.join(self.names[:20])}"
            )
            raise DataError(f"{where}: {said}")
        return torch.tensor([known[cell] for cell in cells], dtype=torch.int64)

    def read(self, prediction: Sequence[int]) -> float:
        """Convert a stage's prediction to a label value."""
        return prediction[0]

    def show(self, label: float) -> str:
        return self.names[int(label)] if 0 <= label < len(self.names) else f"{label} (no class)"


@dataclass(frozen=True)
class Value:
    """A number, such as a similarity from 0 to 5; learned and scored unscaled."""

    @property
    def head(self) -> Head:
        return Head("value", 1)

    def parse(self, cells: Sequence[str], where: str) -> Tensor:
        try:
            numbers = [float(cell) for cell in cells]
        except ValueError as error:
            raise DataError(f"{where}: a label is not a number ({error})") from error
        if not all(math.isfinite(number) for number in numbers):
            raise DataError(f"{where}: a label is not a finite number")
        return torch.tensor(numbers, dtype=torch.float32)

    def read(self, prediction: Sequence[int]) -> float:
        return prediction[0] * VALUE_UNIT

    def show(self, label: float) -> str:
        return f"{label:.3g}"


Answer = Classes | Value
"""How a task's labels are encoded, once its training labels are known."""

Score = Callable[[Sequence[float], Sequence[float]], float]


def scores_of(kind: str, names: Sequence[str] | None) -> Mapping[str, Score]:
    """The named scores, in this order. None: accuracy for classes, both correlations for values.

    Raises ConfigError for a score that does not fit the kind.
    """
    there = CLASS_SCORES if kind == "classes" else VALUE_SCORES
    if names is None:
        names = ("accuracy",) if kind == "classes" else ("pearson", "spearman")
    if isinstance(names, str) or not names:
        raise ConfigError(
            f"task.metrics must be a list such as [{next(iter(there))}], got {names!r}"
        )
    if unknown := [name for name in names if name not in there]:
        raise ConfigError(
            f"task.metrics: {unknown[0]!r} is not a score for {kind}; choose from "
            f"{', '.join(there)}"
        )
    return {name: there[name] for name in names}


def _some(cells: set[str]) -> str:
    return ", ".join(map(repr, sorted(cells)[:5])) + (", …" if len(cells) > 5 else "")
