"""The settings of `autopilot`: what a run may change while it goes on. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Positive, settings
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Selectable
from xcloud.pipeline.one_forward_one_backward import max_kept
from xcloud.pipeline.schedule import Action, Schedule


@settings("autopilot")
class Autopilot:
    """The settings of `autopilot`.

    choices: by name, besides the run's own compression.
    micro_batches, in_flight: numbers besides the schedule's own (num_micro_batches,
        num_in_flight).
    every: updates between looks.
    worth: how many times faster a choice must be predicted to be for a switch.
    confirm: looks in a row that must say so; fewer where they promise more.
    dwell: updates that must have passed since the last switch.
    """

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
        """Return the run's own compression and the choices, without those that are equal."""
        if isinstance(own, Selectable):  # of a copy of the experiment
            return own
        if not isinstance(own, Compression):
            raise ConfigError(
                "autopilot chooses one compression for all boundaries, and the run's own changes "
                "with boundary or phase; choose a plain one (compression=none), or autopilot=off"
            )
        choices = {own.label: own}
        for choice in self.choices.values():
            choices.setdefault(choice.label, choice)
        return Selectable(choices=choices, chosen_by="autopilot")

    def schedules(self, own: Schedule, num_stages: int, num_lanes: int = 1) -> list[Schedule]:
        """Return the run's own schedule and those with the other numbers.

        Left out are those that keep the activations of more samples at once than the run's number
        of micro-batches does with the most in flight. Raises ConfigError for a number that no
        schedule can have.
        """
        if not self.micro_batches and not self.in_flight:
            return [own]
        if self.in_flight and not hasattr(own, "num_in_flight"):
            raise ConfigError(
                f"autopilot.in_flight is {list(self.in_flight)}, but {own.label} has no "
                "num_in_flight: choose schedule=one_forward_one_backward or zero_bubble, or leave "
                "it empty"
            )

        def order(schedule: Schedule, stage: int) -> list[Action]:
            return schedule.for_lanes(num_stages, num_lanes=num_lanes).actions(
                stage, num_stages=num_stages
            )

        def share(schedule: Schedule) -> float:
            """Return the share of a pass's samples whose activations the fullest stage keeps."""
            m = schedule.num_micro_batches
            orders = [order(schedule, stage=stage) for stage in range(num_stages)]
            return max(
                max_kept(order, num_ranks=1, activations=1 / m, waiting=1 / m) for order in orders
            )

        given: Any = own
        flights = [own, *(replace(given, num_in_flight=number) for number in self.in_flight)]
        allowed = max(share(schedule) for schedule in flights) + 1e-9
        schedules: dict[tuple[object, ...], Schedule] = {}
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
                schedules.setdefault(tuple(order(schedule, stage=0)), schedule)
        return list(schedules.values())
