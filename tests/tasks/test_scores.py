"""Scores against values worked out by hand, and what the rank that scores writes down of single
samples."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from xcloud.contracts.model import Scores
from xcloud.rank.task_data import write_scores
from xcloud.tasks.scores import (
    MEANINGS,
    bootstrap_error,
    exact_match,
    label_measure,
    label_scores,
    normalised,
    ratio_error,
    word_f1,
)


def score(name: str, right: Sequence[float], said: Sequence[float]) -> float:
    return label_measure(name, right, said)(np.ones(len(right)))


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


@pytest.mark.parametrize("name", [name for names in MEANINGS.values() for name in names])
def test_a_sample_that_counts_twice_scores_as_one_that_occurs_twice(name: str) -> None:
    draw = np.random.default_rng(5)
    right, said = draw.integers(0, 4, (2, 40))
    times = draw.integers(0, 4, 40)
    repeated = score(name, np.repeat(right, times).tolist(), np.repeat(said, times).tolist())
    assert label_measure(name, right, said)(times.astype(float)) == pytest.approx(repeated)


def test_scores_are_those_of_scikit_learn_and_scipy() -> None:
    from scipy import stats
    from sklearn import metrics

    draw = np.random.default_rng(5)
    right, said = draw.integers(0, 4, (2, 60))
    assert matthews(right, said) == pytest.approx(100 * metrics.matthews_corrcoef(right, said))
    theirs = metrics.f1_score(right, said, average=None)
    assert macro_f1(right, said) == pytest.approx(100 * theirs.mean())
    assert f1(right, said) == pytest.approx(100 * theirs[1])
    assert spearman(right, said) == pytest.approx(100 * stats.spearmanr(right, said).statistic)


CLASSES_ON_ONE_SIDE = {
    "a class that is only predicted": ([0, 0, 1, 1, 1], [0, 2, 1, 1, 2]),
    "a class that is never predicted": ([0, 0, 1, 1, 2], [0, 1, 1, 1, 0]),
    "both": ([0, 0, 1, 1, 3], [0, 2, 1, 0, 0]),
    "no class on both sides": ([0, 0, 1], [2, 3, 3]),
}


@pytest.mark.parametrize("case", CLASSES_ON_ONE_SIDE)
def test_macro_f1_is_over_every_class_of_labels_or_predictions(case: str) -> None:
    from sklearn import metrics

    right, said = CLASSES_ON_ONE_SIDE[case]
    theirs = metrics.f1_score(right, said, average="macro", zero_division=0)
    assert macro_f1(right, said) == pytest.approx(100 * theirs)


def test_the_error_of_an_accuracy_is_binomial() -> None:
    pairs = [(1.0, 1.0)] * 90 + [(1.0, 0.0)] * 10
    values, errors = label_scores(["accuracy"], {"": pairs})
    assert values == {"accuracy": 90.0}
    assert errors == pytest.approx({"accuracy": 3.0})  # 100 sqrt(0.9 0.1 / 100)


def test_an_error_is_the_spread_of_the_score_over_other_samples() -> None:
    """Of 400 test sets drawn anew, and of one of them resampled; a ratio of sums in both ways."""
    draw = np.random.default_rng(5)

    def ratio(tokens: np.ndarray, nats: np.ndarray) -> float:
        return float(nats.sum() / tokens.sum())

    sets = [(tokens, draw.normal(2.0 * tokens, 3.0))
            for tokens in draw.integers(5, 50, (400, 100)).astype(float)]  # fmt: skip
    spread = np.std([ratio(*one) for one in sets])
    linear = np.mean([ratio_error(nats, tokens) for tokens, nats in sets])
    tokens, nats = sets[0]
    resampled = bootstrap_error(100, lambda counts: ratio(counts * tokens, counts * nats))
    assert linear == pytest.approx(spread, rel=0.1)
    assert resampled == pytest.approx(ratio_error(nats, tokens), rel=0.1)
    assert resampled == bootstrap_error(100, lambda counts: ratio(counts * tokens, counts * nats))


def test_one_sample_has_no_error() -> None:
    assert math.isnan(ratio_error([3.0, 0.0], below=[2.0, 0.0]))
    assert math.isnan(bootstrap_error(1, lambda counts: 1.0))
    errors = {"perplexity": ratio_error([3.0], below=1), "loss": 0.5, "bleu": 0.0}
    assert Scores({"perplexity": 3.0}, errors).errors == {"loss": 0.5, "bleu": 0.0}
    of_one, of_two = (label_scores(["accuracy", "f1"], {"": [(1.0, 1.0)] * num}) for num in (1, 2))
    assert Scores(*of_one).errors == {}
    assert Scores(*of_two).errors == {"accuracy": 0.0, "f1": 0.0}


def test_the_error_of_a_mean_over_languages_knows_that_they_share_their_samples() -> None:
    """The same sentences are right in both languages, so the second tells nothing new; sentences
    that have nothing to do with each other give a smaller error, by the square root of 2."""
    draw = np.random.default_rng(5)
    hits, others = draw.random((2, 400)) < 0.8
    (same, apart), alone = (
        label_scores(["accuracy"], {name: [(1.0, float(hit)) for hit in each]
                                    for name, each in (("en", hits), ("es", second))})[1]
        for second in (hits, others)
    ), 100 * ratio_error(hits, 1)  # fmt: skip
    assert same["accuracy"] == pytest.approx(alone, rel=0.1)
    assert apart["accuracy"] == pytest.approx(alone / math.sqrt(2), rel=0.15)
    assert same["accuracy_es"] == pytest.approx(alone, rel=1e-3)


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


SCORES = Scores({"bleu": 50.0}, {}, {4: {"prediction": "Él duerme.", "bleu": 50.0, "counts": [2]}})


@pytest.mark.parametrize("shows_text", [True, False])
def test_a_text_that_may_not_leave_its_cloud_is_not_written_beside_its_figures(
    shows_text: bool, tmp_path: Path
) -> None:
    write_scores(tmp_path / "scores.jsonl", SCORES, shows_text)

    (line,) = (tmp_path / "scores.jsonl").read_text("utf-8").splitlines()
    text = {"prediction": "Él duerme."} if shows_text else {}
    assert json.loads(line) == {"id": 4, **text, "bleu": 50.0, "counts": [2]}


def test_nothing_that_is_written_without_texts_tells_samples_of_one_label_from_others(
    tmp_path: Path,
) -> None:
    samples = {n: {"label": "ab"[n % 2], "prediction": "a", "loss": 1.5} for n in range(6)}
    write_scores(tmp_path / "scores.jsonl", Scores({}, {}, samples), shows_text=False)
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [line.pop("id") for line in lines] == list(range(6))
    assert all(line == lines[0] for line in lines)
