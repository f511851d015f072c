"""Spanish word forms: verbs, plurals, agreement, numbers. Forms only: no meaning, no English.

The six persons are numbered 0..5: yo, tú, él, nosotros, vosotros, ellos.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

Six = tuple[str, str, str, str, str, str]

STEM_CHANGES = {
    "ie": "pensar cerrar empezar despertar sentar recomendar entender perder querer encender "
    "defender preferir sentir mentir divertir calentar comenzar tropezar tener venir regar "
    "temblar",
    "ue": "contar encontrar recordar mostrar probar volar soñar costar acostar poder volver mover "
    "resolver devolver dormir morir jugar doler llover almorzar colgar morder",
    "i": "pedir servir repetir seguir perseguir conseguir elegir vestir medir despedir corregir "
    "decir",
}
CHANGE_OF = {verb: change for change, verbs in STEM_CHANGES.items() for verb in verbs.split()}
ACCENTED = "enviar esquiar confiar vaciar fotografiar"  # envío, not envio
IRREGULAR_YO = {
    "tener": "tengo", "venir": "vengo", "poner": "pongo", "hacer": "hago", "decir": "digo",
    "traer": "traigo", "salir": "salgo", "caer": "caigo", "saber": "sé",
    "dar": "doy", "ver": "veo",
}  # fmt: skip
IRREGULAR_PRESENT: dict[str, Six] = {
    "ser": ("soy", "eres", "es", "somos", "sois", "son"),
    "estar": ("estoy", "estás", "está", "estamos", "estáis", "están"),
    "ir": ("voy", "vas", "va", "vamos", "vais", "van"),
    "haber": ("he", "has", "ha", "hemos", "habéis", "han"),
    "dar": ("doy", "das", "da", "damos", "dais", "dan"),
    "ver": ("veo", "ves", "ve", "vemos", "veis", "ven"),
}
STRONG_PRETERITE = {
    "tener": "tuv", "estar": "estuv", "poder": "pud", "poner": "pus", "saber": "sup",
    "querer": "quis", "venir": "vin", "hacer": "hic", "decir": "dij", "traer": "traj",
    "conducir": "conduj", "traducir": "traduj", "haber": "hub",
}  # fmt: skip
IRREGULAR_PRETERITE: dict[str, Six] = {
    "ser": ("fui", "fuiste", "fue", "fuimos", "fuisteis", "fueron"),
    "ir": ("fui", "fuiste", "fue", "fuimos", "fuisteis", "fueron"),
    "dar": ("di", "diste", "dio", "dimos", "disteis", "dieron"),
    "ver": ("vi", "viste", "vio", "vimos", "visteis", "vieron"),
}
IRREGULAR_IMPERFECT = {"ser": "er", "ir": "ib", "ver": "veí"}
FUTURE_STEM = {
    "tener": "tendr", "venir": "vendr", "poner": "pondr", "salir": "saldr", "poder": "podr",
    "querer": "querr", "saber": "sabr", "hacer": "har", "decir": "dir", "haber": "habr",
}  # fmt: skip
IRREGULAR_SUBJUNCTIVE: dict[str, Six] = {
    "ser": ("sea", "seas", "sea", "seamos", "seáis", "sean"),
    "estar": ("esté", "estés", "esté", "estemos", "estéis", "estén"),
    "ir": ("vaya", "vayas", "vaya", "vayamos", "vayáis", "vayan"),
    "haber": ("haya", "hayas", "haya", "hayamos", "hayáis", "hayan"),
    "dar": ("dé", "des", "dé", "demos", "deis", "den"),
    "saber": ("sepa", "sepas", "sepa", "sepamos", "sepáis", "sepan"),
}
IMPERATIVE = {
    "ser": "sé", "hacer": "haz", "decir": "di", "poner": "pon", "salir": "sal", "tener": "ten",
    "venir": "ven", "ir": "ve",
}  # fmt: skip
IRREGULAR_PARTICIPLE = {
    "hacer": "hecho", "decir": "dicho", "ver": "visto", "poner": "puesto", "escribir": "escrito",
    "abrir": "abierto", "romper": "roto", "volver": "vuelto", "devolver": "devuelto",
    "morir": "muerto", "cubrir": "cubierto", "descubrir": "descubierto", "resolver": "resuelto",
}  # fmt: skip
IRREGULAR_GERUND = {"ir": "yendo", "poder": "pudiendo", "venir": "viniendo"}
ACUTE = str.maketrans("aeiou", "áéíóú")
PLAIN = str.maketrans("áéíóú", "aeiou")


@dataclass(frozen=True, eq=False)
class Paradigm:
    """All forms of one verb that the grammar uses. `tenses`: name -> six persons."""

    infinitive: str
    gerund: str
    participle: str
    imperative: str
    tenses: dict[str, Six]


@cache
def conjugate(infinitive: str) -> Paradigm:
    """conjugate("pedir").tenses["preterite"][2] == "pidió". Reflexive "se" is not part of it."""
    stem, kind = infinitive[:-2], infinitive[-2:].translate(PLAIN)
    preterite = _preterite(infinitive, stem, kind)
    present = _present(infinitive, stem, kind)
    future = FUTURE_STEM.get(infinitive, infinitive)
    past_stem = preterite[5].removesuffix("ron")
    if infinitive in IRREGULAR_IMPERFECT:
        imperfect = _imperfect_of(IRREGULAR_IMPERFECT[infinitive])
    elif kind == "ar":
        imperfect = _six(stem, "aba abas aba ábamos abais aban")
    else:
        imperfect = _six(stem, "ía ías ía íamos íais ían")
    return Paradigm(
        infinitive,
        _gerund(infinitive, stem, kind),
        _participle(infinitive, stem, kind),
        IMPERATIVE.get(infinitive, present[2]),
        {
            "present": present,
            "preterite": preterite,
            "imperfect": imperfect,
            "future": _six(future, "é ás á emos éis án"),
            "conditional": _six(future, "ía ías ía íamos íais ían"),
            "subjunctive": _subjunctive(infinitive, stem, kind, present),
            "past_subjunctive": (
                past_stem + "ra", past_stem + "ras", past_stem + "ra",
                past_stem[:-1] + past_stem[-1].translate(ACUTE) + "ramos",
                past_stem + "rais", past_stem + "ran",
            ),
        },
    )  # fmt: skip


def _six(stem: str, endings: str) -> Six:
    a, b, c, d, e, f = endings.split()
    return stem + a, stem + b, stem + c, stem + d, stem + e, stem + f


def _imperfect_of(stem: str) -> Six:
    if stem == "er":
        return "era", "eras", "era", "éramos", "erais", "eran"
    if stem == "ib":
        return "iba", "ibas", "iba", "íbamos", "ibais", "iban"
    return _six("ve", "ía ías ía íamos íais ían")


def _stressed(infinitive: str, stem: str) -> str:
    """The stem as it is under stress: pens -> piens, cont -> cuent, ped -> pid, envi -> enví."""
    if infinitive in ACCENTED.split():
        return stem[:-1] + stem[-1].translate(ACUTE)
    change = CHANGE_OF.get(infinitive)
    if change is None:
        return stem
    vowel = "u" if infinitive == "jugar" else "o" if change == "ue" else "e"
    head, _, tail = stem.rpartition(vowel)
    return head + change + tail


def _raised(infinitive: str, stem: str, kind: str) -> str:
    """-ir verbs that change their stem raise it elsewhere too: durmió, pidiendo, sintamos."""
    change = CHANGE_OF.get(infinitive)
    if kind != "ir" or change is None:
        return stem
    vowel, raised = ("o", "u") if change == "ue" else ("e", "i")
    head, _, tail = stem.rpartition(vowel)
    return head + raised + tail


def _spelled(stem: str, ending: str, kind: str) -> str:
    """Keep the sound of the stem's last consonant in front of this ending: busc+é -> busqué."""
    if kind == "ar" and ending[0] in "eé":
        for old, new in (("gu", "gü"), ("c", "qu"), ("g", "gu"), ("z", "c")):
            if stem.endswith(old):
                return stem[: -len(old)] + new + ending
    if kind != "ar" and ending[0] in "aoá":
        if stem.endswith("gu"):
            return stem[:-1] + ending
        if stem.endswith("g"):
            return stem[:-1] + "j" + ending
        if stem.endswith("c"):
            return stem[:-1] + ("zc" if stem[-2] in "aeiouú" else "z") + ending
    return stem + ending


