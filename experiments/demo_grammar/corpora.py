"""The demo texts: any number of each kind, all distinct, reproducible from a seed.

A shorter list is a prefix of a longer one with the same seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from experiments.demo_grammar import events, feelings, joined, nested, sentences, states
from experiments.demo_grammar.dice import Dice
from experiments.demo_grammar.reviews import review
from xcloud.base.settings import NotNegative, between
from xcloud.base.wording import check
from xcloud.demo import Story

T = TypeVar("T")
MAX_PAIRS = 200_000  # the grammars have more, but finding new ones takes ever longer
MAX_SAMPLES = 300_000
MAX_SENTENCES = 1_000_000
WORDS_OF_A_SENTENCE = range(4, 26)

# The kinds of sentences and how often each is tried.
KINDS: tuple[tuple[Callable[[Dice], tuple[str, str]], float], ...] = (
    (sentences.statement, 20.0), (sentences.helped, 8.0), (sentences.question, 6.0),
    (sentences.open_question, 6.0), (sentences.giving, 5.0), (sentences.command, 5.0),
    (sentences.doing_it, 2.5), (sentences.object_in_place, 3.0),
    (sentences.routine_of_things, 2.0), (sentences.since, 2.0), (sentences.passive, 2.5),
    (feelings.liking, 5.0), (feelings.pain, 1.5), (states.description, 6.0),
    (states.copula_question, 3.0), (states.identity, 5.0), (states.existence, 3.0),
    (states.exclamation, 1.5), (states.time_and_weather, 2.0), (states.quantity, 3.0),
    (states.feeling, 2.0), (joined.because, 6.0), (joined.when_future, 4.0),
    (joined.unreal, 4.0), (joined.meanwhile, 4.0), (joined.purpose, 3.5), (joined.and_it, 3.5),
    (joined.conjoined, 3.5), (nested.reported, 5.0), (nested.indirect_question, 3.0),
    (nested.wanting, 3.0), (nested.relative, 5.0), (nested.comparison, 4.0),
    (nested.evaluation, 3.0),
)  # fmt: skip


def pairs(num: int, seed: int) -> tuple[tuple[str, str], ...]:
    """(Spanish, English) of 4 to 25 words, all distinct on both sides, in random order. About
    0.1 ms each. Raises ConfigError unless num <= MAX_PAIRS.

    The Spanish determines the English: an omitted subject is never a third person, "su" refers
    to the subject, "lo" is a person after verbs of people and a thing otherwise, the imperfect is
    "used to", and so on; so BLEU measures the model, not ambiguity in the corpus.
    """
    _check(num, seed, MAX_PAIRS)
    dice, seen = Dice(seed), set[str]()
    found: list[tuple[str, str]] = []
    while len(found) < num:
        es, en = dice.weighted(KINDS)(dice)
        if es in seen or en in seen:
            continue
        if all(len(side.split()) in WORDS_OF_A_SENTENCE for side in (es, en)):
            seen.update((es, en))
            found.append((es, en))
    return tuple(found)


def reviews(num: int, seed: int) -> list[tuple[str, bool]]:
    """(text, whether it is positive): one-sentence film reviews in English."""
    return _distinct(review, lambda sample: sample[0], num, seed)


def answers(num: int, seed: int) -> list[tuple[str, str, bool]]:
    """(question, sentence, whether the sentence answers it), in English."""
    return _distinct(events.answering_pair, lambda sample: sample[:2], num, seed)


def inferences(num: int, seed: int) -> list[tuple[dict[str, tuple[str, str]], str]]:
    """({"en": (premise, hypothesis), "es": the same in Spanish}, relation). The relation is
    entailment, neutral or contradiction."""
    return _distinct(events.inference, lambda sample: sample[0]["en"], num, seed)


def stories(num: int, seed: int) -> list[Story]:
    """English paragraphs of four events, with questions answered by spans of the text."""
    return _distinct(events.story, lambda story: story.text, num, seed)


def public_sentences(num: int, seed: int) -> list[str]:
    """English sentences of all demo grammars, mixed: statements and questions of daily life,
    events, film reviews. About 0.03 ms each.

    Every cloud can generate them from the seed, so they can be used for what clouds must share
    without showing each other text: a tokenizer, a pretrained start, a basis for a border.
    """
    return _distinct(_public_sentence, lambda text: text, num, seed, MAX_SENTENCES)


def _public_sentence(dice: Dice) -> str:
    kind = dice.below(8)
    if kind < 3:
        return dice.weighted(KINDS)(dice)[1]
    if kind < 5:
        return review(dice)[0]
    event = events.new_event(dice)
    if kind < 7:
        return events.told(event, time_first=dice.chance(0.5), denied=dice.chance(0.1))
    return events.random_question(dice, event)[0]


def _distinct(
    make: Callable[[Dice], T],
    key: Callable[[T], object],
    num: int,
    seed: int,
    maximum: int = MAX_SAMPLES,
) -> list[T]:
    """`num` samples with distinct keys, so that splits are disjoint."""
    _check(num, seed, maximum)
    dice, found = Dice(seed), dict[object, T]()
    while len(found) < num:
        sample = make(dice)
        found.setdefault(key(sample), sample)
    return list(found.values())


def _check(num: int, seed: int, maximum: int) -> None:
    check("num", num, between(0, maximum))
    check("seed", seed, NotNegative)
