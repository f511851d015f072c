"""All ranks of a job in one process, each in a thread of its own: links without a network. Frames,
windows, counts and records are those of real links; there is no time. Collectives are gloo's.

A message is delivered in the sender's thread, so a failure has one cause and one place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore

from xcloud.base.errors import ConfigError, LinkError
from xcloud.net.frame import Frame, Kind, seal_frame
from xcloud.net.link_end import InSettings, Outgoing, OutSettings, ReceivingEnd, SendingEnd
from xcloud.net.transport import CPU, Collectives, Rendezvous, Transport

T = TypeVar("T")
PATIENCE = timedelta(seconds=60)


@dataclass(eq=False)
class MemoryWorld:
    """The store and the lines that the ranks of one job share in one process."""

    num_ranks: int = 1
    store: HashStore = field(default_factory=HashStore)
    computing: threading.Lock = field(default_factory=threading.Lock)
    """Torch's random generator is one for all threads."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _lines: dict[tuple[str, int, int], _MemoryLine] = field(default_factory=dict)

    def transport(self, rank: int) -> MemoryTransport:
        return MemoryTransport(world=self, rank=rank)

    def line(self, name: str, sender: int, receiver: int) -> _MemoryLine:
        with self._lock:
            return self._lines.setdefault((name, sender, receiver), _MemoryLine())


def in_threads(num_ranks: int, work: Callable[[MemoryTransport], T]) -> list[T]:
    """Run `work` for each rank in a thread of its own. Return what they return, in the order in
    which they end.

    Raises what the first that fails raises; threads of the others may go on.
    """
    world = MemoryWorld(num_ranks)
    threads = ThreadPoolExecutor(num_ranks, "rank")
    working = [threads.submit(work, world.transport(rank)) for rank in range(num_ranks)]
    return [one.result() for one in as_completed(working)]


class MemoryTransport(Transport):
    """The transport of a rank that shares its process with all others."""

    def __init__(self, world: MemoryWorld, rank: int) -> None:
        super().__init__(Rendezvous(rank, num_ranks=world.num_ranks, store=world.store))
        self._world = world
        self.computing = world.computing
        self._num_groups = 0

    def out(self, line: str, peer: int, settings: OutSettings) -> SendingEnd:
        if settings.clock is not None:
            raise ConfigError("links in memory emulate no line; set cluster/wan=free")
        return MemoryOutLink(line=self._world.line(line, self.rank, peer), settings=settings)

    def incoming(self, line: str, peer: int, settings: InSettings) -> ReceivingEnd:
        return MemoryInLink(line=self._world.line(line, peer, self.rank), settings=settings)

    def group(self, ranks: Sequence[int], device: torch.device = CPU) -> Collectives | None:
        self._num_groups += 1
        if len(ranks) == 1 or self.rank not in ranks:
            return None
        store = PrefixStore(f"group {self._num_groups}", self.rendezvous.store)
        return Collectives.joined_in(store, rank=self.rank, ranks=ranks, timeout=PATIENCE)


@dataclass(eq=False)
class _MemoryLine:
    """The memory between two ranks, in one direction. Frames wait here until the receiving end is
    made."""

    blocked: Callable[[], AbstractContextManager[object]] = nullcontext
    _take: Callable[[Tensor], None] | None = None
    _waiting: list[Tensor] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def carry(self, frame: Tensor) -> None:
        with self._lock:
            if self._take is None:
                self._waiting.append(frame)
            else:
                self._take(frame)

    def attach(self, take: Callable[[Tensor], None]) -> None:
        with self._lock:
            self._take = take
            for frame in self._waiting:
                take(frame)
            self._waiting.clear()


class MemoryOutLink(SendingEnd):
    """The sending end of a link in memory."""

    def __init__(self, line: _MemoryLine, settings: OutSettings) -> None:
        super().__init__(settings)
        self._line = line
        line.blocked = settings.blocked

    def close(self, timeout_s: float) -> None:
        with self._sending:
            self._send_closes(self.settings.window.num_posted)

    def _put(self, item: Outgoing) -> None:
        key, sequence, frame, queued_at_s = item
        seal_frame(frame, deliver_at_s=-time.monotonic())
        self.record.sending(key, sequence, num_bytes=frame.numel(), queued_at_s=queued_at_s)
        self._line.carry(frame)


class MemoryInLink(ReceivingEnd):
    """The receiving end of a link in memory."""

    def __init__(self, line: _MemoryLine, settings: InSettings) -> None:
        super().__init__(settings)
        self._line = line
        line.attach(self._take)

    def _keep(self, frame: Frame, timeout_s: float | None = None) -> bool:
        """Queue a frame, in the sender's thread, which may be blocked meanwhile."""
        if super()._keep(frame, 0.0):
            return True
        with self._line.blocked():
            return super()._keep(frame, timeout_s)

    def _take(self, buffer: Tensor) -> None:
        if self._over.is_set():
            return
        try:
            frame = self._open(buffer)
            if frame.key.kind is Kind.CLOSE:
                self._leave()
            else:
                self._deliver(frame)
        except LinkError as error:
            self._end(error)
