"""Objects from the tables of a JSON or YAML file, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from xcloud.base.errors import ConfigError

T = TypeVar("T")


def build(name: str, kind: type[T], table: object) -> T:
    given = table_of(name, table)
    allowed = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    for key in given:
        if key not in allowed:
            raise ConfigError(f"{name} has no key {key!r}; allowed are {', '.join(allowed)}")
    for entry in fields(kind):  # type: ignore[arg-type]
        has_default = entry.default is not MISSING or entry.default_factory is not MISSING
        if entry.name not in given and not has_default:
            raise ConfigError(f"{name}.{entry.name} is missing")
    try:
        return kind(**given)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}") from None


def table_of(name: str, table: object) -> Mapping[str, Any]:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name} must be a table of keys and values, got {table!r}")
    return table


def listed(name: str, value: object) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name} must be a list, got {value!r}")
    return list(value)
