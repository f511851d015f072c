"""Single-clause sentences of the demo corpus: each function makes one (Spanish, English) pair."""

from __future__ import annotations

from dataclasses import replace

from experiments.demo_grammar import english, spanish
from experiments.demo_grammar.clauses import (
    DATIVE,
    Clause,
    make_clause,
    object_phrase,
    plain_clause,
    subject,
    with_object,
    with_pronoun,
)
from experiments.demo_grammar.dice import Dice
from experiments.demo_grammar.phrases import (
    PRONOUN_WEIGHTS,
    Phrase,
    name,
    noun_phrase,
    object_pronoun,
    on_thing,
)
from experiments.demo_grammar.times import clock, duration, when, year
from experiments.demo_grammar.verbs import (
    BE_SER,
    DIRECT,
    HELPER_WEIGHTS,
    INTRANSITIVE,
    TRANSITIVE,
    english_tense,
    verb,
)
from experiments.demo_grammar.words import CITIES, NOUNS

Pair = tuple[str, str]


def say(es: list[str], en: list[str], end: str = ".") -> Pair:
    return spanish.finish(es, end), english.finish(en, end)


def sides(clause: Clause) -> tuple[list[str], list[str]]:
    return clause.spanish(), clause.english()


def more(clause: Clause, es: str, en: str) -> Clause:
    """The clause with these words at its end."""
    return replace(clause, es_tail=(*clause.es_tail, es), en_tail=(*clause.en_tail, en))


def statement(dice: Dice) -> Pair:
    """Ayer Ana no compró el libro. -- Yesterday Ana didn't buy the book."""
    clause = plain_clause(dice)
    es, en = clause.time_in_front
    comma = "," if " " in es else ""
    return say([es + comma, *clause.spanish()], [en + comma, *clause.english()])


def helper_clause(dice: Dice, asked: bool = False) -> Clause:
    """quiere comprar un libro, wants to buy a book."""
    helper = dice.weighted(HELPER_WEIGHTS)
    tense = dice.pick([t for t in helper.tenses if not (asked and t == "imperfect")])
    main = dice.common(INTRANSITIVE if dice.chance(0.3) else TRANSITIVE)
    while main.stative or (helper.en_form == "ing" and main.reflexive):
        main = dice.common(TRANSITIVE)
    who = subject(dice, "p", tense, asked=asked)
    clause = make_clause(dice, main, who, "present", bare=True)
    en_tense = "past" if tense == "imperfect" else english_tense(main, tense)
    negated = dice.chance(0.15)
    clause = replace(clause, helper=helper, tense=tense, en_tense=en_tense, negated=negated)
    if tense == "preterite" and who.person == 3 and helper.verb.same_for_us:
        return more(clause, *when(dice, "preterite"))
    if helper.en_form == "to" and tense == "present" and dice.chance(0.35):
        return more(clause, *when(dice, "future"))
    return clause


def helped(dice: Dice) -> Pair:
    clause = helper_clause(dice)
    return say(*sides(clause))


def question(dice: Dice) -> Pair:
    """¿Compró Ana el libro? -- Did Ana buy the book?"""
    clause = helper_clause(dice, True) if dice.chance(0.25) else plain_clause(dice, asked=True)
    clause = more(clause, *clause.time_in_front)  # at the end of a question
    return say(clause.spanish_question(), clause.english_question(), "?")


ADVERBIAL = (("dónde", "where"), ("cuándo", "when"), ("por qué", "why"), ("cómo", "how"))


