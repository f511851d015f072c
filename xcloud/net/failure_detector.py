"""How ranks find out that another one is lost. Every rank has one FailureDetector, and so has the
launcher of a machine for its ranks. It knows when something last came from each rank, on any link.

Heartbeats are frames (Kind.ALIVE) on links, so they need nothing of a carrier. Rank 0 has a link
to every other rank. Its heartbeats say for how long nothing has come from each. That is how ranks
without a link between them know of each other. Every heartbeat also says when a message of a step
last moved: at the rank itself, and, in those of rank 0, at any rank. So a rank that waits behind a
slow transfer between two others knows that it moves.

What follows from silence is up to whoever asks. A link that waits raises its error (link_end.py).
Under torchrun, where no launcher watches the ranks, the detector ends the process with an error
that names the rank: torch would wait for hours for a rank that is stopped or cut off, while ranks
join and in a collective of any backend. There `watch` makes a link of heartbeats as soon as a rank
and rank 0 have both come to the rendezvous. The launcher of one machine ends a rank that is
stopped (launch/processes.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import torch
from torch._C._distributed_c10d import Store

from xcloud.base.errors import FrameError, LinkClosed, LinkError, LinkTimeout
from xcloud.net.frame import Frame, Kind, TensorSpec
from xcloud.net.link import Progress
from xcloud.net.link_end import InSettings, OutSettings, ReceivingEnd, SendingEnd
from xcloud.net.link_profile import DEFAULT_LIVENESS, Liveness
from xcloud.net.peer import Peer

GRACE_S = 1.0  # in which the main thread may find a better reason to end
STORE = -1  # in the place of a rank: the store of the rendezvous
LAUNCHER = -2  # in the place of a rank: what has started the ranks of one machine
_LOOK_EVERY_S = 0.5
_CLOSE_EVERY_S = 0.05
_CAPACITY_BYTES = 1 << 16  # of a heartbeat with the age of every rank
_ENDED = -1.0  # in the place of an age: the link to this rank broke
_AGES = "seconds since rank 0 heard each rank float32 [ranks]"
MOVED_CARRIES = ("seconds since a message of a step moved float32 [1]",)
_MOVED_SPEC = TensorSpec(shape=(1,), dtype=torch.float32)

Connect = Callable[[OutSettings, InSettings], tuple[SendingEnd, ReceivingEnd]]
"""Makes both ends of a link of heartbeats, before there is a transport. It does not wait."""


class Loss(Enum):
    """The way in which a rank was lost."""

    ENDED = "ended"  # a link to it broke
    SILENT = "silent"  # it was not heard for too long


@dataclass(eq=False)
class _Watch:
    """A link of heartbeats that `watch` makes.

    restarted: ranks that restart with the peer, whose earlier losses are forgotten.
    has_come: True once something has come from the peer over it.
    """

    peer: int
    restarted: Collection[int]
    out: SendingEnd | None = None
    incoming: ReceivingEnd | None = None
    has_come: bool = False
    is_over: bool = False
    is_closing: bool = False


class FailureDetector:
    """The knowledge of one rank, or of a launcher, which others are alive. Thread-safe.

    If a rank itself does not look for half of lost_after_s, it was stopped or its machine was
    suspended. It could not receive heartbeats meanwhile, so that time counts as nobody's silence.

    peers: the record of each other rank.
    name_of: returns the name of a rank, for messages.
    on_lost: called once, in a thread, when ranks are lost that this one needs. It must end the
        process, since the main thread may be waiting in torch. None: only the links act on a loss.
    needs: returns True if this rank needs any of the given ranks. It is used until `connected` is
        called. The default needs every rank that has come.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        liveness: Liveness = DEFAULT_LIVENESS,
        name_of: Callable[[int], str] = "rank {}".format,
        on_lost: Callable[[LinkError], None] | None = None,
        needs: Callable[[frozenset[int]], bool] = bool,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self.liveness = liveness
        self._name_of = name_of
        self._on_lost = on_lost
        self._needs = needs
        self._clock_s = clock_s
        self._looked_at_s = clock_s()
        self._stood_still_s = 0.0
        self.peers = {
            peer: Peer(liveness, now_s=self._now_s) for peer in range(num_ranks) if peer != rank
        }
        self.progress = Progress()
        self._store = Peer(liveness, now_s=self._now_s)
        self._outs: dict[int, SendingEnd] = {}
        self.watches: dict[int, _Watch] = {}  # one of each peer counts
        self.greeted: dict[int, _Watch] = {}  # the newest of each peer
        self._unreached: dict[int, str] = {}  # why there is no link to a rank that has come
        self.why_not: Callable[[int], str | None] = lambda peer: None
        self.lost: dict[int, Loss] = {}  # the ranks that are lost now
        self.left = set[int]()  # those that have closed their link
        self._final_report: Callable[[], None] = lambda: None
        self._lock = threading.RLock()
        self._clock_lock = threading.Lock()
        self._is_connected = False
        self._is_ending = False
        self._runs = False
        self.over = threading.Event()  # nothing ends this rank any more, and it sends nothing

    # Sending and hearing heartbeats.
    def beat_over(self, peer: int, out: SendingEnd) -> None:
        """Send heartbeats over this link too, in the place of an earlier one to that peer."""
        with self._lock:
            self._outs[peer] = out

    def receive(self, peer: int, frame: Frame) -> None:
        """Receive a heartbeat, in a link's thread. The link has noted that its peer is alive. Rank
        0 also sends when it last heard the others. Raises FrameError for any other frame."""
        if not frame.parts:
            return
        *ages_of_others, moved = frame.parts
        if peer != 0 and ages_of_others:
            raise FrameError(
                f"{self._name_of(peer)} reports on other ranks, which only rank 0 does"
            )
        if TensorSpec.of(moved) != _MOVED_SPEC or not moved.item() >= 0:
            raise FrameError(
                f"{frame.key} of {self._name_of(peer)} must say for how many seconds no message "
                f"has moved, got {moved.dtype} {tuple(moved.shape)}"
            )
        # Any rank's heartbeat says when a message last moved there; rank 0's says it for all
        # ranks. So a rank behind a slow transfer between two others does not call it overdue.
        self.progress.mark_moved(moved.item())
        if peer != 0:
            return
        (ages, *others) = ages_of_others or (torch.empty(0),)
        if others or ages.dtype != torch.float32 or ages.dim() != 1:
            raise FrameError(
                f"{frame.key} of rank 0 must carry one vector of ages, got "
                f"{[(part.dtype, tuple(part.shape)) for part in ages_of_others]}"
            )
        # Ranks that have not compared their files yet may differ in how many there are.
        for rank, age_s in zip(range(self._num_ranks), ages.tolist(), strict=False):
            if rank in (0, self._rank):
                continue
            if age_s == _ENDED:
                self._lose(Loss.ENDED, rank=rank)
            elif 0 <= age_s < float("inf"):
                # Of ranks without a link to this one. Its own links may have heard that rank
                # later; the record keeps the younger of both.
                self.peers[rank].mark_alive(age_s)
                if age_s > self.liveness.lost_after_s:
                    self._lose(Loss.SILENT, rank=rank)
                else:
                    self._note_heard(rank)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Send heartbeats while the block lasts, in a thread of its own."""
        if self._runs:  # from the rendezvous until `leave`
            yield
            return
        stop = threading.Event()
        thread = self._start(stop)
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self._runs = False

    def _start(self, stop: threading.Event) -> threading.Thread:
        self._runs = True
        thread = threading.Thread(target=self._run, args=(stop,), name="heartbeat", daemon=True)
        thread.start()
        return thread

    def _run(self, stop: threading.Event) -> None:
        # Looked at every half second, while heartbeats go out every `interval_s`: the look also
        # keeps `_now_s` going, which takes a longer gap for a stop of this process.
        beat_at_s = self._clock_s() + self.liveness.interval_s
        while not stop.wait(min(_LOOK_EVERY_S, self.liveness.interval_s)):
            if self.over.is_set():
                return
            self._look()
            if self._clock_s() >= beat_at_s:
                beat_at_s = self._clock_s() + self.liveness.interval_s
                self._beat()

    def _beat(self) -> None:
        moved_at_s = self.progress.own_at_s  # what was heard would come back younger than it is
        if self._rank == 0:
            moved_at_s = self.progress.moved_at_s
        parts = [torch.tensor([max(0.0, time.monotonic() - moved_at_s)], dtype=torch.float32)]
        carries = [*MOVED_CARRIES]
        if self._rank == 0:
            ages = map(self._age_s, range(self._num_ranks))
            parts.insert(0, torch.tensor([*ages], dtype=torch.float32))
            carries.insert(0, _AGES)
        with self._lock:
            watches = {*self.watches.values(), *self.greeted.values()}
            outs = [watch.out for watch in watches if watch.out and not watch.is_closing]
            outs += self._outs.values()
        for out in outs:
            with contextlib.suppress(LinkError):  # whoever needs that rank finds out itself
                out.say_alive(tuple(parts), carries)

    def _age_s(self, rank: int) -> float:
        """Return the age of a rank as rank 0 sends it: the seconds since something came from it.
        It is infinite for a rank that has not come or has left."""
        if rank == self._rank:
            return 0.0
        if self.lost.get(rank) is Loss.ENDED:
            return _ENDED
        if rank in self.left:
            return float("inf")
        return self.peers[rank].silent_s

    # The rule.
    def _now_s(self) -> float:
        """Return a time in seconds of a clock that stands still while this process is stopped."""
        with self._clock_lock:
            now_s = self._clock_s()
            missed_s = now_s - self._looked_at_s
            self._looked_at_s = now_s
            # A thread of this process looks twice a second, so it was stopped or its machine
            # slept. It could not receive heartbeats meanwhile, whoever sent them.
            if missed_s > self.liveness.lost_after_s / 2:
                self._stood_still_s += missed_s
            return now_s - self._stood_still_s

    def silent(self) -> list[int]:
        """Return the peers that were alive before and have been silent for lost_after_s."""
        return [rank for rank, peer in self.peers.items() if peer.is_silent]

    def _look(self) -> None:
        with self._lock:
            come = [w.peer for w in self.watches.values() if w.has_come and not w.is_over]
            silent = [rank for rank in come if self.peers[rank].is_silent]
            # Only as long as ranks join: later nobody needs the store.
            if self._store.is_silent and not self._is_connected:
                silent.append(STORE)
            silent = [rank for rank in silent if rank not in self.lost]
        for rank in silent:
            self._lose(Loss.SILENT, rank=rank)

    def _note_heard(self, rank: int) -> None:
        with self._lock:
            # A rank that is heard again was only slow. A link that broke stays broken.
            if self.lost.get(rank) is Loss.SILENT:
                del self.lost[rank]

    # From the rendezvous on, where no launcher watches the ranks.
    def watch(
        self, peer: int, connect: Connect, restarted: Collection[int] = (), at_once: bool = True
    ) -> None:
        """Watch `peer` over a link of heartbeats, until either side leaves. Rank 0 calls it for
        each other rank, these for rank 0.

        restarted: ranks that restart with it, whose earlier losses are forgotten.
        at_once: True to replace an earlier link to that rank at once. False: only once something
            has come from the peer over it, because only a number in the store announced it.
        """
        watch = _Watch(peer, restarted)
        with self._lock:
            if at_once or peer not in self.watches:
                self.watches[peer] = watch
            self.greeted[peer] = watch
            if not self._runs:
                self._start(threading.Event())
        # A thread for each: making the link waits for the other side, as long as that takes.
        threading.Thread(target=self._greet, args=(watch, connect), daemon=True).start()

    def is_greeting(self, peer: int) -> bool:
        """Return whether the newest link to `peer` is neither joined nor given up."""
        with self._lock:
            watch = self.greeted.get(peer)
            return watch is not None and not watch.has_come and not watch.is_over

    def ask(self, store: Store) -> None:
        """Watch, until `connected`, whether the store still answers, through a client of its
        own."""
        own: Store = store.clone()  # type: ignore[attr-defined]

        def ask() -> None:
            while not (self._is_connected or self.over.wait(_LOOK_EVERY_S)):
                try:
                    own.check(["is there"])
                except RuntimeError:
                    return  # the main thread gets it too
                self._store.mark_alive()

        with self._lock:
            if not self._runs:
                self._start(threading.Event())
        threading.Thread(target=ask, name="store", daemon=True).start()

    def connected(
        self, needs: Callable[[frozenset[int]], bool], final_report: Callable[[], None]
    ) -> None:
        """Note that this rank has all its links.

        needs: returns True if this rank cannot continue once the given ranks are lost.
        final_report: called before on_lost, for GRACE_S at most.
        """
        with self._lock:
            self._is_connected = True
            self._needs = needs
            self._final_report = final_report

    def leave(self) -> None:
        """Tell the others that this rank has finished, so that its end is no loss."""
        self.over.set()
        with self._lock:
            come = [w for w in self.watches.values() if w.has_come and not w.is_over]
            watches = [watch for watch in come if watch.peer not in self.lost]
        for watch in watches:
            self._close(watch)
        until_s = time.monotonic() + self.liveness.lost_after_s
        while not all(w.is_over for w in watches) and time.monotonic() < until_s:
            time.sleep(_CLOSE_EVERY_S)

    def close(self) -> None:
        """Stop, as this rank ends for a reason of its own. Tell the others of a loss it knows and
        give them a moment to end by what this rank has sent them before its links break."""
        self.over.set()
        # Ranks without a link to the lost one learn of it from this heartbeat only.
        if self._rank == 0 and self.lost:
            self._beat()
        if self.watches:
            # The others may be about to read why this rank ends. Under load one of them was ended
            # by the loss within its second of grace, before it had read that.
            time.sleep(min(GRACE_S, 0.5))

    def _greet(self, watch: _Watch, connect: Connect) -> None:
        peer = watch.peer
        if (why := self.why_not(peer)) is not None:
            watch.is_over = True
            if self.watches[peer] is watch:
                self._unreached[peer] = why
                self._lose(Loss.ENDED, rank=peer)
            return
        out = OutSettings(
            peer_name=self._name_of(peer), capacity_bytes=_CAPACITY_BYTES, peer=self.peers[peer]
        )
        incoming = InSettings(
            peer_name=self._name_of(peer),
            capacity_bytes=_CAPACITY_BYTES,
            peer=self.peers[peer],
            handlers={Kind.ALIVE: lambda frame: self.receive(peer, frame=frame)},
            on_arrival=lambda frame, at_s: self._note_come(watch),
            on_end=lambda reason: self._note_end(watch, reason),
        )
        with self._lock:  # until both ends are there to be closed
            watch.out, watch.incoming = connect(out, incoming)
        with contextlib.suppress(LinkError):
            watch.out.say_alive()

    def _note_come(self, watch: _Watch) -> None:
        """Note that the peer was heard over a link, which takes the place of an earlier one."""
        with self._lock:
            if not watch.has_come:
                watch.has_come = True
                for rank in watch.restarted:
                    self.lost.pop(rank, None)
                # What was heard of the process before says nothing of the one that has come in its
                # place.
                self.peers[watch.peer].forget()
                self._unreached.pop(watch.peer, None)
                self.left.discard(watch.peer)
                self.watches[watch.peer] = watch
            self._note_heard(watch.peer)

    def _note_end(self, watch: _Watch, reason: LinkError) -> None:
        """Note why nothing comes over a link any more."""
        with self._lock:
            watch.is_over = True
            is_current = self.watches.get(watch.peer) is watch
            has_closed = watch.incoming is not None and watch.incoming.has_closed
            if has_closed:
                self.left.add(watch.peer)
        # A peer that breaks the rules is alive, so it is no loss that could pass.
        if isinstance(reason, FrameError):
            self.end(reason)
        elif has_closed:
            self._close(watch)
        elif is_current:
            # gloo says it in its text only.
            is_late = any(sign in str(reason).lower() for sign in ("timed out", "timeout"))
            self._lose(Loss.SILENT if is_late else Loss.ENDED, rank=watch.peer)

    def _close(self, watch: _Watch) -> None:
        with self._lock:
            is_closing = watch.is_closing or watch.out is None
            watch.is_closing = True
        if not is_closing and watch.out is not None:
            with contextlib.suppress(LinkError):
                watch.out.close(GRACE_S)

    def _lose(self, loss: Loss, rank: int) -> None:
        with self._lock:
            is_news = rank not in self.lost
            # The first finding stays: a rank that was silent breaks its links later.
            self.lost.setdefault(rank, loss)
            if self._on_lost is None:
                return
            is_needed = self._needs(frozenset(self.lost))
            error = self._loss_error()
        # At once, not with the next heartbeat, as the others wait for this one's word.
        if is_news and self._rank == 0:
            self._beat()
        if is_needed:
            self.end(error, is_lost=lambda: self._needs(frozenset(self.lost)))

    def _loss_error(self) -> LinkError:
        """Build the error that names the lost ranks and what this rank was doing."""
        # Ranks whose loss alone ends this one are named; where only several together do, all of
        # them.
        named = [r for r in self.lost if self._needs(frozenset([r]))] or [*self.lost]
        names = " and ".join("the store" if r == STORE else self._name_of(r) for r in named)
        reasons = [self._unreached[rank] for rank in named if rank in self._unreached]
        if reasons:
            return LinkTimeout(f"{names} cannot be reached: {reasons[0]}")
        # What the main thread waits for in this moment says where the loss is felt.
        awaited = [self.peers[rank].awaited for rank in named if rank in self.peers]
        waits = [f" while this rank waited for {found[0]}" for found in awaited if found]
        when = "".join(waits[:1]) if self._is_connected else " while the ranks joined"
        if any(self.lost[r] is Loss.ENDED for r in named):
            return LinkClosed(f"{names} ended{when}")
        what = "that machine" if STORE in named else "that rank"
        return LinkTimeout(
            f"{names} sent no heartbeat for {self.liveness.lost_after_s:g} s{when}. Is {what} "
            "stopped, or its link down?"
        )

    def end(self, error: LinkError, is_lost: Callable[[], bool] = lambda: True) -> None:
        """End this rank, unless the main thread does so itself within GRACE_S, or is_lost then
        says that there is no reason any more. A link that has ended for good is one: the main
        thread may wait for another rank, which waits for the lost one."""
        if self.over.wait(GRACE_S) or self._on_lost is None:
            return
        with self._lock:
            if self._is_ending or not is_lost():  # heard again, or not needed since `connected`
                return
            self._is_ending = True
        # A thread of its own: it may fail, or wait for a rank that is lost.
        speaking = threading.Thread(target=self._final_report, daemon=True)
        speaking.start()
        speaking.join(GRACE_S)
        self._on_lost(error)