def _adds_y(stem: str, kind: str) -> bool:
    return kind == "ir" and stem.endswith("u") and not stem.endswith(("gu", "qu"))


def _present(infinitive: str, stem: str, kind: str) -> Six:
    if infinitive in IRREGULAR_PRESENT:
        return IRREGULAR_PRESENT[infinitive]
    strong = _stressed(infinitive, stem)
    if _adds_y(stem, kind):
        strong += "y"
    endings = {
        "ar": "o as a amos áis an",
        "er": "o es e emos éis en",
        "ir": "o es e imos ís en",
    }[kind].split()
    forms = [_spelled(strong, ending, kind) for ending in endings]
    forms[3], forms[4] = stem + endings[3], stem + endings[4]
    forms[0] = IRREGULAR_YO.get(infinitive, forms[0])
    a, b, c, d, e, f = forms
    return a, b, c, d, e, f


def _preterite(infinitive: str, stem: str, kind: str) -> Six:
    if infinitive in IRREGULAR_PRETERITE:
        return IRREGULAR_PRETERITE[infinitive]
    if infinitive in STRONG_PRETERITE:
        strong = STRONG_PRETERITE[infinitive]
        they = "eron" if strong.endswith("j") else "ieron"
        forms = _six(strong, f"e iste o imos isteis {they}")
        return forms if infinitive != "hacer" else (*forms[:2], "hizo", *forms[3:])
    if kind == "ar":
        forms = _six(stem, "é aste ó amos asteis aron")
        return (_spelled(stem, "é", kind), *forms[1:])
    if stem[-1] in "aeo":
        return _six(stem, "í íste yó ímos ísteis yeron")
    if _adds_y(stem, kind):
        return _six(stem, "í iste yó imos isteis yeron")
    raised = _raised(infinitive, stem, kind)
    forms = _six(stem, "í iste ió imos isteis ieron")
    return forms[0], forms[1], raised + "ió", forms[3], forms[4], raised + "ieron"


