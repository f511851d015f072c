"""What every compressor promises, how one draws random numbers, chains of compressors, and which
of them act at a boundary and on what replicas average. The compressors themselves are elsewhere;
none knows links or ranks. Compression that changes by step, boundary or tensor, or is chosen while
a run goes on: compression_plans.py.

A compressor turns one floating tensor into a few tensors ("parts") that are cheaper to send, and
back. `family` fixes where in a chain it may stand: low_rank, then sparse, then precision.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from xcloud.base.errors import ConfigError
from xcloud.base.settings import settings
from xcloud.cluster.frame import TensorSpec
from xcloud.comm.memory import Memory, NoMemory
from xcloud.comm.state import StatefulParts, StateTree

Parts = tuple[Tensor, ...]
Family = Literal["none", "low_rank", "sparse", "precision"]
Feedback = Literal["needless", "useful", "needed", "harmful"]
"""What error feedback does for a compressor whose messages are added up: nothing, as nothing is
lost; less error; convergence, as what is lost is lost in the same direction again; or harm, as the
error of one message exceeds the tensor (unbiased, so that the sum of many is right without)."""


class TensorChoice(ABC):
    """Which compressor each averaged tensor gets; a Compressor chooses itself for all of them.
    compression_plans.PerTensor is another one."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Short name for run names and tables, such as "int8", "topk(0.1)", "svd(0.6)"."""

    @property
    @abstractmethod
    def is_identity(self) -> bool:
        """Whether every tensor arrives unchanged."""

    @abstractmethod
    def for_tensor(self, name: str, shape: Sequence[int]) -> Compressor:
        """name: of the parameter, its module's name before it."""


class Compressor(TensorChoice, StatefulParts):
    """Tensor ↔ parts. Everything the decoder needs is sent as a part, including random seeds.

    A compressor may keep a warm start between calls, which is its state, as long as decoding does
    not need it. Its random numbers depend on the channel and the call (`Draws`).
    """

    @property
    @abstractmethod
    def family(self) -> Family: ...

    @property
    @abstractmethod
    def feedback(self) -> Feedback: ...

    @abstractmethod
    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """Shape and dtype of every part that `compress` returns for a tensor of this spec."""

    @abstractmethod
    def compress(self, tensor: Tensor) -> Parts:
        """Parts with exactly the specs of `wire_specs`. Raises ValueError for integer tensors."""

    @abstractmethod
    def decompress(self, parts: Parts, spec: TensorSpec) -> Tensor:
        """The tensor as the receiver sees it, of exactly this spec (shape and dtype)."""

    def use_stream(self, stream: int) -> None:
        """Draw from this random stream, starting at its first call. Different streams share no
        random numbers."""

    @property
    def is_identity(self) -> bool:
        return self.family == "none"

    def for_tensor(self, name: str, shape: Sequence[int]) -> Compressor:
        return self


def refuse_integers(tensor: Tensor) -> None:
    """Raise ValueError unless the tensor is floating-point."""
    if not tensor.is_floating_point():
        raise ValueError(f"only floating tensors can be compressed, got {tensor.dtype}")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def seed_from(*names: str | int) -> int:
    """A 63-bit seed, the same in every process and on every machine; similar names give unrelated
    seeds."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class ChannelId:
    """Identifies one direction between two ranks over one boundary; the same at both ends.

    seed: of the experiment. boundary: the stage before it. direction: "forward" or "backward".
    sender, receiver: ranks.
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


class Draws(Compressor):
    """Base class of random compressors: one seed per call, from the stream, the compressor's own
    `seed` and the call's number. The stream depends on where the compressor is used, so the only
    state is the number of calls.
    """

    seed: int
    own_names = ("num_calls",)
    num_calls = 0
    _stream = 0

    def use_stream(self, stream: int) -> None:
        self._stream, self.num_calls = stream, 0

    def _next_seed(self) -> int:
        self.num_calls += 1
        return seed_from(self._stream, self.seed, self.num_calls)


_ORDER: tuple[Family, ...] = ("none", "low_rank", "sparse", "precision")
_STRONGEST_FIRST: tuple[Feedback, ...] = ("harmful", "needed", "useful")


