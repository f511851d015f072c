"""What both ends of a link do whatever carries the frames: check, number, count, record, log, hand
to whoever waits. What carries them is a subclass's: gloo (gloo_link.py) or memory.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, Full
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from xcloud.base.errors import FrameError, LinkClosed, LinkError, LinkTimeout
from xcloud.cluster.frame import Frame, Kind, MessageKey, decode_frame, encode_frame
from xcloud.cluster.link import LineMeter, LinkClock, LinkLog, LinkRecord, LinkStats, Parts, expect
from xcloud.cluster.link_profile import LinkWindow
from xcloud.cluster.liveness import PeerLife

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


@dataclass(frozen=True)
class OutSettings:
    """Of a sending end.

    capacity_bytes: the peer's buffer size; a longer frame is refused.
    clock: the emulated link; None leaves the network alone.
    window: receives that the peer posts, and bytes that may wait here before `send` blocks.
    log: where to note when each message was sent; None notes nothing.
    record: where to note what was sent; None where the peer is in the same cloud.
    life: the peer's heartbeats, shared with the other links to and from it.
    overdue_s: how long a full queue may stand still if the peer says nothing at all.
    """

    peer_name: str
    capacity_bytes: int
    clock: LinkClock | None = None
    window: LinkWindow = field(default_factory=LinkWindow)
    log: LinkLog | None = None
    record: LinkRecord | None = None
    life: PeerLife = field(default_factory=PeerLife)
    overdue_s: float = 300.0


@dataclass(frozen=True)
class InSettings:
    """Of a receiving end.

    handlers: kinds that are handed to a function (in another thread than the reader's) instead of
        `recv`. Whatever one raises is the link's end. Heartbeats that have none are dropped.
    window: receives to post, and bytes that may wait for `recv` before no more are taken.
    log: where to note when each message was delivered; None notes nothing.
    on_end: called once, in such a thread, when nothing more can come, with the reason.
    life: the peer's heartbeats, shared with the other links to and from it.
    advice: ends the message of a LinkTimeout: which setting lets this rank wait longer.
    meter: of a real line, shared by the links from the same peer; None measures nothing.
    is_emulated: the sender's clock says when a message arrives; on a real line nobody does.
    """

    peer_name: str
    capacity_bytes: int
    handlers: Mapping[Kind, Callable[[Frame], None]] = field(default_factory=dict)
    window: LinkWindow = field(default_factory=LinkWindow)
    log: LinkLog | None = None
    on_end: Callable[[LinkError], None] | None = None
    life: PeerLife = field(default_factory=PeerLife)
    advice: str = ""
    meter: LineMeter | None = None
    is_emulated: bool = False


class Outgoing(NamedTuple):
    key: MessageKey
    sequence: int
    frame: Tensor
    queued_at_s: float


class SendingEnd:
    """The sending end. A subclass carries the frames: `_put` and `close`.

    `send` returns before delivery; it raises LinkClosed if the peer is gone.
    """

    def __init__(self, settings: OutSettings) -> None:
        self.peer_name, self.stats = settings.peer_name, LinkStats()
        self._settings = settings
        self._sending = threading.Lock()  # heartbeats come from a thread of their own
        self._is_closing = False
        self._sequence = 0

    def send(self, key: MessageKey, parts: Parts, carries: Sequence[str] = ()) -> None:
        """carries: what each part is, in words, for the record of what left the cloud."""
        with self._sending:
            self._send(key, parts, carries)

    def say_alive(self, parts: Parts = (), carries: Sequence[str] = ()) -> None:
        """Send a heartbeat if nothing else is waiting to be sent. Never blocks."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            # What waits here is a heartbeat itself as soon as it arrives.
            if not self._is_closing and self._is_idle:
                self._send(MessageKey(Kind.ALIVE), parts, carries)
        finally:
            self._sending.release()

    def close(self, timeout_s: float) -> None:
        """Deliver what is under way and say goodbye. Raises LinkTimeout when nothing was taken,
        and the peer was silent, for timeout_s."""
        raise NotImplementedError

    @property
    def _is_idle(self) -> bool:
        """Nothing waits here to be sent."""
        return True

    def _put(self, item: Outgoing) -> None:
        """Have it carried, in the order of the calls."""
        raise NotImplementedError

    def _send(self, key: MessageKey, parts: Parts, carries: Sequence[str]) -> None:
        settings = self._settings
        frame = encode_frame(key, parts, self._sequence)
        if frame.numel() > settings.capacity_bytes:
            raise FrameError(
                f"{key} for {self.peer_name} takes {frame.numel():,} bytes, but its receiver was "
                f"promised at most {settings.capacity_bytes:,}"
            )
        queued_at_s = time.monotonic()
        if key.kind is not Kind.GOODBYE:
            self.stats.count(key.kind, frame.numel())
        if settings.record is not None:
            settings.record.note(key.kind, parts, carries, frame.numel())
        self._put(Outgoing(key, self._sequence, frame, queued_at_s))
        self._sequence += 1

    def _say_goodbye(self) -> None:
        """The last messages: one for each receive that the peer has posted."""
        self._is_closing = True
        for _ in range(self._settings.window.num_posted):
            self._send(MessageKey(Kind.GOODBYE), (), ())


class ReceivingEnd:
    """The receiving end. A subclass gets the frames: it calls `_open` on each, then `_deliver` or
    `_end`."""

    def __init__(self, settings: InSettings) -> None:
        self.peer_name = settings.peer_name
        self.stats = LinkStats()  # line_s, where the line has a meter
        self.said_goodbye = False  # the peer; else the end of the link is a failure
        self._settings = settings
        self._handlers = {Kind.ALIVE: lambda frame: None, **settings.handlers}
        self._inbox: ByteQueue[Frame | LinkError] = ByteQueue(settings.window.max_queued_bytes)
        self._over = threading.Event()
        self._expected = 0

    def recv(self, key: MessageKey, overdue_s: float) -> Parts:
        """The next message, which must be `key`.

        Raises LinkTimeout after overdue_s seconds (in an evaluation: not while the peer gives
        heartbeats), LinkClosed if the peer is gone, FrameError if something else came.
        """
        with self._settings.life.awaiting(key):
            return self._recv(key, overdue_s)

    def _recv(self, key: MessageKey, overdue_s: float) -> Parts:
        life, started_s = self._settings.life, time.monotonic()
        in_step = key.kind is not Kind.EVALUATION
        until = life.step_deadline_s if in_step else life.deadline_s
        deadline_s = started_s + min(overdue_s, life.policy.lost_after_s)
        while True:
            try:
                found = self._inbox.get(max(0.0, deadline_s - time.monotonic()))
                break
            except queue.Empty:
                deadline_s = until(started_s, overdue_s)
                if time.monotonic() < deadline_s:
                    continue
                waited_s = time.monotonic() - started_s
                seen = f" Its last heartbeat came {life.silent_s:.0f} s ago." * life.beats
                raise LinkTimeout(
                    f"no {key} from {self.peer_name} after {waited_s:.1f} s.{seen} Is that rank "
                    f"alive? {self._settings.advice}".rstrip()
                ) from None
        if isinstance(found, LinkError):
            self._inbox.put(found, 0)  # whoever asks next shall hear it too
            raise found
        return expect(found, key, self.peer_name).parts

    def close(self, timeout_s: float) -> None:
        """Wait for the peer's goodbye, as long as it sends heartbeats."""
        if not wait_for_peer(self._over.wait, self._settings.life, timeout_s):
            raise LinkTimeout(
                f"{self.peer_name} did not say goodbye and sent no heartbeat for "
                f"{timeout_s:.0f} s. Is that rank stopped, or its link down?"
            )

    def _open(self, buffer: Tensor) -> Frame:
        """The next frame, checked. Raises FrameError."""
        now_s = time.monotonic()
        frame = decode_frame(buffer, self.peer_name)
        if not self._settings.is_emulated:  # or the peer says how long this rank waits
            frame = frame._replace(deliver_at_s=min(frame.deliver_at_s, 0.0))
        self._measure(frame, now_s)
        self._settings.life.note(max(time.monotonic(), frame.deliver_at_s))
        if frame.sequence != self._expected:
            raise FrameError(
                f"message {frame.sequence} from {self.peer_name} came as number {self._expected}"
            )
        self._expected += 1
        return frame

    def _measure(self, frame: Frame, now_s: float) -> None:
        meter, sent_at_s = self._settings.meter, frame.sent_at_s
        if meter is None or sent_at_s is None:
            return
        if frame.key.kind is Kind.ALIVE:
            meter.probe(sent_at_s, now_s)
        else:
            self.stats.count_line(frame.key.kind, meter.busy_s(sent_at_s, now_s))

    def _deliver(self, frame: Frame) -> None:
        if self._settings.log is not None:
            self._settings.log.received(frame, time.monotonic())
        handler = self._handlers.get(frame.key.kind, self._keep)
        try:
            handler(frame)
        except LinkError:
            raise
        except Exception as error:
            raise FrameError(
                f"{frame.key} from {self.peer_name} cannot be handled: {error!r}"
            ) from error

    def _keep(self, frame: Frame) -> None:
        self._inbox.put(frame, frame.num_bytes)

    def _leave(self) -> None:
        self.said_goodbye = True
        self._end(LinkClosed(f"{self.peer_name} has ended its part of the run"))

    def _end(self, reason: LinkError) -> None:
        self._inbox.put(reason, 0)
        if self._settings.on_end is not None:
            self._settings.on_end(reason)
        self._over.set()


def wait_for_peer(wait: Callable[[float], bool], life: PeerLife, timeout_s: float) -> bool:
    """Until wait(seconds) returns True, or the peer was silent for timeout_s: then False."""
    started_s = time.monotonic()
    while (left_s := life.deadline_s(started_s, timeout_s) - time.monotonic()) > 0:
        if wait(left_s):
            return True
    return wait(0.0)
