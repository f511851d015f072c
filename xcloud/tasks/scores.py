"""Scores of labels and of answers (SQuAD), and the standard error of a score: what it would vary
by over other samples of the same kind.

Scores are in percent. Undefined ones (only one class, constant values) are 0, as in the GLUE
scorers. Shapes: N samples, C classes.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

LabelKind = Literal["classes", "value"]
Vector = NDArray[np.float64]
Measure = Callable[[Vector], float]
"""A score of samples that count so many times each, [N]: once each in the score itself, by chance
in a resample. NaN if none counts."""

RESAMPLES = 1000
SEED = 0
# Answers are lowercased and stripped of these and of extra spaces before they are compared:
# Rajpurkar et al., arXiv:1606.05250, section 6.1.
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
MEANINGS: Mapping[LabelKind, Mapping[str, str]] = {
    "classes": {
        "accuracy": "share of correct classes, percent",
        "f1": "F1 of class 1, percent",
        "macro_f1": "mean F1 over classes, percent",
        "matthews": "Matthews correlation, times 100",
    },
    "value": {
        "pearson": "Pearson correlation, times 100",
        "spearman": "Spearman rank correlation, times 100",
    },
}


def ratio_error(above: ArrayLike, below: ArrayLike) -> float:
    """Standard error of sum(above) / sum(below) over samples [N], linearised (Cochran, Sampling
    Techniques, 1977, 2.11): of a mean with below = 1, of a share of hits sqrt(p (1 - p) / N).
    Not a number where only one sample counts in `below`, or none."""
    # Linearised: the error of each sample is what it adds to the sum above, less its share of the
    # sum below.
    a, b = np.broadcast_arrays(np.asarray(above, np.float64), np.asarray(below, np.float64))
    if np.count_nonzero(b) < 2:
        return math.nan
    return float(math.sqrt(np.square(a - b * a.sum() / b.sum()).sum()) / b.sum())


def bootstrap_error(num: int, measure: Measure) -> float:
    """Standard deviation over RESAMPLES sets of `num` samples, drawn with replacement (Efron,
    Annals of Statistics 1979; of BLEU Koehn, EMNLP 2004). The draws are the same in every run.
    Not a number for one sample."""
    if num < 2:
        return math.nan
    draw = np.random.default_rng(SEED)
    found = [
        # A resample is given as counts, [N]: the samples themselves are not copied a thousand
        # times.
        measure(np.bincount(draw.integers(num, size=num), minlength=num).astype(np.float64))
        for _ in range(RESAMPLES)
    ]
    # A resample without any sample of a part has no score there (NaN), and says nothing of the
    # spread.
    return float(np.nanstd(found))


def label_measure(name: str, right: ArrayLike, said: ArrayLike) -> Measure:
    """One of MEANINGS, of labels and predictions [N]. macro_f1 is over every class among them;
    matthews with more than two classes is that of Gorodkin 2004; in spearman ties share their mean
    rank."""
    pair = np.asarray(right, np.float64), np.asarray(said, np.float64)
    hits = pair[0] == pair[1]
    # Classes are numbered among those that occur, so bincount needs no room for others.
    classes, places = np.unique(np.concatenate(pair), return_inverse=True)
    of_label, of_prediction = np.split(places, 2)

    def measured(counts: Vector) -> float:
        if not counts.any():
            return math.nan
        if name == "accuracy":
            return 100.0 * float(counts[hits].sum() / counts.sum())
        if name in MEANINGS["value"]:
            x, y = pair
            if name != "pearson":
                # Ranks depend on how often each sample counts, so they are found anew for each
                # resample.
                x, y = (_ranks(values, counts=counts) for values in pair)
            return 100.0 * _correlation(x, y, counts)
        hit_C, label_C, said_C = (
            np.bincount(of, weights, len(classes))
            for of, weights in (
                (of_label, counts * hits),
                (of_label, counts),
                (of_prediction, counts),
            )
        )
        # The statistic of Gorodkin, of the counts of classes alone: with two classes the usual
        # coefficient.
        if name == "matthews":
            n = counts.sum()
            spread = (n * n - label_C @ label_C) * (n * n - said_C @ said_C)
            together = n * hit_C.sum() - label_C @ said_C
            if spread > 0:
                return 100.0 * float(together / math.sqrt(spread))
            return 0.0
        # In a resample a class may neither stand nor be said: it has no F1, and the mean leaves it
        # out.
        f1_C = 2 * hit_C / np.maximum(1, label_C + said_C)
        chosen_C = label_C + said_C > 0 if name == "macro_f1" else classes == 1
        return 100.0 * float(f1_C[chosen_C].mean()) if chosen_C.any() else 0.0

    return measured


def label_scores(
    names: Sequence[str], parts: Mapping[str, Sequence[tuple[float, float]]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Scores and their errors, of (label, prediction) pairs by part; the part "" is the whole
    split. Of several parts the first score is their mean; row i of each is drawn together, as it
    may be the same sample in another language."""
    values = {}
    errors = {}
    measures = {(name, part): label_measure(name, *zip(*pairs, strict=True))
                for name in names for part, pairs in parts.items()}  # fmt: skip
    for (name, part), measure in measures.items():
        num = len(parts[part])
        key = f"{name}_{part}" if part else name
        values[key] = measure(np.ones(num))
        if name == "accuracy":
            # A share of hits has a formula for its error: no resamples are drawn.
            error = 100 * ratio_error([right == said for right, said in parts[part]], below=1)
        else:
            error = bootstrap_error(num, measure)
        errors[key] = error
    if list(parts) == [""]:
        return values, errors

    def mean(counts: Vector) -> float:
        # The first rows of each part: parts may differ in length, and a row beyond the shorter
        # one's end is not drawn in it.
        each = [measures[names[0], part](counts[: len(pairs)]) for part, pairs in parts.items()]
        return sum(each) / len(each)

    main = sum(values[f"{names[0]}_{part}"] for part in parts) / len(parts)
    error = bootstrap_error(max(map(len, parts.values())), measure=mean)
    return {names[0]: main, **values}, {names[0]: error, **errors}


def _correlation(x: Vector, y: Vector, counts: Vector) -> float:
    # A constant has no correlation. Compared exactly, as after the mean is taken off rounding
    # leaves something else than zero.
    if np.ptp(x[counts > 0]) == 0 or np.ptp(y[counts > 0]) == 0:
        return 0.0
    x = x - np.average(x, weights=counts)
    y = y - np.average(y, weights=counts)
    spread = (counts * x * x).sum() * (counts * y * y).sum()
    return float((counts * x * y).sum() / math.sqrt(spread))


def _ranks(values: Vector, counts: Vector) -> Vector:
    """Mean rank of each value among all samples, as often as they count."""
    distinct, places = np.unique(values, return_inverse=True)
    num = np.bincount(places, weights=counts, minlength=len(distinct))
    # As many as tie share the mean of the ranks that they take together.
    return (num.cumsum() - (num - 1) / 2)[places]


def normalised(answer: str) -> str:
    """ "The  Denver Broncos!" -> "denver broncos"."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """100 if the answer equals one of the references, else 0."""
    return 100.0 * any(normalised(answer) == normalised(right) for right in references)


def word_f1(answer: str, references: Sequence[str]) -> float:
    """F1 over the words shared with a reference, percent; best reference."""
    words = Counter(normalised(answer).split())
    rights = [Counter(normalised(right).split()) for right in references]
    return max(
        200.0 * (words & right).total() / max(1, words.total() + right.total()) for right in rights
    )
