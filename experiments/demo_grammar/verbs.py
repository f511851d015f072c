"""Verb pairs, Spanish and English: tenses, helpers and selection. No sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from experiments.demo_grammar.dice import Dice
from experiments.demo_grammar.english import EnglishVerb, parse_verb
from experiments.demo_grammar.spanish import Paradigm, conjugate
from experiments.demo_grammar.words import WORDS, fields

# Spanish tense -> English tense. The imperfect is chosen in english_tense.
ENGLISH_TENSE = {
    "present": "present", "preterite": "past", "future": "future", "conditional": "conditional",
    "perfect": "perfect", "pluperfect": "pluperfect", "progressive": "progressive",
    "past_progressive": "past_progressive", "going_to": "going_to", "imperfect": "used_to",
    "subjunctive": "present", "past_subjunctive": "unreal",
}  # fmt: skip


# Compound tenses: auxiliary, its tense, what follows.
COMPOUND = {
    "perfect": ("haber", "present"), "pluperfect": ("haber", "imperfect"),
    "progressive": ("estar", "present"), "past_progressive": ("estar", "imperfect"),
    "going_to": ("ir", "present"),
}  # fmt: skip


# "yo" and "él" share their form here, so the subject is always said.
AMBIGUOUS = ("imperfect", "conditional", "subjunctive", "past_subjunctive", "pluperfect",
             "past_progressive")  # fmt: skip


@dataclass(frozen=True, eq=False)
class Verb:
    es: Paradigm
    en: EnglishVerb
    preposition: str = ""
    reflexive: bool = False
    subjects: str = "p"
    classes: tuple[str, ...] = ()
    stative: bool = False
    takes_pronoun: bool = True

    @property
    def same_for_us(self) -> bool:
        """ "compramos" is present and past: without a time adverbial it is read as present."""
        return self.es.tenses["present"][3] == self.es.tenses["preterite"][3]

    @property
    def human_object(self) -> bool:
        return "people" in self.classes or "family" in self.classes


def verb(es: str, en: str, subjects: str = "p", objects: str = "-") -> Verb:
    infinitive, _, preposition = es.partition(" ")
    reflexive = infinitive.endswith("se")
    forms, _, flags = en.partition("=")
    return Verb(
        conjugate(infinitive.removesuffix("se")),
        parse_verb(forms),
        preposition,
        reflexive,
        subjects,
        tuple(objects.split()) if objects != "-" else (),
        "s" in flags,
        "c" not in flags,
    )


VERBS = [verb(*fields(entry)) for entry in WORDS["verbs"]["all"]]
WITH_OBJECT = [v for v in VERBS if v.classes]
TRANSITIVE = [v for v in WITH_OBJECT if "p" in v.subjects]  # what people do
DIRECT = [v for v in TRANSITIVE if not v.preposition]
INTRANSITIVE = [v for v in VERBS if not v.classes]
BE_SER, BE_ESTAR = verb("ser", "be =s"), verb("estar", "be =s")


class Helper(NamedTuple):
    """A verb before another one: quiere comprar, wants to buy."""

    verb: Verb
    es_link: str  # between the helper and the infinitive
    en_form: str  # "to", "base" or "ing"
    tenses: tuple[str, ...]
    # Spanish tense -> English auxiliary, where the English verb has no such form.
    modal: Mapping[str, str] = MappingProxyType({})


_STATE, _EVENT = ("present", "imperfect", "future"), ("preterite", "future", "perfect")
HELPERS = (
    Helper(verb("querer", "want =s"), "", "to", ("present", "imperfect")),
    Helper(verb("poder", "be_able_to =s"), "", "base", ("present", "imperfect", "conditional"),
           {"present": "can", "imperfect": "could", "conditional": "could"}),
    Helper(verb("tener", "have had had =s"), "que", "to", _STATE),
    Helper(verb("deber", "be =s"), "", "base", ("present",), {"present": "should"}),
    Helper(verb("necesitar", "need =s"), "", "to", _STATE),
    Helper(verb("empezar", "begin began begun"), "a", "to", _EVENT),
    Helper(verb("intentar", "try"), "", "to", _EVENT),
    Helper(verb("decidir", "decide"), "", "to", _EVENT),
    Helper(verb("esperar", "hope =s"), "", "to", ("present", "imperfect")),
    Helper(verb("preferir", "prefer =s"), "", "to", ("present", "imperfect")),
    Helper(verb("aprender", "learn"), "a", "to", _EVENT),
    Helper(verb("dejar", "stop"), "de", "ing", _EVENT),
    Helper(verb("olvidar", "forget forgot forgotten"), "", "to", ("preterite", "perfect")),
    Helper(verb("prometer", "promise"), "", "to", ("preterite", "perfect")),
    Helper(verb("lograr", "manage"), "", "to", _EVENT),
    Helper(verb("terminar", "finish"), "de", "ing", _EVENT),
    Helper(verb("seguir", "keep kept kept"), "ndo", "ing", ("present", "preterite", "future")),
)  # fmt: skip
HELPER_WEIGHTS = tuple(
    zip(HELPERS, (9, 9, 8, 5, 4, 3, 3, 3, 2, 3, 2, 3, 2, 2, 2, 2, 3), strict=True)
)


@cache
def spanish_forms(paradigm: Paradigm, tense: str, person: int) -> str:
    if tense not in COMPOUND:
        return paradigm.tenses[tense][person]
    auxiliary, its_tense = COMPOUND[tense]
    form = conjugate(auxiliary).tenses[its_tense][person]
    if auxiliary == "haber":
        return f"{form} {paradigm.participle}"
    if auxiliary == "estar":
        return f"{form} {paradigm.gerund}"
    return f"{form} a {paradigm.infinitive}"


def english_tense(verb_: Verb, tense: str, background: bool = False) -> str:
    """The imperfect: a state is "knew"; in the background "was reading"; else "used to read"."""
    if tense == "imperfect" and (verb_.stative or background):
        return "past" if verb_.stative else "past_progressive"
    return ENGLISH_TENSE[tense]


TENSE_WEIGHTS = (
    ("preterite", 32.0), ("present", 22.0), ("future", 12.0), ("perfect", 10.0),
    ("progressive", 8.0), ("going_to", 7.0), ("imperfect", 8.0), ("pluperfect", 1.0),
)  # fmt: skip
ASKED_TENSES = (
    ("preterite", 35.0), ("present", 25.0), ("future", 15.0), ("perfect", 12.0),
    ("going_to", 10.0), ("progressive", 6.0),
)  # fmt: skip
STATIVE_WEIGHTS = (("present", 70.0), ("imperfect", 30.0))


def pick_tense(dice: Dice, verb_: Verb, asked: bool = False) -> str:
    if asked:
        return "present" if verb_.stative else dice.weighted(ASKED_TENSES)
    return dice.weighted(STATIVE_WEIGHTS if verb_.stative else TENSE_WEIGHTS)


def pick_verb(dice: Dice, intransitive: float = 0.3) -> Verb:
    return dice.common(INTRANSITIVE) if dice.chance(intransitive) else dice.common(WITH_OBJECT)
