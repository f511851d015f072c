"""The words of a command line, key=value, in Hydra's grammar: read as a user means them, and
written so that they are read again as they were. Composes nothing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from functools import cache
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
    # Tried rather than looked up in a list: Hydra's grammar decides what needs quotes.
    found = read(with_home(bare))
    if found is not None and found.value() == text:
        return bare
    return f"{key}={literal(str(text))}"


def readable(word: str) -> str:
    """Return a word that was put together with a path in it, with its value quoted where it could
    not be read otherwise."""
    key, is_set, value = word.partition("=")
    found = read(with_home(word))
    # A path may have commas, which Hydra would take for several values.
    if not is_set or (found is not None and not found.is_sweep_override()):
        return word
    return f"{key}={literal(value)}"


def with_home(word: str) -> str:
    """Return an override with `~` at the start of each of its values replaced by the user's
    folder, as a shell does for a word of its own."""
    key, is_set, values = word.partition("=")
    # A value in brackets or quotes stays what it is, as in a shell.
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


def for_hydra(words: Sequence[str], is_group: Callable[[str], bool]) -> list[str]:
    """Return the words of a user in Hydra's grammar. A value may be set whether or not a chosen
    file names its key, and the last word for a key counts.

    is_group: returns True for a key that is a group of options.

    A mapping with a `_target_` replaces the value at its key. A mapping without one changes
    settings of that value. Words that choose an option, delete, or set Hydra's own keys are not
    changed. Neither are words that cannot be read.
    """
    written: list[str] = []
    chosen: dict[str, str] = {}  # by group: the word that adds an option
    for word in map(with_home, words):
        found = read(word)
        # Left as it is, so that Hydra or `unreadable` says what is wrong with it.
        if found is None or found.is_delete():
            written.append(word)
        elif sets_value(found, is_group):
            value = found.value()
            if isinstance(value, dict) and "_target_" in value:
                key = found.key_or_group
                # `++` alone would merge the mapping into the one that stands there, of another
                # class.
                written.append(f"~{key}" if is_group(key) else f"++{key}=null")
            # ++ sets a key whether or not a file has it.
            written.append(f"++{word.lstrip('+')}")
        else:
            key = found.get_key_element().lstrip("+")
            if is_group(key) and found.value() is None:
                raise HydraException(
                    f"{word}: a group takes the name of one of its options, and null is none"
                )
            # Hydra refuses to add two options to one group; here the last one counts.
            if found.is_add() and key in chosen:
                written.remove(chosen[key])
            chosen[key] = word
            written.append(word)
    return written


def groups_of(*folders: Path) -> Callable[[str], bool]:
    """Return whether a key is a group: a folder of options in one of these."""
    return lambda key: any((folder / key).is_dir() for folder in folders)


def sets_value(word: Override, is_group: Callable[[str], bool]) -> bool:
    """Return whether a word sets a value of the job, and neither chooses an option of a group nor
    changes Hydra's own settings."""
    key = word.key_or_group
    if word.package is not None or "/" in key or key.split(".")[0] == "hydra":
        return False
    return isinstance(word.value(), dict) or not is_group(key)


def unreadable(words: Sequence[str], is_sweep: bool = False) -> list[str]:
    """Return a line for each override that cannot be read: which one, its character, what to type.

    is_sweep: several values, separated by commas, are meant as such.
    """
    return [line for word in words if (line := _trouble(word, is_sweep))]


def _trouble(word: str, is_sweep: bool) -> str:
    key, is_set, value = word.partition("=")
    if not is_set and not word.startswith("~"):
        return f"{word}: expected key=value"
    found = read(with_home(word))
    several = ""
    if found is None:
        # The key alone, with a value that can be read: if that fails the value is not at fault.
        if read(with_home(f"{key}=0")) is None:
            return f"{word}: {key!r} is no name of a setting; expected key=value"
        wrong = _first_wrong(key, value)
    elif found.is_sweep_override() and not is_sweep:
        several = "several values make a sweep: add -m"
        # choice(…) and the like are functions of sweeps: nothing of them is missing quotes.
        if _SWEEPS.match(value) or "," not in value:
            return f"{word}: {several}"
        wrong = ","
        several = f"; {several}"
    else:
        return ""
    if re.fullmatch(r"[-+]?\d+,\d+(e[-+]?\d+)?", value):
        return (
            f"{word}: a number is written with a point: {key}={value.replace(',', '.')}{several}"
        )
    if value[:1] in ("[", "{"):
        what = "a list, as in '[a,b]'" if value[0] == "[" else "a mapping, as in '{a:1,b:2}'"
        return f"{word} cannot be read as {what}; look at its brackets, commas and quotes{several}"
    # The home folder is written out, since quotes keep a shell from doing it.
    typed = f"{key}={shlex.quote(literal(str(Path(value).expanduser())))}"
    said = f"{wrong!r} is not allowed in a value without quotes; for this text type"
    return f"{word}: {said} {typed}{several}"


@cache
def read(word: str) -> Override | None:
    """Return what a word says; None if it cannot be read. Reading one takes a millisecond."""
    try:
        (found,) = OverridesParser.create().parse_overrides([word])
        # Some words are parsed and have no value, which only asking for it shows.
        found.value()
    except HydraException:
        return None
    override: Override = found
    return override


def _first_wrong(key: str, value: str) -> str:
    """Return the first character with which the value can be read no more."""
    # A character that is never allowed is looked for first: it may stand behind others that are
    # only wrong where they are.
    if found := _NEVER_BARE.search(value):
        return found[0]
    for end in range(1, len(value) + 1):
        if read(with_home(f"{key}={value[:end]}")) is None:
            return value[end - 1]
    return value[-1:]
