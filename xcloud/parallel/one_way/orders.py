"""What one rank of a producer was told to make and has not begun. No network: the link's thread
fills it, the producer's loop empties it.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

import torch

from xcloud.base.errors import FrameError, LinkError
from xcloud.cluster.frame import Frame
from xcloud.cluster.liveness import PeerLife
from xcloud.comm.state import State, whole_numbers

NOBODY = -1
"""In the place of a consumer's rank: a batch that only the other ranks of the cloud need."""


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
        self._stop_after = 0
        self._waiting: deque[Ordered | SaveNow | LinkError | None] = deque()
        self._changed = threading.Condition()
        self._known = Ordered(0, NOBODY, 1)
        self.is_stopped = False

    def begin_after(self, number: int) -> None:
        """Batch `number` was made before the run went on."""
        with self._changed:
            if self._known.number < number:
                self._known = Ordered(number, NOBODY, self._known.num_planned)

    def take_orders(self, frame: Frame) -> None:
        """int32 [N, 3]."""
        for row in _rows(frame, 3):
            order, last = Ordered(*row), self._known.number
            if (
                self.is_stopped
                or not last < order.number <= self._most_number
                or not NOBODY <= order.consumer < self._num_consumers
                or not 1 <= order.num_planned <= self._most_number
            ):
                raise FrameError(
                    f"{order} after number {last} and {'a' if self.is_stopped else 'no'} stop; "
                    f"there are {self._num_consumers} consumers and at most {self._most_number} "
                    "batches"
                )
            self._known = order
            self._put(order)

    def take_stop(self, frame: Frame) -> None:
        """int32 [1]: where all ranks of the cloud end, if they go on so far."""
        ((last,),) = _rows(frame, 1)
        if self.is_stopped or last > self._most_number:
            raise FrameError(f"a stop after batch {last}; there are at most {self._most_number}")
        self._stop_after, self.is_stopped = last, True
        self._put(None)

    def take_save(self, step: int, code: int) -> None:
        """After everything that was ordered so far."""
        self._put(SaveNow(step, code))

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
        message = f"orders after batch {self._known.number}"
        with self._consumer.awaiting(message), self._changed:
            self._changed.wait_for(lambda: self._waiting)
            found = self._waiting.popleft()
            if found is None and self._known.number < self._stop_after:
                self._waiting.appendleft(None)
                found = self._known = Ordered(
                    self._known.number + 1, NOBODY, self._known.num_planned
                )
        if may_drop and self.is_stopped:
            return None
        if isinstance(found, LinkError):
            raise found
        return found

    def state_dict(self) -> State:
        """The orders not begun, and the last one known. The end of the link and of the job are
        none of it: whoever goes on is connected anew."""
        with self._changed:
            waiting = [item for item in self._waiting if isinstance(item, Ordered)]
            orders = torch.tensor([*waiting, self._known], dtype=torch.int64)
        return {"waiting": orders[:-1], "known": orders[-1]}

    def load_state_dict(self, state: State) -> None:
        waiting = whole_numbers(state, "waiting", -1, 3).tolist()
        self._known = Ordered(*whole_numbers(state, "known", 3).tolist())
        with self._changed:
            self._waiting = deque(Ordered(*row) for row in waiting)
            self._changed.notify()


def _rows(frame: Frame, width: int) -> list[list[int]]:
    """Whole numbers [N, width]; [1] of a width of 1."""
    part = frame.parts[0] if len(frame.parts) == 1 else torch.empty(0)
    fits = part.shape == (1,) if width == 1 else part.dim() == 2 and part.shape[1] == width
    if part.dtype != torch.int32 or not fits:
        raise FrameError(f"a message of {[(p.dtype, tuple(p.shape)) for p in frame.parts]} ")
    rows: list[list[int]] = part.view(-1, width).tolist()
    return rows
