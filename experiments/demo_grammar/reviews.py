"""Short film reviews in English, positive or negative. The label depends on grammar, not on words.

Positive and negative words occur in both kinds: negation flips a clause, and of two conflicting
clauses the one after "but", or outside "although", decides.
"""

from __future__ import annotations

from collections.abc import Callable

from experiments.demo_grammar.dice import Dice
from experiments.demo_grammar.words import WORDS, pairs

WORDS_OF_REVIEWS: dict[str, list[str]] = WORDS["reviews"]
SUBJECTS, NOUNS, EFFECTS = (WORDS_OF_REVIEWS[kind] for kind in ("subjects", "nouns", "effects"))
GOOD, BAD = WORDS_OF_REVIEWS["good"], WORDS_OF_REVIEWS["bad"]
DEGREES, NEGATIONS, AUXILIARIES = (
    WORDS_OF_REVIEWS[kind] for kind in ("degrees", "negations", "auxiliaries")
)
# (third person, bare form)
DOES_WELL, DOES_BADLY = (pairs(WORDS_OF_REVIEWS[kind]) for kind in ("does_well", "does_badly"))


def review(dice: Dice) -> tuple[str, bool]:
    """(text, whether it is positive). The label is drawn first, so that no form favours one."""
    good = dice.chance(0.5)
    return dice.weighted(FORMS)(dice, good), good


def _adjective(dice: Dice, good: bool) -> str:
    return dice.pick(GOOD if good else BAD)


def clause(dice: Dice, good: bool, subject: str | None = None) -> str:
    """A positive or negative statement; half of them negate a word of the opposite kind."""
    about = subject or dice.pick(SUBJECTS)
    turned = dice.chance(0.5)
    kind = dice.below(5)
    if kind < 3:
        if turned:
            return f"{about} is {dice.pick(NEGATIONS)} {_adjective(dice, not good)}"
        degree = dice.pick(DEGREES)
        return " ".join(word for word in (about, "is", degree, _adjective(dice, good)) if word)
    if kind == 3:
        does = dice.pick(DOES_WELL if good != turned else DOES_BADLY)
        return f"{about} {dice.pick(AUXILIARIES)} {does[1]}" if turned else f"{about} {does[0]}"
    fails = "never fails to" if good else dice.pick(("fails to", "does nothing to"))
    return f"{about} {fails} {dice.pick(EFFECTS)}"


def _plain(dice: Dice, good: bool) -> str:
    return f"{clause(dice, good)} ."


def _and(dice: Dice, good: bool) -> str:
    return f"{clause(dice, good)} , and {clause(dice, good)} ."


def _but(dice: Dice, good: bool) -> str:
    return f"{clause(dice, not good)} , but {clause(dice, good)} ."


def _although(dice: Dice, good: bool) -> str:
    word = dice.pick(("although", "even though", "while"))
    aside, verdict = clause(dice, not good), clause(dice, good)
    return f"{verdict} , {word} {aside} ." if dice.chance(0.5) else f"{word} {aside} , {verdict} ."


def _despite(dice: Dice, good: bool) -> str:
    aside = f"despite its {_adjective(dice, not good)} {dice.pick(NOUNS)}"
    verdict = clause(dice, good)
    return f"{aside} , {verdict} ." if dice.chance(0.5) else f"{verdict} , {aside} ."


def _too(dice: Dice, good: bool) -> str:
    pair = f"too {_adjective(dice, good)} to be {_adjective(dice, not good)}"
    return f"{dice.pick(SUBJECTS)} is {pair} ."


def _expected(dice: Dice, good: bool) -> str:
    subject = dice.pick(SUBJECTS)
    start = f"i expected {subject} to be {_adjective(dice, not good)}"
    return f"{start} , but {clause(dice, good, 'it')} ."


def _nobody(dice: Dice, good: bool) -> str:
    start = dice.pick(("nobody could call", "no one will find", "you would be wrong to call"))
    return f"{start} {dice.pick(SUBJECTS)} {_adjective(dice, not good)} ."


FORMS: tuple[tuple[Callable[[Dice, bool], str], float], ...] = (
    (_plain, 4.0), (_and, 2.0), (_but, 4.0), (_although, 3.0), (_despite, 2.0), (_too, 1.0),
    (_expected, 1.5), (_nobody, 1.0),
)  # fmt: skip
