"""`python -m xcloud relay`: a relay for owners who can open no port. Both dial it, and it passes
bytes on between the two (line/relayed.py).

It is blind: what passes is TLS between the two owners. It sees addresses, sizes and times, and
keeps nothing. Whoever reaches it may use it, so all is bounded: connections, those of one address,
and the bytes, seconds and silence of each.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import resource
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from xcloud.base.errors import ConfigError
from xcloud.base.terminal import OnceAMinute, say
from xcloud.base.units import human_bytes
from xcloud.layout import host_and_port
from xcloud.line.pinned_tls import in_words
from xcloud.line.relayed import MAGIC, MET, RECORD, REFUSED, SAYS_EVERY_S, WAITING, Side

RECORD_S = 5.0
SILENT_S = 1.0
"""How long who has dialled may say no room before it makes room for others: an owner's rank says
it at once."""
_READ_BYTES = 1 << 16
_OWN_FILES = 64


@dataclass(frozen=True)
class Bounds:
    """The limits of a relay.

    connections: number of all connections.
    per_address: number of connections of one address (IPv6: of one /64).
    wait_s: seconds that one may wait for another.
    silence_s: seconds in which nothing passes, after which two are parted.
    pair_s, pair_bytes: seconds and bytes after which two are parted. A line then dials again.
    """

    connections: int = 2048
    per_address: int = 512
    wait_s: float = 600.0
    silence_s: float = 120.0
    pair_s: float = 24 * 3600.0
    pair_bytes: float = 1e12


@dataclass(eq=False)
class _RelayedCaller:
    """Somebody who has dialled.

    crowd: the address from which it comes.
    since_s: the moment at which it came.
    room: the room in which it waits, and whether on the side of those who dial.
    met: gets who came to the other side of the room.
    parted: is set once nothing passes any more.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    crowd: str
    since_s: float = field(default_factory=time.monotonic)
    room: tuple[bytes, bool] | None = None
    met: asyncio.Future[_RelayedCaller] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    parted: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self) -> None:
        self.writer.transport.abort()


