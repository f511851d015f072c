"""Who did what, where, when and with whom: small events, in English or Spanish.

They yield sentences, questions with answers, paragraphs and inference pairs. No corpus here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from experiments.demo_grammar.dice import Dice
from experiments.demo_grammar.words import WORDS, fields
from xcloud.demo import STORY_QUESTIONS, Story

Language = Literal["en", "es"]
LANGUAGES: tuple[Language, ...] = ("en", "es")
Role = Literal["who", "what", "how many", "where", "when", "company"]
EXTRAS: tuple[Role, ...] = ("where", "when", "company")


@dataclass(frozen=True)
class Word:
    en: str
    es: str
    base: str = ""  # of an English verb


def _words(kind: str) -> list[Word]:
    found = [fields(entry) for entry in WORDS["events"][kind]]
    return [Word(en, es, *base) for es, en, *base in found]


PEOPLE, VERBS, THINGS = _words("people"), _words("verbs"), _words("things")
NUMBERS, PLACES, TIMES = _words("numbers"), _words("places"), _words("times")


@dataclass(frozen=True)
class Event:
    """where, when and company (with whom) are optional."""

    who: Word
    verb: Word
    number: Word
    thing: Word
    where: Word | None = None
    when: Word | None = None
    company: Word | None = None

    def extra(self, role: Role) -> Word | None:
        return {"where": self.where, "when": self.when, "company": self.company}.get(role)

    def without(self, role: Role) -> Event:
        return replace(
            self,
            where=None if role == "where" else self.where,
            when=None if role == "when" else self.when,
            company=None if role == "company" else self.company,
        )

    @property
    def extras(self) -> list[Role]:
        return [role for role in EXTRAS if self.extra(role) is not None]


def new_event(dice: Dice, chance: float = 0.6) -> Event:
    """chance: of including a place (a time, a company)."""
    who, company = dice.pick(PEOPLE), dice.pick(PEOPLE)
    return Event(
        who, dice.pick(VERBS), dice.pick(NUMBERS), dice.pick(THINGS),
        dice.pick(PLACES) if dice.chance(chance) else None,
        dice.pick(TIMES) if dice.chance(chance) else None,
        company if company is not who and dice.chance(chance / 2) else None,
    )  # fmt: skip


def told(event: Event, language: Language = "en", *, time_first: bool = False,
         denied: bool = False) -> str:  # fmt: skip
    """On Monday the teacher bought three apples at the market."""

    def say(word: Word | None) -> str:
        return "" if word is None else getattr(word, language)

    verb = say(event.verb)
    if denied:
        verb = f"did not {event.verb.base}" if language == "en" else f"no {verb}"
    company = say(event.company)
    if company:
        company = f"{'with' if language == 'en' else 'con'} {company}"
    front, end = (say(event.when), "") if time_first else ("", say(event.when))
    parts = [front, say(event.who), verb, say(event.number), say(event.thing), say(event.where),
             company, end]  # fmt: skip
    return capital(" ".join(part for part in parts if part)) + "."


def question(event: Event, role: Role, hint: Role | None = None) -> tuple[str, str]:
    """(question, answer) in English; `hint` is mentioned in the question."""
    who, thing, base = event.who.en, event.thing.en, event.verb.base
    word = event.extra(hint) if hint is not None else None
    tail = "" if word is None else f" with {word.en}" if hint == "company" else f" {word.en}"
    if role == "who":
        return f"Who {event.verb.en} {event.number.en} {thing}{tail}?", who
    if role == "what":
        return f"What did {who} {base}{tail}?", f"{event.number.en} {thing}"
    if role == "how many":
        return f"How many {thing} did {who} {base}{tail}?", event.number.en
    answer = event.extra(role)
    assert answer is not None, role
    start = {"where": "Where", "when": "When", "company": "With whom"}[role]
    return f"{start} did {who} {base} the {thing}{tail}?", answer.en


def random_question(dice: Dice, event: Event) -> tuple[str, str, Role]:
    """(question, answer, what is asked for)."""
    roles: list[Role] = ["who", "what", "how many", *event.extras, *event.extras]
    role = dice.pick(roles)
    others: list[Role | None] = [None, *(extra for extra in event.extras if extra != role)]
    return (*question(event, role, dice.pick(others)), role)


def answering_pair(dice: Dice) -> tuple[str, str, bool]:
    """(question, sentence, whether the sentence answers it). Both cases use similar words."""
    event = new_event(dice, 0.75)
    answers = dice.chance(0.5)
    asked, _, role = random_question(dice, event)
    if answers:
        return asked, told(event, time_first=dice.chance(0.5)), True
    if role in EXTRAS and dice.chance(0.7):
        other = event.without(role)  # the same event without the requested fact
    elif role == "who":
        other = replace(event, verb=dice.pick([verb for verb in VERBS if verb != event.verb]))
    elif dice.chance(0.5):
        other = replace(event, who=dice.pick([one for one in PEOPLE if one != event.who]))
    else:
        other = replace(event, verb=dice.pick([verb for verb in VERBS if verb != event.verb]))
    return asked, told(other, time_first=dice.chance(0.5)), False


STORY_EVENTS = 4


def story(dice: Dice) -> Story:
    """A paragraph of events that share people, verbs or things, and questions about them."""
    events = [new_event(dice)]
    while len(events) < STORY_EVENTS:
        event, like = new_event(dice), dice.pick(events)
        shared = dice.below(3)
        event = (
            replace(event, who=like.who) if shared == 0
            else replace(event, verb=like.verb) if shared == 1
            else replace(event, thing=like.thing)
        )  # fmt: skip
        if event.company is event.who:
            event = event.without("company")
        # A question names two of person, verb and thing, which must identify one event.
        if all(_told_apart(event, other) for other in events):
            events.append(event)
    sentences = [told(event, time_first=dice.chance(0.5)) for event in events]
    text = " ".join(sentences)
    found: dict[str, tuple[str, int]] = {}
    while len(found) < STORY_QUESTIONS:
        number = dice.below(STORY_EVENTS)
        asked, answer, _ = random_question(dice, events[number])
        start = sum(len(sentence) + 1 for sentence in sentences[:number])
        sentence = sentences[number]
        at = sentence.find(answer)
        if at < 0:  # it opens the sentence
            answer, at = capital(answer), 0
        found[asked] = (answer, start + at)
    return Story(text, tuple((asked, *place) for asked, place in found.items()))


def _told_apart(a: Event, b: Event) -> bool:
    return sum((a.who == b.who, a.verb == b.verb, a.thing == b.thing)) < 2


RELATIONS = ("entailment", "neutral", "contradiction")


def inference(dice: Dice) -> tuple[dict[str, tuple[str, str]], str]:
    """(language -> (premise, hypothesis), relation)."""
    relation = dice.pick(RELATIONS)
    event = new_event(dice, 0.7)
    while not event.extras:
        event = new_event(dice, 0.7)
    first, denied, time_first = event, False, (dice.chance(0.5), dice.chance(0.5))
    gone = dice.pick(event.extras)
    second = event.without(gone)
    if relation == "entailment" and event.when is not None and dice.chance(0.3):
        second = event  # the same event in another word order
        time_first = (time_first[0], not time_first[0])
    elif relation == "neutral":
        first, second = second, event  # the added fact need not hold
    elif relation == "contradiction":
        second = second if dice.chance(0.5) else event
        if dice.chance(0.6):
            denied = True
        else:
            second = replace(second, number=dice.pick([n for n in NUMBERS if n != event.number]))
    pair: dict[str, tuple[str, str]] = {}
    for language in LANGUAGES:
        pair[language] = (
            told(first, language, time_first=time_first[0]),
            told(second, language, time_first=time_first[1], denied=denied),
        )
    return pair, relation


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]
