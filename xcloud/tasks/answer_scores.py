"""SQuAD 1.1 scores of text answers: exact match and word F1, in percent.

Source: Rajpurkar et al., arXiv:1606.05250, section 6.1. Answers are lowercased and stripped of
ASCII punctuation, English articles and extra spaces before they are compared.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(answer: str) -> str:
    """Normalise an answer for comparison: "The  Denver Broncos!" -> "denver broncos"."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """100 if the answer equals one of the references, else 0."""
    return 100.0 * any(normalised(answer) == normalised(right) for right in references)


def word_f1(answer: str, references: Sequence[str]) -> float:
    """F1 over the words shared with a reference; best reference."""
    return max(_f1(normalised(answer).split(), normalised(r).split()) for r in references)


def _f1(words: list[str], right: list[str]) -> float:
    shared = sum((Counter(words) & Counter(right)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(words), shared / len(right)
    return 100.0 * 2 * precision * recall / (precision + recall)
