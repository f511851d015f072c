"""The embedded texts as corpora: sizes, disjoint splits, only what is visible."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from xcloud.base.errors import ConfigError
from xcloud.tasks.corpus.demo_grammar import DemoGrammar
from xcloud.tasks.corpus.demo_labelled import (
    DemoAnswers,
    DemoInference,
    DemoReviews,
    DemoSizes,
    demo_stories,
)

BOTH = frozenset({"es", "en"})
ALL = frozenset({"text", "label"})
SIZES = DemoSizes(1000, 100, 200)


@pytest.mark.parametrize("corpus", [DemoReviews(SIZES), DemoAnswers(SIZES), DemoInference(SIZES)])
def test_splits_share_no_sample_and_labels_are_balanced(
    corpus: DemoReviews | DemoAnswers | DemoInference,
) -> None:
    found = corpus.read(ALL)
    seen: set[tuple[str, ...]] = set()
    for split, rows in found.splits.items():
        sides = [rows.texts[key] for key in ("first", "second") if key in rows.texts]
        texts = set(zip(*sides, strict=True))
        assert not texts & seen and len(texts) == rows.num_rows
        seen |= texts
        if split == "train":
            counts = Counter(rows.texts["label"])
            even = rows.num_rows / len(counts)
            assert all(abs(count - even) < 0.12 * even for count in counts.values())
    assert found.splits["train"].num_rows == 1000
    assert corpus.read(frozenset()).agreed == found.agreed


def test_labels_do_not_follow_the_sample_number() -> None:
    labels = DemoReviews(SIZES).read(ALL).splits["train"].texts["label"]
    assert 400 < sum(a == b for a, b in pairwise(labels)) < 600


def test_answers_stand_in_their_stories_once_asked() -> None:
    for stories in demo_stories(DemoSizes(30, 3, 3)).values():
        for found in stories:
            assert len({asked for asked, _, _ in found.questions}) == 3
            for _, answer, start in found.questions:
                assert found.text[start : start + len(answer)] == answer
    assert len(demo_stories(DemoSizes(31, 3, 3))["train"]) == 11


def test_a_language_that_the_demo_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="en, es, got 'fr'"):
        DemoInference(SIZES, "fr")
    with pytest.raises(ConfigError, match=r"task\.num_train"):
        DemoSizes(0)


def test_splits_share_no_sentence_on_either_side() -> None:
    corpus = DemoGrammar(num_pairs=3000, num_dev=300, num_test=300).read("es", "en", BOTH)
    assert {split: rows.num_rows for split, rows in corpus.splits.items()} == {
        "train": 2400,
        "dev": 300,
        "test": 300,
    }
    for language in BOTH:
        sides = [set(rows.texts[language]) for rows in corpus.splits.values()]
        assert sum(map(len, sides)) == len(set().union(*sides)) == 3000


def test_only_the_visible_side_is_given() -> None:
    corpus = DemoGrammar(num_pairs=100, num_dev=10, num_test=10)
    seen = corpus.read("es", "en", frozenset({"es"}))
    assert all(set(rows.texts) == {"es"} for rows in seen.splits.values())
    assert corpus.read("es", "en", frozenset()).agreed == seen.agreed


@pytest.mark.parametrize(
    "settings", [{"num_pairs": 10}, {"num_dev": 0}, {"num_pairs": 10**7}, {"num_pairs": 2.5}]
)
def test_nonsense_is_refused_when_built(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"task\.num_"):
        DemoGrammar(**settings)


def test_other_languages_are_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"es and en only.*task\.path"):
        DemoGrammar().read("de", "en", BOTH)
