"""Objects from the tables of a JSON or YAML file, with errors that name the key."""

from __future__ import annotations

import difflib
import json
from dataclasses import fields
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from xcloud.base.errors import ConfigError

T = TypeVar("T")


def from_table(name: str, kind: type[T], table: object) -> T:
    """table: plain containers; checked against the annotations of `kind`, a settings class."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "points"]
    key = ".".join(filter(None, [name, *where]))
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, ConfigError):  # of __post_init__
        raise raised
    if "missing" in first["type"]:
        raise ConfigError(f"{key} is missing")
    if first["type"] == "unexpected_keyword_argument":
        *inside, last = filter(None, [name, *where])
        allowed = [entry.name for entry in fields(kind)] if len(where) == 1 else []  # type: ignore[arg-type]
        raise ConfigError(unknown_key(".".join(inside) or "the file", last, allowed))
    what = first["msg"].removeprefix("Input should be ").replace("valid array", "list")
    raise ConfigError(f"{key} must be {what}, got {first['input']!r}")


def unknown_key(where: str, key: str, allowed: list[str]) -> str:
    near = difflib.get_close_matches(key, allowed, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    some = ", ".join([*allowed[:9], *(["…"] if len(allowed) > 9 else [])])
    return f"{where} has no key {key!r}{hint}" + (f"; allowed are {some}" if some else "")
