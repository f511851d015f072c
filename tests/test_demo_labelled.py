"""The embedded corpora for understanding, and the sentences that everyone may know."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest

from xcloud.errors import ConfigError
from xcloud.tasks.corpus.demo.events import INFERENCES, inference, story, told
from xcloud.tasks.corpus.demo.phrases import Dice
from xcloud.tasks.corpus.demo_labelled import (
    DemoAnswers,
    DemoInference,
    DemoReviews,
    DemoSizes,
    demo_stories,
)
from xcloud.tasks.corpus.public_text import public_sentences

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


def test_words_alone_do_not_tell_praise() -> None:
    """Counting praising words is little better than guessing."""
    from xcloud.tasks.corpus.demo.reviews import BAD, GOOD

    rows = DemoReviews(SIZES).read(ALL).splits["train"].texts
    hits = 0.0
    for text, label in zip(rows["first"], rows["label"], strict=True):
        words = text.split()
        balance = sum(w in GOOD for w in words) - sum(w in BAD for w in words)
        hits += 0.5 if balance == 0 else float((balance > 0) == (label == "1"))
    assert hits / len(rows["label"]) < 0.6


def test_answers_stand_in_their_stories_once_asked() -> None:
    for stories in demo_stories(DemoSizes(30, 3, 3), 3).values():
        for found in stories:
            assert len({asked for asked, _, _ in found.questions}) == 3
            for _, answer, start in found.questions:
                assert found.text[start : start + len(answer)] == answer
    assert len(demo_stories(DemoSizes(31, 3, 3), 3)["train"]) == 11
    assert story(Dice(4)) == story(Dice(4))


def test_inference_pairs_say_the_same_in_both_languages() -> None:
    dice, seen = Dice(2), Counter[str]()
    for _ in range(200):
        pair, relation = inference(dice)
        seen[INFERENCES[relation]] += 1
        assert pair["en"][0] != pair["en"][1]
        denied = "did not" in pair["en"][1]
        assert denied == (" no " in pair["es"][1])
        assert not denied or INFERENCES[relation] == "contradiction"
    assert set(seen) == set(INFERENCES)


def test_a_language_that_the_demo_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="en, es, got 'fr'"):
        DemoInference(SIZES, "fr")
    with pytest.raises(ConfigError, match=r"task\.num_train"):
        DemoSizes(0)


def test_public_sentences_are_different_and_a_longer_list_goes_on() -> None:
    few, many = public_sentences(60, 3), public_sentences(120, 3)
    assert many[:60] == few and len(set(many)) == 120
    assert public_sentences(60, 4) != few and public_sentences(0, 3) == []
    assert all(sentence.isprintable() and len(sentence) > 5 for sentence in many)
    for wrong in (-1, 10**9):
        with pytest.raises(ConfigError, match="num must be"):
            public_sentences(wrong, 0)


def test_public_sentences_are_the_same_in_another_process() -> None:
    code = (
        "from xcloud.tasks.corpus.public_text import public_sentences as p;"
        "import hashlib; print(hashlib.sha256(repr(p(300, 5)).encode()).hexdigest())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    mine = hashlib.sha256(repr(public_sentences(300, 5)).encode()).hexdigest()
    assert run.stdout.strip() == mine


def test_an_event_is_told_in_both_languages() -> None:
    from xcloud.tasks.corpus.demo.events import PEOPLE, THINGS, VERBS, Event, Word

    event = Event(PEOPLE[0], VERBS[0], Word("three", "tres"), THINGS[0],
                  when=Word("on Monday", "el lunes"))  # fmt: skip
    assert told(event, time_first=True) == "On Monday the teacher bought three apples."
    assert told(event, "es", denied=True) == "La profesora no compró tres manzanas el lunes."
    assert told(event, denied=True) == "The teacher did not buy three apples on Monday."
