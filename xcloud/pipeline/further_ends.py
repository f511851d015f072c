"""Link ends of features, beside the channels and control links that every run has: within one
rank, behind a defence, timed for the autopilot; and one rank's links to others that train the same
values, in the other replicas and, where a matrix is tied, at the pipeline's other end.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from xcloud.base.errors import LinkClosed
from xcloud.comm.channel import NOTHING_KNOWN, Message, Samples, SendChannel
from xcloud.comm.compression import ChannelId
from xcloud.contracts.model import Stage
from xcloud.features.replicas.averaging import Peer, ReplicaLinks
from xcloud.features.replicas.averaging_server import HUB
from xcloud.layout import ClusterLayout
from xcloud.net.frame import LONG_BYTES, Frame, Kind, MessageKey, TensorSpec
from xcloud.net.link import Parts
from xcloud.net.link_end import ReceivingEnd, SendingEnd
from xcloud.pipeline.ends import FRAME_SLACK_BYTES, Ends
from xcloud.pipeline.pipeline import BoundaryPorts
from xcloud.pipeline.within_cloud import return_freed_memory
from xcloud.security.defences import LABEL, Defence


class Loopback:
    """Both ends of a boundary between two stages of one rank: hands over what it is given."""

    def __init__(self) -> None:
        self._messages: dict[MessageKey, Message] = {}
        self._start: Parts = ()

    def send(self, key: MessageKey, message: Message, samples: Samples) -> Message:
        self._messages[key] = {name: value.detach() for name, value in message.items()}
        return message

    def send_start(self, tensors: Parts) -> None:
        self._start = tensors

    def recv(self, key: MessageKey, samples: Samples, known: Message = NOTHING_KNOWN) -> Message:
        return self._messages.pop(key)

    def recv_start(self, specs: tuple[TensorSpec, ...]) -> Parts:
        return self._start


class Guard:
    """A Sender. Noise is part of the graph: the gradient that returns is of what was sent."""

    def __init__(self, channel: SendChannel, defence: Defence) -> None:
        self.fields, self.identity = channel.fields, channel.identity
        self._channel, self._defence = channel, defence
        self.send_start = channel.send_start
        # Not drawn from the run's seed: the receiver knows that one too.
        self._chance = np.random.default_rng()

    def send(self, key: MessageKey, message: Message, samples: Samples) -> Message:
        return self._channel.send(key, self._protected(message, samples), samples)

    def _protected(self, message: Message, samples: Samples) -> Message:
        labels = samples[LABEL] if self._defence.needs_labels else None
        protected = dict(message)
        with self._channel.clock.during("compress"):
            for field in self.fields:
                if field.dtype.is_floating_point:
                    counts = field.counts(message.get("counts"))
                    protected[field.name] = self._defence.protect(
                        message[field.name], counts, labels, self._chance
                    )
        return protected


_NUM_PROBES = 9


class LineMeter:
    """Of all links from one rank to this one, whose threads call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._delays_s: deque[float] = deque(maxlen=_NUM_PROBES)
        self._arrived_at_s = 0.0

    @property
    def delay_s(self) -> float:
        """Clock difference + latency; 0 before the first probe."""
        with self._lock:
            return statistics.median(self._delays_s) if self._delays_s else 0.0

    def probe(self, sent_at_s: float, arrived_at_s: float) -> None:
        with self._lock:
            self._delays_s.append(arrived_at_s - sent_at_s)

    def busy_s(self, sent_at_s: float, arrived_at_s: float) -> float:
        """Of a message that has just arrived; 0 before the first probe."""
        with self._lock:
            before_s, self._arrived_at_s = self._arrived_at_s, arrived_at_s
            if not self._delays_s:
                return 0.0
            start_s = max(sent_at_s + statistics.median(self._delays_s), before_s)
            return max(0.0, arrived_at_s - start_s)


@dataclass
class LineMeters:
    """Of the real lines that boundaries cross: a meter for each sender, and by channel the seconds
    that its messages kept the line busy. A heartbeat is a probe."""

    by_sender: dict[int, LineMeter] = field(default_factory=dict)
    line_s: dict[ChannelId, float] = field(default_factory=dict)

    def of(self, channel: ChannelId) -> Callable[[Frame, float], None]:
        """To be given every frame of this channel's link, and when it came."""
        meter = self.by_sender.setdefault(channel.sender, LineMeter())
        self.line_s[channel] = 0.0

        def take(frame: Frame, now_s: float) -> None:
            if frame.deliver_at_s >= 0:  # nobody says when it was sent
                return
            sent_at_s = -frame.deliver_at_s
            if frame.key.kind is Kind.ALIVE:
                return meter.probe(sent_at_s, now_s)
            busy_s = meter.busy_s(sent_at_s, now_s)
            self.line_s[channel] += busy_s * (frame.key.kind.traffic == channel.direction)

        return take


_AHEAD = 3  # messages on a link beside those of steps under way: handed back, of the next step


