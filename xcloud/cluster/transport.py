"""How one rank of a job reaches the others: what `wire` asks for, and gloo's answer.

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


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> int:
    """Below 2**60; the same in all processes on a machine until it reboots. Containers on one
    kernel are one machine. Without Linux's boot id all processes get the same id."""
    host = _BOOT_ID.read_text() if _BOOT_ID.exists() else "one host"
    return int(hashlib.sha256(host.encode()).hexdigest()[:15], 16)


def num_cores() -> int:
    """That this process may use; on macOS, which does not tell, all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Torch's limits end nothing here. Links have deadlines of their own; a rank that is stopped or cut
# off while others wait for it in a collective is ended, or these are, by the launcher on one
# machine (launch/processes.py), by signs of life on several (join/failure_detector.py).
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
        """The same ranks, as torch takes them to deal tensors over."""


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
