"""What has come to one rank and is not done yet: to one of the consumer batches, and which
producers are ready, silent or gone; to one of a producer orders. Filled by the links' threads,
emptied by the loops.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from xcloud.base.errors import FrameError, LinkError
from xcloud.cluster.frame import Frame
from xcloud.cluster.liveness import PeerLife
from xcloud.comm.state import State, whole_numbers
from xcloud.parallel.control import code_of
from xcloud.parallel.one_way.plan import NOBODY, Order, Source


class Arrived(NamedTuple):
    source: Source
    number: int
    payload: Tensor
    num_bytes: int  # on the wire, header included


@dataclass
class _Box:
    """Of one source. due: numbers that were ordered and have not come; ended: why none will."""

    life: PeerLife
    waiting: deque[Arrived] = field(default_factory=deque)
    due: deque[int] = field(default_factory=deque)
    last_number: int = 0
    heard_at_s: float = 0.0
    is_ready: bool = False
    ended: str | None = None


class Inbox:
    """All methods may be called from any thread. lives: note there what `wait` waits for.
    most_waiting: batches of a source, which sends none that was not ordered."""

    def __init__(
        self,
        sources: Sequence[Source],
        max_payload_bytes: int,
        lives: Mapping[Source, PeerLife] | None = None,
        most_waiting: int = 1 << 14,
    ) -> None:
        self.num_producers = 1 + max(source.producer for source in sources)
        self._max_payload_bytes, self._most_waiting = max_payload_bytes, most_waiting
        self._changed = threading.Condition(threading.RLock())
        self._boxes = {s: _Box(lives[s] if lives else PeerLife()) for s in sources}

    def _of(self, producer: int) -> list[_Box]:
        return [box for source, box in self._boxes.items() if source.producer == producer]

    # --- from the links
    def put(self, source: Source, frame: Frame) -> None:
        """Raises FrameError for anything but one vector of bytes in the order of its numbers."""
        number, parts = frame.key.step, frame.parts
        name = f"batch {number} of producer {source.producer} (rank {source.group_rank})"
        with self._changed:
            box = self._boxes[source]
            if len(parts) != 1 or parts[0].dtype != torch.uint8 or parts[0].dim() != 1:
                raise FrameError(
                    f"{name} is not one vector of bytes but "
                    f"{[(p.dtype, tuple(p.shape)) for p in parts]}; nothing else may come from a "
                    "producer"
                )
            if len(parts[0]) > self._max_payload_bytes or number <= box.last_number:
                raise FrameError(
                    f"{name} has {len(parts[0])} bytes, at most {self._max_payload_bytes} were "
                    f"promised, and came after number {box.last_number}"
                )
            # An order may be known here later than its batch comes, but not without end.
            due, num = box.due, len(box.waiting)
            if (due and number < due[-1] and number not in due) or num >= self._most_waiting:
                raise FrameError(
                    f"{name} was not ordered: due are {list(due)[:8]}, and {num} wait here"
                )
            while due and due[0] <= number:
                due.popleft()
            box.last_number, box.heard_at_s = number, time.monotonic()
            box.waiting.append(Arrived(source, number, parts[0], frame.num_bytes))
            self._changed.notify_all()

    def set_ready(self, source: Source) -> None:
        with self._changed:
            self._boxes[source].is_ready = True
            self._changed.notify_all()

    def set_ended(self, source: Source, reason: str) -> None:
        with self._changed:
            box = self._boxes[source]
            box.ended = box.ended or reason
            self._changed.notify_all()

    def refuse(self, producer: int, reason: str) -> None:
        """It takes no part from the start, and the others suffice (feed.min_producers)."""
        for box in self._of(producer):
            box.is_ready, box.ended = True, reason

    # --- from the plan
    def expect(self, orders: Sequence[Order]) -> None:
        """These are on their way to this rank: from now on silence counts."""
        with self._changed:
            for order in orders:
                box = self._boxes[order.source]
                if order.number > box.last_number:
                    if not box.due:
                        box.heard_at_s = time.monotonic()
                    box.due.append(order.number)

    # --- for the training loop
    def is_ready(self, producer: int) -> bool:
        """All its ranks have said so, and nothing that was ordered is missing."""
        with self._changed:
            boxes = self._of(producer)
            return all(box.is_ready and box.ended is None and not box.due for box in boxes)

    def was_ready(self, producer: int) -> bool:
        """All its ranks have ever said so, or it was refused."""
        return all(box.is_ready for box in self._of(producer))

    def end_of(self, producer: int) -> str | None:
        """Why nothing more can come from it; None while something can. A producer whose ranks
        average their gradients ends with the first of them."""
        with self._changed:
            return next((box.ended for box in self._of(producer) if box.ended), None)

    def has_ended(self, producer: int) -> bool:
        return self.end_of(producer) is not None

    def has(self, source: Source) -> bool:
        return bool(self._boxes[source].waiting)

    def silent_s(self, producer: int) -> float:
        """How long it has been silent although something was ordered; 0 if nothing is due."""
        with self._changed:
            now_s, boxes = time.monotonic(), self._of(producer)
            return max((now_s - box.heard_at_s for box in boxes if box.due), default=0.0)

    def is_due(self, producer: int) -> bool:
        """Something that was ordered for this rank has not come, and still may."""
        with self._changed:
            is_missing = any(box.due for box in self._of(producer))
            return is_missing and self.end_of(producer) is None

    def is_whole(self) -> bool:
        """Nothing that was ordered for this rank is missing, but of producers that are gone."""
        return not any(self.is_due(producer) for producer in range(self.num_producers))

    def readmit(self, producer: int) -> None:
        """A producer that was lost begins again with what is ordered from now on."""
        with self._changed:
            for box in self._of(producer):
                box.waiting.clear()
                box.due.clear()

    def with_batches(self) -> list[int]:
        """Producers of which something is here."""
        with self._changed:
            return sorted({s.producer for s, box in self._boxes.items() if box.waiting})

    def take(self, source: Source) -> Arrived | None:
        """The oldest unused batch of a source, None if there is none."""
        with self._changed:
            waiting = self._boxes[source].waiting
            return waiting.popleft() if waiting else None

    def take_of(self, producer: int) -> Arrived | None:
        """The batch with the lowest number of any rank of a producer."""
        with self._changed:
            heads = [box.waiting for box in self._of(producer) if box.waiting]
            return min(heads, key=lambda w: w[0].number).popleft() if heads else None

    def wait(self, timeout_s: float, until: Callable[[], bool]) -> None:
        """Until something has changed such that `until()` holds, or the time is over."""
        with ExitStack() as stack:
            for life, message in self._awaited():
                stack.enter_context(life.awaiting(message))
            with self._changed:
                self._changed.wait_for(until, timeout_s)

    def _awaited(self) -> list[tuple[PeerLife, str]]:
        """Batches that are due; if none is, that who is not ready says it is."""
        with self._changed:
            there = [box for box in self._boxes.values() if box.ended is None]
            batches = [(box.life, f"batch {box.due[0]}") for box in there if box.due]
            unready = [
                (box.life, "the message that it is ready") for box in there if not box.is_ready
            ]
            return batches or unready

    # --- what a run resumes from
    def state_dict(self) -> State:
        """Batches that are here, once all that were ordered have come. Who is ready or gone is no
        part of it: a resumed run is connected anew."""
        with self._changed:
            boxes = list(self._boxes.values())
            waiting = [(place, one) for place, box in enumerate(boxes) for one in box.waiting]
            rows = [(p, a.number, len(a.payload), a.num_bytes) for p, a in waiting]
            payloads = [torch.empty(0, dtype=torch.uint8), *(a.payload for _, a in waiting)]
            return {
                "last_numbers": torch.tensor([box.last_number for box in boxes]),
                "batches": torch.tensor(rows, dtype=torch.int64).view(-1, 4),
                "payloads": torch.cat(payloads),
            }

    def load_state_dict(self, state: State) -> None:
        """Before anything arrives. Raises ValueError for the state of other sources."""
        last_numbers = whole_numbers(state, "last_numbers", len(self._boxes)).tolist()
        batches, payloads = whole_numbers(state, "batches", -1, 4), state["payloads"]
        assert isinstance(payloads, Tensor)
        pieces = torch.split(payloads, batches[:, 2].tolist())
        sources = list(self._boxes)
        with self._changed:
            for box, last_number in zip(self._boxes.values(), last_numbers, strict=True):
                box.last_number = last_number
                box.waiting.clear()
            for row, payload in zip(batches.tolist(), pieces, strict=True):
                place, number, _, num_bytes = row
                arrived = Arrived(sources[place], number, payload.clone(), num_bytes)
                self._boxes[sources[place]].waiting.append(arrived)


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
        """All ranks of the cloud have been ordered the same numbers."""
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
            item = self._waiting.popleft()
        if may_drop and self.is_stopped:
            return None
        if isinstance(item, LinkError):
            raise item
        return item


def _rows(frame: Frame) -> list[list[int]]:
    """Whole numbers [N, 3]."""
    part = frame.parts[0] if len(frame.parts) == 1 else torch.empty(0)
    if part.dtype != torch.int32 or part.dim() != 2 or part.shape[1] != 3:
        raise FrameError(f"a message of {[(p.dtype, tuple(p.shape)) for p in frame.parts]} ")
    rows: list[list[int]] = part.tolist()
    return rows
