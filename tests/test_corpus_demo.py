"""The embedded texts as corpora: sizes, disjoint splits, only what is visible."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from xcloud.base.errors import ConfigError
from xcloud.tasks.classification import Classification, DemoClassification, DemoCrossLingual
from xcloud.tasks.question_answering import DemoQuestionAnswering
from xcloud.tasks.translation import DemoTranslation

BOTH = frozenset({"source", "target"})
ALL = frozenset({"text", "label"})
SIZES = {"num_train": 1000, "num_dev": 100, "num_test": 200}
REVIEWS = DemoClassification(**SIZES)  # type: ignore[arg-type]
CORPORA = [REVIEWS, DemoClassification(name="qnli", **SIZES), DemoCrossLingual(**SIZES)]  # type: ignore[arg-type]


@pytest.mark.parametrize("corpus", CORPORA)
def test_splits_share_no_sample_and_labels_are_balanced(corpus: Classification) -> None:
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
    labels = REVIEWS.read(ALL).splits["train"].texts["label"]
    assert 400 < sum(a == b for a, b in pairwise(labels)) < 600


def test_answers_stand_in_their_stories_once_asked() -> None:
    splits = DemoQuestionAnswering(num_train=31, num_dev=3, num_test=3).read(ALL).splits
    for rows in splits.values():
        stories = list(zip(rows.texts["group"], rows.texts["question"], strict=True))
        assert len(set(stories)) == rows.num_rows == 3 * len(set(rows.texts["group"]))
        for context, found in zip(rows.texts["context"], rows.texts["answers"], strict=True):
            ((answer, start),) = found
            assert context[start : start + len(answer)] == answer
    assert splits["train"].num_rows == 33  # three questions each, rounded up


def test_a_language_that_the_demo_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of en, es, got 'fr'"):
        DemoCrossLingual(train_language="fr")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"task\.num_train"):
        DemoClassification(num_train=0)


def test_splits_share_no_sentence_on_either_side() -> None:
    corpus = DemoTranslation(num_pairs=3000, num_dev=300, num_test=300).read(BOTH)
    assert {split: rows.num_rows for split, rows in corpus.splits.items()} == {
        "train": 2400,
        "dev": 300,
        "test": 300,
    }
    for language in BOTH:
        sides = [set(rows.texts[language]) for rows in corpus.splits.values()]
        assert sum(map(len, sides)) == len(set().union(*sides)) == 3000


def test_only_the_visible_side_is_given() -> None:
    corpus = DemoTranslation(num_pairs=100, num_dev=10, num_test=10)
    seen = corpus.read(frozenset({"source"}))
    assert all(set(rows.texts) == {"source"} for rows in seen.splits.values())
    assert corpus.read(frozenset()).agreed == seen.agreed


@pytest.mark.parametrize(
    "settings", [{"num_pairs": 10}, {"num_dev": 0}, {"num_pairs": 10**7}, {"num_pairs": 2.5}]
)
def test_nonsense_is_refused_when_built(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"task\.num_"):
        DemoTranslation(**settings)


def test_other_languages_are_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"es and en only.*task\.path"):
        DemoTranslation(source="de").check()
