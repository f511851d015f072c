"""Links of the line for tests: both ends in this process, and a proxy between them that cuts."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from tests.owners import keys_of
from xcloud.base.errors import LinkClosed
from xcloud.launch.relay import Bounds, Relay
from xcloud.line.connection import Stream
from xcloud.line.hello import StreamName
from xcloud.line.line_state import LineState
from xcloud.line.pinned_tls import PinnedTls
from xcloud.line.relayed import Meeting, rooms_of
from xcloud.line.stream_link import StreamInLink, StreamOutLink
from xcloud.line.ways import Dialler, Listener, Way
from xcloud.net.link_end import InSettings, OutSettings
from xcloud.net.link_profile import LinkWindow

RUN = bytes(range(16))
LABEL = "r4nd0m.example"


class Proxy:
    """Passes bytes on between whoever dials it and a port, until it is told to cut.

    change: may alter what goes to the port: is given (bytes so far, the next ones).
    cut_after: returns after how many bytes all connections are reset next.

    held_to: "port" or "dialler": what goes there waits, until it is reset.
    bytes_per_s: of each direction of the line; None: as many as come.
    longest_bytes: what follows so many of a connection and direction is dropped; None: nothing is.
    """

    def __init__(
        self,
        port: int,
        change: Callable[[int, bytes], Sequence[bytes]] | None = None,
        cut_after: Callable[[], int] | None = None,
    ) -> None:
        self._cut_after = cut_after
        self._left_bytes = cut_after() if cut_after else 0
        self.num_cuts = 0
        self.target = port
        self.held_to: str | None = None
        self.bytes_per_s: float | None = None
        self.longest_bytes: int | None = None
        self._carrying = {"port": threading.Lock(), "dialler": threading.Lock()}
        self._change = change
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self.is_silent = False
        self.refuses = False
        self.num_dialled = 0
        self.seen = bytearray()  # what went to the port, as it was on the line
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self) -> None:
        """Reset all connections."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for one in (one for pair in pairs for one in pair):
            with suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        self.refuses = True
        self._listening.close()
        self.reset()

    def _count(self, num_bytes: int) -> None:
        if self._cut_after is None:
            return
        with self._lock:
            self._left_bytes -= num_bytes
            is_cut = self._left_bytes < 0
            if is_cut:
                self.num_cuts += 1
                self._left_bytes = self._cut_after()
        if is_cut:
            self.reset()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                if self._listening.fileno() < 0:
                    return
                time.sleep(0.05)  # no descriptor is left
                continue
            self.num_dialled += 1
            if self.refuses:
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:  # nobody listens there yet, or any more
                near.close()
                continue
            with self._lock:
                self._pairs.append((near, far))
            threading.Thread(target=self._carry, args=(near, far), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        """Pass on what comes from both ends until both have ended, and close both."""
        back = threading.Thread(target=self._pass, args=(far, near, "dialler", None), daemon=True)
        with near, far:
            back.start()
            self._pass(near, target=far, to="port", change=self._change)
            back.join()

    def _pass(
        self,
        source: socket.socket,
        target: socket.socket,
        to: str,
        change: Callable[[int, bytes], Sequence[bytes]] | None,
    ) -> None:
        num_bytes = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                while self.is_silent or self.held_to == to:
                    time.sleep(0.01)
                    source.getpeername()  # OSError once it has been reset
                if (bytes_per_s := self.bytes_per_s) is not None:
                    with self._carrying[to]:
                        time.sleep(len(data) / bytes_per_s)
                pieces = [data] if change is None else change(num_bytes, data)
                num_bytes += len(data)
                if self.longest_bytes is not None and num_bytes > self.longest_bytes:
                    continue
                self._count(len(data))
                if len(self.seen) < 1 << 20:
                    self.seen += data
                for piece in pieces:
                    target.sendall(piece)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


class Ends(NamedTuple):
    """Both ends of a link from cloud_a, whose rank 0 listens, to cloud_b, whose rank 1 dials."""

    out: StreamOutLink
    incoming: StreamInLink
    listener: Listener
    state: LineState

    def close(self, timeout_s: float = 20.0) -> None:
        self.out.close(timeout_s)
        self.incoming.close(timeout_s)
        assert self.incoming.connections.join(10.0)


NAME = StreamName("forward 0", "cloud_a", sender=0, receiver_cloud="cloud_b", receiver=1)


def stream(
    way: Way, name: StreamName = NAME, state: LineState | None = None, **changed: object
) -> Stream:
    state = state or LineState("the other rank")
    settings = {"run": RUN, "attempt": 1, "first_within_s": 20.0, "reconnect_s": 20.0, **changed}
    return Stream(name, way=way, state=state, **settings)  # type: ignore[arg-type]


def listener(relay: int | None = None, **changed: object) -> Listener:
    """relay: the port of a relay on this machine at which it waits. None: at a port of its own."""
    settings = {"cloud": "cloud_a", "rank": 0, "run": RUN, "attempt": 1, **changed}
    keys = keys_of("cloud_a", ["cloud_b"])
    at: tuple[str, int] | Meeting = ("127.0.0.1", 0)
    if relay is not None:
        at = Meeting(("127.0.0.1", relay), rooms=rooms_of(keys, cloud="cloud_b", label=LABEL))
    return Listener(at, PinnedTls(keys, LABEL), **settings)  # type: ignore[arg-type]


class _Relay(Relay):
    """A relay that can be ended within its process."""

    def __init__(self, bounds: Bounds | None) -> None:
        super().__init__(bounds or Bounds())
        self.writers = set[asyncio.StreamWriter]()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        await super()._serve(reader, writer)
        self.writers.discard(writer)


@contextmanager
def relay_running(bounds: Bounds | None = None, port: int = 0) -> Iterator[int]:
    """Give the port of a relay that runs in a thread; its end resets all whom it serves."""
    loop = asyncio.new_event_loop()
    relay = _Relay(bounds)
    server = loop.run_until_complete(relay.listen("127.0.0.1", port))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def end() -> None:
        loop.remove_reader(server.sockets[0].fileno())
        await asyncio.sleep(0.01)  # who is half accepted when a server closes is never closed
        server.close()
        while asyncio.all_tasks() - {asyncio.current_task()}:
            for writer in relay.writers:
                writer.transport.abort()
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)  # sockets are closed a turn later

    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(10.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10.0)
        loop.close()


