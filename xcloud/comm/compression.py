"""Which compressors and memories act at a boundary and on what replicas average. Those that change
by step, boundary or tensor, or are chosen between while a run goes on: compression_plans.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import field
from typing import Protocol, runtime_checkable

from xcloud.base.settings import settings
from xcloud.comm.compressor import Compressor, Nothing
from xcloud.comm.memory import Memory, NoMemory


class CompressionPlan(ABC):
    """What every setting of `compression` answers: which compressors act at a boundary, from which
    step on, and on what replicas average.

    boundaries: those with a compression of their own.
    """

    boundaries: Sequence[int] = ()

    @property
    @abstractmethod
    def label(self) -> str:
        """Short name for run names and tables."""

    @property
    @abstractmethod
    def by_step(self) -> Sequence[tuple[int | None, Compression]]:
        """Those that may be in force at one boundary, each with the last step it serves, or None
        for ever."""

    @property
    @abstractmethod
    def averaged(self) -> Compression:
        """The one that acts on what replicas average, and on what both ends of the pipeline hold.
        Raises ConfigError unless it is the same for the whole run."""

    def at(self, step: int) -> Compression:
        """Raises ConfigError where settings do not say it."""
        return next(one for until, one in self.by_step if until is None or step <= until)

    def for_tensor(self, name: str, shape: Sequence[int]) -> Compressor:
        """The compressor of a tensor that is averaged. Raises ConfigError as `averaged`."""
        return self.averaged.for_tensor(name, shape)

    def at_boundary(self, stage: int) -> CompressionPlan:
        """Of the boundary after `stage`."""
        return self

    @property
    def has_memory(self) -> bool:
        """Whether anything is kept per sample between visits, at any time: a sample must meet the
        same ranks throughout."""
        return any(one.has_memory for _, one in self.by_step)

    @property
    def is_identity(self) -> bool:
        """Whether every tensor arrives unchanged."""
        return all(one.is_identity for _, one in self.by_step)


@runtime_checkable
class PerTensorChoice(Protocol):
    """compression_plans.PerTensor is one."""

    @property
    def label(self) -> str: ...

    @property
    def is_identity(self) -> bool: ...

    def for_tensor(self, name: str, shape: Sequence[int]) -> Compressor:
        """name: of the parameter, its module's name before it."""


@settings("compression")
class Compression(CompressionPlan):
    """forward: for activations. backward: for their gradients. averaging: for what replicas send
    each other of their gradients or weight changes; None for that of backward. A channel works on
    copies."""

    forward: Compressor = field(default_factory=Nothing)
    backward: Compressor = field(default_factory=Nothing)
    forward_memory: Memory = field(default_factory=NoMemory)
    backward_memory: Memory = field(default_factory=NoMemory)
    averaging: Compressor | PerTensorChoice | None = None

    @property
    def averaged(self) -> Compression:
        return self

    @property
    def by_step(self) -> Sequence[tuple[int | None, Compression]]:
        return [(None, self)]

    def for_tensor(self, name: str, shape: Sequence[int]) -> Compressor:
        chosen = self.averaging or self.backward
        return chosen if isinstance(chosen, Compressor) else chosen.for_tensor(name, shape)

    @property
    def averaging_label(self) -> str:
        return (self.backward if self.averaging is None else self.averaging).label

    @property
    def has_memory(self) -> bool:
        memories = (self.forward_memory, self.backward_memory)
        return not all(isinstance(memory, NoMemory) for memory in memories)

    @property
    def label(self) -> str:
        """Forward + backward, a memory around its compressor: "fp16(svd(0.6))+ef(int8)"; after
        them that of averaging, if it has its own."""
        both = ((self.forward, self.forward_memory), (self.backward, self.backward_memory))
        label = "+".join(f"{m.label}({c.label})" if m.label else c.label for c, m in both)
        return label if self.averaging is None else f"{label}, averaging {self.averaging.label}"

    @property
    def is_identity(self) -> bool:
        chosen = self.averaging or self.backward
        if isinstance(chosen, PerTensorChoice) and not chosen.is_identity:
            return False
        used = [c for c in (self.forward, self.backward, chosen) if isinstance(c, Compressor)]
        return not self.has_memory and all(c.family == "none" for c in used)
