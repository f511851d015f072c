"""A GlooPair within one process, for gloo links in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor


class MemoryGroup:
    """One direction between two ranks, as gloo keeps it: a message leaves when the receive with
    its tag is posted, and not before."""

    def __init__(self) -> None:
        self.posted: dict[int, Tensor] = {}
        self.max_posted = 0
        self._filled: set[int] = set()
        self._changed = threading.Condition()

    def join(self) -> None:
        """Both ends are here."""

    def isend(self, tensor: Tensor, tag: int) -> Work:
        def wait() -> None:
            with self._changed:
                self._changed.wait_for(lambda: tag in self.posted)
                self.posted.pop(tag)[: tensor.numel()] = tensor
                self._filled.add(tag)
                self._changed.notify_all()

        return Work(wait)

    def irecv(self, buffer: Tensor, tag: int) -> Work:
        with self._changed:
            self.posted[tag] = buffer
            self.max_posted = max(self.max_posted, len(self.posted))
            self._changed.notify_all()

        def wait() -> None:
            with self._changed:
                self._changed.wait_for(lambda: tag in self._filled)

        return Work(wait)


class Work:
    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait
