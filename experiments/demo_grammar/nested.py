"""A clause inside a clause, and comparisons: one (Spanish, English) pair each."""

from __future__ import annotations

from dataclasses import replace

from experiments.demo_grammar import spanish
from experiments.demo_grammar.clauses import Clause, make_clause, object_noun, subject, with_object
from experiments.demo_grammar.dice import Dice
from experiments.demo_grammar.english import compare
from experiments.demo_grammar.joined import Sides, again, short, silent
from experiments.demo_grammar.phrases import (
    PRONOUN_WEIGHTS,
    PRONOUNS,
    Phrase,
    name,
    noun_phrase,
    whom,
)
from experiments.demo_grammar.sentences import Pair, say, sides
from experiments.demo_grammar.states import (
    COPULA_KINDS,
    be,
    be_adjective,
    copula_clause,
    copula_subject,
)
from experiments.demo_grammar.times import when
from experiments.demo_grammar.verbs import BE_SER, TRANSITIVE, Verb, verb
from experiments.demo_grammar.words import NOUNS, Noun, adjectives_for

NOW_THINKING = (
    verb("creer", "think thought thought =s"), verb("saber", "know knew known =s"),
    verb("decir", "say said said"), verb("pensar", "believe =s"), verb("imaginar", "imagine"),
)  # fmt: skip
THEN_THINKING = (
    verb("decir", "say said said"), verb("creer", "think thought thought =s"),
    verb("saber", "know knew known =s"), verb("explicar", "explain"), verb("pensar", "believe =s"),
    verb("prometer", "promise"), verb("recordar", "remember =s"), verb("soñar", "dream"),
    verb("descubrir", "discover"), verb("escribir", "write wrote written"),
)  # fmt: skip


def reported(dice: Dice) -> Pair:
    """Ana dijo que compraría un coche. -- Ana said that she would buy a car."""
    past = dice.chance(0.5)
    thinks = dice.common(THEN_THINKING if past else NOW_THINKING)
    tense = ("imperfect" if thinks.stative else "preterite") if past else "present"
    who = subject(dice, "p", tense)
    if past and who.person == 3 and not thinks.stative:
        who = name(dice)
    main = Clause(who, thinks, tense)
    inner_tense = dice.pick(
        ("pluperfect", "conditional", "past_progressive") if past
        else ("present", "future", "perfect", "preterite", "going_to")
    )  # fmt: skip
    same = dice.chance(0.35)
    if dice.chance(0.2):
        inner, _ = copula_clause(dice, tense="imperfect" if past else "present")
    else:
        inner = short(
            dice, inner_tense, who=again(who) if same and who.person != 0 else None, spoken=True
        )
    es, en = sides(main)
    es_in, en_in = sides(inner)
    return say([*es, "que", *es_in], [*en, "that", *en_in])


def indirect_question(dice: Dice) -> Pair:
    """No sé dónde vive Ana. -- I don't know where Ana lives."""
    asking = dice.pick((
        verb("saber", "know knew known =s"), verb("preguntar", "ask"),
        verb("recordar", "remember =s"), verb("entender", "understand understood understood =s"),
    ))  # fmt: skip
    past = dice.chance(0.3)
    tense = ("imperfect" if asking.stative else "preterite") if past else "present"
    who = subject(dice, "p", tense)
    if past and who.person == 3 and not asking.stative:
        who = name(dice)
    negated = asking.stative and dice.chance(0.75)
    main = Clause(who, asking, tense, negated)
    options = (
        ("dónde", "where"),
        ("cuándo", "when"),
        ("por qué", "why"),
        ("si", "if"),
        ("cómo", "how"),
    )
    es_word, en_word = dice.pick(options)
    inner = short(
        dice,
        dice.pick(("pluperfect", "conditional") if past else ("preterite", "future", "present")),
    )
    if inner.verb.stative:
        es_word, en_word = ("por qué", "why") if dice.chance(0.5) else ("si", "if")
    es, en = sides(main)
    start, rest = inner.spanish_verb()
    after = [inner.subject.es, start, rest] if es_word == "si" else [start, inner.subject.es, rest]
    return say([*es, es_word, *after, *inner.es_tail], [*en, en_word, *inner.english()])