@dataclass
class PeerLinks(ReplicaLinks):
    """Its ends are made by `open`, once it is known how long a message may be.

    line: name of the lines. stage: for the record of messages. raw_bytes: FP32 bytes of what went
    to other clouds.
    """

    may_be_late: ClassVar[bool] = False
    """Whether a replica that is late is gone on without."""

    ends: Ends
    device: torch.device
    line: str
    stage: int
    raw_bytes: int = field(default=0, init=False)
    _out: dict[int, SendingEnd] = field(default_factory=dict, init=False)
    _in: dict[int, ReceivingEnd] = field(default_factory=dict, init=False)
    _overdue_s: dict[int, float] = field(default_factory=dict, init=False)

    def open(self, capacity_bytes: int, wait_s: float = 0.0, under_way: int = 1) -> None:
        self._capacity, self._wait_s = capacity_bytes + FRAME_SLACK_BYTES, wait_s
        self._ahead = under_way + _AHEAD
        if self._capacity >= LONG_BYTES:
            return_freed_memory(self.device, LONG_BYTES)
        for replica in self.others if self.peers else ():
            self._open(replica)

    def _open(self, replica: int) -> None:
        ends, peer, capacity = self.ends, self.peers[replica].rank, self._capacity
        self._out[replica], self._in[replica] = ends.both(
            self.line,
            peer,
            capacity,
            self._ahead,
            boundary=self.stage,
            may_be_late=self.may_be_late,
        )
        self._overdue_s[replica] = max(ends.overdue_s([peer], capacity), self._wait_s)

    def post(
        self, replica: int, key: MessageKey, parts: Parts, carries: Sequence[str], raw_bytes: int
    ) -> None:
        if self.ends.leaves_cloud(self.peers[replica].rank):
            self.raw_bytes += raw_bytes
        self._out[replica].send(key, parts, carries)

    def next(
        self,
        replica: int,
        key: MessageKey,
        wait_s: float | None = None,
        while_alive: bool = False,
    ) -> Parts:
        patience_s = self._overdue_s[replica] if wait_s is None else wait_s
        parts = self._in[replica].recv(key, patience_s, while_alive)
        return tuple(part.to(self.device) for part in parts)


@dataclass
class HubLinks(PeerLinks):
    """Between replica 0 and each other one: they may end and begin again.

    rejoin: called in replica 0 for each rank of a cloud that has begun again.
    """

    may_be_late = True

    rejoin: Callable[[int], None] = field(kw_only=True)
    _ended: set[int] = field(default_factory=set, init=False)
    _back: set[int] = field(default_factory=set, init=False)  # ended, and their clouds are back

    def next(
        self,
        replica: int,
        key: MessageKey,
        wait_s: float | None = None,
        while_alive: bool = False,
    ) -> Parts:
        """Of a replica that has begun again: first LinkClosed for what it was, then its new
        messages."""
        if self.replica == HUB:
            self._look_for(replica)
        try:
            return super().next(replica, key, wait_s, while_alive)
        except LinkClosed:
            self._end(replica)
            raise

    def _open(self, replica: int) -> None:
        if HUB in (self.replica, replica):
            super()._open(replica)

    def _look_for(self, replica: int) -> None:
        ranks = self.peers[replica].ranks
        if replica not in self._back and not self.ends.transport.begins_again(ranks):
            return
        if replica not in self._ended:
            self._back.add(replica)
            self._end(replica)
            raise LinkClosed(f"{self.peers[replica]} has begun again")
        self._back.discard(replica)
        self._ended.discard(replica)
        for rank in ranks:
            self.rejoin(rank)
        self._open(replica)

    def _end(self, replica: int) -> None:
        self._ended.add(replica)
        for rank in self.peers[replica].ranks:
            self.ends.forget(rank)


def peers_of(layout: ClusterLayout, ranks: Iterable[int]) -> list[Peer]:
    clouds = ((rank, layout.cloud_of(rank)) for rank in ranks)
    return [Peer(rank, cloud, layout.ranks_in(cloud)) for rank, cloud in clouds]


def replica_links(
    ends: Ends,
    layout: ClusterLayout,
    device: torch.device,
    rejoin: Callable[[int], None] | None = None,
) -> PeerLinks:
    """To the ranks that train the same share of the same stages in the other replicas. Of a stage
    with unequal numbers of ranks the surplus ones have no peers. rejoin: see HubLinks; None where
    clouds may not leave."""
    # The first stage of a rank stands for all that it holds.
    heads = {min(layout.placement(rank).stages) for rank in range(layout.num_ranks)}
    shares = {head: min(len(ranks) for ranks in layout.replicas_of(head)) for head in heads}
    own = layout.placement(ends.rank)
    stage = min(own.stages)
    group_rank = layout.ranks_of(stage, own.replica).index(ends.rank)
    there = layout.replicas_of(stage) if group_rank < shares[stage] else ()
    of = (
        own.replica, peers_of(layout, [ranks[group_rank] for ranks in there]), layout.num_replicas,
        shares[stage], sum(shares.values()), ends, device, "averaging", stage,
    )  # fmt: skip
    return PeerLinks(*of) if rejoin is None else HubLinks(*of, rejoin=rejoin)


def tied_links(ends: Ends, layout: ClusterLayout, device: torch.device) -> PeerLinks | None:
    """Between the leaders of the first and the last stage of a pipeline; as "replicas" 0 and 1.
    None for a rank that is neither, or both."""
    last, leaders = layout.num_stages - 1, layout.leader_of(layout.placement(ends.rank).replica)
    peers = leaders[0], leaders[last]
    if peers[0] == peers[1] or ends.rank not in peers:
        return None
    own = peers.index(ends.rank)
    return PeerLinks(own, peers_of(layout, peers), 2, 1, 1, ends, device, "tied", own * last)


@torch.no_grad()
def hand_over(stages: Mapping[int, Stage], ports: Mapping[int, BoundaryPorts]) -> None:
    """Before the first step: what stages hand to their successors once (Boundary.start)."""
    for stage, module in sorted(stages.items()):
        before, after = ports.get(stage - 1), ports.get(stage)
        if before is not None and before.boundary.start:
            for giver in before.forward_in.values():  # every rank before hands over the same
                module.take_over(giver.recv_start(before.boundary.start))
        if after is not None and after.boundary.start:
            handed = tuple(tensor.detach() for tensor in module.hand_over())
            found = tuple(TensorSpec.of(tensor) for tensor in handed)
            assert found == after.boundary.start, (found, after.boundary.start)
            for taker in after.forward_out.values():
                taker.send_start(handed)
