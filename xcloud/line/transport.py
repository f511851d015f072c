"""How a rank reaches all others where clouds have several owners: over gloo inside its cloud, over
sealed streams elsewhere.

Each cloud is a world of its own: no store, process group or collective of torch spans two owners.
What ranks tell rank 0 before they have links goes over sealed streams too (`SealedWords`).
"""

from __future__ import annotations

import errno
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property, partial
from itertools import chain
from typing import Protocol

import torch

from xcloud.base.errors import ConfigError, LinkError
from xcloud.base.terminal import OnceAMinute
from xcloud.line.connection import Stream
from xcloud.line.door import CROWDED
from xcloud.line.hello import Hello, StreamName
from xcloud.line.keys import LineKeys
from xcloud.line.line_state import LineState
from xcloud.line.pinned_tls import PinnedTls
from xcloud.line.relayed import Meeting, rooms_of
from xcloud.line.stream_link import LINGER_S, StreamInLink, StreamOutLink
from xcloud.line.ways import Dialler, KnownAttempts, Listener, Way
from xcloud.net.frame import Kind, MessageKey
from xcloud.net.gloo_link import GlooTransport
from xcloud.net.link_end import InSettings, OutSettings, ReceivingEnd, SendingEnd, ignore
from xcloud.net.link_profile import LinkWindow
from xcloud.net.peer import Peer
from xcloud.net.rendezvous import FOREVER
from xcloud.net.transport import CPU, Collectives, Rendezvous, Transport
from xcloud.net.words import (
    WORD_BYTES,
    ControlMessage,
    WordLine,
    Words,
    decode,
    encode,
    joined_over_gloo,
    words_of,
)

_WORD_CAPACITY_BYTES = WORD_BYTES + 4096
_CLOSE_WORDS_S = 60.0
_ABANDON_S = 0.5
_TELL_WITHIN_S = 2.0
_PORT_FREE_WITHIN_S = 4.0
"""A rank that restarts finds its port taken while its launcher reports the restart there."""
_CROWD = 1000
"""How many connections that say nothing are turned away before it is spoken of."""


@dataclass(frozen=True)
class SealedPlace:
    """The position of one rank among the clouds of several owners.

    run: 16 bytes that are the same in all clouds of a run.
    attempt: a number of this beginning of this cloud.
    cloud_of: returns the cloud of a rank.
    address_of: returns host and port at which a rank of a cloud that has an address is dialled.
    listens_at: host and port at which this rank listens; None where its cloud has no address.
    listener_of: returns which of two clouds listens.
    first_within_s: seconds to wait for a rank that has not come.
    reconnect_s: seconds that a line may be down later.
    relay: host and port at which ranks of two clouds meet that both have no address.
    """

    rank: int
    num_ranks: int
    run: bytes
    attempt: int
    cloud_of: Callable[[int], str]
    address_of: Callable[[int], tuple[str, int] | None]
    listener_of: Callable[[str, str], str]
    listens_at: tuple[str, int] | None
    first_within_s: float
    reconnect_s: float
    relay: tuple[str, int] | None = None

    @property
    def cloud(self) -> str:
        return self.cloud_of(self.rank)

    @property
    def mates(self) -> list[int]:
        """The ranks of this cloud, in order."""
        return [rank for rank in range(self.num_ranks) if self.cloud_of(rank) == self.cloud]

    def is_mate(self, peer: int) -> bool:
        return self.cloud_of(peer) == self.cloud

    def label_of(self, rank: int) -> str:
        """Return the name in the clear by which an ingress finds a rank that listens."""
        # A digest, since SNI is read by everybody on the way. Without the run nobody can tell it,
        # so it keeps strangers out of the handshake, too (door.py).
        return hashlib.sha256(self.run + b"label" + rank.to_bytes(4, "little")).hexdigest()[:32]


