"""Which combinations of parameters are run every time, and which once a night."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from _pytest.mark import ParameterSet

NIGHTLY = (pytest.mark.slow, pytest.mark.nightly)


def first_daily(values: Sequence[Any], count: int) -> list[ParameterSet]:
    """For pytest.mark.parametrize, the first `count` values, and the others nightly. A tuple is a
    row of several values."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [
        pytest.param(*row, marks=() if place < count else NIGHTLY)
        for place, row in enumerate(rows)
    ]


def each_once(*axes: Sequence[Any], count: int | None = None) -> list[ParameterSet]:
    """For pytest.mark.parametrize, all combinations of some values: as many as it takes to have
    every value once, or the first `count` of these, and the others nightly."""
    axes = tuple([*axis] for axis in axes)
    places = [range(len(axis)) for axis in axes]
    daily = {tuple(i % len(axis) for axis in axes) for i in range(count or max(map(len, axes)))}
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(axes, row, strict=True)),
            id="-".join(
                getattr(axis[place], "__name__", str(axis[place]))
                for axis, place in zip(axes, row, strict=True)
            ),
            marks=() if row in daily else NIGHTLY,
        )
        for row in product(*places)
    ]
