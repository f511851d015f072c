"""The carriers of links, each with the faults that it may have, for the battery in
test_carriers.py: every case there runs over every carrier here.

A carrier is a subclass of `Carrier`; one object of it is one link from rank 0 of cloud_a to rank 1
of cloud_b, made in a folder of its own. It has

- `begin(end, attempt)`: start one end's rank, as a command of its owner does, in attempt 1, 2, …;
  sets `out` or `incoming`. It may block until the other end's rank has come, so the battery calls
  it in a thread for each end. `kill(end)`: end that rank as kill -9 does: it says nothing.
- faults, each a context manager: `unconfirmed()`: what is sent arrives, but its sender is not told
  so and tries again; `slow(bytes_per_s)`: the line passes so many bytes a second from here on;
  `without_data()`: the peer is there as far as the carrier can see, and no message passes;
  `half_dead()`: what is written arrives, and cannot be read; `full()`: no more can be written.
- `marks`: of pytest, for one that needs more than this machine has, or is for the night.
- `cannot`: by the name of a case, why this carrier has no such fault, or what tests it instead.

To add a carrier, write the class and put it into CARRIERS; to add a fault, give it to `Carrier`
with `raise NotImplementedError`, and every carrier either has it or says in `cannot` why not.
Waits are short here (`LIVENESS`, RECONNECT_S), so that the battery takes seconds.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed import HashStore

from tests.line_links import LABEL, RUN, Proxy, dialler, listener, relay_running, stop, stream
from tests.nightly import NIGHTLY
from tests.owners import folder_of_keys, keys_of
from tests.s3_server import BUCKET, needs_s3, s3_server
from xcloud.base.errors import LinkClosed, LinkError
from xcloud.line import mailbox
from xcloud.line.hello import StreamName
from xcloud.line.line_state import LineState
from xcloud.line.mailbox import ObjectStore
from xcloud.line.mailbox_lines import MailboxLines
from xcloud.line.pinned_tls import PinnedTls
from xcloud.line.relayed import Meeting, rooms_of
from xcloud.line.stream_link import StreamInLink, StreamOutLink
from xcloud.line.transport import SealedPlace
from xcloud.line.ways import Dialler, Listener, Way
from xcloud.net.frame import Kind, MessageKey
from xcloud.net.gloo_link import GlooInLink, GlooOutLink
from xcloud.net.gloo_pair import GlooPair, Transfer
from xcloud.net.link import Progress
from xcloud.net.link_end import InSettings, OutSettings, ReceivingEnd, SendingEnd
from xcloud.net.link_profile import LinkWindow, Liveness
from xcloud.net.peer import Peer

End = Literal["out", "incoming"]
ENDS: tuple[End, ...] = ("out", "incoming")
LIVENESS = Liveness(interval_s=0.2, lost_after_s=2.0)
RECONNECT_S = 3.0
MEETING_S = 20.0
CAPACITY_BYTES = 6 << 20  # more than a fragment of gloo's


class Carrier:
    """A link over one carrier, and the faults of that carrier. See above."""

    name: ClassVar[str]
    marks: ClassVar[Sequence[Any]] = ()
    cannot: ClassVar[Mapping[str, str]] = {}
    reconnect_s = RECONNECT_S  # how long an end waits for the other one to dial again

    def __init__(self, folder: Path, window: LinkWindow | None = None) -> None:
        self.folder = folder
        self.window = window or LinkWindow()
        self.out: SendingEnd | None = None
        self.incoming: ReceivingEnd | None = None
        self.lost: list[LinkError] = []  # what `on_lost` of either end was told

    def settings(self, end: End) -> Any:
        """Return the settings of an end, with the records of a rank of its own: its peer sends
        heartbeats over other links of the run as long as this is open."""
        peer = Peer(liveness=LIVENESS)
        peer.silence_is_loss = True
        self._beat(peer)
        given = {
            "capacity_bytes": CAPACITY_BYTES, "window": self.window, "peer": peer,
            "progress": Progress(),
        }  # fmt: skip
        if end == "out":
            return OutSettings("rank 1 of cloud 'cloud_b'", **given)  # type: ignore[arg-type]
        return InSettings("rank 0 of cloud 'cloud_a'", **given)  # type: ignore[arg-type]

    def begin(self, end: End, attempt: int = 1) -> None:
        raise NotImplementedError

    def kill(self, end: End) -> None:
        raise NotImplementedError

    @contextmanager
    def unconfirmed(self) -> Iterator[None]:
        raise NotImplementedError
        yield

    @contextmanager
    def slow(self, bytes_per_s: float) -> Iterator[None]:
        raise NotImplementedError
        yield

    @contextmanager
    def without_data(self) -> Iterator[None]:
        raise NotImplementedError
        yield

    @contextmanager
    def half_dead(self) -> Iterator[None]:
        raise NotImplementedError
        yield

    @contextmanager
    def full(self) -> Iterator[None]:
        raise NotImplementedError
        yield

    def close(self) -> None:
        """End whatever is left of the link, without a word."""

    _is_over = False

    def _beat(self, peer: Peer) -> None:
        def beat() -> None:
            while not self._is_over:
                peer.mark_alive()
                time.sleep(LIVENESS.interval_s)

        threading.Thread(target=beat, daemon=True).start()


def begin_both(link: Carrier, attempt: int = 1) -> None:
    """Start both ends' ranks at the same time."""
    threads = [
        threading.Thread(target=link.begin, args=(end, attempt), daemon=True) for end in ENDS
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(MEETING_S)
        assert not thread.is_alive(), "an end has not come"


@contextmanager
def opened(carrier: type[Carrier], folder: Path, **settings: Any) -> Iterator[Carrier]:
    """A link over a carrier, whose ranks are not there yet."""
    link = carrier(folder, **settings)
    try:
        yield link
    finally:
        link._is_over = True
        link.close()


def key(number: int) -> MessageKey:
    return MessageKey(Kind.AVERAGING, 1, micro_batch=number)


def message(num_bytes: int, number: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(number)
    return torch.randint(256, (num_bytes,), generator=made, dtype=torch.uint8)


class Sealed(Carrier):
    """A sealed line through a proxy. cloud_a listens, and sends unless `out_listens` is False."""

    name = "sealed, the sender listens"
    out_listens: ClassVar[bool] = True
    cannot: ClassVar[Mapping[str, str]] = {
        "test_a_line_that_is_dead_one_way_for_a_while_loses_nothing": "unconfirmed() is that",
        "test_a_disk_that_is_full_for_a_while_loses_nothing": "a sealed line writes to no disk",
    }

    def __init__(self, folder: Path, window: LinkWindow | None = None) -> None:
        super().__init__(folder, window=window)
        folder_of_keys()  # made once, before both ends' threads ask for them
        self.state = LineState("the other rank")
        self.said: list[str] = []
        self.incoming_state = LineState("the sender", say=self.said.append)
        self._listener: Listener | None = None
        self._proxy = Proxy(0)

    def begin(self, end: End, attempt: int = 1) -> None:
        name = StreamName("averaging", "cloud_a", sender=0, receiver_cloud="cloud_b", receiver=1)
        if not self.out_listens:
            name = StreamName(
                "averaging", "cloud_b", sender=1, receiver_cloud="cloud_a", receiver=0
            )
        way: Way
        if (end == "out") is self.out_listens:
            way = self._listener = self.listens(attempt)
        else:
            way = self.dials()
        given = {
            "attempt": attempt, "reconnect_s": self.reconnect_s, "on_lost": self.lost.append,
            "first_within_s": MEETING_S, "num_connections": 2, "run": RUN,
        }  # fmt: skip
        if end == "out":
            made = stream(way, name, state=self.state, **given)
            self.out = StreamOutLink(made, self.settings(end))
        else:
            made = stream(way, name, state=self.incoming_state, **given)
            self.incoming = StreamInLink(made, self.settings(end))

    def listens(self, attempt: int) -> Listener:
        made = listener(attempt=attempt)
        self._proxy.target = made.port
        return made

    def dials(self) -> Way:
        return dialler(self._proxy.port)

    def kill(self, end: End) -> None:
        killed = self.out if end == "out" else self.incoming
        assert isinstance(killed, StreamOutLink | StreamInLink)
        if (end == "out") is self.out_listens and self._listener is not None:
            self._listener.close()
            self._listener = None
        killed.connections.stop()
        self._proxy.reset()

    @contextmanager
    def unconfirmed(self) -> Iterator[None]:
        self._proxy.held_to = "dialler" if not self.out_listens else "port"
        try:
            yield
        finally:
            self._proxy.reset()  # what was held is lost
            self._proxy.held_to = None

    @contextmanager
    def slow(self, bytes_per_s: float) -> Iterator[None]:
        self._proxy.bytes_per_s = bytes_per_s
        try:
            yield
        finally:
            self._proxy.bytes_per_s = None

    @contextmanager
    def without_data(self) -> Iterator[None]:
        self._proxy.longest_bytes = 16_000  # of a connection: handshake and greeting fit
        self._proxy.reset()
        try:
            yield
        finally:
            self._proxy.longest_bytes = None
            self._proxy.reset()

    def close(self) -> None:
        self._proxy.close()
        if self._listener is not None:
            self._listener.close()
        for end in (self.out, self.incoming):
            if isinstance(end, StreamOutLink | StreamInLink):
                stop(end)


class SealedFromDialler(Sealed):
    """A sealed line whose sending end's rank dials."""

    name = "sealed, the sender dials"
    out_listens = False


class Relayed(Sealed):
    """A sealed line through a relay that both dial, the dialling rank through the proxy."""

    name = "sealed, through a relay"
    marks = NIGHTLY

    def __init__(self, folder: Path, window: LinkWindow | None = None) -> None:
        super().__init__(folder, window=window)
        self._held = ExitStack()
        self._relay = self._held.enter_context(relay_running())
        self._proxy.target = self._relay

    def listens(self, attempt: int) -> Listener:
        return listener(self._relay, attempt=attempt)

    def dials(self) -> Way:
        keys = keys_of("cloud_b", ["cloud_a"])
        rooms = rooms_of(keys, cloud="cloud_a", label=LABEL)
        meeting = Meeting(("127.0.0.1", self._proxy.port), rooms=rooms)
        return Dialler(meeting, cloud="cloud_a", tls=PinnedTls(keys, label=LABEL))

    def close(self) -> None:
        super().close()
        self._held.close()


class _Paced:
    """A pair of gloo on a line of so many bytes a second. 0: nothing passes any more."""

    def __init__(self, pair: GlooPair) -> None:
        self._pair = pair
        self.bytes_per_s = float("inf")

    def join(self) -> None:
        self._pair.join()

    def isend(self, frame: Tensor, tag: int) -> Any:
        if not self.bytes_per_s:
            return _Never()
        time.sleep(frame.numel() / self.bytes_per_s)
        return self._pair.isend(frame, tag)

    def irecv(self, buffer: Tensor, tag: int) -> Transfer:
        return self._pair.irecv(buffer, tag)


class _Never:
    def wait(self, within: object = None) -> None:
        threading.Event().wait(60)


class Gloo(Carrier):
    """A link over gloo's sockets, between ranks of one owner."""

    name = "gloo"
    cannot: ClassVar[Mapping[str, str]] = {
        "test_what_was_not_confirmed_arrives_once": "gloo sends nothing twice",
        "test_a_line_that_is_dead_one_way_for_a_while_loses_nothing": "a connection of TCP that "
        "is dead one way passes nothing, as in without_data()",
        "test_a_disk_that_is_full_for_a_while_loses_nothing": "gloo writes to no disk",
        "test_a_rank_that_is_killed_while_it_joins_is_met_when_it_comes_again": "torchrun starts "
        "all ranks again, with a store of their own (test_several_machines.py)",
        "test_a_rank_that_is_killed_is_missed": "test_gloo_link.py: the other end's group is gone",
    }

    def __init__(self, folder: Path, window: LinkWindow | None = None) -> None:
        super().__init__(folder, window=window)
        self.store = HashStore()
        self._paced: _Paced | None = None

    def begin(self, end: End, attempt: int = 1) -> None:
        within = timedelta(seconds=MEETING_S)
        place = ENDS.index(end)
        pair = GlooPair(self.store, "averaging", ranks="0-1", place=place, join_within=within)
        if end == "out":
            self._paced = _Paced(pair)
            self.out = GlooOutLink(self._paced, self.settings(end))  # type: ignore[arg-type]
        else:
            self.incoming = GlooInLink(pair, self.settings(end))

    @contextmanager
    def slow(self, bytes_per_s: float) -> Iterator[None]:
        assert self._paced is not None
        self._paced.bytes_per_s = bytes_per_s
        try:
            yield
        finally:
            self._paced.bytes_per_s = float("inf")

    @contextmanager
    def without_data(self) -> Iterator[None]:
        with self.slow(0.0):
            yield

    def close(self) -> None:
        """Close both ends, or their threads would be in torch when Python ends."""
        closing: list[Callable[[], None]] = []
        if self.out is not None and not (self._paced and not self._paced.bytes_per_s):
            out = self.out
            closing.append(lambda: out.close(1.0))
        if self.incoming is not None:
            incoming = self.incoming
            closing.append(lambda: incoming.close(1.0))

        def closed(call: Callable[[], None]) -> None:
            with suppress(LinkError):
                call()

        threads = [threading.Thread(target=closed, args=(call,), daemon=True) for call in closing]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5.0)


class MailboxFolder(Carrier):
    """A link through a mailbox in a folder. Ends are told at once of what the notes say."""

    name = "mailbox in a folder"
    cannot: ClassVar[Mapping[str, str]] = {
        "test_a_message_that_moves_is_not_overdue": "an object is there as a whole or not at all: "
        "Mailbox.allowance_s gives it the time of a slow line (test_mailbox.py)",
        "test_a_rank_that_is_killed_is_missed": "nobody sees who reads a mailbox: heartbeats tell "
        "(test_failure_detector.py), or the rank itself when it comes again",
    }

    def __init__(self, folder: Path, window: LinkWindow | None = None) -> None:
        super().__init__(folder, window=window)
        folder_of_keys()  # made once, before both ends' threads ask for them
        self._ends: dict[End, MailboxLines] = {}
        self._alive: dict[End, MailboxLines] = {}
        self._checks_every_s = mailbox._CHECK_EVERY_S
        mailbox._CHECK_EVERY_S = 0.1

    @property
    def url(self) -> str:
        return str(self.folder)

    def begin(self, end: End, attempt: int = 1) -> None:
        rank = ENDS.index(end)
        clouds = ("cloud_a", "cloud_b")
        place = SealedPlace(
            rank, 2, RUN, attempt=attempt, cloud_of=clouds.__getitem__,
            address_of=lambda rank: None, listener_of=lambda here, there: here, listens_at=None,
            first_within_s=MEETING_S, reconnect_s=self.reconnect_s,
        )  # fmt: skip
        keys = keys_of(clouds[rank], [clouds[1 - rank]])
        if end in self._alive:
            self.kill(end)
        made = MailboxLines.__new__(MailboxLines)  # known from here on: it may be killed soon
        self._alive[end] = self._ends[end] = made

        def lost(reason: LinkError) -> None:
            if self._alive.get(end) is made:
                self.lost.append(reason)

        try:
            made.__init__(self.url, place, keys, on_lost=lost)  # type: ignore[misc]
        except LinkError:
            if self._alive.get(end) is made:
                raise
            return
        if end == "out":
            self.out = made.out("averaging", 1, self.settings(end))
        else:
            self.incoming = made.incoming("averaging", 0, self.settings(end))

    def kill(self, end: End) -> None:
        store: Any = vars(self._alive.pop(end)).get("store")
        if store is None:
            return

        def dead(*given: object, **named: object) -> None:
            raise LinkClosed("this rank was killed")

        store.over.set()
        store.get = dead  # for one that still waits for the others

    @contextmanager
    def _changed(self, end: End, **calls: Any) -> Iterator[None]:
        store: Any = self._ends[end].store
        vars(store).update(calls)
        try:
            yield
        finally:
            for name in calls:
                del vars(store)[name]

    @contextmanager
    def unconfirmed(self) -> Iterator[None]:
        store = self._ends["out"].store
        done = set[str]()

        def put(name: str, data: Any) -> None:
            ObjectStore.put_once(store, name, data)
            if name not in done:
                done.add(name)
                folder, _, own = name.rpartition("/")
                until_s = time.monotonic() + 1.0
                while own in store.sizes(folder) and time.monotonic() < until_s:
                    time.sleep(0.01)  # until it has been taken
                raise TimeoutError("it was written, and the answer is lost")

        with self._changed("out", put_once=put):
            yield

    @contextmanager
    def without_data(self) -> Iterator[None]:
        with self._changed("incoming", sizes=lambda folder: {}):
            yield

    @contextmanager
    def half_dead(self) -> Iterator[None]:
        def get(name: str, max_bytes: int) -> bytes:
            store = self._ends["incoming"].store

            def fail() -> bytes:
                if "get" in vars(store):
                    raise TimeoutError("it cannot be read")
                found = store.get(name, max_bytes)
                assert found is not None
                return found

            return store.patiently(fail, doing="reading")

        with self._changed("incoming", get=get):
            yield

    @contextmanager
    def full(self) -> Iterator[None]:
        def put(name: str, data: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with self._changed("out", put_once=put):
            yield

    def close(self) -> None:
        mailbox._CHECK_EVERY_S = self._checks_every_s
        for end in [*self._alive]:
            self.kill(end)


class MailboxInMemory(MailboxFolder):
    """A link through fsspec's store in memory, which has no folders and no renaming."""

    name = "mailbox in memory"
    marks = NIGHTLY

    @property
    def url(self) -> str:
        return f"memory://{self.folder}"


class MailboxOverS3(MailboxFolder):
    """A link through a bucket of a server of the S3 protocol."""

    name = "mailbox over S3"
    marks = (*NIGHTLY, needs_s3)

    def __init__(self, folder: Path, window: LinkWindow | None = None) -> None:
        super().__init__(folder, window=window)
        self._held = ExitStack()
        self.server = self._held.enter_context(s3_server())

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/{self.folder.name}"

    def close(self) -> None:
        super().close()
        self._held.close()


CARRIERS: list[type[Carrier]] = [
    Gloo,
    Sealed,
    SealedFromDialler,
    Relayed,
    MailboxFolder,
    MailboxInMemory,
    MailboxOverS3,
]
