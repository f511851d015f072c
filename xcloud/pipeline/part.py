"""What a feature may do around an update. The core calls parts and knows none of them by name;
train/parts.py makes those of a job.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from xcloud.comm.state import StatefulTree, StateTree
from xcloud.comm.step_clock import StepClock
from xcloud.contracts.model import Batch
from xcloud.pipeline.control import Signal


@dataclass
class StepReport:
    """One rank's account of one update.

    loss: None but in one rank per job (replicas that update apart: per replica), and None there
        too if the update was skipped: `skipped` is the reason, for the user.
    num_tokens: that this rank's stages are the first to compute.
    num_learned: what the loss counts, such as the tokens of answers, in the rank that has it.
    signal: what all ranks do now.
    """

    step: int
    step_s: float
    clock: StepClock
    learning_rate: float
    loss: float | None = None
    grad_norm: float | None = None
    num_samples: int = 0
    num_tokens: int = 0
    num_learned: float = 0.0
    skipped: str | None = None
    signal: Signal = Signal.GO_ON


class Part(StatefulTree):
    """Does nothing; a feature overrides what it needs. The methods stand in the order in which an
    update calls them, in the training thread, in every rank that has the part."""

    name = ""
    """Under which a checkpoint keeps its state; empty: it has none. Of a FurtherPart: NAME."""

    def before_update(self, step: int) -> None:
        """The step's clock may still be paused."""

    def begin(self, step: int) -> None:
        """The update's samples are chosen, gradients are zero."""

    def before_pass(self, step: int, batches: Mapping[int, Batch]) -> None:
        """The pipeline will compute these micro-batches."""

    def after_micro_batch(self, stage: int) -> None:
        """A micro-batch's gradients of this stage are all there."""

    def after_backward(self, step: int) -> None:
        """This rank's own gradients are whole."""

    def after_exchange(self, step: int) -> None:
        """The gradients are those of all ranks and replicas."""

    def signal(self, step: int) -> Signal:
        """What all ranks do after this update. Asked in the first rank of each replica."""
        return Signal.GO_ON

    def after_update(self, step: int, report: StepReport) -> None:
        """The optimizer has made or skipped it, and the step's time is over."""

    def finish(self) -> None:
        """After the last update, before anything is exported."""

    def settle(self) -> None:
        """Before the ranks meet for the last time, also where the run ends early."""

    def close(self, is_finished: bool) -> None:
        """After that meeting. is_finished: the run has made all its updates."""


class FurtherPart(Protocol):
    """A part of one's own, made by `parts` of the config: +parts.NAME._target_=my.module.Class."""

    def join(self, context: Any) -> Part:
        """Of this rank. context: its RankContext (rank/role.py)."""


class Parts(Part):
    """Several as one: each hook calls all of them in their order. A None among
    them stands for no part."""

    def __init__(self, parts: Sequence[Part | None] = ()) -> None:
        self._parts = tuple(part for part in parts if part is not None)

    def children(self) -> StateTree:
        return {part.name: part for part in self._parts if part.name}

    def signal(self, step: int) -> Signal:
        return max((part.signal(step) for part in self._parts), default=Signal.GO_ON)


def _to_all(hook: str) -> Callable[..., None]:
    def call(self: Parts, *arguments: Any, **named: Any) -> None:
        for part in self._parts:
            getattr(part, hook)(*arguments, **named)

    return call


for _hook in vars(Part).keys() - vars(Parts).keys():
    if inspect.isfunction(getattr(Part, _hook)):
        setattr(Parts, _hook, _to_all(_hook))
