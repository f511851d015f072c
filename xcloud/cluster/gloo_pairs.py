"""Links between ranks that may begin at any time, also again: over gloo, with a process group of
two for each direction of each link.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from xcloud.base.errors import LinkTimeout
from xcloud.cluster.collectives import GroupCollectives
from xcloud.cluster.gloo_link import GlooInLink, GlooOutLink, Peer
from xcloud.cluster.link_end import InSettings, OutSettings, ReceivingEnd, SendingEnd
from xcloud.cluster.transport import CPU, FOREVER, Collectives, Meeting, Transport

_LOOK_S = 0.05


class GlooPairs:
    """The carrier of open meetings where `cluster.carrier` names no other."""

    def transport(self, meeting: Meeting) -> Transport:
        return PairTransport(meeting)


class Pair(Peer):
    """The process group of one direction between two ranks. It is joined at its first use, in the
    thread of the link's end, and waits there for the other side, which may come at any time. Who
    wants something of that end waits no longer than its deadline."""

    def __init__(self, store: Store, name: str, place: int) -> None:
        self._store, self._name, self._place = store, name, place
        self._group: Any = None

    def isend(self, frame: Tensor, tag: int) -> dist.Work:
        work: dist.Work = self._joined().send([frame], 1 - self._place, tag)
        return work

    def irecv(self, buffer: Tensor, tag: int) -> dist.Work:
        work: dist.Work = self._joined().recv([buffer], 1 - self._place, tag)
        return work

    def _joined(self) -> Any:
        if self._group is None:
            # A client of its own: whoever waits in a store keeps others of that client waiting.
            own: Any = self._store.clone()  # type: ignore[attr-defined]
            own.set_timeout(FOREVER)
            store = PrefixStore(self._name, own)
            self._group = dist.ProcessGroupGloo(store, self._place, 2, FOREVER)
        return self._group


class PairTransport(Transport):
    """Of ranks that may begin at any time, also again."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(meeting)
        self._store = meeting.store
        self._known: dict[int, int] = {}  # beginnings of peers with which links were made
        self._num_groups = 0
        self._parts: dict[tuple[int, ...], Store] = {}  # of ranks that begin together

    def begins_again(self, ranks: Sequence[int]) -> bool:
        newest = {peer: self._count(peer) for peer in ranks}
        if any(count <= self._known.get(peer, 1) for peer, count in newest.items()):
            return False
        self._known |= newest
        return True

    def out(self, line: str, peer: int, settings: OutSettings) -> SendingEnd:
        return GlooOutLink(self._pair(line, self.rank, peer), settings)

    def incoming(self, line: str, peer: int, settings: InSettings) -> ReceivingEnd:
        return GlooInLink(self._pair(line, peer, self.rank), settings)

    def group(self, ranks: Sequence[int], device: torch.device = CPU) -> Collectives | None:
        """Of ranks that end and begin together; over gloo on GPUs too."""
        self._num_groups += 1
        if len(ranks) == 1 or self.rank not in ranks:
            return None
        if tuple(ranks) not in self._parts:
            own = PrefixStore(f"ranks {'-'.join(map(str, ranks))}", self._store)
            part = of_this_attempt(own, self.rank, ranks, self.meeting.within_s)
            self._parts[tuple(ranks)] = part
        store = PrefixStore(f"group {self._num_groups}", self._parts[tuple(ranks)])
        place = list(ranks).index(self.rank)
        group = dist.ProcessGroupGloo(store, place, len(ranks), FOREVER)
        return GroupCollectives(group, ranks)

    def _count(self, rank: int) -> int:
        return (
            self.meeting.beginning
            if rank == self.rank
            else int(self._store.add(f"beginnings.{rank}", 0))
        )

    def _pair(self, line: str, sender: int, receiver: int) -> Pair:
        counts = [
            self.meeting.beginning if rank == self.rank else self._known.get(rank, 1)
            for rank in (sender, receiver)
        ]
        name = f"{line} {sender}.{counts[0]}-{receiver}.{counts[1]}"
        return Pair(self._store, name, int(self.rank == receiver))


def of_this_attempt(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    within_s: float,
    watch: Callable[[int, Store], None] = lambda peer, line: None,
) -> Store:
    """A part of the store that no earlier attempt of `ranks` to begin together has used. Every one
    of them calls it.

    The first of them numbers the attempt, the others sign in for it, and it begins once the first
    has named all of them: a rank that was signed in and has died is not among those who wait for
    that word.

    watch: called in the first rank with every other one that has come, in these with the first,
    and with a part of the store for the two. Ranks that have not come are waited for within_s;
    then raises LinkTimeout naming them.
    """
    first, *missing = ranks
    names: dict[int, str] = {}
    mine, until_s = uuid.uuid4().hex, time.monotonic() + within_s
    if rank == first:
        part = f"attempt.{store.add('attempt.count', 1)}"
        store.set("attempt", part)
    else:
        part, missing = "", [first]
    while time.monotonic() < until_s:
        if rank == first:
            for other in [r for r in missing if store.check([f"{part}.{r}"])]:
                missing.remove(other)
                names[other] = store.get(f"{part}.{other}").decode()
                watch(other, _line(store, part, names[other]))
            if not missing:
                store.set(f"{part}.all", ",".join(names.values()))
                return PrefixStore(part, store)
        elif store.check(["attempt"]):
            current = store.get("attempt").decode()
            if store.check([f"{current}.all"]):
                if mine in store.get(f"{current}.all").decode().split(","):
                    return PrefixStore(current, store)
            elif current != part:
                part = current
                store.set(f"{part}.{rank}", mine)
                watch(first, _line(store, part, mine))
        time.sleep(_LOOK_S)
    who = ", ".join(map(str, missing))
    raise LinkTimeout(
        f"ranks {who} have not come in {within_s:g} s (cluster.liveness.join_within_s)"
    )


def _line(store: Store, part: str, name: str) -> Store:
    # A client of its own: whoever waits in a store keeps others of that client waiting.
    return PrefixStore(f"{part}.line.{name}", store.clone())  # type: ignore[attr-defined]
