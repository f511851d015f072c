"""A subject, a verb and its complements, in both languages. No whole sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.demo_grammar.dice import Dice
from experiments.demo_grammar.english import negate, verb_group, with_support
from experiments.demo_grammar.phrases import (
    OBJECT_EN,
    PRONOUN_WEIGHTS,
    Phrase,
    at_place,
    name,
    names,
    noun_phrase,
    object_pronoun,
)
from experiments.demo_grammar.times import FREQUENCY, MANNER, when
from experiments.demo_grammar.verbs import (
    AMBIGUOUS,
    INTRANSITIVE,
    Helper,
    Verb,
    english_tense,
    pick_tense,
    pick_verb,
    spanish_forms,
)
from experiments.demo_grammar.words import CITIES, COUNTRIES, NOUNS, Noun

DATIVE = ("me", "te", "le", "nos", "os", "les")
REFLEXIVE = ("me", "te", "se", "nos", "os", "se")
ACCUSATIVE = ("me", "te", "", "nos", "os", "")


@dataclass(frozen=True)
class Clause:
    """es_tail, en_tail: everything after the verb. clitic: before it, Spanish only.
    mid: an adverb that stands before the verb in both languages, as siempre, always."""

    subject: Phrase
    verb: Verb
    tense: str
    negated: bool = False
    clitic: str = ""
    mid: tuple[str, str] = ("", "")
    es_tail: tuple[str, ...] = ()
    en_tail: tuple[str, ...] = ()
    helper: Helper | None = None
    object: Phrase | None = None
    noun: Noun | None = None
    time_in_front: tuple[str, str] = ("", "")  # a statement begins with it
    en_tense: str = ""  # "": as english_tense says

    def spanish_verb(self) -> tuple[str, str]:
        """(what comes before a subject that follows, the rest): ("quiere", "comprarlo")."""
        person = self.subject.person
        clitic = " ".join(
            part
            for part in (REFLEXIVE[person] if self.verb.reflexive else "", self.clitic)
            if part
        )
        before = " ".join(part for part in ("no" if self.negated else "", clitic) if part)
        start, rest = spanish_forms(self.verb.es, self.tense, person), ""
        if self.helper is not None:
            finite = self.helper.verb
            start = spanish_forms(finite.es, self.tense, person)
            if self.helper.es_link == "ndo":
                rest = self.verb.es.gerund
            else:
                rest = f"{self.helper.es_link} {self.verb.es.infinitive}".strip()
                if clitic and " " not in clitic:
                    before, rest = "no" if self.negated else "", rest + clitic
        elif self.tense == "going_to":
            start, rest = start.split(maxsplit=1)
        return f"{before} {start}".strip(), rest

    def spanish(self) -> list[str]:
        start, rest = self.spanish_verb()
        return [self.subject.es, self.mid[0], start, rest, *self.es_tail]

    def english_words(self, support: bool) -> tuple[str, list[str]]:
        """(auxiliary, the words after it)."""
        finite = self.verb.en if self.helper is None else self.helper.verb.en
        person, group = self.subject.en_person, with_support if support else verb_group
        tense = self.en_tense or english_tense(self.verb, self.tense)
        if self.helper is None:
            auxiliary, main = group(finite, tense, person)
            return auxiliary, [main, *self.en_tail]
        form = {
            "to": f"to {self.verb.en.base}", "base": self.verb.en.base, "ing": self.verb.en.gerund
        }[self.helper.en_form]  # fmt: skip
        if self.tense in self.helper.modal:
            return self.helper.modal[self.tense], [form, *self.en_tail]
        auxiliary, main = group(finite, tense, person)
        return auxiliary, [main, finite.tail, form, *self.en_tail]

    def english(self) -> list[str]:
        auxiliary, words = self.english_words(support=self.negated)
        if self.negated:
            auxiliary = negate(auxiliary)
        return [self.subject.en, auxiliary, self.mid[1], *words]

    def spanish_question(self, asked: str = "") -> list[str]:
        start, rest = self.spanish_verb()
        silent = self.subject.pronoun and self.subject.person not in (2, 5)
        subject = "" if silent else self.subject.es
        if subject.count(" ") > 1 and not asked:
            return [subject, self.mid[0], start, rest, *self.es_tail]
        return [asked, self.mid[0], start, subject, rest, *self.es_tail]

    def english_question(self, asked: str = "") -> list[str]:
        auxiliary, words = self.english_words(support=True)
        if self.negated:
            auxiliary = "aren't" if auxiliary == "am" else negate(auxiliary)
        return [asked, auxiliary, self.subject.en, self.mid[1], *words]


def subject(
    dice: Dice, kind: str = "p", tense: str = "", spoken: bool = False, asked: bool = False
) -> Phrase:
    """kind "p": people and pronouns; "a": an animal; "pa": either. spoken: never omitted.
    asked: for a question, so never "yo"."""
    if kind == "a" or (kind == "pa" and dice.chance(0.3)):
        return noun_phrase(dice, dice.common(NOUNS["animal"]))
    roll = dice.below(100)
    if roll < 38:
        phrase = dice.weighted(PRONOUN_WEIGHTS[1:] if asked else PRONOUN_WEIGHTS)
        silent = phrase.person not in (2, 5) and not spoken
        if silent and not (tense in AMBIGUOUS and phrase.person == 0) and dice.chance(0.88):
            phrase = phrase._replace(es="")
        return phrase
    if roll < 62:
        return name(dice)
    if roll < 67:
        return names(dice)
    return noun_phrase(dice, dice.common(NOUNS["family" if roll < 80 else "people"]))


def object_noun(dice: Dice, verb_: Verb) -> Noun | None:
    """A noun of one of the verb's object classes; None means a name."""
    if verb_.human_object and dice.chance(0.25):
        return None
    kinds = [kind for kind in verb_.classes if kind in NOUNS]
    return dice.common(NOUNS[dice.pick(kinds)]) if kinds else None


