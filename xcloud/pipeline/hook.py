"""What a feature may do around an update. The core calls hooks and knows none of them by name;
train/building.py makes those of a job."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from xcloud.comm.state import StatefulTree, StateTree, joined
from xcloud.comm.step_clock import StepClock
from xcloud.contracts.model import Batch
from xcloud.pipeline.control import Signal


@dataclass
class StepReport:
    """One rank's account of one update.

    loss: the loss in one rank per job (if replicas train locally: per replica). It is None in all
        other ranks, and if the update was skipped.
    num_tokens: number of tokens that this rank's stages are the first to compute.
    num_learned: number of items that the loss counts, such as the tokens of answers. Only the rank
        that has the loss counts them.
    skipped: the reason why the update was skipped, for the user; None if it was not.
    signal: the signal that says what all ranks do now.
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


class Hook(StatefulTree):
    """A feature's work around an update. This one does nothing; a feature overrides what it needs.

    The methods stand in the order in which an update calls them, in the training thread, in every
    rank that has the hook.
    """

    name = ""
    """The name under which a checkpoint keeps its state; empty: it has none. An OwnHook has the
    name of its setting instead."""

    def before_update(self, step: int) -> None:
        """Act before the update, while the step's clock may still be paused."""

    def begin(self, step: int) -> None:
        """Act once the update's samples are chosen and gradients are zero."""

    def before_pass(self, step: int, batches: Mapping[int, Batch]) -> None:
        """Act before the pipeline computes these micro-batches."""

    def after_micro_batch(self, stage: int) -> None:
        """Act once all gradients of a micro-batch of this stage are there."""

    def after_backward(self, step: int) -> None:
        """Act once this rank's own gradients are whole."""

    def after_exchange(self, step: int) -> None:
        """Act once the gradients are those of all ranks and replicas."""

    def signal(self, step: int) -> Signal:
        """Return what all ranks do after this update. Asked in the first rank of each replica."""
        return Signal.GO_ON

    def after_update(self, step: int, report: StepReport) -> None:
        """Act once the optimizer has made or skipped the update and the step's time is over."""

    def finish(self) -> None:
        """Act after the last update, before anything is exported."""

    def settle(self) -> None:
        """Act before the ranks' last barrier, also where the run ends early."""

    def close(self, is_finished: bool) -> None:
        """Act after the ranks' last barrier. is_finished: the run has made all its updates."""


@runtime_checkable
class OwnHook(Protocol):
    """A hook of a user's own, given in the config: +hooks.NAME._target_=my.module.Class."""

    def join(self, context: Any) -> Hook:
        """Return the hook of this rank. context: its RankContext (rank/role.py)."""


class Hooks(Hook):
    """Several hooks as one: each method calls all of them in their order. A None among them stands
    for no hook."""

    def __init__(self, hooks: Sequence[Hook | None] = ()) -> None:
        self._hooks = tuple(hook for hook in hooks if hook is not None)

    def children(self) -> StateTree:
        return joined(*({hook.name: hook} for hook in self._hooks if hook.name))

    def signal(self, step: int) -> Signal:
        # Signals stand in the order of their weight: whoever stops outweighs whoever saves.
        return max((hook.signal(step) for hook in self._hooks), default=Signal.GO_ON)


def _to_all(method: str) -> Callable[..., None]:
    """Build the method of Hooks that calls `method` of each hook."""

    def call(self: Hooks, *arguments: Any, **named: Any) -> None:
        for hook in self._hooks:
            getattr(hook, method)(*arguments, **named)

    return call


# Made from Hook itself, so that a method that is added there is never forgotten here.
for _method in vars(Hook).keys() - vars(Hooks).keys():
    if inspect.isfunction(getattr(Hook, _method)):
        setattr(Hooks, _method, _to_all(_method))