def dialler(port: int, me: str = "cloud_b", peer: str = "cloud_a") -> Dialler:
    return Dialler(("127.0.0.1", port), peer, PinnedTls(keys_of(me, [peer]), LABEL))


def stop(*ends: StreamOutLink | StreamInLink) -> None:
    """End links at once, whatever is under way."""
    for end in ends:
        end.connections.stop()
        if isinstance(end, StreamInLink):
            end.fail(LinkClosed("this rank has ended"))


@contextmanager
def linked(
    out_listens: bool = True,
    capacity_bytes: int = 1 << 21,
    window: LinkWindow | None = None,
    change: Callable[[int, bytes], Sequence[bytes]] | None = None,
    cut_after: Callable[[], int] | None = None,
    **changed: object,
) -> Iterator[tuple[Ends, Proxy]]:
    """Both ends of a link through a proxy.

    out_listens: whether the sending end's rank listens, and the receiving one's dials.
    """
    name = NAME
    if not out_listens:
        name = StreamName("forward 0", "cloud_b", sender=1, receiver_cloud="cloud_a", receiver=0)
    listens = listener()
    proxy = Proxy(listens.port, change, cut_after=cut_after)
    dials = dialler(proxy.port)
    ways: tuple[Way, Way] = (listens, dials) if out_listens else (dials, listens)
    settings = {"window": window or LinkWindow(), "capacity_bytes": capacity_bytes}
    state = LineState("the other rank")
    out = StreamOutLink(
        stream(ways[0], name, state=state, **changed),
        OutSettings("receiver", **settings),  # type: ignore[arg-type]
    )
    incoming = StreamInLink(
        stream(ways[1], name, **changed),
        InSettings("sender", **settings),  # type: ignore[arg-type]
    )
    try:
        yield Ends(out, incoming, listens, state), proxy
    finally:
        proxy.close()
        listens.close()
        stop(out, incoming)
