"""The figures of a progress line, the same in every terminal of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xcloud.base.units import human_bandwidth

SMOOTHING = 0.9  # weight of the past: the figures look back over about ten steps


@dataclass
class Smoothed:
    """Exponential moving averages by name: sum(w^age * x) / sum(w^age), where a step in which a
    name has no value makes its values older too."""

    _sums: dict[str, tuple[float, float]] = field(default_factory=dict)  # value and weight

    def add(self, values: Mapping[str, float]) -> dict[str, float]:
        """Take the figures of a step. Return all averages."""
        for name, (value, weight) in self._sums.items():
            self._sums[name] = SMOOTHING * value, SMOOTHING * weight
        for name, value in values.items():
            past, weight = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = past + value, weight + 1.0
        return {name: value / weight for name, (value, weight) in self._sums.items()}


def rate_in_words(num_bytes: float, step_s: float) -> str:
    """Describe how fast a cloud sends what a step sends."""
    return f"sends {human_bandwidth(8 * num_bytes / step_s)}"
