"""What two doctors tell each other over one TLS connection, and what they measure by it.

The cloud that dials leads. A message is: kind u8 | length u32 | content, little-endian.
  both      FACTS    JSON: releases and the SHA-256 of the experiment file
  10 times  PING     empty; answered by PONG: the other's clock (f64, seconds since 1970)
  up        BULK     64 kB each, for a few seconds, then END; answered by RATE (f64, bytes/s)
  down      BULK     the same from the other side
  last      FIGURES  round trip and clock difference (2 f64, seconds); answered by END
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import FrameError

BULK_S = 3.0
_RAMP_S = 1.0
"""How much of the beginning of BULK does not count: TCP has not found the line's rate yet."""
_CHUNK = os.urandom(1 << 16)  # a VPN could compress zeros
_NUM_PINGS = 10
_SHORTEST_S = 1e-6  # of a round trip, which figures are divided by
# A doctor at the other end has to answer from a process that is at work.
ANSWER_S = 15.0
_MAX_FACTS = 2048
_MAX_TEXT = 100
HEAD = struct.Struct("<BI")
_NUMBER = struct.Struct("<d")
_FIGURES = struct.Struct("<dd")


class DoctorMessage(IntEnum):
    """The kind of a message between two doctors."""

    FACTS = 1
    PING = 2
    PONG = 3
    BULK = 4
    END = 5
    RATE = 6
    FIGURES = 7


# END and PING have no content.
_MAX_BYTES = {
    DoctorMessage.FACTS: _MAX_FACTS,
    DoctorMessage.PONG: _NUMBER.size,
    DoctorMessage.BULK: len(_CHUNK),
    DoctorMessage.RATE: _NUMBER.size,
    DoctorMessage.FIGURES: _FIGURES.size,
}


class Facts(NamedTuple):
    """The facts that must or should be the same in both clouds.

    code: digest of all files of the package.
    file: SHA-256 of the experiment file.
    """

    release: str
    code: str
    torch: str
    python: str
    file: str


class LineFigures(NamedTuple):
    """The figures of a line, as the doctors at its two ends have measured it.

    clock_ahead_s: seconds by which the peer's clock is ahead of this machine's.
    """

    peer: Facts
    round_trip_s: float
    clock_ahead_s: float
    sent_bytes_per_s: float
    received_bytes_per_s: float


def lead(tls: socket.socket, peer: str, facts: Facts) -> LineFigures:
    """Measure the line, as the cloud that has dialled.

    Raises OSError where the connection ends, FrameError for a peer that breaks the rules.
    """
    talk = _Talk(tls=tls, peer=peer)
    # Who has dialled speaks first, as it leads.
    talk.send(DoctorMessage.FACTS, json.dumps(facts._asdict()).encode())
    theirs = unpack_facts(talk.receive(DoctorMessage.FACTS), peer=peer)
    round_trip_s, clock_ahead_s = ping(talk)
    # Up first, then down: together they would share the processors of small machines.
    _send_bulk(talk)
    sent = talk.receive_rate()
    received = receive_bulk(talk)
    talk.send(DoctorMessage.RATE, _NUMBER.pack(received))
    talk.send(DoctorMessage.FIGURES, _FIGURES.pack(round_trip_s, clock_ahead_s))
    talk.receive(DoctorMessage.END)
    return LineFigures(theirs, round_trip_s, clock_ahead_s, sent, received)


def follow(tls: socket.socket, peer: str, facts: Facts) -> LineFigures:
    """Measure the line, as the cloud that was dialled. Raises as `lead`."""
    talk = _Talk(tls=tls, peer=peer)
    theirs = unpack_facts(talk.receive(DoctorMessage.FACTS), peer=peer)
    talk.send(DoctorMessage.FACTS, json.dumps(facts._asdict()).encode())
    for _ in range(_NUM_PINGS):
        talk.receive(DoctorMessage.PING)
        talk.send(DoctorMessage.PONG, _NUMBER.pack(time.time()))
    received = receive_bulk(talk)
    talk.send(DoctorMessage.RATE, _NUMBER.pack(received))
    _send_bulk(talk)
    sent = talk.receive_rate()
    round_trip_s, clock_behind_s = talk.receive_numbers(DoctorMessage.FIGURES, form=_FIGURES)
    talk.send(DoctorMessage.END)
    # The leader measures, and its clock being ahead is this one's being behind.
    return LineFigures(theirs, max(round_trip_s, _SHORTEST_S), -clock_behind_s, sent, received)


