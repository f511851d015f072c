"""Agreement of predictions with labels, in percent. Pure arithmetic.

All functions take two lists of equal length, labels first. Undefined scores (only one class,
constant values) are 0, as in the GLUE scorers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np


def accuracy(right: Sequence[float], predicted: Sequence[float]) -> float:
    """Share of correct predictions."""
    return 100.0 * sum(a == b for a, b in zip(right, predicted, strict=True)) / len(right)


def f1(right: Sequence[float], predicted: Sequence[float]) -> float:
    """Harmonic mean of precision and recall of class 1."""
    return _f1_of(1, right, predicted)


def macro_f1(right: Sequence[float], predicted: Sequence[float]) -> float:
    """Mean F1 over every class among labels or predictions."""
    classes = sorted({*right, *predicted})
    return sum(_f1_of(c, right, predicted) for c in classes) / len(classes)


def _f1_of(label: float, right: Sequence[float], predicted: Sequence[float]) -> float:
    hits = sum(a == b == label for a, b in zip(right, predicted, strict=True))
    named = sum(a == label for a in right) + sum(b == label for b in predicted)
    return 100.0 * 2 * hits / named if named else 0.0


def matthews(right: Sequence[float], predicted: Sequence[float]) -> float:
    """Matthews correlation (Matthews 1975; multi-class: Gorodkin 2004), -100..100.

    For s samples, c correct, t_k labelled k and p_k predicted as k:
    (c*s - sum t_k*p_k) / sqrt((s^2 - sum p_k^2) (s^2 - sum t_k^2))
    """
    s, c = len(right), sum(a == b for a, b in zip(right, predicted, strict=True))
    t, p = Counter(right), Counter(predicted)
    shared = sum(t[k] * p[k] for k in t)
    spread = (s * s - sum(n * n for n in p.values())) * (s * s - sum(n * n for n in t.values()))
    return 100.0 * (c * s - shared) / math.sqrt(spread) if spread else 0.0


def pearson(right: Sequence[float], predicted: Sequence[float]) -> float:
    """Linear correlation, -100..100."""
    if len(set(right)) == 1 or len(set(predicted)) == 1:
        return 0.0
    return 100.0 * float(np.corrcoef(right, predicted)[0, 1])


def spearman(right: Sequence[float], predicted: Sequence[float]) -> float:
    """Pearson correlation of ranks; ties share their mean rank."""
    return pearson(_ranks(right), _ranks(predicted))


def _ranks(values: Sequence[float]) -> list[float]:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean_rank_of_group = counts.cumsum() - (counts + 1) / 2
    ranks: list[float] = mean_rank_of_group[group].tolist()
    return ranks


CLASS_SCORES: Mapping[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "accuracy": accuracy, "f1": f1, "macro_f1": macro_f1, "matthews": matthews
}  # fmt: skip
VALUE_SCORES: Mapping[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "pearson": pearson, "spearman": spearman
}  # fmt: skip
MEANINGS = {
    "accuracy": "share of correct classes, percent",
    "f1": "F1 of class 1, percent",
    "macro_f1": "mean F1 over classes, percent",
    "matthews": "Matthews correlation, times 100",
    "pearson": "Pearson correlation, times 100",
    "spearman": "Spearman rank correlation, times 100",
}
