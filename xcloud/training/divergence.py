"""What happens to an update whose loss or gradient is not finite. Checks no tensor itself.

The check comes before the optimizer and its verdict is the same in every rank that shares the
update, so parameters and moments are as before it everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from xcloud.base.errors import TrainingDiverged
from xcloud.comm.state import State, whole_number

OnDivergence = Literal["stop", "skip"]

_ADVICE = "A lower learning_rate, more warmup_steps or a clip_norm of its optimizer may help"


@dataclass
class DivergenceGuard:
    """Every rank that shares an update has its own copy; they count alike.

    A skipped update still is one: its step, samples and learning rate are used up, only the
    optimizer does not move.
    """

    on_divergence: OnDivergence = "stop"
    max_skips_in_a_row: int = 10
    num_in_a_row: int = 0

    def skips(self, what: str, is_finite: bool) -> bool:
        """Whether to leave the update out. what: such as "the loss or gradient of step 3".

        Raises TrainingDiverged if it is not finite and may not be left out.
        """
        if is_finite:
            self.num_in_a_row = 0
            return False
        if self.on_divergence == "stop":
            raise diverged(
                f"{what} is not finite",
                "to leave such updates out set training.on_divergence=skip",
            )
        self.num_in_a_row += 1
        if self.num_in_a_row > self.max_skips_in_a_row:
            raise diverged(
                f"{what} is not finite, after {self.max_skips_in_a_row} skipped updates in a row",
                f"training.max_skips_in_a_row is {self.max_skips_in_a_row}",
            )
        return True

    def state_dict(self) -> State:
        return {"num_in_a_row": self.num_in_a_row}

    def load_state_dict(self, state: State) -> None:
        self.num_in_a_row = whole_number(state, "num_in_a_row")

    def note(self, what: str) -> str:
        """For the user, after `skips` returned True."""
        return (
            f"{what} is not finite: update skipped, parameters are as before "
            f"({self.num_in_a_row} in a row, at most {self.max_skips_in_a_row})"
        )


def diverged(what: str, remark: str) -> TrainingDiverged:
    """The error for an update that can neither be made nor left out."""
    return TrainingDiverged(f"{what}; parameters are as before this update. {_ADVICE}; {remark}")
