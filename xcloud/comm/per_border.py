"""Different compression at different borders of one run."""

from __future__ import annotations

import re
from collections.abc import Sequence

from xcloud.comm.compressor import Compressor
from xcloud.comm.phases import Compression, Phased
from xcloud.errors import ConfigError

_NAME = re.compile(r"border_(\d+)")


class PerBorder:
    """`default` at every border except those named: border_1=... is the one after stage 1.

    For models whose borders carry different things: sending 15 % of a gradient's rows suits a
    border with one row per token, not one with a row per sample.
    """

    def __init__(self, default: Compression | Phased, **borders: Compression | Phased) -> None:
        self._borders: dict[int, Compression | Phased] = {}
        for name, compression in {"default": default, **borders}.items():
            if not isinstance(compression, Compression | Phased):
                raise ConfigError(
                    f"PerBorder.{name} must be a Compression or Phased, got {compression!r}; in "
                    "YAML give it a _target_, such as xcloud.comm.phases.Compression"
                )
            if name == "default":
                continue
            if (match := _NAME.fullmatch(name)) is None:
                raise ConfigError(
                    f"PerBorder.{name}: name a border border_N, with N the stage before it"
                )
            self._borders[int(match[1])] = compression
        self.default = default

    @property
    def borders(self) -> tuple[int, ...]:
        """Borders with their own compression."""
        return tuple(sorted(self._borders))

    def at_border(self, stage: int) -> Compression | Phased:
        """Compression at the border after `stage`."""
        return self._borders.get(stage, self.default)

    def for_tensor(self, name: str, shape: Sequence[int]) -> Compressor:
        """The compressor of a tensor that replicas average: that of `default`."""
        return self.default.for_tensor(name, shape)

    @property
    def averaging_label(self) -> str:
        return self.default.averaging_label

    @property
    def label(self) -> str:
        """Such as "int4+int2, border 1: int8+int8"."""
        others = (f"border {stage}: {self._borders[stage].label}" for stage in self.borders)
        return ", ".join((self.default.label, *others))

    @property
    def is_identity(self) -> bool:
        return all(c.is_identity for c in (self.default, *self._borders.values()))

    def __repr__(self) -> str:
        others = (f", border_{stage}={self._borders[stage]}" for stage in self.borders)
        return f"PerBorder(default={self.default}{''.join(others)})"
