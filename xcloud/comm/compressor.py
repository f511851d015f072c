"""What every compressor promises, how one draws random numbers, and chains of compressors. The
compressors themselves are elsewhere; none knows links or ranks.

A compressor turns one floating tensor into a few tensors ("parts") that are cheaper to send, and
back. `family` fixes where in a chain it may stand: low_rank, then sparse, then precision.
"""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Labelled
from xcloud.comm.state import StatefulTree, StateTree
from xcloud.net.frame import Tensors, TensorSpec

Family = Literal["none", "low_rank", "sparse", "precision"]
Feedback = Literal["needless", "useful", "needed", "harmful"]
"""What error feedback does for a compressor whose messages are added up: nothing, as nothing is
lost; less error; convergence, as what is lost is lost in the same direction again; or harm, as the
error of one message exceeds the tensor (unbiased, so that the sum of many is right without)."""


class TensorChoice(ABC):
    """A choice of the compressor of each averaged tensor; a Compressor chooses itself for all.
    compression_plans.PerTensor is another one."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Short name for run names and tables, such as "int8", "topk(0.1)", "svd(0.6)"."""

    @property
    @abstractmethod
    def is_identity(self) -> bool:
        """True if every tensor arrives unchanged."""

    @abstractmethod
    def for_tensor(self, name: str, shape: Sequence[int]) -> Compressor:
        """name: of the parameter, its module's name before it."""


class Compressor(Labelled, TensorChoice, StatefulTree):
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
    def compress(self, tensor: Tensor) -> Tensors:
        """Return tensors with exactly the specs of `wire_specs`. Raises ValueError for
        integers."""

    def compress_gradient(self, gradient: Tensor, activations: Tensor) -> Tensors:
        """Return tensors with the specs of `wire_specs` for a boundary's gradient.

        activations: those that came over the boundary, in the same shape. A compressor may choose
        its errors by them, as the receiver multiplies the gradient by what they were made of.
        """
        return self.compress(gradient)

    @property
    def learns_from_gradients(self) -> bool:
        """Whether `learn_from_gradient` does anything."""
        return False

    def learn_from_gradient(self, gradient: Tensor) -> None:
        """Learn what errors of activations cost from the gradient that came back of them, in
        their shape."""

    @abstractmethod
    def decompress(self, parts: Tensors, spec: TensorSpec) -> Tensor:
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
    if dtype == torch.float64:
        return torch.float64
    return torch.float32


def seed_from(*names: str | int) -> int:
    """A 63-bit seed, the same in every process and on every machine; similar names give unrelated
    seeds."""
    # Not Python's hash, which differs from process to process.
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


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
        self._stream = stream
        self.num_calls = 0

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
    members: compressors by name, the first one applied first.
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
                    f"Chain: {later.label} cannot come after {earlier.label}: members have "
                    "the order low_rank, sparse, precision, with at most one of each"
                )

    @property
    def family(self) -> Family:
        if self.members:
            return [*self.members.values()][-1].family
        return "none"

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

    def compress(self, tensor: Tensor) -> Tensors:
        refuse_integers(tensor)
        parts: Tensors = (tensor.detach(),)
        for member in self.members.values():
            parts = tuple(
                made
                for part in parts
                for made in (member.compress(part) if part.is_floating_point() else (part,))
            )
        return parts

    def compress_gradient(self, gradient: Tensor, activations: Tensor) -> Tensors:
        # What a member makes of a gradient is no gradient of these activations.
        if len(self.members) == 1:
            [member] = self.members.values()
            return member.compress_gradient(gradient, activations)
        return self.compress(gradient)

    @property
    def learns_from_gradients(self) -> bool:
        # What the first member is given has the shape of the gradient, what it makes has not.
        return any(one.learns_from_gradients for one in [*self.members.values()][:1])

    def learn_from_gradient(self, gradient: Tensor) -> None:
        if self.learns_from_gradients:
            next(iter(self.members.values())).learn_from_gradient(gradient)

    def decompress(self, parts: Tensors, spec: TensorSpec) -> Tensor:
        specs = self._specs_after_each(spec)
        # From the last member back. How many parts each has made follows from specs alone.
        for member, before in reversed([*zip(self.members.values(), specs, strict=False)]):
            remaining = list(parts)
            decoded = []
            for part_spec in before:
                size = len(member.wire_specs(part_spec)) if part_spec.is_floating else 1
                taken = tuple(remaining[:size])
                remaining = remaining[size:]
                decoded.append(
                    member.decompress(taken, spec=part_spec) if part_spec.is_floating else taken[0]
                )
            parts = tuple(decoded)
        return parts[0]

    def children(self) -> StateTree:
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


def decodes_rows_alone(compressor: Compressor, num_features: int) -> bool:
    """Return whether a row comes out the same whichever rows cross with it, in every message.

    Tries it with rows of unlike size. They show random numbers, what is carried from message to
    message, choices among all rows, and scales that rows share.
    """
    generator = torch.Generator().manual_seed(0)
    rows_RD = torch.randn(9, num_features, generator=generator)
    rows_RD *= torch.logspace(3, -1, 9)[:, None]
    # One copy for all tries, as what is carried from message to message is to show.
    used = copy.deepcopy(compressor)

    def crossed(rows: Tensor) -> Tensor:
        return used.decompress(used.compress(rows), spec=TensorSpec.of(rows))

    whole = crossed(rows_RD)
    return all(torch.equal(crossed(rows_RD[n:]), whole[n:]) for n in (0, 1, 2, 3, 5, 8))
