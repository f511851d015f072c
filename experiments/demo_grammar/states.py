"""Sentences of being and having in the demo corpus: copulas, existence, weather, quantities."""

from __future__ import annotations

from dataclasses import replace

from experiments.demo_grammar import english, spanish
from experiments.demo_grammar.clauses import Clause, subject
from experiments.demo_grammar.dice import Dice
from experiments.demo_grammar.phrases import Phrase, at_place, name, noun_phrase, on_thing
from experiments.demo_grammar.sentences import Pair, more, say, sides
from experiments.demo_grammar.times import MONTHS, SEASONS, WEEKDAYS, clock, when, year
from experiments.demo_grammar.verbs import BE_ESTAR, BE_SER, Verb, verb
from experiments.demo_grammar.words import (
    CITIES,
    COUNTRIES,
    NOUNS,
    WORDS,
    Adjective,
    adjectives_for,
    pairs,
)

COPULA_KINDS = (
    ("people", 30.0), ("family", 12.0), ("object", 14.0), ("place", 10.0), ("idea", 14.0),
    ("animal", 8.0), ("clothes", 8.0), ("food", 5.0), ("fruit", 6.0), ("vehicle", 6.0),
    ("media", 6.0), ("drink", 3.0), ("readable", 4.0), ("furniture", 4.0),
)  # fmt: skip


def copula_subject(dice: Dice, asked: bool = False) -> tuple[Phrase, str]:
    kind = dice.weighted(COPULA_KINDS)
    if kind == "people" and dice.chance(0.8):
        return subject(dice, "p", "imperfect", asked=asked), kind
    noun = dice.common(NOUNS[kind])
    return noun_phrase(dice, noun, definite=True, plain=dice.chance(0.7)), kind


DEGREES = pairs(WORDS["adjectives"]["degrees"])
NO_DEGREE: list[str] = WORDS["adjectives"]["absolute"]


def copula_clause(dice: Dice, asked: bool = False, tense: str = "") -> tuple[Clause, Adjective]:
    """Ana está cansada, Ana is tired; las casas eran blancas, the houses were white."""
    who, kind = copula_subject(dice, asked)
    adjective = dice.common(adjectives_for(kind, "se"))
    tense = tense or dice.weighted((("present", 60.0), ("imperfect", 25.0), ("future", 6.0)))
    if who.en_person == 0 and tense == "imperfect":
        who = who._replace(es="yo")
    clause = replace(be_adjective(who, tense, adjective), negated=dice.chance(0.12))
    graded = adjective.en not in NO_DEGREE and adjective.en[0].islower()
    if graded and not clause.negated and dice.chance(0.3):
        es, en = dice.pick(DEGREES)
        clause = replace(clause, es_tail=(es, *clause.es_tail), en_tail=(en, *clause.en_tail))
    return clause, adjective


def be(verb_: Verb, who: Phrase, tense: str, es: str, en: str) -> Clause:
    return Clause(who, verb_, tense, es_tail=(es,), en_tail=(en,))


def be_adjective(who: Phrase, tense: str, adjective: Adjective) -> Clause:
    """With ser or estar, as the adjective asks for."""
    es = spanish.agree(adjective.es, who.gender, who.person > 2)
    return be(BE_SER if adjective.copula == "s" else BE_ESTAR, who, tense, es, adjective.en)


def description(dice: Dice) -> Pair:
    clause, adjective = copula_clause(dice)
    es, en = clause.spanish(), clause.english()
    if adjective.copula == "e" and clause.tense == "present" and dice.chance(0.3):
        time = dice.pick((("ahora", "now"), ("hoy", "today"), ("esta mañana", "this morning")))
        es, en = [*es, time[0]], [*en, time[1]]
    elif adjective.copula == "e" and dice.chance(0.3):
        other = dice.pick([a for a in adjectives_for("people", "e") if a.en != adjective.en])
        if clause.subject.human and not clause.negated:
            es += ["y", spanish.agree(other.es, clause.subject.gender, clause.subject.person > 2)]
            en += ["and", other.en]
    return say(es, en)


def copula_question(dice: Dice) -> Pair:
    clause, adjective = copula_clause(dice, asked=True, tense="present")
    roll = dice.below(10)
    if roll < 4:
        asked = ("por qué", "why") if adjective.copula == "e" and roll < 2 else ("", "")
        return say(clause.spanish_question(asked[0]), clause.english_question(asked[1]), "?")
    thing = noun_phrase(dice, dice.common(NOUNS["object"]), definite=True)
    link = thing._replace(human=False)
    if roll < 6:
        where = be(BE_ESTAR, link, "present", "", "")
        return say(where.spanish_question("dónde"), where.english_question("where"), "?")
    if roll < 7:
        whose = be(BE_SER, link, "present", "", "")
        return say(whose.spanish_question("de quién"), whose.english_question("whose"), "?")
    who = subject(dice, "p", asked=True)
    if roll < 8:
        origin = be(BE_SER, who, "present", "", "from")
        return say(origin.spanish_question("de dónde"), origin.english_question("where"), "?")
    if roll < 9:
        age = Clause(who, verb("tener", "be =s"), "present")
        return say(age.spanish_question("cuántos años"), age.english_question("how old"), "?")
    price = Clause(link, verb("costar", "cost cost cost =s"), "present")
    return say(price.spanish_question("cuánto"), price.english_question("how much"), "?")


