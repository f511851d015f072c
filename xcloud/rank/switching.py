"""Switch a rank's compression and schedule between updates: by what a rank measures, or each in
turn."""

from __future__ import annotations

from dataclasses import replace

from xcloud.base.errors import ConfigError
from xcloud.comm.compression_plans import Selectable, Selection
from xcloud.comm.state import MEMORY, State, Stateful, StatefulTree, StateTree
from xcloud.job.job import PipelineJob
from xcloud.pipeline.hook import Hook
from xcloud.pipeline.trainer import Trainer
from xcloud.pipeline.wiring import Wiring

MAX_CHOICES = 255  # rank 0 sends the number in a byte


def check_choices(job: PipelineJob, own: PipelineJob, by: str) -> None:
    """Raise ConfigError if something may be chosen that the run's own setting could not be.

    own: the job without what chooses.
    by: the name of what chooses, for messages.
    """
    schedules = job.schedules
    compression = job.compression
    assert isinstance(compression, Selectable)
    # One number names both, as rank 0 sends one byte.
    names = [*compression.choices]
    num_choices = len(schedules) * len(names)
    if not 2 <= num_choices <= MAX_CHOICES:
        raise ConfigError(
            f"{by} has {len(schedules)} schedules ({schedules[0].label}, ...) times "
            f"{len(names)} compressions ({names[0]}, ...) to choose from, the run's own included; "
            f"there must be 2 to {MAX_CHOICES} together"
        )
    counts = {schedule.num_micro_batches for schedule in schedules}
    by_sample = compression.has_memory or job.training.activation_cache_mb
    if len(counts) > 1 and by_sample and job.cluster.min_micro_batches() > 1:
        raise ConfigError(
            f"{by}.micro_batches: with {min(counts)} to {max(counts)} micro-batches a sample "
            "would not stay with its ranks, between which a memory of the compression or "
            "training.activation_cache_mb is kept; give each stage one rank, or leave either out"
        )
    for schedule in schedules[1:]:
        try:  # all checks of a run with that number throughout
            replace(own, schedule=schedule)
        except ConfigError as error:
            raise ConfigError(f"{by} may choose {schedule.label}, but {error}") from error


class _InForce(StatefulTree):
    own_names = ("choice",)
    choice = 0


class Switching(Hook):
    """The hook of a rank that switches compression and schedule from the next update on.

    A choice is schedule x number of compressions + compression.
    """

    def __init__(self, job: PipelineJob, wiring: Wiring, trainer: Trainer) -> None:
        assert isinstance(job.compression, Selectable)
        self._compression = job.compression
        self._schedules = job.schedules
        self._layout = job.cluster
        self._wiring = wiring
        self._trainer = trainer
        self._in_force = _InForce()

    def switch(self, step: int, choice: int) -> None:
        """Use this choice after this update."""
        self._in_force.choice = choice
        shape, compression = divmod(choice, len(self._compression.choices))
        # All ranks call this between the same two updates.
        self._selection.switch(compression, from_step=step + 1)
        self._trainer.schedule = self._schedules[shape]

    def children(self) -> StateTree:
        """With another compression or cluster it begins again with its first choice."""
        return {MEMORY: self._remembered()}

    def _remembered(self) -> dict[str, Stateful | None]:
        """Return what is kept, by name. A subclass adds what it keeps besides."""
        return {"switches": self._selection, "in force": self._in_force}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        shape, compression = divmod(self._in_force.choice, len(self._compression.choices))
        # Both states were saved at the same step. Another list of choices gives the number another
        # meaning.
        if shape >= len(self._schedules) or compression != self._selection.choice:
            number = self._in_force.choice
            raise ValueError(f"it was saved with choice {number}, which it has not now")
        self._trainer.schedule = self._schedules[shape]

    @property
    def _selection(self) -> Selection:
        return self._wiring.boundaries.shared(Selection)
