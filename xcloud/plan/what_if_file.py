"""A file that describes clouds, lines between them, prices and a model, for a what-if plan. Takes
plain containers; reads no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from itertools import permutations
from typing import Annotated, Any, Literal

from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Positive, settings
from xcloud.cluster.link_profile import LinkProfile
from xcloud.plan.decoder import Decoder, Speed
from xcloud.plan.profile import Number, Profile
from xcloud.plan.tables import from_table, unknown_key

StrategyName = Literal["pipeline", "data_parallel", "hybrid", "local_updates"]
COMPRESSORS = ("none", "fp16_int8", "int8", "int4_int8", "int4")
ALL = "*"
MOST_CLOUDS = 64


@settings("clouds")
class WhatIfCloud:
    """slowdown: how many times longer its ranks compute than the model says. memory_gb: of a rank;
    null = enough."""

    ranks: Positive = 1
    slowdown: Annotated[float, Field(ge=1.0, le=1000.0)] = 1.0
    memory_gb: Annotated[float, Field(gt=0.0)] | None = None


@settings("prices")
class Prices:
    """In any currency. rank_hour: by cloud. egress_per_gb: by pair, else by the cloud it leaves,
    else "*"; a GB is 10^9 bytes."""

    rank_hour: Mapping[str, Number] = field(default_factory=dict)
    egress_per_gb: Mapping[str, Number] = field(default_factory=dict)

    def hour_of(self, cloud: str) -> float:
        return self.rank_hour.get(cloud, self.rank_hour.get(ALL, 0.0))

    def egress_of(self, here: str, there: str) -> float:
        found = (self.egress_per_gb.get(name) for name in (f"{here}-{there}", here, ALL))
        return next((price for price in found if price is not None), 0.0)


Counts = Annotated[Sequence[Positive], Field(min_length=1)]


@settings("search")
class Search:
    """What is tried. stages_inside: stages that each cloud holds, one for each part of its ranks;
    null = powers of two that divide every cloud's ranks. replicas: of hybrid; null = every divisor
    of the number of clouds. every: of local updates. micro_batches: null = as many as leave no
    rank without work, and multiples."""

    strategies: Annotated[Sequence[StrategyName], Field(min_length=1)] = (
        "pipeline", "data_parallel", "hybrid", "local_updates"
    )  # fmt: skip
    compressors: Annotated[Sequence[str], Field(min_length=1)] = COMPRESSORS
    stages_inside: Counts | None = None
    replicas: Counts | None = None
    every: Counts = (50,)
    micro_batches: Counts | None = None


@settings()
class WhatIf:
    """A file, read. model: None where a profile came with it. links: by pair of clouds, or "*";
    inside: by cloud, or "*"."""

    clouds: Annotated[Mapping[str, WhatIfCloud], Field(min_length=1, max_length=MOST_CLOUDS)]
    batch_size: Positive
    model: Decoder | None = None
    profile: str | None = None
    links: Mapping[str, LinkProfile] = field(default_factory=dict)
    inside: Mapping[str, LinkProfile] = field(default_factory=dict)
    prices: Prices = field(default_factory=Prices)
    codecs: Mapping[str, Speed] = field(default_factory=dict)
    search: Search = field(default_factory=Search)

    def __post_init__(self) -> None:
        clouds = list(self.clouds)
        pairs = [f"{a}-{b}" for a, b in permutations(clouds, 2)]
        if pairs and not self.links:
            raise ConfigError('links is missing: give "*", or each pair of clouds as a-b')
        prices = self.prices
        for where, given, names in (
            ("links", self.links, pairs),
            ("inside", self.inside, clouds),
            ("prices.rank_hour", prices.rank_hour, clouds),
            ("prices.egress_per_gb", prices.egress_per_gb, [*clouds, *pairs]),
        ):
            for key in given:
                if key not in (ALL, *names):
                    raise ConfigError(unknown_key(where, key, [ALL, *names]))
        for where, lines in (("links", self.links), ("inside", self.inside)):
            for key, line in lines.items():
                if line.trace or line.outages or line.outage_every_s:
                    raise ConfigError(
                        f"{where}.{key}: a what-if plan has one bandwidth for a line; leave trace "
                        "and outages out"
                    )
        _ = self.lines  # each pair has one

    @property
    def num_ranks(self) -> int:
        return sum(cloud.ranks for cloud in self.clouds.values())

    @property
    def lines(self) -> dict[str, LinkProfile]:
        """By "a-b", and inside a cloud by "a-a"."""
        found = {}
        for name in self.clouds:
            if inside := self.inside.get(name, self.inside.get(ALL)):
                found[f"{name}-{name}"] = inside
        for a, b in permutations(self.clouds, 2):
            keys = (f"{a}-{b}", f"{b}-{a}", ALL)
            line = next((self.links[key] for key in keys if key in self.links), None)
            if line is None:
                raise ConfigError(f'links has neither {a}-{b} nor "*"')
            found[f"{a}-{b}"] = line
        return found


def what_if_from(table: Any) -> WhatIf:
    """From plain containers. Raises ConfigError naming the key."""
    given = dict(table) if isinstance(table, Mapping) else {"clouds": table}
    if "model" not in given:
        raise ConfigError("model is missing; `python -m xcloud plan --help` shows a file")
    if isinstance(clouds := given.get("clouds"), Mapping):
        shared = clouds.get(ALL) or {}
        given["clouds"] = {n: {**shared, **(c or {})} for n, c in clouds.items() if n != ALL}
    if isinstance(model := given["model"], Mapping) and "profile" in model:
        if len(model) > 1:
            others = ", ".join(key for key in model if key != "profile")
            raise ConfigError(
                f"model.profile says all of the model; leave {others} out, or profile"
            )
        given |= {"model": None, "profile": model["profile"]}
    return from_table("", WhatIf, given)


def with_lines(what_if: WhatIf, profile: Profile) -> Profile:
    """A profile that was read from a file, over the lines given here. Raises ConfigError."""
    asked = what_if.search.compressors
    missing = [name for name in asked if name not in profile.compressors]
    if len(missing) == len(asked):
        raise ConfigError(
            f"search.compressors: model.profile has {', '.join(profile.compressors)}, and none of "
            f"{', '.join(missing)}"
        )
    if not profile.tokens_per_sample:
        raise ConfigError("model.profile: tokens_per_sample is missing, for costs per token")
    return replace(profile, lines=what_if.lines)