MATERIALS, FEELINGS = (pairs(WORDS["states"][kind]) for kind in ("materials", "feelings"))


def identity(dice: Dice) -> Pair:
    """Ana es médica. -- Ana is a doctor. Professions, origins, materials, places, names."""
    roll, who = dice.below(100), subject(dice, "p", "imperfect")
    tense = "present" if dice.chance(0.7) else "imperfect"
    several = who.person > 2
    if roll < 30:
        job = dice.common([n for n in NOUNS["people"] if n.gender == who.gender])
        es, en = job.forms(several)
        en = en if several else f"a/an {en}"
        if dice.chance(0.4):
            buen = "buen" if job.gender == "m" else "buena"
            quality = ("bueno", "good") if dice.chance(0.5) else ("gran", "great")
            if quality[1] == "good":
                es_q = spanish.agree("bueno", job.gender, True) if several else f"un {buen}"
            else:
                es_q = "grandes" if several else "un gran"
            if job.gender == "f" and not several:
                es_q = es_q.replace("un ", "una ")
            es, en = f"{es_q} {es}", en.replace("a/an ", f"a {quality[1]} ")
            en = f"{quality[1]} {en}" if several else en
        return say(*sides(replace(be(BE_SER, who, tense, es, en), negated=dice.chance(0.15))))
    if roll < 42:
        es, en = dice.common(CITIES if dice.chance(0.5) else COUNTRIES)
        return say(*sides(be(BE_SER, who, tense, f"de {es}", f"from {en}")))
    thing = noun_phrase(dice, dice.common(NOUNS["object"]), definite=True, plain=True)
    if roll < 55:
        es, en = dice.pick(MATERIALS)
        return say(*sides(be(BE_SER, thing, tense, f"de {es}", f"made of {en}")))
    if roll < 85:
        es, en = on_thing(dice) if roll < 70 else at_place(dice)
        holder = thing if roll < 70 else who
        clause = be(BE_ESTAR, holder, tense, es, en)
        return say(*sides(replace(clause, negated=dice.chance(0.1))))
    owned = noun_phrase(dice, dice.common(NOUNS["family"]), several=False)
    called = name(dice, owned.gender)
    clause = Clause(owned, verb("llamarse", "be =s"), tense)
    return say(*sides(replace(clause, es_tail=(called.es,), en_tail=(f"named {called.en}",))))


def existence(dice: Dice) -> Pair:
    """No hay leche en la nevera. -- There is no milk in the refrigerator."""
    kind = dice.pick(
        ("object", "food", "fruit", "animal", "people", "place", "furniture", "plant", "drink")
    )
    noun = dice.common(NOUNS[kind])
    if kind == "place":
        es_city, en_city = dice.common(CITIES)
        where = f"en {es_city}", f"in {en_city}"
    elif kind in ("object", "food", "fruit", "drink") and dice.chance(0.7):
        where = on_thing(dice)
    else:
        where = at_place(dice)
    forms = (
        ("hay", "is", "are"), ("había", "was", "were"), ("habrá", "will be", "will be"),
        ("hay", "is", "are"),
    )  # fmt: skip
    verb_es, one, many = dice.pick(forms)
    roll = dice.below(10)
    if roll < 2:
        several = not noun.mass
        es_noun, en_noun = noun.forms(several)
        en_verb = many if several else one
        return say(["no", verb_es, es_noun, where[0]], ["there", en_verb, "no", en_noun, where[1]])
    thing = noun_phrase(dice, noun)
    first = thing.es.split()[0]
    if first in ("el", "la", "los", "las", "mi", "tu", "mis", "tus", "cada", "todos", "todas"):
        return existence(dice)
    if first[:4] in ("nues", "este", "esta", "esto", "esos", "esas", "ese", "esa", "aque"):
        return existence(dice)
    en_verb = many if thing.person == 5 else one
    if roll < 4:
        first_word, _, rest = en_verb.partition(" ")
        return say(
            [verb_es, thing.es, where[0]], [first_word, "there", rest, thing.en, where[1]], "?"
        )
    return say([verb_es, thing.es, where[0]], ["there", en_verb, thing.en, where[1]])


COLORS = "red white black blue green yellow gray brown purple".split()