def open_question(dice: Dice) -> Pair:
    """¿Qué libro compró Ana? -- Which book did Ana buy?"""
    roll = dice.below(100)
    if roll < 30:
        clause = plain_clause(dice, asked=True, bare=True)
        es, en = dice.pick(ADVERBIAL[2:3] if clause.verb.stative else ADVERBIAL)
        return say(clause.spanish_question(es), clause.english_question(en), "?")
    if roll < 45:
        clause = plain_clause(dice, asked=True, bare=True)
        who = Phrase("quién", "who", human=True)
        clause = make_clause(dice, clause.verb, who, clause.tense, bare=True, clitic_share=0.05)
        if clause.tense in ("preterite", "future") and dice.chance(0.5):
            clause = more(clause, *when(dice, clause.tense))
        return say(clause.spanish(), clause.english(), "?")
    verb_ = dice.common(TRANSITIVE)
    who = subject(dice, "p", asked=True)
    tense = (
        "present" if verb_.stative else dice.pick(("preterite", "preterite", "future", "perfect"))
    )
    if who.person == 3 and tense == "preterite":
        tense = "perfect"
    clause = make_clause(dice, verb_, who, tense, bare=True, clitic_share=0)
    if clause.object is None or clause.noun is None:
        return open_question(dice)
    time = when(dice, tense) if dice.chance(0.3) and tense != "present" else ("", "")
    bare = replace(clause, es_tail=(time[0],), en_tail=(verb_.en.tail, time[1]))
    link, noun = verb_.preposition, clause.noun
    if noun.human and roll < 80:
        asked = f"{link or 'a'} quién", "who"
    elif noun.human or noun.mass or roll < 60:
        asked = f"{link} qué".strip(), "what"
        if noun.human or link == "por":  # "por qué" is why
            return open_question(dice)
    elif roll < 80 and noun.has_plural and not link:
        several = spanish.plural(noun.es)
        asked = (
            f"cuánt{'a' if noun.gender == 'f' else 'o'}s {several}",
            f"how many {noun.en_plural}",
        )
    else:
        asked = f"{link} qué {noun.es}".strip(), f"which {noun.en}"
    return say(bare.spanish_question(asked[0]), bare.english_question(asked[1]), "?")


GIVING = (
    (verb("dar", "give gave given"), ("object", "clothes", "readable", "fruit", "drink")),
    (verb("mostrar", "show showed shown"), ("object", "readable", "clothes", "vehicle")),
    (verb("enviar", "send sent sent"), ("readable", "object")),
    (verb("prestar", "lend lent lent"), ("object", "clothes", "vehicle", "readable")),
    (verb("contar", "tell told told"), ("told",)),
    (verb("vender", "sell sold sold"), ("vehicle", "object", "furniture")),
    (verb("ofrecer", "offer"), ("fruit", "drink", "food", "object")),
    (verb("traer", "bring brought brought"), ("drink", "food", "object")),
    (verb("escribir", "write wrote written"), ("writable",)),
    (verb("leer", "read read read"), ("readable",)),
    (verb("explicar", "explain =t"), ("idea",)),
    (verb("devolver", "return =t"), ("object", "readable")),
)  # fmt: skip
ALWAYS_TO = ("explain", "return")


def giving(dice: Dice) -> Pair:
    """Ana le dio el libro a Luis. -- Ana gave Luis the book. Me lo dio -- gave it to me."""
    verb_, kinds = dice.common(GIVING)
    tense = dice.weighted(
        (("preterite", 45.0), ("future", 20.0), ("perfect", 15.0), ("present", 10.0))
    )
    who = subject(dice, "p", tense)
    noun = dice.common(NOUNS[dice.pick(kinds)])
    thing = noun_phrase(dice, noun, who)
    near = {who.person, who.en_person}
    to_pronoun = dice.chance(0.45)
    if to_pronoun:
        receiver = dice.weighted(PRONOUN_WEIGHTS[:4] + PRONOUN_WEIGHTS[6:8])
        if receiver.person in near or near & {3, 4}:
            return giving(dice)
        en_to = object_pronoun(receiver.person, receiver.gender, human=True)
        es_to = f"a {receiver.es}" if receiver.person in (2, 5) else ""
    else:
        people = NOUNS["family" if dice.chance(0.4) else "people"]
        receiver = name(dice) if dice.chance(0.5) else noun_phrase(
            dice, dice.common(people), who, definite=True, plain=True
        )  # fmt: skip
        es_to, en_to = f"a {receiver.es}", receiver.en
    clitic, head = DATIVE[receiver.person], verb_.en.tail
    if dice.chance(0.3):
        accusative = ("las" if thing.person == 5 else "la") if thing.gender == "f" else (
            "los" if thing.person == 5 else "lo"
        )  # fmt: skip
        clitic = f"{'se' if clitic in ('le', 'les') else clitic} {accusative}"
        it = "them" if thing.person == 5 else "it"
        es_tail, en_tail = [es_to], f"{it} to {en_to}"
    elif verb_.en.base in ALWAYS_TO:
        es_tail, en_tail = [thing.es, es_to], f"{thing.en} to {en_to}"
    else:
        es_tail, en_tail = [thing.es, es_to], f"{head} {en_to} {thing.en}".strip()
    negated = dice.chance(0.12)
    clause = Clause(who, verb_, tense, negated, clitic, es_tail=tuple(es_tail), en_tail=(en_tail,))
    if dice.chance(0.3) or (tense == "preterite" and who.person == 3):
        clause = more(clause, *when(dice, tense))
    return say(*sides(clause))


