"""What has come to one rank and is not done yet: to one of the consumer batches, and which
producers are ready, silent or gone; to one of a producer orders. Filled by the links' threads,
emptied by the loops.
"""

from __future__ import annotations

import queue
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
from xcloud.cluster.one_way_layout import OneWayLayout
from xcloud.comm.state import State, StatefulParts
from xcloud.parallel.control import code_of
from xcloud.parallel.one_way import NOBODY, Order, rows_of, whole_numbers


class Arrived(NamedTuple):
    """num_bytes: on the wire, header included."""

    producer: int
    source: int
    number: int
    payload: Tensor
    num_bytes: int


@dataclass
class _Box:
    """Of one source. due: numbers that were ordered and have not come; ended: why none will."""

    producer: int
    name: str
    life: PeerLife
    waiting: deque[Arrived] = field(default_factory=deque)
    due: deque[int] = field(default_factory=deque)
    last_number: int = 0
    heard_at_s: float = 0.0
    is_ready: bool = False
    ended: str = ""


class Inbox(StatefulParts):
    """Batches by source, and what is known of producers. Links fill it from their threads; one
    thread takes from it. lives: of ranks, note there what `wait` waits for. most_waiting: batches
    of a source, which sends none that was not ordered.

    Its state has the batches that are here, once all that were ordered have come. Who is ready or
    gone is no part of it: a resumed run is connected anew.
    """

    own_names = ("last_numbers", "batches", "payloads")

    def __init__(
        self, layout: OneWayLayout, max_payload_bytes: int, lives: Mapping[int, PeerLife],
        most_waiting: int = 1 << 14,
    ) -> None:  # fmt: skip
        self._max_payload_bytes, self._most_waiting = max_payload_bytes, most_waiting
        self._changed = threading.Condition(threading.RLock())
        self._boxes = [
            _Box(p, f"producer {cloud!r} (its rank {i})", lives[layout.num_consumers + source])
            for p, (cloud, sources) in enumerate(
                zip(layout.producers, layout.sources, strict=True)
            )
            for i, source in enumerate(sources)
        ]
        self._of = [[self._boxes[source] for source in sources] for sources in layout.sources]

    # --- from the links
    def put(self, source: int, frame: Frame) -> None:
        """Raises FrameError for anything but one vector of bytes in the order of its numbers."""
        number, parts, box = frame.key.step, frame.parts, self._boxes[source]
        name = f"batch {number} of {box.name}"
        with self._changed:
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
            box.waiting.append(Arrived(box.producer, source, number, parts[0], frame.num_bytes))
            self._changed.notify_all()

    def set_ready(self, source: int, frame: Frame | None = None) -> None:
        """frame: in which it says so."""
        with self._changed:
            self._boxes[source].is_ready = True
            self._changed.notify_all()

    def set_ended(self, source: int, reason: LinkError | str) -> None:
        with self._changed:
            self._boxes[source].ended = self._boxes[source].ended or str(reason)
            self._changed.notify_all()

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

    def readmit(self, producer: int) -> None:
        """A producer that was lost begins again with what is ordered from now on."""
        for box in self._of[producer]:
            box.waiting.clear()
            box.due.clear()

    # --- for the training loop
    def is_ready(self, producer: int) -> bool:
        """All its ranks have said so, and nothing that was ordered is missing."""
        return all(box.is_ready and not box.ended and not box.due for box in self._of[producer])

    def was_ready(self, producer: int) -> bool:
        """All its ranks have ever said so, or it was refused."""
        return all(box.is_ready for box in self._of[producer])

    def end_of(self, producer: int) -> str:
        """Why nothing more can come from it; empty while something can. A producer whose ranks
        average their gradients ends with the first of them."""
        return next((box.ended for box in self._of[producer] if box.ended), "")

    def has(self, source: int) -> bool:
        return bool(self._boxes[source].waiting)

    def silent_s(self, producer: int) -> float:
        """How long it has been silent although something was ordered; 0 if nothing is due."""
        heard = [box.heard_at_s for box in self._of[producer] if box.due]
        return time.monotonic() - min(heard) if heard else 0.0

    @property
    def due(self) -> list[int]:
        """Producers of which something that was ordered for this rank has not come, and still
        may."""
        are_due = [any(box.due for box in boxes) for boxes in self._of]
        return [p for p, is_due in enumerate(are_due) if is_due and not self.end_of(p)]

    @property
    def here(self) -> list[int]:
        """Producers of which there are batches."""
        return [p for p, boxes in enumerate(self._of) if any(box.waiting for box in boxes)]

    def next_of(self, source: int) -> Arrived | None:
        """The oldest unused batch of a source, None if there is none."""
        waiting = self._boxes[source].waiting
        return waiting.popleft() if waiting else None

    def next_from(self, producer: int) -> Arrived:
        """The batch with the lowest number of any rank of a producer of which one is here."""
        heads = [box.waiting for box in self._of[producer] if box.waiting]
        return min(heads, key=lambda waiting: waiting[0].number).popleft()

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
            there = [box for box in self._boxes if not box.ended]
            batches = [(box.life, f"batch {box.due[0]}") for box in there if box.due]
            unready = (box.life for box in there if not box.is_ready)
            return batches or [(life, "the message that it is ready") for life in unready]

    # --- what a run resumes from
    def own(self) -> State:
        with self._changed:
            waiting = [one for box in self._boxes for one in box.waiting]
            rows = [(a.source, a.number, len(a.payload), a.num_bytes) for a in waiting]
            payloads = [torch.empty(0, dtype=torch.uint8), *(a.payload for a in waiting)]
            return {
                "last_numbers": torch.tensor([box.last_number for box in self._boxes]),
                "batches": rows_of(4, rows),
                "payloads": torch.cat(payloads),
            }

    def take(self, own: State) -> None:
        """Before anything arrives. Raises ValueError for the state of other sources."""
        last_numbers = whole_numbers(own, "last_numbers", len(self._boxes)).tolist()
        batches = whole_numbers(own, "batches", -1, 4)
        pieces = torch.split(torch.as_tensor(own["payloads"]), batches[:, 2].tolist())
        for box, last_number in zip(self._boxes, last_numbers, strict=True):
            box.last_number = last_number
            box.waiting.clear()
        for (source, number, _, num_bytes), payload in zip(batches.tolist(), pieces, strict=True):
            box = self._boxes[source]
            box.waiting.append(Arrived(box.producer, source, number, payload.clone(), num_bytes))


