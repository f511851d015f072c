"""The words of a command line, key=value, in Hydra's grammar: read as a user means them, and
written so that they are read again as they were. Composes nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

_SWEEPS = re.compile(r"(choice|range|interval|glob|shuffle|sort|tag)\(")
_NEVER_BARE = re.compile(r"[^\w/\-\\+.$%*@?|:,\[\]{}()='\" \t]|[^\x00-\x7f]")


def literal(text: str) -> str:
    """Return the value of an override that is read as this text, whatever characters it has."""
    quoted: str = QuotedString(text=text, quote=Quote.double).with_quotes()
    return quoted


def as_override(key: str, text: object) -> str:
    """Return the word that sets a key to this text, quoted only where it must be."""
    bare = f"{key}={text}"
    read = _read(bare)
    if read is not None and read.value() == text:
        return bare
    return f"{key}={literal(str(text))}"


def readable(word: str) -> str:
    """Return a word that was put together with a path in it, with its value quoted where it could
    not be read otherwise."""
    key, is_set, value = word.partition("=")
    read = _read(word)
    if not is_set or (read is not None and not read.is_sweep_override()):
        return word
    return f"{key}={literal(value)}"


def with_home(word: str) -> str:
    """Return an override with `~` at the start of each of its values replaced by the user's
    folder, as a shell does for a word of its own."""
    key, is_set, values = word.partition("=")
    if not is_set or not re.search(r"(^|,)~(/|,|$)", values) or values[:1] in "[{'\"":
        return word
    found = [
        literal(str(Path(value).expanduser())) if re.match(r"~(/|$)", value) else value
        for value in values.split(",")
    ]
    return f"{key}={','.join(found)}"


def parsed(words: Sequence[str]) -> list[Override]:
    """Parse overrides, with the user's folder for `~`. Raises HydraException."""
    found: list[Override] = OverridesParser.create().parse_overrides([*map(with_home, words)])
    return found


def with_plus(words: Sequence[str], is_optional: Callable[[str], bool]) -> list[str]:
    """Return overrides with a + before each that sets an optional key, one that Hydra takes with a
    plus only. Raises HydraException for what cannot be read.

    is_optional: whether the class of a key's node has this setting and the config does not.
    """
    return [
        f"+{word}" if _sets(override) and is_optional(override.key_or_group) else word
        for word, override in zip(words, parsed(words), strict=True)
    ]


def _sets(override: Override) -> bool:
    """Return whether an override is written without + and ~, and for no package."""
    is_plain = not (override.is_add() or override.is_force_add() or override.is_delete())
    return is_plain and override.package is None


def unreadable(words: Sequence[str], is_sweep: bool = False) -> list[str]:
    """Return a line for each override that cannot be read: which one, its character, what to type.

    is_sweep: several values, separated by commas, are meant as such.
    """
    return [line for word in words if (line := _trouble(word, is_sweep=is_sweep))]


def _trouble(word: str, is_sweep: bool) -> str:
    key, is_set, value = word.partition("=")
    if not is_set and not word.startswith("~"):
        return f"{word}: expected key=value"
    read = _read(with_home(word))
    several = ""
    if read is None:
        if _read(f"{key}=0") is None:
            return f"{word}: {key!r} is no name of a setting; expected key=value"
        wrong = _first_wrong(key, value=value)
    elif read.is_sweep_override() and not is_sweep:
        several = "several values make a sweep: add -m"
        if _SWEEPS.match(value) or "," not in value:
            return f"{word}: {several}"
        wrong = ","
        several = f"; {several}"
    else:
        return ""
    typed = f"{key}={shlex.quote(literal(str(Path(value).expanduser())))}"
    said = f"{wrong!r} cannot stand in a value as it is; for this text type"
    return f"{word}: {said} {typed}{several}"


def _read(word: str) -> Override | None:
    try:
        (found,) = parsed([word])
        found.value()
    except HydraException:
        return None
    return found


def _first_wrong(key: str, value: str) -> str:
    """Return the first character with which the value can be read no more."""
    if found := _NEVER_BARE.search(value):
        return found[0]
    for end in range(1, len(value) + 1):
        if _read(f"{key}={value[:end]}") is None:
            return value[end - 1]
    return value[-1:]
