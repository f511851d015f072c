"""Every rank knows the messages about checkpoints and what saves its state. The feature in
features/checkpoints/ does it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import IntEnum

import torch

from xcloud.base.errors import FrameError
from xcloud.net.frame import Frame, TensorSpec
from xcloud.pipeline.control import Signal
from xcloud.pipeline.hook import Hook

InputDigests = Mapping[str, Mapping[str, str]]
"""The digests of what a rank reads, by kind ("data", "base") and by a name for messages, are saved
with its shard of a checkpoint."""

CHECKPOINT_CARRIES = (
    "how far a rank is with its part of a checkpoint, or how often to save uint8",
)


class CheckpointMessage(IntEnum):
    """A code by which ranks report the state of a checkpoint to each other."""

    DONE = 1  # to rank 0: my shard is on the disk
    FAILED = 2  # to rank 0: I have none
    AGREED = 3  # from rank 0: every rank has its shard
    STOP = 4  # to rank 0: I was asked to end
    SAVE = 5  # from rank 0, where no signal comes with the step (one-way jobs)
    SAVE_AND_STOP = 6
    LOST = 7  # from rank 0: some rank has no shard
    EVERY = 8  # from rank 0, in place of a step: replicas save at multiples of this number


def code_of(frame: Frame, peer: int) -> int:
    """Return the code in a message about a checkpoint. Raises FrameError for anything else."""
    if len(frame.parts) != 1 or TensorSpec.of(frame.parts[0]) != TensorSpec(
        shape=(1,), dtype=torch.uint8
    ):
        raise FrameError(
            f"{frame.key} of rank {peer} must carry one code, got "
            f"{[TensorSpec.of(part) for part in frame.parts]}"
        )
    return int(frame.parts[0])


class Saver(Hook, ABC):
    """The hook that saves one rank's state; a loop of its own, such as a one-way job's, asks it
    step by step. Its `signal` decides, in rank 0, what all ranks do after an update."""

    @property
    @abstractmethod
    def is_pending(self) -> bool:
        """Return whether rank 0 still waits for a rank's report on the last checkpoint."""

    @abstractmethod
    def after(self, step: int, signal: Signal) -> bool:
        """Do between two updates what the signal says. Return whether this rank ends here."""

    @abstractmethod
    def lose(self, peer: int) -> None:
        """Count a rank as gone that the run continues without. Only rank 0 calls it."""