def _subjunctive(infinitive: str, stem: str, kind: str, present: Six) -> Six:
    if infinitive in IRREGULAR_SUBJUNCTIVE:
        return IRREGULAR_SUBJUNCTIVE[infinitive]
    endings = ("e es e emos éis en" if kind == "ar" else "a as a amos áis an").split()
    if infinitive in IRREGULAR_YO or (kind != "ar" and infinitive not in CHANGE_OF):
        a, b, c, d, e, f = (present[0][:-1] + ending for ending in endings)
        return a, b, c, d, e, f
    strong, weak = _stressed(infinitive, stem), _raised(infinitive, stem, kind)
    stems = (strong, strong, strong, weak, weak, strong)
    a, b, c, d, e, f = (_spelled(s, end, kind) for s, end in zip(stems, endings, strict=True))
    return a, b, c, d, e, f


def _gerund(infinitive: str, stem: str, kind: str) -> str:
    if infinitive in IRREGULAR_GERUND:
        return IRREGULAR_GERUND[infinitive]
    if kind == "ar":
        return stem + "ando"
    if stem[-1] in "aeo" or _adds_y(stem, kind):
        return stem + "yendo"
    return _raised(infinitive, stem, kind) + "iendo"


def _participle(infinitive: str, stem: str, kind: str) -> str:
    if infinitive in IRREGULAR_PARTICIPLE:
        return IRREGULAR_PARTICIPLE[infinitive]
    if kind == "ar":
        return stem + "ado"
    return stem + ("ído" if stem[-1:] in ("a", "e", "o") else "ido")


