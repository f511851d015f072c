"""How one rank of a job reaches the others: where they meet, what `wire` asks for (Transport), and
our carrier, gloo. Its transport is one process group that all ranks join, or, where ranks may end
and begin again, a process group of two for each direction of each link.

A transport promises no collective over ranks of several clouds.
"""

from __future__ import annotations

import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from xcloud.base.errors import ConfigError, LinkTimeout
from xcloud.cluster.gloo_link import GlooInLink, GlooOutLink, PeerInGroup
from xcloud.cluster.link_end import InSettings, OutSettings, ReceivingEnd, SendingEnd

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> int:
    """Below 2**60; the same in all processes on a machine until it reboots. Containers on one
    kernel are one machine. Without Linux's boot id all processes get the same id."""
    host = _BOOT_ID.read_text() if _BOOT_ID.exists() else "one host"
    return int(hashlib.sha256(host.encode()).hexdigest()[:15], 16)


def num_cores() -> int:
    """That this process may use; on macOS, which does not say, all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Torch's limits end nothing here. Links have deadlines of their own; a rank that is stopped or cut
# off while others wait for it in a collective is ended, or these are, by the launcher on one
# machine (launch/processes.py), by heartbeats on several (join/failure_detector.py).
FOREVER = timedelta(days=30)


JOIN_WITHIN_S = 12 * 3600.0
_LOOK_S = 0.05


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a job meet before they have links. store: of all of them. within_s: how
    long ranks that have not come are waited for. is_open: ranks may begin at any time, also again;
    beginning: how often this one has, with this time."""

    rank: int
    num_ranks: int
    store: Store
    within_s: float = JOIN_WITHIN_S
    is_open: bool = False
    beginning: int = 1

    def write(self, name: str, text: str) -> None:
        self.store.set(name, text)

    def read(self, name: str, rank: int) -> str:
        """What `rank` writes by this name. Raises LinkTimeout naming it."""
        try:
            self.store.wait([name], timedelta(seconds=self.within_s))
        except dist.DistStoreError:
            raise LinkTimeout(
                f"rank {rank} has not come in {self.within_s:g} s (cluster.liveness.join_within_s)"
            ) from None
        return self.store.get(name).decode("utf-8", "replace")

    def gather(self, name: str, text: str, ranks: Iterable[int]) -> list[str]:
        """What each of `ranks` writes by this name, of which this rank is one."""
        self.write(f"{name}.{self.rank}", text)
        return [self.read(f"{name}.{rank}", rank) for rank in ranks]


def meeting_store(
    rank: int, run_dir: Path, host: str | None, port: int, within_s: float = JOIN_WITHIN_S
) -> Store:
    """Of all ranks: a file on one machine; over several a server in rank 0, at host:port, which is
    there within_s from now. Who then waits in it for a rank waits as long as that one and rank 0
    live (join/failure_detector.py); a server that ends is noticed at once."""
    store: Store
    if host is None:
        # Not by its URL, which would end at a '#' or '?' in the path.
        store = FileStore(str(run_dir.resolve() / "rendezvous"), -1)
    else:
        within = timedelta(seconds=within_s)
        store = TCPStore(host, port, None, rank == 0, within, wait_for_workers=False)
    store.set_timeout(FOREVER)
    return store


class Collectives(Protocol):
    """Between the ranks of one cloud, or of one stage. All of them make the same calls in the same
    order, with tensors of the same shape and dtype."""

    def barrier(self) -> None: ...

    def sum(self, values: Tensor) -> None:
        """In place."""

    def start_sum(self, values: Tensor) -> Callable[[], object]:
        """In place, while the caller goes on: the returned call waits for it. Until then nobody
        touches `values`."""

    def broadcast(self, values: Tensor, source: int) -> None:
        """In place, from rank `source`."""

    def gather(self, values: Tensor) -> list[Tensor]:
        """Of every rank, in the order of the group."""

    def mesh(self, device: torch.device) -> DeviceMesh:
        """The same ranks, as torch takes them to shard tensors over."""


CPU = torch.device("cpu")


class Transport(ABC):
    """Every rank of a job calls `line` and `group` with the same arguments in the same order."""

    computing: AbstractContextManager[object] = nullcontext()
    """Held by the one rank that computes, where ranks share a process and must take turns."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting, self.rank = meeting, meeting.rank

    def line(self, name: str, ranks: Sequence[int]) -> None:  # noqa: B027
        """From now on `out` and `incoming` may make ends of this name between these ranks; one
        name is one direction between any two of them. Called in the other ranks too."""

    @abstractmethod
    def out(self, line: str, peer: int, settings: OutSettings) -> SendingEnd: ...

    @abstractmethod
    def incoming(self, line: str, peer: int, settings: InSettings) -> ReceivingEnd: ...

    @abstractmethod
    def group(self, ranks: Sequence[int], device: torch.device = CPU) -> Collectives | None:
        """What joins several ranks of a cloud; None for a single one, and outside them. device: of
        this rank's tensors; the ranks agree on its type."""

    def begins_again(self, ranks: Sequence[int]) -> bool:
        """Whether all of these ranks have begun again since it was asked last. The ends made from
        now on are with the new ones."""
        return False

    def run_number(self) -> int:
        """The same in all ranks, and not that of an earlier run."""
        if self.rank == 0:
            self.meeting.write("run number", str(time.time_ns()))
        return int(self.meeting.read("run number", 0))

    def machines(self) -> set[int]:
        """`machine_id` of every rank; in an open meeting of rank 0 and this one, as there are no
        links between others."""
        ranks = {0, self.rank} if self.meeting.is_open else range(self.meeting.num_ranks)
        return set(map(int, self.meeting.gather("machine", str(machine_id()), ranks)))


