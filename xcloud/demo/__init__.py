"""The demo texts: Spanish and English, public, made once by a grammar and kept as data.

They need no download, and every cloud has the same ones. `experiments/demo_grammar` made them; a
test holds that it still makes the same bytes. A shorter list is the beginning of a longer one.
"""

from __future__ import annotations

import bz2
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import ConfigError

STORY_QUESTIONS = 3  # that each story has
NUM_ROWS = {
    "pairs": 24_000,
    "reviews": 9_500,
    "answers": 9_500,
    "inferences": 9_500,
    "stories": 4_200,
    "public_sentences": 22_000,
}
"""How many rows each file of texts has."""


class Story(NamedTuple):
    """An English paragraph with questions: (question, answer, index of its first character)."""

    text: str
    questions: tuple[tuple[str, str, int], ...]


def pairs(num: int) -> Sequence[tuple[str, str]]:
    """Return the first `num` pairs (Spanish, English), of 4 to 25 words, all different.

    The Spanish determines the English: an omitted subject is never a third person, "su" refers
    to the subject, "lo" is a person after verbs of people and a thing otherwise, the imperfect is
    "used to", and so on; so BLEU measures the model, not ambiguity in the corpus. Raises
    ConfigError for more than NUM_ROWS, as the other functions do.
    """
    return _rows("pairs", num=num)


def reviews(num: int) -> list[tuple[str, bool]]:
    """Return the first `num` film reviews of one English sentence: (text, is it positive)."""
    return [(text, positive) for text, positive in _rows("reviews", num=num)]


def answers(num: int) -> list[tuple[str, str, bool]]:
    """Return the first `num` English (question, sentence, does the sentence answer it)."""
    return [(question, sentence, yes) for question, sentence, yes in _rows("answers", num=num)]


def inferences(num: int) -> list[tuple[dict[str, tuple[str, str]], str]]:
    """Return the first `num` inference pairs, each in both languages, with their relation:
    ({"en": (premise, hypothesis), "es": the same}, "entailment", "neutral" or "contradiction")."""
    rows = _rows("inferences", num=num)
    return [({"en": (en[0], en[1]), "es": (es[0], es[1])}, relation) for en, es, relation in rows]


def stories(num: int) -> list[Story]:
    """Return the first `num` paragraphs of four events, with questions that spans answer."""
    return [
        Story(
            text=text,
            questions=tuple((question, answer, start) for question, answer, start in questions),
        )
        for text, questions in _rows("stories", num=num)
    ]


def public_sentences(num: int) -> list[str]:
    """Return the first `num` English sentences of all demo grammars, mixed.

    Every cloud has them, so they serve for what clouds must share without showing each other
    text: a tokenizer, a pretrained start, a basis for a boundary.
    """
    return [text for (text,) in _rows("public_sentences", num=num)]


def _rows(name: str, num: int) -> Sequence[Any]:
    most = NUM_ROWS[name]
    if not 0 <= num <= most:
        what = name.replace("_", " ")
        raise ConfigError(f"the demo has {most:,} {what}, and {num:,} are asked for: ask for less")
    return _all_rows(name)[:num]


@cache
def _all_rows(name: str) -> Sequence[Any]:
    """Read one file of texts: a JSON array on each line. It takes some 0.1 s."""
    file = resources.files("xcloud.demo").joinpath("texts", f"{name}.jsonl.bz2")
    # Packed and read once a process: every rank and every task of a test asks for them. Rows are
    # tuples, as callers could change lists for each other.
    return [tuple(parsed_json(line)) for line in bz2.decompress(file.read_bytes()).splitlines()]