@dataclass
class _Talk:
    """The messages on one connection, which one thread alone uses.

    peer: name of the rank at the other end, for error messages.
    """

    tls: socket.socket
    peer: str

    def send(self, kind: DoctorMessage, content: bytes = b"") -> None:
        # For each message: a peer that stops reading must not hold this side for ever.
        self.tls.settimeout(ANSWER_S)
        self.tls.sendall(HEAD.pack(kind, len(content)) + content)

    def receive(self, kind: DoctorMessage) -> bytes:
        """Return the content of the next message, which must be of this kind."""
        return self.receive_any((kind,), until_s=time.monotonic() + ANSWER_S)[1]

    def receive_any(
        self, allowed: tuple[DoctorMessage, ...], until_s: float
    ) -> tuple[DoctorMessage, bytes]:
        number, num_bytes = HEAD.unpack(self._read(HEAD.size, until_s=until_s))
        # Only what may come now, and no more bytes than such a message has.
        kind = next((one for one in allowed if one == number), None)
        if kind is None or num_bytes > _MAX_BYTES.get(kind, 0):
            wanted = " or ".join(one.name for one in allowed)
            raise FrameError(
                f"the doctor of {self.peer} sent {num_bytes} bytes of kind {number}, not {wanted}"
            )
        return kind, self._read(num_bytes, until_s=until_s)

    def receive_rate(self) -> float:
        [rate] = self.receive_numbers(DoctorMessage.RATE)
        if rate <= 0:
            raise FrameError(f"the doctor of {self.peer} says that nothing came")
        return rate

    def receive_numbers(
        self, kind: DoctorMessage, form: struct.Struct = _NUMBER
    ) -> tuple[float, ...]:
        """Return the numbers of the next message. Raises FrameError unless all are finite."""
        content = self.receive(kind)
        if len(content) != form.size:
            raise FrameError(f"the doctor of {self.peer} sent {kind.name} of {len(content)} bytes")
        numbers: tuple[float, ...] = form.unpack(content)
        # NaN would pass every comparison.
        if not all(map(math.isfinite, numbers)):
            raise FrameError(f"the doctor of {self.peer} sent {kind.name} {numbers}")
        return numbers

    def _read(self, num_bytes: int, until_s: float) -> bytes:
        data = memoryview(bytearray(num_bytes))
        at = 0
        # recv returns what there is.
        while at < num_bytes:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self.tls.settimeout(left_s)
            count = self.tls.recv_into(data[at:])
            if not count:
                # An orderly end in the middle of a message.
                raise ConnectionResetError
            at += count
        return bytes(data)


def ping(talk: _Talk) -> tuple[float, float]:
    """Return the round trip and by how much the peer's clock is ahead, of the quickest answer."""
    answers = []
    for _ in range(_NUM_PINGS):
        asked_at_s = time.time()
        started_s = time.perf_counter()
        talk.send(DoctorMessage.PING)
        [peer_at_s] = talk.receive_numbers(DoctorMessage.PONG)
        took_s = time.perf_counter() - started_s
        # The peer read its clock in the middle of the round trip, if both ways take as long.
        answers.append((took_s, peer_at_s - asked_at_s - took_s / 2))
    # The quickest answer waited least in queues.
    return min(answers)


def _send_bulk(talk: _Talk) -> None:
    until_s = time.monotonic() + BULK_S
    while time.monotonic() < until_s:
        talk.send(DoctorMessage.BULK, _CHUNK)
    talk.send(DoctorMessage.END)


def receive_bulk(talk: _Talk) -> float:
    """Return at how many bytes per second the peer's data comes, once TCP has found its rate."""
    began_s = time.monotonic()
    # The sender stops by its own clock, after BULK_S; the rest is room for a slow line.
    until_s = began_s + BULK_S + 4 * ANSWER_S
    arrivals = []  # moments
    while True:
        kind, _ = talk.receive_any((DoctorMessage.BULK, DoctorMessage.END), until_s=until_s)
        if kind is DoctorMessage.END:
            break
        arrivals.append(time.monotonic())
    if not arrivals:
        raise TimeoutError
    # TCP needs some round trips to find the rate of the line.
    ramp_s = min(_RAMP_S, BULK_S / 3)
    counted = [moment for moment in arrivals if moment >= began_s + ramp_s]
    # A line so slow that next to nothing came behind the ramp.
    if len(counted) < 2:
        return len(arrivals) * len(_CHUNK) / (time.monotonic() - began_s)
    # From the first counted arrival on, whose bytes were under way before.
    return (len(counted) - 1) * len(_CHUNK) / (counted[-1] - counted[0])


def unpack_facts(content: bytes, peer: str) -> Facts:
    """Return the facts of a peer. Raises FrameError for anything but Facts in JSON."""
    try:
        found = parsed_json(content)
    except ValueError:
        found = None
    # Exactly these keys: another release may send others.
    is_whole = isinstance(found, dict) and found.keys() == set(Facts._fields)
    is_text = all(
        isinstance(one, str) and len(one) <= _MAX_TEXT and one.isprintable()
        for one in (found.values() if is_whole else ())
    )
    if not is_whole or not is_text:
        raise FrameError(f"the doctor of {peer} sent no facts; run one release of xcloud")
    return Facts(**found)
