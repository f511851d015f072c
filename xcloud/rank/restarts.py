"""Ranks that may begin more than once. Where a cloud may be late or lost, a rank begins at any
time, also again, and compares what it has loaded with what rank 0 has put into the store. Under
torchrun with --max-restarts all begin again.

Under torchrun no launcher watches the ranks, so they watch each other, from when a rank and rank 0
have both come to the store until this rank leaves, whatever its main thread does. Torch would wait
for a rank that is stopped or cut off for hours: while ranks join, and in a collective of any
backend, NCCL too. Every rank but 0 has a line to rank 0, a process group of two over gloo, over
which the two say in turn how they are, about once a second. Rank 0 tells the others of one that is
lost. Like the rendezvous of torch, these messages are not counted. Measured: 63 lines of 16 bytes
each way take 2 % of one core in rank 0 of 64 ranks.

Message: int64 [2], a word and the rank that it is about.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from enum import IntEnum
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistNetworkError

from xcloud.base.errors import FrameError, LinkClosed, LinkError, LinkTimeout
from xcloud.job.job import Job
from xcloud.layout import Layout
from xcloud.net.addresses import (
    INTERFACE_VARIABLE,
    choose_interface,
    is_loopback,
    port_range,
    store_at,
    why_unreachable,
)
from xcloud.net.gloo_pair import Pair
from xcloud.net.link_end import PeerLife
from xcloud.net.rendezvous import (
    FOREVER,
    JOIN_WITHIN_S,
    count_of,
    of_this_attempt,
    quiet,
    value_of,
)
from xcloud.net.transport import Meeting, meeting_store
from xcloud.pipeline.exchange import digest
from xcloud.pipeline.trainer import Trainer
from xcloud.rank.agreement import rank_name
from xcloud.record.files import ready_file

BEAT_S = 0.5
GRACE_S = 1.0  # in which the main thread may find a better reason to end
STORE = -1  # in the place of a rank: where the ranks meet
_LOOK_EVERY_S = 0.2
_RING_WITHIN_S = 10.0
_REFUSED_FOR_S = 20.0  # a rank that begins again has not yet said where it listens now


def enter_late(
    job: Job, meeting: Meeting, run_dir: Path, trainer: Trainer, from_step: int
) -> None:
    """Tell the launcher that this rank is there; in a run that goes on take over the values of the
    first cloud, or give them. from_step: of the checkpoint that all go on from."""
    if meeting.rank not in job.roster.essential:
        ready_file(run_dir, meeting.rank).touch()
    if meeting.beginning > 1 or from_step:
        trainer.num_updates = trainer.exchange.resume(trainer.num_updates)


def parameters_fact(stages: Mapping[int, nn.Module]) -> dict[str, str]:
    """All replicas begin with the same parameters, also those that come later."""
    whole = torch.cat([digest(stages[stage].parameters()) for stage in sorted(stages)])
    return {"the parameters before the first update": bytes(whole.tolist()).hex()}


def meet_at_any_time(job: Job, rank: int, run_dir: Path) -> Meeting:
    """Where ranks may begin at any time, also again: at a server in rank 0 if MASTER_ADDR and
    MASTER_PORT are set, otherwise in the run folder."""
    within_s, host = job.cluster.liveness.join_within_s, os.environ.get("MASTER_ADDR")
    port = int(os.environ.get("MASTER_PORT", "0"))
    port += "TORCHELASTIC_RUN_ID" in os.environ  # torchrun's agent serves at that port itself
    store = meeting_store(run_dir) if host is None else server_store(rank, host, port, within_s)
    beginning = int(store.add(f"beginnings.{rank}", 1))
    return Meeting(rank, job.cluster.num_processes, store, within_s, True, beginning)


def server_store(rank: int, host: str, port: int, within_s: float = JOIN_WITHIN_S) -> Store:
    """Return the store that rank 0 serves, on `host` alone. Whoever then waits in it for a rank
    waits as long as that one and rank 0 live; a server that ends is noticed at once. Raises
    ConfigError for a port that is taken."""
    return store_at(host, port, serves=rank == 0, within_s=within_s)


def meet_under_torchrun(
    job: Job, rank: int, run_dir: Path, detector: FailureDetector, say: Callable[[str], None]
) -> Meeting:
    """Meet the ranks of all machines, on the interface that faces MASTER_ADDR. say: is told once a
    minute who is waited for."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    address = choose_interface(host)
    if job.roster.is_elastic:
        meeting = meet_at_any_time(job, rank, run_dir)
        watch(meeting, detector, job.cluster)
        return meeting
    num_ranks, within_s = int(os.environ["WORLD_SIZE"]), job.cluster.liveness.join_within_s
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # its agent serves

    def connect(timeout_s: float) -> Store:
        store = store_at(host, port, serves=rank == 0 and not by_torchrun, within_s=timeout_s)
        detector.why_not = Doorbell(store, rank, address, f"{host}:{port}").why_not
        detector.ask(store)
        return store

    name_of = partial(rank_name, job)
    store = attempt_of(connect, rank, num_ranks, detector.watch, within_s, name_of, say)
    return Meeting(rank, num_ranks, store, within_s)


