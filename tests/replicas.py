"""Replicas in one process: their links in memory, and averagers that run one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from xcloud.cluster.frame import MessageKey
from xcloud.cluster.link import Parts
from xcloud.cluster.tensor_spec import TensorSpec
from xcloud.errors import FrameError, LinkTimeout
from xcloud.parallel.averaging import Averager


@dataclass
class MemoryLinks:
    """One replica's ReplicaLinks; `mail` is shared by all. num_bytes: of the parts it sent."""

    replica: int
    num_replicas: int
    mail: dict[tuple[int, int, MessageKey], Parts] = field(default_factory=dict)
    num_bytes: int = 0
    raw_bytes: int = 0

    def send(
        self,
        to_replica: int,
        key: MessageKey,
        parts: Parts,
        carries: Sequence[str],
        raw_bytes: int,
    ) -> None:
        assert len(carries) == len(parts)
        assert (self.replica, to_replica, key) not in self.mail
        self.mail[self.replica, to_replica, key] = copy.deepcopy(parts)
        self.num_bytes += sum(TensorSpec.of(part).num_bytes for part in parts)
        self.raw_bytes += raw_bytes

    def recv(
        self,
        from_replica: int,
        key: MessageKey,
        specs: tuple[TensorSpec, ...] | None = None,
        wait_s: float | None = None,
    ) -> Parts:
        if (from_replica, self.replica, key) not in self.mail:
            raise LinkTimeout(f"no {key} from replica {from_replica}")
        parts = self.mail.pop((from_replica, self.replica, key))
        if specs is not None and tuple(map(TensorSpec.of, parts)) != specs:
            raise FrameError(f"{key}: {[TensorSpec.of(part) for part in parts]}")
        return parts


def connected(num_replicas: int) -> list[MemoryLinks]:
    mail: dict[tuple[int, int, MessageKey], Parts] = {}
    return [MemoryLinks(replica, num_replicas, mail) for replica in range(num_replicas)]


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
        averager.start(step, tensors[replica], 1.0 if weights is None else weights[replica])
    return [averager.finish(step) for averager in replicas]


def same_bits(found: Sequence[Sequence[Tensor]]) -> bool:
    """NaN included."""
    return all(
        torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        for others in found[1:]
        for one, other in zip(found[0], others, strict=True)
    )
