"""TableCosts as JSON, so that costs can be planned with that one cannot measure here.

The keys are those of TableCosts and of what it holds; ranks in `slowdown` are strings, as JSON
wants it. A line is {"profile": {...} or null, "per_message_s": ..., "window": ...}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from xcloud.cluster.link_profile import LinkProfile
from xcloud.errors import ConfigError
from xcloud.plan.costs import Direction, TableCosts, Update
from xcloud.plan.line import Line

T = TypeVar("T")


def write_costs(path: Path, costs: TableCosts) -> None:
    path.write_text(json.dumps(asdict(costs), indent=2) + "\n", encoding="utf-8")


def read_costs(path: Path) -> TableCosts:
    """Raises ConfigError, naming the file, for anything that is not such a table."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    try:
        return costs_from(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def costs_from(table: object) -> TableCosts:
    given = dict(table_of("costs", table))
    for name, kind in (("forward", Direction), ("backward", Direction), ("updates", Update)):
        if name in given:
            entries = listed(name, given[name])
            given[name] = [build(f"{name}[{i}]", kind, e) for i, e in enumerate(entries)]
    for name in ("forward_s", "backward_s", "weights_s"):
        if name in given:
            given[name] = listed(name, given[name])
    if "slowdown" in given:
        slowdown = table_of("slowdown", given["slowdown"])
        for rank in slowdown:
            if not str(rank).isdecimal():
                raise ConfigError(f"costs.slowdown names ranks by number, got {rank!r}")
        given["slowdown"] = {int(rank): factor for rank, factor in slowdown.items()}
    if "lines" in given:
        given["lines"] = {
            name: _line(f"lines.{name}", line)
            for name, line in table_of("lines", given["lines"]).items()
        }
    return build("costs", TableCosts, given)


def _line(name: str, table: object) -> Line:
    given = dict(table_of(name, table))
    if given.get("profile") is not None:
        given["profile"] = build(f"{name}.profile", LinkProfile, given["profile"])
    return build(name, Line, given)


def build(name: str, kind: type[T], table: object) -> T:
    given = table_of(name, table)
    allowed = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    for key in given:
        if key not in allowed:
            raise ConfigError(f"{name} has no key {key!r}; allowed are {', '.join(allowed)}")
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
