"""Which compressors and memories act at a boundary and on what replicas average; what names one
direction of a boundary. Compression that changes by step, boundary or tensor, or is chosen while
a run goes on: compression_plans.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from xcloud.base.errors import ConfigError
from xcloud.base.settings import settings
from xcloud.comm.compressor import Chain, Compressor, TensorChoice, seed_from
from xcloud.comm.memory import Memory, NoMemory


@dataclass(frozen=True)
class ChannelId:
    """Identifies one direction between two ranks over one boundary; the same at both ends.

    seed: seed of the experiment.
    boundary: number of the stage before the boundary.
    direction: "forward" or "backward".
    sender, receiver: numbers of the two ranks.
    """

    seed: int
    boundary: int
    direction: str
    sender: int
    receiver: int

    def stream(self, *names: str | int) -> int:
        """The number of this channel's random stream for the named part."""
        channel = (self.seed, self.boundary, self.direction, self.sender, self.receiver)
        return seed_from(*channel, *names)

    def __str__(self) -> str:
        return f"boundary {self.boundary} {self.direction}, rank {self.sender} to {self.receiver}"


class CompressionPlan(ABC):
    """A setting of `compression`. It says which compressors act at a boundary, from which step on,
    and which act on the values that replicas average.

    boundaries: numbers of the boundaries that have a compression of their own.
    """

    boundaries: Sequence[int] = ()

    @property
    @abstractmethod
    def label(self) -> str:
        """Short name for run names and tables."""

    @property
    @abstractmethod
    def by_step(self) -> Sequence[tuple[int | None, Compression]]:
        """Return those that may be in force at one boundary, each with the last step it serves, or
        None for ever."""

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
        return self.averaged.averaging_choice.for_tensor(name, shape)

    def at_boundary(self, stage: int) -> CompressionPlan:
        """Return the compression of the boundary after `stage`."""
        return self

    @property
    def has_memory(self) -> bool:
        """True if anything is kept per sample between visits, at any time: a sample must meet the
        same ranks throughout."""
        return any(one.has_memory for _, one in self.by_step)

    @property
    def is_identity(self) -> bool:
        """True if every tensor arrives unchanged."""
        return all(one.is_identity for _, one in self.by_step)


def check_memory(compressor: Compressor, memory: Memory, direction: str) -> None:
    """Raise ConfigError for a compressor whose error in one message exceeds the tensor, where the
    error is what the memory keeps: it would grow with every visit of a sample."""
    if compressor.feedback == "harmful" and not isinstance(memory, NoMemory):
        raise ConfigError(
            f"compression.{direction} is {compressor.label}, whose error in one message exceeds "
            f"what was meant, and compression.{direction}_memory is {memory!r}, which would add "
            "it up without bound; leave the memory out, or take a compressor that is not unbiased "
            "at so few values or bits"
        )


@settings("compression")
class Compression(CompressionPlan):
    """The compressors of each direction of every boundary. A channel works on copies.

    forward: compressor of activations.
    backward: compressor of their gradients.
    forward_memory: memory that a channel of activations keeps from one step to the next.
    backward_memory: memory that a channel of gradients keeps from one step to the next.
    averaging: compressor of the gradients or weight changes that replicas send each other. None:
        the compressor of backward.
    """

    forward: Compressor = field(default_factory=Chain)
    backward: Compressor = field(default_factory=Chain)
    forward_memory: Memory = field(default_factory=NoMemory)
    backward_memory: Memory = field(default_factory=NoMemory)
    averaging: TensorChoice | None = None

    def __post_init__(self) -> None:
        for direction in ("forward", "backward"):
            compressor: Compressor = getattr(self, direction)
            check_memory(
                compressor, memory=getattr(self, f"{direction}_memory"), direction=direction
            )

    @property
    def averaged(self) -> Compression:
        return self

    @property
    def by_step(self) -> Sequence[tuple[int | None, Compression]]:
        return [(None, self)]

    @property
    def averaging_choice(self) -> TensorChoice:
        return self.backward if self.averaging is None else self.averaging

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
        if self.averaging is None:
            return label
        return f"{label}, averaging {self.averaging.label}"

    @property
    def is_identity(self) -> bool:
        used = (self.forward, self.backward, self.averaging_choice)
        return not self.has_memory and all(choice.is_identity for choice in used)
