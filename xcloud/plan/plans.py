"""A plan, the clouds that it uses, and what it was found to cost. Nothing is reckoned here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise, permutations
from typing import NamedTuple, Protocol, Self, runtime_checkable

from xcloud.cluster.layout import ClusterLayout
from xcloud.parallel.schedule import Schedule
from xcloud.parallel.strategy import Strategy

NO_COMPRESSION = "none"


class Plan(NamedTuple):
    """ends: the piece after each stage's last; one where each rank holds the whole model."""

    strategy: str
    ends: tuple[int, ...]
    schedule: Schedule
    compression: str

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Of each stage: its first piece, and the one after its last."""
        return list(pairwise((0, *self.ends)))

    @property
    def micro_batches(self) -> int:
        return self.schedule.num_micro_batches

    @property
    def schedule_label(self) -> str:
        """Without the number of micro-batches."""
        return self.schedule.label.replace(f" m={self.micro_batches}", "")

    def micro_batches_of(self, replica: int, num_replicas: int) -> int:
        """Those that a replica computes: i belongs to replica i mod num_replicas."""
        return len(range(replica, self.micro_batches, num_replicas))

    def schedule_in(self, replica: int, num_replicas: int) -> Schedule:
        """Of one of so many replicas of the pipeline."""
        if num_replicas == 1:
            return self.schedule
        return share_of(self.schedule, self.micro_batches_of(replica, num_replicas), num_replicas)


@runtime_checkable
class FreelyCut(Protocol):
    """A model of equal blocks that may be cut after any of them, so that a planner can choose.
    Its setting is `blocks_per_stage`: a count for each stage but the last."""

    def num_blocks(self, max_length: int) -> int:
        """0 where other settings say where the model is cut."""

    def block_counts(self, num_stages: int, max_length: int) -> list[int]:
        """Of each stage, as its settings say now."""

    def with_block_counts(self, counts: Sequence[int]) -> Self:
        """counts: of each stage."""


@dataclass(frozen=True)
class Priced:
    """bytes_between: that leave a cloud for another, by "a-b", mean over steps. memory: bytes of
    the fullest rank, by cloud. spent_s: seconds of the step by what they go into, largest first,
    as Prediction.critical_s; bound is the first of them. compute_s: over all ranks."""

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
    """A strategy, and the clouds as it arranges them. replicas: each with its own clouds, in one
    stage where every rank holds the whole model."""

    strategy: Strategy
    layout: ClusterLayout

    @property
    def replicas(self) -> list[ClusterLayout]:
        found = replicas_of(self.layout)
        if not self.is_whole:
            return found
        return [
            replace(one, clouds={n: replace(c, stages=(0,)) for n, c in one.clouds.items()})
            for one in found
        ]

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds the whole model."""
        clouds = self.layout.clouds.values()
        whole = self.layout.num_stages
        return all(len(c.stages or ()) == whole and not c.one_stage_per_rank for c in clouds)

    @property
    def num_stages(self) -> int:
        return 1 if self.is_whole else self.layout.num_stages


def replicas_of(layout: ClusterLayout) -> list[ClusterLayout]:
    found = []
    for number in range(layout.num_replicas):
        own = {n: replace(c, replica=0) for n, c in layout.clouds.items() if c.replica == number}
        pairs = ("-".join(pair) for pair in permutations(own, 2))
        links = {pair: layout.links[pair] for pair in pairs if pair in layout.links}
        found.append(replace(layout, clouds=own, links=links))
    return found


def variants_of(schedule: Schedule, num_stages: int, num_micro_batches: int) -> list[Schedule]:
    """What may be tried of a schedule with so many micro-batches: it alone, or what it offers."""
    same = with_micro_batches(schedule, num_micro_batches)
    found: dict[object, Schedule] = {}
    for one in same.variants(num_stages):  # some differ in name only
        ends = (one.actions(stage, num_stages) for stage in {0, num_stages - 1})
        found.setdefault(tuple(map(tuple, ends)), one)
    return list(found.values())


def with_micro_batches(schedule: Schedule, number: int) -> Schedule:
    return replace(schedule, num_micro_batches=number)  # type: ignore[type-var]


def share_of(schedule: Schedule, num_micro_batches: int, num_replicas: int) -> Schedule:
    """The part that one of several replicas of the pipeline carries out. Settings named num_in_*
    count micro-batches of all replicas."""
    names = [entry.name for entry in fields(schedule)]  # type: ignore[arg-type]
    shared = {
        name: math.ceil(number / num_replicas)
        for name in names
        if name.startswith("num_in_") and (number := getattr(schedule, name)) is not None
    }
    return replace(schedule, **shared, num_micro_batches=num_micro_batches)  # type: ignore[type-var]