def object_phrase(dice: Dice, verb_: Verb, noun: Noun | None, owner: Phrase) -> Phrase:
    """The object without its preposition."""
    if noun is None:
        return name(dice)
    if noun.kind == "sport":
        return Phrase(f"el {noun.es}", noun.en, gender=noun.gender)
    if noun.kind == "subject" or (noun.mass and dice.chance(0.4)):
        return Phrase(noun.es, noun.en, gender=noun.gender)
    single = noun.kind == "place" or "instrument" in verb_.classes
    return noun_phrase(dice, noun, owner, several=False if single else None, definite=single)


def preposition_for(verb_: Verb, thing: Phrase) -> str:
    """Its own, or the personal "a" of a human object."""
    if verb_.preposition:
        return verb_.preposition
    return "a" if thing.human and verb_.es.infinitive != "tener" else ""


def make_clause(
    dice: Dice,
    verb_: Verb,
    who: Phrase,
    tense: str,
    *,
    background: bool = False,
    bare: bool = False,
    clitic_share: float = 0.16,
) -> Clause:
    """`bare`: only verb and object, no adverbs, as inside a longer sentence."""
    clause = Clause(who, verb_, tense, en_tense=english_tense(verb_, tense, background))
    noun: Noun | None = None
    if not verb_.classes:
        clause = replace(clause, en_tail=(verb_.en.tail,))
    elif verb_.classes[0] in ("city", "country") or (
        {"city", "country"} & set(verb_.classes) and dice.chance(0.35)
    ):
        es, en = dice.common(CITIES if "city" in verb_.classes and dice.chance(0.6) else COUNTRIES)
        link = verb_.preposition
        clause = replace(
            clause, es_tail=(f"{link} {es}".strip(),), en_tail=(verb_.en.with_object(en),)
        )
    elif not verb_.preposition and verb_.takes_pronoun and dice.chance(clitic_share):
        clause = with_pronoun(dice, clause)
    else:
        noun = object_noun(dice, verb_)
        clause = with_object(clause, object_phrase(dice, verb_, noun, who))
    clause = replace(clause, noun=noun)
    if bare and tense == "preterite" and who.person == 3 and verb_.same_for_us:
        es, en = when(dice, tense)
        return replace(clause, es_tail=(*clause.es_tail, es), en_tail=(*clause.en_tail, en))
    return clause if bare else with_adverbs(dice, clause)


def with_object(clause: Clause, thing: Phrase) -> Clause:
    es = f"{preposition_for(clause.verb, thing)} {thing.es}".strip()
    en = clause.verb.en.with_object(thing.en)
    return replace(clause, es_tail=(es,), en_tail=(en,), object=thing)


