"""A tensor as a product of two factors: truncated SVD, PowerSGD. Tensor code only.

Shapes: the tensor as a matrix [R, D], R rows (tokens), D features; r columns of each factor;
l >= r columns of the search space.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from xcloud.base.settings import Positive, Rate, settings
from xcloud.comm.compressor import Compressor, Family, Feedback, refuse_integers, wide
from xcloud.comm.state import State
from xcloud.net.frame import Tensors, TensorSpec


class WarmFactors(Compressor):
    """A base of compressors whose wire is left [R, r] and right [r, D] in the tensor's dtype, and
    whose next call begins at the basis [D, l] that this one ended with.

    NaN or inf anywhere makes every value NaN, so that divergence stays visible.
    """

    family: ClassVar[Family] = "low_rank"
    feedback: ClassVar[Feedback] = "needed"
    # Python 3.11 cannot look up staticmethod[…] where hints of settings are asked for.
    _product: ClassVar[Any] = staticmethod(torch.matmul)
    _basis_Dl: Tensor | None = None

    @abstractmethod
    def _rank(self, num_rows: int, num_features: int) -> int: ...

    @abstractmethod
    def _factors(self, matrix_RD: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """An orthonormal left [R, rank] and a right [rank, D] with the sizes, of finite values
        whose squares float32 can represent."""

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        num_rows, num_features = matrix_shape(spec.shape)
        rank = self._rank(num_rows, num_features)
        sizes = ((num_rows, rank), (rank, num_features))
        return tuple(TensorSpec(shape=size, dtype=spec.dtype) for size in sizes)

    def compress(self, tensor: Tensor) -> Tensors:
        """Both factors have one mean square, so that neither overflows or vanishes in a later
        cast."""
        refuse_integers(tensor)
        num_rows, num_features = matrix_shape(tuple(tensor.shape))
        rank = self._rank(num_rows, num_features)
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
        left_Rr, right_rD = self._factors(matrix_RD, rank=rank)
        mean_square = float(right_rD.square().mean()) * num_rows or 1.0
        # left has orthonormal columns, so its mean square is 1/R; the fourth root splits the sizes
        # evenly.
        balance = mean_square**0.25 * math.sqrt(scale)
        return (
            left_Rr.mul_(balance).to(tensor.dtype).contiguous(),
            right_rD.mul_(scale / balance).to(tensor.dtype).contiguous(),
        )

    def decompress(self, parts: Tensors, spec: TensorSpec) -> Tensor:
        left_Rr, right_rD = (part.to(wide(spec.dtype)) for part in parts)
        product: Tensor = self._product(left_Rr, right_rD)
        return product.to(spec.dtype).view(spec.shape)

    own_names = ("basis",)

    def own(self) -> State:
        """The warm start: the next call depends on it. Never changed in place."""
        return {} if self._basis_Dl is None else {"basis": self._basis_Dl}

    def take(self, own: State) -> None:
        self._basis_Dl = torch.as_tensor(own["basis"]) if own else None


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    if shape:
        return (shape[0], math.prod(shape[1:]))
    return (1, 1)


_EXTRA_COLUMNS = 16
_FRESH_SHARE = 1e-3


@settings("Svd", frozen=False)
class Svd(WarmFactors):
    """The tensor as a product of two factors of rank r = max(1, round(rate * min(R, D))).

    x_hat = left @ right, left = c U, right = S V^T / c; c gives both the same mean square. S is
    on the right, where the rows of a block have one scale each: INT8 of the factors then costs
    less than with S split evenly.
    Source: Pan et al., ZTE Technology Journal 2023(4), section 2.2.1, "SVD(0.6)".

    method "exact": torch.linalg.svd.
    method "subspace": V from `iterations` rounds V <- orth(A^T A V), starting at the V of the
        previous call (of any R), with max(16, r/4) spare columns; arXiv:0909.4061 plus a warm
        start. For r above a fifth of min(R, D), where this is no longer faster, V comes from the
        eigenvectors of A^T A. In both cases directions below 3e-4 of the largest are lost,
        because A^T A squares the singular values. Against exact, 2048 x 768, one thread: rate 0.2:
        8 times faster, 0.3 % more error; 0.6: 2.6 times, 0.2 %. Where directions change from call
        to call: 1-2 % more error, 0.5 % with iterations=2.

    Wire, for [R, D]: left [R, r], right [r, D], in the tensor's dtype: more than the tensor above
    a rate of about 0.5 for a square matrix, 0.73 for 2048 x 768. That is not checked.
    rate: rank of the factors, as a share of the smaller side of the matrix.
    method: the way in which V is found, as above.
    iterations: rounds of the subspace method.
    """

    rate: Rate
    method: Literal["subspace", "exact"] = "subspace"
    iterations: Positive = 1  # of method "subspace"

    label_form = "svd({rate:g})"

    def _rank(self, num_rows: int, num_features: int) -> int:
        full = min(num_rows, num_features)
        return min(full, max(1, round(self.rate * full)))

    def _factors(self, matrix_RD: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        if self.method == "exact":
            left, values, right = torch.linalg.svd(matrix_RD, full_matrices=False)
            return left[:, :rank], right[:rank].mul_(values[:rank, None])
        num_columns = rank + max(_EXTRA_COLUMNS, rank // 4)
        num_rows, num_features = matrix_RD.shape
        # The smaller of A A^T and A^T A. Above this share of columns rounds of QR take longer than
        # all eigenvectors.
        if num_rows < num_features and 4 * num_columns > num_rows:
            left_Rr = torch.linalg.eigh(matrix_RD @ matrix_RD.T).eigenvectors[:, -rank:]
            return left_Rr, left_Rr.T @ matrix_RD
        if 4 * num_columns > num_features:
            basis_Dr = torch.linalg.eigh(matrix_RD.T @ matrix_RD).eigenvectors[:, -rank:]
            products_Rr = matrix_RD @ basis_Dr
        else:
            products_Rr, basis_Dr = self._iterate(matrix_RD, num_columns, rank)
        values_r = torch.linalg.vector_norm(products_Rr, dim=0)
        safe_r = torch.where(values_r > 0, values_r, 1)
        return products_Rr.div_(safe_r), (basis_Dr * safe_r).T

    def _iterate(self, matrix_RD: Tensor, num_columns: int, rank: int) -> tuple[Tensor, Tensor]:
        num_features = matrix_RD.shape[1]
        noise_Dl = _noise(num_features, num_columns=num_columns).to(matrix_RD)
        num_rounds = self.iterations
        if self._basis_Dl is None or len(self._basis_Dl) != num_features:
            basis_Dl = noise_Dl
            # Noise is farther from the answer than the basis of the call before.
            num_rounds += 2
        else:
            # The noise makes directions reachable that the previous tensor did not have at all.
            basis_Dl = noise_Dl * _FRESH_SHARE
            known_Dl = self._basis_Dl[:, :num_columns].to(matrix_RD)
            basis_Dl[:, : known_Dl.shape[1]] += known_Dl
        for _ in range(num_rounds):
            # Householder: as fast here as Cholesky QR in two passes, and safe when A is singular.
            basis_Dl = torch.linalg.qr(matrix_RD.T @ (matrix_RD @ basis_Dl)).Q
        products_Rl = matrix_RD @ basis_Dl
        # Inside the space that was found the directions are still mixed; the first r of them are
        # sent.
        rotation_ll = torch.linalg.eigh(products_Rl.T @ products_Rl).eigenvectors.flip(1)
        self._basis_Dl = basis_Dl @ rotation_ll  # largest singular value first
        return products_Rl @ rotation_ll[:, :rank], self._basis_Dl[:, :rank]


@lru_cache(maxsize=16)
def _noise(num_features: int, num_columns: int) -> Tensor:
    """Return fixed noise, shared: no caller may change it."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_features, num_columns, generator=generator) / math.sqrt(num_features)


