"""Tensors of which each rank holds a part (torch's DTensor). Knows no ranks and imports no such
tensors: a run that deals none does not load torch's code for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of it, sharing memory: all of an ordinary tensor."""
    dealt: Any = tensor
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        part: Tensor = dealt.to_local()
    return part


def with_part(tensor: Tensor, part: Tensor) -> Tensor:
    """A tensor dealt as `tensor` is, of which this rank holds `part`, sharing memory."""
    if not hasattr(tensor, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape,
        stride=tensor.stride(),
    )  # fmt: skip