class SaveNow(NamedTuple):
    """Between two batches: save the state after step `step` of the consumer."""

    step: int
    code: int


@dataclass
class OrderBook:
    """`take_*` are handlers of a link, and raise FrameError for what no consumer sends; `next()`
    is the loop's. consumer: note there what `next` waits for. num_consumers: ranks that a batch
    may be for. most_waiting: orders not begun; most_number: of a batch. source: this rank."""

    consumer: PeerLife = field(default_factory=PeerLife)
    num_consumers: int = 1
    most_waiting: int = 1 << 14
    most_number: int = 1 << 30
    source: int = 0
    is_stopped: bool = field(default=False, init=False)
    _last: int = field(default=0, init=False)  # number ordered
    _for_nobody: set[int] = field(default_factory=set, init=False)
    """Of these some rank may still want the batch."""
    _waiting: queue.SimpleQueue[Order | SaveNow | LinkError | None] = field(
        default_factory=queue.SimpleQueue, init=False
    )

    def begin_after(self, number: int, for_nobody: Collection[int] = ()) -> None:
        """Batch `number` was made before the run went on, and is kept if it was for nobody."""
        self._last = max(self._last, number)
        self._for_nobody.update(for_nobody)

    def take_orders(self, frame: Frame) -> None:
        """int32 [N, 3]. What was ordered for nobody may be ordered again."""
        part = frame.parts[0] if len(frame.parts) == 1 else torch.empty(0)
        if part.dtype != torch.int32 or part.dim() != 2 or part.shape[1] != 3:
            found = [(p.dtype, tuple(p.shape)) for p in frame.parts]
            raise FrameError(f"orders must be int32 [N, 3], got {found}")
        for row in part.tolist():
            order = Order(self.source, *row)
            is_again = order.number in self._for_nobody
            if (
                self.is_stopped
                or not (is_again or self._last < order.number <= self.most_number)
                or not NOBODY <= order.consumer < self.num_consumers
                or not 1 <= order.num_planned <= self.most_number
                or len(self._for_nobody) > self.most_waiting
            ):
                raise FrameError(
                    f"{order} after number {self._last} and {'a' if self.is_stopped else 'no'} "
                    f"stop; there are {self.num_consumers} consumers and at most "
                    f"{self.most_number} batches"
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
        self._waiting.put(None)

    def take_save(self, frame: Frame) -> None:
        """After everything that was ordered so far."""
        self._put(SaveNow(frame.key.step, code_of(frame, 0)))

    def take_end(self, reason: LinkError) -> None:
        self._waiting.put(reason)

    def _put(self, item: Order | SaveNow) -> None:
        if self._waiting.qsize() >= self.most_waiting:
            raise FrameError(f"more than {self.most_waiting} orders that are not begun")
        self._waiting.put(item)

    def next(self, may_drop: bool) -> Order | SaveNow | None:
        """None: no more is wanted. may_drop: end with the stop, whatever was ordered before it.
        Raises LinkError if the consumer is gone."""
        with self.consumer.awaiting(f"orders after batch {self._last}"):
            item = self._waiting.get()
        if may_drop and self.is_stopped:
            return None
        if isinstance(item, LinkError):
            raise item
        return item
