"""What the soak calls flat."""

import random

from benchmarks.soak import growth, line_through


def test_a_leak_is_told_from_noise_and_from_a_warm_up() -> None:
    noise = random.Random(0)
    steps = range(0, 100_000, 500)
    warm = [(step, 200 + min(30.0, step / 500) + noise.gauss(0, 3)) for step in steps]
    leaking = [(step, mb + 30 * step / 1e5) for step, mb in warm]

    assert growth(warm, 100_000)["flat"] is True
    found = growth(leaking, 100_000)
    assert found["flat"] is False and 20 < found["mb_per_100000_steps"] < 40
    assert growth(warm[:3], 100_000)["flat"] is None
    assert line_through([(0, 1.0), (1, 3.0), (2, 5.0)]) == (2.0, 0.0)
