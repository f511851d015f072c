"""When to change the compression, or the number of micro-batches, of a run under way: what the
simulator says of the choices at the line as it was measured, and a rule that never flaps. Sends
nothing; rank/autopilot.py measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from xcloud.base.errors import ConfigError
from xcloud.base.settings import NotNegative, Positive, settings
from xcloud.cluster.layout import ClusterLayout
from xcloud.cluster.link_profile import LinkProfile
from xcloud.comm.compression import Compression, Selectable
from xcloud.comm.state import State
from xcloud.parallel.schedule import GPipe, OneForwardOneBackward, Schedule, most_kept
from xcloud.plan.costs import Direction, TableCosts
from xcloud.plan.line import Line
from xcloud.plan.step_program import StepProgram

DIRECTIONS = ("forward", "backward")
_FREE_BITS_PER_S = 1e15


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
        if not isinstance(own, GPipe | OneForwardOneBackward):
            raise ConfigError(
                f"autopilot.micro_batches and in_flight do not know schedules like {own.label}: "
                "choose gpipe, one_forward_one_backward or zero_bubble, or leave them empty"
            )
        if isinstance(own, GPipe) and self.in_flight:
            raise ConfigError(
                f"autopilot.in_flight is {list(self.in_flight)}, but schedule=gpipe has every "
                "micro-batch in flight: choose one_forward_one_backward or zero_bubble, or leave "
                "it empty"
            )

        def share(schedule: Schedule) -> float:
            """Of the samples of a pass: those whose activations the fullest stage keeps."""
            m = schedule.num_micro_batches
            orders = [schedule.actions(stage, num_stages) for stage in range(num_stages)]
            return max(most_kept(order, 1, 1 / m, 1 / m) for order in orders)

        flights: list[Schedule] = [own]
        if isinstance(own, OneForwardOneBackward):
            flights += [replace(own, num_in_flight=number) for number in self.in_flight]
        allowed = max(share(schedule) for schedule in flights) + 1e-9
        found: dict[tuple[object, ...], Schedule] = {}
        for m in (own.num_micro_batches, *self.micro_batches):
            fitting = [
                schedule
                for flight in flights
                if share(schedule := replace(flight, num_micro_batches=m)) <= allowed  # type: ignore[type-var]
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


def no_autopilot() -> None:
    """For conf/autopilot/off.yaml."""


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


@dataclass(frozen=True)
class Measured:
    """Since the last look, for one update. forward and backward of a stage's rank together:
    compute_s, by stage. sent_bytes: of a message, by boundary and direction. bits_per_s: of the
    line, by the clouds that it joins; inf = free. latency_s: by boundary, one way."""

    step_s: float
    compute_s: Sequence[float]
    sent_bytes: Mapping[tuple[int, str], float]
    bits_per_s: Mapping[tuple[str, str], float]
    latency_s: Mapping[tuple[str, str], float] = field(default_factory=dict)


class Forecast:
    """Seconds of an update with each choice, from those with the one in force.

        predicted(c) = measured + simulated(c) - simulated(in force)

    What the simulator leaves out (other ranks on the machine) is the same for all choices and
    drops out. A backward counts twice a forward. Computing takes as long as when so many
    micro-batches were last in force; with a number not tried yet as long as now, and for each
    micro-batch more what it has cost more between those tried.

    schedules: the run's own first. codecs: by compression, of a message of any one size over each
    boundary in each direction. A choice is a schedule and a compression: number // len(codecs) and
    number % len(codecs).
    """

    def __init__(
        self,
        schedules: Sequence[Schedule],
        layout: ClusterLayout,
        num_passes: int,
        codecs: Sequence[Mapping[tuple[int, str], Direction]],
    ) -> None:
        self._programs = [StepProgram(s, layout, num_passes=num_passes) for s in schedules]
        self._schedules, self._layout, self.codecs = schedules, layout, codecs
        self._num_passes = num_passes
        self._compute_s: dict[int, Sequence[float]] = {}  # by micro-batches: of each stage

    def step_s(self, measured: Measured, in_force: int) -> list[float]:
        now = self._schedules[in_force // len(self.codecs)].num_micro_batches
        self._compute_s[now] = measured.compute_s
        choices = product(range(len(self._schedules)), range(len(self.codecs)))
        simulated = [
            self._programs[shape].carry_out(self._costs(measured, in_force, shape, way)).end_s
            for shape, way in choices
        ]
        return [max(0.0, measured.step_s + s - simulated[in_force]) for s in simulated]

    def _computing_s(self, stage: int, now: int, then: int) -> float:
        """Of an update with `then` micro-batches, if it has `now`."""
        seen = {m: of_stages[stage] for m, of_stages in self._compute_s.items()}
        if then in seen:
            return seen[then]
        fewest, most = min(seen), max(seen)
        each_s = (seen[most] - seen[fewest]) / (most - fewest) if most > fewest else 0.0
        return max(0.0, seen[now] + max(0.0, each_s) * (then - now))

    def _costs(self, measured: Measured, in_force: int, shape: int, way: int) -> TableCosts:
        layout, (own_shape, own_way) = self._layout, divmod(in_force, len(self.codecs))
        now, then = (self._schedules[s].num_micro_batches for s in (own_shape, shape))
        each_s = [
            self._computing_s(s, now, then) * len(layout.ranks_of(s)) / self._num_passes / then / 3
            for s in range(layout.num_stages)
        ]
        tables: dict[str, list[Direction]] = {name: [] for name in DIRECTIONS}
        for boundary in range(layout.num_stages - 1):
            for name, table in tables.items():
                key = (boundary, name)
                if key not in measured.sent_bytes:  # inside a cloud
                    table.append(Direction())
                    continue
                share = measured.sent_bytes[key] / self.codecs[own_way][key].num_bytes
                table.append(self.codecs[way][key].times(share * now / then))
        lines = {}
        for clouds, rate in measured.bits_per_s.items():
            latency_s = measured.latency_s.get(clouds, 0.0)
            lines["-".join(clouds)] = Line(LinkProfile(min(rate, _FREE_BITS_PER_S), latency_s))
        return TableCosts(
            each_s, [2 * s for s in each_s], tables["forward"], tables["backward"], lines=lines
        )

    def state_dict(self) -> State:
        rows = [[m, *of_stages] for m, of_stages in sorted(self._compute_s.items())]
        return {"compute_s": torch.tensor(rows, dtype=torch.float64)}

    def load_state_dict(self, state: State) -> None:
        rows = numbers(state, "compute_s").tolist()
        self._compute_s = {int(m): of_stages for m, *of_stages in rows}


def numbers(state: State, name: str) -> Tensor:
    """Raises ValueError if there are none."""
    value = state.get(name)
    if not isinstance(value, Tensor) or value.dtype != torch.float64:
        raise ValueError(f"a state needs float64 {name!r}, got {value!r}")
    return value


class Rule:
    """Selection only for what is worth it, confirmed and lasting; see Autopilot. Looks that
    promise
    more count for more: the logarithms of what a choice gains in looks in a row must add up to
    those of `confirm` looks at just `worth`. One look never does, unless confirm is 1.

    Small messages may make a slow line look free, so that two choices call for each other without
    end. So a choice lasts twice as long as the one before it if it is a return, within twice the
    updates that this had to last, to the choice before that one."""

    def __init__(self, settings: Autopilot) -> None:
        self._settings = settings
        self._gained: list[float] = []  # by choice
        self._before = -1  # the choice before the one in force
        self._dwell = settings.dwell  # of the one in force

    def choose(
        self, step: int, in_force: int, since_step: int, predicted_s: Sequence[float]
    ) -> int | None:
        """The choice from the next step on; None: stay. since_step: 0 before the first switch."""
        settings = self._settings
        gained = self._gained or [0.0] * len(predicted_s)
        gains = [predicted_s[in_force] / max(s, 1e-9) for s in predicted_s]
        enough = settings.confirm * math.log(settings.worth) * (1 - 1e-9)
        most = enough / min(settings.confirm, 2)  # of one look
        self._gained = [
            total + min(math.log(gain), most) if gain > settings.worth else 0.0
            for total, gain in zip(gained, gains, strict=True)
        ]
        best = max(range(len(gains)), key=gains.__getitem__)
        lasted = step + 1 - since_step
        if self._gained[best] < enough or (since_step and lasted < self._dwell):
            return None
        returns_soon = best == self._before and lasted < 2 * self._dwell
        self._dwell = 2 * self._dwell if returns_soon else settings.dwell
        self._before = in_force
        self._gained = []
        return best

    def state_dict(self) -> State:
        last = [float(self._before), float(self._dwell)]
        return {
            "gained": torch.tensor(self._gained, dtype=torch.float64),
            "last": torch.tensor(last, dtype=torch.float64),
        }

    def load_state_dict(self, state: State) -> None:
        self._gained = numbers(state, "gained").tolist()
        self._before, self._dwell = map(int, numbers(state, "last").tolist())
