"""Copies of large states between two updates, into memory whose pages are there already: touching
new ones takes several times as long as the copy. When to copy is decided elsewhere
(survive/checkpointing.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

_ALIGN = 64
_PAGE_BYTES = 4096
_PIECE_PAGES = 4096  # touched before looking whether to stop

_Copier = Callable[[tuple[Tensor, ...]], Tensor]
_copier: ContextVar[_Copier | None] = ContextVar("_copier", default=None)  # None: a clone


def copy_of(tensor: Tensor, *more: Tensor) -> Tensor:
    """For `state_dict`: a copy of a tensor, or of several joined along axis 0. It is valid until
    the next snapshot of a `SnapshotBuffer` that this thread uses."""
    copier = _copier.get()
    return _own_copy((tensor, *more)) if copier is None else copier((tensor, *more))


def bytes_to_copy(take: Callable[[], object]) -> int:
    """Of host memory that the snapshot `take` needs in a `SnapshotBuffer`. Nothing is copied."""
    num_bytes = 0

    def count(tensors: tuple[Tensor, ...]) -> Tensor:
        nonlocal num_bytes
        if tensors[0].device.type == "cpu":
            num_bytes += _aligned(sum(tensor.nbytes for tensor in tensors))
        return tensors[0]

    with _copying(count):
        take()
    return num_bytes


class SnapshotBuffer:
    """Host memory for one snapshot at a time, kept for the next one. What does not fit, and
    tensors of other devices, get memory of their own."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Within, `copy_of` copies into this memory, over the snapshot before."""
        self._used = 0
        with _copying(self._copy):
            yield

    def enlarge(self, num_bytes: int, stop: threading.Event) -> None:
        """To so many bytes, which no snapshot is in meanwhile, and touch all of them unless `stop`
        comes first. Touching holds no lock of Python's and uses one core."""
        if num_bytes <= len(self._memory):
            return
        self._memory = torch.empty(0, dtype=torch.uint8)  # never both at a time
        with contextlib.suppress(RuntimeError):  # no memory now: the copy itself will say so
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        pages = self._memory.numpy()[::_PAGE_BYTES]
        for first in range(0, len(pages), _PIECE_PAGES):
            if stop.is_set():
                return
            pages[first : first + _PIECE_PAGES] = 0

    def _copy(self, tensors: tuple[Tensor, ...]) -> Tensor:
        like, num_bytes = tensors[0], sum(tensor.nbytes for tensor in tensors)
        end = self._used + num_bytes
        if like.device.type != "cpu" or end > len(self._memory):
            return _own_copy(tensors)
        place = self._memory[self._used : end].view(like.dtype)
        self._used = _aligned(end)
        with torch.no_grad():
            if len(tensors) == 1:
                return place.view(like.shape).copy_(like)
            place = place.view(-1, *like.shape[1:])
            return torch.cat([tensor.detach() for tensor in tensors], out=place)


@contextlib.contextmanager
def _copying(copier: _Copier) -> Iterator[None]:
    token = _copier.set(copier)
    try:
        yield
    finally:
        _copier.reset(token)


def _own_copy(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0].clone()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
