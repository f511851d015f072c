"""Different compression at different boundaries of one run."""

from __future__ import annotations

import re
from collections.abc import Sequence

from xcloud.base.errors import ConfigError
from xcloud.comm.compressor import Compressor
from xcloud.comm.phases import Compression, Phased

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
                    "YAML give it a _target_, such as xcloud.comm.phases.Compression"
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
