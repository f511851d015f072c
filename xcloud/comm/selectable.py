"""A compression that is chosen while the run goes on, among some that its user allows. Who chooses
is rank/autopilot.py.

Every choice has compressors and memories of its own at both ends of a channel. While another is in
force they rest: a delta cache stays equal at both ends, and what error feedback has not sent yet
is added to the first message of its sample after the choice has come back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xcloud.base.errors import ConfigError
from xcloud.comm.compressor import Compressor
from xcloud.comm.memory import State, whole_number
from xcloud.comm.phases import Compression


class Selection:
    """Which choice is in force from which step, in one rank. All its channels look here."""

    def __init__(self) -> None:
        self.choice, self.before, self.since_step = 0, 0, 0

    def switch(self, choice: int, from_step: int) -> None:
        self.choice, self.before, self.since_step = choice, self.at(from_step - 1), from_step

    def at(self, step: int) -> int:
        """The number of the choice at this step; of none before the last switch but one."""
        return self.choice if step >= self.since_step else self.before

    def state_dict(self) -> State:
        return {"choice": self.choice, "before": self.before, "since_step": self.since_step}

    def load_state_dict(self, state: State) -> None:
        for name in ("choice", "before", "since_step"):
            setattr(self, name, whole_number(state, name))


class Selectable:
    """The choices by name; the run begins with the first. Replicas are not averaged with it."""

    def __init__(self, choices: Mapping[str, Compression]) -> None:
        self.choices = dict(choices)

    @property
    def names(self) -> list[str]:
        return list(self.choices)

    def at_boundary(self, stage: int) -> Selectable:
        return self

    def at(self, step: int) -> Compression:
        raise ConfigError(
            "this run chose its compression while it went on (autopilot), so its settings do not "
            "say which it ended with; leave the compressors out (--uncompressed)"
        )

    def for_tensor(self, name: str, shape: Sequence[int]) -> Compressor:
        """Of a matrix that both ends of the pipeline hold: that of the first choice."""
        return next(iter(self.choices.values())).for_tensor(name, shape)

    @property
    def averaging_label(self) -> str:
        return next(iter(self.choices.values())).averaging_label

    @property
    def has_memory(self) -> bool:
        return any(choice.has_memory for choice in self.choices.values())

    @property
    def label(self) -> str:
        return f"autopilot({', '.join(choice.label for choice in self.choices.values())})"

    @property
    def is_identity(self) -> bool:
        return all(choice.is_identity for choice in self.choices.values())
