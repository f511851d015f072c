"""Links between ranks that may begin at any time, also again: over gloo, with a process group of
two for each direction of each link.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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
        self._met: dict[tuple[int, ...], int] = {}  # beginnings of the first rank, by group

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
        number = self._meet(tuple(ranks))
        name = f"group {self._num_groups} of {'-'.join(map(str, ranks))}, {number}"
        store = PrefixStore(name, self._store)
        place = list(ranks).index(self.rank)
        group = dist.ProcessGroupGloo(store, place, len(ranks), FOREVER)
        return GroupCollectives(group, ranks)

    def _meet(self, ranks: tuple[int, ...]) -> int:
        """How often the first of these ranks has begun. All of them begin together, but may have
        begun unequally often: one may be lost before it has counted. So the first waits until the
        newest beginning of every other knows of its own, and then writes so."""
        first, *others = ranks
        until_s = time.monotonic() + self.meeting.within_s
        if ranks not in self._met:
            mine = others if self.rank == first else [self.rank]
            while missing := [other for other in mine if not self._has_met(first, other)]:
                if time.monotonic() > until_s:
                    others = missing if self.rank == first else [first]
                    raise LinkTimeout(
                        f"ranks {', '.join(map(str, others))} of this rank's cloud have not come "
                        f"in {self.meeting.within_s:g} s (cluster.liveness.join_within_s)"
                    )
                time.sleep(_LOOK_S)
            self._met[ranks] = self.meeting.beginning if self.rank == first else self._count(first)
            if self.rank == first:
                for other in others:
                    self._store.set(f"met {self._both(first, other)}", "")
        return self._met[ranks]

    def _has_met(self, first: int, other: int) -> bool:
        if self.rank == first:
            return self._store.check([f"come {self._both(first, other)}"])
        self._store.set(f"come {self._both(first, other)}", "")
        return self._store.check([f"met {self._both(first, other)}"])

    def _both(self, first: int, other: int) -> str:
        return f"{other}.{self._count(other)} to {first}.{self._count(first)}"

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
