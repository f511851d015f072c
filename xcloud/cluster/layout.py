"""Which cloud holds which stages of a pipeline. Pure arithmetic: no torch, no network.

A stage is a part of the model; a rank is a process; a lane is a rank's position among the ranks
that hold the same stage. Micro-batch i of a stage with n ranks belongs to lane i mod n, so clouds
of unequal size (8 ranks feeding 64) need no special case.

The whole pipeline may stand several times, in other clouds each time. Of R such replicas,
micro-batch i belongs to replica i mod R, and there to lane (i // R) mod n.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from xcloud.base.checks import check_choice, check_int, check_number
from xcloud.base.errors import ConfigError
from xcloud.cluster.clouds import Layout, num_ranks_in_words


@dataclass(frozen=True)
class Cloud:
    """One cloud. Every rank holds all of the cloud's stages, or, with one_stage_per_rank, the
    ranks are dealt to the stages in order (first the ranks of the first stage).

    stages: numbers of the stages that live here; None = the cloud's own position in its replica.
    device: "auto" takes a GPU where there is one.
    slowdown: 4 = the cloud's ranks compute four times as long as this machine needs (a user's own
        weak device, emulated: they sleep after each piece of work). Compressing is not slowed.
    shard: deal parameters, gradients and moments of each stage over its ranks, so that none holds
        a stage whole while it trains (FSDP2).
    replica: number of the copy of the pipeline that this cloud is a part of.
    """

    num_ranks: int = 1
    stages: Sequence[int] | None = None
    one_stage_per_rank: bool = False
    device: str = "auto"
    slowdown: float = 1.0
    shard: bool = False
    replica: int = 0

    def __post_init__(self) -> None:
        check_int("cloud.num_ranks", self.num_ranks, 1)
        check_choice("cloud.device", self.device, ("auto", "cpu", "cuda"))
        check_choice("cloud.one_stage_per_rank", self.one_stage_per_rank, (True, False))
        check_number("cloud.slowdown", self.slowdown, 1, 1000)
        check_choice("cloud.shard", self.shard, (True, False))
        check_int("cloud.replica", self.replica, 0)
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
    replica: int = 0


@dataclass(frozen=True)
class ClusterLayout(Layout[Cloud]):
    """Clouds that hold the stages of a pipeline, each stage once in every replica."""

    def __post_init__(self) -> None:
        self._check_clouds(Cloud)
        self._check_links((a, b) for a in self.clouds for b in self.clouds if a < b)
        resolved: dict[str, Cloud] = {}
        held: dict[int, list[int]] = {}  # stages, by replica
        for name, cloud in self.clouds.items():
            position = sum(other.replica == cloud.replica for other in resolved.values())
            stages = (position,) if cloud.stages is None else tuple(cloud.stages)
            if cloud.one_stage_per_rank and cloud.num_ranks % len(stages):
                raise ConfigError(
                    f"cluster.clouds.{name}: {cloud.num_ranks} ranks cannot be dealt evenly to "
                    f"{len(stages)} stages; make num_ranks a multiple of {len(stages)}"
                )
            resolved[str(name)] = replace(cloud, stages=stages)
            held.setdefault(cloud.replica, []).extend(stages)
        object.__setattr__(self, "clouds", resolved)
        if sorted(held) != list(range(len(held))):
            raise ConfigError(
                f"cluster.clouds.*.replica must count the replicas from 0 on, got {sorted(held)}"
            )
        for number, stages_held in held.items():
            if sorted(stages_held) != list(range(len(held[0]))):
                where = f" in replica {number}" if len(held) > 1 else ""
                raise ConfigError(
                    f"cluster.clouds must hold every stage from 0 on exactly once{where}, got "
                    f"{sorted(stages_held)}"
                )

    @property
    def num_replicas(self) -> int:
        return 1 + max(cloud.replica for cloud in self.clouds.values())

    @property
    def num_stages(self) -> int:
        return sum(len(c.stages or ()) for c in self.clouds.values() if c.replica == 0)

    def placement(self, rank: int) -> Placement:
        name = self.cloud_of(rank)
        cloud, ranks = self.clouds[name], self.ranks_in(name)
        stages = tuple(cloud.stages or ())
        if cloud.one_stage_per_rank:
            per_stage = cloud.num_ranks // len(stages)
            stages = (stages[(rank - ranks[0]) // per_stage],)
        return Placement(rank, name, stages, cloud.replica)

    def ranks_of(self, stage: int, replica: int = 0) -> tuple[int, ...]:
        """Ranks that hold this stage in one replica, by lane."""
        return self._ranks_of.get((stage, replica), ())

    @cached_property
    def _ranks_of(self) -> dict[tuple[int, int], tuple[int, ...]]:
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for place in map(self.placement, range(self.num_ranks)):
            for stage in place.stages:
                found[stage, place.replica].append(place.rank)
        return {key: tuple(ranks) for key, ranks in found.items()}

    def replicas_of(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold this stage, by replica and lane: all of them train the same weights."""
        return tuple(self.ranks_of(stage, replica) for replica in range(self.num_replicas))

    def owner(self, stage: int, micro_batch: int) -> int:
        """The rank that computes this micro-batch of this stage."""
        turn, replica = divmod(micro_batch, self.num_replicas)
        ranks = self.ranks_of(stage, replica)
        return ranks[turn % len(ranks)]

    def turn(self, stage: int, rank: int) -> tuple[int, int]:
        """(first, period): of this stage, micro-batches first, first + period, ... are computed
        by `rank`, which holds it."""
        replica = self.placement(rank).replica
        ranks = self.ranks_of(stage, replica)
        return replica + self.num_replicas * ranks.index(rank), self.num_replicas * len(ranks)

    def stage_cloud(self, stage: int, replica: int = 0) -> str:
        return self.cloud_of(self.ranks_of(stage, replica)[0])

    def leaves_cloud(self, stage: int) -> bool:
        """Whether the boundary after `stage` joins two clouds in any replica."""
        return any(
            self.stage_cloud(stage, replica) != self.stage_cloud(stage + 1, replica)
            for replica in range(self.num_replicas)
        )

    @property
    def lanes_in_step(self) -> int:
        """Micro-batches must come in multiples of this, where ranks compute in step."""
        dealt = [
            len(self.ranks_of(stage, cloud.replica))
            for cloud in self.clouds.values()
            for stage in cloud.stages or ()
            if cloud.shard
        ]
        return math.lcm(*dealt)

    def lane_period(self, stage: int) -> int:
        """Micro-batches i and i + lane_period meet the same lanes on both sides of the boundary
        after `stage`."""
        both = (*self.replicas_of(stage), *self.replicas_of(stage + 1))
        return self.num_replicas * math.lcm(*(len(ranks) for ranks in both))

    def leader_of(self, replica: int = 0) -> tuple[int, ...]:
        """Lane 0 of every stage of a replica, by stage."""
        return tuple(self.ranks_of(stage, replica)[0] for stage in range(self.num_stages))

    def leaders(self, replica: int = 0) -> tuple[int, ...]:
        """Lane 0 of every stage of a replica: the ranks that speak for their stages across clouds.
        The first of them is that of the replica's first cloud."""
        return tuple(sorted({*self.leader_of(replica)}))

    def min_micro_batches(self) -> int:
        """Fewer micro-batches than this leave a rank without work."""
        return max(
            (len(ranks) - 1) * self.num_replicas + replica + 1
            for stage in range(self.num_stages)
            for replica, ranks in enumerate(self.replicas_of(stage))
        )

    @property
    def _described(self) -> str:
        return ", ".join(
            f"{name}: {num_ranks_in_words(cloud.num_ranks)}, "
            f"stage{'s' * (len(cloud.stages or ()) > 1)} {'+'.join(map(str, cloud.stages or ()))}"
            + (f" of replica {cloud.replica}" if self.num_replicas > 1 else "")
            + (f", {cloud.slowdown:g}x slower" if cloud.slowdown > 1 else "")
            + (", dealt over its ranks" if cloud.shard else "")
            for name, cloud in self.clouds.items()
        )
