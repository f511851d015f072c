"""Sentences with a dative experiencer in Spanish: gustar, doler."""

from __future__ import annotations

from dataclasses import replace

from experiments.demo_grammar import english, spanish
from experiments.demo_grammar.clauses import DATIVE, Clause, make_clause, subject
from experiments.demo_grammar.dice import Dice
from experiments.demo_grammar.phrases import POSSESSIVES_EN, Phrase, noun_phrase
from experiments.demo_grammar.sentences import Pair, say
from experiments.demo_grammar.verbs import TRANSITIVE, verb
from experiments.demo_grammar.words import CITIES, NOUNS, adjectives_for

LIKING = (
    (verb("gustar", "like =s"), 5.0), (verb("encantar", "love =s"), 2.0),
    (verb("interesar", "be_interested_in =s"), 1.0), (verb("aburrir", "be_bored_by =s"), 0.4),
    (verb("fascinar", "be_fascinated_by =s"), 0.4), (verb("molestar", "be_bothered_by =s"), 0.5),
)  # fmt: skip
LIKED = "food drink fruit animal subject media city readable object clothes".split()


def experiencer(dice: Dice, asked: bool = False) -> tuple[Phrase, str]:
    """Who likes: (phrase, "a Ana" or "" for a bare me, te, nos)."""
    who = subject(dice, "p", spoken=True, asked=asked)
    if who.pronoun and who.person not in (2, 5):
        tonic = {0: "a mí", 1: "a ti", 3: "a nosotros", 4: "a vosotros"}[who.person]
        return who, tonic if dice.chance(0.2) else ""
    if who.person == 3:
        return who, f"a {who.es.replace(' yo', ' mí')}".replace(" y mí", " y a mí")
    return who, f"a {who.es}"


def liking(dice: Dice) -> Pair:
    """A Ana le gustan los gatos negros. -- Ana likes black cats."""
    asked = dice.chance(0.15)
    who, said = experiencer(dice, asked)
    verb_ = dice.weighted(LIKING)
    conditional = verb_.es.infinitive == "gustar" and dice.chance(0.15)
    if conditional or (verb_.es.infinitive in ("gustar", "encantar") and dice.chance(0.3)):
        deed = make_clause(
            dice, dice.common(TRANSITIVE), who, "present", bare=True, clitic_share=0
        )
        if deed.verb.stative or deed.verb.reflexive:
            return liking(dice)
        liked, person = " ".join((deed.verb.es.infinitive, *deed.es_tail)), 2
        en = " ".join((f"to {deed.verb.en.base}", *deed.en_tail))
    else:
        liked, en, person = _liked_thing(dice, who)
    tense = "conditional" if conditional else "present" if dice.chance(0.75) else "imperfect"
    negated = verb_.es.infinitive != "encantar" and dice.chance(0.2)
    form = verb_.es.tenses[tense][person]
    es = [said, "no" if negated else "", DATIVE[who.person], form, liked]
    clause = Clause(who, verb_, tense, negated, en_tail=(verb_.en.with_object(en),))
    if asked:
        return say(es, clause.english_question(), "?")
    return say(es, clause.english())


def _liked_thing(dice: Dice, who: Phrase) -> tuple[str, str, int]:
    kind = dice.pick(LIKED)
    if kind == "city":
        es, en = dice.common(CITIES)
        return es, en, 2
    noun = dice.common(NOUNS[kind])
    if dice.chance(0.3) and kind not in ("subject", "sport"):
        thing = noun_phrase(dice, noun, who, definite=True)
        # "los gatos" after gustar are cats in general; specific cats are phrased differently.
        if not thing.es.startswith(("los ", "las ", "el ", "la ")):
            return thing.es, thing.en, thing.person
    several = not noun.mass
    es, en = noun.forms(several)
    if dice.chance(0.3) and (options := adjectives_for(kind, "s")):
        chosen = dice.common(options)
        es, en = f"{es} {spanish.agree(chosen.es, noun.gender, several)}", f"{chosen.en} {en}"
    return f"{noun.the(several)} {es}", en, 5 if several else 2


def pain(dice: Dice) -> Pair:
    """A Ana le duele la cabeza. -- Ana's head hurts."""
    who, said = experiencer(dice)
    if who.person > 2:
        return pain(dice)
    part = dice.common(NOUNS["body"])
    several = dice.chance(0.4) and part.en not in ("head", "neck", "throat", "stomach", "back")
    tense = "present" if dice.chance(0.7) else "imperfect"
    person = 5 if several else 2
    noun_es, noun_en = part.forms(several)
    owner = POSSESSIVES_EN[who.en_person] if who.pronoun else english.possessive(who.en)
    if who.pronoun and who.en_person == 2:
        owner = "her" if who.gender == "f" else "his"
    hurt = Clause(
        Phrase("", f"{owner} {noun_en}", person, en_person=person),
        verb("doler", "hurt hurt hurt =s"), tense, dice.chance(0.1),
        clitic=DATIVE[who.person], es_tail=(part.the(several), noun_es),
    )  # fmt: skip
    if dice.chance(0.3):
        hurt = replace(hurt, es_tail=("mucho", *hurt.es_tail), en_tail=("a lot",))
    return say([said, *hurt.spanish()], hurt.english())