def wanting(dice: Dice) -> Pair:
    """Ana quiere que Luis compre pan. -- Ana wants Luis to buy bread."""
    past = dice.chance(0.35)
    who = subject(dice, "p", "imperfect" if past else "")
    near = {who.person, who.en_person}
    other = subject(dice, "p", "subjunctive", spoken=True)
    if (
        other.person in near
        or other.en_person in near
        or (near & {0, 3} and other.person in (0, 3))
    ):
        other = name(dice)
    other = other._replace(es=other.es or "tú")
    if not other.pronoun and other.person == 3:
        other = name(dice)
    if past:
        main = Clause(who, verb("querer", "want =s"), "imperfect", dice.chance(0.15))
    else:
        main = Clause(who, verb("querer", "want =s"), "present", dice.chance(0.2))
    inner = short(dice, "past_subjunctive" if past else "subjunctive", who=other)
    en_other = whom(other) if other.pronoun else other.en
    es, en = sides(main)
    return say(
        [*es, "que", *inner.spanish()], [*en, en_other, "to", inner.verb.en.base, *inner.en_tail]
    )


def relative(dice: Dice) -> Pair:
    """El libro que compró Ana es caro. -- The book that Ana bought is expensive."""
    clause = _subject_relative(dice) if dice.chance(0.5) else _object_relative(dice)
    return say(*clause)


def _main_about(dice: Dice, noun: Noun, who: Phrase, inner: Verb) -> Clause:
    """A predicate for a subject that has a relative clause with the verb `inner`."""
    if noun.human and dice.chance(0.6):
        main = short(dice, dice.pick(("preterite", "present", "future", "perfect")), who=who)
        if main.verb is not inner:
            return main
    options = adjectives_for(noun.kind, "se")
    adjective = dice.common(options)
    tense = "present" if dice.chance(0.6) else "imperfect"
    clause = be_adjective(who, tense, adjective)
    return replace(clause, negated=dice.chance(0.12))


def _described(dice: Dice) -> tuple[Phrase, Noun]:
    kind = dice.weighted(COPULA_KINDS)
    noun = dice.common(NOUNS["people" if kind == "family" else kind])
    several = noun.has_plural and dice.chance(0.3)
    es, en = noun.forms(several)
    person = 5 if several else 2
    who = Phrase(f"{noun.the(several)} {es}", f"the {en}", person, noun.gender, person, noun.human)
    return who, noun


def _subject_relative(dice: Dice) -> Sides:
    """la mujer que vive aquí, the woman who lives here"""
    who, noun = _described(dice)
    while not noun.human:
        who, noun = _described(dice)
    tense = dice.pick(("present", "preterite", "perfect", "progressive"))
    inner = short(dice, tense, who=silent(who))
    inner = replace(inner, negated=dice.chance(0.15))
    whole = who._replace(
        es=" ".join([who.es, "que", *(w for w in inner.spanish() if w)]),
        en=" ".join([who.en, "who", *(w for w in inner.english() if w)]),
    )
    if dice.chance(0.35):
        seen = dice.pick((verb("conocer", "know knew known =s"), verb("ver", "see saw seen")))
        tense = "present" if seen.stative else "preterite"
        viewer = subject(dice, "p")
        if not (viewer.person == 3 and tense == "preterite"):
            return sides(with_object(Clause(viewer, seen, tense), whole))
    return sides(_main_about(dice, noun, whole, inner.verb))


def _object_relative(dice: Dice) -> Sides:
    """la carta que escribí, the letter that I wrote; el rey con el que hablé, that I talked to"""
    while True:
        verb_ = dice.common(TRANSITIVE)
        noun = object_noun(dice, verb_)
        if (
            noun is not None
            and not noun.mass
            and noun.kind in KINDS_TO_DESCRIBE
            and not verb_.stative
        ):
            break
    several = noun.has_plural and dice.chance(0.25)
    person = 5 if several else 2
    es_noun, en_noun = noun.forms(several)
    link = verb_.preposition or ("a" if noun.human else "")
    pronoun = f"{link} {spanish.the(noun.gender, several)} que" if link else "que"
    tense = dice.pick(("preterite", "perfect", "future"))
    who = subject(dice, "p", tense, asked=False)
    if who.person == 3 and tense == "preterite":
        tense = "perfect"
    inner = Clause(who, verb_, tense, en_tail=(verb_.en.tail,))
    time = when(dice, tense) if tense == "preterite" and dice.chance(0.4) else ("", "")
    start, rest = inner.spanish_verb()
    after = [start, who.es, rest] if dice.chance(0.5) else [who.es, start, rest]
    whole = Phrase(
        " ".join(w for w in [noun.the(several), es_noun, pronoun, *after, time[0]] if w),
        " ".join(w for w in ["the", en_noun, "that", *inner.english(), time[1]] if w),
        person, noun.gender, person, noun.human,
    )  # fmt: skip
    return sides(_main_about(dice, noun, whole, inner.verb))


