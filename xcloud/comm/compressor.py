"""What every compressor promises. No compressor lives here, and none knows links or ranks.

A compressor turns one floating tensor into a few tensors ("parts") that are cheaper to send, and
back. `family` fixes where in a chain it may stand: low_rank, then sparse, then precision.
"""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from xcloud.cluster.tensor_spec import TensorSpec

Parts = tuple[Tensor, ...]
Family = Literal["none", "low_rank", "sparse", "precision"]


@runtime_checkable
class Compressor(Protocol):
    """Tensor ↔ parts. What decoding needs travels as a part, a random seed included.

    A warm start may be kept between calls as long as decoding needs none of it (`Stateful`).
    Random numbers depend on the channel and the call (`Randomized`).
    """

    @property
    def family(self) -> Family: ...

    @property
    def label(self) -> str:
        """Short name for run names and tables, such as "int8", "topk(0.1)", "svd(0.6)"."""

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """Shape and dtype of every part that `compress` makes of a tensor of this spec."""

    def compress(self, tensor: Tensor) -> Parts:
        """Parts exactly as promised by `wire_specs`. Raises ValueError for integer tensors."""

    def decompress(self, parts: Parts, spec: TensorSpec) -> Tensor:
        """The tensor as the receiver sees it, of exactly this spec (shape and dtype)."""


def refuse_integers(tensor: Tensor) -> None:
    """Raises ValueError."""
    if not tensor.is_floating_point():
        raise ValueError(f"only floating tensors can be compressed, got {tensor.dtype}")


def wide(dtype: torch.dtype) -> torch.dtype:
    """What to compute in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
