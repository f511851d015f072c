"""Thin curves to a bounded number of points, for a store that can only append. Pure.

Steps are cut into buckets; kept of each curve are the smallest, the largest and the last value of
a bucket, each at its own step. Where a bucket ends follows from the number of the step alone, so
a run that goes on, or a store that comes back, gets the same points again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

PER_BUCKET = 3


class Point(NamedTuple):
    """One value of one curve."""

    key: str
    value: float
    at_s: float
    step: int


class Buckets:
    """At most about `points` points for a run of num_steps, and enough of one that ends early.

    Buckets are as wide as three quarters of the points allow; the first ones are narrower: of one
    step, then of 2, 4, 8, ... steps, `num_alike` of each width, for the last quarter.
    """

    def __init__(self, points: int, num_steps: int) -> None:
        self._doublings = self._num_alike = 0
        if num_steps > points:
            widest = 4 * num_steps / points  # PER_BUCKET points each: three quarters in all
            self._doublings = math.ceil(math.log2(widest))
            self._num_alike = max(1, points // (4 * PER_BUCKET * self._doublings))

    def of(self, step: int) -> tuple[int, int]:
        """Equal for all steps of a bucket: its width and its number among those."""
        if not self._doublings:
            return 1, step
        doublings = (max(step, 1) // self._num_alike).bit_length() - 1
        width = 1 << min(max(doublings, 0), self._doublings)
        return width, step // width


class Thinner:
    """`feed` the values of each step, in order; it returns the points that are known by then."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._points: dict[str, list[Point]] = {}  # smallest, largest, last
        self._open: tuple[int, int] | None = None  # the bucket of these points

    def feed(self, step: int, values: Mapping[str, float], at_s: float) -> list[Point]:
        bucket, found = self._buckets.of(step), []
        if bucket != self._open:
            found = self.close()
            self._open = bucket
        for key, value in values.items():
            point = Point(key, value, at_s, step)
            low, high, _ = self._points.get(key, (point, point, point))
            low, high = min(low, point, key=_height), max(high, point, key=_height)
            self._points[key] = [low, high, point]
        return found + (self.close() if self._buckets.of(step + 1) != bucket else [])

    def close(self) -> list[Point]:
        """The rest, by step; of the last step in the order in which the values were given."""
        found = [p for points in self._points.values() for p in dict.fromkeys(points)]
        self._points.clear()
        return sorted(found, key=lambda point: point.step)


def _height(point: Point) -> float:
    """Not a number counts as the largest: it must be seen."""
    return math.inf if math.isnan(point.value) else point.value
