"""The settings of `plan`, what is searched with what profile, and of `autopilot`, what a run may
change while it goes on. Plans nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.settings import NotNegative, Positive, settings
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Phased, Selectable
from xcloud.parallel.one_forward_one_backward import most_kept
from xcloud.parallel.schedule import Schedule
from xcloud.parallel.strategy import Strategy

DIMENSIONS = ("split", "micro_batches", "schedule", "compression", "strategy")
MOST_USUAL = 128  # micro-batches, where none are given


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
    profile: str | None = None
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

    def schedules(self, own: Schedule, num_stages: int) -> list[Schedule]:
        """The run's own and those with the other numbers, but none that keeps the activations of
        more samples at once than the run's number of micro-batches does with the most in flight.
        Raises ConfigError for a number that no schedule can have."""
        if not self.micro_batches and not self.in_flight:
            return [own]
        if self.in_flight and not hasattr(own, "num_in_flight"):
            raise ConfigError(
                f"autopilot.in_flight is {list(self.in_flight)}, but {own.label} has no "
                "num_in_flight: choose schedule=one_forward_one_backward or zero_bubble, or leave "
                "it empty"
            )

        def share(schedule: Schedule) -> float:
            """Of the samples of a pass: those whose activations the fullest stage keeps."""
            m = schedule.num_micro_batches
            orders = [schedule.actions(stage, num_stages) for stage in range(num_stages)]
            return max(most_kept(order, 1, 1 / m, 1 / m) for order in orders)

        given: Any = own
        flights = [own, *(replace(given, num_in_flight=number) for number in self.in_flight)]
        allowed = max(share(schedule) for schedule in flights) + 1e-9
        found: dict[tuple[object, ...], Schedule] = {}
        for m in (own.num_micro_batches, *self.micro_batches):
            fitting = [
                schedule
                for flight in flights
                if share(schedule := replace(flight, num_micro_batches=m)) <= allowed
            ]
            if not fitting:
                raise ConfigError(
                    f"autopilot.micro_batches: {m} of {own.label} would keep the activations of "
                    "more samples at once than the run does now; leave it out, or allow fewer at "
                    "once (autopilot.in_flight)"
                )
            for schedule in fitting:
                found.setdefault(tuple(schedule.actions(0, num_stages)), schedule)
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

    def schedules(self, own: Schedule, num_stages: int) -> list[Schedule]:
        return list(self.schedules_tried)

    def leg(self, step: int) -> int:
        """The choice of an update, from 1 on."""
        return self.legs[(step - 1) % len(self.legs)]
