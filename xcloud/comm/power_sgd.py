"""PowerSGD: two factors of a gradient matrix by one step of power iteration. Tensor code only.

Shapes: the tensor as a matrix [R, D], R rows, D columns; r columns of each factor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xcloud.base.checks import check_int
from xcloud.cluster.tensor_spec import TensorSpec
from xcloud.comm.compressor import Parts, wide
from xcloud.comm.factors import WarmFactors

_FRESH_SHARE = 1e-3
_CHUNK = 1 << 16
"""Values per pass of `outer_sum`: they fit into the processor's cache."""


@dataclass
class PowerSgd(WarmFactors):
    """x_hat = P Q^T with P = orth(x Q_before), Q = x^T P; the next call begins at this Q.

    Source: Vogels et al., arXiv:1905.13727, algorithm 1. Over calls on slowly changing gradients
    this is subspace iteration and comes near to the best rank-r matrix; one call on its own does
    not, so it needs error feedback.
    Difference: there P and Q are averaged over the workers by all-reduce, which gives a power
    iteration on the mean gradient at 1x the bytes. Here each replica's product is decoded and
    summed: Q never leaves without its P, so replicas may differ in weight, be late or be left out,
    a robust merge sees what each of them meant, the sum has up to R * r directions instead of r,
    and it is one exchange instead of two that wait for each other. For two replicas it costs the
    same bytes as an all-reduce.

    Decoding is one multiplication and one addition per value and column, in a fixed order, so
    that it gives the same bits on any processor, unlike a matrix product.

    Wire, for [R, D]: P [R, r] and Q^T [r, D] in the tensor's dtype, r = min(rank, R, D).
    """

    rank: int = 4

    def __post_init__(self) -> None:
        check_int("PowerSgd.rank", self.rank, 1)

    @property
    def label(self) -> str:
        return f"powersgd({self.rank})"

    def _rank(self, num_rows: int, num_features: int) -> int:
        return min(self.rank, num_rows, num_features)

    def decompress(self, parts: Parts, spec: TensorSpec) -> Tensor:
        left_Rr, right_rD = (part.to(wide(spec.dtype)) for part in parts)
        return outer_sum(left_Rr, right_rD).to(spec.dtype).view(spec.shape)

    def _factors(self, matrix_RD: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        num_features = matrix_RD.shape[1]
        generator = torch.Generator().manual_seed(0)
        basis_Dr = torch.randn(num_features, rank, generator=generator).to(matrix_RD)
        if self._basis_Dl is not None and self._basis_Dl.shape == basis_Dr.shape:
            # The noise makes directions reachable that the previous gradient did not have at all.
            known_Dr = self._basis_Dl.to(matrix_RD)
            largest_r = known_Dr.abs().amax(0)
            known_Dr = known_Dr / torch.where(largest_r > 0, largest_r, 1)
            basis_Dr = basis_Dr.mul_(_FRESH_SHARE).add_(known_Dr)
        left_Rr = torch.linalg.qr(matrix_RD @ basis_Dr).Q
        right_rD = left_Rr.T @ matrix_RD
        self._basis_Dl = right_rD.T.clone(memory_format=torch.contiguous_format)
        return left_Rr, right_rD


def outer_sum(left_Rr: Tensor, right_rD: Tensor) -> Tensor:
    """left @ right, [R, D], summed over r one column after the other: the same bits everywhere."""
    num_rows, num_features = len(left_Rr), right_rD.shape[1]
    total_RD = left_Rr.new_zeros(num_rows, num_features)
    if not total_RD.numel() or not len(right_rD):
        return total_RD
    rows = max(1, _CHUNK // num_features) if left_Rr.device.type == "cpu" else num_rows
    term_CD = left_Rr.new_empty(min(rows, num_rows), num_features)
    for first in range(0, num_rows, rows):
        total_CD, left_Cr = total_RD[first : first + rows], left_Rr[first : first + rows]
        term = term_CD[: len(total_CD)]
        torch.mul(left_Cr[:, :1], right_rD[:1], out=total_CD)
        for column in range(1, len(right_rD)):
            torch.mul(left_Cr[:, column, None], right_rD[column], out=term)
            total_CD.add_(term)
    return total_RD
