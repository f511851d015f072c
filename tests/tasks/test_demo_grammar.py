"""The demo texts and the grammars that made them: nobody changes them unknowingly, and forms are
correct."""

from __future__ import annotations

import bz2
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from experiments.demo_grammar import english, spanish
from experiments.demo_grammar.__main__ import FOLDER, made
from experiments.demo_grammar.corpora import (
    KINDS,
    answers,
    inferences,
    pairs,
    public_sentences,
    reviews,
    stories,
)
from experiments.demo_grammar.dice import Dice
from experiments.demo_grammar.events import PEOPLE, THINGS, Event, Word, told
from experiments.demo_grammar.events import VERBS as DEEDS
from experiments.demo_grammar.reviews import BAD, GOOD
from experiments.demo_grammar.verbs import VERBS
from experiments.demo_grammar.words import ADJECTIVES, CITIES, NOUNS, WORDS
from xcloud import demo
from xcloud.base.errors import ConfigError

Texts = Callable[[int, int], Sequence[object]]


def digest(texts: object) -> str:
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


# A change of a text changes every number measured on it: do that on purpose, and say so.
@pytest.mark.parametrize(
    ("texts", "num", "seed", "expected"),
    [
        (pairs, 2000, 7, "bdce0219713776a6"),
        (pairs, 2000, 11, "194f75fcf168be83"),
        (reviews, 2000, 7, "4b981f07341bc683"),
        (reviews, 2000, 11, "d295b92400bf2d32"),
        (answers, 2000, 7, "6238200521291cb7"),
        (answers, 2000, 11, "c4ea91c0771cbc67"),
        (inferences, 2000, 7, "c47fa86991eaaa51"),
        (inferences, 2000, 11, "2fd21b0114b2909e"),
        (stories, 500, 7, "35abf8b385b5a0ff"),
        (stories, 500, 11, "0782f69454bc60d3"),
        (public_sentences, 2000, 7, "d632a7307ebfcacd"),
        (public_sentences, 2000, 11, "8794edd930c854ec"),
    ],
)
def test_a_seed_gives_the_same_texts_on_every_machine(
    texts: Texts, num: int, seed: int, expected: str
) -> None:
    assert digest(list(texts(num, seed))) == expected


def test_the_words_are_those_of_all_measured_runs() -> None:
    # Rare words show in no short list. Comments and line breaks of the file do not count.
    assert digest(WORDS) == "78caff8a96e16fe7"


@pytest.mark.parametrize("texts", [pairs, reviews, answers, inferences, stories, public_sentences])
def test_texts_are_different_and_a_longer_list_begins_with_the_shorter(texts: Texts) -> None:
    few, many = list(texts(60, 3)), list(texts(120, 3))
    assert many[:60] == few and len(set(map(repr, many))) == 120
    assert list(texts(60, 4)) != few and list(texts(0, 3)) == []
    for wrong in (-1, 10**9):
        with pytest.raises(ConfigError, match="num must be"):
            texts(wrong, 0)
    with pytest.raises(ConfigError, match="seed must be"):
        texts(1, -1)


@pytest.mark.slow
@pytest.mark.nightly
def test_english_follows_from_spanish_and_sentences_are_whole() -> None:
    dice, seen = Dice(5), dict[str, str]()
    for _ in range(10_000):
        es, en = dice.weighted(KINDS)(dice)
        assert seen.setdefault(es, en) == en
        for text in (es, en):
            assert not re.search(r"\s\s|[_~|/\n]| [,.?!]|None", text), text
            assert text[-1] in ".?!" and (text[0].isupper() or text[0] in "¿¡"), text
        assert not re.search(r"\b(a|de) el [a-záéíóúñ]", es), es
        assert not re.search(r"\by [iIÍ][^aeo]", es), es
        assert not re.search(r"\b[Aa] [aeio]", en), en


@pytest.mark.slow
@pytest.mark.nightly
def test_vocabulary_is_a_few_thousand_forms_and_lengths_are_bounded() -> None:
    found = pairs(10_000, seed=7)
    forms = [{w for p in found for w in re.findall(r"\w+", p[i].lower())} for i in (0, 1)]
    assert len(forms[0]) > 5000
    assert len(forms[1]) > 2000
    lengths = [len(side.split()) for pair in found for side in pair]
    assert min(lengths) >= 4 and max(lengths) <= 25