class OwnersLines(Protocol):
    """The lines from one rank to ranks of other owners' clouds: sealed, or through a mailbox."""

    place: SealedPlace
    words: list[SealedWordLine]
    """The lines of words. They are closed after all other links."""

    @property
    def texts(self) -> Sequence[str]: ...
    def out(self, line: str, peer: int, settings: OutSettings) -> SendingEnd: ...
    def incoming(self, line: str, peer: int, settings: InSettings) -> ReceivingEnd: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...


class SealedLines:
    """The lines of one rank to ranks of other clouds.

    say: called with messages about lines that are down or back, and about peers that dial and are
        refused.
    on_lost: see Stream.

    Raises ConfigError where this rank cannot listen, or has no certificate of a cloud to which it
    has a line.
    """

    def __init__(
        self,
        place: SealedPlace,
        keys: LineKeys,
        say: Callable[[str], object],
        on_lost: Callable[[LinkError], object] = ignore,
    ) -> None:
        self.place = place
        self._keys = keys
        self._say = say
        self._on_lost = on_lost
        self.attempts = KnownAttempts()
        self.way_to = cache(self._made_way)  # to a rank, the same one for all links to it
        self.states: dict[int, LineState] = {}  # of the line to each rank
        self.outs: list[StreamOutLink] = []  # all that were made, as are `ins`
        self.ins: list[StreamInLink] = []
        self.words: list[SealedWordLine] = []
        self.say_refused = OnceAMinute(say)
        self.num_crowded = 0
        self.listener = self._listen()

    @property
    def texts(self) -> list[str]:
        """The lines that are down, in words."""
        return [text for state in list(self.states.values()) if (text := state.text) is not None]

    def out(self, line: str, peer: int, settings: OutSettings) -> StreamOutLink:
        """Return the sending end of a line to a rank of another cloud."""
        out = StreamOutLink(
            stream=self._stream(line, sender=self.place.rank, receiver=peer), settings=settings
        )
        self.outs.append(out)
        return out

    def incoming(self, line: str, peer: int, settings: InSettings) -> StreamInLink:
        """Return the receiving end of a line from a rank of another cloud."""
        incoming = StreamInLink(
            stream=self._stream(line, sender=peer, receiver=self.place.rank), settings=settings
        )
        self.ins.append(incoming)
        return incoming

    def close(self) -> None:
        """Close the lines of words, and wait until the peers know that all they sent has come.

        Called once all other links are closed.
        """
        # Last of all: rank 0 may still be waiting for a report over these.
        for line in self.words:
            line.close()
        until_s = time.monotonic() + LINGER_S
        for link in self.ins:
            # A sender whose last acknowledgement was lost dials again to ask for it. If this
            # process were gone by then, that rank would take a finished run for a lost one.
            link.connections.join(max(0.0, until_s - time.monotonic()))

    def abandon(self) -> None:
        """Report to the peers, as far as they can be reached, that this rank has ended early."""
        for out in self.outs:
            # So the peers need not wait for silence; a line that is down learns nothing and waits.
            out.abandon()
        until_s = time.monotonic() + _ABANDON_S
        # The threads write END. This process is about to exit and would take them with it.
        while time.monotonic() < until_s and not all(out.over.is_set() for out in self.outs):
            time.sleep(0.02)

    def tell_of_restart(self, peers: Sequence[int]) -> None:
        """Report to the clouds of these ranks that this cloud restarts. So they can restart
        without waiting for its new ranks.

        A rank that listens is dialled once. A cloud that dials gets the report when it next does;
        this waits a moment for that. A cloud that is not reached learns it from the new ranks.
        """
        awaited = set[str]()
        for peer in peers:
            way = self.way_to(peer)
            if way is self.listener:
                awaited.add(self.place.cloud_of(peer))
                continue
            notice = self._stream("restart", sender=self.place.rank, receiver=peer).hello()
            # The greeting names this cloud's new attempt, whatever its stream: the other end
            # refuses what it does not wait for, and knows by it that this cloud begins again. From
            # a kill to the start of the other cloud's ranks it takes 0.5 s so, and took 8 s when
            # the new rank had to say it.
            threading.Thread(target=dial_once, args=(way, notice), daemon=True).start()
        if self.listener is None:
            return
        until_s = time.monotonic() + _TELL_WITHIN_S
        while not awaited <= self.listener.told and time.monotonic() < until_s:
            time.sleep(0.02)
        # The port must be free for the rank that is started next.
        self.listener.close()

    def _stream(self, line: str, sender: int, receiver: int) -> Stream:
        place = self.place
        peer = receiver if sender == place.rank else sender
        if peer not in self.states:
            peer_name = f"rank {peer} of {place.cloud_of(peer)}"
            self.states[peer] = LineState(peer_name, say=self._say)
        name = StreamName(
            line,
            place.cloud_of(sender),
            sender=sender,
            receiver_cloud=place.cloud_of(receiver),
            receiver=receiver,
        )
        return Stream(
            name=name,
            run=place.run,
            attempt=place.attempt,
            way=self.way_to(peer),
            state=self.states[peer],
            first_within_s=place.first_within_s,
            reconnect_s=place.reconnect_s,
            on_lost=self._on_lost,
        )

    def _made_way(self, peer: int) -> Way:
        place = self.place
        there = place.cloud_of(peer)
        if there not in self._keys.peers:
            raise ConfigError(
                f"there is a line to cloud {there!r}, and `peers` in the policy of this cloud "
                f"names no certificate of it: ask its owner for {there}.pem"
            )
        if place.listener_of(place.cloud, there) == place.cloud:
            assert self.listener is not None, "a cloud that listens has an address"
            return self.listener
        label = place.label_of(peer)
        # Of two clouds without an address both dial the relay, and there one waits for the other.
        address: tuple[str, int] | Meeting | None = place.address_of(peer)
        if address is None:
            assert place.relay is not None, "the layout has been checked"
            rooms = rooms_of(self._keys, cloud=there, label=label)
            address = Meeting(place.relay, rooms=rooms)
        tls = PinnedTls(keys=self._keys, label=label)
        return Dialler(address=address, cloud=there, tls=tls, attempts=self.attempts)

    def _listen(self) -> Listener | None:
        place = self.place
        label = place.label_of(place.rank)
        others = {place.cloud_of(peer) for peer in range(place.num_ranks)} - {place.cloud}
        dial_here = {o for o in others if place.listener_of(place.cloud, o) == place.cloud}
        if not dial_here or (place.listens_at is None and place.relay is None):
            return None
        # The listener of a rank is one for all its streams, so one port a rank has to be opened.
        listen = partial(
            Listener,
            tls=PinnedTls(keys=self._keys, label=label),
            cloud=place.cloud,
            rank=place.rank,
            run=place.run,
            attempt=place.attempt,
            on_refused=self.note_refused,
            attempts=self.attempts,
        )
        if place.listens_at is None:
            assert place.relay is not None, "it listens nowhere else"
            known = [cloud for cloud in sorted(dial_here) if cloud in self._keys.peers]
            # A room for each cloud and each certificate of it. A cloud that has no certificate
            # here is named when the first line to it is made.
            rooms = [rooms_of(self._keys, cloud=cloud, label=label) for cloud in known]
            return listen(Meeting(place.relay, rooms=tuple(chain.from_iterable(rooms))))
        host, port = place.listens_at
        until_s = time.monotonic() + _PORT_FREE_WITHIN_S
        while True:
            try:
                return listen((host, port))
            except OSError as error:
                is_elsewhere = error.errno == errno.EADDRNOTAVAIL
                if host and (is_elsewhere or isinstance(error, socket.gaierror)):
                    host = ""  # whatever has that address passes connections on to this machine
                # The launcher of this cloud holds the port for a moment after a restart
                # (`tell_of_restart`).
                elif error.errno == errno.EADDRINUSE and time.monotonic() < until_s:
                    time.sleep(0.05)
                else:
                    raise ConfigError(
                        f"rank {place.rank} of cloud {place.cloud} cannot listen at port {port} "
                        f"(cluster.clouds.{place.cloud}.address): {error.strerror or error}"
                    ) from None

    def note_refused(self, reason: str) -> None:
        """Say why somebody was refused, a reason at most once a minute."""
        if CROWDED in reason:
            self.num_crowded += 1
            if self.num_crowded % _CROWD:
                return  # whoever looks for open ports says nothing either
        if "not_yet" not in reason:
            self.say_refused(f"refused: {reason}")


