"""Which clouds feed which in a one-way job. Pure arithmetic: no torch, no network.

A producer is a cloud that feeds, the consumer the one that is fed. Ranks are numbered through the
consumer first, then the producers in order: rank 0 keeps the record of the run, and no producer's
end may take it away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from xcloud.checks import check_choice, check_int, check_number
from xcloud.cluster.layout import Wan
from xcloud.cluster.link_profile import LinkProfile
from xcloud.cluster.liveness import Liveness
from xcloud.cluster.window import BUDGET_BYTES
from xcloud.errors import ConfigError


@dataclass(frozen=True)
class OneWayCloud:
    """share: how much of the consumer's batches comes from here, in proportion to the shares of
    the other producers; None makes this cloud the consumer. device: "auto" takes a GPU where
    there is one.
    """

    num_ranks: int = 1
    share: float | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        check_int("cloud.num_ranks", self.num_ranks, 1)
        check_choice("cloud.device", self.device, ("auto", "cpu", "cuda"))
        if self.share is not None:
            check_number("cloud.share", self.share, 0.0, above=True)


@dataclass(frozen=True)
class OneWayPlacement:
    """Where one rank stands. producer: number of its cloud among the producers; None in the
    consumer. lane: its position among the ranks of its cloud."""

    rank: int
    cloud: str
    producer: int | None
    lane: int
    num_lanes: int


@dataclass(frozen=True)
class OneWayLayout:
    """All clouds of a one-way job, and what joins them.

    wan, links, liveness, link_budget_bytes: as in ClusterLayout.
    form: clouds = each in its own place, joined by `wan`; one_cloud = the same ranks and the same
        work on a free link; local = one process does everything in turn (a rank for each cloud).
    """

    clouds: Mapping[str, OneWayCloud]
    wan: Wan = "real"
    links: Mapping[str, Wan] = field(default_factory=dict)
    form: Literal["clouds", "one_cloud", "local"] = "clouds"
    name: str = "feed"
    liveness: Liveness = field(default_factory=Liveness)
    link_budget_bytes: int = BUDGET_BYTES

    def __post_init__(self) -> None:
        check_int("cluster.link_budget_bytes", self.link_budget_bytes, 1)
        check_choice("cluster.form", self.form, ("clouds", "one_cloud", "local"))
        if not isinstance(self.clouds, Mapping) or not self.clouds:
            raise ConfigError("cluster.clouds must name the clouds of the job")
        for name, cloud in self.clouds.items():
            if not isinstance(cloud, OneWayCloud):
                raise ConfigError(f"cluster.clouds.{name} must be a OneWayCloud, got {cloud!r}")
        consumers = [name for name, cloud in self.clouds.items() if cloud.share is None]
        if len(consumers) != 1:
            raise ConfigError(
                "cluster.clouds must have exactly one cloud that is fed (share: null); got "
                f"{', '.join(consumers) or 'none'} of {', '.join(self.clouds)}"
            )
        if len(self.clouds) == 1:
            raise ConfigError("cluster.clouds has no cloud that feeds: give one a share above 0")
        if self.form == "local" and self.num_processes_asked != len(self.clouds):
            raise ConfigError(
                "cluster.form=local does the work of one rank of each cloud; set num_ranks of "
                "every cloud to 1, or take cluster.form=one_cloud"
            )
        ordered = {consumers[0]: self.clouds[consumers[0]], **self.clouds}
        object.__setattr__(self, "clouds", ordered)
        for key, wan in {
            "wan": self.wan,
            **{f"links.{key}": link for key, link in self.links.items()},
        }.items():
            if not isinstance(wan, LinkProfile) and wan not in ("real", "free"):
                raise ConfigError(
                    f"cluster.{key} must be 'real', 'free' or a link profile, got {wan!r}; a "
                    f"profile of conf/cluster/wan is chosen with a slash: cluster/wan={wan}"
                )
        pairs = {f"{name}-{consumers[0]}" for name in self.producers}
        for key in self.links:
            if key not in pairs | {f"{consumers[0]}-{name}" for name in self.producers}:
                raise ConfigError(
                    f"cluster.links.{key}: name a producer and the consumer as one of "
                    f"{', '.join(sorted(pairs))}"
                )

    @property
    def num_processes_asked(self) -> int:
        return sum(cloud.num_ranks for cloud in self.clouds.values())

    @property
    def num_ranks(self) -> int:
        return 1 if self.form == "local" else self.num_processes_asked

    @property
    def consumer(self) -> str:
        return next(iter(self.clouds))

    @property
    def producers(self) -> tuple[str, ...]:
        return tuple(name for name, cloud in self.clouds.items() if cloud.share is not None)

    @property
    def shares(self) -> tuple[float, ...]:
        """Of each producer; they add up to 1."""
        shares = [self.clouds[name].share or 0.0 for name in self.producers]
        return tuple(share / sum(shares) for share in shares)

    @property
    def num_consumers(self) -> int:
        """Ranks of the consumer, which are the first ranks of the job."""
        return self.clouds[self.consumer].num_ranks

    @property
    def num_lanes(self) -> tuple[int, ...]:
        """Ranks of each producer."""
        return tuple(self.clouds[name].num_ranks for name in self.producers)

    def ranks_of(self, cloud: str) -> tuple[int, ...]:
        first = 0
        for name, found in self.clouds.items():
            if name == cloud:
                return tuple(range(first, first + found.num_ranks))
            first += found.num_ranks
        raise ConfigError(f"there is no cloud {cloud!r} among {', '.join(self.clouds)}")

    def placement(self, rank: int) -> OneWayPlacement:
        if 0 <= rank < self.num_ranks:
            for name, cloud in self.clouds.items():
                ranks = self.ranks_of(name)
                if rank in ranks:
                    index = None if cloud.share is None else self.producers.index(name)
                    return OneWayPlacement(rank, name, index, ranks.index(rank), len(ranks))
        raise ConfigError(f"rank {rank} is not in this layout of {self.num_ranks} ranks")

    @property
    def crosses_clouds(self) -> bool:
        return self.form == "clouds"

    def wan_between(self, rank: int, peer: int) -> Wan | None:
        """What joins two ranks; None if they are in one cloud."""
        here, there = self.placement(rank).cloud, self.placement(peer).cloud
        if here == there or not self.crosses_clouds:
            return None
        return self.links.get(f"{here}-{there}", self.links.get(f"{there}-{here}", self.wan))

    def describe(self) -> str:
        feeding = ", ".join(
            f"{name} ({_ranks(self.clouds[name].num_ranks)}, {100 * share:.0f} %)"
            for name, share in zip(self.producers, self.shares, strict=True)
        )
        clouds = f"{feeding} feed {self.consumer} ({_ranks(self.num_consumers)})"
        if self.form == "local":
            return f"one process ({clouds})"
        if self.form == "one_cloud":
            return f"one cloud ({clouds}), no link between clouds"
        return f"{len(self.clouds)} clouds ({clouds}), link: {self.describe_link()}"

    def describe_link(self) -> str:
        if not self.crosses_clouds:
            return "none"
        own = [f"{pair} {_describe(link)}" for pair, link in self.links.items()]
        return "; ".join([_describe(self.wan), *own])


def _describe(wan: Wan) -> str:
    if isinstance(wan, LinkProfile):
        return f"emulated {wan.describe()}"
    return {"real": "the network as it is", "free": "no limit"}[wan]


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"