@pytest.mark.parametrize(
    ("infinitive", "tense", "forms"),
    [
        ("buscar", "preterite", "busqué buscaste buscó buscamos buscasteis buscaron"),
        ("empezar", "subjunctive", "empiece empieces empiece empecemos empecéis empiecen"),
        ("pedir", "preterite", "pedí pediste pidió pedimos pedisteis pidieron"),
        ("dormir", "subjunctive", "duerma duermas duerma durmamos durmáis duerman"),
        ("dormir", "past_subjunctive", "durmiera durmieras durmiera durmiéramos durmierais "
         "durmieran"),
        ("seguir", "present", "sigo sigues sigue seguimos seguís siguen"),
        ("construir", "preterite", "construí construiste construyó construimos construisteis "
         "construyeron"),
        ("leer", "preterite", "leí leíste leyó leímos leísteis leyeron"),
        ("conducir", "preterite", "conduje condujiste condujo condujimos condujisteis condujeron"),
        ("conocer", "present", "conozco conoces conoce conocemos conocéis conocen"),
        ("hacer", "preterite", "hice hiciste hizo hicimos hicisteis hicieron"),
        ("hacer", "future", "haré harás hará haremos haréis harán"),
        ("ir", "imperfect", "iba ibas iba íbamos ibais iban"),
        ("ver", "imperfect", "veía veías veía veíamos veíais veían"),
        ("tener", "conditional", "tendría tendrías tendría tendríamos tendríais tendrían"),
        ("jugar", "present", "juego juegas juega jugamos jugáis juegan"),
        ("jugar", "subjunctive", "juegue juegues juegue juguemos juguéis jueguen"),
        ("elegir", "subjunctive", "elija elijas elija elijamos elijáis elijan"),
        ("enviar", "present", "envío envías envía enviamos enviáis envían"),
        ("estar", "past_subjunctive", "estuviera estuvieras estuviera estuviéramos estuvierais "
         "estuvieran"),
    ],
)  # fmt: skip
def test_spanish_verbs_take_their_forms(infinitive: str, tense: str, forms: str) -> None:
    assert " ".join(spanish.conjugate(infinitive).tenses[tense]) == forms


def test_spanish_participles_and_gerunds() -> None:
    forms = {v: spanish.conjugate(v) for v in ("romper", "leer", "pedir", "dormir", "ir", "traer")}
    assert [p.participle for p in forms.values()] == "roto leído pedido dormido ido traído".split()
    assert [p.gerund for p in forms.values()] == (
        "rompiendo leyendo pidiendo durmiendo yendo trayendo".split()
    )


def test_spanish_nouns_adjectives_and_numbers_agree() -> None:
    assert [spanish.plural(w) for w in "luz jardín joven autobús árbol paraguas".split()] == (
        "luces jardines jóvenes autobuses árboles paraguas".split()
    )
    assert spanish.agree("trabajador", "f", True) == "trabajadoras"
    assert spanish.agree("inglés", "f", False) == "inglesa"
    assert spanish.agree("marrón", "f", True) == "marrones"
    assert spanish.number(21, "f") == "veintiuna"
    assert spanish.number(501, "f") == "quinientas una"
    assert spanish.number(31) == "treinta y un"


def test_spanish_contracts_and_softens_its_conjunctions() -> None:
    assert spanish.finish(["voy", "a", "el río"]) == "Voy al río."
    assert spanish.finish(["es", "de", "él"]) == "Es de él."
    assert spanish.finish(["Ana y Inés ven a El Cairo"]) == "Ana e Inés ven a El Cairo."


def test_english_forms() -> None:
    run, lie, study = map(english.parse_verb, ("run ran run", "lie", "study"))
    assert (run.gerund, lie.gerund, study.third, study.past) == (
        "running", "lying", "studies", "studied"
    )  # fmt: skip
    turn_on = english.parse_verb("turn~on")
    assert turn_on.with_object("it", is_pronoun=True) == "it on"
    assert turn_on.with_object("the light") == "on the light"
    assert english.with_support(run, "past", 2) == ("did", "run")
    assert english.compare("happy") == ("happier", "happiest")
    assert english.compare("big") == ("bigger", "biggest")
    assert english.compare("famous") == ("more famous", "most famous")
    assert english.number(345) == "three hundred and forty-five"
    assert english.finish(["I saw a/an", "honest man"]) == "I saw an honest man."


