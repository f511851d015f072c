"""Tensors on their way from the host to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def bring(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device. A GPU copies it from pinned memory when it comes to that, and
    the host does not wait."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