@dataclass(eq=False)
class Relay:
    """A relay, until it is cancelled."""

    bounds: Bounds = field(default_factory=Bounds)
    _crowds: Counter[str] = field(default_factory=Counter)
    # The oldest first, here and in each room.
    _silent: dict[_RelayedCaller, None] = field(default_factory=dict)
    _rooms: dict[tuple[bytes, bool], dict[_RelayedCaller, Side]] = field(default_factory=dict)
    _say: OnceAMinute = field(
        default_factory=lambda: OnceAMinute(lambda text: say(text, error=True))
    )

    async def listen(self, host: str, port: int) -> asyncio.Server:
        return await asyncio.start_server(
            self._serve, host=host or None, port=port, limit=_READ_BYTES, backlog=128
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = _RelayedCaller(reader, writer, crowd=crowd_of(writer.get_extra_info("peername")))
        self._crowds[caller.crowd] += 1
        try:
            if self._is_full(caller.crowd):
                writer.write(REFUSED)
                await asyncio.wait_for(writer.drain(), RECORD_S)
                return
            await self._meet(caller)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            caller.end()  # the last where the relay itself ends
        finally:
            self._crowds[caller.crowd] -= 1
            self._crowds += Counter()  # forgets who has none
            writer.close()

    def _is_full(self, crowd: str) -> bool:
        if self._crowds[crowd] > self.bounds.per_address:
            most = self.bounds.per_address
            self._say(f"refused: {crowd} has {most} connections", reason="address")
            return True
        if self._crowds.total() <= self.bounds.connections:
            return False
        # Who has said no room for a second makes room, else the oldest of the largest crowd that
        # says nothing or waits; who is served stays.
        waiting = [one for room in self._rooms.values() for one in room]
        if not (self._silent or waiting):
            self._say(f"refused: there are {self.bounds.connections} connections")
            return True
        late_s = time.monotonic() - SILENT_S
        oldest = max(
            [*self._silent, *waiting],
            key=lambda one: (
                one in self._silent and one.since_s < late_s,
                self._crowds[one.crowd],
            ),
        )
        self._silent.pop(oldest, None)
        self._forget(oldest)
        oldest.end()
        return False

    async def _meet(self, caller: _RelayedCaller) -> None:
        """Find out for which room somebody came, and pass on what those in it say."""
        # Nobody proves to a relay that they may use it: who says no room in time is closed.
        self._silent[caller] = None
        try:
            async with asyncio.timeout(RECORD_S):
                magic, number, room = RECORD.unpack(await caller.reader.readexactly(RECORD.size))
        finally:
            self._silent.pop(caller, None)
        if magic != MAGIC or number not in [*Side]:
            return
        side = Side(number)
        here = (room, side is Side.DIALS)
        others = self._rooms.get((room, side is not Side.DIALS), {})
        mates = self._rooms.get(here, {}).values()
        # The room of an invitation takes one who waits: a stranger may not wait there, too.
        if mates and Side.ALONE in (side, *mates):
            caller.writer.write(REFUSED)
        elif others:
            # A rank waits with several connections, as each of them serves one that dials.
            other = next(iter(others))
            self._forget(other)
            other.met.set_result(caller)
            await caller.parted.wait()
        else:
            caller.room = here
            self._rooms.setdefault(here, {})[caller] = side
            try:
                await self._wait(caller)
            finally:
                self._forget(caller)

    def _forget(self, caller: _RelayedCaller) -> None:
        if caller.room is None:
            return
        room = self._rooms[caller.room]
        del room[caller]
        if not room:
            del self._rooms[caller.room]
        caller.room = None

    async def _wait(self, caller: _RelayedCaller) -> None:
        """Wait for somebody to come to the other side, then serve both."""
        until_s = time.monotonic() + self.bounds.wait_s
        gone = asyncio.ensure_future(caller.reader.read(1))  # who waits has nothing to say
        while not caller.met.done() and not gone.done():
            # Who hears nothing for a while takes the relay for gone.
            caller.writer.write(WAITING)
            pause_s = min(SAYS_EVERY_S, until_s - time.monotonic())
            if pause_s <= 0:
                break
            either: set[asyncio.Future[Any]] = {gone, caller.met}
            await asyncio.wait(either, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        has_gone = gone.done()
        gone.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await gone
        if not caller.met.done():
            return
        other = caller.met.result()
        try:
            if not has_gone and await self._carry(caller, other):
                async with asyncio.timeout(RECORD_S):  # for what is still to be sent
                    for one in (caller, other):
                        one.writer.close()
                        await one.writer.wait_closed()
        finally:
            caller.end()
            other.end()
            other.parted.set()

    async def _carry(self, one: _RelayedCaller, other: _RelayedCaller) -> bool:
        """Pass bytes on in both directions. Return True once both sides have ended, False where
        one breaks or a bound is reached."""
        loop = asyncio.get_running_loop()
        ends_at_s = loop.time() + self.bounds.pair_s
        left_bytes = self.bounds.pair_bytes

        async def carry(source: _RelayedCaller, to: _RelayedCaller) -> None:
            nonlocal left_bytes
            while data := await source.reader.read(_READ_BYTES):
                left_bytes -= len(data)
                if left_bytes < 0:
                    raise TimeoutError
                # Silence is counted from each piece on, the time of the pair from its beginning.
                limit.reschedule(min(ends_at_s, loop.time() + self.bounds.silence_s))
                to.writer.write(data)
                await to.writer.drain()
            to.writer.write_eof()

        one.writer.write(MET)
        other.writer.write(MET)
        try:
            async with (
                asyncio.timeout(min(self.bounds.pair_s, self.bounds.silence_s)) as limit,
                asyncio.TaskGroup() as both,
            ):
                both.create_task(carry(one, other))
                both.create_task(carry(other, one))
        except (ExceptionGroup, TimeoutError):  # a direction that breaks ends both
            return False
        return True


def crowd_of(peer: tuple[str, int]) -> str:
    """Return the address that one owner has: of IPv6 the network, which has 2^64 of them."""
    address = ipaddress.ip_address(peer[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)


async def _serve_for_ever(host: str, port: int, bounds: Bounds) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most < bounds.connections + _OWN_FILES:
        raise ConfigError(
            f"--connections is {bounds.connections}, and this process may open {most} files: give "
            f"at most {most - _OWN_FILES}, or raise the limit (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # often 1,024 at first
    server = await Relay(bounds).listen(host, port)
    say(
        f"relay at port {server.sockets[0].getsockname()[1]}: {bounds.connections} connections, "
        f"{bounds.per_address} of one address, {human_bytes(bounds.pair_bytes)} a pair; both "
        "owners set cluster.relay to this machine's address and this port. Ctrl+C ends it"
    )
    await asyncio.get_running_loop().create_future()  # no wait for those who are served at the end


def main(words: Sequence[str]) -> None:
    """Carry sealed lines between owners who both dial this machine. It sees sizes and times, and
    keeps nothing."""
    own = Bounds()
    parser = argparse.ArgumentParser("python -m xcloud relay", description=main.__doc__)
    parser.add_argument(
        "--listen", metavar="HOST:PORT", default=":7100",
        help="where to listen (default: port 7100 of every interface)",
    )  # fmt: skip
    parser.add_argument(
        "--connections", type=int, default=own.connections, help=f"default: {own.connections}"
    )
    parser.add_argument(
        "--per-address", type=int, default=own.per_address, help=f"default: {own.per_address}"
    )
    parser.add_argument(
        "--gb", type=float, default=own.pair_bytes / 1e9,
        help="GB after which a pair is closed; its line dials again "
        f"(default: {own.pair_bytes / 1e9:g})",
    )  # fmt: skip
    given = parser.parse_args(words)
    is_anywhere = given.listen.startswith(":")
    try:
        host, port = host_and_port(f"any{given.listen}" if is_anywhere else given.listen)
    except ValueError:
        raise ConfigError(f"--listen must be HOST:PORT or :PORT, got {given.listen}") from None
    if given.connections < 2 or given.per_address < 1 or given.gb <= 0:
        raise ConfigError("--connections must be at least 2, --per-address 1, --gb above 0")
    bounds = Bounds(given.connections, per_address=given.per_address, pair_bytes=1e9 * given.gb)
    try:
        asyncio.run(_serve_for_ever("" if is_anywhere else host, port, bounds))
    except OSError as error:
        raise ConfigError(f"cannot listen at {given.listen}: {in_words(error)}") from None
