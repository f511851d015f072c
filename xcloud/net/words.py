"""Control messages before ranks have links: short texts by name, which ranks send to rank 0 and
rank 0 sends to all. They say what a rank runs, whether it may continue, and what it has loaded.

A text comes over a line between its rank and rank 0, over gloo or sealed (line/transport.py). So
no rank can send it in another's name, and its length is bounded. Rank 0 keeps the texts that it
receives. It answers every rank that asks for rank 0's own, also later (if ranks may start at any
time). In one process the store itself carries them.

A message, in a vector of bytes: kind uint8, length of the name uint8, length of the text uint32,
all little-endian, then both in UTF-8.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from xcloud.base.errors import FrameError, LinkClosed, LinkError, LinkTimeout
from xcloud.net.gloo_pair import GlooPair
from xcloud.net.rendezvous import FOREVER, count_of

MAX_NAME_BYTES = 64
MAX_TEXT_BYTES = 1 << 18
MAX_WORDS = 32  # of one rank in one attempt
_HEAD = struct.Struct("<BBI")
WORD_BYTES = _HEAD.size + MAX_NAME_BYTES + MAX_TEXT_BYTES
LEAVE_WITHIN_S = 5.0
_LOOK_EVERY_S = 0.2
_GREET_WITHIN_S = 60.0  # a rank that begins joins its line at once


class Words(Protocol):
    """The texts that one rank and rank 0 send each other."""

    def send_text(self, name: str, text: str) -> None:
        """Send a text to rank 0. Rank 0 sends it to all."""

    def receive_text(self, name: str, rank: int) -> str:
        """Wait for a text and return it. Rank 0 gets the one that `rank` sends, and other ranks
        get the one that rank 0 or they themselves send."""

    def wait_for_leaving(self) -> None:
        """In rank 0, wait until the ranks that have joined are gone, for LEAVE_WITHIN_S at most.
        They end once they have received the reason. Other ranks do not wait."""
        return


class WordLine(Protocol):
    """A line of words between rank 0 and another rank.

    Both methods raise RuntimeError or a LinkError once the other side is gone.
    """

    def send(self, message: ControlMessage) -> None: ...
    def receive(self, within: timedelta = FOREVER) -> ControlMessage: ...


JoinLine = Callable[[int, int, float], WordLine]
"""Joins the line between rank 0 and another rank, for (that rank, how often it has begun, how long
the other side is waited for). Called in both of them."""


def words_of(
    store: Store,
    rank: int,
    num_ranks: int,
    within_s: float,
    beginning: int | None,
    join: JoinLine | None = None,
) -> Words:
    """Return the control messages of a rank that has come to a store.

    beginning: number of starts of this rank, if ranks may start at any time; otherwise None.
    join: joins the line to a rank. None: over gloo or, in one process, in the store itself.
    """
    if join is None:
        if isinstance(store, HashStore):
            return WordsInOneProcess(store, rank, within_s)
        join = partial(joined_over_gloo, store, rank == 0)
    if rank != 0:
        own = partial(join, rank, beginning or 1, within_s)
        return WordsToFirst(join=own, rank=rank, within_s=within_s)
    return WordsOfFirst(store, num_ranks, join, within_s, is_open=beginning is not None)


def joined_over_gloo(
    store: Store, is_first: bool, rank: int, beginning: int, within_s: float
) -> WordLine:
    """Join the line of a rank's control messages over gloo. is_first: True for rank 0's end."""
    pair = line_of(store, rank=rank, beginning=beginning, is_first=is_first, within_s=within_s)
    return JoinedLine(pair, peer=rank if is_first else 0)


def line_of(store: Store, rank: int, beginning: int, is_first: bool, within_s: float) -> GlooPair:
    """Return the line between rank 0 and this beginning of another rank, not joined yet.

    is_first: True for rank 0's end.
    within_s: seconds to wait for the other side.
    """
    own = PrefixStore(f"words {rank}.{beginning}", store)
    within = timedelta(seconds=within_s)
    return GlooPair(
        store=own, line="life", ranks=f"0-{rank}", place=0 if is_first else 1, join_within=within
    )


class WordKind(IntEnum):
    """The purpose of a message between a rank and rank 0."""

    TELL = 1  # to rank 0
    ASK = 2  # rank 0 for its own text of this name
    ANSWER = 3


class ControlMessage(NamedTuple):
    """A message between a rank and rank 0. text: empty in a question."""

    kind: WordKind
    name: str
    text: str = ""


def encode(message: ControlMessage) -> torch.Tensor:
    """Return a message as uint8 [N]. Raises ValueError for a text that is too long."""
    name = message.name.encode()
    text = message.text.encode()
    assert len(name) <= MAX_NAME_BYTES, message.name
    if len(text) > MAX_TEXT_BYTES:
        raise ValueError(f"{message.name} takes {len(text):,} bytes (at most {MAX_TEXT_BYTES:,})")
    data = _HEAD.pack(message.kind, len(name), len(text)) + name + text
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode(buffer: torch.Tensor, sender: str) -> ControlMessage:
    """Return the message in a buffer, which may be longer.

    Raises FrameError for anything but what `encode` makes.
    """
    data = buffer.numpy().tobytes()
    if len(data) < _HEAD.size:
        raise FrameError(f"{sender} sent no control message, in {len(data)} bytes")
    kind, name_bytes, text_bytes = _HEAD.unpack_from(data)
    until = _HEAD.size + name_bytes + text_bytes
    # The buffer may be longer than the text: over gloo a receive has room for the longest.
    if kind not in [*WordKind] or not 0 < name_bytes <= MAX_NAME_BYTES or until > len(data):
        raise FrameError(
            f"{sender} sent no control message: kind {kind}, {name_bytes} and {text_bytes} bytes"
        )
    try:
        name = data[_HEAD.size : _HEAD.size + name_bytes].decode()
        text = data[_HEAD.size + name_bytes : until].decode()
    except UnicodeDecodeError:
        raise FrameError(f"{sender} sent a control message that is no UTF-8") from None
    if not name.isprintable():
        raise FrameError(f"{sender} sent a control message whose name cannot be printed")
    return ControlMessage(WordKind(kind), name, text)


class JoinedLine:
    """A line that has been joined. Raises RuntimeError once the other side is gone."""

    def __init__(self, pair: GlooPair, peer: int) -> None:
        self._pair = pair
        self._peer = peer
        pair.join()

    def send(self, message: ControlMessage) -> None:
        self._pair.isend(encode(message), 0).wait()

    def receive(self, within: timedelta = FOREVER) -> ControlMessage:
        buffer = torch.zeros(WORD_BYTES, dtype=torch.uint8)
        self._pair.irecv(buffer, tag=0).wait(within)
        return decode(buffer, f"rank {self._peer}")


@dataclass(eq=False)
class WordsToFirst(Words):
    """The words of any rank but the first."""

    join: Callable[[], WordLine]
    rank: int
    within_s: float
    _line: WordLine | None = None
    _own: dict[str, str] = field(default_factory=dict)

    def send_text(self, name: str, text: str) -> None:
        self._own[name] = text
        self._carried(lambda line: line.send(ControlMessage(WordKind.TELL, name, text)), name=name)

    def receive_text(self, name: str, rank: int) -> str:
        if rank == self.rank:
            return self._own[name]
        assert rank == 0, "ranks receive texts of each other from rank 0"

        def ask(line: WordLine) -> str:
            line.send(ControlMessage(WordKind.ASK, name))
            answer = line.receive(timedelta(seconds=self.within_s))
            if answer.kind is not WordKind.ANSWER or answer.name != name:
                raise FrameError(f"rank 0 answered {answer.name!r:.80} when asked for {name!r}")
            return answer.text

        return self._carried(ask, name=name)

    def _carried(self, call: Callable[[WordLine], str | None], name: str) -> str:
        try:
            # At the first message, so that a rank which has nothing to say waits for nobody.
            if self._line is None:
                self._line = self.join()
            return call(self._line) or ""
        except RuntimeError as error:
            if any(sign in str(error).lower() for sign in ("timed out", "timeout")):
                raise LinkTimeout(
                    f"rank 0 has not come in {self.within_s:g} s (cluster.liveness.join_within_s)"
                ) from None
            raise LinkClosed(f"rank 0 ended while this rank waited for its {name!r}") from None


class WordsOfFirst(Words):
    """The control messages of rank 0: the texts of all ranks, its own too, by rank and name."""

    def __init__(
        self, store: Store, num_ranks: int, join: JoinLine, within_s: float, is_open: bool
    ) -> None:
        self._store = store
        self._join = join
        self._within_s = within_s
        self._is_open = is_open
        self._told: dict[tuple[int, str], str] = {}
        self.ended: dict[int, LinkError] = {}
        self._changed = threading.Condition()
        self._greeted = dict.fromkeys(range(1, num_ranks), 0)  # beginnings that have joined
        if is_open:
            threading.Thread(target=self._greet, name="greeting", daemon=True).start()
            return
        for rank in self._greeted:
            self.start_joining(rank, 1, within_s)

    def send_text(self, name: str, text: str) -> None:
        with self._changed:
            self._told[0, name] = text
            self._changed.notify_all()

    def receive_text(self, name: str, rank: int) -> str:
        key = (rank, name)
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: key in self._told or rank in self.ended, self._within_s
            )
            if key in self._told:
                return self._told[key]
            if is_there:
                raise self.ended[rank]
        raise LinkTimeout(
            f"rank {rank} has not come in {self._within_s:g} s (cluster.liveness.join_within_s)"
        )

    def wait_for_leaving(self) -> None:
        with self._changed:
            joined = {rank for rank, beginning in self._greeted.items() if beginning}
            self._changed.wait_for(lambda: joined <= self.ended.keys(), LEAVE_WITHIN_S)

    def _greet(self) -> None:
        """Look for ranks that begin, also again. One line to a rank is awaited at a time."""
        store = self._store.clone()  # type: ignore[attr-defined]
        awaited: dict[int, threading.Thread] = {}
        while True:
            for rank, before in list(self._greeted.items()):
                try:
                    beginning = count_of(store, name=f"beginnings.{rank}")
                except RuntimeError:
                    return
                # A rank that has died while its line was joined is awaited until _GREET_WITHIN_S
                # is over.
                is_awaited = rank in awaited and awaited[rank].is_alive()
                if beginning > before and not is_awaited:
                    awaited[rank] = self.start_joining(rank, beginning, _GREET_WITHIN_S)
            time.sleep(_LOOK_EVERY_S)

    def start_joining(self, rank: int, beginning: int, within_s: float) -> threading.Thread:
        """Join a line to a rank. Return a thread that ends once it is joined, or is not in
        time."""

        def join() -> None:
            try:
                line = self._join(rank, beginning, within_s)
            except RuntimeError as error:
                if not self._is_open:
                    self._end(rank, reason=LinkClosed(f"rank {rank} is gone: {error!s:.200}"))
                return
            with self._changed:
                self._greeted[rank] = beginning
                self.ended.pop(rank, None)
                for key in [key for key in self._told if key[0] == rank]:
                    del self._told[key]  # of an earlier beginning
            threading.Thread(target=self._serve, args=(rank, beginning, line), daemon=True).start()

        thread = threading.Thread(
            target=join, name=f"control messages of rank {rank}", daemon=True
        )
        thread.start()
        return thread

    def _serve(self, rank: int, beginning: int, line: WordLine) -> None:
        try:
            # Until the rank begins again: from then on another thread serves it over its new line.
            while self._greeted[rank] == beginning:
                message = line.receive()
                if message.kind is WordKind.TELL:
                    self._keep(rank, message=message)
                elif message.kind is WordKind.ASK:
                    line.send(
                        ControlMessage(WordKind.ANSWER, message.name, text=self._own(message.name))
                    )
                else:
                    raise FrameError(f"rank {rank} sent an answer that nobody asked for")
        except LinkError as error:
            self._end(rank, reason=error)
        except RuntimeError:
            self._end(rank, reason=LinkClosed(f"rank {rank} ended while the ranks joined"))

    def _keep(self, rank: int, message: ControlMessage) -> None:
        with self._changed:
            # Bounded by number here and by length in `decode`: a rank fills no memory of rank 0.
            own = [name for teller, name in self._told if teller == rank]
            if message.name in own or len(own) >= MAX_WORDS:
                raise FrameError(f"rank {rank} sent {message.name!r:.80} twice, or too much")
            self._told[rank, message.name] = message.text
            self._changed.notify_all()

    def _own(self, name: str) -> str:
        """Return a text of rank 0, once it is there: a rank may ask before."""
        with self._changed:
            self._changed.wait_for(lambda: (0, name) in self._told)
            return self._told[0, name]

    def _end(self, rank: int, reason: LinkError) -> None:
        with self._changed:
            self.ended[rank] = reason
            self._changed.notify_all()


@dataclass(eq=False)
class WordsInOneProcess(Words):
    """The words of a rank that shares its process with all others."""

    store: HashStore
    rank: int
    within_s: float

    def send_text(self, name: str, text: str) -> None:
        encode(ControlMessage(WordKind.TELL, name, text))  # as bounded as over a line
        self.store.set(f"word {self.rank} {name}", text)

    def receive_text(self, name: str, rank: int) -> str:
        key = f"word {rank} {name}"
        try:
            self.store.wait([key], timedelta(seconds=self.within_s))
        except RuntimeError:
            raise LinkTimeout(
                f"rank {rank} has not come in {self.within_s:g} s (cluster.liveness.join_within_s)"
            ) from None
        return self.store.get(key).decode("utf-8", "replace")
