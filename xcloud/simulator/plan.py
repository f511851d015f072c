"""A plan, the clouds that it runs on, and what it was found to cost. Simulates nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from typing import NamedTuple

from xcloud.job.strategy import Strategy
from xcloud.layout import ClusterLayout
from xcloud.pipeline.schedule import Schedule

NO_COMPRESSION = "none"


class Plan(NamedTuple):
    """A way to run a job: how it is cut, scheduled and compressed, and how clouds are used.

    ends: the piece after each stage's last; one where each rank holds the whole model.
    """

    strategy: str
    ends: tuple[int, ...]
    schedule: Schedule
    compression: str

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The first piece of each stage, and the one after its last."""
        return list(pairwise((0, *self.ends)))

    @property
    def micro_batches(self) -> int:
        return self.schedule.num_micro_batches

    @property
    def schedule_label(self) -> str:
        """The schedule's label without the number of micro-batches."""
        return self.schedule.label.replace(f" m={self.micro_batches}", "")

    def micro_batches_of(self, replica: int, num_replicas: int) -> int:
        """Return how many micro-batches a replica computes.

        Micro-batch i belongs to replica i mod num_replicas.
        """
        return len(range(replica, self.micro_batches, num_replicas))

    def schedule_in(self, replica: int, num_replicas: int, num_lanes: int) -> Schedule:
        """Return the schedule of one of so many replicas of the pipeline.

        Settings named num_in_* count micro-batches of all replicas, which have num_lanes lanes
        together.
        """
        fitted = self.schedule.for_lanes(len(self.ends), num_lanes)
        shared = {
            name: math.ceil(number / num_replicas)
            for name, number in vars(fitted).items()
            if name.startswith("num_in_") and number is not None
        }
        own = self.micro_batches_of(replica, num_replicas)
        return replace(fitted, **shared, num_micro_batches=own)  # type: ignore[type-var]


@dataclass(frozen=True)
class Priced:
    """A plan and what a step of it costs.

    step_s: the seconds of a step.
    bytes_between: the bytes that leave a cloud for another, by "a-b"; the mean over steps.
    memory: the bytes of the fullest rank, by cloud.
    spent_s: the seconds of the step by what they are spent on, largest first, as in
        Prediction.critical_s; `bound` is the first of them.
    compute_s: the seconds of computing, summed over all ranks.
    """

    plan: Plan
    step_s: float
    bubble_ratio: float
    bytes_between: Mapping[str, float]
    memory: Mapping[str, int]
    spent_s: Mapping[str, float]
    compute_s: float

    @property
    def bytes_per_step(self) -> float:
        return sum(self.bytes_between.values())

    @property
    def bound(self) -> str:
        return next(iter(self.spent_s), "nothing")


@dataclass(frozen=True)
class Arranged:
    """A strategy, and the clouds as it arranges them."""

    strategy: Strategy
    layout: ClusterLayout

    @property
    def replicas(self) -> list[ClusterLayout]:
        """The layouts of the replicas, each with its own clouds.

        Where every rank holds the whole model they have one stage.
        """
        layouts = replicas_of(self.layout)
        if not self.is_whole:
            return layouts
        return [
            replace(one, clouds={n: replace(c, stages=(0,)) for n, c in one.clouds.items()})
            for one in layouts
        ]

    @property
    def is_whole(self) -> bool:
        """True where every rank holds the whole model."""
        clouds = self.layout.clouds.values()
        whole = self.layout.num_stages
        return all(len(c.stages or ()) == whole and not c.one_stage_per_rank for c in clouds)

    @property
    def num_stages(self) -> int:
        return 1 if self.is_whole else self.layout.num_stages

    @property
    def slowness(self) -> list[float]:
        """The factors, by stage, by which its ranks together take longer for the same work."""
        layout = self.replicas[0]
        clouds = (layout.clouds[layout.stage_cloud(s)] for s in range(self.num_stages))
        return [cloud.slowdown / len(layout.ranks_of(s)) for s, cloud in enumerate(clouds)]


def replicas_of(layout: ClusterLayout) -> list[ClusterLayout]:
    """Return the layout of each replica, with its own clouds and the links between them."""
    layouts = []
    for number in range(layout.num_replicas):
        own = {n: replace(c, replica=0) for n, c in layout.clouds.items() if c.replica == number}
        pairs = ("-".join(pair) for pair in permutations(own, 2))
        links = {pair: layout.links[pair] for pair in pairs if pair in layout.links}
        layouts.append(replace(layout, clouds=own, links=links))
    return layouts
