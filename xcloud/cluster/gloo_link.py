"""Links over torch.distributed point-to-point calls, with a thread at each end.

Measured facts this file relies on (gloo, torch 2.13): a message is sent only once the peer has
posted its receive, so receives are posted ahead (`window.py`); a receive may be longer than the
message, so one buffer size fits all; a group per direction keeps the link full duplex. Buffer
pages use memory only once a message has filled them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from xcloud.cluster.byte_queue import ByteQueue
from xcloud.cluster.emulated_link import LinkClock, PostedReceives, Reservation
from xcloud.cluster.frame import Frame, Kind, MessageKey, decode_frame, encode_frame, seal_frame
from xcloud.cluster.link import LinkStats, Parts, expect
from xcloud.cluster.liveness import PeerLife
from xcloud.cluster.message_log import LinkLog
from xcloud.cluster.window import LinkWindow
from xcloud.cluster.wire_record import LinkRecord
from xcloud.errors import FrameError, LinkClosed, LinkError, LinkTimeout

_TAGS = 1 << 30
_NARROW = LinkWindow()


class _Outgoing(NamedTuple):
    key: MessageKey
    sequence: int
    frame: Tensor
    queued_at_s: float


class GlooOutLink:
    """Sends frames to one peer from a background thread.

    capacity_bytes: the peer's buffer size; a longer frame is refused.
    clock: the emulated link; None for a real one.
    window: receives that the peer posts, and bytes that may be queued here before `send` blocks.
    log: records when each message was sent; None records nothing.
    record: records what was sent; None if the peer is in the same cloud.
    life: the peer's signs of life, shared with the other links to and from it.
    overdue_s: how long a full queue may stall while the peer is silent.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        peer_name: str,
        capacity_bytes: int,
        clock: LinkClock | None = None,
        window: LinkWindow = _NARROW,
        log: LinkLog | None = None,
        record: LinkRecord | None = None,
        life: PeerLife | None = None,
        overdue_s: float = 300.0,
    ) -> None:
        self.peer_name = peer_name
        self.stats = LinkStats()
        self._life, self._overdue_s = life or PeerLife(), overdue_s
        self._sending = threading.Lock()  # signs of life come from another thread
        self._is_closing = False
        self._record = record
        self._group, self._peer, self._clock, self._log = group, peer, clock, log
        self._capacity_bytes = capacity_bytes
        self._sequence = 0
        self._failure: LinkError | None = None
        self._window = window
        latency_s = clock.profile.latency_s if clock is not None else 0.0
        self._posted = PostedReceives(window.num_posted, latency_s)
        self._queue: ByteQueue[_Outgoing | None] = ByteQueue(window.max_queued_bytes)
        self._thread = threading.Thread(target=self._run, name=f"to-{peer_name}", daemon=True)
        self._thread.start()

    def send(self, key: MessageKey, parts: Parts, carries: Sequence[str] = ()) -> None:
        with self._sending:
            self._send(key, parts, carries)

    def say_alive(self, parts: Parts = (), carries: Sequence[str] = ()) -> None:
        if not self._sending.acquire(blocking=False):
            return
        try:
            # A queued message is a sign of life itself once it arrives.
            if not self._is_closing and self._queue.is_empty:
                self._send(MessageKey(Kind.ALIVE), parts, carries)
        finally:
            self._sending.release()

    def _send(self, key: MessageKey, parts: Parts, carries: Sequence[str]) -> None:
        frame = encode_frame(key, parts, self._sequence)
        if frame.numel() > self._capacity_bytes:
            raise FrameError(
                f"{key} for {self.peer_name} takes {frame.numel():,} bytes, but its receiver "
                f"expects at most {self._capacity_bytes:,}"
            )
        queued_at_s = time.monotonic()
        if key.kind is not Kind.GOODBYE:
            self.stats.count(key.kind, frame.numel())
        if self._record is not None:
            self._record.note(key.kind, parts, carries, frame.numel())
        self._put(_Outgoing(key, self._sequence, frame, queued_at_s))
        self._sequence += 1

    def close(self, timeout_s: float) -> None:
        with self._sending:
            self._is_closing = True
            for _ in range(self._window.num_posted):
                self._send(MessageKey(Kind.GOODBYE), (), ())
            self._put(None)
        if not _join(self._thread, self._life, timeout_s):
            raise LinkTimeout(
                f"{self.peer_name} did not take the last messages and gave no sign of life for "
                f"{timeout_s:.0f} s. Is that rank stopped, or its link down?"
            )
        if self._failure is not None:
            raise self._failure

    def _put(self, item: _Outgoing | None) -> None:
        started_s = time.monotonic()
        num_bytes = 0 if item is None else item.frame.numel()
        while True:
            if self._failure is not None:
                raise self._failure
            try:
                return self._queue.put(item, num_bytes, timeout_s=1.0)
            except queue.Full:
                if time.monotonic() > self._life.deadline_s(started_s, self._overdue_s):
                    raise LinkTimeout(
                        f"{self.peer_name} has taken none of the waiting messages for "
                        f"{time.monotonic() - started_s:.0f} s and gives no sign of life. Is that "
                        "rank stopped, or its link down?"
                    ) from None

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                key, sequence, frame, queued_at_s = item
                slot = self._take_line(item)
                seal_frame(frame, slot.deliver_at_s if slot is not None else 0.0)
                if self._log is not None:
                    now_s = time.monotonic()
                    self._log.sending(key, sequence, frame.numel(), queued_at_s, now_s, slot)
                work = dist.isend(frame, self._peer, self._group, tag=sequence % _TAGS)
                assert work is not None
                work.wait()
                self._life.note(slot.deliver_at_s if slot is not None else None)  # it took it
        except RuntimeError as error:
            self._failure = LinkClosed(f"{self.peer_name} is gone: {_first_line(error)}")

    def _take_line(self, item: _Outgoing) -> Reservation | None:
        """Reserve the emulated line for the message; None without one. First waits until its
        receive is known to be posted, while others may use the line."""
        if self._clock is None:
            return None
        ready_at_s = max(item.queued_at_s, self._posted.known_at_s)
        if (wait_s := ready_at_s - time.monotonic()) > 0:
            time.sleep(wait_s)
        slot = self._clock.reserve(item.frame.numel(), ready_at_s)
        self._posted.used(slot.deliver_at_s)
        if item.key.kind is not Kind.GOODBYE:
            self.stats.count_line(item.key.kind, slot.sent_s - slot.start_s)
        return slot


