"""Checks that constructors make of their settings, so that a bad one dies at once and in words.

Not a schema: each class says for itself what it allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from xcloud.base.errors import ConfigError


def check_int(name: str, value: object, minimum: int, maximum: int | None = None) -> None:
    """Raise ConfigError unless `value` is a whole number from minimum to maximum."""
    allowed = f"a whole number >= {minimum}" if maximum is None else f"{minimum}..{maximum}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be {allowed}, got {value!r}")
    if value < minimum or (maximum is not None and value > maximum):
        raise ConfigError(f"{name} must be {allowed}, got {value}")


def check_number(
    name: str,
    value: object,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    *,
    above: bool = False,
) -> None:
    """Raise ConfigError unless `value` is a number in [minimum, maximum], or > minimum."""
    bracket = "(" if above else "["
    allowed = f"a number in {bracket}{minimum:g}, {maximum:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be {allowed}, got {value!r}")
    if not minimum <= value <= maximum or (above and value == minimum):
        raise ConfigError(f"{name} must be {allowed}, got {value}")


def check_choice(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise ConfigError unless `value` is one of `allowed`."""
    choices = list(allowed)
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(str, choices))}; got {value!r}")