def command(dice: Dice) -> Pair:
    """Abre la puerta, por favor. -- Open the door, please. No abras la puerta. -- Don't open …"""
    verb_ = dice.common(DIRECT if dice.chance(0.8) else INTRANSITIVE)
    if verb_.stative or not verb_.takes_pronoun:
        return command(dice)
    you = dice.weighted((("tú", 60.0), ("usted", 25.0), ("ustedes", 10.0)))
    person = {"tú": 1, "usted": 2, "ustedes": 5}[you]
    who = Phrase("", "", person, en_person=1, human=True, pronoun=True)
    clause = make_clause(dice, verb_, who, "subjunctive", bare=True, clitic_share=0)
    negated = dice.chance(0.35)
    if verb_.reflexive and not negated:
        return command(dice)
    form = (
        verb_.es.imperative
        if you == "tú" and not negated
        else verb_.es.tenses["subjunctive"][person]
    )
    reflexive = "te" if you == "tú" else "se"
    es = ["no" if negated else "", reflexive if verb_.reflexive else "", form, *clause.es_tail]
    en = ["don't" if negated else "", verb_.en.base, *clause.en_tail]
    end = dice.pick((".", "!", "."))
    roll = dice.below(10)
    if roll < 3:
        es, en = [*es, ", por favor"], [*en, ", please"]
    elif roll < 5 and you != "ustedes":
        person_called = name(dice)
        es, en = [f"{person_called.es},", *es], [f"{person_called.en},", *en]
    elif roll < 7:
        time = dice.pick((("ahora", "now"), ("mañana", "tomorrow"), ("esta noche", "tonight"),
                          ("antes de la cena", "before dinner")))  # fmt: skip
        es, en = [*es, time[0]], [*en, time[1]]
    return say(es, en, end)


def doing_it(dice: Dice) -> Pair:
    """Sí, ya lo he leído. -- Yes, I have already read it."""
    verb_ = dice.common(DIRECT)
    if verb_.stative or not verb_.takes_pronoun:
        return doing_it(dice)
    tense = dice.pick(("preterite", "perfect", "future", "preterite"))
    who = subject(dice, "p", tense)
    clause = with_pronoun(dice, make_clause(dice, verb_, who, tense, bare=True, clitic_share=0))
    negated = dice.chance(0.5)
    clause = replace(clause, negated=negated)
    if tense != "perfect":
        clause = more(clause, *when(dice, tense))
    word = ("no,", "no,") if negated else ("sí,", "yes,")
    return say([word[0], *clause.spanish()], [word[1], *clause.english()])


def object_in_place(dice: Dice) -> Pair:
    """Ana puso las llaves en la mesa. -- Ana put the keys on the table."""
    put = dice.pick((
        verb("poner", "put put put"), verb("dejar", "leave left left"),
        verb("encontrar", "find found found"), verb("esconder", "hide hid hidden"),
        verb("guardar", "keep kept kept"),
    ))  # fmt: skip
    tense = dice.weighted((("preterite", 50.0), ("future", 20.0), ("perfect", 20.0)))
    who = subject(dice, "p", tense)
    kind = dice.pick(("object", "readable", "clothes", "fruit"))
    thing = noun_phrase(dice, dice.common(NOUNS[kind]), who)
    clause = Clause(who, put, tense, dice.chance(0.1))
    clause = more(with_object(clause, thing), *on_thing(dice))
    if tense == "preterite" and (who.person == 3 or dice.chance(0.3)):
        clause = more(clause, *when(dice, tense))
    return say(*sides(clause))


