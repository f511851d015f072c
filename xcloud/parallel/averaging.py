"""One value of each tensor for all replicas, over the links between clouds. Which tensors, when,
and what is done with the result is for those who call it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from xcloud.cluster.frame import Kind, MessageKey, frame_bytes
from xcloud.cluster.link import Parts
from xcloud.cluster.tensor_spec import TensorSpec
from xcloud.comm.memory import State, Stateful, join_states, split_state
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.errors import FrameError, LinkClosed, LinkTimeout
from xcloud.parallel.merging import Contribution, Merge, weighted_sum
from xcloud.parallel.replica_links import ReplicaLinks

_WEIGHT = TensorSpec((1,), torch.float64)


class Averager(Stateful, Protocol):
    """Brings the tensors of all replicas together; every replica makes the same calls.

    Several steps may be under way at once. Its state holds what is under way too, and a restored
    averager sends it again.
    """

    @property
    def max_bytes(self) -> int:
        """Of its largest frame."""

    def start(self, step: int, tensors: Sequence[Tensor], weight: float = 1.0) -> None:
        """Encode and send; returns before delivery, and keeps nothing of `tensors`."""

    def finish(self, step: int, replicas: Sequence[int] | None = None) -> list[Tensor]:
        """Receive and merge what was started as `step`: the same bits in every replica.

        replicas: whose contributions count, ascending, the same in all; None for all. What a
        replica that is left out had to tell is part of its next message, if it has feedback.
        Raises LinkTimeout or LinkClosed for one that is late or gone; may be called again.
        """


class AllToAll:
    """Every replica sends its message to every other: (R - 1) messages each, one latency.

    A replica uses of its own tensors what the others decode. For R = 2 nothing is cheaper.
    channel: tells averagers apart that use the same links (fragments of a model).
    watch: told of what a merge is made of, if set: its step, and by replica the decoded tensors.
    """

    watch: Callable[[int, Mapping[int, Sequence[Tensor]]], None] | None = None

    def __init__(
        self,
        links: ReplicaLinks,
        codec: TensorCodec,
        merge: Merge = weighted_sum,
        channel: int = 0,
    ) -> None:
        self.links, self.codec, self.merge, self.channel = links, codec, merge, channel
        self._own: dict[int, tuple[Parts, Contribution]] = {}
        self._received: dict[int, dict[int, Contribution]] = {}  # step, replica

    @property
    def max_bytes(self) -> int:
        return frame_bytes((_WEIGHT, *self.codec.wire_specs))

    def start(self, step: int, tensors: Sequence[Tensor], weight: float = 1.0) -> None:
        assert step not in self._own, f"step {step} is under way"
        parts, seen = self.codec.encode(tensors)
        self._own[step] = (parts, Contribution(seen, weight))
        self._send(step)

    def arrived(self, step: int, wait_s: float) -> tuple[int, ...]:
        """The replicas whose contributions to `step` are here, this one's included, when all have
        come or `wait_s` seconds have passed."""
        until_s = time.monotonic() + wait_s
        for replica in self._others:
            try:
                self._receive(replica, step, max(0.0, until_s - time.monotonic()))
            except (LinkTimeout, LinkClosed):
                continue
        return tuple(sorted((self.links.replica, *self._received.get(step, ()))))

    def finish(self, step: int, replicas: Sequence[int] | None = None) -> list[Tensor]:
        chosen = range(self.links.num_replicas) if replicas is None else replicas
        _, own = self._own[step]
        contributions = [
            own if replica == self.links.replica else self._receive(replica, step)
            for replica in chosen
        ]
        del self._own[step]
        self._received.pop(step, None)
        if self.links.replica not in chosen:
            self.codec.take_back(own.tensors)
        if self.watch is not None:
            tensors = [contribution.tensors for contribution in contributions]
            self.watch(step, dict(zip(chosen, tensors, strict=True)))
        return self.merge(contributions)

    def state_dict(self) -> State:
        state = join_states({"codec": self.codec.state_dict()})
        for step, (parts, own) in self._own.items():
            weight = torch.tensor([own.weight], dtype=torch.float64)
            state |= {f"sent.{step}.{i}": part for i, part in enumerate((weight, *parts))}
        return state

    def load_state_dict(self, state: State) -> None:
        """Restores, and sends again what was under way."""
        states = split_state(state, ("codec", "sent"), "an averager")
        self.codec.load_state_dict(states["codec"])
        steps = sorted({name.partition(".")[0] for name in states["sent"]}, key=int)
        self._own = {}
        for step, sent in split_state(states["sent"], steps, "messages under way").items():
            weight, *parts = (sent[str(i)] for i in range(len(sent)))
            assert isinstance(weight, Tensor)
            message = tuple(part for part in parts if isinstance(part, Tensor))
            own = Contribution(self.codec.decode(message), float(weight))
            self._own[int(step)] = (message, own)
            self._send(int(step))

    def _send(self, step: int) -> None:
        parts, own = self._own[step]
        message = (torch.tensor([own.weight], dtype=torch.float64), *parts)
        carries = ("weight of this replica", *self.codec.carries)
        for replica in self._others:
            self.links.send(replica, self._key(step), message, carries, self.codec.raw_bytes)

    def _receive(self, replica: int, step: int, wait_s: float | None = None) -> Contribution:
        received = self._received.setdefault(step, {})
        if replica not in received:
            specs = (_WEIGHT, *self.codec.wire_specs)
            weight, *parts = self.links.recv(replica, self._key(step), specs, wait_s)
            if not 0 <= float(weight) < math.inf:
                raise FrameError(f"replica {replica} sent a weight of {float(weight)}")
            received[replica] = Contribution(self.codec.decode(tuple(parts)), float(weight))
        return received[replica]

    @property
    def _others(self) -> list[int]:
        return [r for r in range(self.links.num_replicas) if r != self.links.replica]

    def _key(self, step: int) -> MessageKey:
        return MessageKey(Kind.AVERAGING, step, self.channel)
