"""The compressors and memories of a boundary, and from which training step they apply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import UnionType

from xcloud.base.checks import check_int
from xcloud.base.errors import ConfigError
from xcloud.comm.cast import Nothing
from xcloud.comm.compressor import Compressor
from xcloud.comm.memory import Memory, NoMemory
from xcloud.comm.per_tensor import PerTensor


@dataclass(frozen=True)
class Compression:
    """forward: for activations. backward: for their gradients. averaging: for what replicas tell
    each other of their gradients or weight changes; None for that of backward. A channel works on
    copies."""

    forward: Compressor = field(default_factory=Nothing)
    backward: Compressor = field(default_factory=Nothing)
    forward_memory: Memory = field(default_factory=NoMemory)
    backward_memory: Memory = field(default_factory=NoMemory)
    averaging: Compressor | PerTensor | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            _check(name, getattr(self, name), Compressor, "xcloud.comm.chain.Chain")
            memory = f"{name}_memory"
            _check(memory, getattr(self, memory), Memory, "xcloud.comm.memory.NoMemory")
        if self.averaging is not None:
            kinds = Compressor | PerTensor
            _check("averaging", self.averaging, kinds, "xcloud.comm.per_tensor.PerTensor")

    def for_tensor(self, name: str, shape: Sequence[int]) -> Compressor:
        """The compressor of a tensor that replicas average."""
        if isinstance(self.averaging, PerTensor):
            return self.averaging.for_tensor(name, shape)
        return self.averaging or self.backward

    @property
    def averaging_label(self) -> str:
        return (self.backward if self.averaging is None else self.averaging).label

    def at(self, step: int) -> Compression:
        return self

    def at_boundary(self, stage: int) -> Compression:
        return self

    @property
    def has_memory(self) -> bool:
        """Whether anything is kept per sample between visits."""
        return not (
            isinstance(self.forward_memory, NoMemory)
            and isinstance(self.backward_memory, NoMemory)
        )

    @property
    def label(self) -> str:
        """Forward + backward, a memory around its compressor: "fp16(svd(0.6))+ef(int8)"; behind
        them that of averaging, if it has its own."""
        forward = _with_memory(self.forward, self.forward_memory)
        boundaries = f"{forward}+{_with_memory(self.backward, self.backward_memory)}"
        if self.averaging is None:
            return boundaries
        return f"{boundaries}, averaging {self.averaging.label}"

    @property
    def is_identity(self) -> bool:
        """Whether every tensor arrives unchanged."""
        if isinstance(self.averaging, PerTensor) and not self.averaging.is_identity:
            return False
        boundaries = self.forward.family == self.backward.family == "none" and not self.has_memory
        return boundaries and (self.averaging is None or self.for_tensor("", ()).family == "none")


@dataclass(frozen=True)
class Phase:
    """until_step: the last step of this phase; None for the last phase."""

    until_step: int | None
    compression: Compression

    def __post_init__(self) -> None:
        if self.until_step is not None:
            check_int("Phase.until_step", self.until_step, 0)
        _check("Phase.compression", self.compression, Compression, f"{__name__}.Compression")


class Phased:
    """Different compression in successive phases of training, in the order given.

    Every phase has its own memories, empty at its first step.
    """

    def __init__(self, **phases: Phase) -> None:
        for name, phase in phases.items():
            _check(f"Phased.{name}", phase, Phase, f"{__name__}.Phase")
        names, steps = list(phases), [phase.until_step for phase in phases.values()]
        if not steps or steps[-1] is not None:
            raise ConfigError(
                "Phased needs a last phase with until_step null, which lasts to the end; "
                f"got until_step {steps} for {names}"
            )
        previous = -1
        for name, until in zip(names[:-1], steps[:-1], strict=True):
            if until is None:
                raise ConfigError(
                    f"Phased.{name}.until_step is null, so {names[-1]!r} would never begin; give "
                    "every phase except the last the step at which it ends"
                )
            if until <= previous:
                raise ConfigError(
                    f"Phased.{name}.until_step must exceed that of the phase before ({previous}), "
                    f"got {until}; list the phases in the order of their steps"
                )
            previous = until
        self.phases = dict(phases)

    def at_boundary(self, stage: int) -> Phased:
        return self

    def for_tensor(self, name: str, shape: Sequence[int]) -> Compressor:
        """Raises ConfigError unless it is the same in all phases."""
        first, *others = (p.compression.for_tensor(name, shape) for p in self.phases.values())
        for other in others:
            if repr(other) != repr(first):
                raise ConfigError(
                    "Phased: replicas average with one compressor for the whole run, but its "
                    f"phases have {first} and {other}; give every phase the same `averaging`"
                )
        return first

    @property
    def averaging_label(self) -> str:
        """Raises ConfigError if it changes with the phase."""
        labels = dict.fromkeys(p.compression.averaging_label for p in self.phases.values())
        if len(labels) > 1:
            raise ConfigError(
                f"what replicas average cannot change its compressor during a run, but the phases "
                f"of compression have {', '.join(labels)}; give every phase the same `averaging`"
            )
        return next(iter(labels))

    def at(self, step: int) -> Compression:
        for phase in self.phases.values():
            if phase.until_step is None or step <= phase.until_step:
                return phase.compression
        raise AssertionError("the last phase has no end")

    @property
    def has_memory(self) -> bool:
        """In any phase, since a sample's lane must be the same in all of them."""
        return any(phase.compression.has_memory for phase in self.phases.values())

    @property
    def label(self) -> str:
        """Such as "none+none to step 200, int4+int8"."""
        return ", ".join(
            phase.compression.label
            + ("" if phase.until_step is None else f" to step {phase.until_step}")
            for phase in self.phases.values()
        )

    @property
    def is_identity(self) -> bool:
        return all(phase.compression.is_identity for phase in self.phases.values())

    def __repr__(self) -> str:
        return f"Phased({', '.join(f'{name}={phase}' for name, phase in self.phases.items())})"


def _with_memory(compressor: Compressor, memory: Memory) -> str:
    return f"{memory.label}({compressor.label})" if memory.label else compressor.label


def _check(name: str, value: object, kind: type | UnionType, example: str) -> None:
    if not isinstance(value, kind):
        raise ConfigError(
            f"{name} must be a {getattr(kind, '__name__', kind)}, got {value!r}; in YAML give it "
            f"a _target_, such as {example}"
        )