class GlooInLink:
    """Receives frames from one peer in a background thread, each at its time of delivery.

    handlers: by kind, functions called in the background thread instead of queueing for `recv`.
        An exception in one ends the link. Signs of life without a handler are dropped.
    window: receives to post, and bytes that may be queued for `recv` before reading stops.
    log: records when each message was delivered; None records nothing.
    on_end: called once, in the background thread, with the reason why nothing more will arrive.
    life: the peer's signs of life, shared with the other links to and from it.
    advice: appended to a LinkTimeout's message: the setting that lets this rank wait longer.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        peer_name: str,
        capacity_bytes: int,
        handlers: Mapping[Kind, Callable[[Frame], None]] | None = None,
        window: LinkWindow = _NARROW,
        log: LinkLog | None = None,
        on_end: Callable[[LinkError], None] | None = None,
        life: PeerLife | None = None,
        advice: str = "",
    ) -> None:
        self.peer_name = peer_name
        self._life, self._advice = life or PeerLife(), advice
        self._group, self._peer, self._log = group, peer, log
        self._capacity_bytes = capacity_bytes
        self._handlers = {Kind.ALIVE: lambda frame: None, **(handlers or {})}
        self._on_end = on_end
        self.said_goodbye = False  # the peer; else the end of the link is a failure
        self._num_posted = window.num_posted
        self._inbox: ByteQueue[Frame | LinkError] = ByteQueue(window.max_queued_bytes)
        self._thread = threading.Thread(target=self._run, name=f"from-{peer_name}", daemon=True)
        self._thread.start()

    def recv(self, key: MessageKey, overdue_s: float) -> Parts:
        started_s = time.monotonic()
        deadline_s = started_s + overdue_s
        while True:
            try:
                found = self._inbox.get(max(0.0, deadline_s - time.monotonic()))
                break
            except queue.Empty:
                waited_s = time.monotonic() - started_s
                if key.kind is Kind.EVALUATION:
                    deadline_s = self._life.deadline_s(started_s, overdue_s)
                    if time.monotonic() < deadline_s:
                        continue
                raise LinkTimeout(
                    f"no {key} from {self.peer_name} after {waited_s:.1f} s. Is that rank alive?"
                    f" {self._advice}".rstrip()
                ) from None
        if isinstance(found, LinkError):
            self._inbox.put(found, 0)  # for the next call too
            raise found
        return expect(found, key, self.peer_name).parts

    def close(self, timeout_s: float) -> None:
        """Wait for the peer's goodbye for as long as it gives signs of life."""
        if not _join(self._thread, self._life, timeout_s):
            raise LinkTimeout(
                f"{self.peer_name} did not say goodbye and gave no sign of life for "
                f"{timeout_s:.0f} s. Is that rank stopped, or its line down?"
            )

    def _run(self) -> None:
        posted: deque[tuple[Tensor, dist.Work]] = deque()
        next_to_post, expected = 0, 0
        spare: list[Tensor] = []
        try:
            while True:
                while len(posted) < self._num_posted:
                    buffer = spare.pop() if spare else self._new_buffer()
                    work = dist.irecv(buffer, self._peer, self._group, tag=next_to_post % _TAGS)
                    assert work is not None
                    posted.append((buffer, work))
                    next_to_post += 1
                buffer, work = posted.popleft()
                work.wait()
                frame = decode_frame(buffer, self.peer_name)
                self._life.note(max(time.monotonic(), frame.deliver_at_s))
                spare.append(buffer)
                if frame.sequence != expected:
                    raise FrameError(
                        f"message {frame.sequence} from {self.peer_name} is number {expected} here"
                    )
                expected += 1
                if frame.key.kind is Kind.GOODBYE:
                    for _, rest in posted:  # the peer sends one goodbye per posted receive
                        rest.wait()
                    self.said_goodbye = True
                    self._end(LinkClosed(f"{self.peer_name} has ended its part of the run"))
                    return
                if (wait_s := frame.deliver_at_s - time.monotonic()) > 0:
                    time.sleep(wait_s)
                if self._log is not None:
                    self._log.received(frame, time.monotonic())
                self._deliver(frame)
        except LinkError as error:
            self._end(error)
        except RuntimeError as error:
            self._end(LinkClosed(f"{self.peer_name} is gone: {_first_line(error)}"))
        except Exception as error:  # a thread that dies silently would leave its reader waiting
            self._end(LinkClosed(f"the link from {self.peer_name} broke: {error!r}"))

    def _deliver(self, frame: Frame) -> None:
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

    def _end(self, reason: LinkError) -> None:
        self._inbox.put(reason, 0)
        if self._on_end is not None:
            self._on_end(reason)

    def _new_buffer(self) -> Tensor:
        return torch.empty(self._capacity_bytes, dtype=torch.uint8)


def _join(thread: threading.Thread, life: PeerLife, timeout_s: float) -> bool:
    """Join a link's thread; False if the peer was silent for timeout_s meanwhile."""
    started_s = time.monotonic()
    while thread.is_alive():
        left_s = life.deadline_s(started_s, timeout_s) - time.monotonic()
        if left_s <= 0:
            return False
        thread.join(left_s)
    return True


def _first_line(error: BaseException) -> str:
    """Gloo's first line names source line and peer; the rest is advice and a C++ trace."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line.partition(". This is typically caused")[0].strip()
