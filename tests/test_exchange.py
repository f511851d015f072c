"""Gradients in one buffer, and the seam that brings replicas together around an update."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainers import LAYOUTS, SKIP, Rank, ranks, spoil, update
from xcloud.pipeline.exchange import AllReduce, Exchange, FlatBuffer, RankGroup, Work, squared_norm
from xcloud.pipeline.hook import StepReport

SKIP_AND_CLIP = replace(SKIP, optimizer=replace(SKIP.optimizer, clip_norm=1.0))
ALONE = RankGroup.alone()


def test_gradients_live_in_one_buffer_that_autograd_fills() -> None:
    module = nn.Linear(3, 2)
    buffer = FlatBuffer(module.parameters())

    for _ in range(2):
        module(torch.ones(1, 3)).sum().backward()

    assert torch.equal(buffer.gradients, torch.full((8,), 2.0))
    assert buffer.squared_norm() == pytest.approx(32.0)
    buffer.scale(0.5)
    assert torch.equal(module.weight.grad, torch.ones(2, 3))
    buffer.zero()
    assert float(module.weight.grad.abs().sum()) == 0.0


def test_the_loss_travels_with_the_gradients_and_stays_out_of_the_norm() -> None:
    buffer = FlatBuffer(nn.Linear(3, 2).parameters())

    loss = buffer.sum_over(ALONE, torch.tensor(5.0))

    assert float(loss) == 5.0
    assert buffer.squared_norm() == 0.0
    buffer.zero()
    assert float(loss) == 5.0


def test_a_stage_that_trains_nothing_has_norm_zero() -> None:
    module = nn.Linear(3, 2).requires_grad_(False)
    buffer = FlatBuffer(module.parameters())

    assert float(buffer.sum_over(ALONE, torch.tensor(2.0))) == 2.0
    assert buffer.squared_norm() == 0.0


def test_a_gradient_that_is_no_number_shows_in_the_norm() -> None:
    module = nn.Linear(1, 1)
    buffer = FlatBuffer(module.parameters())
    (module(torch.ones(1, 1)) * math.nan).sum().backward()

    assert buffer.squared_norm() == pytest.approx(math.nan, nan_ok=True)


def test_an_all_reduce_carries_nothing_and_takes_over_nothing() -> None:
    reduce = AllReduce({0: ALONE})
    reduce.load_state_dict(reduce.state_dict())
    with pytest.raises(ValueError, match=r"AllReduce contains 'residual'"):
        reduce.load_state_dict({"residual": torch.zeros(3)})


class Spy(Exchange):
    """Halves gradients, and pulls parameters to zero after every update that it hears of."""

    def __init__(self, inner: Exchange) -> None:
        self.inner, self.calls = inner, list[tuple[str, int]]()

    def before_update(self, step: int, buffers: Any, losses: Any) -> Any:
        self.calls.append(("before", step))
        self.buffers = buffers
        for buffer in buffers.values():
            buffer.scale(0.5)
        return self.inner.before_update(step, buffers, losses)

    def after_update(self, step: int, work: Work) -> None:
        self.calls.append(("after", step))
        for buffer in self.buffers.values():
            for parameter in buffer.parameters:
                parameter.data.zero_()


def spied(job: list[Rank]) -> list[Spy]:
    spies = []
    for trainer in (rank.trainer for rank in job):
        trainer.exchange = Spy(trainer.exchange)
        spies.append(trainer.exchange)
    return spies


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_the_trainer_asks_around_every_update_and_the_norm_is_of_what_came_back(
    layout: Any,
) -> None:
    plain, other = (ranks(layout, SKIP_AND_CLIP) for _ in range(2))
    spies = spied(other)
    norms = [
        next(r.grad_norm for r in update(job, 1) if isinstance(r, StepReport))
        for job in (plain, other)
    ]

    assert norms[0] is not None and norms[1] == pytest.approx(norms[0] / 2)
    assert all(spy.calls == [("before", 1), ("after", 1)] for spy in spies)
    for module in (module for rank in other for module in rank.trainer.pipeline.stages.values()):
        assert not any(p.any() for p in module.parameters())


def test_a_skipped_update_is_told_to_the_exchange_too() -> None:
    job = ranks(LAYOUTS["three clouds"], SKIP)
    spies = spied(job)
    spoil(job, 1, math.nan)
    update(job, 1)

    assert all(spy.calls == [("before", 1), ("after", 1)] for spy in spies)


def test_a_buffer_whose_gradients_another_end_counts_has_no_norm_below_0() -> None:
    buffer = FlatBuffer(nn.Linear(3, 2).parameters())
    buffer.squares_elsewhere = -1e-17
    assert buffer.squared_norm() == 0.0
    buffer.squares_elsewhere = math.nan
    assert math.isnan(buffer.squared_norm())


def test_the_squared_norm_is_that_of_float64_whatever_the_size() -> None:
    for size in (0, 1, 70_000, 2 * 65_536):
        values = torch.randn(size, generator=torch.Generator().manual_seed(size))
        # Sums of so many terms in two orders; float32 would be 1e-7 off.
        rounding = max(1, size) * 2.0**-53
        exact = float(values.double().square().sum())
        assert squared_norm(values) == pytest.approx(exact, rounding)
    broken = torch.ones(300, 300)
    broken[299, 299] = torch.inf
    assert math.isinf(squared_norm(broken))
    assert math.isnan(squared_norm(broken - broken))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_squared_norm_on_a_gpu_is_that_on_a_cpu() -> None:
    values = torch.randn(70_000, generator=torch.Generator().manual_seed(1))
    rounding = len(values) * 2.0**-53
    assert squared_norm(values.cuda()) == pytest.approx(squared_norm(values), rounding)


def test_the_loss_of_a_stage_that_trains_nothing_lies_on_its_device() -> None:
    frozen = nn.Parameter(torch.ones(3, device="meta"), requires_grad=False)
    assert FlatBuffer([frozen]).flat.device == frozen.device
    assert torch.equal(FlatBuffer([]).flat, torch.zeros(1))