def routine_of_things(dice: Dice) -> Pair:
    """El tren sale a las ocho. -- The train leaves at eight o'clock."""
    if dice.chance(0.5):
        noun = dice.common(NOUNS["boardable"])
        doing = dice.pick((verb("salir", "leave left left"), verb("llegar", "arrive")))
    else:
        noun = dice.common(NOUNS["stage"] + NOUNS["attended"])
        doing = dice.pick((verb("empezar", "start"), verb("terminar", "end")))
    tense = dice.weighted((("present", 35.0), ("preterite", 30.0), ("future", 25.0)))
    thing = noun_phrase(dice, noun, definite=True)
    clause = Clause(thing, doing, tense, dice.chance(0.1))
    es, en = clock(dice)
    clause = more(clause, f"a {es}", f"at {en}")
    if dice.chance(0.35) and tense != "present":
        es, en = dice.pick((("el lunes", "on Monday"), ("el viernes", "on Friday"),
                            ("el domingo", "on Sunday")))  # fmt: skip
        clause = more(clause, es, en)
    return say(*sides(clause))


HOMES = (
    *CITIES[:12], ("este pueblo", "this town"), ("esta casa", "this house"), *CITIES[12:],
    ("la misma ciudad", "the same city"), ("aquella isla", "that island"),
)  # fmt: skip


def since(dice: Dice) -> Pair:
    """Vivimos aquí desde hace dos años. -- We have lived here for two years."""
    doing = dice.pick((
        (verb("vivir", "live"), "place"), (verb("trabajar", "work"), "place"),
        (verb("estudiar", "study"), "subject"), (verb("tocar", "play"), "instrument"),
        (verb("conocer", "know knew known"), "people"), (verb("estar", "be"), "place"),
    ))  # fmt: skip
    verb_, kind = doing
    who = subject(dice, "p")
    clause = Clause(who, verb_, "present", en_tense="perfect")
    if kind == "place":
        es, en = dice.common(HOMES)
        clause = more(clause, f"en {es}", f"in {en}")
    else:
        noun = dice.common(NOUNS[kind])
        thing = object_phrase(dice, replace(verb_, classes=(kind,)), noun, who)
        clause = with_object(clause, thing)
    if dice.chance(0.6):
        es, en = duration(dice)
        return say(*sides(more(clause, f"desde hace {es}", f"for {en}")))
    start = year(dice, 1970)
    return say(*sides(more(clause, f"desde {start}", f"since {start}")))


PASSIVE = (
    (verb("construir", "build built built"), "buildable"),
    (verb("escribir", "write wrote written"), "writable"), (verb("pintar", "paint"), "paintable"),
    (verb("robar", "steal stole stolen"), "object"), (verb("descubrir", "discover"), "place"),
    (verb("publicar", "publish"), "writable"), (verb("traducir", "translate"), "readable"),
    (verb("firmar", "sign"), "document"), (verb("reparar", "repair"), "repairable"),
    (verb("vender", "sell sold sold"), "vehicle"),
    (verb("encontrar", "find found found"), "object"),
)  # fmt: skip


def passive(dice: Dice) -> Pair:
    """El puente fue construido por un ingeniero. -- The bridge was built by an engineer."""
    verb_, kind = dice.pick(PASSIVE)
    thing = noun_phrase(dice, dice.common(NOUNS[kind]), definite=True)
    participle = spanish.agree(verb_.es.participle, thing.gender, thing.person > 2)
    tense = "preterite" if dice.chance(0.8) else "future"
    clause = Clause(thing, BE_SER, tense, dice.chance(0.1))
    clause = more(clause, participle, verb_.en.participle)
    if dice.chance(0.7):
        agent = name(dice) if dice.chance(0.3) else noun_phrase(dice, dice.common(NOUNS["people"]))
        clause = more(clause, f"por {agent.es}", f"by {agent.en}")
    if dice.chance(0.5):
        clause = more(clause, *when(dice, tense))
    return say(*sides(clause))
