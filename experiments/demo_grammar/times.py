"""When and how: times, dates, durations, manner, in both languages at once."""

from __future__ import annotations

from experiments.demo_grammar import english, spanish
from experiments.demo_grammar.dice import Dice
from experiments.demo_grammar.words import WORDS, fields, pairs

TIMES: dict[str, list[str]] = WORDS["times"]
WEEKDAYS, MONTHS, SEASONS = (pairs(TIMES[kind]) for kind in ("weekdays", "months", "seasons"))
PAST, FUTURE, HABIT = (pairs(TIMES[kind]) for kind in ("past", "future", "habit"))
NOW, USED_TO = (pairs(TIMES[kind]) for kind in ("now", "used_to"))
UNITS = [fields(entry) for entry in TIMES["units"]]
MANNER, FREQUENCY = (pairs(WORDS["adverbs"][kind]) for kind in ("manner", "frequency"))


def duration(dice: Dice) -> tuple[str, str]:
    es, gender, en = dice.pick(UNITS)
    value = 2 + dice.below(9) if dice.chance(0.75) else 11 + dice.below(50)
    return (
        f"{spanish.number(value, gender)} {spanish.plural(es)}",
        f"{english.number(value)} {en}s",
    )


def clock(dice: Dice) -> tuple[str, str]:
    """("las tres y media", "half past three")."""
    hour, part = 1 + dice.below(12), dice.below(12)
    article = "la" if hour == 1 else "las"
    es, en = f"{article} {spanish.number(hour, 'f')}", english.number(hour)
    if part == 0:
        return f"{es} y media", f"half past {en}"
    if part == 1:
        return f"{es} y cuarto", f"a quarter past {en}"
    if part == 2:
        return f"{es} menos cuarto", f"a quarter to {en}"
    if part < 5:
        minutes = dice.pick((5, 10, 20, 25))
        return f"{es} y {spanish.number(minutes)}", f"{english.number(minutes)} past {en}"
    if part < 7:
        minutes = dice.pick((5, 10, 20, 25))
        return f"{es} menos {spanish.number(minutes)}", f"{english.number(minutes)} to {en}"
    es_day, en_day = dice.pick(
        (
            ("", " o'clock"),
            (" de la mañana", " in the morning"),
            (" de la tarde", " in the afternoon"),
        )
    )
    return es + es_day, en + en_day


def year(dice: Dice, earliest: int = 1850) -> str:
    return str(earliest + dice.below(2025 - earliest))


def date(dice: Dice) -> tuple[str, str]:
    day, (es_month, en_month) = 1 + dice.below(28), dice.pick(MONTHS)
    if dice.chance(0.4):
        number = year(dice)
        return f"el {day} de {es_month} de {number}", f"on {en_month} {day}, {number}"
    return f"el {day} de {es_month}", f"on {en_month} {day}"


def when(dice: Dice, tense: str) -> tuple[str, str]:
    """A time that goes with the Spanish tense."""
    roll = dice.below(100)
    weekday, en_weekday = dice.pick(WEEKDAYS)
    if tense == "preterite":
        if roll < 12:
            es, en = duration(dice)
            return f"hace {es}", f"{en} ago"
        if roll < 20:
            return f"en {(number := year(dice))}", f"in {number}"
        if roll < 28:
            return date(dice)
        if roll < 36:
            return f"el {weekday} pasado", f"last {en_weekday}"
        if roll < 44:
            es, en = clock(dice)
            return f"a {es}", f"at {en}"
        return dice.common(PAST)
    if tense in ("future", "going_to", "subjunctive"):
        if roll < 12:
            es, en = duration(dice)
            return f"dentro de {es}", f"in {en}"
        if roll < 22:
            return f"el próximo {weekday}", f"next {en_weekday}"
        if roll < 32:
            es, en = clock(dice)
            return f"a {es}", f"at {en}"
        return dice.common(FUTURE)
    if tense == "present":
        if roll < 15:
            return f"los {spanish.plural(weekday) if weekday[-1] == 'o' else weekday}", (
                f"on {en_weekday}s"
            )
        if roll < 25:
            season, en_season = dice.pick(SEASONS)
            return f"en {season}", f"in the {en_season}"
        return dice.common(HABIT)
    if tense == "imperfect":
        return dice.common(USED_TO)
    return dice.common(NOW) if tense == "progressive" else ("", "")
