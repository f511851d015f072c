"""What one rank of a producer was told to make and has not begun. No network: the link's thread
fills it, the producer's loop empties it.
"""

from __future__ import annotations

import queue
from typing import NamedTuple

from xcloud.cluster.frame import Frame
from xcloud.errors import LinkError

NOBODY = -1
"""In the place of a consumer's rank: a batch that only the other ranks of the cloud need."""


class Ordered(NamedTuple):
    """num_planned: batches that this rank will make in all, as the consumer plans by now."""

    number: int
    consumer: int
    num_planned: int


class OrderBook:
    """`take_*` are handlers of a link; `next()` is the loop's."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Ordered | LinkError | None] = queue.SimpleQueue()
        self._known = Ordered(0, NOBODY, 1)
        self.is_stopped = False

    def take_orders(self, frame: Frame) -> None:
        """int32 [N, 3]."""
        for row in frame.parts[0].tolist():
            self._known = Ordered(*row)
            self._waiting.put(self._known)

    def take_stop(self, frame: Frame) -> None:
        """int32 [1]: where all ranks of the cloud end, if they go on so far."""
        for number in range(self._known.number + 1, int(frame.parts[0][0]) + 1):
            self._waiting.put(Ordered(number, NOBODY, self._known.num_planned))
        self.is_stopped = True
        self._waiting.put(None)

    def take_end(self, reason: LinkError) -> None:
        self._waiting.put(reason)

    def next(self, may_drop: bool) -> Ordered | None:
        """None: no more is wanted. may_drop: end with the stop, whatever was ordered before it.
        Raises LinkError if the consumer is gone."""
        found = self._waiting.get()
        if may_drop and self.is_stopped:
            return None
        if isinstance(found, LinkError):
            raise found
        return found
