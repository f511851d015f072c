import math

import pytest
import torch
from torch import nn

from xcloud.parallel.data_parallel import GradientBuffer


def test_gradients_live_in_one_buffer_that_autograd_fills() -> None:
    module = nn.Linear(3, 2)
    buffer = GradientBuffer(module.parameters())

    for _ in range(2):
        module(torch.ones(1, 3)).sum().backward()

    assert torch.equal(buffer.flat[:-1], torch.full((8,), 2.0))
    assert buffer.squared_norm() == pytest.approx(32.0)
    buffer.scale(0.5)
    assert torch.equal(module.weight.grad, torch.ones(2, 3))
    buffer.zero()
    assert float(module.weight.grad.abs().sum()) == 0.0


def test_the_loss_travels_with_the_gradients_and_stays_out_of_the_norm() -> None:
    buffer = GradientBuffer(nn.Linear(3, 2).parameters())

    loss = buffer.sum_over(None, torch.tensor(5.0))

    assert float(loss) == 5.0
    assert buffer.squared_norm() == 0.0


def test_a_stage_that_trains_nothing_has_norm_zero() -> None:
    module = nn.Linear(3, 2).requires_grad_(False)
    buffer = GradientBuffer(module.parameters())

    assert float(buffer.sum_over(None, torch.tensor(2.0))) == 2.0
    assert buffer.squared_norm() == 0.0


def test_a_gradient_that_is_no_number_shows_in_the_norm() -> None:
    module = nn.Linear(1, 1)
    buffer = GradientBuffer(module.parameters())
    (module(torch.ones(1, 1)) * math.nan).sum().backward()

    assert buffer.squared_norm() == pytest.approx(math.nan, nan_ok=True)
