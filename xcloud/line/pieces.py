"""Frames in pieces: what one end keeps until it is acknowledged, and what the other puts together.

A stream carries frames, numbered from 0, over one or more connections. On each connection the
sender writes pieces, little-endian:
  frame u32 | bytes of the frame u64 | number of the piece in its frame u32 | the piece
Pieces are PIECE_BYTES long, but for the last of a frame. A piece of a frame of 0 bytes asks for an
answer (number 0, or 2 while frames are under way), or says that the stream has ended (number 1).
The receiver writes how many pieces have come over this connection, u64, at least every second
while something comes or waits.
"""

from __future__ import annotations

import heapq
import struct
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple, cast

from torch import Tensor

from xcloud.base.errors import FrameError
from xcloud.net.frame import HEAD_BYTES, message_buffer
from xcloud.net.link_end import QueuedBytes, ignore

PIECE_BYTES = 1 << 18
HEADER = struct.Struct("<IQI")
ACKNOWLEDGEMENT = struct.Struct("<Q")
ASK_NUMBER = 0
END_NUMBER = 1
ASK = HEADER.pack(0, 0, ASK_NUMBER)
END = HEADER.pack(0, 0, END_NUMBER)
ASK_BEHIND = HEADER.pack(0, 0, 2)
"""Asks for an answer, over a connection beside others that should carry something."""
MAX_OPEN_FRAMES = 1024
"""The most frames from the first that is not acknowledged on. An honest sender begins no more."""
_MEASURE_S = 1.0
_SHORTEST_MEASURE_S = 0.2


def _bytes_of_piece(number: int, frame_bytes: int) -> int:
    """Return the length of a piece of a frame; below 1 where the frame has no such piece."""
    return min(PIECE_BYTES, frame_bytes - number * PIECE_BYTES)


class Piece(NamedTuple):
    """A part of a frame. A piece of 0 bytes is a question, asked at asked_at_s.

    crossed_bytes: bytes of it that were sent before, over a connection that was lost.
    """

    frame: int
    number: int
    num_bytes: int
    asked_at_s: float = 0.0
    crossed_bytes: int = 0


class Acknowledged(NamedTuple):
    """The pieces that an acknowledgement reports for the first time.

    num_bytes: total bytes of those pieces that belong to frames.
    num_answers: number of answers to questions.
    is_moving: True if one of them belongs to a frame of several pieces.
    """

    num_bytes: int
    num_answers: int
    is_moving: bool


