"""All ranks of a job in one process, each in a thread of its own: links and collectives without a
network. Frames, windows, counts and records are those of real links; there is no time.

A message is delivered in the sender's thread, so a failure has one cause and one place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from xcloud.base.errors import ConfigError, LinkError, LinkTimeout
from xcloud.cluster.frame import Kind, seal_frame
from xcloud.cluster.link_end import (
    InSettings,
    Outgoing,
    OutSettings,
    ReceivingEnd,
    SendingEnd,
)
from xcloud.cluster.transport import CPU, Collectives, Meeting, Transport

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PATIENCE_S = 60.0


class MemoryWorld:
    """What the ranks of one job share. `transport(rank)` for each of them."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.num_ranks, self.store = num_ranks, HashStore()
        self.computing = threading.Lock()  # torch's random generator is one for all threads
        self._lock = threading.Lock()
        self._lines: dict[tuple[str, int, int], _Line] = {}
        self._groups: dict[tuple[int, ...], _Meeting] = {}

    def transport(self, rank: int) -> MemoryTransport:
        return MemoryTransport(self, rank)

    def line(self, name: str, sender: int, receiver: int) -> _Line:
        with self._lock:
            return self._lines.setdefault((name, sender, receiver), _Line())

    def meeting(self, ranks: tuple[int, ...]) -> _Meeting:
        with self._lock:
            return self._groups.setdefault(ranks, _Meeting(len(ranks)))


class MemoryTransport(Transport):
    def __init__(self, world: MemoryWorld, rank: int) -> None:
        super().__init__(Meeting(rank, world.num_ranks, world.store))
        self._world, self.computing = world, world.computing

    def out(self, line: str, peer: int, settings: OutSettings) -> SendingEnd:
        if settings.clock is not None:
            raise ConfigError("links in memory emulate no line; set cluster/wan=free")
        return MemoryOutLink(self._world.line(line, self.rank, peer), settings)

    def incoming(self, line: str, peer: int, settings: InSettings) -> ReceivingEnd:
        return MemoryInLink(self._world.line(line, peer, self.rank), settings)

    def group(self, ranks: Sequence[int], device: torch.device = CPU) -> Collectives | None:
        if len(ranks) == 1 or self.rank not in ranks:
            return None
        return MemoryCollectives(self._world.meeting(tuple(ranks)), tuple(ranks), self.rank)


class _Line:
    """One direction between two ranks. Frames wait here until the receiving end is made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Tensor] = []
        self._take: Callable[[Tensor], None] | None = None

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
    def __init__(self, line: _Line, settings: OutSettings) -> None:
        super().__init__(settings)
        self._line = line

    def close(self, timeout_s: float) -> None:
        with self._sending:
            self._say_goodbye()

    def _put(self, item: Outgoing) -> None:
        key, sequence, frame, queued_at_s = item
        seal_frame(frame, -time.monotonic())
        self.record.sending(key, sequence, frame.numel(), queued_at_s)
        self._line.carry(frame)


class MemoryInLink(ReceivingEnd):
    def __init__(self, line: _Line, settings: InSettings) -> None:
        super().__init__(settings)
        line.attach(self._take)

    def _take(self, buffer: Tensor) -> None:
        if self._over.is_set():
            return
        try:
            frame = self._open(buffer)
            if frame.key.kind is Kind.GOODBYE:
                self._leave()
            else:
                self._deliver(frame)
        except LinkError as error:
            self._end(error)


class _Meeting:
    """Ranks that show each other one tensor after the other."""

    def __init__(self, num_ranks: int) -> None:
        self._num_shown = [0] * num_ranks
        self._rounds: dict[int, dict[int, Tensor]] = {}  # by number, by place
        self._changed = threading.Condition()

    def show(self, place: int, values: Tensor) -> Callable[[], list[Tensor]]:
        """The returned call waits for the others and returns copies of everybody's. It raises
        LinkTimeout if somebody does not come."""
        with self._changed:
            number, self._num_shown[place] = self._num_shown[place], self._num_shown[place] + 1
            shown = self._rounds.setdefault(number, {})
            shown[place] = values.clone()
            self._changed.notify_all()

        def wait() -> list[Tensor]:
            num_ranks = len(self._num_shown)
            with self._changed:
                if not self._changed.wait_for(lambda: len(shown) == num_ranks, PATIENCE_S):
                    raise LinkTimeout(
                        f"a rank of a group of {num_ranks} did not come to a collective call in "
                        f"{PATIENCE_S:.0f} s"
                    )
                self._rounds.pop(number, None)
            return [shown[place].clone() for place in range(num_ranks)]

        return wait


class MemoryCollectives:
    def __init__(self, meeting: _Meeting, ranks: tuple[int, ...], rank: int) -> None:
        self._meeting, self._ranks, self._place = meeting, ranks, ranks.index(rank)

    def barrier(self) -> None:
        self.gather(torch.zeros(0))

    def sum(self, values: Tensor) -> None:
        self.start_sum(values)()

    def start_sum(self, values: Tensor) -> Callable[[], object]:
        shown = self._meeting.show(self._place, values)
        return lambda: values.copy_(torch.stack(shown()).sum(0))

    def broadcast(self, values: Tensor, source: int) -> None:
        values.copy_(self.gather(values)[self._ranks.index(source)])

    def gather(self, values: Tensor) -> list[Tensor]:
        return self._meeting.show(self._place, values)()

    def mesh(self, device: torch.device) -> DeviceMesh:
        raise NotImplementedError("torch shards tensors over processes only")
