"""Figures as a person reads them, at the places where their form changes."""

from math import inf, nan

import pytest

from xcloud.base.units import (
    human_bandwidth,
    human_bytes,
    human_duration,
    human_number,
    human_percent,
    human_seconds,
    score_name,
    score_text,
    score_with_error,
    shown_scores,
)


@pytest.mark.parametrize(
    ("write", "texts"),
    [
        (
            human_seconds,
            {None: "-", 0.00021: "0.21 ms", 0.412: "412 ms", 0.9994: "999 ms", 0.9996: "1.00 s",
             9.99: "9.99 s", 9.996: "10.0 s", 99.9: "99.9 s", 99.96: "100 s", 1234.0: "1234 s"},
        ),
        (
            human_duration,
            {inf: "?", nan: "?", -3.0: "0 s", 42.4: "42 s", 99.4: "99 s", 99.6: "2 min",
             780.0: "13 min", 5969.0: "99 min", 5999.0: "1 h 40 min", 7500.0: "2 h 05 min"},
        ),
        (
            human_bytes,
            {None: "-", 812.0: "812 B", 999.4: "999 B", 1000.0: "1.00 kB", 393_000.0: "393 kB",
             999_600.0: "1.00 MB", 1.57e6: "1.57 MB", 2e9: "2.00 GB", 2e12: "2.00 TB",
             2e16: "20000 TB", -2000.0: "-2.00 kB"},
        ),
        (
            human_bandwidth,
            {200e3: "200 kbit/s", 999.4e3: "999 kbit/s", 999.6e3: "1 Mbit/s", 1e6: "1 Mbit/s",
             999.6e6: "1 Gbit/s", 2.5e9: "2.5 Gbit/s", 999.6e9: "1 Tbit/s", 3e13: "30 Tbit/s"},
        ),
        (human_percent, {None: "-", 0.126: "13 %", 1.0: "100 %"}),
        (lambda share: human_percent(share, digits=1), {0.1264: "12.6 %"}),
        (lambda value: human_number(value, ".3f"), {None: "-", 0.5: "0.500"}),
    ],
)  # fmt: skip
def test_a_figure_is_written_in_three_digits_and_the_unit_that_fits(write, texts) -> None:  # type: ignore[no-untyped-def]
    assert {value: write(value) for value in texts} == texts


def test_a_score_has_the_decimals_of_its_scale() -> None:
    four = ("label_leak_auc", "token_recovery", "averaging_token_recovery", "reward_margin",
            "chosen_reward", "eval_arc", "loss", "replaced_loss")  # fmt: skip
    two = ("bleu", "accuracy", "perplexity", "reward_accuracy")
    assert {score_text(name, 0.25) for name in four} == {"0.2500"}
    assert {score_text(name, 0.25) for name in two} == {"0.25"}
    assert score_with_error("bleu", 41.924, 0.806) == "41.92 ± 0.81"
    assert score_with_error("loss", 1.5, None) == "1.5000"
    assert score_with_error("bleu", None, 0.8) == "-"
    assert (score_name("bleu"), score_name("eval_arc")) == ("BLEU", "eval_arc")


def test_beside_the_first_score_stand_those_that_say_something_else() -> None:
    assert shown_scores(["bleu", "chrf", "f1", "bleu", "eval_arc", "token_recovery", "de"]) == [
        "bleu", "f1", "eval_arc", "token_recovery",
    ]  # fmt: skip
    assert shown_scores(["chrf", "bleu"]) == ["chrf"]
    assert shown_scores([]) == []
