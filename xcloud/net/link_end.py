"""The two ends of a link, whatever carries the frames: they check, number, count and record them,
hand them to whoever waits, and give up a peer that is silent. A subclass carries the frames: over
gloo (gloo_link.py) or in memory (memory_transport.py).

A heartbeat is a frame like any other (`SendingEnd.say_alive`), and every frame counts as one, so
a carrier has nothing to do for them. The failure detector sends one every few seconds, whatever
else its rank does, so no limit on an evaluation or an export is needed. Inside a step a message
has a deadline too (`overdue_s`), which the link or the policy sets.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from xcloud.base.errors import FrameError, LinkClosed, LinkError, LinkTimeout
from xcloud.net.frame import (
    OF_A_STEP,
    Frame,
    Kind,
    MessageKey,
    Tensors,
    decode_frame,
    encode_frame,
)
from xcloud.net.link import LinkClock, LinkRecord, Progress
from xcloud.net.link_profile import LinkWindow
from xcloud.net.peer import Peer

T = TypeVar("T")


@dataclass(eq=False)
class QueuedBytes:
    """The bytes of messages that wait in the queues of one rank. Thread-safe."""

    peak_bytes: int = 0
    num_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, num_bytes: int) -> None:
        """Count bytes that joined a queue; below 0 for what has left one."""
        with self._lock:
            self.num_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)


MAX_QUEUED = 1 << 16
"""The most items in a queue, each of which takes a kilobyte or two besides its bytes."""


@dataclass(eq=False)
class ByteQueue(Generic[T]):
    """A FIFO queue. `put` blocks while the queued items and the new one exceed max_bytes, or are
    MAX_QUEUED; an empty queue accepts an item of any size. Items of 0 bytes (which end a link)
    never wait.

    total: the bytes in all queues of the rank.
    """

    max_bytes: int
    total: QueuedBytes = field(default_factory=QueuedBytes)
    items: deque[tuple[T, int]] = field(default_factory=deque)  # with the bytes of each
    num_bytes: int = 0  # of the queued items
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def put(
        self, item: T, num_bytes: int, timeout_s: float | None = None, max_bytes: int | None = None
    ) -> bool:
        """Queue an item. Return whether there was room within timeout_s (None: wait for ever).

        max_bytes: the limit for this item; None: that of the queue.
        """
        with self._changed:
            room_bytes = (self.max_bytes if max_bytes is None else max_bytes) - num_bytes

            def fits() -> bool:
                # An empty queue takes any item: one that is longer than the bound could never be
                # sent else.
                if not (num_bytes and self.num_bytes):
                    return True
                return self.num_bytes <= room_bytes and len(self.items) < MAX_QUEUED

            has_room = self._changed.wait_for(fits, timeout_s)
            if has_room:
                self.items.append((item, num_bytes))
                self.num_bytes += num_bytes
                self.total.add(num_bytes)
                self._changed.notify_all()
            return has_room

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether there is an item within timeout_s seconds (None: wait for ever)."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self.items), timeout_s)

    def get(self) -> T:
        with self._changed:
            self.wait()
            item, num_bytes = self.items.popleft()
            self.num_bytes -= num_bytes
            self.total.add(-num_bytes)
            self._changed.notify_all()
            return item


def ignore(*reported: object) -> None:
    """Drop what nobody wants to hear."""


@dataclass(frozen=True)
class EndSettings:
    """The settings of either end of a link.

    capacity_bytes: the receiver's buffer size. A longer frame is refused.
    window: number of receives that the receiver posts, and bytes that may wait at each end. Beyond
        them `send` blocks at the sender, and the receiver takes no more until `recv` is called.
    peer: the record of the peer, which its other links share.
    progress: the time when a message of a step last moved on any link of this rank. The deadline
        of a message counts from there. None: the deadline stands, whatever else is on its way.
    queued: bytes that wait in this rank, in all queues of its links.
    """

    peer_name: str
    capacity_bytes: int
    window: LinkWindow = field(default_factory=LinkWindow)
    record: LinkRecord = field(default_factory=LinkRecord)
    peer: Peer = field(default_factory=Peer)
    progress: Progress | None = None
    queued: QueuedBytes = field(default_factory=QueuedBytes)

    def room_bytes(self, kind: Kind) -> int:
        """Return how far a message of this kind may fill a queue."""
        if kind is Kind.EVALUATION:
            return self.window.max_evaluation_bytes
        return self.window.max_queued_bytes

    def note_progress(self, kind: Kind, at_s: float | None = None) -> None:
        """Note that a message of this kind has moved, or will be there at at_s."""
        if self.progress is not None and kind in OF_A_STEP:
            self.progress.note(at_s)

    def note_moving(self) -> None:
        """Note that a part of a long message has moved: no message of that size is a heartbeat."""
        self.peer.mark_alive()
        if self.progress is not None:
            self.progress.note()


@dataclass(frozen=True)
class OutSettings(EndSettings):
    """The settings of the sending end.

    clock: the emulated link; None leaves the network alone.
    overdue_s: seconds that a full queue may stand still if nothing at all comes from the peer.
    blocked: entered while `send` waits for room, in the sender's thread.
    """

    clock: LinkClock | None = None
    overdue_s: float = 300.0
    blocked: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class InSettings(EndSettings):
    """The settings of the receiving end.

    handlers: kinds that are handed to a function (in another thread than the reader's) instead
        of `recv`. Whatever one raises is the link's end. Heartbeats that have none are dropped.
    is_emulated: the sender's clock says when a message arrives; on a real line nobody does.
    on_end: called once, in such a thread, when nothing more can come, with the reason.
    on_arrival: is given every frame as it comes from the network, with the time.
    """

    handlers: Mapping[Kind, Callable[[Frame], None]] = field(default_factory=dict)
    is_emulated: bool = False
    on_end: Callable[[LinkError], None] = ignore
    on_arrival: Callable[[Frame, float], None] = ignore


class Outgoing(NamedTuple):
    """A message that waits to be carried."""

    key: MessageKey
    sequence: int
    frame: Tensor
    queued_at_s: float


class SendingEnd(ABC):
    """The sending end. A subclass carries the frames.

    `send` returns before delivery; it raises LinkClosed if the peer is gone.
    """

    def __init__(self, settings: OutSettings) -> None:
        self.peer_name = settings.peer_name
        self.record = settings.record
        self.settings = settings
        self._sending = threading.Lock()  # heartbeats come from a thread of their own
        self._is_closing = False
        self._sequence = 0
        self.failure: LinkError | None = None
        # What waits for a subclass's thread. One whose `_put` carries a message at once leaves it
        # empty.
        self._queue: ByteQueue[Any] = ByteQueue(
            max_bytes=settings.window.max_queued_bytes, total=settings.queued
        )

    def send(self, key: MessageKey, parts: Tensors, carries: Sequence[str] = ()) -> None:
        """Send a message.

        carries: a description of each part, for the record of what left the cloud.
        """
        with self._sending:
            self._send(key, parts=parts, carries=carries)

    def say_alive(self, parts: Tensors = (), carries: Sequence[str] = ()) -> None:
        """Send a heartbeat if nothing else is waiting to be sent. Never blocks."""
        # Somebody is sending, so the peer will receive something anyway.
        if not self._sending.acquire(blocking=False):
            return
        try:
            # What waits here is a heartbeat itself as soon as it arrives.
            if not (self._is_closing or self._queue.items):
                self._send(MessageKey(Kind.ALIVE), parts=parts, carries=carries)
        finally:
            self._sending.release()

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Deliver what is under way and close the link. Raises LinkTimeout when nothing was taken,
        and the peer was silent, for timeout_s."""

    def _put(self, item: Outgoing) -> None:
        """Have a message carried, in the order of the calls: queue it, once there is room, for the
        thread that carries it.

        Raises LinkTimeout for a peer that takes none, and `failure` once the link has one.
        """
        started_s = time.monotonic()
        settings = self.settings
        peer = settings.peer
        num_bytes = item.frame.numel()
        room_bytes = settings.room_bytes(item.key.kind)

        def put(timeout_s: float) -> bool:
            if self.failure is not None:
                raise self.failure
            return self._queue.put(
                item, num_bytes=num_bytes, timeout_s=timeout_s, max_bytes=room_bytes
            )

        # Tried without waiting first: `blocked` below has a price, and there is room nearly
        # always.
        if put(0.0):
            return
        of_a_step = item.key.kind in OF_A_STEP
        progress = settings.progress if of_a_step else None
        # In the main thread. Time spent here is the line's and not the stage's (StepClock).
        with settings.blocked():
            has_room = peer.wait(
                put,
                settings.overdue_s,
                in_step=peer.silence_is_loss and of_a_step,
                progress=progress,
            )
        if not has_room:
            raise LinkTimeout(
                f"{self.peer_name} has taken none of the waiting messages for "
                f"{time.monotonic() - started_s:.0f} s; its last heartbeat came "
                f"{peer.silent_s:.0f} s ago. Is that rank stopped, or its link down?"
            )

    def _send(self, key: MessageKey, parts: Tensors, carries: Sequence[str]) -> None:
        settings = self.settings
        frame = encode_frame(key, parts, sequence=self._sequence)
        if frame.numel() > settings.capacity_bytes:
            raise FrameError(
                f"{key} for {self.peer_name} takes {frame.numel():,} bytes, but its receiver was "
                f"promised at most {settings.capacity_bytes:,}"
            )
        queued_at_s = time.monotonic()
        # Noted before it is carried, so that a message which a lost link never delivered still
        # stands in the record of what may have left the cloud.
        self.record.note(key.kind, parts, carries, frame.numel())
        self._put(Outgoing(key, self._sequence, frame, queued_at_s=queued_at_s))
        self._sequence += 1

    def _send_closes(self, num: int) -> None:
        """Send the last messages, one for each receive that the peer has posted."""
        self._is_closing = True
        for _ in range(num):
            self._send(MessageKey(Kind.CLOSE), parts=(), carries=())

    def _await_end(self, wait: Callable[[float], bool], timeout_s: float, failing: str) -> None:
        """Call wait(seconds) until it returns True: the peer has taken all.

        failing, and when LinkTimeout is raised: see await_peer. Raises `failure` if the link has
        one by then.
        """
        await_peer(wait, end=self.settings, timeout_s=timeout_s, failing=failing)
        if self.failure is not None:
            raise self.failure


class ReceivingEnd:
    """The receiving end. A subclass gets the frames: it calls `_open` on each, then `_deliver` or
    `_end`."""

    def __init__(self, settings: InSettings) -> None:
        self.peer_name = settings.peer_name
        self.has_closed = False  # the peer; else the end of the link is a failure
        self.settings = settings
        self._handlers = {Kind.ALIVE: ignore, **settings.handlers}
        self._inbox: ByteQueue[Frame | LinkError] = ByteQueue(
            max_bytes=settings.window.max_queued_bytes, total=settings.queued
        )
        self._over = threading.Event()
        self._expected = 0

    def recv(self, key: MessageKey, overdue_s: float, while_alive: bool = False) -> Tensors:
        """Return the next message, which must be `key`.

        Raises LinkTimeout after overdue_s seconds in which no message of a step moved either. In
        an evaluation, and with while_alive, it is not raised while the peer sends heartbeats.
        Raises LinkClosed if the peer is gone, and FrameError if another message came.
        """
        peer = self.settings.peer
        started_s = time.monotonic()
        progress = self.settings.progress if key.kind in OF_A_STEP else None
        with peer.awaiting(key):
            in_step = not while_alive and key.kind is not Kind.EVALUATION
            # The wait ends with a frame or with the reason why no more can come, which is in the
            # inbox too.
            is_there = peer.wait(self._inbox.wait, overdue_s, in_step=in_step, progress=progress)
        if not is_there:
            waited_s = time.monotonic() - started_s
            seen = ""
            if peer.silence_is_loss:
                seen = f" Its last heartbeat came {peer.silent_s:.0f} s ago."
            raise LinkTimeout(
                f"no {key} from {self.peer_name} after {waited_s:.1f} s.{seen} Is that rank "
                "alive? To wait longer raise cluster.liveness.overdue_after_s or lost_after_s."
            )
        found = self._inbox.get()
        if isinstance(found, LinkError):
            self._inbox.put(found, num_bytes=0)  # whoever asks next shall hear it too
            raise found
        return expect(found, key=key, sender=self.peer_name).parts

    def close(self, timeout_s: float) -> None:
        """Wait until the peer has closed the link, as long as it sends heartbeats."""
        await_peer(
            self._over.wait,
            end=self.settings,
            timeout_s=timeout_s,
            failing="did not close its link",
        )

    def _open(self, buffer: Tensor) -> Frame:
        """Return the frame in a buffer, checked. Raises FrameError."""
        settings = self.settings
        now_s = time.monotonic()
        frame = decode_frame(buffer, sender=self.peer_name)
        if not settings.is_emulated:  # or the peer says how long this rank waits
            frame = frame._replace(deliver_at_s=min(frame.deliver_at_s, 0.0))
        settings.on_arrival(frame, now_s)
        arrives_at_s = max(time.monotonic(), frame.deliver_at_s)
        settings.peer.mark_alive(time.monotonic() - arrives_at_s)
        settings.note_progress(frame.key.kind, at_s=arrives_at_s)
        # A carrier that repeats or loses a frame would shift all that follow by one message.
        if frame.sequence != self._expected:
            raise FrameError(
                f"message {frame.sequence} from {self.peer_name} came as number {self._expected}"
            )
        self._expected += 1
        settings.record.arrived(frame)
        return frame

    def _deliver(self, frame: Frame) -> None:
        self.settings.record.received(frame)
        try:
            # In the carrier's thread. A handler that fails ends the link, not the thread: whoever
            # reads from it gets the reason.
            self._handlers.get(frame.key.kind, self._keep)(frame)
        except LinkError:
            raise
        except Exception as error:
            raise FrameError(
                f"{frame.key} from {self.peer_name} cannot be handled: {error!r}"
            ) from error

    def _keep(self, frame: Frame, timeout_s: float | None = None) -> bool:
        """Queue a frame for `recv`. Return whether there was room for it within timeout_s
        seconds."""
        room_bytes = self.settings.room_bytes(frame.key.kind)
        return self._inbox.put(
            frame, num_bytes=frame.num_bytes, timeout_s=timeout_s, max_bytes=room_bytes
        )

    def _leave(self) -> None:
        self.has_closed = True
        self._end(LinkClosed(f"{self.peer_name} has closed its link"))

    def _end(self, reason: LinkError) -> None:
        self._inbox.put(reason, num_bytes=0)
        # The inbox first: a reader that is woken by `on_end` finds the reason there.
        self.settings.on_end(reason)
        self._over.set()


def expect(frame: Frame, key: MessageKey, sender: str) -> Frame:
    """Return the frame, if it is the message that was expected. Raises FrameError otherwise."""
    if frame.key != key:
        raise FrameError(
            f"expected {key} from {sender}, got {frame.key}; the two ranks follow different "
            "schedules: do they run the same experiment file?"
        )
    return frame


def await_peer(
    wait: Callable[[float], bool], end: EndSettings, timeout_s: float, failing: str
) -> None:
    """Call wait(seconds) until it returns True.

    failing: text for the error message that says what the peer did not do.

    Raises LinkTimeout for a peer that was silent for timeout_s.
    """
    if not end.peer.wait(wait, timeout_s):
        raise LinkTimeout(
            f"{end.peer_name} {failing} and sent no heartbeat for {timeout_s:.0f} s. Is that rank "
            "stopped, or its link down?"
        )