IRREGULAR_PLURAL = {
    "joven": "jóvenes", "examen": "exámenes", "imagen": "imágenes", "paraguas": "paraguas",
    "lunes": "lunes", "cumpleaños": "cumpleaños",
}  # fmt: skip


def plural(word: str) -> str:
    """libro -> libros, luz -> luces, jardín -> jardines; only the first of several words."""
    first, space, others = word.partition(" ")
    if first in IRREGULAR_PLURAL:
        return IRREGULAR_PLURAL[first] + space + others
    if first[-1] in "aeiouáéó":
        first += "s"
    elif first[-1] == "z":
        first = first[:-1] + "ces"
    else:
        if first[-1] in "ns" and first[-2] in "áéíóú" and len(first) > 3:
            first = first[:-2] + first[-2].translate(PLAIN) + first[-1]
        first += "es"
    return first + space + others


def agree(adjective: str, gender: str, is_plural: bool) -> str:
    """The adjective, given as masculine singular, for this gender and number."""
    if gender == "f":
        if adjective.endswith("o"):
            adjective = adjective[:-1] + "a"
        elif adjective.endswith(("dor", "ñol")):
            adjective += "a"
        elif adjective.endswith(("és", "ón", "án", "ín")) and adjective != "marrón":
            adjective = adjective[:-2] + adjective[-2].translate(PLAIN) + adjective[-1] + "a"
    return plural(adjective) if is_plural else adjective


def the(gender: str, is_plural: bool) -> str:
    return ("las" if is_plural else "la") if gender == "f" else "los" if is_plural else "el"


UNITS = (
    "cero un dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince "
    "dieciséis diecisiete dieciocho diecinueve veinte veintiún veintidós veintitrés veinticuatro "
    "veinticinco veintiséis veintisiete veintiocho veintinueve"
).split()
TENS = "treinta cuarenta cincuenta sesenta setenta ochenta noventa".split()
HUNDREDS = (
    "ciento doscientos trescientos cuatrocientos quinientos seiscientos setecientos ochocientos "
    "novecientos"
).split()


def number(value: int, gender: str = "m") -> str:
    """1..999 in words, as they stand before a noun: veintiún libros, doscientas casas."""
    if value == 100:
        return "cien"
    if value > 100:
        hundreds = HUNDREDS[value // 100 - 1]
        if gender == "f" and value >= 200:
            hundreds = hundreds[:-2] + "as"
        return f"{hundreds} {number(value % 100, gender)}" if value % 100 else hundreds
    if value >= 30:
        tens, unit = TENS[value // 10 - 3], value % 10
        return f"{tens} y {number(unit, gender)}" if unit else tens
    word = UNITS[value]
    if gender == "f" and value % 10 == 1 and value != 11:
        word = word.replace("ún", "un") + "a"
    return word


def finish(words: Sequence[str], end: str = ".") -> str:
    """Join, contract (a el -> al), choose e for y, capitalise, punctuate."""
    text = " ".join(word for word in words if word)
    text = text.replace(" ,", ",")
    text = re.sub(r"\ba el (?=[a-záéíóúñ])", "al ", text)
    text = re.sub(r"\bde el (?=[a-záéíóúñ])", "del ", text)
    text = re.sub(r"\by (?=[iIíÍ](?![eao])|[Hh][ií](?!e))", "e ", text)
    text = text[0].upper() + text[1:]
    if end in "?!":
        return ("¿" if end == "?" else "¡") + text + end
    return text + end
