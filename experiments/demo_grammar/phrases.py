"""Noun phrases and adverbials in both languages at once. No verbs, no whole sentences."""

from __future__ import annotations

from typing import NamedTuple

from experiments.demo_grammar import english, spanish
from experiments.demo_grammar.dice import Dice
from experiments.demo_grammar.words import (
    CITIES,
    COUNTRIES,
    FEMALE_NAMES,
    KIND_CODES,
    MALE_NAMES,
    NOUNS,
    Noun,
    adjectives_for,
)


class Phrase(NamedTuple):
    """person: 0..5 for Spanish agreement; en_person differs only for usted and ustedes."""

    es: str
    en: str
    person: int = 2
    gender: str = "m"
    en_person: int = 2
    human: bool = False
    pronoun: bool = False


# Spanish masculine and feminine singular, masculine and feminine plural; English singular, plural;
# how often with a singular, with a plural noun.
DETERMINERS: tuple[tuple[str, str, float, float], ...] = (
    ("el la los las", "the the", 40, 34),
    ("un una unos unas", "a/an some", 22, 8),
    ("este esta estos estas", "this these", 6, 5),
    ("ese esa esos esas", "that those", 4, 4),
    ("aquel aquella aquellos aquellas", "that those", 2, 2),
    ("otro otra otros otras", "another other", 2, 1.5),
    ("cada cada - -", "each -", 1.5, 0),
    ("algún alguna algunos algunas", "some some", 0, 5),
    ("- - muchos muchas", "- many", 0, 6),
    ("- - pocos pocas", "- few", 0, 2),
    ("- - varios varias", "- several", 0, 4),
    ("- - demasiados demasiadas", "- too_many", 0, 1.5),
    ("todo toda todos_los todas_las", "all all_the", 0, 4),
)
MASS_DETERMINERS = (
    ("el la", "the", 40.0),
    ("este esta", "this", 6.0),
    ("mucho mucha", "a lot of", 8.0),
    ("poco poca", "little", 3.0),
    ("demasiado demasiada", "too much", 3.0),
    ("un_poco_de un_poco_de", "a little", 5.0),
    ("bastante bastante", "enough", 3.0),
)
POSSESSIVES_ES = ("mi", "tu", "su", "nuestro", "vuestro", "su")
POSSESSIVES_EN = ("my", "your", "his", "our", "your", "their")
# Before the noun; the last field: only after "the" or a possessive.
BEFORE_NOUN = (
    ("buen buena buenos buenas", "good", "pi", False),
    ("gran gran grandes grandes", "great", "pil", False),
    ("mal mala malos malas", "bad", "p", False),
    ("nuevo nueva nuevos nuevas", "new", "pov", False),
    ("primer primera primeros primeras", "first", "oivl", True),
    ("segundo segunda segundos segundas", "second", "iovl", True),
    ("tercer tercera terceros terceras", "third", "iol", True),
    ("último última últimos últimas", "last", "iov", True),
    ("único única únicos únicas", "only", "iovp", True),
    ("mejor mejor mejores mejores", "best", "piov", True),
    ("peor peor peores peores", "worst", "pi", True),
    ("antiguo antigua antiguos antiguas", "former", "p", True),
    ("propio propia propios propias", "own", "ov", True),
)
ORDINALS = ("first", "second", "third")


def _form(forms: str, gender: str, several: bool) -> str:
    return forms.split()[(gender == "f") + 2 * several].replace("_", " ")


def possessive(owner: Phrase, gender: str, several: bool) -> tuple[str, str]:
    """(su, her) for this owner and this thing owned."""
    es = POSSESSIVES_ES[owner.person]
    if gender == "f" and es.endswith("o"):
        es = es[:-1] + "a"
    en = POSSESSIVES_EN[owner.en_person]
    if en == "his":
        en = "its" if not owner.human else "her" if owner.gender == "f" else "his"
    return es + "s" * several, en


