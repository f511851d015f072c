"""A plan, the clouds that it uses and what it was found to cost; the settings of `plan`, what is
searched with what profile, and of `autopilot`, what a run may change while it goes on. Plans
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, permutations
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.settings import NotNegative, Positive, ReadPath, settings
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Phased, Selectable
from xcloud.job.strategy import Strategy
from xcloud.layout import ClusterLayout
from xcloud.pipeline.one_forward_one_backward import most_kept
from xcloud.pipeline.schedule import Action, Schedule

NO_COMPRESSION = "none"
DIMENSIONS = ("split", "micro_batches", "schedule", "compression", "strategy")
MOST_USUAL = 128  # micro-batches, where none are given


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

    def schedule_in(self, replica: int, num_replicas: int, num_lanes: int) -> Schedule:
        """Return the schedule of one of so many replicas of the pipeline. Settings named num_in_*
        count micro-batches of all, which have num_lanes lanes together."""
        fitted = self.schedule.for_lanes(len(self.ends), num_lanes)
        shared = {
            name: math.ceil(number / num_replicas)
            for name, number in vars(fitted).items()
            if name.startswith("num_in_") and number is not None
        }
        own = self.micro_batches_of(replica, num_replicas)
        return replace(fitted, **shared, num_micro_batches=own)  # type: ignore[type-var]


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

    @property
    def slowness(self) -> list[float]:
        """By stage: how many times longer its ranks together compute the same work."""
        layout = self.replicas[0]
        clouds = (layout.clouds[layout.stage_cloud(s)] for s in range(self.num_stages))
        return [cloud.slowdown / len(layout.ranks_of(s)) for s, cloud in enumerate(clouds)]


def replicas_of(layout: ClusterLayout) -> list[ClusterLayout]:
    found = []
    for number in range(layout.num_replicas):
        own = {n: replace(c, replica=0) for n, c in layout.clouds.items() if c.replica == number}
        pairs = ("-".join(pair) for pair in permutations(own, 2))
        links = {pair: layout.links[pair] for pair in pairs if pair in layout.links}
        found.append(replace(layout, clouds=own, links=links))
    return found


def variants_of(
    schedule: Schedule, num_stages: int, num_micro_batches: int, num_lanes: int = 1
) -> list[Schedule]:
    """Return what may be tried of a schedule with so many micro-batches: it alone, or what it
    offers."""
    same = with_micro_batches(schedule, num_micro_batches)
    found: dict[object, Schedule] = {}
    for one in same.variants(num_stages, num_lanes):  # some differ in name only
        fitted = one.for_lanes(num_stages, num_lanes)
        ends = (fitted.actions(stage, num_stages) for stage in {0, num_stages - 1})
        found.setdefault(tuple(map(tuple, ends)), one)
    return list(found.values())


def with_micro_batches(schedule: Schedule, number: int) -> Schedule:
    return replace(schedule, num_micro_batches=number)  # type: ignore[type-var]


@settings("plan")
class Planning:
    """mode: show = print the ranked plans, run nothing; apply = run the best one.
    search: what may differ from the settings of the job; the rest stays as the job has it.
        compression and most strategies touch the quality of what is learned.
    compressors, strategies, schedules: candidates by name, beside the job's own.
    micro_batches: counts to try; null = powers of two and three times these, at most 128.
    profile: a file to plan with; null = make a trial run here, or take one made before.
    trial_steps: about so many updates of the trial run.
    rows: plans in the table.
    """

    mode: Literal["show", "apply"] = "show"
    search: Sequence[Literal["split", "micro_batches", "schedule", "compression", "strategy"]] = (
        DIMENSIONS  # type: ignore[assignment]
    )
    compressors: Mapping[str, Compression | Phased] = field(default_factory=dict)
    strategies: Mapping[str, Strategy] = field(default_factory=dict)
    schedules: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: Annotated[Sequence[Positive], Field(min_length=1)] | None = None
    profile: ReadPath | None = None
    trial_steps: Positive = 80
    rows: Positive = 10

    def counts(self, batch_size: int, own: int) -> list[int]:
        """Numbers of micro-batches to try. batch_size: samples of one pass. Raises ConfigError."""
        if "micro_batches" not in self.search:
            return [own]
        given = self.micro_batches
        if given is None:
            usual = sorted(k * 2**n for n in range(8) for k in (1, 3))
            given = [m for m in usual if m <= min(batch_size, MOST_USUAL)]
        elif (most := max(given)) > batch_size:
            raise ConfigError(
                f"plan.micro_batches has {most}, and a pass has {batch_size} samples "
                "(training.batch_size / training.accumulate_steps); leave it out"
            )
        return sorted({*given, own})


@settings("autopilot")
class Autopilot:
    """choices: by name, besides the run's own compression. micro_batches, in_flight: numbers
    besides the schedule's own (num_micro_batches, num_in_flight). every: updates between looks.
    worth: a switch needs a choice that is predicted to be so many times faster; confirm: in so
    many looks in a row, or in fewer that promise more (Rule); dwell: and so many updates after
    the last switch."""

    choices: Mapping[str, Compression]
    micro_batches: Sequence[Positive] = ()
    in_flight: Sequence[Positive] = ()
    every: Positive = 2
    worth: Annotated[float, Field(gt=1.0)] = 1.05
    confirm: Positive = 4
    dwell: Positive = 10

    def __post_init__(self) -> None:
        if not (self.choices or self.micro_batches or self.in_flight):
            raise ConfigError(
                "autopilot.choices, micro_batches and in_flight are empty, so there would be "
                "nothing to choose"
            )

    def around(self, own: object) -> Selectable:
        """The run's own compression and the choices, without those that are equal."""
        if isinstance(own, Selectable):  # of a copy of the experiment
            return own
        if not isinstance(own, Compression):
            raise ConfigError(
                "autopilot chooses one compression for all boundaries, and the run's own changes "
                "with boundary or phase; choose a plain one (compression=none), or autopilot=off"
            )
        found = {own.label: own}
        for choice in self.choices.values():
            found.setdefault(choice.label, choice)
        return Selectable(found)

    def schedules(self, own: Schedule, num_stages: int, num_lanes: int = 1) -> list[Schedule]:
        """Return the run's own and those with the other numbers, but none that keeps the
        activations of more samples at once than the run's number of micro-batches does with the
        most in flight. Raises ConfigError for a number that no schedule can have."""
        if not self.micro_batches and not self.in_flight:
            return [own]
        if self.in_flight and not hasattr(own, "num_in_flight"):
            raise ConfigError(
                f"autopilot.in_flight is {list(self.in_flight)}, but {own.label} has no "
                "num_in_flight: choose schedule=one_forward_one_backward or zero_bubble, or leave "
                "it empty"
            )

        def order(schedule: Schedule, stage: int) -> list[Action]:
            return schedule.for_lanes(num_stages, num_lanes).actions(stage, num_stages)

        def share(schedule: Schedule) -> float:
            """Return the share of a pass's samples whose activations the fullest stage keeps."""
            m = schedule.num_micro_batches
            orders = [order(schedule, stage) for stage in range(num_stages)]
            return max(most_kept(order, 1, 1 / m, 1 / m) for order in orders)

        given: Any = own
        flights = [own, *(replace(given, num_in_flight=number) for number in self.in_flight)]
        allowed = max(share(schedule) for schedule in flights) + 1e-9
        found: dict[tuple[object, ...], Schedule] = {}
        for m in (own.num_micro_batches, *self.micro_batches):
            every = (replace(flight, num_micro_batches=m) for flight in flights)
            fitting = [schedule for schedule in every if share(schedule) <= allowed]
            if not fitting:
                raise ConfigError(
                    f"autopilot.micro_batches: {m} of {own.label} would keep the activations of "
                    "more samples at once than the run does now; leave it out, or allow fewer at "
                    "once (autopilot.in_flight)"
                )
            for schedule in fitting:
                found.setdefault(tuple(order(schedule, 0)), schedule)
        return list(found.values())


@settings("tour")
class Tour(Autopilot):
    """Every run goes through the same choices in turn, whatever it measures: a planner's trial.

    schedules_tried: by their settings, the run's own first. legs: numbers of choices (schedule x
    number of compressions + compression), one after each other update, again and again."""

    schedules_tried: Sequence[Any] = ()
    legs: Sequence[NotNegative] = (0,)

    def __post_init__(self) -> None: ...

    def around(self, own: object) -> Selectable:
        return Selectable(self.choices)

    def schedules(self, own: Schedule, num_stages: int, num_lanes: int = 1) -> list[Schedule]:
        return list(self.schedules_tried)

    def leg(self, step: int) -> int:
        """The choice of an update, from 1 on."""
        return self.legs[(step - 1) % len(self.legs)]