def test_every_class_of_words_that_a_verb_names_exists() -> None:
    known = {*NOUNS, "city", "country"}
    assert {kind for verb in VERBS for kind in verb.classes} <= known
    assert all(len(pair) == 2 and "\n" not in "".join(pair) for pair in CITIES)
    assert {adjective.copula for adjective in ADJECTIVES} == {"s", "e"}


def test_words_alone_do_not_tell_praise() -> None:
    """Counting praising words is little better than guessing."""
    samples = reviews(1000, 7)
    hits = 0.0
    for text, praises in samples:
        words = text.split()
        balance = sum(w in GOOD for w in words) - sum(w in BAD for w in words)
        hits += 0.5 if balance == 0 else float((balance > 0) == praises)
    assert hits / len(samples) < 0.6


def test_inference_pairs_say_the_same_in_both_languages() -> None:
    seen = Counter[str]()
    for pair, relation in inferences(200, 2):
        seen[relation] += 1
        assert pair["en"][0] != pair["en"][1]
        denied = "did not" in pair["en"][1]
        assert denied == (" no " in pair["es"][1])
        assert not denied or relation == "contradiction"
    assert set(seen) == {"entailment", "neutral", "contradiction"}


def test_public_sentences_can_be_printed() -> None:
    assert all(text.isprintable() and len(text) > 5 for text in public_sentences(120, 3))


def test_an_event_is_told_in_both_languages() -> None:
    event = Event(PEOPLE[0], DEEDS[0], Word("three", "tres"), THINGS[0],
                  when=Word("on Monday", "el lunes"))  # fmt: skip
    assert told(event, time_first=True) == "On Monday the teacher bought three apples."
    assert told(event, "es", denied=True) == "La profesora no compró tres manzanas el lunes."
    assert told(event, denied=True) == "The teacher did not buy three apples on Monday."


# A change of a text changes every number measured on it: do that on purpose, and say so.
DIGESTS = {
    "pairs": "d83647079af5c533",
    "reviews": "c2db63ddda25906d",
    "answers": "1ba7eff1af9d89b2",
    "inferences": "d1b2c19852a23ab7",
    "stories": "6f22eff39ecdc6d3",
    "public_sentences": "e0b74c6b9ba7a55a",
}
DEMO_KINDS: tuple[Callable[[int], Sequence[object]], ...] = (
    demo.pairs, demo.reviews, demo.answers, demo.inferences, demo.stories, demo.public_sentences,
)  # fmt: skip


def kept(name: str) -> bytes:
    return bz2.decompress((FOLDER / f"{name}.jsonl.bz2").read_bytes())


def test_nobody_changes_a_file_unknowingly() -> None:
    assert {name: hashlib.sha256(kept(name)).hexdigest()[:16] for name in DIGESTS} == DIGESTS


@pytest.mark.slow
@pytest.mark.nightly
def test_the_grammar_still_makes_the_bytes_of_every_file() -> None:
    written = dict(made())
    assert written.keys() == DIGESTS.keys()
    for name, text in written.items():
        assert kept(name) == text.encode()


@pytest.mark.parametrize("texts", DEMO_KINDS)
def test_a_shorter_list_begins_a_longer_one_and_all_texts_differ(
    texts: Callable[[int], Sequence[object]],
) -> None:
    most = demo.NUM_ROWS[texts.__name__]

    every = list(texts(most))

    assert len(set(map(repr, every))) == most
    assert list(texts(60)) == every[:60]
    assert list(texts(0)) == []


@pytest.mark.parametrize("texts", DEMO_KINDS)
def test_more_texts_than_there_are_cannot_be_had(
    texts: Callable[[int], Sequence[object]],
) -> None:
    for wrong in (-1, demo.NUM_ROWS[texts.__name__] + 1):
        with pytest.raises(ConfigError, match="ask for less"):
            texts(wrong)


def test_every_answer_stands_where_a_story_says() -> None:
    for story in demo.stories(300):
        assert len(story.questions) == demo.STORY_QUESTIONS
        for _, answer, start in story.questions:
            assert story.text[start : start + len(answer)] == answer
