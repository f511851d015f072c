"""English word forms: verbs, plurals, comparison, numbers. Forms only: no meaning, no Spanish.

The six persons are numbered as in Spanish: I, you, he, we, you, they.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# A final consonant is doubled in these, as in stop, stopped, stopping.
DOUBLING = "stop plan hug trip slip get put sit run swim win cut forget prefer".split()
PRESENT_BE = ("am", "are", "is", "are", "are", "are")
PAST_BE = ("was", "were", "was", "were", "were", "were")
NEGATED = {"will": "won't", "can": "can't", "am": "am not"}


@dataclass(frozen=True)
class EnglishVerb:
    """`tail` is what follows the inflected word: "for" in look for, "care of" in take care of.

    separable: a pronoun stands before the tail (turn it on), a noun after it (turn on the light).
    """

    base: str
    past: str
    participle: str
    tail: str = ""
    separable: bool = False

    @property
    def third(self) -> str:
        if self.base in ("be", "have"):
            return "is" if self.base == "be" else "has"
        if re.search(r"(s|sh|ch|x|z|o)$", self.base):
            return self.base + "es"
        if re.search(r"[^aeiou]y$", self.base):
            return self.base[:-1] + "ies"
        return self.base + "s"

    @property
    def gerund(self) -> str:
        base = self.base
        if base.endswith("ie"):
            return base[:-2] + "ying"
        if base.endswith("e") and not base.endswith(("ee", "be", "ye")):
            return base[:-1] + "ing"
        return base + (base[-1] if base in DOUBLING else "") + "ing"

    def with_object(self, text: str, is_pronoun: bool = False) -> str:
        """What follows the inflected word when the object is `text`."""
        parts = (text, self.tail) if self.separable and is_pronoun else (self.tail, text)
        return " ".join(part for part in parts if part)


def parse_verb(text: str) -> EnglishVerb:
    """ "look_for", "turn~on" (separable), "eat ate eaten", "take_care_of took taken"."""
    first, *irregular = text.split()
    separable = "~" in first
    base, *tail = first.replace("~", "_").split("_")
    if base == "be":
        irregular = ["was", "been"]
    past, participle = irregular if irregular else [regular_past(base)] * 2
    return EnglishVerb(base, past, participle, " ".join(tail), separable)


def regular_past(base: str) -> str:
    if base.endswith("e"):
        return base + "d"
    if re.search(r"[^aeiou]y$", base):
        return base[:-1] + "ied"
    return base + (base[-1] if base in DOUBLING else "") + "ed"


def verb_group(verb: EnglishVerb, tense: str, person: int) -> tuple[str, str]:
    """(auxiliary, main word). The auxiliary is "" if English has none: ("", "eats")."""
    is_be = verb.base == "be"
    if tense == "present":
        if is_be:
            return PRESENT_BE[person], ""
        return "", verb.third if person == 2 else verb.base
    if tense == "unreal":
        return ("were", "") if is_be else ("", verb.past)
    if tense == "past":
        return (PAST_BE[person], "") if is_be else ("", verb.past)
    if tense == "future":
        return "will", verb.base
    if tense == "conditional":
        return "would", verb.base
    if tense == "perfect":
        return "has" if person == 2 else "have", verb.participle
    if tense == "pluperfect":
        return "had", verb.participle
    if tense == "progressive":
        return PRESENT_BE[person], verb.gerund
    if tense == "past_progressive":
        return PAST_BE[person], verb.gerund
    if tense == "going_to":
        return PRESENT_BE[person], f"going to {verb.base}"
    assert tense == "used_to", tense
    return "", f"used to {verb.base}"


def negate(auxiliary: str) -> str:
    return NEGATED.get(auxiliary, auxiliary + "n't")


def with_support(verb: EnglishVerb, tense: str, person: int) -> tuple[str, str]:
    """verb_group with an auxiliary in every case, for questions and negation: (does, eat)."""
    auxiliary, main = verb_group(verb, tense, person)
    if auxiliary:
        return auxiliary, main
    if tense == "present":
        return "does" if person == 2 else "do", verb.base
    return "did", f"use to {verb.base}" if tense == "used_to" else verb.base


def plural(word: str) -> str:
    if re.search(r"(s|sh|ch|x|z)$", word) or word in ("tomato", "potato", "hero"):
        return word + "es"
    if re.search(r"[^aeiou]y$", word):
        return word[:-1] + "ies"
    return word + "s"


def article(text: str) -> str:
    """ "a" or "an" for what follows, by its first sound."""
    if re.match(r"(uni|use|euro|one\b|u-)", text, re.IGNORECASE):
        return "a"
    return "an" if re.match(r"[aeiou]|honest|heir|herb", text, re.IGNORECASE) else "a"


IRREGULAR_COMPARISON = {"good": ("better", "best"), "bad": ("worse", "worst"),
                        "far": ("farther", "farthest")}  # fmt: skip
SHORT_ER = "clever simple quiet narrow gentle humble noble polite shallow".split()


def compare(adjective: str) -> tuple[str, str]:
    """(comparative, superlative): taller, tallest; more famous, most famous."""
    if adjective in IRREGULAR_COMPARISON:
        return IRREGULAR_COMPARISON[adjective]
    syllables = len(re.findall(r"[aeiouy]+", re.sub(r"e$", "", adjective)))
    if re.search(r"[ -]|ed$", adjective) or adjective in ("loyal", "naive", "cruel"):
        return "more " + adjective, "most " + adjective
    if adjective.endswith("y") and syllables <= 2 and adjective[-2] not in "aeiou":
        stem = adjective[:-1] + "i"
    elif syllables > 1 and adjective not in SHORT_ER:
        return "more " + adjective, "most " + adjective
    elif adjective.endswith("e"):
        stem = adjective[:-1]
    elif re.search(r"[^aeiou][aeiou][bdgnt]$", adjective):
        stem = adjective + adjective[-1]
    else:
        stem = adjective
    return stem + "er", stem + "est"


UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def number(value: int) -> str:
    """1..999 in words: twenty-one, two hundred and five."""
    if value >= 100:
        hundreds = f"{UNITS[value // 100]} hundred"
        return f"{hundreds} and {number(value % 100)}" if value % 100 else hundreds
    if value < 20:
        return UNITS[value]
    tens, unit = TENS[value // 10 - 2], value % 10
    return f"{tens}-{UNITS[unit]}" if unit else tens


def possessive(owner: str) -> str:
    return owner + ("'" if owner.endswith("s") else "'s")


def finish(words: Sequence[str], end: str = ".") -> str:
    """Join, choose a or an, capitalise, punctuate. The marker "a/an" stands for the article."""
    text = " ".join(word for word in words if word).replace(" ,", ",")
    text = re.sub(r"a/an (?=(.*))", lambda match: article(match.group(1)) + " ", text)
    return text[0].upper() + text[1:] + end
