"""Gradients of all stages and clouds are clipped as torch clips those of one process."""

from itertools import chain

import pytest
import torch

from tests.pipelines import ToyStage, samples
from tests.trainers import LAYOUTS, ranks, update
from xcloud.pipeline.batch_plan import BatchPlan
from xcloud.pipeline.settings import Optimizer, Training


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("clip_norm", "num_passes"), [(0.05, 1), (1e6, 1), (1e6, 2)])
def test_the_norm_over_all_stages_is_that_of_torch(
    layout: str, clip_norm: float, num_passes: int
) -> None:
    plan = BatchPlan(40, 8, 1)
    stages = [ToyStage(stage, 3) for stage in range(3)]
    batch = samples(plan.ids(1))
    message = None
    for stage in stages:
        output = stage(message, batch)
        message = output.send
    assert output.loss is not None
    (output.loss / 8).backward()
    parameters = [*chain.from_iterable(stage.parameters() for stage in stages)]
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    assert (norm > clip_norm) == (clip_norm < 1), "one of the two is clipped"
    expected = [[p.grad for p in stage.parameters()] for stage in stages]

    optimizer = Optimizer(0.1, 1, clip_norm=clip_norm)
    training = Training(1, batch_size=8, accumulate_steps=num_passes, optimizer=optimizer)
    job = ranks(LAYOUTS[layout], training, plan=plan)
    reports = update(job, 1)

    norms = [report.grad_norm for report in reports]  # type: ignore[union-attr]
    assert norms == [pytest.approx(float(norm), rel=1e-5)] * len(norms)
    for rank in job:
        for number, held in rank.trainer.pipeline.stages.items():
            for found, wanted in zip(held.parameters(), expected[number], strict=True):
                torch.testing.assert_close(found.grad, wanted, rtol=1e-4, atol=1e-7)
