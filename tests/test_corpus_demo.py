"""The embedded corpus: correct forms, English that follows from the Spanish, disjoint splits."""

from __future__ import annotations

import hashlib
import re

import pytest

from xcloud.errors import ConfigError
from xcloud.tasks.corpus.demo import english, spanish
from xcloud.tasks.corpus.demo.phrases import ADJECTIVES, CITIES, NOUNS, Dice
from xcloud.tasks.corpus.demo.verbs import VERBS
from xcloud.tasks.corpus.demo_grammar import KINDS, DemoGrammar, demo_pairs

BOTH = frozenset({"es", "en"})


def test_splits_share_no_sentence_on_either_side() -> None:
    corpus = DemoGrammar(num_pairs=3000, num_dev=300, num_test=300).read("es", "en", BOTH)
    assert {split: rows.num_rows for split, rows in corpus.splits.items()} == {
        "train": 2400,
        "dev": 300,
        "test": 300,
    }
    for language in BOTH:
        sides = [set(rows.texts[language]) for rows in corpus.splits.values()]
        assert sum(map(len, sides)) == len(set().union(*sides)) == 3000


def test_same_seed_gives_the_same_pairs_on_every_machine() -> None:
    # A change of the grammar changes every number measured on it: do that on purpose.
    text = "\n".join(f"{es}\t{en}" for es, en in demo_pairs(300, seed=7))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "df01815d20f06de1"
    assert demo_pairs(50, seed=8) != demo_pairs(50, seed=7)


def test_a_smaller_corpus_is_the_start_of_a_larger_one() -> None:
    assert demo_pairs(100, seed=7) == demo_pairs(300, seed=7)[:100]


def test_english_follows_from_spanish_and_sentences_are_whole() -> None:
    dice, seen = Dice(5), dict[str, str]()
    for _ in range(20_000):
        es, en = dice.weighted(KINDS)(dice)
        assert seen.setdefault(es, en) == en
        for text in (es, en):
            assert not re.search(r"\s\s|[_~|/\n]| [,.?!]|None", text), text
            assert text[-1] in ".?!" and (text[0].isupper() or text[0] in "¿¡"), text
        assert not re.search(r"\b(a|de) el [a-záéíóúñ]", es), es
        assert not re.search(r"\by [iIÍ][^aeo]", es), es
        assert not re.search(r"\b[Aa] [aeio]", en), en


def test_vocabulary_is_a_few_thousand_forms_and_lengths_are_bounded() -> None:
    pairs = demo_pairs(20_000, seed=7)
    forms = [{w for p in pairs for w in re.findall(r"\w+", p[i].lower())} for i in (0, 1)]
    assert len(forms[0]) > 5000
    assert len(forms[1]) > 2000
    lengths = [len(side.split()) for pair in pairs for side in pair]
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


def test_only_the_visible_side_is_given() -> None:
    corpus = DemoGrammar(num_pairs=100, num_dev=10, num_test=10)
    seen = corpus.read("es", "en", frozenset({"es"}))
    assert all(set(rows.texts) == {"es"} for rows in seen.splits.values())
    assert corpus.read("es", "en", frozenset()).agreed == seen.agreed


@pytest.mark.parametrize(
    "settings", [{"num_pairs": 10}, {"num_dev": 0}, {"num_pairs": 10**7}, {"num_pairs": 2.5}]
)
def test_nonsense_is_refused_when_built(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"task\.num_"):
        DemoGrammar(**settings)


def test_other_languages_are_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"es and en only.*task\.path"):
        DemoGrammar().read("de", "en", BOTH)
