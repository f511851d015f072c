"""Compression that changes by step, boundary or tensor, and what a run may choose between while it
goes on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xcloud.base.errors import ConfigError
from xcloud.base.patterns import MAX_PATTERNS, check_pattern
from xcloud.base.settings import NotNegative, settings
from xcloud.comm.channel import Codec, Codecs
from xcloud.comm.compression import Compression, CompressionPlan
from xcloud.comm.compressor import Compressor, TensorChoice
from xcloud.comm.state import StatefulTree

_EMBEDDING = re.compile(
    r"(^|\.)(embed\w*|\w+_embed(ding)?s?|wte|wpe|words|positions|types|lm_head)(\.|$)"
)
_NAME = re.compile(r"boundary_(\d+)")
_ROWS = re.compile(r"\[\d+:\d+\]$")


@settings("compression.averaging")
class PerTensor(TensorChoice):
    """One compressor for most tensors, and others for some.

    default: compressor of all tensors to which no other entry applies.
    vectors: compressor of norms, biases and all other tensors with one axis or none. They have few
        values and much effect. None: default.
    embeddings: compressor of word and position tables and of the head over the vocabulary, which
        are recognized by name. A step changes few of their rows. None: default.
    names: compressors by regular expression, to be found in a parameter's name, such as "lora_B"
        or "layers\\.0\\.". The first that is found decides, before vectors and embeddings. Only
        single characters may be repeated in such an expression, and twice at most, so that the
        search takes no time (base.patterns).
    """

    default: Compressor
    vectors: Compressor | None = None
    embeddings: Compressor | None = None
    names: Mapping[str, Compressor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.names) > MAX_PATTERNS:
            raise ConfigError(
                f"compression.averaging.names has {len(self.names)} patterns; at most "
                f"{MAX_PATTERNS} are taken"
            )
        for pattern in self.names:
            check_pattern("compression.averaging.names", pattern)

    def for_tensor(self, name: str, shape: Sequence[int]) -> Compressor:
        """name: of the parameter, its module's name before it; rows of it that an average cuts
        out, such as "…weight[0:64]", are called as the whole."""
        # A matrix that is dealt out by rows has one compressor.
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
        """The name in tables, such as "powersgd(4), vectors: fp16"."""
        others = (f"{name}: {compressor.label}" for name, compressor in self._special.items())
        return ", ".join((self.default.label, *others))

    @property
    def is_identity(self) -> bool:
        return all(c.is_identity for c in (self.default, *self._special.values()))

    @property
    def _special(self) -> dict[str, Compressor]:
        some = {"vectors": self.vectors, "embeddings": self.embeddings, **self.names}
        return {name: compressor for name, compressor in some.items() if compressor is not None}


@settings("Phase")
class Phase:
    """A phase of training, with its compression.

    until_step: the last step of this phase; None for the last phase.
    compression: the compression that acts in this phase.
    """

    until_step: NotNegative | None
    compression: Compression


class Phased(CompressionPlan):
    """Different compression in successive phases of training, in the order given.

    Every phase has its own memories, empty at its first step.

    phases: one by name each, with its until_step and its compression; the last one's until_step is
        null.
    """

    def __init__(self, **phases: Phase) -> None:
        for name, phase in phases.items():
            _check(f"Phased.{name}", phase, Phase)
        *ends, last = [phase.until_step for phase in phases.values()] or [0]
        if last is not None or ends != sorted({end for end in ends if end is not None}):
            raise ConfigError(
                f"Phased: every phase must end (until_step) after the one before, and the last "
                f"one never (null); got until_step {[*ends, last]} for {list(phases)}"
            )
        self.phases = dict(phases)

    @property
    def by_step(self) -> Sequence[tuple[int | None, Compression]]:
        return [(phase.until_step, phase.compression) for phase in self.phases.values()]

    @property
    def averaged(self) -> Compression:
        (_, first), *others = self.by_step
        means = [one.averaging_choice for _, one in self.by_step]
        if others and any(repr(mean) != repr(means[0]) for mean in means):
            raise ConfigError(
                "what replicas average cannot change its compressor during a run, but the phases "
                f"of compression have {', '.join(dict.fromkeys(map(str, means)))}; give every "
                "phase the same `averaging`"
            )
        return first

    @property
    def label(self) -> str:
        """The name in tables, such as "none+none to step 200, int4+int8"."""
        return ", ".join(
            phase.compression.label
            + ("" if phase.until_step is None else f" to step {phase.until_step}")
            for phase in self.phases.values()
        )

    def __repr__(self) -> str:
        return f"Phased({', '.join(f'{name}={phase}' for name, phase in self.phases.items())})"


class PerBoundary(CompressionPlan):
    """`default` at every boundary except those named: boundary_1=... is the one after stage 1.

    For models whose boundaries carry different things: sending 15 % of a gradient's rows suits a
    boundary with one row per token, not one with a row per sample.

    default: the compression of all other boundaries.
    boundaries: the compression of one boundary each, as boundary_N, with N the stage before it.
    """

    def __init__(self, default: Compression | Phased, **boundaries: Compression | Phased) -> None:
        _check("PerBoundary.default", default, Compression, Phased)
        self.default = default
        self._boundaries: dict[int, Compression | Phased] = {}
        for name, compression in boundaries.items():
            _check(f"PerBoundary.{name}", compression, Compression, Phased)
            if (match := _NAME.fullmatch(name)) is None:
                raise ConfigError(
                    f"PerBoundary.{name}: name a boundary boundary_N, with N the stage before it"
                )
            self._boundaries[int(match[1])] = compression
        self.boundaries = sorted(self._boundaries)

    @property
    def by_step(self) -> Sequence[tuple[int | None, Compression]]:
        plans = (self.default, *self._boundaries.values())
        return [entry for plan in plans for entry in plan.by_step]

    def at_boundary(self, stage: int) -> CompressionPlan:
        return self._boundaries.get(stage, self.default)

    def at(self, step: int) -> Compression:
        raise ConfigError("compression differs by boundary: ask at_boundary(stage) first")

    @property
    def averaged(self) -> Compression:
        return self.default.averaged

    @property
    def label(self) -> str:
        """The name in tables, such as "int4+int2, boundary 1: int8+int8"."""
        others = (f"boundary {s}: {self._boundaries[s].label}" for s in self.boundaries)
        return ", ".join((self.default.label, *others))

    def __repr__(self) -> str:
        others = (f", boundary_{stage}={self._boundaries[stage]}" for stage in self.boundaries)
        return f"PerBoundary(default={self.default}{''.join(others)})"


def _check(name: str, value: object, *kinds: type) -> None:
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(
            f"{name} must be a {wanted}, got {value!r}; in YAML give it a _target_, such as "
            "xcloud.comm.compression.Compression"
        )


class Selection(StatefulTree):
    """The choice that is in force from each step, in one rank. All its channels look here."""

    own_names = ("choice", "before", "since_step")

    choice = 0
    before = 0
    since_step = 0

    def switch(self, choice: int, from_step: int) -> None:
        self.choice, self.before, self.since_step = choice, self.at(from_step - 1), from_step

    def at(self, step: int) -> int:
        """The number of the choice at this step; of none before the last switch but one."""
        return self.choice if step >= self.since_step else self.before


@dataclass(eq=False)
class Selectable(CompressionPlan):
    """Several compressions by name, between which a run can change. It begins with the first, and
    replicas are averaged with it.

    chosen_by: name of the feature that chooses, for tables.

    Every choice has compressors and memories of its own at both ends of a channel. They do not
    change while another choice is in force. So a delta cache stays equal at both ends, and what
    error feedback has not sent yet is added to the first message of its sample once the choice is
    in force again.
    """

    choices: Mapping[str, Compression]
    chosen_by: str = "choice"

    @property
    def by_step(self) -> Sequence[tuple[int | None, Compression]]:
        return [(None, choice) for choice in self.choices.values()]

    def at(self, step: int) -> Compression:
        raise ConfigError(
            "this run changed its compression while it ran, so its settings do not "
            "say which it ended with; leave the compressors out (--uncompressed)"
        )

    @property
    def averaged(self) -> Compression:
        return next(iter(self.choices.values()))

    @property
    def label(self) -> str:
        return f"{self.chosen_by}({', '.join(choice.label for choice in self.choices.values())})"


@dataclass(eq=False)
class SelectableCodecs(Codecs):
    """The codec of one direction for every choice of a `Selectable`; `selection` says which is in
    force."""

    selection: Selection

    def at(self, step: int) -> Codec:
        return self.phases[self.selection.at(step)][1]
