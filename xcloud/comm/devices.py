"""Where tensors lie: on their way from the host to a device, and large ones for a moment."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_rooms = threading.local()


def scratch(use: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor that holds until this thread asks for one of the same use.

    On the CPU it always lies in the same place. Large tensors that come and go leave holes in the
    heap, in which small ones settle that are kept: the next large one takes new memory, in each
    block of a model. A GPU's memory is handed out in another way.
    """
    if device.type != "cpu":
        return torch.empty(*shape, dtype=dtype, device=device)
    num_bytes = prod(shape) * dtype.itemsize
    rooms = vars(_rooms)
    if use not in rooms or rooms[use].numel() < num_bytes:
        rooms[use] = None  # its memory goes before the larger one comes
        pages = mmap.mmap(-1, num_bytes)  # which leave no hole themselves when they go
        rooms[use] = torch.frombuffer(pages, dtype=torch.uint8)
    room: Tensor = rooms[use]
    return room[:num_bytes].view(dtype).view(*shape)


def scratch_bytes() -> int:
    """Return the memory that this thread's scratch tensors take."""
    return sum(room.numel() for room in vars(_rooms).values())


def bring(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device. A GPU copies it from pinned memory when it comes to that, and
    the host does not wait."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