def with_pronoun(dice: Dice, clause: Clause, antecedent: Phrase | None = None) -> Clause:
    """lo vi, I saw him. The person of the object is never the person of the subject."""
    verb_ = clause.verb
    if antecedent is not None:
        person, gender, human = antecedent.person, antecedent.gender, antecedent.human
    else:
        human, gender = verb_.human_object, dice.pick("mf")
        person = dice.pick((2, 2, 5))
        if human and dice.chance(0.5):
            first = clause.subject.person in (0, 3)
            second = clause.subject.person in (1, 4) or clause.subject.en_person in (1, 4)
            person = dice.pick((1, 1, 4) if first else (0, 0, 3) if second else (0, 0, 1, 3))
    clitic = ACCUSATIVE[person] or ("l" + ("a" if gender == "f" else "o") + "s" * (person == 5))
    pronoun = object_pronoun(person, gender, human)
    return replace(
        clause, clitic=clitic, es_tail=(), en_tail=(verb_.en.with_object(pronoun, True),)
    )


DATED = ("preterite", "future", "going_to", "progressive", "imperfect", "present")


def with_adverbs(dice: Dice, clause: Clause) -> Clause:
    """Negation, frequency, manner, company, place and time, each now and then."""
    tense, verb_ = clause.tense, clause.verb
    es, en = list(clause.es_tail), list(clause.en_tail)
    timed = dice.chance(0.35)
    if tense == "preterite" and clause.subject.person == 3 and verb_.same_for_us:
        timed = True
    if tense == "imperfect" and not verb_.stative:
        timed = True
    negated = tense != "imperfect" and dice.chance(0.12)
    mid = ("", "")
    if tense == "present" and not negated and dice.chance(0.16):
        mid = dice.pick(FREQUENCY)
        timed = False
    elif tense == "perfect" and not negated and dice.chance(0.4):
        mid = dice.pick((("ya", "already"), ("nunca", "never"), ("siempre", "always")))
    elif tense == "perfect" and negated and dice.chance(0.5):
        mid = ("todavía", "")
    room = clause.subject.es.count(" ") + " ".join(es).count(" ") < 9
    if room and not verb_.stative:
        if tense in ("preterite", "future", "progressive") and dice.chance(0.1):
            _add(es, en, dice.pick(MANNER))
        elif dice.chance(0.1) and verb_.subjects != "a":
            _add(es, en, company(dice, clause.subject))
        elif not verb_.preposition and dice.chance(0.16):
            _add(es, en, at_place(dice, clause.subject))
    if timed and tense in DATED and not (verb_.stative and tense != "present"):
        time = when(dice, tense)
        if dice.chance(0.25) and not mid[0] and tense != "imperfect":
            return replace(
                clause, negated=negated, es_tail=tuple(es), en_tail=tuple(en),
                time_in_front=time,
            )  # fmt: skip
        _add(es, en, time)
    if mid[0] == "todavía":
        en.append("yet")
    return replace(clause, negated=negated, mid=mid, es_tail=tuple(es), en_tail=tuple(en))


def _add(es: list[str], en: list[str], pair: tuple[str, str]) -> None:
    es.append(pair[0])
    en.append(pair[1])


WITH_PRONOUN = ("conmigo", "contigo", "", "con nosotros", "con vosotros", "")


def company(dice: Dice, who: Phrase) -> tuple[str, str]:
    """con su hermano, with his brother; conmigo, with me; sin él, without him."""
    if dice.chance(0.3):
        near = {who.person, who.en_person}
        options = [p for p in (0, 1, 3) if p not in near and not near & CLOSE[p]]
        person = dice.pick(options)
        return WITH_PRONOUN[person], f"with {OBJECT_EN[person]}"
    es_link, en_link = ("con", "with") if dice.chance(0.85) else ("sin", "without")
    if dice.chance(0.3):
        other = name(dice)
    else:
        noun = dice.common(NOUNS["family" if dice.chance(0.5) else "people"])
        other = noun_phrase(dice, noun, who, plain=True)
    return f"{es_link} {other.es}", f"{en_link} {other.en}"


CLOSE = {0: {3}, 1: {4}, 3: {0}}  # persons that overlap


def plain_clause(
    dice: Dice,
    tense: str = "",
    *,
    bare: bool = False,
    asked: bool = False,
    verbs: Sequence[Verb] = (),
) -> Clause:
    """A clause with any verb (or one of `verbs`), its subject and its objects."""
    verb_ = dice.common(verbs) if verbs else pick_verb(dice)
    if verb_.stative and tense not in ("", "present", "imperfect"):
        verb_ = dice.common(INTRANSITIVE)
    if not tense:
        tense = pick_tense(dice, verb_, asked)
    who = subject(dice, verb_.subjects, tense, asked=asked)
    return make_clause(dice, verb_, who, tense, bare=bare)
