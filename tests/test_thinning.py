"""Curves with a bounded number of points."""

import math
import random

import pytest

from xcloud.tracking.mlflow_store import CurvePoint, Thinner, points_of


def thinned(curve: dict[int, float], points: int, num_steps: int) -> list[CurvePoint]:
    thinner, found = Thinner(points, num_steps), []
    for step, value in curve.items():
        found += thinner.feed(points_of({"loss": value}, 0.0, step))
    return found + thinner.close()


@pytest.mark.parametrize("points", [500, 2001])
def test_a_run_of_any_length_has_at_most_so_many_points(points: int) -> None:
    zigzag = random.Random(0)
    for num_steps in (1, points - 1, points, points + 1, 2 * points, 7 * points + 3):
        curve = {step: zigzag.random() for step in range(1, num_steps + 1)}
        found = thinned(curve, points, num_steps)
        assert len(found) <= points
        assert found[-1].step == num_steps
        if num_steps <= points:
            assert [(p.step, p.value) for p in found] == list(curve.items())
            continue
        for share in (0.1, 0.5, 1.0):  # much is left of a run that ends early, too
            early = [p for p in found if p.step <= share * num_steps]
            assert len(early) >= share * points / 3


def test_extremes_and_the_last_value_are_kept_in_order_each_once() -> None:
    curve = {step: 1.0 / step for step in range(1, 20_001)}
    curve |= {7_000: 50.0, 7_001: -50.0, 12_345: math.nan, 19_999: math.inf}
    found = thinned(curve, 500, 20_000)

    steps = [p.step for p in found]
    assert steps == sorted(set(steps))
    assert {7_000, 7_001, 12_345, 19_999, 20_000} <= set(steps)
    assert all(repr(p.value) == repr(curve[p.step]) for p in found)


def test_what_begins_after_a_bucket_gets_the_points_of_one_that_saw_everything() -> None:
    curve = {step: math.sin(step) for step in range(1, 9_001)}
    whole = thinned(curve, 500, 9_000)
    later = thinned({s: v for s, v in curve.items() if s > whole[200].step}, 500, 9_000)
    assert later[-50:] == whole[-50:]
