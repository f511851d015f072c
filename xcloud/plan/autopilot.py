"""When to change the compression of a run under way: what the simulator says of the choices at the
line as it was measured, and a rule that never flaps. Sends nothing; run/autopilot.py measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xcloud.checks import check_int, check_number
from xcloud.cluster.layout import ClusterLayout
from xcloud.cluster.link_profile import LinkProfile
from xcloud.comm.memory import State, whole_number
from xcloud.comm.phases import Compression
from xcloud.comm.switched import Switched
from xcloud.errors import ConfigError
from xcloud.parallel.schedule import Schedule
from xcloud.plan.costs import Direction, TableCosts
from xcloud.plan.line import FREE, Line
from xcloud.plan.simulator import Simulator

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Autopilot:
    """choices: by name, besides the run's own compression. every: updates between two looks.
    worth: a switch needs a choice that is predicted to be so many times faster; confirm: in so
    many looks in a row; dwell: and so many updates after the last switch."""

    choices: Mapping[str, Compression]
    every: int = 4
    worth: float = 1.1
    confirm: int = 3
    dwell: int = 20

    def __post_init__(self) -> None:
        check_int("autopilot.every", self.every, 1)
        check_number("autopilot.worth", self.worth, 1.0, above=True)
        check_int("autopilot.confirm", self.confirm, 1)
        check_int("autopilot.dwell", self.dwell, 1)
        if not self.choices:
            raise ConfigError("autopilot.choices is empty, so there would be nothing to choose")
        for name, choice in self.choices.items():
            if not isinstance(choice, Compression):
                raise ConfigError(
                    f"autopilot.choices.{name} must be a Compression, got {choice!r}"
                )

    def around(self, own: object) -> Switched:
        """The run's own compression and the choices, without those that are equal."""
        if isinstance(own, Switched):  # of a copy of the experiment
            return own
        if not isinstance(own, Compression):
            raise ConfigError(
                "autopilot chooses one compression for all borders, and the run's own changes "
                "with border or phase; choose a plain one (compression=none), or autopilot=off"
            )
        found = {own.label: own}
        for choice in self.choices.values():
            found.setdefault(choice.label, choice)
        if len(found) < 2:
            raise ConfigError(f"autopilot.choices has only the run's own compression, {own.label}")
        return Switched(found)


def no_autopilot() -> None:
    """For conf/autopilot/off.yaml."""


@dataclass(frozen=True)
class Way:
    """One way over one border with one choice: wire bytes, and seconds of both codecs, for each
    byte of the tensor."""

    ratio: float
    compress_s: float = 0.0
    decompress_s: float = 0.0


@dataclass(frozen=True)
class Measured:
    """Since the last look, for one update. forward and backward of a stage's rank together:
    compute_s, by stage. sent_bytes: of a message, by border and direction. bits_per_s: of the
    line, by the clouds that it joins; inf = free."""

    step_s: float
    compute_s: Sequence[float]
    sent_bytes: Mapping[tuple[int, str], float]
    bits_per_s: Mapping[tuple[str, str], float]


class Forecast:
    """Seconds of an update with each choice, from those with the one in force.

        predicted(c) = measured + simulated(c) - simulated(in force)

    What the simulator leaves out (latency, other ranks on the machine) is the same for all choices
    and drops out. A backward counts twice a forward. ways: by choice, border and direction.
    """

    def __init__(
        self,
        schedule: Schedule,
        layout: ClusterLayout,
        num_passes: int,
        ways: Sequence[Mapping[tuple[int, str], Way]],
    ) -> None:
        self._simulator = Simulator(schedule, layout, num_passes=num_passes)
        self._layout, self._ways = layout, ways
        self._num_pieces = num_passes * schedule.num_micro_batches

    def step_s(self, measured: Measured, in_force: int) -> list[float]:
        simulated = [
            self._simulator.run(self._costs(measured, in_force, choice)).step_s
            for choice in range(len(self._ways))
        ]
        return [max(0.0, measured.step_s + s - simulated[in_force]) for s in simulated]

    def _costs(self, measured: Measured, in_force: int, choice: int) -> TableCosts:
        layout = self._layout
        pieces = [self._num_pieces / len(layout.ranks_of(s)) for s in range(layout.num_stages)]
        each_s = [total / n / 3 for total, n in zip(measured.compute_s, pieces, strict=True)]
        tables: dict[str, list[Direction]] = {name: [] for name in DIRECTIONS}
        for border in range(layout.num_stages - 1):
            for name, table in tables.items():
                key = (border, name)
                if key not in measured.sent_bytes:  # inside a cloud
                    table.append(Direction())
                    continue
                own, other = self._ways[in_force][key], self._ways[choice][key]
                raw = measured.sent_bytes[key] / own.ratio
                table.append(
                    Direction(round(raw * other.ratio), raw * other.compress_s,
                              raw * other.decompress_s)
                )  # fmt: skip
        lines = {
            f"{here}-{there}": FREE if rate == float("inf") else Line(LinkProfile(rate))
            for (here, there), rate in measured.bits_per_s.items()
        }
        return TableCosts(
            each_s, [2 * s for s in each_s], tables["forward"], tables["backward"], lines=lines
        )


class Rule:
    """Switches only for what is worth it, confirmed and lasting; see Autopilot."""

    def __init__(self, settings: Autopilot) -> None:
        self._settings = settings
        self._favoured, self._times = -1, 0

    def choose(
        self, step: int, in_force: int, since_step: int, predicted_s: Sequence[float]
    ) -> int | None:
        """The choice from the next step on; None: stay."""
        settings = self._settings
        best = min(range(len(predicted_s)), key=predicted_s.__getitem__)
        if predicted_s[in_force] <= settings.worth * predicted_s[best]:
            self._favoured, self._times = -1, 0
            return None
        self._times = self._times + 1 if best == self._favoured else 1
        self._favoured = best
        if self._times < settings.confirm or step + 1 - since_step < settings.dwell:
            return None
        self._favoured, self._times = -1, 0
        return best

    def state_dict(self) -> State:
        return {"favoured": self._favoured, "times": self._times}

    def load_state_dict(self, state: State) -> None:
        self._favoured = whole_number(state, "favoured")
        self._times = whole_number(state, "times")
