"""The demo texts: the grammar still makes them, and who asks for too many is told so."""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Callable, Sequence

import pytest

from experiments.demo_grammar.__main__ import FOLDER, made
from xcloud import demo
from xcloud.base.errors import ConfigError

# A change of a text changes every number measured on it: do that on purpose, and say so.
DIGESTS = {
    "pairs": "d83647079af5c533",
    "reviews": "c2db63ddda25906d",
    "answers": "1ba7eff1af9d89b2",
    "inferences": "d1b2c19852a23ab7",
    "stories": "6f22eff39ecdc6d3",
    "public_sentences": "e0b74c6b9ba7a55a",
}
KINDS: tuple[Callable[[int], Sequence[object]], ...] = (
    demo.pairs, demo.reviews, demo.answers, demo.inferences, demo.stories, demo.public_sentences,
)  # fmt: skip


def kept(name: str) -> bytes:
    return lzma.decompress((FOLDER / f"{name}.jsonl.xz").read_bytes())


def test_nobody_changes_a_file_unknowingly() -> None:
    """Nor the grammar that makes it: test_demo_grammar.py."""
    assert {name: hashlib.sha256(kept(name)).hexdigest()[:16] for name in DIGESTS} == DIGESTS


@pytest.mark.slow
@pytest.mark.nightly
def test_the_grammar_still_makes_the_bytes_of_every_file() -> None:
    written = dict(made())
    assert written.keys() == DIGESTS.keys()
    for name, text in written.items():
        assert kept(name) == text.encode()


@pytest.mark.parametrize("texts", KINDS)
def test_a_shorter_list_begins_a_longer_one_and_all_texts_differ(
    texts: Callable[[int], Sequence[object]],
) -> None:
    most = demo.NUM_ROWS[texts.__name__]

    every = list(texts(most))

    assert len(set(map(repr, every))) == most
    assert list(texts(60)) == every[:60]
    assert list(texts(0)) == []


@pytest.mark.parametrize("texts", KINDS)
def test_more_texts_than_there_are_cannot_be_had(
    texts: Callable[[int], Sequence[object]],
) -> None:
    for wrong in (-1, demo.NUM_ROWS[texts.__name__] + 1):
        with pytest.raises(ConfigError, match="ask for less"):
            texts(wrong)


def test_every_answer_stands_where_a_story_says() -> None:
    for story in demo.stories(300):
        assert len(story.questions) == demo.STORY_QUESTIONS
        for _, answer, start in story.questions:
            assert story.text[start : start + len(answer)] == answer
