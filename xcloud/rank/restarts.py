"""Ranks that may begin more than once.

Where a cloud may be late or lost, a rank begins at any time, also again, and compares what it has
loaded with what rank 0 has put into the store. Under torchrun with --max-restarts all restart
together. There ranks watch each other (net/failure_detector.py).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistNetworkError

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
from xcloud.net.failure_detector import Connect, FailureDetector
from xcloud.net.gloo_link import heartbeat_link
from xcloud.net.link_end import ignore
from xcloud.net.rendezvous import count_of, of_this_attempt, value_of
from xcloud.net.transport import Rendezvous, rendezvous_store
from xcloud.pipeline.trainer import Trainer
from xcloud.rank.agreement import rank_name
from xcloud.record.files import rank_file

_LOOK_EVERY_S = 0.2
_RING_WITHIN_S = 10.0
_REFUSED_FOR_S = 20.0  # a rank that begins again has not yet said where it listens now


def enter_late(
    job: Job, rendezvous: Rendezvous, run_dir: Path, trainer: Trainer, from_step: int
) -> None:
    """Report to the launcher that this rank is there. If the rank has restarted or the run
    resumes, get the values of the first cloud, or send them.

    from_step: step of the checkpoint from which all resume.
    """
    if rendezvous.rank not in job.roster.essential:
        # From here on the launcher lets the run continue without this rank.
        rank_file(run_dir, rendezvous.rank, "ready").touch()
    if rendezvous.beginning > 1 or from_step:
        # The first cloud has gone on meanwhile. Its values and its number of updates hold.
        trainer.num_updates = trainer.exchange.resume(trainer.num_updates)


def rendezvous_at_any_time(job: Job, rank: int, run_dir: Path) -> Rendezvous:
    """Return the rendezvous of ranks that may start, and restart, at any time. It is at a server
    in rank 0 if MASTER_ADDR and MASTER_PORT are set, otherwise in the run folder."""
    within_s = job.cluster.liveness.join_within_s
    host = os.environ.get("MASTER_ADDR")
    port = int(os.environ.get("MASTER_PORT", "0"))
    port += "TORCHELASTIC_RUN_ID" in os.environ  # torchrun's agent serves at that port itself
    if host is None:
        store = rendezvous_store(run_dir)
    else:
        store = store_at(host, port, serves=rank == 0, within_s=within_s)
    # A counter, so that links with an earlier process of this rank are told from those with this
    # one.
    beginning = int(store.add(f"beginnings.{rank}", 1))
    return Rendezvous(
        rank,
        num_ranks=job.cluster.num_processes,
        store=store,
        within_s=within_s,
        is_open=True,
        beginning=beginning,
    )


def rendezvous_under_torchrun(
    job: Job, rank: int, run_dir: Path, detector: FailureDetector, say: Callable[[str], None]
) -> Rendezvous:
    """Find the ranks of all machines, on the interface that faces MASTER_ADDR.

    say: called once a minute with the ranks that are waited for.
    """
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    if job.roster.is_elastic:
        choose_interface(host)
        rendezvous = rendezvous_at_any_time(job, rank, run_dir)
        watch(rendezvous, detector=detector, layout=job.cluster)
        return replace(rendezvous, detector=detector)
    num_ranks = int(os.environ["WORLD_SIZE"])
    within_s = job.cluster.liveness.join_within_s
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # its agent serves
    store = store_of_machines(
        host,
        port,
        rank,
        num_ranks=num_ranks,
        serves=rank == 0 and not by_torchrun,
        detector=detector,
        within_s=within_s,
        name_of=partial(rank_name, job),
        say=say,
    )
    return Rendezvous(rank, num_ranks, store, within_s, detector=detector)


def store_of_machines(
    host: str,
    port: int,
    rank: int,
    num_ranks: int,
    serves: bool,
    detector: FailureDetector,
    within_s: float,
    name_of: Callable[[int], str],
    say: Callable[[str], None],
) -> Store:
    """Return the store, for this attempt, of ranks on several machines, which watch each other
    from here on.

    rank: among these, counted from 0, as the detector counts.
    serves: this rank is the store's server.
    say: called once a minute with the ranks that are waited for.
    """
    address = choose_interface(host)

    def connect(timeout_s: float) -> Store:
        store = store_at(host, port, serves=serves, within_s=timeout_s)
        # gloo connects to ports of its own, which a firewall may close while the store is reached.
        detector.why_not = Doorbell(store, rank, address, place=f"{host}:{port}").why_not
        detector.ask(store)
        return store

    return attempt_of(
        connect,
        rank,
        num_ranks,
        watch=lambda peer, part: detector.watch(peer, over_gloo(part, rank, detector)),
        within_s=within_s,
        name_of=name_of,
        say=say,
    )


def over_gloo(store: Store, rank: int, detector: FailureDetector) -> Connect:
    """Return what makes this rank's link of heartbeats in a part of the store of its own."""
    return partial(heartbeat_link, store, rank, detector.liveness.lost_after_s)


