"""What a run of so many steps never comes to is told before it begins."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.configs import build
from tests.feature_rows import feature_rows
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Phase, Phased
from xcloud.job.misfits import misfits
from xcloud.pipeline.settings import Optimizer

MISFITS = {
    "warm-up": (
        ["training.optimizer.warmup_steps=4000"],
        r"ends in its warm-up: it reaches 0\.5 % of training\.optimizer\.learning_rate.*=4000",
    ),
    "evaluation": (["training.evaluate_every=21"], r"training\.evaluate_every=21 is more than"),
    "merges": (["strategy=local_updates", "strategy.averaging.every=40"], r"every=40 is more"),
    "own pre-training": (
        ["model.own.pretraining.steps=10", "model.own.pretraining.warmup_steps=20"],
        r"model\.own\.pretraining\.warmup_steps=20 is more than model\.own\.pretraining\.steps=10",
    ),
    **{name: row for rows in feature_rows().values() for name, row in rows.misfits.items()},
}


@pytest.mark.parametrize("case", MISFITS)
def test_settings_that_fit_alone_and_not_together_are_told(case: str) -> None:
    words, said = MISFITS[case]
    base = ["training.max_steps=20", "training.optimizer.warmup_steps=20"]
    assert misfits(build("+exp=lora_clm", *base)) == []
    found = misfits(build("+exp=lora_clm", *base, *words))
    assert [line for line in found if re.search(said, line)], found


@pytest.mark.parametrize("decay", ["inverse_sqrt", "linear", "constant"])
def test_a_warm_up_as_long_as_the_run_reaches_the_whole_rate(decay: str) -> None:
    rule = Optimizer(learning_rate=1e-3, warmup_steps=20, decay=decay)  # type: ignore[arg-type]
    assert rule.learning_rate_at(20, max_steps=20) == pytest.approx(1e-3)


def test_a_phase_of_compression_that_never_begins_is_told() -> None:
    job = build("+exp=lora_clm", "training.max_steps=20", "training.optimizer.warmup_steps=20")
    for until, num in ((19, 0), (20, 1), (100, 1)):
        plan = Phased(a=Phase(until, Compression()), b=Phase(None, Compression()))
        found = misfits(replace(job, compression=plan))
        assert len(found) == num, found
        assert all("compression.b never begins" in line for line in found)