def dial_once(way: Way, hello: Hello) -> None:
    """Dial for a link that nobody awaits: what counts is the greeting."""
    with suppress(LinkError):
        way.connect(hello, is_bulk=False, timeout_s=0.0, wake=ignore)


class SealedWordLine:
    """A line of words between rank 0 and a rank of another cloud."""

    def __init__(self, lines: OwnersLines, peer: int) -> None:
        place = lines.place
        name = f"rank {peer} of cloud {place.cloud_of(peer)!r}"
        settings = (name, _WORD_CAPACITY_BYTES, LinkWindow())
        watched = Peer()
        self._out = lines.out("words", peer, OutSettings(*settings, peer=watched))
        self._incoming = lines.incoming("words", peer, InSettings(*settings, peer=watched))
        self._peer_name = name

    def send(self, message: ControlMessage) -> None:
        self._out.send(_WORD, (encode(message),), ("a word before the first step, as text",))

    def receive(self, within: timedelta = FOREVER) -> ControlMessage:
        (part,) = self._incoming.recv(_WORD, overdue_s=within.total_seconds())
        return decode(part, self._peer_name)

    def close(self) -> None:
        with suppress(LinkError):
            self._out.close(_CLOSE_WORDS_S)


_WORD = MessageKey(Kind.WORD)


