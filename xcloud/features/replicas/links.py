"""One rank's links to ranks that train the same values: those of the other replicas, and where a
matrix is tied the one at the pipeline's other end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch

from xcloud.base.errors import LinkClosed
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.features.replicas.averaging import AllToAll, ReplicaLinks, ReplicaPeer
from xcloud.features.replicas.averaging_server import SERVER
from xcloud.layout import ClusterLayout
from xcloud.net.frame import LONG_BYTES, MessageKey, Tensors
from xcloud.net.link_end import ReceivingEnd, SendingEnd
from xcloud.pipeline.ends import FRAME_SLACK_BYTES, Ends
from xcloud.pipeline.freed_memory import return_freed_memory
from xcloud.pipeline.wiring import Wiring

_AHEAD = 3  # messages on a link beside those of steps under way: handed back, of the next step


@dataclass
class PeerLinks(ReplicaLinks):
    """The links of one rank to its peers, over that rank's ends.

    line: the name of the lines.
    stage: the stage that the record of messages names.
    raw_bytes: the FP32 bytes of the values that went to other clouds.

    `open` makes the links, once it is known how long a message may be.
    """

    may_be_late: ClassVar[bool] = False
    """Whether this rank goes on without a replica that is late."""

    ends: Ends
    device: torch.device
    line: str
    stage: int
    raw_bytes: int = field(default=0, init=False)
    _out: dict[int, SendingEnd] = field(default_factory=dict, init=False)
    _in: dict[int, ReceivingEnd] = field(default_factory=dict, init=False)
    _overdue_s: dict[int, float] = field(default_factory=dict, init=False)

    def open(self, capacity_bytes: int, wait_s: float = 0.0, under_way: int = 1) -> None:
        self._capacity = capacity_bytes + FRAME_SLACK_BYTES
        self._wait_s = wait_s
        self._ahead = under_way + _AHEAD
        # Else what averaging makes of a long message stays in the heap, several times over.
        if self._capacity >= LONG_BYTES:
            return_freed_memory(self.device, num_bytes=LONG_BYTES)
        if self.peers:
            for replica in self.others:
                self._open(replica)

    def _open(self, replica: int) -> None:
        peer = self.peers[replica].rank
        self._out[replica], self._in[replica] = self.ends.both(
            self.line,
            peer,
            capacity_bytes=self._capacity,
            under_way=self._ahead,
            boundary=self.stage,
            may_be_late=self.may_be_late,
        )
        overdue_s = self.ends.overdue_s([peer], num_bytes=self._capacity)
        # Local rounds may take a cloud much longer than its link (wait_s).
        self._overdue_s[replica] = max(overdue_s, self._wait_s)

    def post(
        self, replica: int, key: MessageKey, parts: Tensors, carries: Sequence[str], raw_bytes: int
    ) -> None:
        if self.ends.leaves_cloud(self.peers[replica].rank):
            self.raw_bytes += raw_bytes
        self._out[replica].send(key, parts, carries)

    def next(self, replica: int, key: MessageKey, wait_s: float | None = None) -> Tensors:
        while_alive = wait_s == math.inf
        if wait_s is None or while_alive:
            wait_s = self._overdue_s[replica]
        parts = self._in[replica].recv(key, overdue_s=wait_s, while_alive=while_alive)
        return tuple(part.to(self.device) for part in parts)


@dataclass
class ServerLinks(PeerLinks):
    """The links between replica 0 and each other one, which may end and restart.

    rejoin: a function that replica 0 calls for each rank of a cloud that has restarted.
    """

    may_be_late = True

    rejoin: Callable[[int], None] = field(kw_only=True)
    _ended: set[int] = field(default_factory=set, init=False)
    _back: set[int] = field(default_factory=set, init=False)  # ended, and their clouds are back

    def next(self, replica: int, key: MessageKey, wait_s: float | None = None) -> Tensors:
        """Return the next message. Raises LinkClosed once for a replica that has begun again;
        later calls return its new messages."""
        if self.replica == SERVER:
            self._look_for(replica)
        try:
            return super().next(replica, key, wait_s=wait_s)
        except LinkClosed:
            self._end(replica)
            raise

    def _open(self, replica: int) -> None:
        if SERVER in (self.replica, replica):
            super()._open(replica)

    def _look_for(self, replica: int) -> None:
        ranks = self.peers[replica].ranks
        # A cloud that has restarted may show in the store before its old link breaks.
        if replica not in self._back and not self.ends.transport.begins_again(ranks):
            return
        if replica not in self._ended:
            self._back.add(replica)
            self._end(replica)
            # In the first call the averaging server learns that this replica has lost what it
            # knew; the next one joins its new processes.
            raise LinkClosed(f"{self.peers[replica]} has begun again")
        self._back.discard(replica)
        self._ended.discard(replica)
        # All its ranks first, then the links of averages.
        for rank in ranks:
            self.rejoin(rank)
        self._open(replica)

    def _end(self, replica: int) -> None:
        self._ended.add(replica)
        for rank in self.peers[replica].ranks:
            self.ends.forget(rank)


def peers_of(layout: ClusterLayout, ranks: Iterable[int]) -> list[ReplicaPeer]:
    """Return these ranks as peers, each with its cloud."""
    clouds = ((rank, layout.cloud_of(rank)) for rank in ranks)
    return [ReplicaPeer(rank, cloud, ranks=layout.ranks_in(cloud)) for rank, cloud in clouds]


def replica_links(
    ends: Ends,
    layout: ClusterLayout,
    device: torch.device,
    rejoin: Callable[[int], None] | None = None,
) -> PeerLinks:
    """Return the links to the ranks that train the same share of the same stages in the other
    replicas. Of a stage with unequal numbers of ranks the surplus ones have no peers.

    rejoin: see ServerLinks; None where clouds may not leave.
    """
    # The first stage of a rank stands for all that it holds.
    heads = {min(layout.placement(rank).stages) for rank in range(layout.num_ranks)}
    # Replicas may have unequal numbers of ranks for a stage: only so many have a counterpart in
    # every replica.
    shares = {head: min(len(ranks) for ranks in layout.replicas_of(head)) for head in heads}
    own = layout.placement(ends.rank)
    stage = min(own.stages)
    group_rank = layout.ranks_of(stage, replica=own.replica).index(ends.rank)
    there = layout.replicas_of(stage) if group_rank < shares[stage] else ()
    made = PeerLinks if rejoin is None else partial(ServerLinks, rejoin=rejoin)
    return made(
        replica=own.replica,
        peers=peers_of(layout, ranks=[ranks[group_rank] for ranks in there]),
        num_replicas=layout.num_replicas,
        num_shares=shares[stage],
        num_parts=sum(shares.values()),
        ends=ends,
        device=device,
        line="averaging",
        stage=stage,
    )


def links_between(
    ends: Ends,
    layout: ClusterLayout,
    pair: tuple[int, int],
    device: torch.device,
    line: str,
    stage: int,
) -> PeerLinks:
    """Return the links of this rank, one of `pair`, to the other; they are "replicas" 0 and 1.

    line, stage: see PeerLinks.
    """
    return PeerLinks(
        replica=pair.index(ends.rank),
        peers=peers_of(layout, ranks=pair),
        num_replicas=2,
        num_shares=1,
        num_parts=1,
        ends=ends,
        device=device,
        line=line,
        stage=stage,
    )


def averager_of_ends(
    wiring: Wiring, layout: ClusterLayout, device: torch.device, line: str
) -> Callable[[tuple[int, int], int, TensorCodec], AllToAll]:
    """Return what joins this rank to the pipeline's other end, to sum what both hold.

    line: see PeerLinks.
    """

    def join(pair: tuple[int, int], stage: int, codec: TensorCodec) -> AllToAll:
        ends = wiring.ends
        links = links_between(ends, layout, pair, device, line=line, stage=stage)
        wiring.averaging.append(links)
        averager = AllToAll(links, codec)
        links.open(averager.max_bytes)
        return averager

    return join