_CHUNK = 1 << 16
"""Values per pass of `outer_sum`: they fit into the processor's cache."""


def outer_sum(left_Rr: Tensor, right_rD: Tensor) -> Tensor:
    """left @ right, [R, D], summed over r one column after the other: the same bits everywhere."""
    num_rows = len(left_Rr)
    num_features = right_rD.shape[1]
    total_RD = left_Rr.new_zeros(num_rows, num_features)
    if not total_RD.numel() or not len(right_rD):
        return total_RD
    rows = max(1, _CHUNK // num_features) if left_Rr.device.type == "cpu" else num_rows
    term_CD = left_Rr.new_empty(min(rows, num_rows), num_features)
    # Blocks of rows that stay in the cache, and within one a column of the factors after the
    # other: the order of additions is the same whatever the size of a block.
    for first in range(0, num_rows, rows):
        total_CD = total_RD[first : first + rows]
        left_Cr = left_Rr[first : first + rows]
        term = term_CD[: len(total_CD)]
        torch.mul(left_Cr[:, :1], right_rD[:1], out=total_CD)
        for column in range(1, len(right_rD)):
            torch.mul(left_Cr[:, column, None], right_rD[column], out=term)
            total_CD.add_(term)
    return total_RD


@settings("PowerSgd", frozen=False)
class PowerSgd(WarmFactors):
    """x_hat = P Q^T with P = orth(x Q_before), Q = x^T P; the next call begins at this Q.

    Source: Vogels et al., arXiv:1905.13727, algorithm 1. Over calls on slowly changing gradients
    this is subspace iteration and comes near to the best rank-r matrix; one call on its own does
    not, so it needs error feedback.
    Difference: there P and Q are averaged over the workers by all-reduce. Here each replica's
    product is decoded and summed: replicas may differ in weight, be late or be left out, a robust
    merge sees what each of them meant, the sum has up to R * r directions instead of r, and it is
    one exchange instead of two that wait for each other. For two replicas it costs the same bytes.

    Decoding is one multiplication and one addition per value and column, in a fixed order, so
    that it gives the same bits on any processor, unlike a matrix product.

    Wire, for [R, D]: P [R, r] and Q^T [r, D] in the tensor's dtype, r = min(rank, R, D).
    rank: columns of P and Q.
    """

    rank: Positive = 4

    _product = staticmethod(outer_sum)

    label_form = "powersgd({rank})"

    def _rank(self, num_rows: int, num_features: int) -> int:
        return min(self.rank, num_rows, num_features)

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
        # A copy: the factors are scaled in place before they are sent.
        self._basis_Dl = right_rD.T.clone(memory_format=torch.contiguous_format)
        return left_Rr, right_rD