def exclamation(dice: Dice) -> Pair:
    """¡Qué casa tan bonita! -- What a beautiful house!"""
    kind = dice.weighted(COPULA_KINDS)
    noun = dice.common(NOUNS[kind])
    adjective = dice.common(adjectives_for(kind, "s") or adjectives_for(kind, "e"))
    if adjective.en in NO_DEGREE or adjective.en in COLORS or not adjective.en[0].islower():
        return exclamation(dice)
    several = noun.has_plural and dice.chance(0.3)
    es_noun, en_noun = noun.forms(several)
    es_adjective = spanish.agree(adjective.es, noun.gender, several)
    article = "" if several or noun.mass else "a/an"
    es, en = ["qué", es_noun, "tan", es_adjective], ["what", article, adjective.en, en_noun]
    if dice.chance(0.5) and not noun.mass:
        who = subject(dice, "p")
        have = verb("tener", "have had had =s")
        clause = Clause(who, have, "present")
        start, _ = clause.spanish_verb()
        es, en = [*es, start, who.es], [*en, *clause.english()]
    return say(es, en, "!")


WEATHER, PAST_WEATHER, FUTURE_WEATHER = (
    pairs(WORDS["weather"][kind]) for kind in ("now", "past", "future")
)


def time_and_weather(dice: Dice) -> Pair:
    roll = dice.below(100)
    if roll < 25:
        es, en = clock(dice)
        verb_es = "es" if es.startswith("la ") else "son"
        return say([verb_es, es], ["it is", en])
    if roll < 45:
        (day, en_day), (month, en_month) = dice.pick(WEEKDAYS), dice.pick(MONTHS)
        number = 1 + dice.below(28)
        end = (f"de {(y := year(dice))}", f", {y}") if dice.chance(0.5) else ("", "")
        return say(
            [f"hoy es {day} {number} de {month}", end[0]],
            [f"today is {en_day}, {en_month} {number}", end[1]],
        )
    es_city, en_city = dice.common(CITIES if dice.chance(0.6) else COUNTRIES)
    place = f"en {es_city}", f"in {en_city}"
    if roll < 65:
        (es, en), (season, en_season) = dice.pick(WEATHER), dice.pick(SEASONS)
        return say([f"en {season}", es, place[0]], [f"in the {en_season}", en, place[1]])
    options, tense = (PAST_WEATHER, "preterite") if roll < 82 else (FUTURE_WEATHER, "future")
    (es, en), time = dice.pick(options), when(dice, tense)
    return say([es, place[0], time[0]], [en, place[1], time[1]])


def quantity(dice: Dice) -> Pair:
    """La mesa mide 2,5 metros. -- The table measures 2.5 meters. Prices, weights, ages."""
    roll = dice.below(100)
    if roll < 30:
        who = subject(dice, "p", "imperfect")
        value = 2 + dice.below(90)
        tense = "present" if dice.chance(0.7) else "imperfect"
        age = Clause(who, verb("tener", "be =s"), tense)
        years = f"{spanish.number(value)} años", f"{english.number(value)} years old"
        return say(*sides(replace(age, es_tail=(years[0],), en_tail=(years[1],))))
    kind = dice.pick(("object", "clothes", "furniture", "vehicle"))
    thing = noun_phrase(dice, dice.common(NOUNS[kind]), definite=True)
    tense = "present" if dice.chance(0.65) else "imperfect"
    if roll < 65:
        value = dice.pick((5, 8, 12, 15, 20, 25, 30, 45, 60, 75, 90, 120, 250, 399, 500, 800))
        whole = value if dice.chance(0.7) else value * 11 + dice.below(900)
        money = dice.pick((("euros", "euros"), ("dólares", "dollars"), ("pesos", "pesos")))
        es_value = f"{whole:,}".replace(",", ".")
        cost = Clause(thing, verb("costar", "cost cost cost =s"), tense)
        return say(*sides(more(cost, f"{es_value} {money[0]}", f"{whole:,} {money[1]}")))
    number = f"{1 + dice.below(40)}.{1 + dice.below(9)}"
    if roll < 82:
        weight = Clause(thing, verb("pesar", "weigh =s"), tense)
        return say(*sides(more(weight, f"{number.replace('.', ',')} kilos", f"{number} kilos")))
    es_city, en_city = dice.common(CITIES if dice.chance(0.6) else COUNTRIES)
    people = 500 * (101 + 2 * dice.below(9000))
    place = Phrase(es_city, en_city)
    have = Clause(place, verb("tener", "have had had =s"), tense)
    es_people = f"{people:,}".replace(",", ".") + " habitantes"
    return say(*sides(more(have, es_people, f"{people:,} inhabitants")))


def feeling(dice: Dice) -> Pair:
    """Los niños tenían mucha hambre. -- The children were very hungry."""
    tense = dice.weighted((("present", 55.0), ("imperfect", 30.0), ("future", 10.0)))
    who = subject(dice, "p", tense)
    es, en = dice.pick(FEELINGS)
    if en not in ("right", "in a hurry") and dice.chance(0.4):
        feminine = es in ("hambre", "sed", "suerte")
        es, en = f"much{'a' if feminine else 'o'} {es}", f"very {en}"
    clause = Clause(who, verb("tener", "be =s"), tense)
    clause = replace(clause, negated=dice.chance(0.15), es_tail=(es,), en_tail=(en,))
    if tense == "present" and dice.chance(0.4):
        clause = more(clause, *dice.pick((("ahora", "now"), ("por la mañana", "in the morning"))))
    return say(*sides(clause))
