"""How a connection between two clouds comes about: one of the two ranks dials, the other listens;
or both dial a relay (relayed.py), where one of them waits for the other.

What is dialled in from outside is bounded (door.py): who has not said the name of this rank after
a second is closed, 64 handshakes go on at once, 5 s each and 5 s for a greeting. Only a greeting
that this rank waits for leads further.
"""

from __future__ import annotations

import math
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from xcloud.base.errors import FrameError, LinkClosed
from xcloud.line.door import Door
from xcloud.line.hello import (
    HELLO_S,
    MAX_CONNECTIONS,
    WHY_REFUSED,
    Hello,
    HelloRefusal,
    StreamName,
    encode_hello,
    encode_refusal,
    read_hello,
)
from xcloud.line.pinned_tls import LineDown, PinnedTls, in_words
from xcloud.line.relayed import CONNECT_S, Meeting, RelayDoor, Side, enter
from xcloud.net.link_end import ignore

_BACKLOG = 128
_MAX_KNOWN = 1000  # addresses
_NOT_SENT_BYTES = 1 << 19
ONE_STREAM_BYTES = 3e6
"""What one connection carries in a round trip with Linux's usual limit (_USUAL_LIMIT), as
measured."""
_USUAL_LIMIT = 1 << 22  # bytes, net.ipv4.tcp_wmem
FAST_LINE = 125e6
"""Bytes per second of the fastest line that connections are opened for: 1 Gbit/s."""


class Connected(NamedTuple):
    """A connection on which both sides have said who they are.

    of: number of connections that the stream has.
    expected: number of the first frame that the receiver has not got in full, from the peer's
        greeting.
    round_trip_s: seconds of one round trip; None if the peer dialled.
    """

    tls: ssl.SSLSocket
    of: int
    expected: int
    round_trip_s: float | None = None


class Way(Protocol):
    """The maker of connections of a rank to ranks of one other cloud."""

    def connect(
        self,
        wanted: Hello,
        is_bulk: bool,
        timeout_s: float,
        wake: Callable[[], None],
        is_fixed: bool = False,
    ) -> Connected:
        """Return a connection for this greeting, whose `of` is 0 if the number is not known yet.

        is_fixed: True if the peer can no longer choose another number of connections.
        is_bulk: True if the stream may fill the line.
        wake: called when the peer connects again while this connection still seems to work.

        Raises LineDown if there is none yet, LinkClosed if there can be none any more, FrameError
        for a peer that breaks the rules.
        """

    def has_come_again(self, wanted: Hello) -> bool:
        """Return whether the peer has dialled once more for this greeting. A rank that dials
        waits for nobody."""
        return False

    def leave(self, wanted: Hello) -> None:
        """Wait for this greeting no longer."""
        return