class Gloo:
    """The carrier where `cluster.carrier` names no other."""

    def transport(self, meeting: Meeting) -> Transport:
        if meeting.is_open:
            return PairTransport(meeting)
        if meeting.num_ranks > 1:
            dist.init_process_group(
                "gloo", store=meeting.store, rank=meeting.rank, world_size=meeting.num_ranks,
                timeout=timedelta(seconds=JOIN_WITHIN_S),
            )  # fmt: skip
        return GlooTransport(meeting)


class GlooTransport(Transport):
    """Over the process group of torch.distributed that all ranks of the job have joined."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(meeting)
        self._lines: dict[str, dist.ProcessGroup] = {}

    def line(self, name: str, ranks: Sequence[int]) -> None:
        """A process group for each direction keeps a link full duplex."""
        self._lines[name] = dist.new_group(list(ranks), timeout=FOREVER)

    def out(self, line: str, peer: int, settings: OutSettings) -> SendingEnd:
        return GlooOutLink(PeerInGroup(self._lines[line], peer), settings)

    def incoming(self, line: str, peer: int, settings: InSettings) -> ReceivingEnd:
        return GlooInLink(PeerInGroup(self._lines[line], peer), settings)

    def group(self, ranks: Sequence[int], device: torch.device = CPU) -> Collectives | None:
        if len(ranks) == 1:
            return None
        group = dist.new_group(list(ranks), timeout=FOREVER)
        return GlooCollectives(group, device) if self.rank in ranks else None


class GroupCollectives:
    """Over a process group of these ranks. (A ProcessGroupGloo, of whose methods torch's
    annotations know few.)"""

    def __init__(self, group: Any, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, list(ranks)

    def _over(self, values: Tensor) -> Any:
        return self._group

    def barrier(self) -> None:
        self._group.barrier().wait()

    def sum(self, values: Tensor) -> None:
        self.start_sum(values)()

    def start_sum(self, values: Tensor) -> Callable[[], object]:
        wait: Callable[[], object] = self._over(values).allreduce([values]).wait
        return wait

    def broadcast(self, values: Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = self._ranks.index(source)
        self._over(values).broadcast([values], options).wait()

    def gather(self, values: Tensor) -> list[Tensor]:
        gathered = [torch.zeros_like(values) for _ in self._ranks]
        self._over(values).allgather([gathered], [values]).wait()
        return gathered

    def mesh(self, device: torch.device) -> DeviceMesh:
        raise ConfigError(
            "clouds that may begin again shard no tensors over ranks; leave shard out"
        )


class GlooCollectives(GroupCollectives):
    """Over gloo; tensors on GPUs over NCCL, where each of the ranks has a GPU of its own. NCCL
    knows no two ranks on one GPU: these go over gloo, through the memory of the host."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device = CPU) -> None:
        super().__init__(group, dist.get_process_group_ranks(group))
        self._nccl = None
        if device.type == "cuda" and self._has_a_gpu_each(device):
            # Its own limit would end the process while a rank waits for another cloud.
            self._nccl = dist.new_group(
                self._ranks, timeout=FOREVER, backend="nccl", use_local_synchronization=True
            )

    def _has_a_gpu_each(self, device: torch.device) -> bool:
        """Asked in all of these ranks."""
        places = self.gather(torch.tensor([machine_id(), device.index or 0]))
        return len({tuple(place.tolist()) for place in places}) == len(places)

    def _over(self, values: Tensor) -> Any:
        return self._nccl if self._nccl is not None and values.is_cuda else self._group

    def mesh(self, device: torch.device) -> DeviceMesh:
        """Over gloo on CPUs, over NCCL on GPUs. ConfigError where two ranks have one GPU."""
        from torch.distributed.device_mesh import DeviceMesh

        if device.type != "cuda":
            return DeviceMesh.from_group(self._group, device.type)
        if self._nccl is None:
            raise ConfigError(
                f"cloud.shard: ranks {self._ranks} shard a stage over NCCL, which needs a GPU for "
                "each, and two of them share one; give the cloud as many ranks as GPUs "
                "(cluster.clouds.NAME.num_ranks), or set its device to cpu"
            )
        return DeviceMesh.from_group(self._nccl, device.type)


class Pair:
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
