"""Which compressors and memories act where: at a boundary, from which step on, on which tensor of
an average; and which of them a run may choose between (rank/autopilot.py chooses).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType

from xcloud.base.checks import check_int
from xcloud.base.errors import ConfigError
from xcloud.comm.compressor import Compressor
from xcloud.comm.memory import Memory, NoMemory
from xcloud.comm.precision import Nothing
from xcloud.comm.state import State, whole_number

_EMBEDDING = re.compile(
    r"(^|\.)(embed\w*|\w+_embed(ding)?s?|wte|wpe|words|positions|types|lm_head)(\.|$)"
)
_ROWS = re.compile(r"\[\d+:\d+\]$")


class PerTensor:
    """`default`, except for some.

    vectors: norms and biases, and whatever has one axis or none; they are few values of much
        effect. embeddings: tables of words and positions and the head over the vocabulary, by the
        name; a step changes few of their rows. names: regular expressions to be found in a
        parameter's name, such as "lora_B" or "layers\\.0\\."; the first that is found decides,
        before vectors and embeddings. What is None counts as the rest.
    """

    def __init__(
        self,
        default: Compressor,
        vectors: Compressor | None = None,
        embeddings: Compressor | None = None,
        names: Mapping[str, Compressor] | None = None,
    ) -> None:
        self.default, self.vectors, self.embeddings = default, vectors, embeddings
        self.names = dict(names or {})
        for name, compressor in self._named.items():
            if not isinstance(compressor, Compressor):
                raise ConfigError(
                    f"PerTensor.{name} must be a compressor, got {compressor!r}; in YAML give it "
                    "a _target_, such as xcloud.comm.chain.Chain"
                )
        for pattern in self.names:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"PerTensor.names: {pattern!r} is no regular expression: {error}"
                ) from error

    def for_tensor(self, name: str, shape: Sequence[int]) -> Compressor:
        """name: of the parameter, its module's name before it; rows of it that an average cuts
        out, such as "…weight[0:64]", are called as the whole."""
        name = _ROWS.sub("", name)
        for pattern, compressor in self.names.items():
            if re.search(pattern, name):
                return compressor
        if self.vectors is not None and len(shape) < 2:
            return self.vectors
        if self.embeddings is not None and _EMBEDDING.search(name):
            return self.embeddings
        return self.default

    @property
    def label(self) -> str:
        """Such as "powersgd(4), vectors: fp16"."""
        (_, default), *others = self._named.items()
        return ", ".join((default.label, *(f"{name}: {c.label}" for name, c in others)))

    @property
    def is_identity(self) -> bool:
        return all(compressor.family == "none" for compressor in self._named.values())

    @property
    def _named(self) -> dict[str, Compressor]:
        some = {"vectors": self.vectors, "embeddings": self.embeddings, **self.names}
        return {"default": self.default} | {n: c for n, c in some.items() if c is not None}

    def __repr__(self) -> str:
        return f"PerTensor({', '.join(f'{name}={c}' for name, c in self._named.items())})"


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
            _check("averaging", self.averaging, kinds, "xcloud.comm.compression.PerTensor")

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


_NAME = re.compile(r"boundary_(\d+)")


class PerBoundary:
    """`default` at every boundary except those named: boundary_1=... is the one after stage 1.

    For models whose boundaries carry different things: sending 15 % of a gradient's rows suits a
    boundary with one row per token, not one with a row per sample.
    """

    def __init__(self, default: Compression | Phased, **boundaries: Compression | Phased) -> None:
        self._boundaries: dict[int, Compression | Phased] = {}
        for name, compression in {"default": default, **boundaries}.items():
            if not isinstance(compression, Compression | Phased):
                raise ConfigError(
                    f"PerBoundary.{name} must be a Compression or Phased, got {compression!r}; in "
                    "YAML give it a _target_, such as xcloud.comm.compression.Compression"
                )
            if name == "default":
                continue
            if (match := _NAME.fullmatch(name)) is None:
                raise ConfigError(
                    f"PerBoundary.{name}: name a boundary boundary_N, with N the stage before it"
                )
            self._boundaries[int(match[1])] = compression
        self.default = default

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Boundaries with their own compression."""
        return tuple(sorted(self._boundaries))

    def at_boundary(self, stage: int) -> Compression | Phased:
        """Compression at the boundary after `stage`."""
        return self._boundaries.get(stage, self.default)

    def for_tensor(self, name: str, shape: Sequence[int]) -> Compressor:
        """The compressor of a tensor that replicas average: that of `default`."""
        return self.default.for_tensor(name, shape)

    @property
    def averaging_label(self) -> str:
        return self.default.averaging_label

    @property
    def label(self) -> str:
        """Such as "int4+int2, boundary 1: int8+int8"."""
        others = (
            f"boundary {stage}: {self._boundaries[stage].label}" for stage in self.boundaries
        )
        return ", ".join((self.default.label, *others))

    @property
    def is_identity(self) -> bool:
        return all(c.is_identity for c in (self.default, *self._boundaries.values()))

    def __repr__(self) -> str:
        others = (f", boundary_{stage}={self._boundaries[stage]}" for stage in self.boundaries)
        return f"PerBoundary(default={self.default}{''.join(others)})"


class Selection:
    """Which choice is in force from which step, in one rank. All its channels look here."""

    def __init__(self) -> None:
        self.choice, self.before, self.since_step = 0, 0, 0

    def switch(self, choice: int, from_step: int) -> None:
        self.choice, self.before, self.since_step = choice, self.at(from_step - 1), from_step

    def at(self, step: int) -> int:
        """The number of the choice at this step; of none before the last switch but one."""
        return self.choice if step >= self.since_step else self.before

    def state_dict(self) -> State:
        return {"choice": self.choice, "before": self.before, "since_step": self.since_step}

    def load_state_dict(self, state: State) -> None:
        for name in ("choice", "before", "since_step"):
            setattr(self, name, whole_number(state, name))


class Selectable:
    """The choices by name; the run begins with the first. Replicas are not averaged with it."""

    def __init__(self, choices: Mapping[str, Compression]) -> None:
        self.choices = dict(choices)

    @property
    def names(self) -> list[str]:
        return list(self.choices)

    def at_boundary(self, stage: int) -> Selectable:
        return self

    def at(self, step: int) -> Compression:
        raise ConfigError(
            "this run chose its compression while it went on (autopilot), so its settings do not "
            "say which it ended with; leave the compressors out (--uncompressed)"
        )

    def for_tensor(self, name: str, shape: Sequence[int]) -> Compressor:
        """Of a matrix that both ends of the pipeline hold: that of the first choice."""
        return next(iter(self.choices.values())).for_tensor(name, shape)

    @property
    def averaging_label(self) -> str:
        return next(iter(self.choices.values())).averaging_label

    @property
    def has_memory(self) -> bool:
        return any(choice.has_memory for choice in self.choices.values())

    @property
    def label(self) -> str:
        return f"autopilot({', '.join(choice.label for choice in self.choices.values())})"

    @property
    def is_identity(self) -> bool:
        return all(choice.is_identity for choice in self.choices.values())
