"""The figures of the progress line look back over some ten steps."""

import pytest

from xcloud.show.smoothing import Smoothed, rate_in_words


def test_an_average_weighs_the_past_less_and_a_step_without_a_value_ages_it() -> None:
    smoothed = Smoothed()
    assert smoothed.add({"loss": 4.0}) == {"loss": 4.0}
    found = smoothed.add({"loss": 2.0, "step_s": 1.0})
    assert found == {"loss": pytest.approx((0.9 * 4 + 2) / 1.9), "step_s": 1.0}
    assert smoothed.add({"step_s": 2.0})["loss"] == pytest.approx(found["loss"])
    after = smoothed.add({"loss": 0.0})["loss"]
    assert after == pytest.approx((0.9**3 * 4 + 0.9**2 * 2) / (0.9**3 + 0.9**2 + 1))


def test_a_rate_is_in_bits_a_second() -> None:
    assert rate_in_words(1000.0, 2.0) == "sends 4 kbit/s"
