"""A strategy that the package does not have, all of it here: sign-SGD with majority vote. It runs
over the real wiring and trainer, and the planner asks it what it sends."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.import_walk import PACKAGE
from tests.strategy_jobs import clouds, values
from tests.trainers import ranks, update
from xcloud.base.settings import settings
from xcloud.comm.compression import Compression
from xcloud.comm.precision import BlockInt
from xcloud.parallel.averaging import Terms
from xcloud.parallel.exchange import Exchange, FlatBuffer
from xcloud.parallel.merging import Contribution
from xcloud.parallel.replicas import Replicas
from xcloud.parallel.schedule import GPipe
from xcloud.parallel.strategy import Averaging, Places, Strategy
from xcloud.training.batch_plan import BatchPlan
from xcloud.training.settings import Optimizer, Training


@settings("strategy.averaging")
class MajorityVote(Averaging):
    """Every replica sends the signs of its gradient; all use the sign of their sum, times `scale`
    (Bernstein et al., arXiv:1810.05291)."""

    scale: float = 1.0

    @property
    def label(self) -> str:
        return f"votes, {self.scale:g}"

    def join(self, replicas: Replicas) -> Exchange:
        return Votes(self.scale, replicas)


def vote(contributions: Sequence[Contribution]) -> list[Tensor]:
    own = zip(*(contribution.tensors for contribution in contributions), strict=True)
    return [torch.stack(tensors).sum(0).sign() for tensors in own]


class Votes(Exchange):
    def __init__(self, scale: float, replicas: Replicas) -> None:
        self._scale, self._parameters = scale, list(replicas.trained.values())
        shapes = {name: parameter.shape for name, parameter in replicas.trained.items()}
        self._averager = replicas.averager(shapes, Terms(vote), False, "votes")
        replicas.open([self._averager])

    def before_update(
        self, step: int, buffers: Mapping[int, FlatBuffer], losses: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self._averager.start(step, [gradient.sign() for gradient in gradients])
        (votes,) = self._averager.finish(step).changes
        for gradient, voted in zip(gradients, votes, strict=True):
            gradient.copy_(voted.sign() * self._scale)
        for stage, buffer in buffers.items():
            buffer.flat[-1] = losses[stage]
        return dict(losses)


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


def test_the_rest_of_the_product_asks_the_strategy_itself() -> None:
    layout = VOTES.arrange(clouds(3))
    assert VOTES.describe(layout) == "votes (votes, 0.5), 3 replicas"
    assert not VOTES.traits.is_apart and not VOTES.traits.is_elastic
    places = Places.held(layout, VOTES, 9)
    assert (places.column, places.merges_every) == ("data parallel", 1)
    assert replace(VOTES, averaging=MajorityVote(2.0)).label == "votes (votes, 2)"


def test_nobody_asks_for_the_class_of_a_strategy() -> None:
    asked = re.compile(r"isinstance\([^()]*\b(GradientAveraging|LocalUpdates|MajorityVote)\b")
    sources = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    assert len(sources) > 100
    assert not [path.name for path, text in sources.items() if asked.search(text)]
