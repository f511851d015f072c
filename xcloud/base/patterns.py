"""Regular expressions that come with settings, which another owner may have written: those that
take time in proportion to the text, so that no pattern can stop a process.

Python's own matcher tries every way through a pattern, and no other thread runs meanwhile.
"""

from __future__ import annotations

import math
import re
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from xcloud.base.errors import ConfigError

MAX_PATTERNS = 100
# Long enough for a name of weights; what it costs grows with it.
MAX_LENGTH = 200
MAX_REPEATS = 2
MAX_WAYS = 64
"""The ways through the alternatives of a pattern, its repeats aside."""

_ONE = (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN)
_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)


def check_pattern(where: str, pattern: str) -> None:
    """Raise ConfigError for what is no regular expression, or one that may take long.

    where: the setting that it stands in.
    """
    if len(pattern) > MAX_LENGTH:
        raise ConfigError(f"{where}: a pattern has at most {MAX_LENGTH} characters")
    try:
        parts = parser.parse(pattern)
        # Compiled too, as the parser alone lets some errors pass.
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{where}: {pattern!r} is no regular expression: {error}") from error
    repeats, ways = _cost(where, pattern, parts)
    # Each repeat may try every length: two of them take time with the square of a text, which is
    # bounded, too.
    if repeats > MAX_REPEATS or ways > MAX_WAYS:
        raise ConfigError(
            f"{where}: {pattern!r} may take long: a pattern repeats at most {MAX_REPEATS} "
            f"characters (* + ? {{m,n}}) and has at most {MAX_WAYS} ways through its alternatives"
            ": write several patterns"
        )


def _cost(where: str, pattern: str, parts: Any) -> tuple[int, int]:
    """Return how many repeats and ways a part of a pattern has."""
    repeats = 0
    ways = 1
    for code, given in parts:
        if code in _ONE or code is codes.AT:
            # An anchor, or one character, is matched in one way.
            continue
        if code is codes.SUBPATTERN:
            inner = [given[-1]]
        elif code is codes.BRANCH:
            inner = given[1]
        # A repeated single character. Anything larger that is repeated can be split in
        # exponentially many ways.
        elif code in _REPEATS and len(given[2]) == 1 and given[2][0][0] in _ONE:
            repeats += 1
            continue
        else:
            raise ConfigError(
                f"{where}: {pattern!r} may take long: only single characters may be repeated, and "
                "nothing may look ahead, look back or refer to a group"
            )
        found = [_cost(where, pattern, one) for one in inner]
        # Of alternatives one is taken, so the worst of them counts; their ways add up, those in a
        # row multiply.
        repeats += max(count for count, _ in found)
        ways = math.prod([ways, sum(count for _, count in found)])
    return repeats, ways
