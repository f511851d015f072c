"""Plain English sentences that everyone may know. Nothing of a private corpus lives here.

Every cloud can make them itself from the seed, so they may serve for what several clouds must
share without showing each other text: a tokenizer, a pretrained start, a basis for a border.
"""

from __future__ import annotations

from xcloud.checks import check_int
from xcloud.tasks.corpus.demo.events import new_event, random_question, told
from xcloud.tasks.corpus.demo.phrases import Dice
from xcloud.tasks.corpus.demo.reviews import review
from xcloud.tasks.corpus.demo_grammar import KINDS

MAX_SENTENCES = 1_000_000


def public_sentences(num: int, seed: int) -> list[str]:
    """`num` different sentences of all demo grammars, mixed: statements and questions of daily
    life, events, film reviews. The same for a seed on every machine; `num` more are a longer list
    with the same start. About 0.2 ms each."""
    check_int("num", num, 0, MAX_SENTENCES)
    check_int("seed", seed, 0)
    dice = Dice(seed)
    found: dict[str, None] = {}  # in the order they came
    while len(found) < num:
        found.setdefault(_sentence(dice))
    return list(found)


def _sentence(dice: Dice) -> str:
    kind = dice.below(8)
    if kind < 3:
        return dice.weighted(KINDS)(dice)[1]
    if kind < 5:
        return review(dice)[0]
    if kind < 7:
        return told(new_event(dice), time_first=dice.chance(0.5), denied=dice.chance(0.1))
    return random_question(dice, new_event(dice))[0]
