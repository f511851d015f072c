"""Gradients of one stage in one flat buffer: summed over the stage's ranks, measured, scaled.

Sums, not means: every micro-batch's loss is already divided by the weight of the whole update, so
the sum over ranks is the gradient of the large batch, whatever the number of ranks
([B]: gradient averaging, (1/N) sum of the ranks' gradients).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from xcloud.cluster.transport import Collectives


class GradientBuffer:
    """Makes every `.grad` a view of one buffer, with one place at its end for the loss."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        if not self.parameters:
            self.flat = torch.zeros(1)
            return
        first = self.parameters[0]
        assert all(p.dtype == first.dtype and p.device == first.device for p in self.parameters)
        size = sum(p.numel() for p in self.parameters)
        self.flat = torch.zeros(size + 1, dtype=first.dtype, device=first.device)
        offset = 0
        for parameter in self.parameters:
            view = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            parameter.grad = view
            offset += parameter.numel()

    def zero(self) -> None:
        self.flat.zero_()

    def sum_over(self, group: Collectives | None, loss: Tensor) -> Tensor:
        """Sum gradients and loss over the ranks of the stage. Returns the summed loss."""
        self.flat[-1] = loss
        if group is not None:
            group.sum(self.flat)
        return self.flat[-1].clone()

    def is_finite(self) -> bool:
        """Of all gradients and the loss, after `sum_over`."""
        low, high = torch.aminmax(self.flat)  # one pass; NaN anywhere makes both NaN
        return bool(low.isfinite() & high.isfinite())

    def squared_norm(self) -> float:
        """Sum of the squared gradients, in float64."""
        norm = torch.linalg.vector_norm(self.flat[:-1], dtype=torch.float64)
        return float(norm) ** 2

    def scale(self, factor: float) -> None:
        self.flat[:-1].mul_(factor)