@dataclass(eq=False)
class KnownAttempts:
    """The attempt of each other cloud, as this rank first heard of it. Thread-safe.

    A new attempt number means that the other cloud has restarted and lost its state. This rank
    must restart too. The new number is not kept here, and the other cloud does not accept this
    attempt: it waits for this rank's next one.
    """

    began_again: set[str] = field(default_factory=set)
    """The clouds that have begun the run again."""
    known: dict[str, int] = field(default_factory=dict)
    """The attempt of each cloud that is known."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, cloud: str, attempt: int) -> None:
        """Note an attempt of a cloud that knows this rank's. Raises LinkClosed where it is not
        the one that is known."""
        with self._lock:
            if self.known.setdefault(cloud, attempt) != attempt:
                self.began_again.add(cloud)
        self.check(cloud)

    def check(self, cloud: str) -> None:
        """Raise LinkClosed for a cloud that has begun the run again."""
        if cloud in self.began_again:
            raise LinkClosed(f"{cloud} has begun the run again")


class Dialler(Way):
    """Dials one rank of another cloud.

    address: host and port of that rank, or where to meet it.
    attempts: the known attempt of each other cloud. This rank's other ways share it.
    """

    def __init__(
        self,
        address: tuple[str, int] | Meeting,
        cloud: str,
        tls: PinnedTls,
        attempts: KnownAttempts | None = None,
    ) -> None:
        self._address = address
        self._cloud = cloud
        self._tls = tls
        self._attempts = attempts or KnownAttempts()

    def connect(
        self,
        wanted: Hello,
        is_bulk: bool,
        timeout_s: float,
        wake: Callable[[], None],
        is_fixed: bool = False,
    ) -> Connected:
        self._attempts.check(self._cloud)
        plain = self._dialled()
        tune(plain, is_bulk=is_bulk)
        # A TLS 1.3 handshake takes the dialler one round trip; the TCP connection is made by then.
        started_s = time.monotonic()
        tls = self._tls.dial(plain, cloud=self._cloud)
        round_trip_s = time.monotonic() - started_s
        # 0: the first connection of the stream. Only this end knows a round trip, so it chooses.
        of = wanted.of or (num_connections(round_trip_s) if is_bulk else 1)
        said = wanted._replace(of=of, known=self._attempts.known.get(self._cloud, 0))
        try:
            tls.settimeout(HELLO_S)
            tls.sendall(encode_hello(said))
            answer = read_hello(tls, sender=self._cloud)
            if isinstance(answer, HelloRefusal):
                if answer is HelloRefusal.EARLIER_ATTEMPT:
                    # The other cloud has begun again and has lost what it knew of this attempt.
                    # All links to it end, whichever of its ranks says so first.
                    self._attempts.began_again.add(self._cloud)
                    raise LinkClosed(f"{self._cloud} refuses this rank: {WHY_REFUSED[answer]}")
                raise LineDown(f"{self._cloud}: {WHY_REFUSED[answer]}")
            # The right certificate alone is not enough: an answer for another stream, run or
            # attempt is none to this greeting.
            if (answer.stream, answer.run, answer.connection, answer.of, answer.known) != (
                said.stream, said.run, said.connection, said.of, said.attempt
            ):  # fmt: skip
                raise FrameError(f"{self._cloud} answers {said.stream} as {answer.stream}")
            self._attempts.note(self._cloud, answer.attempt)
            return Connected(tls, of, answer.expected, round_trip_s=round_trip_s)
        except OSError as error:
            tls.close()
            raise LineDown(f"{self._cloud}: {in_words(error)}") from None
        except BaseException:
            tls.close()
            raise

    def _dialled(self) -> socket.socket:
        try:
            if isinstance(self._address, Meeting):
                room = random.choice(self._address.rooms)
                return enter(self._address.relay, room=room, side=Side.DIALS)
            return socket.create_connection(self._address, timeout=CONNECT_S)
        except LineDown as error:
            raise LineDown(f"{self._cloud}: {error}") from None
        except OSError as error:
            assert not isinstance(self._address, Meeting), "a meeting raises LineDown"
            host, port = self._address
            raise LineDown(f"{self._cloud} at {host}:{port}: {in_words(error)}") from None


class Listener(Way):
    """Waits for ranks of other clouds to dial this one.

    address: host and port at which it listens, or where it meets them.
    cloud, rank: the cloud and the number of this rank.
    run, attempt: the same values as in a greeting (Hello).
    on_refused: called with a line of text for each connection that was not used.
    attempts: the known attempt of each other cloud. This rank's other ways share it.

    told: the clouds that knew an earlier attempt and have received the number of this one.
    """

    def __init__(
        self,
        address: tuple[str, int] | Meeting,
        tls: PinnedTls,
        cloud: str,
        rank: int,
        run: bytes,
        attempt: int,
        on_refused: Callable[[str], object] = ignore,
        attempts: KnownAttempts | None = None,
    ) -> None:
        self._tls = tls
        self._cloud = cloud
        self._rank = rank
        self._run = run
        self._attempt = attempt
        self._on_refused = on_refused
        self._changed = threading.Condition()
        self.awaited: dict[tuple[StreamName, int], Callable[[], None]] = {}
        self.arrived: dict[tuple[StreamName, int], tuple[ssl.SSLSocket, Hello]] = {}
        self._attempts = attempts or KnownAttempts()
        self.told = set[str]()
        self.known = set[str]()  # addresses from which a peer has come
        self._is_closed = False
        self.door: Door | RelayDoor
        if isinstance(address, Meeting):
            self.door = RelayDoor(address, greet=self._greet)
            return
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        listening = socket.create_server(address, family=family, backlog=_BACKLOG)
        self.port: int = listening.getsockname()[1]
        self.door = Door(
            listening,
            label=tls.label,
            greet=self._greet,
            on_refused=on_refused,
            is_known=self.known.__contains__,
        )

    def close(self) -> None:
        """Accept nothing more."""
        with self._changed:
            self._is_closed = True
            for tls, _ in self.arrived.values():
                tls.close()
            self.arrived.clear()
        self.door.close()

    def connect(
        self,
        wanted: Hello,
        is_bulk: bool,
        timeout_s: float,
        wake: Callable[[], None],
        is_fixed: bool = False,
    ) -> Connected:
        key = (wanted.stream, wanted.connection)
        stream = wanted.stream
        here = stream.sender_cloud == self._cloud
        peer = stream.receiver_cloud if here else stream.sender_cloud
        with self._changed:
            self.awaited[key] = wake
            # Runs in the thread of one connection of a stream. It is woken by `_hand_over`, in the
            # thread that greets whoever dialled.
            self._changed.wait_for(
                lambda: key in self.arrived or peer in self._attempts.began_again, timeout_s
            )
            self._attempts.check(peer)
            if key not in self.arrived:
                trouble = "" if self.door.trouble is None else f"; {self.door.trouble}"
                raise LineDown(f"{peer} has not dialled{trouble}")
            tls, hello = self.arrived.pop(key)
        try:
            # Once pieces have crossed, what is under way is counted by connections.
            if is_fixed and wanted.of != hello.of:
                raise FrameError(f"{peer} wants {hello.of} connections for {stream}")
            tune(tls, is_bulk=is_bulk)
            tls.settimeout(HELLO_S)
            # This answer tells the dialler that both attempts know each other; it sends no piece
            # before.
            tls.sendall(encode_hello(wanted._replace(of=hello.of, known=hello.attempt)))
        except OSError as error:
            tls.close()
            raise LineDown(f"{peer}: {in_words(error)}") from None
        except BaseException:
            tls.close()
            raise
        return Connected(tls, hello.of, hello.expected)

    def has_come_again(self, wanted: Hello) -> bool:
        return (wanted.stream, wanted.connection) in self.arrived

    def leave(self, wanted: Hello) -> None:
        key = (wanted.stream, wanted.connection)
        with self._changed:
            self.awaited.pop(key, None)
            if (arrived := self.arrived.pop(key, None)) is not None:
                arrived[0].close()

    def _greet(self, plain: socket.socket, host: str) -> None:
        """Find out who has dialled, and what for."""
        try:
            tls, cloud = self._tls.accept(plain)
            # An address that a peer with a valid certificate came from gives way last in a crowd.
            # Bounded, as a peer may come from ever new addresses.
            if len(self.known) < _MAX_KNOWN:
                self.known.add(host)
            try:
                self._hand_over(tls, cloud=cloud)
            except BaseException:
                tls.close()
                raise
        except (LineDown, FrameError) as error:
            self._on_refused(f"{host}: {error}")
        except OSError as error:
            self._on_refused(f"{host}: {in_words(error)}")

    def _hand_over(self, tls: ssl.SSLSocket, cloud: str) -> None:
        hello = read_hello(tls, sender=cloud)
        if isinstance(hello, HelloRefusal):
            raise FrameError(f"{cloud} refuses what nobody asked")
        stream = hello.stream
        # The certificate says which cloud dials; the greeting must be of a line between that cloud
        # and this rank, or one owner could take the place of another.
        ends = [(stream.sender_cloud, stream.sender), (stream.receiver_cloud, stream.receiver)]
        if (self._cloud, self._rank) not in ends or cloud not in (ends[0][0], ends[1][0]):
            raise FrameError(
                f"{cloud} has dialled rank {self._rank} of {self._cloud} for {stream}"
            )
        key = (stream, hello.connection)
        with self._changed:
            # Under the lock, or a greeting that comes while this rank ends would leave a
            # connection open on which the other side waits as long as this process lives.
            if self._is_closed:
                raise LineDown(f"{cloud} has dialled rank {self._rank}, which has ended")
            reason = self._refusal_of(hello, cloud=cloud)
            if reason is None:
                # It was dialled before, so its dialler has given it up.
                if (earlier := self.arrived.pop(key, None)) is not None:
                    earlier[0].close()
                self.arrived[key] = (tls, hello)
                self._changed.notify_all()
                # Ends the wait of the thread that still uses the connection before.
                self.awaited[key]()
                return
        tls.settimeout(HELLO_S)
        tls.sendall(encode_refusal(reason))
        if reason is HelloRefusal.EARLIER_ATTEMPT:
            self.told.add(cloud)
        raise LineDown(f"{cloud} is refused for {stream}: {reason.name.lower()}")

    def _refusal_of(self, hello: Hello, cloud: str) -> HelloRefusal | None:
        if hello.run != self._run:
            return HelloRefusal.OTHER_RUN
        # It knows an attempt of this cloud that has ended. 0: it has heard of none yet.
        if hello.known not in (0, self._attempt):
            return HelloRefusal.EARLIER_ATTEMPT
        is_awaited = (hello.stream, hello.connection) in self.awaited
        # The attempt of a cloud becomes known by a greeting that this rank waits for, and by no
        # other.
        if not is_awaited and not self._attempts.known.get(cloud):
            return HelloRefusal.NOT_YET
        try:
            self._attempts.note(cloud, hello.attempt)
        except LinkClosed:
            self._changed.notify_all()
            return HelloRefusal.NOT_YET
        return None if is_awaited else HelloRefusal.NOT_YET


def num_connections(round_trip_s: float) -> int:
    """Return how many connections fill a fast line with this round trip."""
    needed = math.ceil(FAST_LINE * round_trip_s / ONE_STREAM_BYTES)
    return min(max(1, needed), MAX_CONNECTIONS)


def stream_bytes(limit_bytes: int) -> float:
    """Return what one connection carries in a round trip with this limit of its send buffer."""
    return limit_bytes / _USUAL_LIMIT * ONE_STREAM_BYTES


def tune(connection: socket.socket, is_bulk: bool) -> None:
    """Prepare a connection: nothing waits to be joined, and little waits unsent in the kernel. One
    that may fill the line gets BBR, where the kernel has it."""
    # Small pieces are joined by us (`_queue_pieces`).
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _NOT_SENT_BYTES)
    if is_bulk and hasattr(socket, "TCP_CONGESTION"):
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        except OSError:
            return  # this kernel has no BBR, and its own choice works
