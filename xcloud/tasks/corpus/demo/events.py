"""Who did what, where, when and with whom: small events, told in English or Spanish.

From them come sentences, questions with their answers, paragraphs, and pairs of which one follows
from the other. No corpus lives here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from xcloud.tasks.corpus.demo.phrases import Dice

Language = Literal["en", "es"]
Role = Literal["who", "what", "how many", "where", "when", "company"]
EXTRAS: tuple[Role, ...] = ("where", "when", "company")


@dataclass(frozen=True)
class Word:
    en: str
    es: str
    base: str = ""  # of an English verb


def _list(text: str) -> list[Word]:
    entries = [entry.strip() for entry in text.replace("\n", " ").split(";") if entry.strip()]
    return [Word(*(part.strip() for part in entry.split("|"))) for entry in entries]


PEOPLE = _list("""
the teacher|la profesora; the doctor|el médico; the nurse|la enfermera; the lawyer|el abogado;
the cook|la cocinera; the writer|el escritor; the singer|la cantante; the judge|el juez;
the mayor|la alcaldesa; the thief|el ladrón; the dancer|la bailarina; the painter|el pintor;
the dentist|la dentista; the pilot|el piloto; the driver|la conductora; the baker|el panadero;
the farmer|la granjera; the carpenter|el carpintero; the coach|la entrenadora;
the tourist|el turista; the architect|la arquitecta; the guide|el guía; the captain|la capitana;
the sailor|el marinero; the student|la estudiante; the neighbor|el vecino; the queen|la reina;
the king|el rey; the director|la directora; the waiter|el camarero; the gardener|la jardinera;
the detective|el detective; the grandmother|la abuela; the uncle|el tío; the sister|la hermana;
the cousin|el primo; the journalist|la periodista; the soldier|el soldado
""")
VERBS = _list("""
bought|compró|buy; sold|vendió|sell; found|encontró|find; lost|perdió|lose;
cleaned|limpió|clean; repaired|reparó|repair; carried|llevó|carry; hid|escondió|hide;
stole|robó|steal; counted|contó|count; drew|dibujó|draw; photographed|fotografió|photograph;
moved|movió|move; ordered|pidió|order; collected|recogió|collect; chose|eligió|choose;
saw|vio|see; forgot|olvidó|forget; returned|devolvió|return; painted|pintó|paint;
received|recibió|receive; broke|rompió|break; wrapped|envolvió|wrap; dropped|dejó caer|drop
""")
THINGS = _list("""
apples|manzanas; books|libros; chairs|sillas; bottles|botellas; letters|cartas; keys|llaves;
bags|bolsas; boxes|cajas; cameras|cámaras; clocks|relojes; cups|tazas; lamps|lámparas;
maps|mapas; shirts|camisas; shoes|zapatos; tickets|billetes; toys|juguetes; umbrellas|paraguas;
paintings|cuadros; bicycles|bicicletas; oranges|naranjas; flowers|flores; cakes|pasteles;
hats|sombreros; knives|cuchillos; plates|platos; rings|anillos; watches|relojes de pulsera;
pencils|lápices; newspapers|periódicos; tables|mesas; mirrors|espejos; blankets|mantas;
suitcases|maletas; guitars|guitarras; candles|velas
""")
NUMBERS = _list("""
two|dos; three|tres; four|cuatro; five|cinco; six|seis; seven|siete; eight|ocho; nine|nueve;
ten|diez; twelve|doce; twenty|veinte; thirty|treinta
""")
PLACES = _list("""
at the market|en el mercado; at the station|en la estación; in the garden|en el jardín;
in the kitchen|en la cocina; at the library|en la biblioteca; at the museum|en el museo;
on the beach|en la playa; at the airport|en el aeropuerto; in the park|en el parque;
at the hospital|en el hospital; at school|en la escuela; at the theater|en el teatro;
in the office|en la oficina; in the village|en el pueblo; on the bridge|en el puente;
at the hotel|en el hotel; in the forest|en el bosque; at the bank|en el banco;
in the basement|en el sótano; at the bakery|en la panadería; on the train|en el tren;
on the island|en la isla; in the square|en la plaza; at the harbor|en el puerto
""")
TIMES = _list("""
on Monday|el lunes; on Tuesday|el martes; on Wednesday|el miércoles; on Thursday|el jueves;
on Friday|el viernes; on Saturday|el sábado; on Sunday|el domingo; in March|en marzo;
in April|en abril; in June|en junio; in July|en julio; in August|en agosto;
in October|en octubre; in December|en diciembre; in the morning|por la mañana;
in the evening|por la tarde; at night|por la noche; last week|la semana pasada;
last summer|el verano pasado; yesterday|ayer; at noon|al mediodía; before lunch|antes de comer
""")


@dataclass(frozen=True)
class Event:
    """where, when and company (whom it was done with) may be left out."""

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
    """chance: that a place (a time, a company) is told."""
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
    """(question, answer) in English; `hint` is told in the question too."""
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
    """(question, sentence, whether the sentence answers it). The words are alike in both cases."""
    event = new_event(dice, 0.75)
    answers = dice.chance(0.5)
    asked, _, role = random_question(dice, event)
    if answers:
        return asked, told(event, time_first=dice.chance(0.5)), True
    if role in EXTRAS and dice.chance(0.7):
        other = event.without(role)  # the very event, but what is asked for is not told
    elif role == "who":
        other = replace(event, verb=dice.pick([verb for verb in VERBS if verb != event.verb]))
    elif dice.chance(0.5):
        other = replace(event, who=dice.pick([one for one in PEOPLE if one != event.who]))
    else:
        other = replace(event, verb=dice.pick([verb for verb in VERBS if verb != event.verb]))
    return asked, told(other, time_first=dice.chance(0.5)), False


@dataclass(frozen=True)
class Story:
    """sentences: in the order they are told. questions: (question, answer as it stands there,
    its first character in the text)."""

    text: str
    questions: tuple[tuple[str, str, int], ...]


def story(dice: Dice, num_events: int = 4, num_questions: int = 3) -> Story:
    """A paragraph of events that share people, verbs or things, and questions about them."""
    events = [new_event(dice)]
    while len(events) < num_events:
        event, like = new_event(dice), dice.pick(events)
        shared = dice.below(3)
        event = (
            replace(event, who=like.who) if shared == 0
            else replace(event, verb=like.verb) if shared == 1
            else replace(event, thing=like.thing)
        )  # fmt: skip
        if event.company is event.who:
            event = event.without("company")
        # A question names two of person, verb and thing; they must mean one event.
        if all(_told_apart(event, other) for other in events):
            events.append(event)
    sentences = [told(event, time_first=dice.chance(0.5)) for event in events]
    text = " ".join(sentences)
    found: dict[str, tuple[str, int]] = {}
    while len(found) < num_questions:
        number = dice.below(num_events)
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


INFERENCES = ("entailment", "neutral", "contradiction")


def inference(dice: Dice) -> tuple[dict[Language, tuple[str, str]], int]:
    """(language -> (premise, hypothesis), number of the relation in INFERENCES)."""
    relation = dice.below(3)
    event = new_event(dice, 0.7)
    while not event.extras:
        event = new_event(dice, 0.7)
    first, denied, time_first = event, False, (dice.chance(0.5), dice.chance(0.5))
    gone = dice.pick(event.extras)
    second = event.without(gone)
    if relation == 0 and event.when is not None and dice.chance(0.3):
        second = event  # the same, told in another order
        time_first = (time_first[0], not time_first[0])
    elif relation == 1:
        first, second = second, event  # what is told more need not be so
    elif relation == 2:
        second = second if dice.chance(0.5) else event
        if dice.chance(0.6):
            denied = True
        else:
            second = replace(second, number=dice.pick([n for n in NUMBERS if n != event.number]))
    pair: dict[Language, tuple[str, str]] = {}
    for language in ("en", "es"):
        pair[language] = (
            told(first, language, time_first=time_first[0]),
            told(second, language, time_first=time_first[1], denied=denied),
        )
    return pair, relation


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]
