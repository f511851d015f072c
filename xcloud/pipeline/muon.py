"""Muon for the matrices of blocks, AdamW for all other parameters.

Sources: Jordan et al., "Muon", 2024 (momentum, Nesterov, five Newton-Schulz steps and their
coefficients, as torch.optim.Muon has them); Liu et al., "Muon is Scalable for LLM Training",
arXiv:2502.16982 (the scale 0.2 * sqrt(max(rows, columns)), with which both kinds of parameters
share one learning rate). Difference from torch.optim.Muon: on a CPU the Newton-Schulz steps are
computed in float32. Many CPUs have no arithmetic for bfloat16; there they take 18 times as long
in it.

Shapes: A rows, B columns of a matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xcloud.base.settings import Fraction, settings
from xcloud.pipeline.settings import AdamW, Optimizer

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_NEWTON_SCHULZ_STEPS = 5


@settings("optimizer")
class Muon(Optimizer):
    """Muon for every matrix inside a block, AdamW for embeddings, heads, norms and biases.

    A parameter counts as a matrix of a block if it has two axes, lies in an nn.ModuleList or
    nn.ModuleDict, which all models here use for their blocks, and is no table of embeddings.
    Weight decay applies to both kinds. Muon keeps one momentum of each matrix where AdamW keeps
    two moments.
    """

    momentum: Fraction = 0.95
    """Decay of the running sum of a matrix's gradients."""

    def build(self, module: nn.Module) -> torch.optim.Optimizer:
        matrices = matrices_of_blocks(module)
        moved = {id(matrix) for matrix in matrices}
        trained = (p for p in module.parameters() if p.requires_grad)
        others = [p for p in trained if id(p) not in moved]
        groups = self.groups(others)
        if matrices:
            muon = {"params": matrices, "weight_decay": self.weight_decay}
            groups.append({**muon, "momentum": float(self.momentum)})
        return MuonWithAdamW(groups, self.learning_rate, self.adam_betas, self.eps)


def matrices_of_blocks(module: nn.Module) -> list[nn.Parameter]:
    """Return the trained matrices that lie in the blocks of a network, each once."""
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    found: dict[int, nn.Parameter] = {}
    for blocks in module.modules():
        if isinstance(blocks, nn.ModuleList | nn.ModuleDict):
            for p in blocks.parameters():
                if p.requires_grad and p.ndim == 2 and id(p) not in tables:
                    found[id(p)] = p
    return list(found.values())


class MuonWithAdamW(AdamW):
    """An AdamW that moves its groups with a `momentum` by Muon."""

    # AdamW's own looks for its number of steps in the state of every parameter.
    __setstate__ = torch.optim.Optimizer.__setstate__

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        every = self.param_groups
        # torch's AdamW moves every group that it sees.
        self.param_groups = [group for group in every if "momentum" not in group]
        try:
            super().step()
        finally:
            self.param_groups = every
        for group in every:
            if "momentum" in group:
                for parameter in group["params"]:
                    self._move(parameter, group)

    def _move(self, parameter: nn.Parameter, group: dict[str, float]) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        # Nesterov's form: the momentum is looked at one step ahead.
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        direction = orthogonalized(gradient.lerp(buffer, group["momentum"]))
        scale = 0.2 * max(parameter.shape) ** 0.5
        # Decayed apart from the direction, as AdamW does.
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"] * scale)


def orthogonalized(matrix_AB: Tensor) -> Tensor:
    """Return a matrix with nearly the same singular vectors, whose singular values lie near 1."""
    a, b, c = _COEFFICIENTS
    x = matrix_AB.float() if matrix_AB.device.type == "cpu" else matrix_AB.bfloat16()
    # x x^T is then the smaller of the two products.
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)  # so that no singular value is above 1
    for _ in range(_NUM_NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    if is_tall:
        x = x.T
    return x.to(matrix_AB.dtype)
