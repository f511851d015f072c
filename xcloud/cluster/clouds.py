"""What every layout has: clouds by name, their ranks numbered through, and what joins them.
Pure arithmetic: no torch, no network. Which rank does what is the concrete layout's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, Literal, Protocol, TypeVar

from xcloud.base.checks import check_int
from xcloud.base.errors import ConfigError
from xcloud.cluster.link_profile import BUDGET_BYTES, LinkProfile
from xcloud.cluster.liveness import Liveness

Wan = LinkProfile | Literal["real", "free"]


class AnyCloud(Protocol):
    """device: "auto", "cpu" or "cuda"."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def device(self) -> str: ...


class AnyPlacement(Protocol):
    """Where one rank stands."""

    @property
    def rank(self) -> int: ...

    @property
    def cloud(self) -> str: ...


CloudT = TypeVar("CloudT", bound=AnyCloud, covariant=True)


@dataclass(frozen=True)
class Layout(Generic[CloudT]):
    """All clouds of a run, and what joins them.

    wan: LinkProfile = an emulated link between every pair of clouds; "real" = leave the network
        alone; "free" = no limit (messages are still framed, compressed and counted).
    links: a LinkProfile for a pair of clouds that differs, by the name "a-b" or "b-a".
    liveness: when a rank that is silent outside a training step counts as lost.
    link_budget_bytes: what the posted receives of one direction between two ranks may fill, and
        the queue at each of its ends. Three receives, and room in the queues for all micro-batches
        that the schedule has in flight, there always are.
    """

    clouds: Mapping[str, CloudT]
    wan: Wan = "real"
    links: Mapping[str, Wan] = field(default_factory=dict)
    name: str = "cluster"
    liveness: Liveness = field(default_factory=Liveness)
    link_budget_bytes: int = BUDGET_BYTES

    def _check_clouds(self, kind: type) -> None:
        check_int("cluster.link_budget_bytes", self.link_budget_bytes, 1)
        if not isinstance(self.liveness, Liveness):
            raise ConfigError(f"cluster.liveness must be a Liveness, got {self.liveness!r}")
        if not isinstance(self.clouds, Mapping) or not self.clouds:
            raise ConfigError("cluster.clouds must name at least one cloud")
        for name, cloud in self.clouds.items():
            if not isinstance(cloud, kind):
                raise ConfigError(
                    f"cluster.clouds.{name} must be a {kind.__name__}, got {cloud!r}"
                )
            if "/" in str(name) or not str(name).isprintable():
                raise ConfigError(
                    f"cluster.clouds: files are named after a cloud, and {name!r} cannot be in "
                    "their names; leave out '/' and control characters"
                )

    def _check_links(self, pairs: Iterable[tuple[str, str]]) -> None:
        """pairs: of clouds between which there is a link."""
        links = {f"links.{key}": link for key, link in self.links.items()}
        for key, wan in {"wan": self.wan, **links}.items():
            if not isinstance(wan, LinkProfile) and wan not in ("real", "free"):
                raise ConfigError(
                    f"cluster.{key} must be 'real', 'free' or a link profile, got {wan!r}; a "
                    f"profile of conf/cluster/wan is chosen with a slash: cluster/wan={wan}"
                )
        named = {frozenset((f"{a}-{b}", f"{b}-{a}")): f"{a}-{b}" for a, b in pairs}
        for key in self.links:
            if not any(key in names for names in named):
                raise ConfigError(
                    f"cluster.links.{key}: name a pair of clouds, one of "
                    f"{', '.join(sorted(named.values())) or 'none here'}"
                )

    @property
    def num_ranks(self) -> int:
        return sum(cloud.num_ranks for cloud in self.clouds.values())

    @property
    def num_processes(self) -> int:
        """That hold the ranks: one each, or one for all of them."""
        return self.num_ranks

    @cached_property
    def _ranks_in(self) -> dict[str, tuple[int, ...]]:
        found, first = dict[str, tuple[int, ...]](), 0
        for name, cloud in self.clouds.items():
            found[name] = tuple(range(first, first + cloud.num_ranks))
            first += cloud.num_ranks
        return found

    @cached_property
    def _cloud_of(self) -> list[str]:
        return [name for name, ranks in self._ranks_in.items() for _ in ranks]

    @property
    def ranks_meet_in_the_end(self) -> bool:
        """No rank may be lost on the way, so that all take part in what the end asks for."""
        return True

    @property
    def crosses_clouds(self) -> bool:
        return len(self.clouds) > 1

    def ranks_in(self, cloud: str) -> tuple[int, ...]:
        if cloud not in self._ranks_in:
            raise ConfigError(f"there is no cloud {cloud!r} among {', '.join(self.clouds)}")
        return self._ranks_in[cloud]

    def cloud_of(self, rank: int) -> str:
        if not 0 <= rank < self.num_ranks:
            raise ConfigError(f"rank {rank} is not in this layout of {self.num_ranks} ranks")
        return self._cloud_of[rank]

    def placement(self, rank: int) -> AnyPlacement:
        raise NotImplementedError

    def wan_between(self, rank: int, peer: int) -> Wan | None:
        """What joins two ranks; None if they are in one cloud."""
        here, there = self.cloud_of(rank), self.cloud_of(peer)
        if here == there or not self.crosses_clouds:
            return None
        return self.links.get(f"{here}-{there}", self.links.get(f"{there}-{here}", self.wan))

    def overdue_s(self, rank: int, peer: int, num_bytes: int) -> float:
        """How long `rank` waits for `num_bytes` from `peer` before calling it silent."""
        wan = self.wan_between(rank, peer)
        if isinstance(wan, LinkProfile):
            return wan.overdue_s(num_bytes)
        return self.liveness.overdue_after_s

    def overdue_advice(self, rank: int, peer: int) -> str:
        """For whoever found `peer` silent: which setting makes `rank` wait longer, if one does."""
        if not isinstance(self.wan_between(rank, peer), LinkProfile):
            return "To wait longer raise cluster.liveness.overdue_after_s or lost_after_s."
        return "To wait longer raise cluster.wan.timeout_s or cluster.wan.timeout_factor."

    def describe(self) -> str:
        if not self.crosses_clouds:
            return f"one cloud ({self._described}), no link between clouds"
        return f"{len(self.clouds)} clouds ({self._described}), link: {self.describe_link()}"

    @property
    def _described(self) -> str:
        """The clouds and what each does."""
        raise NotImplementedError

    def describe_link(self) -> str:
        if not self.crosses_clouds:
            return "none"
        own = [f"{pair} {_describe(link)}" for pair, link in self.links.items()]
        return "; ".join([_describe(self.wan), *own])


def num_ranks_in_words(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


def _describe(wan: Wan) -> str:
    if isinstance(wan, LinkProfile):
        return f"emulated {wan.describe()}"
    return {"real": "the network as it is", "free": "no limit"}[wan]
