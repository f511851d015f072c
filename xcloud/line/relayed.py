"""The ends of a connection through a relay: both owners dial it, and neither opens a port.

Who dials a relay sends one record: magic | side | name of a room (32 bytes). It answers "." from
time to time while nobody has come to the other side of that room, "+" once somebody has, "!" where
it takes nobody. After "+" the relay passes bytes on, which are TLS between the two owners.

The name of a room is made of the secret that the two owners' keys share, so only they and the
relay know it. The relay can end a connection or keep it waiting; it can read and change nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from cryptography.hazmat.primitives.asymmetric import ec

from xcloud.line.keys import LineKeys, read_key
from xcloud.line.pinned_tls import LineDown, in_words

CONNECT_S = 2.0
NUM_SPARES = 16
"""Connections with which a rank that listens waits in each room: each serves one that dials."""
SAYS_EVERY_S = 15.0
"""How often a relay tells who waits that it is still there."""
ROOM_BYTES = 32
RECORD = struct.Struct(f"<6sB{ROOM_BYTES}s")
MAGIC = b"XCRLY1"
WAITING = b"."
MET = b"+"
REFUSED = b"!"
_AGAIN_S = 0.5


class Side(IntEnum):
    """A side of a room. ALONE is a listener in whose room no other may wait."""

    LISTENS = 1
    DIALS = 2
    ALONE = 3


@dataclass(frozen=True)
class Meeting:
    """The relay and the rooms in which ranks of two clouds meet.

    relay: host and port of the relay.
    rooms: the names of the rooms. There are two for a cloud of which two certificates are known.
    """

    relay: tuple[str, int]
    rooms: tuple[bytes, ...]


def rooms_of(keys: LineKeys, cloud: str, label: str) -> tuple[bytes, ...]:
    """Return the names of the rooms in which this cloud meets another one.

    label: the name of the rank that listens (SealedPlace.label_of).
    """
    own = read_key(keys.key_file)
    return tuple(
        hmac.digest(
            # The same secret comes out at both ends, from the own key and the other's certificate.
            own.exchange(ec.ECDH(), certificate.public_key),
            b"xcloud relay room " + label.encode(),
            hashlib.sha256,
        )
        for certificate in keys.peers[cloud]
    )


def enter(
    relay: tuple[str, int],
    room: bytes,
    side: Side,
    within_s: float = CONNECT_S,
    on_waiting: Callable[[socket.socket], object] | None = None,
) -> socket.socket:
    """Dial a relay and wait until somebody comes to the other side of a room.

    within_s: seconds to wait for the first answer of the relay, and for each next one.
    on_waiting: is given the connection before the wait; it may shut it down to end the wait.

    Raises LineDown if nobody comes, or there is no relay.
    """
    where = f"the relay {relay[0]}:{relay[1]}"
    plain: socket.socket | None = None
    try:
        plain = socket.create_connection(relay, timeout=CONNECT_S)
        # Holds for each byte: a relay that says "." every 15 s keeps a listener waiting for ever.
        plain.settimeout(within_s)
        if on_waiting is not None:
            on_waiting(plain)
        plain.sendall(RECORD.pack(MAGIC, side, room))
        while (answer := plain.recv(1)) == WAITING:
            continue
        if answer == MET:
            return plain
        if answer == REFUSED:
            raise LineDown(f"{where} has no room for more connections, or that one is taken")
        raise LineDown(f"{where}: " + ("what came is no relay" if answer else "it was closed"))
    except BaseException as error:
        if plain is not None:
            plain.close()
        # The relay has taken the connection, so it is the other rank that is not there.
        if plain is not None and isinstance(error, TimeoutError) and side is Side.DIALS:
            raise LineDown(f"nobody waits at {where}") from None
        if isinstance(error, OSError):
            raise LineDown(f"{where}: {in_words(error)}") from None
        raise


class RelayDoor:
    """Waits in rooms of a relay, and hands over each connection on which somebody came. `close`
    ends it.

    greet: is given each connection and the relay's name, in a thread of its own; it closes it.

    trouble: why nobody can come now, in words; None if this rank waits at the relay.
    """

    def __init__(self, meeting: Meeting, greet: Callable[[socket.socket, str], object]) -> None:
        self.trouble: str | None = None
        self._meeting = meeting
        self._greet = greet
        self._is_closed = threading.Event()
        self._waiting = set[socket.socket]()
        self._lock = threading.Lock()
        for number, room in enumerate(meeting.rooms):
            # A connection that was met is used up, so a thread waits for each that may come next.
            for spare in range(NUM_SPARES):
                name = f"relay {number}.{spare}"
                threading.Thread(target=self._run, args=(room,), name=name, daemon=True).start()

    def close(self) -> None:
        """Accept nothing more."""
        self._is_closed.set()
        with self._lock:
            for plain in self._waiting:
                with suppress(OSError):  # ends the wait of its thread
                    plain.shutdown(socket.SHUT_RDWR)

    def _run(self, room: bytes) -> None:
        host, port = self._meeting.relay
        while not self._is_closed.is_set():
            begun_s = time.monotonic()
            held: list[socket.socket] = []

            def note(plain: socket.socket, held: list[socket.socket] = held) -> None:
                with self._lock:
                    self._waiting.add(plain)
                held.append(plain)
                self.trouble = None
                # `close` may have run between the loop's look and this entry in `_waiting`.
                if self._is_closed.is_set():
                    plain.shutdown(socket.SHUT_RDWR)

            met: socket.socket | None = None
            try:
                met = enter(
                    self._meeting.relay,
                    room=room,
                    side=Side.LISTENS,
                    within_s=3 * SAYS_EVERY_S,
                    on_waiting=note,
                )
            except LineDown as error:
                self.trouble = str(error)
            finally:
                with self._lock:
                    self._waiting.difference_update(held)
            if met is not None:
                self._greet(met, f"the relay {host}:{port}")
            # Also after a meeting: a relay may say "met" at once and bring nobody.
            self._is_closed.wait(max(0.0, begun_s + _AGAIN_S - time.monotonic()))
