"""Decide when to change the compression, or the number of micro-batches, of a run under way.

The simulator says what the choices would take at the line as it was measured, and a rule that
never flaps chooses. Sends nothing; features/autopilot/pilot.py measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xcloud.comm.state import State
from xcloud.features.autopilot.settings import Autopilot
from xcloud.layout import ClusterLayout
from xcloud.net.link_profile import LinkProfile
from xcloud.pipeline.schedule import Schedule
from xcloud.simulator.costs import Costs, Direction
from xcloud.simulator.prediction import Simulator

DIRECTIONS = ("forward", "backward")


_Codec = Mapping[tuple[int, str], Direction]  # by boundary and direction


@dataclass(frozen=True)
class Measured:
    """The measures of one update, on average since the last look.

    compute_s: seconds of forward and backward of a stage's rank together, by stage.
    sent_bytes: bytes of a message, by boundary and direction.
    lines: the lines, by the clouds that they join.
    """

    step_s: float
    compute_s: Sequence[float]
    sent_bytes: Mapping[tuple[int, str], float]
    lines: Mapping[tuple[str, str], LinkProfile]


class Forecast:
    """A prediction of an update's seconds with each choice, from those with the one in force.

        predicted(c) = measured + simulated(c) - simulated(in force)

    A choice is a schedule and a compression: number // len(codecs) and number % len(codecs).

    schedules: the run's own first.
    codecs: the costs of a message of any one size, by compression, boundary and direction.
    """

    def __init__(
        self,
        schedules: Sequence[Schedule],
        layout: ClusterLayout,
        num_passes: int,
        codecs: Sequence[_Codec],
    ) -> None:
        self._programs = [
            Simulator(schedule=s, layout=layout, num_passes=num_passes) for s in schedules
        ]
        self.codecs = codecs
        self._compute_s: dict[int, Sequence[float]] = {}  # by micro-batches: of each stage

    def step_s(self, measured: Measured, in_force: int) -> list[float]:
        """Return the predicted seconds of an update with each choice."""
        shape, own = divmod(in_force, len(self.codecs))
        now = self._programs[shape].schedule.num_micro_batches
        self._compute_s[now] = measured.compute_s
        simulated = [
            program.run(
                self._costs(measured, now, own=self.codecs[own], program=program, codec=codec)
            ).step_s
            for program in self._programs
            for codec in self.codecs
        ]
        # What the simulator leaves out (other ranks on the machine) is the same for all choices:
        # in a difference it drops out.
        return [max(0.0, measured.step_s + s - simulated[in_force]) for s in simulated]

    def _computing_s(self, stage: int, now: int, then: int) -> float:
        """Return the seconds of computing an update with `then` micro-batches, if it has `now`."""
        seen = {m: of_stages[stage] for m, of_stages in self._compute_s.items()}
        if then in seen:
            return seen[then]
        # A number not tried yet takes as long as now, and for each micro-batch more what one has
        # cost more between those tried, which is nothing as long as only one was.
        min_seen = min(seen)
        max_seen = max(seen)
        each_s = 0.0
        if max_seen > min_seen:
            each_s = (seen[max_seen] - seen[min_seen]) / (max_seen - min_seen)
        return max(0.0, seen[now] + max(0.0, each_s) * (then - now))

    def _costs(
        self, measured: Measured, now: int, own: _Codec, program: Simulator, codec: _Codec
    ) -> Costs:
        then = program.schedule.num_micro_batches
        stages = range(program.num_stages)
        ranks = [len(program.layout.ranks_of(stage)) for stage in stages]
        # Seconds of one forward of one micro-batch. Each rank computes only its own share of
        # them, and a backward counts twice a forward, hence the 3.
        each_s = [
            self._computing_s(s, now, then) * ranks[s] / program.num_passes / then / 3
            for s in stages
        ]
        # A codec was timed on messages of one size. What was measured, over what the codec in
        # force makes of that size, is how much larger those of this run are.
        ways = {
            key: codec[key].times(size / own[key].num_bytes * now / then)
            for key, size in measured.sent_bytes.items()
        }
        forward, backward = (  # free inside a cloud
            [ways.get((b, way), Direction()) for b in stages[:-1]] for way in DIRECTIONS
        )
        lines = {"-".join(way): line for way, line in measured.lines.items()}
        return Costs(
            forward_s=each_s,
            backward_s=[2 * s for s in each_s],
            forward=forward,
            backward=backward,
            lines=lines,
        )

    def state_dict(self) -> State:
        rows = [[m, *of_stages] for m, of_stages in sorted(self._compute_s.items())]
        return {"compute_s": torch.tensor(rows, dtype=torch.float64)}

    def load_state_dict(self, state: State) -> None:
        rows = numbers(state, name="compute_s").tolist()
        self._compute_s = {int(m): of_stages for m, *of_stages in rows}


def numbers(state: State, name: str) -> Tensor:
    """Return the float64 tensor of this name. Raises ValueError if there is none."""
    value = state.get(name)
    if not isinstance(value, Tensor) or value.dtype != torch.float64:
        raise ValueError(f"a state needs float64 {name!r}, got {value!r}")
    return value


class Rule:
    """A rule that chooses only what is worth it, confirmed and lasting."""

    def __init__(self, settings: Autopilot) -> None:
        self._settings = settings
        self._gained: list[float] = []  # by choice
        self._before = -1  # the choice before the one in force
        self._dwell = settings.dwell  # of the one in force

    def choose(
        self, step: int, in_force: int, since_step: int, predicted_s: Sequence[float]
    ) -> int | None:
        """Return the choice from the next step on; None: stay.

        since_step: the step at which the choice in force began; 0 before the first switch.
        """
        settings = self._settings
        gained = self._gained or [0.0] * len(predicted_s)
        gains = [predicted_s[in_force] / max(s, 1e-9) for s in predicted_s]
        # Looks that promise more count for more: the logarithms of what a choice gains in looks
        # in a row must add up to those of `confirm` looks at just `worth`. One look counts for
        # half of that at most, so one alone never does, unless confirm is 1.
        enough = settings.confirm * math.log(settings.worth) * (1 - 1e-9)
        max_gain = enough / min(settings.confirm, 2)
        self._gained = [
            total + min(math.log(gain), max_gain) if gain > settings.worth else 0.0
            for total, gain in zip(gained, gains, strict=True)
        ]
        best = max(range(len(gains)), key=gains.__getitem__)
        lasted = step + 1 - since_step
        if self._gained[best] < enough or (since_step and lasted < self._dwell):
            return None
        # Small messages may make a slow line look free, so that two choices call for each other
        # without end. A choice that soon returns to the one before therefore lasts twice as long.
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
        self._gained = numbers(state, name="gained").tolist()
        self._before, self._dwell = map(int, numbers(state, name="last").tolist())
