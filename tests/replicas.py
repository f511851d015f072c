"""Replicas in one process: their links in memory, which may end, and averagers run together."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from xcloud.base.errors import FrameError, LinkClosed, LinkTimeout
from xcloud.features.replicas.averaging import Averager, ReplicaLinks, ReplicaPeer
from xcloud.net.frame import MessageKey, Tensors, TensorSpec

PATIENCE_S = 20.0


@dataclass
class Post:
    """What replicas in threads have sent each other, in order."""

    num_replicas: int
    queues: dict[tuple[int, int], list[tuple[MessageKey, Tensors]]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def links(self, replica: int, num_shares: int = 1) -> PostLinks:
        peers = [ReplicaPeer(r, f"c{r}", (r,)) for r in range(self.num_replicas)]
        return PostLinks(replica, peers, self.num_replicas, num_shares, 1, self)

    def end(self, replica: int) -> None:
        """As if its process had been killed: what it sent before still arrives."""
        with self.changed:
            self.gone.add(replica)
            self.changed.notify_all()

    def begin_again(self, replica: int) -> None:
        with self.changed:
            self.gone.discard(replica)
            for ends in list(self.queues):
                if replica in ends:
                    del self.queues[ends]


@dataclass
class PostLinks(ReplicaLinks):
    """Of one replica. num_bytes: of the parts that it sent."""

    office: Post
    num_bytes: int = 0
    raw_bytes: int = 0
    patience_s: float = PATIENCE_S

    def open(self, capacity_bytes: int, wait_s: float = 0.0, under_way: int = 1) -> None: ...

    def post(
        self,
        replica: int,
        key: MessageKey,
        parts: Tensors,
        carries: Sequence[str],
        raw_bytes: int,
    ) -> None:
        assert len(carries) == len(parts)
        with self.office.changed:
            if replica in self.office.gone:
                raise LinkClosed(f"replica {replica} is gone")
            copies = tuple(part.clone() for part in parts)
            self.office.queues.setdefault((self.replica, replica), []).append((key, copies))
            self.office.changed.notify_all()
        self.num_bytes += sum(TensorSpec.of(part).num_bytes for part in parts)
        self.raw_bytes += raw_bytes

    def next(self, replica: int, key: MessageKey, wait_s: float | None = None) -> Tensors:
        if wait_s is None:
            wait_s = self.patience_s
        elif wait_s == math.inf:  # and all live, until they are gone
            wait_s = self.patience_s + PATIENCE_S
        deadline_s = time.monotonic() + wait_s
        with self.office.changed:
            while not (queue := self.office.queues.get((replica, self.replica), [])):
                if replica in self.office.gone:
                    raise LinkClosed(f"replica {replica} is gone")
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self.office.changed.wait(left_s):
                    raise LinkTimeout(f"no {key} from replica {replica}")
            came, parts = queue.pop(0)
        if came != key:
            raise FrameError(f"expected {key}, got {came}")
        return parts


def connected(num_replicas: int) -> list[PostLinks]:
    post = Post(num_replicas)
    return [post.links(replica) for replica in range(num_replicas)]


def averagers(num_replicas: int, make: Callable[[ReplicaLinks], Averager]) -> list[Averager]:
    return [make(links) for links in connected(num_replicas)]


def exchange(
    replicas: Sequence[Averager],
    step: int,
    tensors: Sequence[Sequence[Tensor]],
    weights: Sequence[float] | None = None,
) -> list[list[Tensor]]:
    """What each replica has after step `step`; `tensors` by replica."""
    for replica, averager in enumerate(replicas):
        averager.start(step, tensors[replica], 1.0 if weights is None else weights[replica])
    return finished(replicas, step)


def finished(replicas: Sequence[Averager], step: int) -> list[list[Tensor]]:
    """All at once: some wait for others. What comes of it is used if all of it is finite."""
    with ThreadPoolExecutor(len(replicas)) as pool:
        found = list(pool.map(lambda averager: averager.finish(step).changes[0], replicas))
    for averager, tensors in zip(replicas, found, strict=True):
        averager.settle(all(bool(tensor.isfinite().all()) for tensor in tensors))
    return found


def same_bits(tensors: Sequence[Sequence[Tensor]]) -> bool:
    """NaN included."""
    return all(
        torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        for others in tensors[1:]
        for one, other in zip(tensors[0], others, strict=True)
    )