@dataclass(frozen=True)
class SealedRendezvous(Rendezvous):
    """The rendezvous of a rank whose cloud has another owner than others.

    store: the store that the ranks of its own cloud share.
    """

    lines: OwnersLines | None = None

    @cached_property
    def words(self) -> Words:
        return words_of(
            self.store,
            rank=self.rank,
            num_ranks=self.num_ranks,
            within_s=self.within_s,
            # Within an attempt a rank begins once: whoever restarts makes a new one with all
            # others.
            beginning=None,
            join=self._join,
        )

    def _join(self, rank: int, beginning: int, within_s: float) -> WordLine:
        """Join the line of words between rank 0 and another rank, of which this is one."""
        assert self.lines is not None, "a sealed rendezvous has lines"
        peer = 0 if self.rank else rank
        if self.lines.place.is_mate(peer):
            return joined_over_gloo(
                self.store,
                is_first=self.rank == 0,
                rank=rank,
                beginning=beginning,
                within_s=within_s,
            )
        line = SealedWordLine(lines=self.lines, peer=peer)
        self.lines.words.append(line)
        return line


class SealedTransport(Transport):
    """The transport where clouds have several owners."""

    def __init__(self, rendezvous: SealedRendezvous) -> None:
        super().__init__(rendezvous)
        assert rendezvous.lines is not None
        self.lines = rendezvous.lines
        # No world of torch spans two owners: whoever is in one can reach every rank of it
        # unsealed.
        self._inside = GlooTransport(rendezvous=rendezvous, world=self.lines.place.mates)

    def out(self, line: str, peer: int, settings: OutSettings) -> SendingEnd:
        if self.lines.place.is_mate(peer):
            return self._inside.out(line, peer, settings)
        return self.lines.out(line, peer, settings)

    def incoming(self, line: str, peer: int, settings: InSettings) -> ReceivingEnd:
        if self.lines.place.is_mate(peer):
            return self._inside.incoming(line, peer, settings)
        return self.lines.incoming(line, peer, settings)

    def group(self, ranks: Sequence[int], device: torch.device = CPU) -> Collectives | None:
        mates = [self.lines.place.is_mate(rank) for rank in ranks]
        assert all(mates) or not any(mates), "no collective spans two owners"
        return self._inside.group(ranks, device=device) if all(mates) else None