class Doorbell:
    """A port of this rank, chosen by the system as gloo's are, at which others try in seconds
    whether they reach it: gloo itself tries for minutes.

    place: host and port of the store, for messages.
    """

    def __init__(self, store: Store, rank: int, address: str, place: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # Nobody accepts: the system answers a connection by itself, which is all that is asked.
        self._listening = socket.create_server((address, 0), family=family, backlog=256)
        self._address = address
        self._place = place
        self._store = store.clone()  # type: ignore[attr-defined]
        port = self._listening.getsockname()[1]
        self._store.set(f"address.{rank}", f"{address} {port}")

    def close(self) -> None:
        self._listening.close()

    def why_not(self, peer: int) -> str | None:
        """Return why this rank has no connection to `peer`, which has come; None if it has."""
        until_s = time.monotonic() + _REFUSED_FOR_S
        while True:
            host, _, port = value_of(self._store, name=f"address.{peer}").rpartition(" ")
            if not host or not port.isdecimal():
                return None  # it does not say
            why = why_unreachable(host, port=int(port), within_s=_RING_WITHIN_S)
            if why is None:
                return None
            # A port of the process before is refused until this peer's new process has said its
            # own.
            if "refused" not in why or time.monotonic() > until_s:
                return unreachable(
                    why, store=self._place, here=self._address, there=f"{host}:{port}"
                )
            time.sleep(_LOOK_EVERY_S)


def unreachable(why: str, store: str, here: str, there: str) -> str:
    """Say why two ranks that both reach the store have no connection, and what to do.

    why: the system's own message.
    here: the address on which this rank listens.
    there: address and port of the other rank.
    """
    if is_loopback(here) != is_loopback(there.rpartition(":")[0]):
        # The most usual cause: the host's name stands for 127.0.1.1 in /etc/hosts.
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


def watch(rendezvous: Rendezvous, detector: FailureDetector, layout: Layout) -> None:
    """Watch rank 0 from the others, and in rank 0 every rank that begins, also again.

    Rank 0 looks for them as long as it lives. It greets one that begins once an earlier greeting
    of it has come to an end.
    """
    store = rendezvous.store.clone()  # type: ignore[attr-defined]
    if rendezvous.rank != 0:
        part = heartbeats_of(store, rank=rendezvous.rank, beginning=rendezvous.beginning)
        return detector.watch(0, over_gloo(part, rank=rendezvous.rank, detector=detector))
    greeted = dict.fromkeys(range(1, layout.num_ranks), 0)

    def greet() -> None:
        while not detector.over.wait(_LOOK_EVERY_S):
            for rank, before in list(greeted.items()):
                beginning = count_of(store, name=f"beginnings.{rank}")
                if beginning > before and not detector.is_greeting(rank):
                    greeted[rank] = beginning
                    # Of this beginning alone: in the part of an earlier process somebody may still
                    # wait for a dead one.
                    part = heartbeats_of(store.clone(), rank, beginning)
                    # The ranks of a cloud end together, so the others of it begin again, too.
                    cloud = layout.ranks_in(layout.cloud_of(rank))
                    connect = over_gloo(part, rank=rendezvous.rank, detector=detector)
                    detector.watch(rank, connect, restarted=cloud, at_once=False)

    threading.Thread(target=greet, name="greeting", daemon=True).start()


def heartbeats_of(store: Store, rank: int, beginning: int) -> Store:
    """Return the part of the store for heartbeats between rank 0 and this beginning of another."""
    return PrefixStore(f"heartbeats {rank}.{beginning}", store)


def attempt_of(
    connect: Callable[[float], Store],
    rank: int,
    num_ranks: int,
    watch: Callable[[int, Store], None],
    within_s: float,
    name_of: Callable[[int], str] = "rank {}".format,
    say: Callable[[str], None] = ignore,
) -> Store:
    """Return `of_this_attempt` of the store that `connect` finds in at most within_s seconds.

    A rank that is started again may find the store of an attempt that just ends: it then looks
    again.
    """
    until_s = time.monotonic() + within_s
    while True:
        left_s = max(1.0, until_s - time.monotonic())
        try:
            return of_this_attempt(
                connect(left_s),
                rank,
                ranks=range(num_ranks),
                within_s=left_s,
                watch=watch,
                name_of=name_of,
                say=say,
            )
        # The store of the attempt before: its server was about to end.
        except DistNetworkError:
            if rank == 0 or time.monotonic() > until_s:
                raise
        time.sleep(_LOOK_EVERY_S)
