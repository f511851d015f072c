"""Links between clouds of two owners: today's frames over TLS, kept until they are acknowledged
and sent again after a cut.

At each end a thread drives each connection (connection.py), and at the receiving end one more
opens and delivers the frames, so that a full inbox never silences a connection. Which rank dials
does not matter here (ways.py).
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress

from torch import Tensor

from xcloud.base.errors import FrameError, LinkClosed, LinkError
from xcloud.line.connection import (
    RESTING_EVERY_S,
    RESTING_SILENT_S,
    SILENT_S,
    SPEAK_EVERY_S,
    Connection,
    Connections,
    Stream,
)
from xcloud.line.hello import Hello
from xcloud.line.pieces import (
    ACKNOWLEDGEMENT,
    ASK,
    ASK_BEHIND,
    ASK_NUMBER,
    END,
    END_NUMBER,
    HEADER,
    MAX_OPEN_FRAMES,
    PIECE_BYTES,
    Assembly,
    Outbox,
)
from xcloud.line.pinned_tls import LineDown
from xcloud.line.ways import ONE_STREAM_BYTES
from xcloud.net.frame import Kind, seal_frame
from xcloud.net.link_end import (
    ByteQueue,
    InSettings,
    Outgoing,
    OutSettings,
    ReceivingEnd,
    SendingEnd,
)

LINGER_S = 30.0
"""Seconds for which the receiving end answers after the last message, in case the sender does not
know that it came."""
_ROOM = 1.5
"""Factor by which connections may carry more than was measured. Without it a line that has become
faster would not be noticed."""
_BULK_BYTES = 300_000
"""A link whose longest frame has fewer bytes has one connection: control, norms and words, which
never fill a line."""
_RECORD_BYTES = 1 << 14
"""The most bytes in a record of TLS, which one reading or writing takes."""
_JOINED_BYTES = 1 << 16
"""Bytes up to which small pieces are written together, about."""
_ACKNOWLEDGE_EVERY = 8
_MUCH_BYTES = 1 << 16
_LONGEST_NAP_S = 0.02
"""While more than _MUCH_BYTES of a piece are missing, its thread sleeps for a quarter of the time
that the rest will take. Without this it would wake for each TLS record on a slow line."""
_READY_BYTES = 1 << 22
"""How much may wait to be opened before no more is read."""


class StreamOutLink(SendingEnd):
    """Sends frames to a rank of another cloud."""

    def __init__(self, stream: Stream, settings: OutSettings) -> None:
        super().__init__(settings)
        self._on_lost = stream.on_lost
        self._state = stream.state
        self.over = threading.Event()  # nothing more is sent, for whatever reason
        # What the main thread has queued stands in `_queue` until a connection asks for a piece;
        # from then on the outbox keeps it until it is acknowledged. Both count against `queued`.
        self.outbox = Outbox(
            max_bytes=settings.window.max_queued_bytes,
            next_frame=self._next_frame,
            queued=settings.queued,
            sent_again=self._count_again,
        )
        # Numbers of connections: those that are made, and of these the ones that wait for work.
        # Each thread changes its own number; readers copy the set, as another thread may change it
        # then.
        self.connected: set[int] = set()
        self.idle: set[int] = set()
        self.close_taken = False
        self._is_abandoned = False
        self._stream = stream
        self.connections = Connections(
            end=self,
            stream=stream,
            peer=settings.peer,
            is_bulk=settings.capacity_bytes >= _BULK_BYTES,
        )
        self.connections.start()

    def close(self, timeout_s: float) -> None:
        with self._sending:
            self._send_closes(1)
        self._await_end(self.over.wait, timeout_s, failing="did not take the last messages")
        self.connections.join(SPEAK_EVERY_S)

    def abandon(self) -> None:
        """Tell the receiver that nothing more comes, although the link is not closed."""
        self._is_abandoned = True
        self.connections.wake()

    def _put(self, item: Outgoing) -> None:
        super()._put(item)
        self._wake_one()

    def fail(self, reason: LinkError) -> None:
        self.failure = reason
        self.over.set()
        self._on_lost(reason)

    def _wake_one(self) -> None:
        """Wake the first connection that has nothing to do: small messages all go over one."""
        number = min(tuple(self.idle), default=None)
        if number is not None and self.is_needed(number):
            self.connections.wake(number)

    def _next_frame(self) -> Tensor | None:
        """Return the next frame, ready to be sent. Only one thread calls it at a time."""
        if not self._queue.items:
            return None
        # Sealed (checksum, time) as late as this, where it leaves the queue: the main thread
        # computes meanwhile. A time below 0 says when it was sent; one above 0 belongs to an
        # emulated line.
        item: Outgoing = self._queue.get()
        key, sequence, frame, queued_at_s = item
        seal_frame(frame, deliver_at_s=-time.monotonic())
        self.record.sending(
            key, sequence=sequence, num_bytes=frame.numel(), queued_at_s=queued_at_s, slot=None
        )
        self.settings.note_progress(key.kind)
        # The last frame of a link. The connections end once it is acknowledged.
        self.close_taken = key.kind is Kind.CLOSE
        return frame

    def _count_again(self, num_bytes: int) -> None:
        self._state.sent_again(num_bytes)
        self.record.sent_again_bytes += num_bytes  # under the lock of the outbox

    def hello(self) -> Hello:
        return self._stream.hello()

    def begin(self, number: int, of: int, expected: int) -> None:
        self.outbox.begin(number, of=of, expected=expected)
        self.connected.add(number)

    def cut(self, number: int, sent_bytes: int | None) -> None:
        self.connected.discard(number)
        self.idle.discard(number)
        # What was not acknowledged on it goes out over the others, which are woken for that.
        self.outbox.cut(number, sent_bytes=sent_bytes)
        self.connections.wake()

    def carry(self, connection: Connection, number: int) -> None:
        # Runs in the thread of one connection. Reading comes first: an acknowledgement makes room,
        # and a peer whose acknowledgements nobody reads stops reading our pieces in the end.
        acknowledgement = memoryview(bytearray(ACKNOWLEDGEMENT.size))
        num_read = 0
        while True:
            while num_bytes := connection.read_into(acknowledgement[num_read:]):
                num_read += num_bytes
                if num_read == ACKNOWLEDGEMENT.size:
                    num_read = 0
                    self.acknowledged(
                        number, num_pieces=ACKNOWLEDGEMENT.unpack(acknowledgement)[0]
                    )
            if connection.unsent or (
                not self._is_abandoned and self._queue_pieces(connection, number=number)
            ):
                if not connection.write():
                    # The socket takes no more, so the peer owes an acknowledgement.
                    connection.wait(SPEAK_EVERY_S, connection.unanswered_s(is_owed=True))
                continue
            # A rank that ends early sends what was begun, so that END stands between two pieces,
            # and nothing more.
            if self._is_abandoned or (self.close_taken and self.outbox.is_empty):
                return self._end(connection)
            # An idle stream speaks over its first connection, for all. When each of ten spoke
            # every 0.5 s, it took 395 bytes/s; one that says something every 10 s takes 44.
            is_first = number == min(tuple(self.connected), default=number)
            speaks_every_s = SPEAK_EVERY_S if is_first else RESTING_EVERY_S
            if time.monotonic() - connection.spoke_at_s > speaks_every_s:
                self.outbox.ask(number)
                # Without pieces nothing is ever acknowledged, so a question measures the round
                # trip and shows that the line is up. ASK_BEHIND says that other connections have
                # pieces under way: an answer to it alone does not prove that data pass.
                connection.queue(ASK if self._is_done else ASK_BEHIND)
                continue
            self.idle.add(number)
            # In the set before it looks once more: who queues a frame behind this look finds the
            # number there and wakes this thread, so that no frame lies unsent for half a second.
            if not self._queue_pieces(connection, number=number):
                is_owed = self.outbox.awaits(number)
                connection.wait(SPEAK_EVERY_S, connection.unanswered_s(is_owed))
            self.idle.discard(number)

    @property
    def _is_done(self) -> bool:
        """Return whether all that was sent has arrived."""
        return not self._queue.items and self.outbox.is_empty

    def acknowledged(self, number: int, num_pieces: int) -> None:
        found = self.outbox.acknowledge(number, num_pieces)
        if found.is_moving:
            self.settings.note_moving()
        # A line carries once data were acknowledged. An answer counts only while there is nothing
        # to send: questions are short enough to pass where a whole packet does not.
        if found.num_bytes or (found.num_answers and self._is_done):
            self.connections.course.carries(number)
        self.settings.peer.mark_alive()
        if not self.is_needed(number):
            self._wake_one()  # there may be room now, which this connection does not use
        state = self._state
        state.round_trip_s = self.outbox.round_trip_s or state.round_trip_s
        state.bytes_per_s = self.outbox.bytes_per_s or state.bytes_per_s

    def _end(self, connection: Connection) -> None:
        """Send that the stream has ended, and wait a moment until the receiver has got it: closed
        at once the connection may be reset, and the receiver not know."""
        connection.queue(END)
        self.connections.course.linger_until_s = time.monotonic()
        self.over.set()
        place = memoryview(bytearray(ACKNOWLEDGEMENT.size))
        until_s = time.monotonic() + SPEAK_EVERY_S
        with suppress(LineDown, OSError):
            while time.monotonic() < until_s:
                connection.write()
                if not connection.read_into(place):
                    connection.wait(SPEAK_EVERY_S, silent_s=0.0)

    def is_needed(self, number: int) -> bool:
        """Return whether a connection is among the first that together fill the line. A further
        one would begin slowly, after a time without work, and hold up its piece."""
        num_before = sum(other < number for other in tuple(self.connected))
        bytes_per_s = self.outbox.bytes_per_s
        round_trip_s = self._state.round_trip_s
        if bytes_per_s is None or round_trip_s is None:
            return True
        # Bandwidth times round trip is what must be under way to fill the line. On one of 100
        # Mbit/s with five connections for 100 ms, pieces on the other four cost 4 to 9 % of a
        # step, as each began in TCP's slow start.
        return num_before <= _ROOM * bytes_per_s * round_trip_s / ONE_STREAM_BYTES

    def _queue_pieces(self, connection: Connection, number: int) -> bool:
        """Queue what is next for a connection: one large piece, or some small ones in one write.
        Return whether there was any."""
        if not self.is_needed(number):
            return False
        # Many small frames (norms, control messages) share a write, hence a packet and a record of
        # TLS. Frames of 3 kB took a tenth less processor time so.
        joined = bytearray()
        while len(joined) < _JOINED_BYTES and (taken := self.outbox.take(number)) is not None:
            piece, data, frame_bytes = taken
            joined += HEADER.pack(piece.frame, frame_bytes, piece.number)
            if len(data) > _JOINED_BYTES:
                # The header goes with the first bytes of the piece, up to the end of a record; the
                # rest of the piece is a view of the frame, which is never copied.
                room = -len(joined) % _RECORD_BYTES
                connection.queue(bytes(joined + data[:room]))
                connection.queue(data[room:])
                self._wake_one()
                return True
            joined += data
        if joined:
            connection.queue(bytes(joined))
        return bool(joined)


class StreamInLink(ReceivingEnd):
    """Receives frames from a rank of another cloud."""

    def __init__(self, stream: Stream, settings: InSettings) -> None:
        super().__init__(settings)
        self._on_lost = stream.on_lost
        window_bytes = settings.window.max_queued_bytes
        self.ready: ByteQueue[Tensor | LinkError] = ByteQueue(
            max_bytes=window_bytes, total=settings.queued
        )
        self._awaits_room = False  # a connection, in _ready
        self._assembly = Assembly(
            capacity_bytes=settings.capacity_bytes,
            # An honest sender begins a frame while less than the window is under way, not counting
            # what is acknowledged of its oldest one: that frame and the newest come on top.
            max_bytes=window_bytes + 2 * settings.capacity_bytes,
            # It never blocks here: a full inbox stops the connections from reading (_is_full).
            deliver=lambda frame: self.ready.put(frame, frame.numel(), max_bytes=sys.maxsize),
        )
        self._stream = stream
        self.connections = Connections(
            end=self,
            stream=stream,
            peer=settings.peer,
            is_bulk=settings.capacity_bytes >= _BULK_BYTES,
        )
        self.connections.start()
        threading.Thread(target=self._open_all, name=f"from-{self.peer_name}", daemon=True).start()

    def hello(self) -> Hello:
        return self._stream.hello(self._assembly.expected)

    def cut(self, number: int, sent_bytes: int | None) -> None:
        """Keep what has come over it: a connection that is made again tells the sender."""

    def begin(self, number: int, of: int, expected: int) -> None:
        if expected:
            raise FrameError(f"{self.peer_name} sends, and expects frame {expected}")

    def fail(self, reason: LinkError) -> None:
        self.ready.put(reason, num_bytes=0)

    def _open_all(self) -> None:
        """Open and deliver frames until the sender closes the link."""
        try:
            while True:
                found = self.ready.get()
                # Looked at after the frame was taken. Looking before it missed the wake-up in
                # which the frame came between the two, and the reader slept for a quarter of a
                # second.
                if self._awaits_room and self._has_room:
                    self._awaits_room = False
                    self.connections.wake()
                if isinstance(found, LinkError):
                    raise found
                frame = self._open(found)
                if frame.key.kind is Kind.CLOSE:
                    # The last acknowledgement may be lost, so the connections answer for a while
                    # longer.
                    self.connections.course.linger_until_s = time.monotonic() + LINGER_S
                    return self._leave()
                self._deliver(frame)
                del found, frame  # not held until the next message
        except LinkError as error:
            self._lose(error)
        except Exception as error:  # a thread that dies in silence leaves its reader waiting
            self._lose(LinkClosed(f"the link from {self.peer_name} broke: {error!r}"))

    def _lose(self, reason: LinkError) -> None:
        self.connections.stop()
        self._end(reason)
        self._on_lost(reason)

    def _is_full(self) -> bool:
        """Return whether a connection must wait for room, of which it will be woken."""
        if self._has_room:
            return False
        self._awaits_room = True
        return not self._has_room  # there may have been room before that line

    @property
    def _has_room(self) -> bool:
        ready = self.ready
        return ready.num_bytes < _READY_BYTES and len(ready.items) < MAX_OPEN_FRAMES

    def carry(self, connection: Connection, number: int) -> None:
        receiving = _Receiving(connection, connections=self.connections)
        header = memoryview(bytearray(HEADER.size))
        while True:
            while self._is_full():
                receiving.acknowledge()
                connection.wait(SPEAK_EVERY_S, silent_s=0.0, reading=False)
            receiving.read_header(header)
            frame, frame_bytes, number_in_frame = HEADER.unpack(header)
            if frame_bytes:
                # Read straight into the frame's buffer. The header is checked by `place` before a
                # byte of memory is taken: a peer with a valid key may still send any number.
                place = self._assembly.place(
                    frame, frame_bytes=frame_bytes, number=number_in_frame
                )
                receiving.read(place)
                self._assembly.arrived(frame, number=number_in_frame)
                self.connections.course.carries(number)
                # A frame of several pieces: who waits for it gets more time, since it moves.
                if frame_bytes > PIECE_BYTES:
                    self.settings.note_moving()
            elif number_in_frame == ASK_NUMBER:
                self.connections.course.carries(number)
            elif number_in_frame == END_NUMBER:
                gone = LinkClosed(f"{self.peer_name} has ended without closing its link")
                return self.fail(gone)  # nobody looks where it has closed it
            receiving.num_pieces += 1


class _Receiving:
    """The bytes that came over one connection, and how many of them were acknowledged."""

    def __init__(self, connection: Connection, connections: Connections) -> None:
        self._connection = connection
        self._connections = connections
        self._buffer = memoryview(bytearray(_RECORD_BYTES))
        self._buffered = self._buffer[:0]
        self.num_pieces = 0
        self._num_told = 0

    def read_header(self, place: memoryview) -> None:
        """Fill a place with the header of the next piece, which may be long in coming."""
        while not (at := self._take(place)):
            if self._connection.unsent or self.num_pieces > self._num_told:
                self.acknowledge()
            limit_s = None
            if self._connections.silent_s < 2 * SILENT_S:
                # A connection that rests hears something every 10 s.
                limit_s = RESTING_SILENT_S  # others of the stream say that the peer is there
            self._connection.wait(SPEAK_EVERY_S, self._connection.silent_s, limit_s=limit_s)
        if at < len(place):
            self.read(place[at:])

    def read(self, place: memoryview) -> None:
        """Fill a buffer with the next bytes. Meanwhile acknowledge to the sender what has come."""
        # Called for the bytes of a piece, which the sender has begun, so they are due at once.
        at = 0
        started_s = time.monotonic()
        while at < len(place):
            if num_bytes := self._take(place[at:]):
                at += num_bytes
                if self.num_pieces - self._num_told >= _ACKNOWLEDGE_EVERY:
                    self.acknowledge()
                continue
            self.acknowledge()
            missing = len(place) - at
            if at and missing > _MUCH_BYTES:
                # The rest will take about as long for each byte as what has come. Sleeping a
                # quarter of it took a fifth of the processor time off a line of 100 Mbit/s (14.0
                # to 11.3 s per GB).
                due_s = (time.monotonic() - started_s) / at * missing
                time.sleep(min(due_s / 4, _LONGEST_NAP_S))
            self._connection.wait(SPEAK_EVERY_S, self._connection.silent_s)

    def _take(self, place: memoryview) -> int:
        """Put what is there into a place, and return how many bytes that was. Small pieces are
        read together: each reading of the connection lets other threads go first."""
        if not self._buffered:
            if len(place) >= _RECORD_BYTES:
                return self._connection.read_into(place)
            self._buffered = self._buffer[: self._connection.read_into(self._buffer)]
        num_bytes = min(len(place), len(self._buffered))
        place[:num_bytes] = self._buffered[:num_bytes]
        self._buffered = self._buffered[num_bytes:]
        return num_bytes

    def acknowledge(self) -> None:
        """Tell the sender how many pieces have come, if it does not know or has heard nothing for
        long."""
        connection = self._connection
        is_due = time.monotonic() - connection.spoke_at_s > SPEAK_EVERY_S
        if not connection.unsent and (is_due or self.num_pieces > self._num_told):
            # One at a time: the count holds for all pieces before it, so that a queue of several
            # acknowledgements would say nothing more.
            connection.queue(ACKNOWLEDGEMENT.pack(self.num_pieces))
            self._num_told = self.num_pieces
        connection.write()
