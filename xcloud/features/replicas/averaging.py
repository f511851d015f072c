"""Averagers, which bring one value of each tensor to all replicas, over links between clouds.
Which tensors, when, and what is done with the result is for those who call them.

Shapes: R replicas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from xcloud.base.errors import FrameError
from xcloud.comm.state import MEMORY, State, Stateful, StatefulTree
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.features.replicas.merging import (
    Contribution,
    Merge,
    by_rows,
    joined,
    weighted_mean,
    weighted_sum,
)
from xcloud.job.strategy import everyone_merges
from xcloud.net.frame import Kind, MessageKey, Tensors, TensorSpec, frame_bytes

_WEIGHT = TensorSpec(shape=(1,), dtype=torch.float64)
_UNDER_WAY = f"{MEMORY}.under_way"
_RESULT = "handed_back"
_HANDED_BACK = 1 << 16
"""Added to the channel in the key of what an aggregator sends back."""


class ReplicaPeer(NamedTuple):
    """A rank in a replica.

    ranks: all ranks of its cloud.
    """

    rank: int
    cloud: str
    ranks: Sequence[int]

    def __str__(self) -> str:
        return f"rank {self.rank} of cloud {self.cloud!r}"


@dataclass
class ReplicaLinks(ABC):
    """The links of one rank, one each way, to the ranks that train the same share of the same
    stages in the other replicas.

    Keys are of Kind.AVERAGING, with the step, and in `micro_batch` a number that distinguishes the
    messages of one step. All replicas send the same keys in the same order, so `recv` can store a
    message that arrives before the one asked for.

    replica: the replica of this rank.
    peers: the counterpart in each replica, this rank's own included; none where it has no
        counterpart.
    num_shares: the number of ranks of each replica that have counterparts, which are the first of
        a group.
    num_parts: the number of such ranks of all stages of a replica.
    """

    replica: int
    peers: Sequence[ReplicaPeer]
    num_replicas: int
    num_shares: int
    num_parts: int
    _expected: dict[int, deque[MessageKey]] = field(
        default_factory=lambda: defaultdict(deque), init=False
    )
    _early: dict[tuple[int, MessageKey], Tensors] = field(default_factory=dict, init=False)

    @property
    def others(self) -> list[int]:
        """The numbers of the other replicas."""
        return [replica for replica in range(self.num_replicas) if replica != self.replica]

    @abstractmethod
    def open(self, capacity_bytes: int, wait_s: float = 0.0, under_way: int = 1) -> None:
        """Open the links, before the first message.

        capacity_bytes: the size of the longest message, frame included; the same in all replicas.
        wait_s: the seconds that another replica may take, if that is longer than its link.
        under_way: the number of exchanges that begin before an earlier one ends.
        """

    def send(
        self, replica: int, key: MessageKey, parts: Tensors, carries: Sequence[str], raw_bytes: int
    ) -> None:
        """Send a message whose counterpart `recv` returns. Returns before delivery.

        carries: a description of each tensor, for the record of what left the cloud.
        raw_bytes: the FP32 bytes of the values that the message stands for; 0 for plain numbers.
        """
        self.post(replica, key, parts, carries=carries, raw_bytes=raw_bytes)
        self._expected[replica].append(key)

    def recv(self, replica: int, key: MessageKey) -> Tensors:
        """Return the counterpart of what was sent there as `key`. Raises as `next` does."""
        expected = self._expected[replica]
        while (replica, key) not in self._early:
            # With overlapped fragments a later message may be asked for first. Those before it are
            # kept.
            self._early[replica, expected[0]] = self.next(replica, expected[0])
            expected.popleft()
        return self._early.pop((replica, key))

    @abstractmethod
    def post(
        self, replica: int, key: MessageKey, parts: Tensors, carries: Sequence[str], raw_bytes: int
    ) -> None:
        """Send a message that has no counterpart; see `send`."""

    @abstractmethod
    def next(self, replica: int, key: MessageKey, wait_s: float | None = None) -> Tensors:
        """Return the next message, which must be `key`. The receiver checks its tensors.

        wait_s: infinite: as long as that rank sends heartbeats; default: what the link's profile
            allows for a message of the largest size.
        Raises FrameError for another message, LinkTimeout after wait_s seconds, LinkClosed if the
        rank is gone. After a LinkTimeout the same message may be asked for again.
        """


def first_part(parts: Tensors, spec: TensorSpec, sender: str) -> tuple[Tensor, Tensors]:
    """Split off the first tensor of a message. Raises FrameError if it does not match `spec`."""
    if not parts or TensorSpec.of(parts[0]) != spec:
        raise FrameError(
            f"a message of {sender} begins with {[TensorSpec.of(p) for p in parts[:1]]}, expected "
            f"{spec}; do all clouds run the same experiment file?"
        )
    return parts[0], parts[1:]


class Merged(NamedTuple):
    """The result of an averaging in one replica.

    changes: the merged tensors, of one merge after the other; usually of one.
    newest: the step of the last of these merges.
    is_counted: true if this replica's contribution is in one of them.
    step: the step that the others have reached, where clouds may be late; 0 where none may.
    values: the values that replace changes in a replica that missed too many merges: see
        OuterParameters.flat.
    """

    changes: Sequence[list[Tensor]] = ()
    newest: int = 0
    is_counted: bool = True
    step: int = 0
    values: Tensors = ()


@dataclass(frozen=True)
class Terms:
    """The rules of one averaging, the same in all replicas but for `protect` and `watch`.

    channel: a number below 2^16 that distinguishes averagers on the same links (fragments of a
        model).
    max_weight: the most that a replica's next message may weigh, as this rank computes it.
    protect: a function that is applied to this replica's contribution before it is encoded.
    watch: a function that is called with each contribution of another replica: step, replica, its
        decoded tensors by name.
    """

    merge: Merge = weighted_sum
    channel: int = 0
    max_weight: Callable[[int], float] = lambda replica: 1.0
    protect: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda tensors: tensors
    watch: Callable[[int, int, Mapping[str, Tensor]], None] | None = None

    def contribution(
        self,
        step: int,
        replica: int,
        weight: float,
        max_weight: float,
        codec: TensorCodec,
        parts: Tensors,
    ) -> Contribution:
        """Decode a replica's message.

        max_weight: the most that it may weigh.
        Raises FrameError, naming the replica.
        """
        # Another owner's cloud could else buy the whole merge with one number. NaN fails as well.
        if not 0 <= weight <= max_weight:
            raise FrameError(
                f"replica {replica} sent a weight of {weight}; what it can have trained on since "
                f"its last message allows {max_weight}, by the files of this cloud"
            )
        try:
            contribution = Contribution(tensors=codec.decode(parts), weight=weight)
        except FrameError as error:
            raise FrameError(f"replica {replica}: {error}") from error
        if self.watch is not None:
            self.watch(step, replica, dict(zip(codec.names, contribution.tensors, strict=True)))
        return contribution


SUM = Terms()


class Averager(StatefulTree):
    """A way to bring the tensors of all replicas together; every replica makes the same calls.

    Several steps may be under way at once. They are part of the state, and a restored averager
    sends them again. This class itself is for a rank that carries nothing across.
    """

    @property
    def max_bytes(self) -> int:
        """The bytes of its largest frame."""
        return 0

    def start(self, step: int, tensors: Sequence[Tensor], weight: float = 1.0) -> None:
        """Encode and send; return before delivery. Nothing of `tensors` is kept."""
        return

    def finish(self, step: int) -> Merged:
        """Receive and merge what was started as `step`: the same bits in every replica.

        Raises LinkTimeout or LinkClosed for a replica that is late or gone.
        """
        return Merged()

    def settle(self, was_used: bool) -> None:
        """Say whether the result of the last `finish` was used, the same in every replica.

        If not, compressors keep what they had before that step. Where nobody says so before the
        next `start` or `finish`, it counts as used.
        """
        return

    def end_step(self, step: int, is_last: bool) -> None:
        """Take note that what was merged in this step is in the parameters."""
        return

    def resume(self, step: int) -> Merged:
        """Return what a replica begins with; see Exchange.resume."""
        return Merged(step=step)


@dataclass
class _UnderWay:
    """A step between `start` and `finish`.

    own: this replica's contribution as it is merged here.
    sent: the tensors from which `own` and all messages can be made again, by the name of the codec
        or "own".
    """

    weight: float
    own: list[Tensor]
    sent: dict[str, Tensors]


class AllToAll(Averager):
    """An averager in which every replica sends its message to every other and merges all itself.

    R - 1 messages each way, one latency. A replica uses of its own tensors what the others decode.
    For R = 2 nothing is cheaper. Nobody takes another's word for what the merge comes to, which a
    robust merge needs.
    """

    own_names = (MEMORY,)

    def __init__(self, links: ReplicaLinks, codec: TensorCodec, terms: Terms = SUM) -> None:
        self._links = links
        self._codecs = {"all": codec}
        # The name of the codec of contributions to each replica.
        self._codec_to = ["all"] * links.num_replicas
        self._terms = terms
        self._steps: dict[int, _UnderWay] = {}
        self._is_settled = True
        self._has_counted = False  # this replica, in the last result

    @property
    def max_bytes(self) -> int:
        return max(frame_bytes((_WEIGHT, *c.wire_specs)) for c in self._codecs.values())

    def start(self, step: int, tensors: Sequence[Tensor], weight: float = 1.0) -> None:
        assert step not in self._steps, f"step {step} is under way"
        self.settle(was_used=True)
        # Protected before it is encoded: the error that a codec keeps must be of what may leave.
        sent, own = self._encode(self._terms.protect(tensors))
        self._steps[step] = _UnderWay(weight, own, sent)
        self._send(step)

    def finish(self, step: int) -> Merged:
        self.settle(was_used=True)
        merged = self._merged(step)
        self._end(step)
        return Merged([merged], newest=step)

    def settle(self, was_used: bool) -> None:
        if self._is_settled:
            return
        self._is_settled = True
        for name, codec in self._codecs.items():
            # What weighs nothing was left out of the merge, also where the rest of it was used.
            codec.settle(was_used and (self._has_counted or name == _RESULT))

    def children(self) -> Mapping[str, Stateful]:
        return self._codecs

    def own(self) -> State:
        state: State = {}
        for step, under_way in self._steps.items():
            weight = torch.tensor([under_way.weight], dtype=torch.float64)
            for name, parts in {"weight": (weight,), **under_way.sent}.items():
                state |= {f"{_UNDER_WAY}.{step}.{name}.{i}": part for i, part in enumerate(parts)}
        return state

    def take(self, own: State) -> None:
        """Take over a saved state, and send again what was under way."""
        device = next(iter(self._codecs.values())).device  # a checkpoint is read to the CPU
        steps: dict[int, dict[str, list[Tensor]]] = {}
        # By the number of the tensor, as a number: 10 comes after 9.
        for key in sorted(own, key=lambda key: int(key.rpartition(".")[-1])):
            step, name, _ = key.removeprefix(f"{_UNDER_WAY}.").split(".")
            steps.setdefault(int(step), {}).setdefault(name, []).append(torch.as_tensor(own[key]))
        self._steps = {}
        for number, messages in sorted(steps.items()):
            weight = float(messages.pop("weight")[0])
            sent = defaultdict[str, Tensors](tuple)  # a share without tensors has left nothing
            sent |= {name: tuple(p.to(device) for p in parts) for name, parts in messages.items()}
            self._steps[number] = _UnderWay(weight, own=self._own_of(sent), sent=sent)
            # Links of a restarted run are new: what was on its way then has to be sent again.
            self._send(number)

    def _encode(self, tensors: Sequence[Tensor]) -> tuple[dict[str, Tensors], list[Tensor]]:
        """Return (sent, own) of _UnderWay."""
        # Not final: the codecs keep what they had until `settle` says whether the result was used.
        parts, seen = self._codecs["all"].encode(tensors, is_final=False)
        return {"all": parts}, seen

    def _own_of(self, sent: dict[str, Tensors]) -> list[Tensor]:
        return self._codecs["all"].decode(sent["all"])

    def _send(self, step: int) -> None:
        under_way = self._steps[step]
        for replica in self._links.others:
            name = self._codec_to[replica]
            parts = under_way.sent[name]
            self._post(replica, self._key(step), name, parts, weight=under_way.weight)

    def _post(
        self, replica: int, key: MessageKey, name: str, parts: Tensors, weight: float
    ) -> None:
        codec = self._codecs[name]
        # The weight travels first, beside what it weighs: no other message tells it.
        message = (torch.tensor([weight], dtype=torch.float64), *parts)
        carries = ("weight of this replica", *codec.carries)
        self._links.send(replica, key, parts=message, carries=carries, raw_bytes=codec.raw_bytes)

    def _receive(self, replica: int, key: MessageKey) -> tuple[Tensor, Tensors]:
        return first_part(self._links.recv(replica, key), _WEIGHT, sender=f"replica {replica}")

    def _merged(self, step: int) -> list[Tensor]:
        replicas = range(self._links.num_replicas)
        # In the order of the replicas, this one among them: the same sums, bit for bit,
        # everywhere.
        return self._terms.merge([self._contribution(replica, step) for replica in replicas])

    def _contribution(self, replica: int, step: int) -> Contribution:
        under_way = self._steps[step]
        if replica == self._links.replica:
            return Contribution(tensors=under_way.own, weight=under_way.weight)
        codec = self._codecs[self._codec_to[self._links.replica]]
        weight, parts = self._receive(replica, self._key(step))
        most = self._terms.max_weight(replica)
        return self._terms.contribution(
            step, replica, weight=float(weight), max_weight=most, codec=codec, parts=parts
        )

    def _end(self, step: int) -> None:
        """Note that it is under way no more. Steps end in the order in which they began."""
        # Codecs hold one unsettled step: with another order they would settle the wrong one.
        assert next(iter(self._steps)) == step, f"step {step} is not the oldest under way"
        self._has_counted = self._steps.pop(step).weight > 0
        self._is_settled = False

    def _key(self, step: int, more: int = 0) -> MessageKey:
        return MessageKey(kind=Kind.AVERAGING, step=step, micro_batch=self._terms.channel + more)


class Aggregators(AllToAll):
    """An averager in which each replica merges a part of about equal size for all.

    It gathers the others' contributions, merges them with its own, which crossed no link, and
    hands back the result, encoded again. That is 2 (R - 1) / R messages' worth each way instead of
    R - 1, and two latencies: cheaper from R = 3 on. Errors are made twice, and both sides
    keep what they lost: a contributor the error of what it sent, an aggregator that of what it
    handed back. All replicas use the result unchecked, so this averager is only for merges that
    any one contribution may move as far as it likes. Large tensors are cut between rows.
    """

    def __init__(
        self,
        links: ReplicaLinks,
        shapes: Mapping[str, torch.Size],
        new_codec: Callable[[Mapping[str, torch.Size]], TensorCodec],
        terms: Terms = SUM,
    ) -> None:
        self._count = len(shapes)
        self._pieces = by_rows(shapes, num_shares=links.num_replicas)
        by_name = [{piece.name: piece.shape for piece in part} for part in self._pieces]
        super().__init__(links, new_codec(by_name[links.replica]), terms)
        result = self._codecs["all"]
        self._codecs = {str(replica): new_codec(part) for replica, part in enumerate(by_name)}
        self._codecs[_RESULT] = result
        self._codec_to = [str(replica) for replica in range(links.num_replicas)]

    def finish(self, step: int) -> Merged:
        self.settle(was_used=True)
        # Another key than the contributions': both kinds cross the same links in one step.
        key = self._key(step, more=_HANDED_BACK)
        codec = self._codecs[_RESULT]
        parts, own = codec.encode(self._merged(step), is_final=False)
        for replica in self._links.others:
            self._post(replica, key=key, name=_RESULT, parts=parts, weight=1.0)
        # This replica uses of its own part what the others decode, not what it merged: else its
        # bits would differ from theirs.
        results = {self._links.replica: own}
        for replica in self._links.others:
            _, parts = self._receive(replica, key)
            results[replica] = self._codecs[str(replica)].decode(parts)
        tensors = [tensor for replica in sorted(results) for tensor in results[replica]]
        self._end(step)
        pieces = chain.from_iterable(self._pieces)
        changes = [joined(zip(pieces, tensors, strict=True), count=self._count)]
        return Merged(changes, newest=step)

    def _encode(self, tensors: Sequence[Tensor]) -> tuple[dict[str, Tensors], list[Tensor]]:
        sent: dict[str, Tensors] = {}
        for replica, part in enumerate(self._pieces):
            pieces = tuple(piece.of(tensors) for piece in part)
            if replica == self._links.replica:
                # A clone, as the parameters train on before the merge. It crosses no link, so no
                # codec touches it.
                sent["own"] = tuple(piece.detach().clone() for piece in pieces)
            else:
                codec = self._codecs[str(replica)]
                sent[str(replica)], _ = codec.encode(pieces, is_final=False)
        return sent, self._own_of(sent)

    def _own_of(self, sent: dict[str, Tensors]) -> list[Tensor]:
        return list(sent["own"])


def averager_for(
    links: ReplicaLinks,
    shapes: Mapping[str, torch.Size],
    new_codec: Callable[[Mapping[str, torch.Size]], TensorCodec],
    terms: Terms = SUM,
) -> Averager:
    """Return the averager that sends least and lets no replica decide for others what the terms'
    merge would not let it."""
    is_robust = terms.merge not in (weighted_sum, weighted_mean)
    if everyone_merges(links.num_replicas, is_robust):
        return AllToAll(links, codec=new_codec(shapes), terms=terms)
    return Aggregators(links, shapes, new_codec, terms=terms)
