"""One value of each tensor for all replicas, over the links between clouds. Which tensors, when,
and what is done with the result is for those who call it.

Shapes: R replicas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from xcloud.base.errors import FrameError
from xcloud.cluster.frame import Kind, MessageKey, TensorSpec, frame_bytes
from xcloud.cluster.link import Parts
from xcloud.comm.state import MEMORY, State, Stateful, load_states, split_state, states_of
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.parallel.mailbox import Mailbox
from xcloud.parallel.merging import Contribution, Merge, check_merge, weighted_sum
from xcloud.parallel.norm import are_finite
from xcloud.parallel.pieces import dealt, joined
from xcloud.parallel.replica_links import ReplicaLinks

MakeCodec = Callable[[Mapping[str, torch.Size]], TensorCodec]

Watch = Callable[[int, int, Mapping[str, Tensor]], None]
"""Told of a contribution of another replica: step, replica, its decoded tensors by name."""
_WEIGHT = TensorSpec((1,), torch.float64)
_UNDER_WAY = f"{MEMORY}.under_way"
_HANDED_BACK = 1 << 16
"""Added to the channel in the key of what an aggregator sends back."""


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

    def finish(self, step: int) -> list[Tensor]:
        """Receive and merge what was started as `step`: the same bits in every replica. If one of
        them is not finite, nobody is to use any: with feedback it is as if nothing had been sent.

        Raises LinkTimeout or LinkClosed for one that is late or gone; may be called again.
        """


@dataclass
class _UnderWay:
    """A step between `start` and `finish`. own: this replica's contribution as it is merged here.
    sent: what `own` and all messages can be made of again, by the name of the codec or "own".
    results: of aggregators. before: the residuals of codecs before they encoded for this step, to
    which they go back if the result is not finite: nobody uses it. None is known after a restart.
    """

    weight: float
    own: list[Tensor]
    sent: dict[str, Parts]
    num_steps: int = 0  # since the one before it
    received: dict[int, Contribution] = field(default_factory=dict)
    results: dict[int, list[Tensor]] = field(default_factory=dict)
    before: dict[str, Sequence[Tensor | None]] = field(default_factory=dict)


class _Averager(ABC):
    """What both kinds share: contributions to steps under way, sent, received and restored.

    watch: if set, told of each contribution that comes. most_weight: that a replica can have for
    what it did in so many steps.
    """

    watch: Watch | None = None
    most_weight: Callable[[int], float] = float

    def __init__(
        self,
        links: ReplicaLinks | Mailbox,
        codecs: Mapping[str, TensorCodec],
        merge: Merge,
        channel: int,
    ) -> None:
        self._mail, self._codecs, self._merge = Mailbox.of(links), dict(codecs), merge
        self._channel = channel
        check_merge(merge, self._mail.num_replicas)
        for codec in codecs.values():
            codec.of_replica(self._mail.replica)
        self._steps: dict[int, _UnderWay] = {}
        self._last_step = 0

    @property
    def max_bytes(self) -> int:
        return max(frame_bytes(_specs(codec)) for codec in self._codecs.values())

    def start(self, step: int, tensors: Sequence[Tensor], weight: float = 1.0) -> None:
        assert step not in self._steps, f"step {step} is under way"
        before = {name: codec.residuals for name, codec in self._codecs.items()}
        self._steps[step] = self._encoded(tensors, weight)
        under_way = self._steps[step]
        under_way.num_steps, self._last_step = step - self._last_step, step
        under_way.before |= {name: before[name] for name in before if name in under_way.sent}
        self._send(step)

    def state_dict(self) -> State:
        state = states_of(self._codecs)
        for step, under_way in self._steps.items():
            weight = torch.tensor([under_way.weight], dtype=torch.float64)
            sent = {"weight": (weight,), **under_way.sent}
            state |= {
                f"{_UNDER_WAY}.{step}.{name}.{i}": part
                for name, parts in sent.items()
                for i, part in enumerate(parts)
            }
        return state

    def load_state_dict(self, state: State) -> None:
        """Restores, and sends again what was under way."""
        under_way = {n: value for n, value in state.items() if n.startswith(_UNDER_WAY)}
        steps = {n.removeprefix(f"{_UNDER_WAY}."): value for n, value in under_way.items()}
        load_states(self._codecs, state, "an averager", own=under_way)
        self._steps = {}
        device = next(iter(self._codecs.values())).device  # a checkpoint is read to the CPU
        numbers = sorted({name.partition(".")[0] for name in steps}, key=int)
        for number, parts in split_state(steps, numbers, "messages under way").items():
            names = dict.fromkeys(name.partition(".")[0] for name in parts)
            sent = {
                name: tuple(torch.as_tensor(own[str(i)]) for i in range(len(own)))
                for name, own in split_state(parts, names, "a message under way").items()
            }
            (weight,) = sent.pop("weight")
            sent = {name: tuple(part.to(device) for part in own) for name, own in sent.items()}
            own, step = self._own_of(sent), int(number)
            self._steps[step] = _UnderWay(float(weight), own, sent, step)
            self._send(step)

    @abstractmethod
    def _encoded(self, tensors: Sequence[Tensor], weight: float) -> _UnderWay: ...

    @abstractmethod
    def _own_of(self, sent: dict[str, Parts]) -> list[Tensor]: ...

    @abstractmethod
    def _codec_to(self, replica: int) -> str:
        """The name of the codec of contributions to this replica."""

    def _send(self, step: int) -> None:
        under_way = self._steps[step]
        answer = self._codecs[self._codec_to(self._mail.replica)]
        for replica in self._mail.others:
            name = self._codec_to(replica)
            self._tell(
                replica, self._key(step), self._codecs[name], under_way.sent[name],
                under_way.weight, answer,
            )  # fmt: skip

    def _tell(
        self,
        replica: int,
        key: MessageKey,
        codec: TensorCodec,
        parts: Parts,
        weight: float,
        answer: TensorCodec,
    ) -> None:
        message = (torch.tensor([weight], dtype=torch.float64), *parts)
        carries = ("weight of this replica", *codec.carries)
        self._mail.send(replica, key, message, carries, codec.raw_bytes, _specs(answer))

    def _hear(self, replica: int, key: MessageKey, codec: TensorCodec) -> Contribution:
        weight, *parts = self._mail.recv(replica, key)
        most = self.most_weight(self._steps[key.step].num_steps)
        return contribution_of(replica, float(weight), most, codec, parts)

    def _contribution(self, replica: int, step: int) -> Contribution:
        under_way = self._steps[step]
        if replica == self._mail.replica:
            return Contribution(under_way.own, under_way.weight)
        if replica not in under_way.received:
            codec = self._codecs[self._codec_to(self._mail.replica)]
            found = self._hear(replica, self._key(step), codec)
            under_way.received[replica] = found
            if self.watch is not None:
                self.watch(step, replica, dict(zip(codec.names, found.tensors, strict=True)))
        return under_way.received[replica]

    def _merged(self, step: int) -> list[Tensor]:
        replicas = range(self._mail.num_replicas)
        return self._merge([self._contribution(replica, step) for replica in replicas])

    def _end(self, step: int, merged: Sequence[Tensor]) -> None:
        """It is under way no more. If the result is not finite, codecs forget what they sent."""
        ended = self._steps.pop(step)
        later = next(iter(self._steps.values()), None)  # encoded with what this one had left
        for name, before in () if are_finite(merged) else ended.before.items():
            self._codecs[name].undo(before, later.before.get(name) if later else None)
            if later is not None:
                later.before[name] = before

    def _key(self, step: int, more: int = 0) -> MessageKey:
        return MessageKey(Kind.AVERAGING, step, self._channel + more)


class AllToAll(_Averager):
    """Every replica sends its message to every other: R - 1 messages each way, one latency.

    A replica uses of its own tensors what the others decode. For R = 2 nothing is cheaper.
    channel: tells averagers apart that use the same links (fragments of a model), below 2^16.
    """

    def __init__(
        self,
        links: ReplicaLinks | Mailbox,
        codec: TensorCodec,
        merge: Merge = weighted_sum,
        channel: int = 0,
    ) -> None:
        super().__init__(links, {"all": codec}, merge, channel)

    def finish(self, step: int) -> list[Tensor]:
        merged = self._merged(step)
        self._end(step, merged)
        return merged

    def _encoded(self, tensors: Sequence[Tensor], weight: float) -> _UnderWay:
        parts, seen = self._codecs["all"].encode(tensors)
        return _UnderWay(weight, seen, {"all": parts})

    def _own_of(self, sent: dict[str, Parts]) -> list[Tensor]:
        return self._codecs["all"].decode(sent["all"])

    def _codec_to(self, replica: int) -> str:
        return "all"


class Aggregators(_Averager):
    """Each replica merges a part of about equal size: it gathers the others' contributions, merges
    them with its own, which crossed no link, and hands back the result, encoded again.

    2 (R - 1) / R messages' worth each way instead of R - 1, and two latencies: cheaper from R = 3
    on. Errors are made twice, and both sides keep what they lost: a contributor of what it sent,
    an aggregator of what it handed back. All replicas use what was handed back.
    Large tensors are cut between rows. A robust merge sees the part, not the whole.

    new_codec: of these tensors, the same in all replicas.
    """

    def __init__(
        self,
        links: ReplicaLinks | Mailbox,
        shapes: Mapping[str, torch.Size],
        new_codec: MakeCodec,
        merge: Merge = weighted_sum,
        channel: int = 0,
    ) -> None:
        self._shapes = list(shapes.values())
        self._parts = dealt(shapes, links.num_replicas)
        by_name = [{piece.name: piece.shape for piece in part} for part in self._parts]
        codecs = {str(replica): new_codec(part) for replica, part in enumerate(by_name)}
        codecs["handed_back"] = new_codec(by_name[links.replica])
        super().__init__(links, codecs, merge, channel)

    def finish(self, step: int) -> list[Tensor]:
        everybody = range(self._mail.num_replicas)
        key, results = self._key(step, _HANDED_BACK), self._steps[step].results
        if self._mail.replica not in results:
            codec = self._codecs["handed_back"]
            self._steps[step].before["handed_back"] = codec.residuals
            parts, results[self._mail.replica] = codec.encode(self._merged(step))
            for replica in self._mail.others:
                self._tell(replica, key, codec, parts, 1.0, self._codecs[str(replica)])
        for replica in self._mail.others:
            if replica not in results:
                codec = self._codecs[str(replica)]
                results[replica] = self._hear(replica, key, codec).tensors
        self._end(step, [tensor for r in everybody for tensor in results[r]])
        found = [pair for r in everybody for pair in zip(self._parts[r], results[r], strict=True)]
        return joined(found, self._shapes)

    def _encoded(self, tensors: Sequence[Tensor], weight: float) -> _UnderWay:
        sent: dict[str, Parts] = {}
        for replica, part in enumerate(self._parts):
            pieces = tuple(piece.of(tensors) for piece in part)
            if replica == self._mail.replica:
                sent["own"] = tuple(piece.detach().clone() for piece in pieces)
            else:
                sent[str(replica)], _ = self._codecs[str(replica)].encode(pieces)
        return _UnderWay(weight, self._own_of(sent), sent)

    def _own_of(self, sent: dict[str, Parts]) -> list[Tensor]:
        return list(sent["own"])

    def _codec_to(self, replica: int) -> str:
        return str(replica)


def averager_for(
    links: ReplicaLinks | Mailbox,
    shapes: Mapping[str, torch.Size],
    new_codec: MakeCodec,
    merge: Merge = weighted_sum,
    channel: int = 0,
) -> AllToAll | Aggregators:
    """The one that sends least: all to all between two replicas, aggregators among more."""
    if links.num_replicas == 2:
        return AllToAll(links, new_codec(shapes), merge, channel)
    return Aggregators(links, shapes, new_codec, merge, channel)


def contribution_of(
    replica: int, weight: float, most: float, codec: TensorCodec, parts: Sequence[Tensor]
) -> Contribution:
    """A replica's message, decoded. most: its weight. Raises FrameError, naming the replica."""
    if not 0 <= weight <= most:
        raise FrameError(f"replica {replica} sent a weight of {weight}; its steps allow {most}")
    try:
        return Contribution(codec.decode(tuple(parts)), weight)
    except FrameError as error:
        raise FrameError(f"replica {replica}: {error}") from error


def _specs(codec: TensorCodec) -> tuple[TensorSpec, ...]:
    return (_WEIGHT, *codec.wire_specs)
