"""A strategy that the package does not have, all of it in docs/strategies.md: sign-SGD with
majority vote. It runs over the real wiring and trainer, and the planner asks it what it sends."""

from __future__ import annotations

import math
import re
import textwrap
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.import_walk import PACKAGE
from tests.strategy_jobs import clouds, values
from tests.trainers import ranks, update
from xcloud.base.errors import ConfigError
from xcloud.comm.compression import Compression
from xcloud.comm.precision import BlockInt
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.job.strategy import ModelPlacement, Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.pipeline.batch_plan import BatchPlan
from xcloud.pipeline.schedule import GPipe
from xcloud.pipeline.settings import Optimizer, Training

PAGE = PACKAGE.parent / "docs" / "strategies.md"
# The example of the page, as a newcomer would copy it.
exec(textwrap.dedent(PAGE.read_text().split("```python\n")[1].split("```")[0]), globals())
MajorityVote: Any = globals()["MajorityVote"]


TRAINING = Training(30, batch_size=18, optimizer=Optimizer(0.02, 1))
VOTES = Strategy("votes", None, MajorityVote(0.5))


@pytest.mark.parametrize("num_clouds", [2, 3])
def test_a_strategy_of_one_class_trains_over_clouds_that_stay_equal(num_clouds: int) -> None:
    signs = Compression(averaging=BlockInt(4, block=64))
    job = ranks(
        clouds(num_clouds), TRAINING, signs, GPipe(num_clouds), BatchPlan(18, 18, 1), VOTES
    )
    losses = []
    for step in range(1, 31):
        reports = update(job, step)
        losses.append([r.loss for r in reports if not isinstance(r, str) and r.loss is not None])

    assert sum(losses[-1]) < 0.9 * sum(losses[0])
    for stage in (0, 1):
        first, *others = values(job, stage)
        assert all(torch.equal(first, other) for other in others)
    gradient = next(job[0].trainer.pipeline.stages[0].parameters()).grad
    assert gradient is not None and set(gradient.unique().tolist()) <= {-0.5, 0.0, 0.5}


def test_the_loss_is_that_of_all_clouds() -> None:
    found = []
    for strategy in (VOTES, Strategy("sums", None, GradientAveraging())):
        job = ranks(clouds(3), TRAINING, None, GPipe(3), BatchPlan(18, 18, 1), strategy)
        reports = update(job, 1)
        found.append([r.loss for r in reports if not isinstance(r, str) and r.loss is not None])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_loss_that_is_not_finite_in_one_cloud_skips_the_update_in_all() -> None:
    training = replace(TRAINING, on_divergence="skip")
    job = ranks(clouds(3), training, None, GPipe(3), BatchPlan(18, 18, 1), VOTES)
    before = [value.clone() for value in values(job, 0)]
    with torch.no_grad():
        for parameter in job[1].trainer.pipeline.stages[1].parameters():
            parameter.fill_(math.nan)
    reports = update(job, 1)

    assert all(not isinstance(report, str) and report.skipped for report in reports)
    assert all(torch.equal(a, b) for a, b in zip(before, values(job, 0), strict=True))


def test_clouds_of_several_ranks_are_refused() -> None:
    layout = ClusterLayout({"a": Cloud(2), "b": Cloud()}, "free")
    with pytest.raises(ConfigError, match=r"clouds of one rank; not so: \['a'\]"):
        MajorityVote().check(layout)


def test_the_rest_of_the_product_asks_the_strategy_itself() -> None:
    layout = VOTES.arrange(clouds(3))
    assert VOTES.describe(layout) == "votes (votes, 0.5), 3 replicas"
    assert not VOTES.traits.trains_locally and not VOTES.traits.is_elastic
    places = ModelPlacement.held(layout, VOTES, 9)
    assert (places.column, places.merges_every) == ("data parallel", 1)
    assert replace(VOTES, averaging=MajorityVote(2.0)).label == "votes (votes, 2)"


def test_nobody_asks_for_the_class_of_a_strategy() -> None:
    asked = re.compile(r"isinstance\([^()]*\b(GradientAveraging|LocalUpdates|MajorityVote)\b")
    sources = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    assert len(sources) > 100
    assert not [path.name for path, text in sources.items() if asked.search(text)]
