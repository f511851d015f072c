"""The door of a rank that listens: who has dialled and said nothing yet, or not the right name,
costs a descriptor for a second and no thread.

Whoever dials begins a handshake of TLS with the name of the rank it wants (`PinnedTls.label`),
within milliseconds of being let in. Whoever does not is closed, the oldest of the largest crowd
first. Who knows the name and stops there gives way after a second where others wait. So a crowd
keeps no place that an honest peer needs, also behind one address with it.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from xcloud.line.pinned_tls import in_words

FIRST_BYTES_S = 1.0
"""How long the beginning of a handshake may take, from its connection to its last byte."""
MAX_WAITING = 256
MAX_HANDSHAKES = 64
"""Handshakes that go on at once, each in a thread."""
GIVES_WAY_AFTER_S = 1.0
"""A handshake that has taken so long ends where somebody else waits for its place."""
CROWDED = "too many connections that say nothing"
_LOOK_EVERY_S = 0.1
_MAX_RECORD_BYTES = 1 << 14
_RECORD = struct.Struct(">BHH")  # type, version, length
_HANDSHAKE = 22
_CLIENT_HELLO = 1


@dataclass(eq=False)
class _Caller:
    """Somebody who has dialled."""

    plain: socket.socket
    host: str
    since_s: float = field(default_factory=time.monotonic)
    num_bytes: int = 0  # that have come
    is_ready: bool = False


@dataclass(eq=False)
class _Handshake:
    """A handshake that goes on in a thread. twin: a second descriptor of its connection."""

    twin: socket.socket
    is_known: bool
    since_s: float = field(default_factory=time.monotonic)


class Door:
    """Accepts connections, and hands over those that begin as a peer's do. `close` ends it.

    label: the name that they must begin with.
    greet: is given each of these and its address, in a thread of its own; it closes it.
    on_refused: is given a line for each of the others.
    is_known: returns whether a peer has come from an address before; others give way first.
    """

    trouble: str | None = None
    """Why nobody can come; a door of this machine's own is always there."""

    def __init__(
        self,
        listening: socket.socket,
        label: str,
        greet: Callable[[socket.socket, str], object],
        on_refused: Callable[[str], object],
        is_known: Callable[[str], bool],
    ) -> None:
        self._listening = listening
        self._label = label.encode()
        self._greet = greet
        self._on_refused = on_refused
        self._is_known = is_known
        self.waiting: dict[int, _Caller] = {}  # by descriptor, the oldest first
        self.handshakes: list[_Handshake] = []  # the oldest first
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._is_closed = False
        listening.setblocking(False)
        self._poll.register(listening, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept nothing more."""
        self._is_closed = True
        with suppress(OSError):  # ends the wait
            self._listening.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        self._listening.close()

    def _run(self) -> None:
        listening = self._listening.fileno()
        while not self._is_closed:
            # One thread serves all who have said nothing, so that a thousand of them cost a
            # thousand descriptors at most and no thread.
            for descriptor, _ in self._poll.poll(1000 * _LOOK_EVERY_S):
                if descriptor == listening:
                    self.accept()
                elif (caller := self.waiting.get(descriptor)) is not None:
                    self.look(caller)
            self.let_in()
            now_s = time.monotonic()
            for caller in [*self.waiting.values()]:
                if not caller.is_ready and now_s - caller.since_s > FIRST_BYTES_S:
                    self._refuse(caller, why="no answer" if caller.num_bytes else CROWDED)
        for caller in [*self.waiting.values()]:
            self._forget(caller).close()

    def accept(self) -> None:
        """Take one connection that came, and say what keeps the system from giving it."""
        try:
            plain, address = self._listening.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if not self._is_closed:
                self._on_refused(f"the system refuses connections: {in_words(error)}")
                time.sleep(_LOOK_EVERY_S)  # such as no file descriptor left
            return
        plain.setblocking(False)
        if len(self.waiting) >= MAX_WAITING:
            crowd = Counter(caller.host for caller in self.waiting.values())
            silent = [one for one in self.waiting.values() if not one.is_ready]
            # The oldest of the largest crowd: an honest peer has said its name by then.
            oldest = max(silent or self.waiting.values(), key=lambda one: crowd[one.host])
            self._refuse(oldest, why=CROWDED)
        self.waiting[plain.fileno()] = _Caller(plain, host=address[0])
        self._poll.register(plain, select.POLLIN)

    def look(self, caller: _Caller) -> None:
        """See how a connection begins, without taking anything of it."""
        try:
            # Peeked at, since Python's TLS reads the handshake from the socket itself.
            start = caller.plain.recv(_RECORD.size + _MAX_RECORD_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError as error:
            return self._refuse(caller, why=in_words(error))
        if len(start) <= caller.num_bytes:  # no more will come
            return self._refuse(caller, why="the connection was closed")
        caller.num_bytes = len(start)
        wanted = _RECORD.size
        if len(start) >= wanted:
            kind, version, length = _RECORD.unpack_from(start)
            if kind != _HANDSHAKE or version >> 8 != 3 or length > _MAX_RECORD_BYTES:
                return self._refuse(caller, why="what came is no TLS")
            wanted += length
        if len(start) < wanted:
            # The poll would return at once for what was peeked at and is still there. With this
            # mark it waits for the whole record.
            caller.plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
            return
        if name_in(start[_RECORD.size : wanted]) != self._label:
            return self._refuse(caller, why="it asks for another name than this rank's")
        caller.is_ready = True
        self._poll.unregister(caller.plain)  # it has said enough

    def let_in(self) -> None:
        """Hand over those who have said the name, as far as there are places for them."""
        for caller in [one for one in self.waiting.values() if one.is_ready]:
            if len(self.handshakes) >= MAX_HANDSHAKES:
                self._make_room()
                return
            plain = self._forget(caller)
            # TLS reads any number of bytes again.
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            try:
                # A second descriptor: `_make_room` shuts the connection down by it, while the
                # thread of the handshake may close its own at any time and the system give the
                # number to another one.
                handshake = _Handshake(plain.dup(), is_known=self._is_known(caller.host))
            except OSError as error:  # no descriptor is left
                self._on_refused(f"{caller.host}: {in_words(error)}")
                plain.close()
                continue
            with self._lock:
                self.handshakes.append(handshake)
            thread = threading.Thread(
                target=self._handed,
                args=(plain, caller.host, handshake),
                name=f"greet {caller.host}",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError as error:  # no thread is left
                self._on_refused(f"{caller.host}: {error}")
                plain.close()
                self._leave(handshake)

    def _make_room(self) -> None:
        """End the handshake that has gone on longest, where others wait, strangers' first."""
        long_s = time.monotonic() - GIVES_WAY_AFTER_S
        with self._lock:
            late = [one for one in self.handshakes if one.since_s < long_s]
            if late:
                # Of two that took too long the one from an address without a peer goes first.
                ends = min(late, key=lambda one: (one.is_known, one.since_s))
                ends.since_s = time.monotonic()  # its thread takes a moment
                with suppress(OSError):
                    ends.twin.shutdown(socket.SHUT_RDWR)

    def _handed(self, plain: socket.socket, host: str, handshake: _Handshake) -> None:
        try:
            self._greet(plain, host)
        finally:
            self._leave(handshake)

    def _leave(self, handshake: _Handshake) -> None:
        with self._lock:
            self.handshakes.remove(handshake)
            handshake.twin.close()

    def _refuse(self, caller: _Caller, why: str) -> None:
        self._forget(caller).close()
        self._on_refused(f"{caller.host}: {why}")

    def _forget(self, caller: _Caller) -> socket.socket:
        del self.waiting[caller.plain.fileno()]
        if not caller.is_ready:
            self._poll.unregister(caller.plain)
        return caller.plain


def name_in(hello: bytes) -> bytes | None:
    """Return the name (SNI) in the first message of a TLS client; None where it has none."""
    try:
        if hello[0] != _CLIENT_HELLO:
            return None
        at = 4 + 2 + 32  # length, version, random
        at += 1 + hello[at]  # session
        at += 2 + int.from_bytes(hello[at : at + 2], "big")  # ciphers
        at += 1 + hello[at]  # compressions
        until = at + 2 + int.from_bytes(hello[at : at + 2], "big")
        at += 2
        while at + 4 <= min(until, len(hello)):
            kind, length = struct.unpack_from(">HH", hello, at)
            at += 4
            if kind == 0:  # server_name: length of the list, type 0, length of the name, the name
                num_bytes = int.from_bytes(hello[at + 3 : at + 5], "big")
                return hello[at + 5 : at + 5 + num_bytes] if hello[at + 2] == 0 else None
            at += length
    except (IndexError, struct.error):
        pass  # it is cut short
    return None
