"""Noise shaping of gradients: what the code of one row loses is made good by rows that are coded
after it, so that the gradients of weights lose little. Pure tensor code, no links.

Shapes: R rows (tokens) of a message, r of a block; H features; F = H + 1, the activations and a
column of ones; C codes of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from xcloud.comm.compressor import wide
from xcloud.comm.state import State, StatefulTree, copy_of

_BLOCKS = 24  # of rows, whose errors the later ones make good
_RIDGE = 1.0  # mean squared lengths of a row's activations

CodeRows = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Codes rows [r, H]. Returns the codes [r, C], and the rows as the receiver will see them."""


class NoiseShaping(StatefulTree):
    """Codes the rows of a gradient so that sums over rows keep what single rows lose.

    The receiver of a boundary's gradient G makes gradients of weights of it: sums over rows of an
    activation times a gradient, Phi^T G. So an error G - Q of the code harms by Phi^T (G - Q), and
    there are many more rows than features. The sender knows the activations that came forward over
    the boundary, and takes them for Phi. It codes rows in blocks, in random order. In front of
    block b it adds to its rows

        Phi_b M^-1 owed,   owed = what Phi^T (G - Q) has come to,
                           M = Phi^T Phi of the rows not yet coded + lambda I

    the least change of all rows to come that makes `owed` good. What the last block leaves is owed
    to the next message. The receiver decodes as ever: nothing more crosses.

    Ours. The update is that of GPTQ (Frantar et al., arXiv:2210.17323), which takes the rounding
    error of one column of a weight to the columns not yet rounded; here rows of gradients take the
    place of columns, and activations that of calibration data. Noise shaping of audio does the
    same along time. Without it, small components of all rows round to zero in each update, and
    Adam, which divides by their size, would have learned from them as from large ones.

    Features are divided by their root mean square in the message first. An update that is skipped
    after its messages still counts in what is owed. Costs some R F (3 F + 2 H) + 8 F^3
    multiplications a message. Float32 does: lambda is far above its rounding of the moments.
    """

    own_names = ("owed",)

    def __init__(self) -> None:
        self.owed_FH: Tensor | None = None

    def shaped(
        self, gradient_RH: Tensor, activations_RH: Tensor, code: CodeRows, seed: int
    ) -> tuple[Tensor, Tensor]:
        """Return the codes [R, C] of a message with at least one row, and what is owed once it is
        sent [F, H], which the caller keeps as `owed_FH`.

        activations_RH: as the receiver of the gradient sent them, in the same order of rows.
        seed: of the order in which rows are coded.
        """
        inputs_RF = _inputs(activations_RH).to(gradient_RH)
        owed_FH = gradient_RH.new_zeros(inputs_RF.shape[1], gradient_RH.shape[1])
        if self.owed_FH is not None and self.owed_FH.shape == owed_FH.shape:
            owed_FH = self.owed_FH.to(owed_FH)
        ridge = _RIDGE * inputs_RF.square().sum(1).mean()
        moments_FF = inputs_RF.T @ inputs_RF
        moments_FF.diagonal().add_(ridge)
        order_R = torch.randperm(len(gradient_RH), generator=torch.Generator().manual_seed(seed))
        parts = []
        for places_r in order_R.to(gradient_RH.device).tensor_split(min(_BLOCKS, len(order_R))):
            inputs_rF = inputs_RF[places_r]
            factor_FF = torch.linalg.cholesky(moments_FF)
            added_rH = torch.cholesky_solve(inputs_rF.T, factor_FF).T @ owed_FH
            codes_rC, seen_rH = code(gradient_RH[places_r] + added_rH)
            parts.append(codes_rC)
            owed_FH = owed_FH + inputs_rF.T @ (gradient_RH[places_r] - seen_rH)
            moments_FF -= inputs_rF.T @ inputs_rF
        codes_RC = torch.cat(parts)
        codes_RC[order_R.to(codes_RC.device)] = codes_RC.clone()
        return codes_RC, owed_FH

    def own(self) -> State:
        return {} if self.owed_FH is None else {"owed": copy_of(self.owed_FH)}

    def take(self, own: State) -> None:
        self.owed_FH = torch.as_tensor(own["owed"]) if "owed" in own else None


def _inputs(activations_RH: Tensor) -> Tensor:
    """Return activations in units of their features' root mean squares, and a column of ones, in
    float32 [R, F], or float64 for such tensors."""
    finite_RH = activations_RH.to(wide(activations_RH.dtype)).nan_to_num(0.0, 0.0, 0.0)
    # By the largest first: squares of what is left are in the range of the dtype.
    unit_RH = finite_RH / finite_RH.abs().amax(0).clamp_min(torch.finfo(finite_RH.dtype).tiny)
    scaled_RH = unit_RH / unit_RH.square().mean(0).sqrt().clamp_min(1e-30)
    return torch.cat([scaled_RH, scaled_RH.new_ones(len(scaled_RH), 1)], dim=1)