PRONOUNS = (
    Phrase("yo", "I", 0, "m", 0, True, True),
    Phrase("tú", "you", 1, "m", 1, True, True),
    Phrase("él", "he", 2, "m", 2, True, True),
    Phrase("ella", "she", 2, "f", 2, True, True),
    Phrase("nosotros", "we", 3, "m", 3, True, True),
    Phrase("vosotros", "you", 4, "m", 4, True, True),
    Phrase("ellos", "they", 5, "m", 5, True, True),
    Phrase("ellas", "they", 5, "f", 5, True, True),
    Phrase("usted", "you", 2, "m", 1, True, True),
    Phrase("ustedes", "you", 5, "m", 4, True, True),
)
PRONOUN_WEIGHTS = tuple(zip(PRONOUNS, (10, 6, 4, 4, 5, 1.5, 2, 1.5, 2, 1), strict=True))
OBJECT_EN = ("me", "you", "him", "us", "you", "them")


def object_pronoun(person: int, gender: str, human: bool) -> str:
    if person == 2 and not human:
        return "it"
    return "her" if person == 2 and gender == "f" else OBJECT_EN[person]


def whom(pronoun: Phrase) -> str:
    """The English object pronoun: me, her, them."""
    return object_pronoun(pronoun.en_person, pronoun.gender, human=True)


def subject_pronoun(phrase: Phrase) -> str:
    """The English pronoun that refers back to this phrase: she, it, they."""
    if phrase.en_person == 2:
        return ("she" if phrase.gender == "f" else "he") if phrase.human else "it"
    return ("I", "you", "", "we", "you", "they")[phrase.en_person]


def name(dice: Dice, gender: str = "") -> Phrase:
    if gender == "m" or (not gender and dice.chance(0.5)):
        word = dice.common(MALE_NAMES)
        return Phrase(word, word, human=True)
    word = dice.common(FEMALE_NAMES)
    return Phrase(word, word, gender="f", human=True)


def names(dice: Dice) -> Phrase:
    """Two people: Ana y Luis, Ana y yo."""
    first, second = name(dice), name(dice)
    if dice.chance(0.3):
        return Phrase(f"{first.es} y yo", f"{first.en} and I", 3, "m", 3, True)
    gender = "f" if first.gender == second.gender == "f" else "m"
    en = f"{first.en} and {second.en}"
    return Phrase(f"{first.es} y {second.es}", en, 5, gender, 5, True)


def noun_phrase(
    dice: Dice,
    noun: Noun,
    owner: Phrase | None = None,
    several: bool | None = None,
    definite: bool = False,
    plain: bool = False,
) -> Phrase:
    """`owner`: whose "su" it may be. definite: only el, este, mi. plain: no adjective."""
    if several is None:
        several = noun.has_plural and dice.chance(0.28)
    before, en_before, adjective, en_adjective = "", "", "", ""
    codes = KIND_CODES.get(noun.kind, "")
    if not plain and noun.kind != "family":
        roll = dice.below(100)
        if roll < 26 and (
            options := adjectives_for(
                noun.kind, "s" if noun.human or noun.kind == "animal" else "se"
            )
        ):
            chosen = dice.common(options)
            adjective, en_adjective = spanish.agree(chosen.es, noun.gender, several), chosen.en
        elif roll < 33 and not noun.mass:
            fitting = [row for row in BEFORE_NOUN if any(code in row[2] for code in codes)]
            fitting = [row for row in fitting if not (several and row[1] in ORDINALS)]
            if fitting:
                forms, en_before, _, definite_only = dice.pick(fitting)
                before = _form(forms, noun.gender, several)
                definite = definite or definite_only
    es_noun, en_noun = noun.forms(several)
    es_det, en_det = _determiner(dice, noun, owner, several, definite, ranked=bool(before))
    if en_before == "own" and es_det not in ("mi", "tu", "su", "mis", "tus", "sus"):
        before, en_before = "", ""
    if noun.takes_el and not before and es_det in ("la", "una"):
        es_det = "el" if es_det == "la" else "un"
    if es_det in ("un", "una") and adjective and dice.chance(0.2):
        if en_adjective not in ("perfect", "excellent", "terrible", "wonderful", "delicious"):
            adjective, en_adjective = "muy " + adjective, "very " + en_adjective
    es = [es_det, before, es_noun, adjective]
    en = [en_det, en_before, en_adjective, en_noun]
    if en_det == "the" and not noun.mass and codes and dice.chance(0.09):
        holder = name(dice) if dice.chance(0.6) else noun_phrase(
            dice, dice.common(NOUNS["people"]), several=False, definite=True, plain=True
        )  # fmt: skip
        if noun.kind != "people":
            es += ["de", holder.es]
            en[0] = english.possessive(holder.en)
    person = 5 if several else 2
    text_es, text_en = (" ".join(part for part in side if part) for side in (es, en))
    return Phrase(text_es, text_en, person, noun.gender, person, noun.human)


