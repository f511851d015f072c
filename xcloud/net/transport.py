"""How one rank of a job reaches the others: where they find each other (Rendezvous), and what
wiring asks for (Transport). Our carrier is gloo (gloo_link.py).

A further carrier is a Transport of its own, named by `cluster.carrier`. It makes the two ends of a
link: a SendingEnd whose `_put` carries one frame after another in order, and a ReceivingEnd that
calls `_open` on each frame that comes, then `_deliver`, and in the end `_leave` for a frame of
kind CLOSE or `_end` with the reason why no more can come. Nothing else is asked of it. Heartbeats
are frames like any other, and both ends note the peer as heard (link_end.py), so a carrier needs
no code for them. tests/line/test_further_carrier.py is a whole one over TCP.

A transport promises no collective over ranks of several clouds.
"""

from __future__ import annotations

import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store

from xcloud.net.failure_detector import FailureDetector
from xcloud.net.link_end import InSettings, OutSettings, ReceivingEnd, SendingEnd
from xcloud.net.rendezvous import FOREVER, JOIN_WITHIN_S
from xcloud.net.words import Words, words_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> int:
    """Return a number below 2**60, the same in all processes on a machine until it reboots.

    Containers on one kernel are one machine. Without Linux's boot id all processes get the same
    number.
    """
    # Not the host's name, which containers on one machine do not share.
    host = _BOOT_ID.read_text() if _BOOT_ID.exists() else "one host"
    return int(hashlib.sha256(host.encode()).hexdigest()[:15], 16)


def num_cores() -> int:
    """Return the number of cores that this process may use; on macOS, which does not say, all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class Rendezvous:
    """A store in which the ranks of a job find each other before they have links.

    within_s: seconds to wait for ranks that have not come.
    is_open: True if ranks may start, and restart, at any time.
    detector: the failure detector of this rank, if ranks watch each other from here on. None: its
        links make one.
    beginning: number of starts of this rank, this one included.
    """

    rank: int
    num_ranks: int
    store: Store
    within_s: float = JOIN_WITHIN_S
    is_open: bool = False
    beginning: int = 1
    detector: FailureDetector | None = None

    @cached_property
    def words(self) -> Words:
        """The texts that this rank and rank 0 send each other."""
        return words_of(
            self.store,
            rank=self.rank,
            num_ranks=self.num_ranks,
            within_s=self.within_s,
            beginning=self.beginning if self.is_open else None,
        )

    def write(self, name: str, text: str) -> None:
        """Send a text to rank 0 by this name, once. Rank 0 sends its own to all that ask."""
        self.words.send_text(name, text)

    def read(self, name: str, rank: int) -> str:
        """Return the text that rank 0 sends by this name or, in rank 0, the text of `rank`. Raises
        LinkTimeout naming a rank that has not come, LinkClosed for one that is gone, FrameError
        for one that sends anything but such texts."""
        return self.words.receive_text(name, rank)


def rendezvous_store(run_dir: Path) -> Store:
    """Return the store of all ranks of one machine, in a file of the run folder."""
    # Not by its URL, which would end at a '#' or '?' in the path.
    store = FileStore(str(run_dir.resolve() / "rendezvous"), -1)
    store.set_timeout(FOREVER)
    return store


class Collectives:
    """The collective operations of the ranks of one cloud, or of one stage: those of a process
    group, which `join` makes at its first use. (Torch's annotations know few of its methods.)

    All ranks make the same calls in the same order, with tensors of the same shape and dtype. sum
    and broadcast (from rank `source`) are in place; what start_sum returns waits for its sum, and
    until then nobody touches `values`. gather is in the order of the group. mesh returns these
    ranks as torch takes them to shard tensors over.
    """

    def __init__(self, join: Callable[[], Any], ranks: Sequence[int]) -> None:
        self._group = cache(join)
        self._ranks = list(ranks)

    @classmethod
    def joined_in(
        cls, store: Store, rank: int, ranks: Sequence[int], timeout: timedelta = FOREVER
    ) -> Collectives:
        """Return the collectives of ranks that find each other in a store.

        store: a part that nothing else uses.
        """
        place = list(ranks).index(rank)
        return cls(lambda: dist.ProcessGroupGloo(store, place, len(ranks), timeout), ranks)

    def group_for(self, values: Tensor) -> Any:
        return self._group()

    def barrier(self) -> None:
        self._group().barrier().wait()

    def sum(self, values: Tensor) -> None:
        self.start_sum(values)()

    def start_sum(self, values: Tensor) -> Callable[[], object]:
        wait: Callable[[], object] = self.group_for(values).allreduce([values]).wait
        return wait

    def broadcast(self, values: Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = self._ranks.index(source)
        self.group_for(values).broadcast([values], options).wait()

    def gather(self, values: Tensor) -> list[Tensor]:
        gathered = [torch.zeros_like(values) for _ in self._ranks]
        self.group_for(values).allgather([gathered], [values]).wait()
        return gathered

    def mesh(self, device: torch.device) -> DeviceMesh:
        raise NotImplementedError("ranks that may restart hold no parts of a tensor")


CPU = torch.device("cpu")


class Transport(ABC):
    """A rank's way to all others.

    A line has a name; with it sender and receiver identify one direction. Every rank of a job
    calls `group` with the same arguments in the same order.
    """

    computing: AbstractContextManager[object] = nullcontext()
    """A lock that the one rank holds that computes, where ranks share a process and take turns."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self.rank = rendezvous.rank

    @abstractmethod
    def out(self, line: str, peer: int, settings: OutSettings) -> SendingEnd:
        """Return the sending end of a line to `peer`."""

    @abstractmethod
    def incoming(self, line: str, peer: int, settings: InSettings) -> ReceivingEnd:
        """Return the receiving end of a line from `peer`."""

    @abstractmethod
    def group(self, ranks: Sequence[int], device: torch.device = CPU) -> Collectives | None:
        """Return the collectives of several ranks of a cloud; None for a single one, and outside
        them.

        device: the device of this rank's tensors. Its type is the same in all the ranks.
        """

    def begins_again(self, ranks: Sequence[int]) -> bool:
        """Return whether all of these ranks have restarted since it was asked last. The ends made
        from now on are with the new ones."""
        return False

    def run_number(self) -> int:
        """Return a number that is the same in all ranks, and not that of an earlier run."""
        if self.rank == 0:
            # Rank 0's clock alone decides, as machines' clocks differ.
            self.rendezvous.write("run number", str(time.time_ns()))
        return int(self.rendezvous.read("run number", 0))

    def machines(self) -> set[int]:
        """Return `machine_id` of this rank and of rank 0: of two, some rank is elsewhere."""
        if self.rank == 0:
            self.rendezvous.write("machine", str(machine_id()))
        return {machine_id(), int(self.rendezvous.read("machine", 0))}