KINDS_TO_DESCRIBE = {kind for kind, _ in COPULA_KINDS} - {"family"}


def comparison(dice: Dice) -> Pair:
    """Ana es más alta que su hermano. -- Ana is taller than her brother."""
    who, kind = copula_subject(dice)
    options = [
        a for a in adjectives_for(kind, "s") if a.en[0].islower() and a.en not in NOT_COMPARED
    ]
    adjective, several = dice.common(options), who.person > 2
    es_form = spanish.agree(adjective.es, who.gender, several)
    tense = "present" if dice.chance(0.75) else "imperfect"
    if who.en_person == 0:
        who = who._replace(es="yo")
    comparative, superlative = compare(adjective.en)
    more_es = {"bueno": "mejor", "malo": "peor"}.get(adjective.es)
    if more_es is None:
        more_es = f"más {es_form}"
    elif several:
        more_es = spanish.plural(more_es)
    if who.human:
        other = name(dice) if dice.chance(0.4) else noun_phrase(
            dice, dice.common(NOUNS["family"]), who, several=False
        )  # fmt: skip
        if dice.chance(0.2):
            pronoun = dice.weighted(PRONOUN_WEIGHTS)
            if (
                pronoun.person not in (who.person, who.en_person)
                and pronoun.en_person != who.en_person
            ):
                other = Phrase(pronoun.es, whom(pronoun))
    else:
        other = noun_phrase(dice, dice.common(NOUNS[kind]), definite=True, plain=True)
    roll = dice.below(10)
    if roll < 5:
        tail = f"{more_es} que {other.es}", f"{comparative} than {other.en}"
    elif roll < 7:
        tail = f"tan {es_form} como {other.es}", f"as {adjective.en} as {other.en}"
    elif roll < 8:
        tail = f"menos {es_form} que {other.es}", f"less {adjective.en} than {other.en}"
    else:
        place = dice.common(NOUNS["place"])
        es = f"{spanish.the(who.gender, several)} {more_es}"
        en_place = f"{'on' if place.en in ('island', 'farm', 'street') else 'in'} the {place.en}"
        tail = f"{es} de {place.the(False)} {place.es}", f"the {superlative} {en_place}"
    clause = be(BE_SER, who, tense, *tail)
    return say(*sides(replace(clause, negated=roll < 7 and dice.chance(0.15))))


NOT_COMPARED = (
    "ancient secret false perfect excellent terrible wonderful incredible absurd impossible "
    "necessary round square red white black blue green yellow gray brown purple delicious "
    "ridiculous wild small"
).split()


def evaluation(dice: Dice) -> Pair:
    """Es importante que Ana compre pan. -- It is important for Ana to buy bread."""
    es_word, en_word = dice.pick((
        ("importante", "important"), ("necesario", "necessary"), ("difícil", "difficult"),
        ("fácil", "easy"), ("imposible", "impossible"), ("peligroso", "dangerous"),
        ("útil", "useful"), ("mejor", "better"),
    ))  # fmt: skip
    past = dice.chance(0.3)
    verb_ = dice.common([v for v in TRANSITIVE if not v.stative])
    start = ("era" if past else "es"), ("was" if past else "is")
    if dice.chance(0.45) or verb_.reflexive:
        verb_ = verb_ if not verb_.reflexive else TRANSITIVE[0]
        deed = make_clause(dice, verb_, PRONOUNS[0], "present", bare=True, clitic_share=0.1)
        es_deed = deed.verb.es.infinitive + deed.clitic.replace(" ", "")
        en_deed = ["to", deed.verb.en.base, *deed.en_tail]
        return say(
            [start[0], es_word, es_deed, *deed.es_tail], ["it", start[1], en_word, *en_deed]
        )
    who = subject(dice, "p", "subjunctive", spoken=True)
    who = who._replace(es=who.es or "tú")
    if en_word in ("easy", "difficult"):  # "es fácil que" means that it is likely
        es_word, en_word = "necesario", "necessary"
    inner = make_clause(dice, verb_, who, "past_subjunctive" if past else "subjunctive", bare=True)
    en_who = whom(who) if who.pronoun else who.en
    if not who.pronoun and who.person == 3:
        en_who = who.en.removesuffix("I") + "me"
    en_deed = ["to", inner.verb.en.base, *inner.en_tail]
    return say(
        [start[0], es_word, "que", *inner.spanish()],
        ["it", start[1], en_word, "for", en_who, *en_deed],
    )
