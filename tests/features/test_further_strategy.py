"""A strategy that the package does not have, to copy: sign-SGD with majority vote, in the class
`MajorityVote` and its exchange. It runs over the real wiring and trainer, and the planner asks it
what it sends."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import pytest
import torch
from pydantic import Field
from torch import Tensor

from tests.import_walk import PACKAGE
from tests.nightly import first_daily
from tests.trainers import clouds, ranks, update, values
from xcloud.base.errors import ConfigError
from xcloud.base.settings import settings
from xcloud.comm.compression import Compression
from xcloud.comm.precision import BlockInt
from xcloud.features.replicas.averaging import Terms
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.features.replicas.merging import weighted_sum
from xcloud.features.replicas.replicas import Replicas
from xcloud.job.strategy import Averaging, ModelPlacement, Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.pipeline.batch_plan import BatchPlan
from xcloud.pipeline.exchange import Exchange, FlatBuffer, Work
from xcloud.pipeline.schedule import GPipe
from xcloud.pipeline.settings import Optimizer, Training

LOSS = "(loss)"


@settings("strategy.averaging")
class MajorityVote(Averaging):
    """Every replica sends the signs of its gradient; all use the sign of their sum, times
    `scale` (Bernstein et al., arXiv:1810.05291)."""

    scale: Annotated[float, Field(gt=0.0)] = 1.0

    @property
    def label(self) -> str:
        return f"votes, {self.scale:g}"

    def check(self, layout: ClusterLayout) -> None:
        if several := [n for n, cloud in layout.clouds.items() if cloud.num_ranks > 1]:
            raise ConfigError(f"majority_vote needs clouds of one rank; not so: {several}")

    def join(self, replicas: Replicas) -> Exchange:
        return Votes(self.scale, replicas)


class Votes(Exchange):
    """The exchange of one rank."""

    def __init__(self, scale: float, replicas: Replicas) -> None:
        self._scale = scale
        self._parameters = list(replicas.trained.values())
        shapes = {name: parameter.shape for name, parameter in replicas.trained.items()}
        shapes[LOSS] = torch.Size([1])
        terms = Terms(weighted_sum)
        feedback = False  # with True the averager has a state: then return it in `children`
        self._averager = replicas.averager(shapes, terms, feedback, "votes", plain={LOSS})
        replicas.open([self._averager])

    def before_update(
        self, step: int, buffers: Mapping[int, FlatBuffer], losses: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Put the votes in place of the gradients."""
        last = max(buffers)  # the stage that has the loss
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self._averager.start(step, [*(g.sign() for g in gradients), losses[last].reshape(1)])
        ((*votes, loss),) = self._averager.finish(step).changes
        for gradient, voted in zip(gradients, votes, strict=True):
            gradient.copy_(voted.sign() * self._scale)
        for buffer in buffers.values():
            buffer.flat[-1] = loss
        return {**losses, last: loss.reshape(())}

    def after_update(self, step: int, work: Work) -> None:
        """Say whether the votes were used: not in an update that all skip."""
        self._averager.settle(was_used=work.num_samples > 0)


TRAINING = Training(30, batch_size=18, optimizer=Optimizer(0.02, 1))
VOTES = Strategy("votes", None, MajorityVote(0.5))


@pytest.mark.parametrize("num_clouds", first_daily([3, 2], count=1))
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
