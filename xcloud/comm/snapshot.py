"""Host memory that a rank copies its state into, to be written while training continues."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from xcloud.comm.state import copying

_ALIGN = 64
_PAGE_BYTES = 4096
_PIECE_PAGES = 4096  # touched before looking whether to stop


def bytes_to_copy(take: Callable[[], object]) -> int:
    """Return the bytes that the snapshot `take` needs in a `SnapshotBuffer`. Nothing is copied."""
    num_bytes = 0

    def count(tensors: tuple[Tensor, ...]) -> Tensor:
        nonlocal num_bytes
        num_bytes += _aligned(sum(tensor.nbytes for tensor in tensors))
        return tensors[0]

    with copying(count):
        take()
    return num_bytes


@dataclass(eq=False)
class SnapshotBuffer:
    """Host memory for one snapshot at a time, of tensors of any device, kept for the next one: on
    a GPU the copy would need room that training does not have. What does not fit gets host memory
    of its own."""

    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    _used: int = 0

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let `copy_of` copy into this memory inside the block, over the snapshot before."""
        self._used = 0
        with copying(self._copy):
            yield

    def enlarge(self, num_bytes: int, stop: threading.Event) -> None:
        """Enlarge the memory to `num_bytes`, while no snapshot is in it. Touch all of its bytes,
        unless `stop` is set first. Touching holds no lock of Python's and uses one core."""
        if num_bytes <= len(self.memory):
            return
        self.memory = torch.empty(0, dtype=torch.uint8)  # never both at a time
        with contextlib.suppress(RuntimeError):  # no memory now: the copy itself will say so
            self.memory = torch.empty(num_bytes, dtype=torch.uint8)
        # Memory is there only once it has been written to; in the first checkpoint this would cost
        # the main thread time.
        pages = self.memory.numpy()[::_PAGE_BYTES]
        for first in range(0, len(pages), _PIECE_PAGES):
            if stop.is_set():
                return
            pages[first : first + _PIECE_PAGES] = 0

    def _copy(self, tensors: tuple[Tensor, ...]) -> Tensor:
        like = tensors[0]
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        end = self._used + num_bytes
        if end > len(self.memory):
            # The state has grown since the memory was made, such as by memories of samples.
            place = torch.empty(num_bytes, dtype=torch.uint8).view(like.dtype)
        else:
            place = self.memory[self._used : end].view(like.dtype)
            # What comes next may have any dtype.
            self._used = _aligned(end)
        with torch.no_grad():
            if len(tensors) == 1:
                return place.view(like.shape).copy_(like)
            rows = place.view(sum(map(len, tensors)), *like.shape[1:])
            for own, tensor in zip(torch.split(rows, [*map(len, tensors)]), tensors, strict=True):
                own.copy_(tensor)
            return rows


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