def _determiner(
    dice: Dice, noun: Noun, owner: Phrase | None, several: bool, definite: bool, ranked: bool
) -> tuple[str, str]:
    otherwise = 0.08 if noun.human else 0.16
    if dice.chance({"family": 0.9, "place": 0.0}.get(noun.kind, otherwise)):
        if owner is None or dice.chance(0.35):
            owner = dice.pick((PRONOUNS[0], PRONOUNS[0], PRONOUNS[1], PRONOUNS[4], PRONOUNS[4]))
        if noun.es in ("marido", "esposa", "novio", "novia") and owner.person > 2:
            owner = PRONOUNS[0]
        return possessive(owner, noun.gender, several)
    if noun.kind == "family":
        return possessive(PRONOUNS[0], noun.gender, several)
    if noun.mass:
        rows = [(row, row[2]) for row in MASS_DETERMINERS[: 2 if definite else None]]
        forms, en, _ = dice.weighted(rows)
        return _form(forms, noun.gender, False), en
    if several and not definite and dice.chance(0.2):
        value = 2 + dice.below(11) if noun.human or dice.chance(0.6) else 13 + dice.below(87)
        if not noun.human and dice.chance(0.1):
            value = 100 * (1 + dice.below(9))
        return spanish.number(value, noun.gender), english.number(value)
    choices = [(row, row[3] if several else row[2]) for row in DETERMINERS]
    if definite:
        choices = choices[:1] if ranked else [choices[0], choices[2], choices[3], choices[4]]
    forms, en, _, _ = dice.weighted(choices)
    return _form(forms, noun.gender, several), en.split()[several].replace("_", " ")


IN_ENGLISH = {
    word: preposition
    for preposition, words in {
        "at": "escuela oficina estación aeropuerto universidad playa puerto cine zoológico",
        "on": "granja isla puente balcón esquina mesa silla cama sofá banco suelo escritorio "
        "estante alfombra pared montaña techo",
    }.items()
    for word in words.split()
}
AROUND = (
    ("cerca de", "near"), ("detrás de", "behind"), ("delante de", "in front of"),
    ("al lado de", "next to"), ("lejos de", "far from"), ("alrededor de", "around"),
    ("enfrente de", "across from"),
)  # fmt: skip


def at_place(dice: Dice, owner: Phrase | None = None) -> tuple[str, str]:
    """en el parque, in the park; detrás de la escuela, behind the school; en Roma, in Rome."""
    if dice.chance(0.15):
        es, en = dice.common(CITIES if dice.chance(0.7) else COUNTRIES)
        return f"en {es}", f"in {en}"
    noun = dice.common(NOUNS["place"])
    place = noun_phrase(dice, noun, owner, several=False, definite=True, plain=dice.chance(0.7))
    if dice.chance(0.2):
        es, en = dice.pick(AROUND)
        return f"{es} {place.es}", f"{en} {place.en}"
    return f"en {place.es}", f"{IN_ENGLISH.get(noun.es, 'in')} {place.en}"


CONTAINERS = (
    "mesa silla cama sofá suelo escritorio estante armario nevera cajón caja bolsa maleta mochila"
).split()
THINGS = {noun.es: noun for kind in ("object", "furniture") for noun in NOUNS[kind]}


def on_thing(dice: Dice) -> tuple[str, str]:
    """en la mesa, on the table; debajo de la cama, under the bed."""
    noun = THINGS[dice.common(CONTAINERS)]
    thing = noun_phrase(dice, noun, several=False, definite=True, plain=dice.chance(0.8))
    inside = IN_ENGLISH.get(noun.es, "in")
    if inside == "on" and dice.chance(0.3):
        return f"debajo de {thing.es}", f"under {thing.en}"
    if inside == "in" and dice.chance(0.2):
        return f"dentro de {thing.es}", f"inside {thing.en}"
    return f"en {thing.es}", f"{inside} {thing.en}"