class Chain(Compressor):
    """Named compressors; each compresses the floating-point parts of the previous one's output.

    Integer parts pass unchanged: members send what must not be compressed again (positions,
    scales, seeds) as integers. Families come in the order low_rank, sparse, precision, each at
    most once. An empty chain, "none", sends the tensor itself, which may share its memory.

        Chain(svd=Svd(0.6), fp16=Cast("float16")).label == "fp16(svd(0.6))"

    Wire: each floating-point part is replaced by the next member's parts; integer parts keep
    their place.
    """

    def __init__(self, **members: Compressor) -> None:
        for name, member in members.items():
            if not isinstance(member, Compressor):
                raise ConfigError(
                    f"Chain member {name!r} must be a compressor, got {member!r}; in YAML give it "
                    "a _target_, such as xcloud.comm.precision.Cast"
                )
            if isinstance(member, Chain):
                raise ConfigError(
                    f"Chain member {name!r} is itself a chain ({member.label}); name its members "
                    "in the outer chain instead"
                )
        self.members = dict(members)
        for earlier, later in pairwise(members.values()):
            if _ORDER.index(later.family) <= _ORDER.index(earlier.family):
                raise ConfigError(
                    f"Chain: {later.label} cannot come after {earlier.label}: members stand in "
                    "the order low_rank, sparse, precision, with at most one of each"
                )

    @property
    def family(self) -> Family:
        return [*self.members.values()][-1].family if self.members else "none"

    @property
    def feedback(self) -> Feedback:
        """The strongest of its members'."""
        kinds = {member.feedback for member in self.members.values()}
        return next((kind for kind in _STRONGEST_FIRST if kind in kinds), "needless")

    @property
    def label(self) -> str:
        """The paper's notation, the first member innermost."""
        label = ""
        for member in self.members.values():
            label = f"{member.label}({label})" if label else member.label
        return label or "none"

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return self._specs_after_each(spec)[-1]

    def compress(self, tensor: Tensor) -> Parts:
        refuse_integers(tensor)
        parts: Parts = (tensor.detach(),)
        for member in self.members.values():
            parts = tuple(
                made
                for part in parts
                for made in (member.compress(part) if part.is_floating_point() else (part,))
            )
        return parts

    def decompress(self, parts: Parts, spec: TensorSpec) -> Tensor:
        specs = self._specs_after_each(spec)
        for member, before in reversed([*zip(self.members.values(), specs, strict=False)]):
            remaining = list(parts)
            decoded = []
            for part_spec in before:
                size = len(member.wire_specs(part_spec)) if part_spec.is_floating else 1
                taken, remaining = tuple(remaining[:size]), remaining[size:]
                decoded.append(
                    member.decompress(taken, part_spec) if part_spec.is_floating else taken[0]
                )
            parts = tuple(decoded)
        return parts[0]

    def parts(self) -> StateTree:
        return self.members

    def use_stream(self, stream: int) -> None:
        """Give every member a random stream of its own."""
        for name, member in self.members.items():
            member.use_stream(seed_from(stream, name))

    def __repr__(self) -> str:
        return f"Chain({', '.join(f'{name}={member}' for name, member in self.members.items())})"

    def _specs_after_each(self, spec: TensorSpec) -> list[tuple[TensorSpec, ...]]:
        """Specs before the first member, and after each."""
        specs: list[tuple[TensorSpec, ...]] = [(spec,)]
        for member in self.members.values():
            specs.append(
                tuple(
                    made
                    for part in specs[-1]
                    for made in (member.wire_specs(part) if part.is_floating else (part,))
                )
            )
        return specs


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
        return self.averaged.averaging_choice.for_tensor(name, shape)

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


@settings("compression")
class Compression(CompressionPlan):
    """forward: for activations. backward: for their gradients. averaging: for what replicas send
    each other of their gradients or weight changes; None for that of backward. A channel works on
    copies."""

    forward: Compressor = field(default_factory=Chain)
    backward: Compressor = field(default_factory=Chain)
    forward_memory: Memory = field(default_factory=NoMemory)
    backward_memory: Memory = field(default_factory=NoMemory)
    averaging: TensorChoice | None = None

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
        return label if self.averaging is None else f"{label}, averaging {self.averaging.label}"

    @property
    def is_identity(self) -> bool:
        used = (self.forward, self.backward, self.averaging_choice)
        return not self.has_memory and all(choice.is_identity for choice in used)
