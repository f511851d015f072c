"""A tensor as a product of two factors, found from the basis of the call before.

Shapes: the tensor as a matrix [R, D], R rows (tokens), D features; r columns of each factor;
l >= r columns of the basis.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from xcloud.cluster.tensor_spec import TensorSpec
from xcloud.comm.compressor import Family, Feedback, Parts, refuse_integers, wide
from xcloud.comm.memory import State


class WarmFactors(ABC):
    """What compressors share whose wire is left [R, r] and right [r, D] in the tensor's dtype, and
    whose next call begins at the basis [D, l] that this one ended with.

    NaN or inf anywhere makes every value NaN, so that divergence stays visible.
    """

    family: ClassVar[Family] = "low_rank"
    feedback: ClassVar[Feedback] = "needed"
    _basis_Dl: Tensor | None = None

    @property
    @abstractmethod
    def label(self) -> str: ...

    @abstractmethod
    def _rank(self, num_rows: int, num_features: int) -> int: ...

    @abstractmethod
    def _factors(self, matrix_RD: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """An orthonormal left [R, rank] and a right [rank, D] with the sizes."""

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        num_rows, num_features = matrix_shape(spec.shape)
        rank = self._rank(num_rows, num_features)
        return (
            TensorSpec((num_rows, rank), spec.dtype),
            TensorSpec((rank, num_features), spec.dtype),
        )

    def compress(self, tensor: Tensor) -> Parts:
        rank = self._rank(*matrix_shape(tuple(tensor.shape)))
        return scaled_factors(tensor, rank, self._factors)

    def state_dict(self) -> State:
        """The warm start: the next call depends on it. Never changed in place."""
        return {} if self._basis_Dl is None else {"basis": self._basis_Dl}

    def load_state_dict(self, state: State) -> None:
        basis = state.get("basis")
        if state.keys() - {"basis"} or not (basis is None or isinstance(basis, Tensor)):
            raise ValueError(
                f"{self.label} takes over a tensor 'basis' or nothing, got {sorted(state)}; the "
                "state was saved with other settings"
            )
        self._basis_Dl = basis


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def scaled_factors(
    tensor: Tensor, rank: int, factor: Callable[[Tensor, int], tuple[Tensor, Tensor]]
) -> Parts:
    """Left [R, rank] and right [rank, D] in the tensor's dtype, of one mean square, so that
    neither overflows or vanishes in a later cast.

    factor: (matrix [R, D], rank) → an orthonormal left and a right with the sizes. It gets finite
    values of a size whose squares float32 can represent; anything else makes NaN of both.
    """
    refuse_integers(tensor)
    num_rows, num_features = matrix_shape(tuple(tensor.shape))
    matrix_RD = tensor.detach().reshape(num_rows, num_features).to(wide(tensor.dtype))
    if rank == 0:
        return (tensor.new_zeros(num_rows, 0), tensor.new_zeros(0, num_features))
    low, high = torch.aminmax(matrix_RD)
    largest = float(torch.maximum(-low, high))
    if not math.isfinite(largest):
        nan = torch.full_like(matrix_RD, math.nan, dtype=tensor.dtype)
        return (nan[:, :1].expand(-1, rank).clone(), nan[:1].expand(rank, -1).clone())
    scale = 1.0
    if not 1e-10 < largest < 1e10:  # A^T A would approach the limits of float32
        scale = largest or 1.0
        matrix_RD = matrix_RD / scale
    left_Rr, right_rD = factor(matrix_RD, rank)
    mean_square = float(right_rD.square().mean()) * num_rows or 1.0
    balance = mean_square**0.25 * math.sqrt(scale)
    return (
        left_Rr.mul_(balance).to(tensor.dtype).contiguous(),
        right_rD.mul_(scale / balance).to(tensor.dtype).contiguous(),
    )
