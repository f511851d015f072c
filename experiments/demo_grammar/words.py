"""The words of words.toml as nouns, adjectives and pairs. No verbs (verbs.py), no phrases."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from experiments.demo_grammar import english, spanish

WORDS: dict[str, dict[str, Any]] = tomllib.loads(
    resources.files("experiments.demo_grammar").joinpath("words.toml").read_text("utf-8")
)


def fields(entry: str) -> list[str]:
    return entry.split(" | ")


def pairs(entries: Iterable[str]) -> list[tuple[str, str]]:
    """(Spanish, English); an entry of one word is the same in both."""
    found = [fields(entry) for entry in entries]
    return [(words[0], words[-1]) for words in found]


MALE_NAMES: list[str] = WORDS["names"]["male"]
FEMALE_NAMES: list[str] = WORDS["names"]["female"]
CITIES, COUNTRIES = (pairs(WORDS["places"][kind]) for kind in ("cities", "countries"))


@dataclass(frozen=True, eq=False)
class Noun:
    """mass: not counted, so no plural. takes_el: el agua, although feminine."""

    es: str
    gender: str
    en: str
    en_plural: str
    kind: str
    mass: bool = False
    takes_el: bool = False
    has_plural: bool = True

    @property
    def human(self) -> bool:
        return self.kind in ("people", "family")

    def forms(self, several: bool) -> tuple[str, str]:
        """(libro, book) or (libros, books)."""
        return (spanish.plural(self.es), self.en_plural) if several else (self.es, self.en)

    def the(self, several: bool) -> str:
        """el, la, los or las."""
        return "el" if self.takes_el and not several else spanish.the(self.gender, several)


MASS_KINDS = ("food", "drink", "subject", "sport")


def _human(entry: str, kind: str) -> Iterable[Noun]:
    spanish_words, english_words = (side.split(",") for side in fields(entry))
    for i, gender in enumerate("mf"):
        word = spanish_words[min(i, len(spanish_words) - 1)]
        en, _, irregular = english_words[min(i, len(english_words) - 1)].partition("/")
        several = irregular or english.plural(en)
        if kind == "family":
            several = WORDS["humans"]["family_plural"].get(word, several)
        has_plural = not (kind == "family" and word in WORDS["humans"]["without_plural"])
        yield Noun(word, gender, en, several, kind, has_plural=has_plural)


def _thing(entry: str, kind: str) -> Noun:
    marked, both = fields(entry)
    (es, _, mark), (en, _, irregular) = marked.partition("."), both.partition("/")
    mass = kind in MASS_KINDS or "!" in mark
    several = irregular or english.plural(en)
    return Noun(es, mark[0], en, several, kind, mass, "*" in mark, not mass)


def _all_nouns() -> dict[str, list[Noun]]:
    nouns = {
        kind: [noun for entry in WORDS["humans"][kind] for noun in _human(entry, kind)]
        for kind in ("people", "family")
    }
    for kind, entries in WORDS["nouns"].items():
        nouns[kind] = [_thing(entry, kind) for entry in entries]
    by_word: dict[str, Noun] = {}
    for group in nouns.values():
        for noun in group:
            by_word.setdefault(noun.es, noun)
    for name, words in WORDS["classes"].items():
        nouns[name] = [by_word[word] for word in words]
    return nouns


NOUNS = _all_nouns()  # by kind and by class


class Adjective(NamedTuple):
    es: str
    en: str
    codes: str  # of which kinds of nouns
    copula: str  # "s": ser, "e": estar


ADJECTIVES = [Adjective(*fields(entry)) for entry in WORDS["adjectives"]["all"]]
KIND_CODES = {
    "people": "p", "family": "f", "animal": "a", "fruit": "x", "food": "e", "drink": "d",
    "clothes": "o", "readable": "o", "object": "o", "furniture": "o", "vehicle": "v",
    "media": "i", "idea": "i", "place": "l", "plant": "o",
}  # fmt: skip


@cache
def adjectives_for(kind: str, copula: str) -> list[Adjective]:
    codes = KIND_CODES.get(kind, "")
    return [a for a in ADJECTIVES if a.copula in copula and any(c in a.codes for c in codes)]
