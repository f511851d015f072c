"""Two clauses joined by because, when, if, while, and: one (Spanish, English) pair each."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from experiments.demo_grammar.clauses import (
    Clause,
    make_clause,
    object_noun,
    object_phrase,
    plain_clause,
    subject,
    with_object,
    with_pronoun,
)
from experiments.demo_grammar.dice import Dice
from experiments.demo_grammar.phrases import Phrase, noun_phrase, subject_pronoun
from experiments.demo_grammar.sentences import Pair, more, say, sides
from experiments.demo_grammar.states import FEELINGS, be_adjective
from experiments.demo_grammar.times import when
from experiments.demo_grammar.verbs import (
    DIRECT,
    INTRANSITIVE,
    TRANSITIVE,
    Verb,
    pick_verb,
    verb,
)
from experiments.demo_grammar.words import NOUNS, Noun, adjectives_for

Sides = tuple[list[str], list[str]]


def again(who: Phrase) -> Phrase:
    """The same subject in the next clause: silent in Spanish, a pronoun in English."""
    return who._replace(es="", en=subject_pronoun(who))


def silent(who: Phrase) -> Phrase:
    return who._replace(es="", en="")


def short(
    dice: Dice,
    tense: str,
    *,
    who: Phrase | None = None,
    background: bool = False,
    spoken: bool = False,
) -> Clause:
    """A short clause: verb and object. `who`: its subject, if already known."""
    while True:
        if background or tense in ("preterite", "subjunctive", "perfect", "pluperfect"):
            verb_ = dice.common(INTRANSITIVE if dice.chance(0.45) else TRANSITIVE)
        else:
            verb_ = pick_verb(dice, 0.35)
        if verb_.stative and tense not in ("present", "imperfect"):
            continue
        if who is not None and not who.human and "a" not in verb_.subjects:
            continue
        chosen = who or subject(dice, "p", tense, spoken)
        if verb_.subjects == "a" or (
            tense == "preterite" and chosen.person == 3 and verb_.same_for_us
        ):
            continue
        return make_clause(
            dice, verb_, chosen, tense, background=background, bare=True, clitic_share=0.1
        )


def because(dice: Dice) -> Pair:
    """Ana no vino porque estaba enferma. -- Ana didn't come because she was sick."""
    past = dice.chance(0.6)
    link = dice.pick(
        (("porque", "because"), ("aunque", "although"), (", pero", ", but"), ("porque", "because"))
    )
    first = short(dice, "preterite" if past else dice.pick(("present", "future")), spoken=True)
    first = replace(first, negated=dice.chance(0.35))
    who = first.subject
    roll = dice.below(10)
    if roll < 5:
        adjective = dice.common(
            [a for a in adjectives_for("people", "e") if a.en not in ("dead", "alive")]
        )
        second = be_adjective(again(who), "imperfect" if past else "present", adjective)
        if past and who.person == 0:
            second = replace(second, subject=again(who)._replace(es="yo"))
    elif roll < 7:
        feeling = dice.pick(FEELINGS[:7])
        second = Clause(
            again(who), verb("tener", "be =s"), "imperfect" if past else "present",
            es_tail=(feeling[0],), en_tail=(feeling[1],),
        )  # fmt: skip
        if past and who.person == 0:
            second = replace(second, subject=again(who)._replace(es="yo"))
    else:
        second = short(dice, "preterite" if past else "present", spoken=True)
        if second.subject.en == who.en or second.verb is first.verb:
            return because(dice)
    second = replace(second, negated=dice.chance(0.12))
    es, en = sides(first)
    es2, en2 = sides(second)
    return say([*es, link[0], *es2], [*en, link[1], *en2])


def when_future(dice: Dice) -> Pair:
    """Cuando llegue Ana, comeremos. -- When Ana arrives, we will eat. Also si, antes de que."""
    es_link, en_link, tense = dice.pick((
        ("cuando", "when", "subjunctive"), ("si", "if", "present"),
        ("cuando", "when", "subjunctive"), ("hasta que", "until", "subjunctive"),
        ("antes de que", "before", "subjunctive"),
    ))  # fmt: skip
    condition = short(dice, tense, spoken=True)
    result = short(dice, dice.pick(("future", "future", "going_to")))
    if es_link == "si":
        condition = replace(condition, negated=dice.chance(0.25))
    result = replace(result, negated=es_link == "hasta que" or dice.chance(0.15))
    es, en = sides(condition)
    es2, en2 = sides(result)
    if es_link in ("hasta que", "antes de que") or dice.chance(0.4):
        return say([*es2, es_link, *es], [*en2, en_link, *en])
    return say([es_link, *es, ",", *es2], [en_link, *en, ",", *en2])


