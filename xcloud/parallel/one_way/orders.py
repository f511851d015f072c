"""What one rank of a producer was told to make and has not begun. No network: the link's thread
fills it, the producer's loop empties it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import torch

from xcloud.base.errors import FrameError, LinkError
from xcloud.cluster.frame import Frame
from xcloud.cluster.liveness import PeerLife
from xcloud.parallel.control import code_of

NOBODY = -1
"""In the place of a consumer's rank: a batch that is only made, so that all ranks of the cloud
stand at the same number; it is kept until a rank of the consumer wants it."""


class Ordered(NamedTuple):
    """num_planned: batches that this rank will make in all, as the consumer plans by now."""

    number: int
    consumer: int
    num_planned: int


class SaveNow(NamedTuple):
    """Between two batches: save the state after step `step` of the consumer."""

    step: int
    code: int


class OrderBook:
    """`take_*` are handlers of a link, and raise FrameError for what no consumer sends; `next()`
    is the loop's. consumer: note there what `next` waits for. num_consumers: ranks that a batch
    may be for. most_waiting: orders not begun; most_number: of a batch."""

    def __init__(
        self,
        consumer: PeerLife | None = None,
        num_consumers: int = 1,
        most_waiting: int = 1 << 14,
        most_number: int = 1 << 30,
    ) -> None:
        self._consumer = consumer or PeerLife()
        self._num_consumers = num_consumers
        self._most_waiting, self._most_number = most_waiting, most_number
        self._waiting: deque[Ordered | SaveNow | LinkError | None] = deque()
        self._changed = threading.Condition()
        self._last = 0  # number ordered
        self._for_nobody: set[int] = set()  # of these some rank may still want the batch
        self.is_stopped = False

    def begin_after(self, number: int, for_nobody: Collection[int] = ()) -> None:
        """Batch `number` was made before the run went on, and is kept if it was for nobody."""
        with self._changed:
            self._last = max(self._last, number)
            self._for_nobody.update(for_nobody)

    def take_orders(self, frame: Frame) -> None:
        """int32 [N, 3]. What was ordered for nobody may be ordered again."""
        for row in _rows(frame):
            order = Ordered(*row)
            is_again = order.number in self._for_nobody
            if (
                self.is_stopped
                or not (is_again or self._last < order.number <= self._most_number)
                or not NOBODY <= order.consumer < self._num_consumers
                or not 1 <= order.num_planned <= self._most_number
                or len(self._for_nobody) > self._most_waiting
            ):
                raise FrameError(
                    f"{order} after number {self._last} and {'a' if self.is_stopped else 'no'} "
                    f"stop; there are {self._num_consumers} consumers and at most "
                    f"{self._most_number} batches"
                )
            self._last = max(self._last, order.number)
            if order.consumer != NOBODY:
                self._for_nobody.discard(order.number)
            elif is_again:
                continue
            else:
                self._for_nobody.add(order.number)
            self._put(order)

    def take_stop(self, frame: Frame) -> None:
        """All ranks of the cloud have been ordered the same numbers, if they go on so far."""
        if self.is_stopped or frame.parts:
            raise FrameError(f"a stop of {len(frame.parts)} parts, or a second one")
        self.is_stopped = True
        self._put(None)

    def take_save(self, frame: Frame) -> None:
        """After everything that was ordered so far."""
        self._put(SaveNow(frame.key.step, code_of(frame, 0)))

    def take_end(self, reason: LinkError) -> None:
        self._put(reason)

    def _put(self, item: Ordered | SaveNow | LinkError | None) -> None:
        with self._changed:
            if len(self._waiting) >= self._most_waiting and isinstance(item, tuple):
                raise FrameError(f"more than {self._most_waiting} orders that are not begun")
            self._waiting.append(item)
            self._changed.notify()

    def next(self, may_drop: bool) -> Ordered | SaveNow | None:
        """None: no more is wanted. may_drop: end with the stop, whatever was ordered before it.
        Raises LinkError if the consumer is gone."""
        with self._consumer.awaiting(f"orders after batch {self._last}"), self._changed:
            self._changed.wait_for(lambda: self._waiting)
            found = self._waiting.popleft()
        if may_drop and self.is_stopped:
            return None
        if isinstance(found, LinkError):
            raise found
        return found


def _rows(frame: Frame) -> list[list[int]]:
    """Whole numbers [N, 3]."""
    part = frame.parts[0] if len(frame.parts) == 1 else torch.empty(0)
    if part.dtype != torch.int32 or part.dim() != 2 or part.shape[1] != 3:
        raise FrameError(f"a message of {[(p.dtype, tuple(p.shape)) for p in frame.parts]} ")
    rows: list[list[int]] = part.tolist()
    return rows
