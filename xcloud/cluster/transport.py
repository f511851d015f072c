"""How one rank of a job reaches the others: what `wire` asks for, and gloo's two answers. One is
the process group that all ranks join. The other's ranks may end and begin again: a process group
of two for each direction of each link, one for the ranks of a cloud, and none that joins more.

A transport promises no collective over ranks of several clouds but what stands here by name.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from xcloud.base.errors import ConfigError
from xcloud.cluster.gloo_link import GlooInLink, GlooOutLink, PeerInGroup
from xcloud.cluster.link_end import InSettings, OutSettings, ReceivingEnd, SendingEnd

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from xcloud.base.errors import LinkTimeout

if TYPE_CHECKING:
    pass


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


class Transport(Protocol):
    """Every rank of a job calls `line` and `group` with the same arguments in the same order."""

    rank: int

    @property
    def computing(self) -> AbstractContextManager[object]:
        """Held by the one rank that computes, where ranks share a process and must take turns."""

    def line(self, name: str, ranks: Sequence[int]) -> None:
        """From now on `out` and `incoming` may make ends of this name between these ranks; one
        name is one direction between any two of them. Called in the other ranks too."""

    def out(self, line: str, peer: int, settings: OutSettings) -> SendingEnd: ...

    def incoming(self, line: str, peer: int, settings: InSettings) -> ReceivingEnd: ...

    def group(self, ranks: Sequence[int]) -> Collectives | None:
        """What joins several ranks; None for a single one, and outside them."""

    def begins_again(self, ranks: Sequence[int]) -> bool:
        """Whether all of these ranks have begun again since it was asked last. The ends made from
        now on are with the new ones."""

    def run_number(self) -> int:
        """The same in all ranks, and not that of an earlier run."""

    def machines(self) -> list[int]:
        """`machine_id` of every rank."""


CPU = torch.device("cpu")


class GlooTransport:
    """Over the process group of torch.distributed that all ranks of the job have joined. device:
    of this rank's tensors; the ranks of a group agree on its type."""

    def __init__(self, rank: int, device: torch.device = CPU) -> None:
        self.rank, self._device = rank, device
        self.computing = nullcontext()
        self._lines: dict[str, dist.ProcessGroup] = {}

    def line(self, name: str, ranks: Sequence[int]) -> None:
        """A process group for each direction keeps a link full duplex."""
        self._lines[name] = dist.new_group(list(ranks), timeout=FOREVER)

    def out(self, line: str, peer: int, settings: OutSettings) -> SendingEnd:
        return GlooOutLink(PeerInGroup(self._lines[line], peer), settings)

    def incoming(self, line: str, peer: int, settings: InSettings) -> ReceivingEnd:
        return GlooInLink(PeerInGroup(self._lines[line], peer), settings)

    def group(self, ranks: Sequence[int]) -> Collectives | None:
        if len(ranks) == 1:
            return None
        group = dist.new_group(list(ranks), timeout=FOREVER)
        return GlooCollectives(group, self._device) if self.rank in ranks else None

    def begins_again(self, ranks: Sequence[int]) -> bool:
        return False  # a process group ends with its first rank

    def run_number(self) -> int:
        number = torch.tensor([time.time_ns()])
        dist.broadcast(number, 0)
        return int(number)

    def machines(self) -> list[int]:
        mine = torch.tensor([machine_id()])
        found = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
        return [int(machine) for machine in found]


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
        newest beginning of every other knows of its own, and then writes so."""
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
