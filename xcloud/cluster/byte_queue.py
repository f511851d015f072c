"""A queue between two threads that is bounded in bytes, not in items."""

from __future__ import annotations

import threading
from collections import deque
from queue import Empty, Full
from typing import Generic, TypeVar

T = TypeVar("T")


class ByteQueue(Generic[T]):
    """FIFO. `put` blocks while the queued items and the new one exceed max_bytes; an empty queue
    accepts an item of any size. Items of 0 bytes (which end a link) never wait."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._items: deque[tuple[T, int]] = deque()
        self._num_bytes = 0
        self._changed = threading.Condition()

    def put(self, item: T, num_bytes: int, timeout_s: float | None = None) -> None:
        """Raises queue.Full if there is no room within timeout_s seconds (None: wait for ever)."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_room(num_bytes), timeout_s):
                raise Full
            self._items.append((item, num_bytes))
            self._num_bytes += num_bytes
            self._changed.notify_all()

    def get(self, timeout_s: float | None = None) -> T:
        """Raises queue.Empty if nothing arrives within timeout_s seconds (None: wait for ever)."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._items) > 0, timeout_s):
                raise Empty
            item, num_bytes = self._items.popleft()
            self._num_bytes -= num_bytes
            self._changed.notify_all()
            return item

    @property
    def is_empty(self) -> bool:
        return not self._items

    def _has_room(self, num_bytes: int) -> bool:
        return not (num_bytes and self._num_bytes) or (
            self._num_bytes + num_bytes <= self.max_bytes
        )