def unreal(dice: Dice) -> Pair:
    """Si Ana tuviera dinero, compraría un coche. -- If Ana had money, she would buy a car."""
    who = subject(dice, "p", "conditional", spoken=True)
    if dice.chance(0.5):
        verb_ = dice.pick((verb("tener", "have had had =s"), verb("necesitar", "need =s")))
        noun = dice.common(NOUNS["needed" if dice.chance(0.6) else "vehicle"])
        condition = Clause(who, verb_, "past_subjunctive", dice.chance(0.15))
        condition = with_object(
            condition, object_phrase(dice, verb_, noun, who)._replace(human=False)
        )
    elif dice.chance(0.5):
        adjective = dice.common(adjectives_for("people", "se"))
        condition = be_adjective(who, "past_subjunctive", adjective)
        condition = replace(condition, negated=dice.chance(0.25))
    else:
        condition = short(dice, "past_subjunctive", who=who)
    follower = again(who) if dice.chance(0.7) else None
    result = short(dice, "conditional", who=follower, spoken=True)
    result = replace(result, negated=dice.chance(0.1))
    es, en = sides(condition)
    es2, en2 = sides(result)
    if dice.chance(0.25) and follower is None:
        return say([*es2, "si", *es], [*en2, "if", *en])
    return say(["si", *es, ",", *es2], ["if", *en, ",", *en2])


def meanwhile(dice: Dice) -> Pair:
    """Mientras Ana cocinaba, Luis leía. -- While Ana was cooking, Luis was reading."""
    first = short(dice, "imperfect", background=True, spoken=True)
    if dice.chance(0.5):
        second = short(dice, "imperfect", background=True, spoken=True)
        es_link, en_link = "mientras", "while"
    else:
        second = short(dice, "preterite", spoken=True)
        es_link, en_link = dice.pick((("mientras", "while"), ("cuando", "when")))
        if es_link == "cuando":
            first, second = second, first
    es, en = sides(first)
    es2, en2 = sides(second)
    return say([es_link, *es, ",", *es2], [en_link, *en, ",", *en2])


def purpose(dice: Dice) -> Pair:
    """Ana fue al mercado para comprar pan. -- Ana went to the market to buy bread."""
    tense = dice.pick(("preterite", "future", "present"))
    first = plain_clause(dice, tense, bare=True, verbs=MOVING if dice.chance(0.6) else ())
    es_link, en_link, form = dice.pick((
        ("para", "to", "base"), ("para", "to", "base"), ("sin", "without", "ing"),
        ("antes de", "before", "ing"), ("después de", "after", "ing"),
    ))  # fmt: skip
    second = dice.common(GOALS if first.subject.human else ANIMAL_GOALS)
    goal = make_clause(dice, second, first.subject, tense, bare=True, clitic_share=0.15)
    deed = goal.verb.es.infinitive + goal.clitic.replace(" ", "")
    en_deed = goal.verb.en.base if form == "base" else goal.verb.en.gerund
    es, en = sides(first)
    if first.subject.person == 3 and tense == "preterite":
        first = more(first, *when(dice, "preterite"))
        es, en = sides(first)
    return say([*es, es_link, deed, *goal.es_tail], [*en, en_link, en_deed, *goal.en_tail])


MOVING = [
    v
    for v in TRANSITIVE
    if v.es.infinitive in ("ir", "volver", "viajar", "entrar", "salir", "llegar")
]
GOALS = [v for v in TRANSITIVE if not v.reflexive and not v.stative]
ANIMAL_GOALS = [v for v in GOALS if "a" in v.subjects]


@cache
def verbs_for(noun: Noun) -> list[Verb]:
    """Verbs with a direct object that this noun can be."""
    return [
        v for v in DIRECT if not v.stative and any(noun in NOUNS.get(k, ()) for k in v.classes)
    ]


def and_it(dice: Dice) -> Pair:
    """Ana compró el libro y lo leyó. -- Ana bought the book and read it."""
    tense = dice.pick(("preterite", "preterite", "future", "perfect"))
    verb_ = dice.common(DIRECT)
    if verb_.stative:
        return and_it(dice)
    noun = object_noun(dice, verb_)
    who = subject(dice, "p", tense)
    if noun is None or noun.mass or (tense == "preterite" and who.person == 3):
        return and_it(dice)
    thing = noun_phrase(dice, noun, who)
    first = with_object(Clause(who, verb_, tense), thing)
    options = [v for v in verbs_for(noun) if v is not verb_ and v.takes_pronoun]
    if not options:
        return and_it(dice)
    other = dice.common(options)
    link, en_link = dice.pick(
        (("y", "and"), ("y luego", "and then"), ("pero no", "but"), ("y después", "and later"))
    )
    negated = link == "pero no"
    follower = silent(who) if not negated else again(who)
    second = with_pronoun(dice, Clause(follower, other, tense), thing)
    second = replace(second, negated=negated)
    es, en = sides(first)
    comma = "," if negated else ""
    es2, en2 = sides(second)
    link = "pero" if negated else link
    if not negated:
        en2 = [second.english_words(False)[1][0], *second.en_tail]
    return say([*es, comma, link, *es2], [*en, comma, en_link, *en2])


def conjoined(dice: Dice) -> Pair:
    """Ana lee y Luis escribe una carta. -- Ana reads and Luis writes a letter."""
    tense = dice.pick(("present", "preterite", "future", "progressive", "perfect"))
    first, second = short(dice, tense, spoken=True), short(dice, tense, spoken=True)
    if first.verb.en is second.verb.en or first.subject.en == second.subject.en:
        return conjoined(dice)
    link, en_link = dice.pick(
        (("y", "and"), (", pero", ", but"), ("y", "and"), (", así que", ", so"))
    )
    second = replace(second, negated="pero" in link and dice.chance(0.6))
    es, en = sides(first)
    es2, en2 = sides(second)
    return say([*es, link, *es2], [*en, en_link, *en2])
