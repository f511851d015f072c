"""A transport whose ranks may end and begin again: a process group of two for each direction of
each link, and one for the ranks of a cloud. No group joins more than one cloud but those of two.

Ranks meet in a store. Each counts how often it has begun; the count is part of the names of its
groups, so that a rank that begins again never meets what its predecessor left (torchft does so).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from xcloud.base.errors import LinkTimeout
from xcloud.cluster.gloo_link import GlooInLink, GlooOutLink
from xcloud.cluster.link_end import InSettings, OutSettings, ReceivingEnd, SendingEnd
from xcloud.cluster.transport import FOREVER, Collectives, GroupCollectives, machine_id

if TYPE_CHECKING:
    pass

JOIN_WITHIN_S = 12 * 3600.0
_LOOK_S = 0.05


def meeting_store(
    rank: int, run_dir: Path, host: str | None, port: int, within_s: float = JOIN_WITHIN_S
) -> Store:
    """Of all ranks: a file on one machine; over several a server in rank 0, at host:port, which is
    there within_s from now. Who then waits in it for a rank waits as long as that one and rank 0
    live (join/failure_detector.py); a server that ends is noticed at once."""
    store: Store
    if host is None:
        store = FileStore(str(run_dir.resolve() / "rendezvous"), -1)
    else:
        within = timedelta(seconds=within_s)
        store = TCPStore(host, port, None, rank == 0, within, wait_for_workers=False)
    store.set_timeout(FOREVER)
    return store


_Group = Any
"""A ProcessGroupGloo, of whose methods torch's annotations know few."""


class Pair:
    """The process group of one direction between two ranks. It is joined at its first use, in the
    thread of the link's end, and waits there for the other side, which may come at any time. Who
    wants something of that end waits no longer than its deadline."""

    def __init__(self, store: Store, name: str, place: int) -> None:
        self._store, self._name, self._place = store, name, place
        self._group: _Group = None

    def isend(self, frame: Tensor, tag: int) -> dist.Work:
        work: dist.Work = self._joined().send([frame], 1 - self._place, tag)
        return work

    def irecv(self, buffer: Tensor, tag: int) -> dist.Work:
        work: dist.Work = self._joined().recv([buffer], 1 - self._place, tag)
        return work

    def _joined(self) -> _Group:
        if self._group is None:
            # A client of its own: whoever waits in a store keeps others of that client waiting.
            own: Any = self._store.clone()  # type: ignore[attr-defined]
            own.set_timeout(FOREVER)
            store = PrefixStore(self._name, own)
            self._group = dist.ProcessGroupGloo(store, self._place, 2, FOREVER)
        return self._group


class PairTransport:
    """beginning: 1, or how often this rank has begun. within_s: how long ranks of its cloud that
    have not begun are waited for."""

    def __init__(self, rank: int, store: Store, within_s: float = JOIN_WITHIN_S) -> None:
        self.rank, self.store, self._within_s = rank, store, within_s
        self.computing = nullcontext()
        self.beginning = int(store.add(f"beginnings.{rank}", 1))
        self._known: dict[int, int] = {}  # beginnings of peers with which links were made
        self._num_groups = 0
        self._met: dict[tuple[int, ...], int] = {}  # beginnings of the first rank, by group

    @property
    def is_newcomer(self) -> bool:
        """Whether this rank begins again in a job that goes on."""
        return self.beginning > 1

    def begins_again(self, ranks: Sequence[int]) -> bool:
        newest = {peer: int(self.store.add(f"beginnings.{peer}", 0)) for peer in ranks}
        if any(count <= self._known.get(peer, 1) for peer, count in newest.items()):
            return False
        self._known |= newest
        return True

    def line(self, name: str, ranks: Sequence[int]) -> None:
        """Groups are made with the ends."""

    def out(self, line: str, peer: int, settings: OutSettings) -> SendingEnd:
        return GlooOutLink(self._pair(line, self.rank, peer), settings)

    def incoming(self, line: str, peer: int, settings: InSettings) -> ReceivingEnd:
        return GlooInLink(self._pair(line, peer, self.rank), settings)

    def group(self, ranks: Sequence[int]) -> Collectives | None:
        """Of ranks that end and begin together."""
        self._num_groups += 1
        if len(ranks) == 1 or self.rank not in ranks:
            return None
        number = self._meet(tuple(ranks))
        name = f"group {self._num_groups} of {'-'.join(map(str, ranks))}, {number}"
        store = PrefixStore(name, self.store)
        place = list(ranks).index(self.rank)
        group = dist.ProcessGroupGloo(store, place, len(ranks), FOREVER)
        return GroupCollectives(group, ranks)

    def run_number(self) -> int:
        if self.rank == 0:
            self.store.set("run number", str(time.time_ns()))
        return int(self.store.get("run number"))

    def machines(self) -> list[int]:
        """Of rank 0 and this one: links between others there are none."""
        self.store.set(f"machine.{self.rank}", str(machine_id()))
        return [int(self.store.get("machine.0")), machine_id()] if self.rank else [machine_id()]

    def _meet(self, ranks: tuple[int, ...]) -> int:
        """How often the first of these ranks has begun. All of them begin together, but may have
        begun unequally often: one may be lost before it has counted. So the first waits until the
        newest beginning of every other knows of its own, and then tells them."""
        first, *others = ranks
        until_s = time.monotonic() + self._within_s
        if ranks not in self._met:
            mine = others if self.rank == first else [self.rank]
            while missing := [other for other in mine if not self._has_met(first, other)]:
                if time.monotonic() > until_s:
                    others = missing if self.rank == first else [first]
                    raise LinkTimeout(
                        f"ranks {', '.join(map(str, others))} of this rank's cloud have not come "
                        f"in {self._within_s:g} s (cluster.liveness.join_within_s)"
                    )
                time.sleep(_LOOK_S)
            self._met[ranks] = self.beginning if self.rank == first else self._count(first)
            if self.rank == first:
                for other in others:
                    self.store.set(f"met {self._both(first, other)}", "")
        return self._met[ranks]

    def _has_met(self, first: int, other: int) -> bool:
        if self.rank == first:
            return self.store.check([f"come {self._both(first, other)}"])
        self.store.set(f"come {self._both(first, other)}", "")
        return self.store.check([f"met {self._both(first, other)}"])

    def _both(self, first: int, other: int) -> str:
        return f"{other}.{self._count(other)} to {first}.{self._count(first)}"

    def _count(self, rank: int) -> int:
        return (
            self.beginning if rank == self.rank else int(self.store.add(f"beginnings.{rank}", 0))
        )

    def _pair(self, line: str, sender: int, receiver: int) -> Pair:
        counts = [
            self.beginning if rank == self.rank else self._known.get(rank, 1)
            for rank in (sender, receiver)
        ]
        name = f"{line} {sender}.{counts[0]}-{receiver}.{counts[1]}"
        return Pair(self.store, name, int(self.rank == receiver))