class _Kept:
    """A frame that the receiver may not have."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.num_pieces = -(-len(data) // PIECE_BYTES)
        self.num_begun = 0  # pieces
        self.num_acknowledged = 0  # bytes


class Outbox:
    """The frames of one stream from when they are begun until the receiver has them. Thread-safe.

    max_bytes: no further frame is begun while so much of it is under way.
    next_frame: returns the next frame, sealed, or None while there is none.
    queued: counts the bytes kept.
    sent_again: is given the bytes of each piece that is sent once more.
    """

    def __init__(
        self,
        max_bytes: int,
        next_frame: Callable[[], Tensor | None],
        queued: QueuedBytes,
        sent_again: Callable[[int], object] = ignore,
    ) -> None:
        self._max_bytes = max_bytes
        self._next_frame = next_frame
        self.queued = queued
        self._sent_again = sent_again
        self._lock = threading.Lock()
        self._kept: dict[int, _Kept] = {}
        self._kept_bytes = 0
        self._first = 0  # the oldest frame kept
        self._next = 0  # the first that was not begun
        self._floor: dict[int, int] = {}  # by connection, the oldest when it was made
        self._returned: list[Piece] = []
        self._sent: dict[int, deque[Piece]] = defaultdict(deque)  # by connection
        self._num_acknowledged: dict[int, int] = defaultdict(int)  # pieces of this connection
        self._acknowledged_bytes: dict[int, int] = defaultdict(int)  # the same, with headers
        self._busy_since_s: float | None = None
        self._busy_bytes = 0
        self.round_trip_s: float | None = None
        self.bytes_per_s: float | None = None

    @property
    def is_empty(self) -> bool:
        """Return whether every frame that was begun has arrived."""
        with self._lock:
            return not self._kept

    def begin(self, number: int, of: int, expected: int) -> None:
        """Begin with a new connection, whose receiver expects this frame. Raises FrameError for
        one that it cannot expect."""
        with self._lock:
            # With others beside it, the oldest may have moved on after the receiver spoke.
            lowest = self._first if of == 1 else self._floor.get(number, 0)
            if not lowest <= expected <= self._next:
                raise FrameError(
                    f"the receiver expects frame {expected}, but {lowest} to {self._next} can come"
                )
            self._num_acknowledged[number] = 0
            self._acknowledged_bytes[number] = 0
            # Frames that the receiver has, though the acknowledgement was lost with the old
            # connection.
            for frame in range(self._first, expected):
                self._kept[frame].num_acknowledged = len(self._kept[frame].data)
            self._release()
            self._floor[number] = self._first

    def cut(self, number: int, sent_bytes: int | None = None) -> None:
        """Send over other connections what is not acknowledged on this one.

        sent_bytes: number of bytes that the system has sent over it; None if that is not known.
        """
        crossed_bytes = sys.maxsize
        with self._lock:
            if sent_bytes is not None:
                # What the system sent is headers and pieces in this order. Only what had left the
                # machine counts as sent again; the rest never crossed the line.
                crossed_bytes = sent_bytes - self._acknowledged_bytes[number]
            for piece in self._sent[number]:
                crossed_bytes -= HEADER.size
                crossed = min(piece.num_bytes, max(0, crossed_bytes))
                crossed_bytes -= piece.num_bytes
                if piece.num_bytes and piece.frame in self._kept:
                    heapq.heappush(self._returned, piece._replace(crossed_bytes=crossed))
            self._sent[number].clear()

    def take(self, number: int) -> tuple[Piece, memoryview, int] | None:
        """Return a piece to be sent over this connection now, its bytes, and the bytes of its
        frame; None if there is none, or enough is under way."""
        with self._lock:
            # What a lost connection had under way goes first, the oldest frame before all: the
            # receiver delivers in order, so everything behind it waits. A frame that was
            # acknowledged meanwhile (the receiver's next greeting said so) is dropped here.
            while self._returned:
                piece = heapq.heappop(self._returned)
                if piece.frame in self._kept:
                    self._sent_again(piece.crossed_bytes)
                    return self._sends(number, piece=piece)
            # Frames are cut in turn: a new one begins once all pieces of the last one are given
            # out.
            last = self._kept.get(self._next - 1)
            if last is None or last.num_begun == last.num_pieces:
                if (last := self._begin_frame()) is None:
                    return None
            number_in_frame = last.num_begun
            num_bytes = _bytes_of_piece(number_in_frame, frame_bytes=len(last.data))
            piece = Piece(self._next - 1, number=number_in_frame, num_bytes=num_bytes)
            last.num_begun += 1
            return self._sends(number, piece=piece)

    def ask(self, number: int) -> None:
        """Note that a question is sent over this connection."""
        with self._lock:
            self._sent[number].append(Piece(0, 0, 0, asked_at_s=time.monotonic()))

    def awaits(self, number: int) -> bool:
        """Return whether something is not acknowledged that was sent over a connection."""
        with self._lock:
            return bool(self._sent[number])

    def acknowledge(self, number: int, num_pieces: int) -> Acknowledged:
        """Note how many pieces have arrived over a connection.

        Raises FrameError for fewer than before, or for more than were sent.
        """
        num_bytes = 0
        num_answers = 0
        is_moving = False
        with self._lock:
            # An acknowledgement is one number, the count of pieces of this connection. What it
            # covers follows from the order in which this end sent them.
            sent = self._sent[number]
            before = self._num_acknowledged[number]
            if not before <= num_pieces <= before + len(sent):
                raise FrameError(
                    f"the receiver acknowledges {num_pieces} pieces; it had acknowledged {before} "
                    f"of {before + len(sent)}"
                )
            self._num_acknowledged[number] = num_pieces
            now_s = time.monotonic()
            for _ in range(num_pieces - before):
                piece = sent.popleft()
                num_bytes += piece.num_bytes
                self._acknowledged_bytes[number] += HEADER.size + piece.num_bytes
                if not piece.num_bytes:
                    num_answers += 1
                    # Of a question only: the answer to a piece waits until the whole piece has
                    # crossed.
                    self.round_trip_s = now_s - piece.asked_at_s
                elif (kept := self._kept.get(piece.frame)) is not None:
                    kept.num_acknowledged += piece.num_bytes
                    self._busy_bytes += piece.num_bytes
                    is_moving = is_moving or kept.num_pieces > 1
            self._release()
            self._measure(now_s)
        return Acknowledged(num_bytes, num_answers, is_moving=is_moving)

    def _begin_frame(self) -> _Kept | None:
        if self._kept:
            # A frame that is longer than the window is begun all the same if nothing else is kept.
            under_way = self._kept_bytes - self._kept[self._first].num_acknowledged
            if under_way >= self._max_bytes or len(self._kept) >= MAX_OPEN_FRAMES:
                return None
        if (frame := self._next_frame()) is None:
            return None
        # A view of the frame: it is kept once, in the buffer in which it was encoded.
        kept = _Kept(memoryview(cast(bytes, frame.numpy())))
        self._kept[self._next] = kept
        self._next += 1
        self._kept_bytes += len(kept.data)
        self.queued.add(len(kept.data))
        if self._busy_since_s is None:
            self._busy_since_s = time.monotonic()
        return kept

    def _sends(self, number: int, piece: Piece) -> tuple[Piece, memoryview, int]:
        self._sent[number].append(piece)
        data = self._kept[piece.frame].data
        offset = piece.number * PIECE_BYTES
        return piece, data[offset : offset + piece.num_bytes], len(data)

    def _release(self) -> None:
        while (kept := self._kept.get(self._first)) is not None:
            # Only from the oldest on, since a receiver that greets again names one number.
            if kept.num_acknowledged < len(kept.data):
                break
            del self._kept[self._first]
            self._first += 1
            self._kept_bytes -= len(kept.data)
            self.queued.add(-len(kept.data))

    def _measure(self, now_s: float) -> None:
        """Note the bandwidth of a time in which there was always something under way."""
        assert self._busy_since_s is not None or not self._kept
        if self._busy_since_s is None:
            return
        took_s = now_s - self._busy_since_s
        is_over = not self._kept
        is_long = took_s >= _MEASURE_S or (is_over and took_s >= _SHORTEST_MEASURE_S)
        if is_long and self._busy_bytes >= PIECE_BYTES:  # small messages wait for other things
            # The first acknowledgement comes a round trip later than the first byte leaves.
            self.bytes_per_s = self._busy_bytes / max(
                took_s / 2, took_s - (self.round_trip_s or 0)
            )
        # An idle line says nothing of its bandwidth, so the time begins anew with the next frame.
        if is_over:
            self._busy_since_s = None
            self._busy_bytes = 0
        elif took_s >= _MEASURE_S:
            # What is acknowledged next left a round trip ago.
            self._busy_since_s = now_s - (self.round_trip_s or 0)
            self._busy_bytes = 0


class _Open:
    """A frame of which pieces have come."""

    def __init__(self, num_bytes: int) -> None:
        self.buffer = message_buffer(num_bytes)
        self.data = memoryview(cast(bytearray, self.buffer.numpy()))
        self.missing_bytes = num_bytes
        self.arrived: set[int] = set()  # the numbers of pieces


class Assembly:
    """The frames of one stream of which pieces have come, put together. Thread-safe.

    capacity_bytes: size of the longest frame that is accepted; the shortest has HEAD_BYTES.
    max_bytes: bound on the total bytes of all open frames. An honest sender stays below it.
    deliver: called with every frame in order, in the thread that received its last piece.
    """

    def __init__(
        self, capacity_bytes: int, max_bytes: int, deliver: Callable[[Tensor], object]
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._max_bytes = max_bytes
        self._deliver = deliver
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}
        self._open_bytes = 0
        self.expected = 0
        """The number of the first frame that has not arrived whole."""

    def place(self, frame: int, frame_bytes: int, number: int) -> memoryview:
        """Return where the bytes of a piece belong. A piece that has come before, over a
        connection that was cut then, goes nowhere.

        Raises FrameError for a piece that no honest sender cuts.
        """
        if not HEAD_BYTES <= frame_bytes <= self._capacity_bytes:
            raise FrameError(
                f"frame {frame} has {frame_bytes:,} bytes; a frame has {HEAD_BYTES} or more, and "
                f"at most {self._capacity_bytes:,} were promised"
            )
        num_bytes = _bytes_of_piece(number, frame_bytes=frame_bytes)
        if num_bytes <= 0:
            raise FrameError(f"frame {frame} has {frame_bytes:,} bytes and no piece {number:,}")
        with self._lock:
            # It came over a connection that was cut before the answer was through. Its bytes are
            # read into a place that nobody looks at, since the connection carries on behind them.
            if frame < self.expected:
                return memoryview(bytearray(num_bytes))
            # This bound and the next one are against a peer with a valid key: without them it
            # could open frames of the largest size, one byte each, until the memory of this rank
            # is full.
            if frame >= self.expected + MAX_OPEN_FRAMES:
                raise FrameError(
                    f"frame {frame} begins before frame {self.expected} has come; at most "
                    f"{MAX_OPEN_FRAMES:,} are under way"
                )
            if (found := self._open.get(frame)) is None:
                if self._open and self._open_bytes + frame_bytes > self._max_bytes:
                    raise FrameError(
                        f"{len(self._open)} frames from {self.expected} on are not finished, and "
                        f"frame {frame} begins"
                    )
                found = self._open[frame] = _Open(frame_bytes)
                self._open_bytes += frame_bytes
            if len(found.data) != frame_bytes:
                raise FrameError(f"frame {frame} has {len(found.data):,} or {frame_bytes:,} bytes")
            if number in found.arrived:
                return memoryview(bytearray(num_bytes))
            offset = number * PIECE_BYTES
            return found.data[offset : offset + num_bytes]

    def arrived(self, frame: int, number: int) -> None:
        """Note that a piece is in its place."""
        with self._lock:
            found = self._open.get(frame)
            if found is None or number in found.arrived:
                return
            found.arrived.add(number)
            found.missing_bytes -= _bytes_of_piece(number, frame_bytes=len(found.data))
            # Several connections finish frames in any order; they are handed on in the order of
            # numbers.
            while (whole := self._open.get(self.expected)) is not None:
                if whole.missing_bytes:
                    break
                del self._open[self.expected]
                self.expected += 1
                self._open_bytes -= len(whole.data)
                self._deliver(whole.buffer)
