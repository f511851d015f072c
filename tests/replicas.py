"""Replicas in one process: their links in memory, and averagers that run one after the other."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from xcloud.base.errors import FrameError, LinkTimeout
from xcloud.cluster.frame import MessageKey, TensorSpec
from xcloud.cluster.link import Parts
from xcloud.parallel.averaging import Averager


class _Lines:
    """What is on its way, by (sender, receiver)."""

    def __init__(self) -> None:
        self.mail = defaultdict[tuple[int, int], list[tuple[MessageKey, Parts]]](list)
        self.changed = threading.Condition()


@dataclass
class MemoryLinks:
    """One replica's ReplicaLinks, in order. num_bytes: of the parts that it sent."""

    replica: int
    num_replicas: int
    lines: _Lines
    num_bytes: int = 0
    raw_bytes: int = 0
    patience_s: float = 5.0

    def send(
        self,
        to_replica: int,
        key: MessageKey,
        parts: Parts,
        carries: Sequence[str],
        raw_bytes: int,
    ) -> None:
        assert len(carries) == len(parts)
        self.num_bytes += sum(TensorSpec.of(part).num_bytes for part in parts)
        self.raw_bytes += raw_bytes
        with self.lines.changed:
            self.lines.mail[self.replica, to_replica].append((key, copy.deepcopy(parts)))
            self.lines.changed.notify_all()

    def recv(
        self,
        from_replica: int,
        key: MessageKey,
        specs: Sequence[TensorSpec] | None,
        wait_s: float | None = None,
    ) -> Parts:
        mail = self.lines.mail[from_replica, self.replica]
        wait_s = self.patience_s if wait_s is None else wait_s
        with self.lines.changed:
            if not self.lines.changed.wait_for(lambda: mail, wait_s):
                raise LinkTimeout(f"no {key} from replica {from_replica}")
            found, parts = mail.pop(0)
        if found != key or (specs is not None and list(map(TensorSpec.of, parts)) != list(specs)):
            raise FrameError(f"expected {key} {specs}, got {found}")
        return parts


def connected(num_replicas: int) -> list[MemoryLinks]:
    lines = _Lines()
    return [MemoryLinks(replica, num_replicas, lines) for replica in range(num_replicas)]


def averagers(num_replicas: int, make: Callable[[MemoryLinks], Averager]) -> list[Averager]:
    return [make(links) for links in connected(num_replicas)]


def exchange(
    replicas: Sequence[Averager],
    step: int,
    tensors: Sequence[Sequence[Tensor]],
    weights: Sequence[float] | None = None,
) -> list[list[Tensor]]:
    """What each replica has after step `step`; `tensors` by replica."""
    for replica, averager in enumerate(replicas):
        averager.most_weight = lambda num_steps: 100.0  # type: ignore[attr-defined]
        averager.start(step, tensors[replica], 1.0 if weights is None else weights[replica])
    return finished(replicas, step)


def finished(replicas: Sequence[Averager], step: int) -> list[list[Tensor]]:
    """All at once: some wait for others."""
    with ThreadPoolExecutor(len(replicas)) as pool:
        return list(pool.map(lambda averager: averager.finish(step), replicas))


def same_bits(found: Sequence[Sequence[Tensor]]) -> bool:
    """NaN included."""
    return all(
        torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        for others in found[1:]
        for one, other in zip(found[0], others, strict=True)
    )
