"""What happens to an update whose loss or gradient is not finite."""

from __future__ import annotations

from xcloud.base.errors import TrainingDiverged
from xcloud.parallel.part import Part
from xcloud.training.settings import OnDivergence

_ADVICE = "A lower learning_rate, more warmup_steps or a clip_norm of its optimizer may help"


class DivergenceGuard(Part):
    """Asked before the optimizer, in every rank that shares the update; each has its own copy,
    which counts alike: so parameters and moments are as before it everywhere. A skipped update
    still is one: its step, samples and learning rate are used up, only the optimizer does not
    move."""

    name = "guard"
    own_names = ("num_in_a_row", "last_step")

    def __init__(self, on_divergence: OnDivergence = "stop", max_skips_in_a_row: int = 10) -> None:
        self._on_divergence, self._most = on_divergence, max_skips_in_a_row
        self.num_in_a_row = self.last_step = 0

    def skip(self, step: int) -> str:
        return self.leave_out(step, f"the loss or gradient of step {step}")

    def leave_out(self, step: int, what: str) -> str:
        """Returns a note for the user. Raises TrainingDiverged if it may not be left out."""
        if self._on_divergence == "stop":
            remark = "to leave such updates out set training.on_divergence=skip"
            raise diverged(f"{what} is not finite", remark)
        num_in_a_row = 1 + (self.num_in_a_row if step == self.last_step + 1 else 0)
        if num_in_a_row > self._most:
            what = f"{what} is not finite, after {self._most} skipped updates in a row"
            raise diverged(what, f"training.max_skips_in_a_row is {self._most}")
        self.num_in_a_row, self.last_step = num_in_a_row, step
        return (
            f"{what} is not finite: update skipped, parameters are as before "
            f"({num_in_a_row} in a row, at most {self._most})"
        )


def diverged(what: str, remark: str) -> TrainingDiverged:
    """Of an update that can neither be made nor left out."""
    return TrainingDiverged(f"{what}; parameters are as before this update. {_ADVICE}; {remark}")
