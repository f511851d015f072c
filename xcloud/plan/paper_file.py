"""A file that describes clouds, lines between them, prices and a model, for plans on paper. Takes
plain containers; reads no files.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import permutations
from typing import Any

from xcloud.base.checks import check_choice, check_int, check_number
from xcloud.base.errors import ConfigError
from xcloud.cluster.link_profile import LinkProfile
from xcloud.plan.from_tables import build, table_of
from xcloud.plan.paper_model import Decoder, Speed
from xcloud.plan.profile import Profile

STRATEGIES = ("pipeline", "data_parallel", "hybrid", "local_updates")
COMPRESSORS = ("none", "fp16_int8", "int8", "int4_int8", "int4")
ALL = "*"
KEYS = ("clouds", "links", "inside", "prices", "model", "batch_size", "codecs", "search")
MOST_CLOUDS = 64


@dataclass(frozen=True)
class PaperCloud:
    """slowdown: how many times longer its ranks compute than the model says. memory_gb: of a rank;
    null = enough."""

    ranks: int = 1
    slowdown: float = 1.0
    memory_gb: float | None = None

    def __post_init__(self) -> None:
        check_int("clouds: ranks", self.ranks, 1)
        check_number("clouds: slowdown", self.slowdown, 1.0, 1000.0)
        if self.memory_gb is not None:
            check_number("clouds: memory_gb", self.memory_gb, 0.0, above=True)


@dataclass(frozen=True)
class Prices:
    """In any currency. rank_hour: by cloud. egress_per_gb: by pair, else by the cloud it leaves,
    else "*"; a GB is 10^9 bytes."""

    rank_hour: Mapping[str, float] = field(default_factory=dict)
    egress_per_gb: Mapping[str, float] = field(default_factory=dict)

    def hour_of(self, cloud: str) -> float:
        return self.rank_hour.get(cloud, self.rank_hour.get(ALL, 0.0))

    def egress_of(self, here: str, there: str) -> float:
        found = (self.egress_per_gb.get(name) for name in (f"{here}-{there}", here, ALL))
        return next((price for price in found if price is not None), 0.0)


@dataclass(frozen=True)
class Search:
    """What is tried. stages_inside: stages that each cloud holds, dealt over its ranks; null =
    powers of two that every cloud can deal its ranks to. replicas:
    of hybrid; null = every number that the clouds can be dealt to. every: of local updates.
    micro_batches: null = as many as leave no rank without work, and multiples."""

    strategies: Sequence[str] = STRATEGIES
    compressors: Sequence[str] = COMPRESSORS
    stages_inside: Sequence[int] | None = None
    replicas: Sequence[int] | None = None
    every: Sequence[int] = (50,)
    micro_batches: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is None and entry.default is None:
                continue
            if not isinstance(value, list | tuple) or not value:
                raise ConfigError(f"search.{entry.name} must be a list, got {value!r}")
            for one in value:
                if entry.name == "strategies":
                    check_choice("search.strategies", one, STRATEGIES)
                elif entry.name != "compressors":
                    check_int(f"search.{entry.name}", one, 1)


@dataclass(frozen=True)
class Paper:
    """A file, read. model: None where the profile came with it. inside: by cloud."""

    clouds: Mapping[str, PaperCloud]
    lines: Mapping[str, LinkProfile]
    prices: Prices
    model: Decoder | None
    profile_file: str | None
    batch_size: int
    codecs: Mapping[str, Speed]
    search: Search

    @property
    def num_ranks(self) -> int:
        return sum(cloud.ranks for cloud in self.clouds.values())


def paper_from(table: object) -> Paper:
    """From plain containers. Raises ConfigError naming the key."""
    given = _known("the file", table, KEYS)
    for key in ("clouds", "model", "batch_size"):
        if key not in given:
            raise ConfigError(f"{key} is missing; `python -m xcloud plan --help` shows a file")
    clouds = _clouds(given["clouds"])
    pairs = [f"{a}-{b}" for a, b in permutations(clouds, 2)]
    if len(clouds) > 1 and not given.get("links"):
        raise ConfigError('links is missing: give "*", or each pair of clouds as a-b')
    links = _by_name("links", given.get("links", {}), pairs)
    inside = _by_name("inside", given.get("inside", {}), list(clouds))
    lines = {
        f"{name}-{name}": _line(f"inside.{key}", inside[key])
        for name in clouds
        for key in [name if name in inside else ALL]
        if key in inside
    }
    for a, b in permutations(clouds, 2):
        key = next((k for k in (f"{a}-{b}", f"{b}-{a}", ALL) if k in links), "")
        if not key:
            raise ConfigError(f'links has neither {a}-{b} nor "*"')
        lines[f"{a}-{b}"] = _line(f"links.{key}", links[key])
    check_int("batch_size", given["batch_size"], 1)
    model = dict(table_of("model", given["model"]))
    profile_file = model.pop("profile", None)
    if profile_file is not None and model:
        raise ConfigError(
            f"model.profile says all of the model; leave {', '.join(model)} out, or profile"
        )
    return Paper(
        clouds,
        lines,
        _prices(given.get("prices", {}), list(clouds), pairs),
        None if profile_file is not None else build("model", Decoder, model),
        profile_file,
        given["batch_size"],
        {
            name: build(f"codecs.{name}", Speed, entry)
            for name, entry in table_of("codecs", given.get("codecs", {})).items()
        },
        build("search", Search, given.get("search", {})),
    )


def with_lines(paper: Paper, profile: Profile) -> Profile:
    """A profile that was read from a file, over the lines of the paper. Raises ConfigError."""
    missing = [name for name in paper.search.compressors if name not in profile.compressors]
    if len(missing) == len(paper.search.compressors):
        raise ConfigError(
            f"search.compressors: model.profile has {', '.join(profile.compressors)}, and none of "
            f"{', '.join(missing)}"
        )
    if not profile.tokens_per_sample:
        raise ConfigError("model.profile: tokens_per_sample is missing, for costs per token")
    return replace(profile, lines=dict(paper.lines))


def _known(where: str, table: object, allowed: Sequence[str]) -> Mapping[str, Any]:
    given = table_of(where, table)
    for key in given:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ";"
            raise ConfigError(f"{where} has no key {key!r}{hint} allowed are {', '.join(allowed)}")
    return given


def _by_name(where: str, table: object, names: Sequence[str]) -> Mapping[str, Any]:
    """Entries for some of `names`, or "*"."""
    given = table_of(where, table)
    for key in given:
        if key != ALL and key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            some = ", ".join([*names[:4], *(["…"] if len(names) > 4 else [])]) or "none here"
            raise ConfigError(f'{where} has no key {key!r}{hint}; allowed are "*" and {some}')
    return given


def _clouds(table: object) -> dict[str, PaperCloud]:
    given = table_of("clouds", table)
    shared, found = table_of("clouds.*", given.get(ALL) or {}), dict[str, PaperCloud]()
    for name, entry in given.items():
        if name != ALL:
            own = {**shared, **table_of(f"clouds.{name}", entry or {})}
            found[str(name)] = build(f"clouds.{name}", PaperCloud, own)
    if not 1 <= len(found) <= MOST_CLOUDS:
        raise ConfigError(f"clouds must name 1 to {MOST_CLOUDS} clouds, got {len(found)}")
    return found


def _line(name: str, table: object) -> LinkProfile:
    found = build(name, LinkProfile, table)
    if not found.trace and not found.outages and not found.outage_every_s:
        return found
    raise ConfigError(f"{name}: on paper a line has one bandwidth; leave trace and outages out")


def _prices(table: object, clouds: Sequence[str], pairs: Sequence[str]) -> Prices:
    found = build("prices", Prices, table)
    _by_name("prices.rank_hour", found.rank_hour, clouds)
    _by_name("prices.egress_per_gb", found.egress_per_gb, [*clouds, *pairs])
    for entry in fields(Prices):
        for key, price in getattr(found, entry.name).items():
            check_number(f"prices.{entry.name}.{key}", price, 0.0)
    return found
