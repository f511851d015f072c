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
Feedback = Literal["needless", "useful", "needed", "harmful"]
"""What error feedback does for a compressor whose messages are added up: nothing, as nothing is
lost; less error; convergence, as what is lost is lost in the same direction again; or harm, as the
error of one message exceeds the tensor (unbiased, so that the sum of many is right without)."""


@runtime_checkable
class Compressor(Protocol):
    """Tensor ↔ parts. Everything the decoder needs is sent as a part, including random seeds.

    A compressor may keep a warm start between calls as long as decoding does not need it
    (`Stateful`). Its random numbers depend on the channel and the call (`Randomized`).
    """

    @property
    def family(self) -> Family: ...

    @property
    def feedback(self) -> Feedback: ...

    @property
    def label(self) -> str:
        """Short name for run names and tables, such as "int8", "topk(0.1)", "svd(0.6)"."""

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """Shape and dtype of every part that `compress` returns for a tensor of this spec."""

    def compress(self, tensor: Tensor) -> Parts:
        """Parts with exactly the specs of `wire_specs`. Raises ValueError for integer tensors."""

    def decompress(self, parts: Parts, spec: TensorSpec) -> Tensor:
        """The tensor as the receiver sees it, of exactly this spec (shape and dtype)."""


def refuse_integers(tensor: Tensor) -> None:
    """Raise ValueError unless the tensor is floating-point."""
    if not tensor.is_floating_point():
        raise ValueError(f"only floating tensors can be compressed, got {tensor.dtype}")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32