class Doorbell:
    """A port of this rank, chosen by the system as gloo's are, at which others try in seconds
    whether they reach it: gloo itself tries for minutes. place: of the store, for messages."""

    def __init__(self, store: Store, rank: int, address: str, place: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listening = socket.create_server((address, 0), family=family, backlog=256)
        self._address, self._place = address, place
        self._store = store.clone()  # type: ignore[attr-defined]
        port = self._listening.getsockname()[1]
        self._store.set(f"address.{rank}", f"{address} {port}")

    def close(self) -> None:
        self._listening.close()

    def why_not(self, peer: int) -> str | None:
        """Return why this rank has no connection to `peer`, which has come; None if it has."""
        until_s = time.monotonic() + _REFUSED_FOR_S
        while True:
            host, _, port = value_of(self._store, f"address.{peer}").rpartition(" ")
            if not host or not port.isdecimal():
                return None  # it does not say
            why = why_unreachable(host, int(port), _RING_WITHIN_S)
            if why is None:
                return None
            if "refused" not in why or time.monotonic() > until_s:
                return unreachable(why, self._place, self._address, f"{host}:{port}")
            time.sleep(_LOOK_EVERY_S)


def unreachable(why: str, store: str, here: str, there: str) -> str:
    """Say why two ranks that both reach the store have no connection, and what to do.

    why: as the system says it. here: the address on which this rank listens. there: address and
    port of the other.
    """
    if is_loopback(here) != is_loopback(there.rpartition(":")[0]):
        whose = "this rank listens" if is_loopback(here) else "it listens"
        own = here if is_loopback(here) else there
        return (
            f"{whose} on {own}, a loopback address, which only its own machine reaches ({why}). "
            "Give --master-addr in all clouds as an address, not as a name that the first machine "
            f"takes for itself, or set {INTERFACE_VARIABLE} to the interface that faces the others"
        )
    return (
        f"both reach the store at {store}, but no connection came about between {here} (here) and "
        f"{there or 'its address'} ({why}). Ranks listen on ports that the system chooses "
        f"({port_range()} here): open these between the two addresses, in both directions, or "
        "put a VPN between the clouds (docs/several-machines.md)"
    )


def watch(meeting: Meeting, detector: FailureDetector, layout: Layout) -> None:
    """Rank 0 looks for ranks that begin, also again, as long as it lives. One that begins is
    greeted once an earlier greeting of it has come to an end."""
    store = meeting.store.clone()  # type: ignore[attr-defined]
    if meeting.rank != 0:
        return detector.watch(0, life_of(store, meeting.rank, meeting.beginning))
    greeted = dict.fromkeys(range(1, layout.num_ranks), 0)

    def greet() -> None:
        while not detector.over.wait(_LOOK_EVERY_S):
            for rank, before in list(greeted.items()):
                beginning = count_of(store, f"beginnings.{rank}")
                if beginning > before and not detector.is_greeting(rank):
                    greeted[rank] = beginning
                    life = life_of(store.clone(), rank, beginning)
                    cloud = layout.ranks_in(layout.cloud_of(rank))
                    detector.watch(rank, life, cloud, at_once=False)

    threading.Thread(target=greet, name="greeting", daemon=True).start()


def life_of(store: Store, rank: int, beginning: int) -> Store:
    return PrefixStore(f"life {rank}.{beginning}", store)


def attempt_of(
    connect: Callable[[float], Store],
    rank: int,
    num_ranks: int,
    watch: Callable[[int, Store], None],
    within_s: float,
    name_of: Callable[[int], str] = "rank {}".format,
    say: Callable[[str], None] = quiet,
) -> Store:
    """Return `of_this_attempt` of the store that `connect` finds in at most so many seconds. A
    rank that is started again may find the store of an attempt that just ends: it then looks
    again."""
    until_s = time.monotonic() + within_s
    while True:
        left_s = max(1.0, until_s - time.monotonic())
        try:
            return of_this_attempt(
                connect(left_s), rank, range(num_ranks), left_s, watch, name_of=name_of, say=say
            )
        except DistNetworkError:
            if rank == 0 or time.monotonic() > until_s:
                raise
        time.sleep(_LOOK_EVERY_S)


class Silence:
    """Which peers, of those heard at least once, have been silent for lost_after_s. Not
    thread-safe. A rank that does not look itself for half that time was stopped or its machine
    suspended: it could hear nobody meanwhile, and counts that as nobody's silence."""

    def __init__(self, lost_after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lost_after_s, self._clock = lost_after_s, clock
        self._looked_s = clock()
        self._heard_s: dict[int, float] = {}

    def hear(self, peer: int) -> None:
        self._heard_s[peer] = self._clock()

    def forget(self, peer: int) -> None:
        """Until it is heard again."""
        self._heard_s.pop(peer, None)

    def look(self) -> list[int]:
        """To be called several times in lost_after_s."""
        now_s = self._clock()
        missed_s, self._looked_s = now_s - self._looked_s, now_s
        if missed_s > self._lost_after_s / 2:
            self._heard_s = {peer: at_s + missed_s for peer, at_s in self._heard_s.items()}
        heard = sorted(self._heard_s.items())
        return [peer for peer, at_s in heard if now_s - at_s > self._lost_after_s]


class Word(IntEnum):
    ALIVE = 0
    LEFT = 1  # the sender has done its part, and looks no more
    ENDED = 2  # the line to a rank broke
    SILENT = 3  # a rank sent no heartbeat for too long


class FailureDetector:
    """What one rank knows of the others while they join and run. Thread-safe.

    name_of: of a rank, for messages. on_lost: called in a thread, once, when ranks are lost that
    this one needs. It must end the process: the main thread may wait in torch. needs: whether it
    needs any of these, until `met`; by default it needs each that has come.
    """

    def __init__(
        self,
        rank: int,
        name_of: Callable[[int], str],
        lost_after_s: float,
        on_lost: Callable[[LinkError], None],
        needs: Callable[[frozenset[int]], bool] = bool,
    ) -> None:
        self._rank, self._name_of, self._on_lost, self._needs = rank, name_of, on_lost, needs
        self._lost_after_s = lost_after_s
        self._beat_s = min(BEAT_S, lost_after_s / 4)
        self._lines: dict[int, threading.Thread] = {}  # one of each peer counts
        self._greetings: dict[int, threading.Thread] = {}  # lines that are not joined yet
        self._unreached: dict[int, str] = {}  # why there is no line to a rank that has come
        self.why_not: Callable[[int], str | None] = lambda peer: None
        self._lost: dict[int, Word] = {}
        self._silence = Silence(lost_after_s)
        self._lives: Mapping[int, PeerLife] = {}
        self._last_words: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._has_met = self._has_left = self._is_closing = self._is_ending = False
        self.over = threading.Event()  # nothing ends this rank any more
        threading.Thread(target=self._look, name="liveness", daemon=True).start()

    def watch(
        self, peer: int, store: Store, anew: Collection[int] = (), at_once: bool = True
    ) -> None:
        """From now on `peer` is here: rank 0 calls it for each other rank, these for rank 0, with
        the same part of the store, which nothing else uses.

        anew: ranks that begin again with it: what befell them before is forgotten.
        at_once: it replaces an earlier line to that rank; else only once it is joined, where a
        number in the store is all that says so.
        """
        thread = threading.Thread(target=self._follow, args=(peer, store, anew), daemon=True)
        with self._changed:
            if at_once or peer not in self._lines:
                self._lines[peer] = thread
            self._greetings[peer] = thread
            thread.start()

    def is_greeting(self, peer: int) -> bool:
        """Whether a line to `peer` is neither joined nor given up."""
        with self._changed:
            return peer in self._greetings and self._greetings[peer].is_alive()

    def ask(self, store: Store) -> None:
        """Until `met`: whether the store still answers, asked through a client of its own."""
        own: Store = store.clone()  # type: ignore[attr-defined]

        def ask() -> None:
            while not (self._has_met or self.over.wait(self._beat_s)):
                try:
                    own.check(["is there"])
                except RuntimeError:
                    return  # the main thread meets it too
                with self._changed:
                    if not self._has_met:
                        self._silence.hear(STORE)

        threading.Thread(target=ask, name="store", daemon=True).start()

    def met(
        self,
        needs: Callable[[frozenset[int]], bool],
        lives: Mapping[int, PeerLife],
        last_words: Callable[[], None],
    ) -> None:
        """This rank has all its links. lives: where they note what they wait for. last_words:
        called before on_lost, for GRACE_S at most."""
        with self._changed:
            self._has_met = True
            self._needs, self._lives, self._last_words = needs, lives, last_words
            self._silence.forget(STORE)

    def leave(self) -> None:
        """This rank has done its part: from now on its end is no loss."""
        self.over.set()
        self._has_left = True
        self._end_lines(self._lost_after_s)

    def close(self) -> None:
        """This rank ends with a reason of its own; it tells the others of a loss that it knows."""
        self.over.set()
        self._is_closing = True
        self._end_lines(GRACE_S)

    def _end_lines(self, within_s: float) -> None:
        """Of those that are there, after what there is to say."""
        until_s = time.monotonic() + within_s
        with self._changed:
            self._changed.notify_all()
            lines = [line for peer, line in self._lines.items() if peer not in self._lost]
        for line in lines:
            line.join(max(0.0, until_s - time.monotonic()))

    def _follow(self, peer: int, store: Store, anew: Collection[int]) -> None:
        this, told = threading.current_thread(), set[int]()
        try:
            if (why := self.why_not(peer)) is not None:
                if self._lines[peer] is this:
                    self._unreached[peer] = why
                    self._lose(Word.ENDED, peer)
                return
            line = Line(store, int(self._rank != 0), self._lost_after_s)
            self._joined(peer, anew)
            self._hear(peer)
            if self._rank == 0:
                line.send(Word.ALIVE, 0)
            while True:
                word, rank = line.receive(self._name_of(peer))
                if word is Word.LEFT:
                    with self._changed:
                        self._silence.forget(peer)
                    return
                self._hear(peer)
                if word is not Word.ALIVE:
                    if self._rank == 0:  # which finds out itself, and tells the others
                        raise FrameError(f"{self._name_of(peer)} calls rank {rank} lost")
                    self._lose(word, rank)
                said = self._next_word(peer, told)
                if said is None:
                    return
                told.add(said[1])
                line.send(*said)
                if said[0] is Word.LEFT or (self._is_closing and said[0] is not Word.ALIVE):
                    return
        except FrameError as error:
            self._end(error)
        except RuntimeError as error:
            if self._lines[peer] is this:
                is_late = any(sign in str(error).lower() for sign in ("timed out", "timeout"))
                self._lose(Word.SILENT if is_late else Word.ENDED, peer)
        finally:
            with self._changed:
                if self._greetings.get(peer) is this:
                    del self._greetings[peer]

    def _joined(self, peer: int, anew: Collection[int]) -> None:
        """The line of this thread takes the place of an earlier one."""
        with self._changed:
            for rank in anew:
                self._lost.pop(rank, None)
            self._silence.forget(peer)
            self._unreached.pop(peer, None)
            self._lines[peer] = threading.current_thread()
            self._greetings.pop(peer, None)

    def _next_word(self, peer: int, told: set[int]) -> tuple[Word, int] | None:
        """What to say to `peer`, when it is time to; None: nothing more."""

        def news() -> tuple[Word, int] | None:
            for rank, word in self._lost.items() if self._rank == 0 else ():
                if rank not in (peer, *told):
                    return word, rank
            return (Word.LEFT, self._rank) if self._has_left else None

        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or news(), self._beat_s)
            return news() or (None if self._is_closing else (Word.ALIVE, self._rank))

    def _hear(self, peer: int) -> None:
        with self._changed:
            self._silence.hear(peer)
            if self._lost.get(peer) is Word.SILENT:
                del self._lost[peer]

    def _look(self) -> None:
        while not self.over.wait(self._beat_s / 2):
            with self._changed:
                silent = self._silence.look()
            for peer in silent:
                self._lose(Word.SILENT, peer)

    def _lose(self, word: Word, rank: int) -> None:
        with self._changed:
            self._silence.forget(rank)  # until it is heard again
            self._lost.setdefault(rank, word)
            self._changed.notify_all()
            if not self._needs(frozenset(self._lost)):
                return
            error = self._error()
        self._end(error)

    def _error(self) -> LinkError:
        named = [r for r in self._lost if self._needs(frozenset([r]))] or [*self._lost]
        names = " and ".join("the store" if r == STORE else self._name_of(r) for r in named)
        reasons = [self._unreached[rank] for rank in named if rank in self._unreached]
        if reasons:
            return LinkTimeout(f"{names} cannot be reached: {reasons[0]}")
        awaited = [self._lives[rank].awaited for rank in named if rank in self._lives]
        waits = [f" while this rank waited for {found[0]}" for found in awaited if found]
        when = "".join(waits[:1]) if self._has_met else " while the ranks joined"
        if any(self._lost[r] is Word.ENDED for r in named):
            return LinkClosed(f"{names} ended{when}")
        what = "that machine" if STORE in named else "that rank"
        return LinkTimeout(
            f"{names} sent no heartbeat for {self._lost_after_s:g} s{when}. Is {what} stopped, "
            "or its link down?"
        )

    def _end(self, error: LinkError) -> None:
        if self.over.wait(GRACE_S):
            return
        with self._changed:
            is_loss = isinstance(error, FrameError) or self._needs(frozenset(self._lost))
            if self._is_ending or not is_loss:  # heard again, or not needed since `met`
                return
            self._is_ending = True
        # A thread of its own: it may fail, or wait for a rank that is lost.
        speaking = threading.Thread(target=self._last_words, daemon=True)
        speaking.start()
        speaking.join(GRACE_S)
        self._on_lost(error)


class Line:
    """Raises RuntimeError once the other side is gone, or does not join it in timeout_s. It sets
    no other limit: FailureDetector looks how long it is silent."""

    def __init__(self, store: Store, place: int, timeout_s: float) -> None:
        self._pair = Pair(store, "life", "", place)
        self._pair.join(timedelta(seconds=timeout_s))

    def send(self, word: Word, rank: int) -> None:
        message = torch.tensor([word, rank])
        self._pair.isend(message, 0).wait(FOREVER)

    def receive(self, sender: str) -> tuple[Word, int]:
        message = torch.zeros(2, dtype=torch.int64)
        self._pair.irecv(message, 0).wait(FOREVER)
        word, rank = message.tolist()
        if word not in [*Word] or rank < 0:
            raise FrameError(f"{sender} sent ({word}, {rank}) where a heartbeat was due")
        return Word(word), rank
