"""Published figures to show beside our rows, from experiments/published.toml, which also defines
which rows they belong to.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from xcloud.base.errors import ConfigError
from xcloud.base.project import project_root
from xcloud.sweep.points import is_unsplit
from xcloud.sweep.results import Row

FILE = Path("experiments", "published.toml")


@dataclass(frozen=True)
class Published:
    """quality: as printed there. share: of the uncompressed step time. ratio: of traffic.
    of_one_cloud: throughput across clouds. notes: remarks to show with it."""

    quality: str = ""
    share: float | None = None
    ratio: float | None = None
    of_one_cloud: float | None = None
    notes: tuple[str, ...] = ()


Where = dict[str, str | bool | list[str]]


def published_for(row: Row) -> Published | None:
    """The first matching entry; None without one, or without the file."""
    for where, found in entries(project_root() / FILE):
        if all(_fits(row, key, wanted) for key, wanted in where.items()):
            return found if found.notes else None
    return None


@cache
def entries(path: Path) -> list[tuple[Where, Published]]:
    """(conditions, figures) of the file. Raises ConfigError if it is malformed."""
    if not path.is_file():
        return []
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return [(entry.pop("where"), Published(**{
            **entry, "notes": tuple(data["notes"][name] for name in entry.get("notes", ())),
        })) for entry in data["published"]]  # fmt: skip
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a list of published figures: {error!r}") from error


def _fits(row: Row, key: str, wanted: str | bool | list[str]) -> bool:
    if key == "unsplit":
        return is_unsplit(row.settings) == wanted
    value = str(row.compression if key == "compression" else row.settings.get(key))
    options = wanted if isinstance(wanted, list) else [str(wanted)]
    return any(fnmatchcase(value, option) for option in options)
