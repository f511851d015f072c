"""Which cloud has how many ranks and holds which stages. Pure arithmetic: no torch, no network.

A stage is a part of the model; a rank is a process; a lane is a rank's position among the ranks
that hold the same stage. Micro-batch i of a stage with n ranks belongs to lane i mod n, so clouds
of unequal size (8 ranks feeding 64) need no special case.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from xcloud.checks import check_choice, check_int, check_number
from xcloud.cluster.link_profile import LinkProfile
from xcloud.cluster.liveness import Liveness
from xcloud.cluster.window import BUDGET_BYTES
from xcloud.errors import ConfigError

Wan = LinkProfile | Literal["real", "free"]


@dataclass(frozen=True)
class Cloud:
    """One cloud. Every rank holds all of the cloud's stages, or, with one_stage_per_rank, the
    ranks are dealt to the stages in order (first the ranks of the first stage).

    stages: numbers of the stages that live here; None = the cloud's own position in the layout.
    device: "auto" takes a GPU where there is one.
    slowdown: 4 = the cloud's ranks compute four times as long as this machine needs (a user's own
        weak device, emulated: they sleep after each piece of work). Compressing is not slowed.
    """

    num_ranks: int = 1
    stages: Sequence[int] | None = None
    one_stage_per_rank: bool = False
    device: str = "auto"
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        check_int("cloud.num_ranks", self.num_ranks, 1)
        check_choice("cloud.device", self.device, ("auto", "cpu", "cuda"))
        check_choice("cloud.one_stage_per_rank", self.one_stage_per_rank, (True, False))
        check_number("cloud.slowdown", self.slowdown, 1, 1000)
        if self.stages is not None:
            if not isinstance(self.stages, list | tuple) or not self.stages:
                raise ConfigError(
                    f"cloud.stages must be a list of stage numbers, got {self.stages!r}"
                )
            for stage in self.stages:
                check_int("cloud.stages", stage, 0)
            object.__setattr__(self, "stages", tuple(self.stages))


@dataclass(frozen=True)
class Placement:
    """Where one rank stands."""

    rank: int
    cloud: str
    stages: tuple[int, ...]


@dataclass(frozen=True)
class ClusterLayout:
    """All clouds of a run, and what joins them.

    wan: LinkProfile = an emulated link between every pair of clouds; "real" = leave the network
        alone; "free" = no limit (messages are still framed, compressed and counted).
    links: a LinkProfile for a pair of clouds that differs, by the name "a-b" or "b-a".
    liveness: when a rank that is silent outside a training step counts as lost.
    link_budget_bytes: what the posted receives of one direction between two ranks may fill, and
        the queue at each of its ends. Three receives, and room in the queues for all micro-batches
        that the schedule has in flight, there always are.
    """

    clouds: Mapping[str, Cloud]
    wan: Wan = "real"
    links: Mapping[str, Wan] = field(default_factory=dict)
    name: str = "cluster"
    liveness: Liveness = field(default_factory=Liveness)
    link_budget_bytes: int = BUDGET_BYTES

    def __post_init__(self) -> None:
        check_int("cluster.link_budget_bytes", self.link_budget_bytes, 1)
        if not isinstance(self.clouds, Mapping) or not self.clouds:
            raise ConfigError("cluster.clouds must name at least one cloud")
        resolved = {}
        for position, (name, cloud) in enumerate(self.clouds.items()):
            if not isinstance(cloud, Cloud):
                raise ConfigError(f"cluster.clouds.{name} must be a Cloud, got {cloud!r}")
            stages = (position,) if cloud.stages is None else tuple(cloud.stages)
            if cloud.one_stage_per_rank and cloud.num_ranks % len(stages):
                raise ConfigError(
                    f"cluster.clouds.{name}: {cloud.num_ranks} ranks cannot be dealt evenly to "
                    f"{len(stages)} stages; make num_ranks a multiple of {len(stages)}"
                )
            resolved[str(name)] = replace(cloud, stages=stages)
        object.__setattr__(self, "clouds", resolved)
        held = [stage for cloud in resolved.values() for stage in cloud.stages or ()]
        if sorted(held) != list(range(len(held))):
            raise ConfigError(
                f"cluster.clouds must hold every stage from 0 on exactly once, got {sorted(held)}"
            )
        for key, wan in {
            "wan": self.wan,
            **{f"links.{k}": v for k, v in self.links.items()},
        }.items():
            if not isinstance(wan, LinkProfile) and wan not in ("real", "free"):
                raise ConfigError(
                    f"cluster.{key} must be 'real', 'free' or a link profile, got {wan!r}; a "
                    f"profile of conf/cluster/wan is chosen with a slash: cluster/wan={wan}"
                )
        for key in self.links:
            if not any(
                key in (f"{a}-{b}", f"{b}-{a}") for a in resolved for b in resolved if a < b
            ):
                raise ConfigError(
                    f"cluster.links.{key}: name a pair of clouds as 'a-b'; the clouds are "
                    f"{', '.join(resolved)}"
                )

    @property
    def num_ranks(self) -> int:
        return sum(cloud.num_ranks for cloud in self.clouds.values())

    @property
    def num_stages(self) -> int:
        return sum(len(cloud.stages or ()) for cloud in self.clouds.values())

    def placement(self, rank: int) -> Placement:
        first = 0
        for name, cloud in self.clouds.items():
            if rank < first + cloud.num_ranks:
                stages = tuple(cloud.stages or ())
                if cloud.one_stage_per_rank:
                    per_stage = cloud.num_ranks // len(stages)
                    stages = (stages[(rank - first) // per_stage],)
                return Placement(rank, name, stages)
            first += cloud.num_ranks
        raise ConfigError(f"rank {rank} is not in this layout of {self.num_ranks} ranks")

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """Ranks that hold this stage, by lane."""
        return tuple(r for r in range(self.num_ranks) if stage in self.placement(r).stages)

    def owner(self, stage: int, micro_batch: int) -> int:
        """The rank that computes this micro-batch of this stage."""
        ranks = self.ranks_of(stage)
        return ranks[micro_batch % len(ranks)]

    def stage_cloud(self, stage: int) -> str:
        return self.placement(self.ranks_of(stage)[0]).cloud

    def lane_period(self, stage: int) -> int:
        """Micro-batches i and i + lane_period meet the same lanes on both sides of the border
        after `stage`."""
        return math.lcm(len(self.ranks_of(stage)), len(self.ranks_of(stage + 1)))

    @property
    def leaders(self) -> tuple[int, ...]:
        """Lane 0 of every stage: the ranks that speak for their stages across clouds."""
        return tuple(sorted({self.ranks_of(stage)[0] for stage in range(self.num_stages)}))

    def wan_between(self, rank: int, peer: int) -> Wan | None:
        """What joins two ranks; None if they are in one cloud."""
        here, there = self.placement(rank).cloud, self.placement(peer).cloud
        if here == there:
            return None
        return self.links.get(f"{here}-{there}", self.links.get(f"{there}-{here}", self.wan))

    @property
    def crosses_clouds(self) -> bool:
        return len(self.clouds) > 1

    def min_micro_batches(self) -> int:
        """Fewer micro-batches than this leave a rank without work."""
        return max(len(self.ranks_of(stage)) for stage in range(self.num_stages))

    def describe(self) -> str:
        clouds = ", ".join(
            f"{name}: {cloud.num_ranks} rank{'s' * (cloud.num_ranks > 1)}, "
            f"stage{'s' * (len(cloud.stages or ()) > 1)} {'+'.join(map(str, cloud.stages or ()))}"
            + (f", {cloud.slowdown:g}x slower" if cloud.slowdown > 1 else "")
            for name, cloud in self.clouds.items()
        )
        if not self.crosses_clouds:
            return f"one cloud ({clouds}), no link between clouds"
        return f"{len(self.clouds)} clouds ({clouds}), link: {self.describe_link()}"

    def describe_link(self) -> str:
        if not self.crosses_clouds:
            return "none"
        if isinstance(self.wan, LinkProfile):
            return f"emulated {self.wan.describe()}"
        return {"real": "the network as it is", "free": "no limit"}[self.wan]

    def overdue_s(self, rank: int, peer: int, num_bytes: int) -> float:
        """How long `rank` waits for `num_bytes` from `peer` before calling it silent."""
        wan = self.wan_between(rank, peer)
        return wan.overdue_s(num_bytes) if isinstance(wan, LinkProfile) else 300.0

    def overdue_advice(self, rank: int, peer: int) -> str:
        """For whoever found `peer` silent: which setting makes `rank` wait longer, if one does."""
        if not isinstance(self.wan_between(rank, peer), LinkProfile):
            return ""
        return "To wait longer raise cluster.wan.timeout_s or cluster.wan.timeout_factor."
