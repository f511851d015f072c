"""Optimizer and learning-rate schedule from settings. Knows nothing of clouds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from inspect import unwrap
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn

from xcloud.base.settings import NotNegative, NotNegativeFloat, PositiveFloat, settings


class AdamW(torch.optim.AdamW):
    """torch's, whose methods are marked for torch.compile: the first call of a marked one imports
    the compiler, 2 s of a rank's start. Nothing is compiled here, so these go without the mark."""

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


@settings("optimizer")
class Optimizer:
    """AdamW; the learning rate rises linearly over warmup_steps, then follows `decay`:

    inverse_sqrt: lr * sqrt(warmup / step) (AB-Net's, arXiv:2010.06138); linear: to 0 behind
    max_steps; constant. clip_norm: bound on the norm of the whole model's gradient, over all
    clouds; 0 = off. weight_decay: of matrices, embeddings included; biases and the gains of norms
    (parameters of fewer than two axes) are spared, as in BERT (arXiv:1810.04805) and nanoGPT.
    """

    learning_rate: PositiveFloat = 5e-4
    warmup_steps: NotNegative = 4000
    decay: Literal["inverse_sqrt", "linear", "constant"] = "inverse_sqrt"
    betas: Annotated[
        Sequence[Annotated[float, Field(ge=0.0, le=0.999999)]],
        Field(min_length=2, max_length=2),
    ] = (0.9, 0.98)
    eps: PositiveFloat = 1e-8
    weight_decay: NotNegativeFloat = 0.0
    clip_norm: NotNegativeFloat = 0.0

    def learning_rate_at(self, step: int, max_steps: int) -> float:
        """Learning rate of update `step` (1-based), never above the peak. With decay=linear it is
        0 for any step behind max_steps: whoever goes on longer must say so with max_steps."""
        warmup = max(1, self.warmup_steps)
        if step < warmup:
            return self.learning_rate * step / warmup
        if self.decay == "inverse_sqrt":
            return self.learning_rate * math.sqrt(warmup / step)
        if self.decay == "linear":
            left, whole = max_steps - step + 1, max_steps - warmup + 1
            return self.learning_rate * (left / whole) if left > 0 else 0.0
        return self.learning_rate

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        trained = [p for p in parameters if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        betas = (float(self.betas[0]), float(self.betas[1]))
        # On CPUs one pass over the memory instead of ten: 20 ms instead of 150 for 12.9 M weights.
        # The same formula in another order of rounding: 3e-8 apart after 12 updates of weights of
        # size 0.2, and the same bits for any number of threads.
        fused = all(p.device.type == "cpu" for p in trained) or None
        return AdamW(
            [group for group in groups if group["params"]],
            self.learning_rate,
            betas,
            self.eps,
            fused=fused,
        )
