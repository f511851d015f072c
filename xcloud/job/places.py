"""Who holds what of a job, as a checkpoint keeps it: this and the settings decide what a run with
other ranks goes on with (survive/changes.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from xcloud.cluster.layout import ClusterLayout
from xcloud.parallel.strategy import Strategy


class Place(NamedTuple):
    """Of one rank. cloud: its number. is_sharded: it holds a part of its stages."""

    cloud: int
    replica: int
    stages: Sequence[int]
    is_sharded: bool = False


@dataclass(frozen=True)
class Places:
    """Who holds what, as far as going on depends on it. column: of the table in
    survive/changes.py. merges_every: steps
    after which all replicas are equal, 0 = only at last_step. labels: of groups of settings."""

    column: str = "one-way"
    ranks: Sequence[Place] = ()
    merges_every: int = 0
    last_step: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def held(cls, layout: ClusterLayout, strategy: Strategy, last_step: int) -> Places:
        column, every, averaging = "pipeline", 1, strategy.averaging
        if layout.num_replicas > 1 and averaging is not None:
            column, every = averaging.traits.column, averaging.traits.equal_every
        clouds, places = list(layout.clouds), map(layout.placement, range(layout.num_ranks))
        ranks = [
            Place(clouds.index(p.cloud), p.replica, p.stages, layout.clouds[p.cloud].shard)
            for p in places
        ]
        return cls(column, ranks, every, last_step)

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> Places:
        """From JSON."""
        ranks = [Place(cloud, replica, tuple(stages), dealt)
                 for cloud, replica, stages, dealt in saved["ranks"]]  # fmt: skip
        return cls(**{**saved, "ranks": ranks})

    def holders(self, stage: int, replica: int) -> list[int]:
        """Ranks, in the order of their group ranks."""
        places = enumerate(self.ranks)
        return [r for r, p in places if stage in p.stages and p.replica == replica]

    def is_merged(self, step: int) -> bool:
        return step == self.last_step or (self.merges_every > 0 and step % self.merges_every == 0)

    @property
    def num_stages(self) -> int:
        return len({stage for place in self.ranks for stage in place.stages})

    @property
    def sharded_parts(self) -> set[tuple[int, int]]:
        """(stage, number of parts) of sharded stages."""
        return {
            (stage, len(self.holders(stage, place.replica)))
            for place in self.ranks if place.is_sharded for stage in place.stages
        }  # fmt: skip
