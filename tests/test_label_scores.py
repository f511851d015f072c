"""Scores against values worked out by hand."""

from __future__ import annotations

import math
from functools import partial

import pytest

from xcloud.tasks.labels import MEANINGS, score
from xcloud.tasks.question_answering import exact_match, normalised, word_f1

accuracy, f1, macro_f1, matthews, pearson, spearman = (
    partial(score, name) for names in MEANINGS.values() for name in names
)
RIGHT = [1, 1, 1, 0, 0, 0, 0, 1]
SAID = [1, 1, 0, 0, 0, 1, 0, 1]  # 3 of 4 ones found, 1 of 4 zeros taken for a one


def test_scores_of_two_classes() -> None:
    assert accuracy(RIGHT, SAID) == 75.0
    assert f1(RIGHT, SAID) == 75.0  # precision 3/4, recall 3/4
    assert f1([0, 0, 1], [1, 1, 1]) == pytest.approx(50.0)  # precision 1/3, recall 1
    assert matthews(RIGHT, SAID) == pytest.approx(50.0)  # (3*3 - 1*1) / sqrt(4*4*4*4)
    tp, tn, fp, fn = 5, 3, 2, 1
    right = [1] * (tp + fn) + [0] * (tn + fp)
    said = [1] * tp + [0] * fn + [0] * tn + [1] * fp
    by_hand = (tp * tn - fp * fn) / math.sqrt(7 * 6 * 5 * 4)
    assert matthews(right, said) == pytest.approx(100 * by_hand)


def test_scores_of_several_classes() -> None:
    assert macro_f1([0, 1, 2, 2], [0, 2, 2, 2]) == pytest.approx(100 * (1 + 0 + 0.8) / 3)
    assert matthews([0, 1, 2], [0, 1, 2]) == pytest.approx(100.0)
    assert matthews([0, 1, 2], [1, 2, 0]) == pytest.approx(100 * (0 - 3) / 6)


def test_a_score_that_is_not_defined_is_zero() -> None:
    assert matthews([1, 1], [1, 1]) == matthews([0, 1], [1, 1]) == 0.0
    assert f1([0, 0], [0, 0]) == 0.0
    assert pearson([1.0, 2.0], [3.0, 3.0]) == spearman([1.0, 1.0], [1.0, 2.0]) == 0.0


def test_correlations() -> None:
    assert pearson([1, 2, 3], [10, 20, 30]) == pytest.approx(100.0)
    assert pearson([1, 2, 3], [3, 2, 1]) == pytest.approx(-100.0)
    assert pearson([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(80.0)
    assert spearman([1, 2, 3, 4], [1, 100, 1000, 9999]) == pytest.approx(100.0)
    # Ranks 0, 1.5, 1.5, 3 against 0, 1, 2, 3.
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(100 * 4.5 / math.sqrt(4.5 * 5))


def test_answers_are_compared_without_case_marks_and_articles() -> None:
    assert normalised("The  Denver Broncos!") == "denver broncos"
    assert normalised("an apple, a day; theory") == "apple day theory"
    assert exact_match("Denver Broncos", ["the Broncos", "the denver broncos."]) == 100.0
    assert exact_match("Denver", ["Denver Broncos"]) == 0.0


def test_word_f1_takes_the_best_reference() -> None:
    assert word_f1("the red house", ["a red car"]) == pytest.approx(50.0)
    assert word_f1("the red house", ["a red car", "red house"]) == 100.0
    assert word_f1("", ["red"]) == word_f1("blue", ["red"]) == 0.0
    assert word_f1("red red car", ["red car"]) == pytest.approx(100 * 2 * (2 / 3) / (2 / 3 + 1))
