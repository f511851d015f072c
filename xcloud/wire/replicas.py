"""One rank's links to others that train the same values, over the ends of its cloud: in the other
replicas, and where a matrix is tied, at the pipeline's other end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from xcloud.base.errors import FrameError, LinkClosed
from xcloud.cluster.frame import MessageKey, TensorSpec
from xcloud.cluster.layout import ClusterLayout
from xcloud.cluster.link import InLink, OutLink, Parts
from xcloud.parallel.hub import HUB
from xcloud.wire.ends import FRAME_SLACK_BYTES, Ends

_AHEAD = 3  # messages on a link beside those of steps under way: handed back, of the next step


class PeerEnds:
    """ReplicaLinks of one rank. Its lines are joined with all others; its ends are made by `open`,
    once it is known how long a message may be.

    line: name of the lines, which are two. stage: for the record of messages.
    peers: by replica, the rank that holds the same values there, this rank's own included; none
        where this rank has no counterpart.
    """

    def __init__(
        self, ends: Ends, layout: ClusterLayout, device: torch.device, line: str, stage: int,
        replica: int, num_replicas: int, peers: tuple[int, ...],
    ) -> None:  # fmt: skip
        self._ends, self._layout, self._device = ends, layout, device
        self._name, self._stage = line, stage
        self.replica, self.num_replicas, self.peers = replica, num_replicas, peers
        self.raw_bytes = 0
        self._out: dict[int, OutLink] = {}
        self._in: dict[int, InLink] = {}
        self._overdue_s: dict[int, float] = {}

    def open(self, capacity_bytes: int, wait_s: float = 0.0, under_way: int = 1) -> None:
        """Make the ends. capacity_bytes: of the longest message, frame included; the same in all
        replicas. wait_s: how long another replica may take, if that is longer than its link.
        under_way: exchanges that begin before an earlier one ends."""
        self._capacity, self._wait_s = capacity_bytes + FRAME_SLACK_BYTES, wait_s
        self._ahead = under_way + _AHEAD
        for replica in range(len(self.peers)):
            if replica != self.replica:
                self._open(replica)

    def _open(self, replica: int) -> None:
        peer, capacity = self.peers[replica], self._capacity
        window = self._ends.window(self._ahead, capacity)
        ways = ("up", "down") if self.replica < replica else ("down", "up")
        out, incoming = (f"{self._name}.{way}" for way in ways)
        rank, layout = self._ends.rank, self._layout
        overdue_s = layout.overdue_s(rank, peer, capacity)
        self._out[replica] = self._ends.out(out, peer, capacity, window, self._stage, overdue_s)
        self._in[replica] = self._ends.incoming(
            incoming, peer, capacity, window, boundary=self._stage,
            advice=layout.overdue_advice(rank, peer),
        )  # fmt: skip
        self._overdue_s[replica] = max(overdue_s, self._wait_s)

    def name_of(self, replica: int) -> str:
        """The counterpart there, in words."""
        peer = self.peers[replica]
        return f"rank {peer} of cloud {self._layout.cloud_of(peer)!r}"

    def send(
        self,
        to_replica: int,
        key: MessageKey,
        parts: Parts,
        carries: Sequence[str],
        raw_bytes: int,
    ) -> None:
        rank, peer = self._ends.rank, self.peers[to_replica]
        if self._layout.cloud_of(rank) != self._layout.cloud_of(peer):
            self.raw_bytes += raw_bytes
        self._out[to_replica].send(key, parts, carries)

    def recv(
        self,
        from_replica: int,
        key: MessageKey,
        specs: Sequence[TensorSpec] | None,
        wait_s: float | None = None,
    ) -> Parts:
        patience_s = self._overdue_s[from_replica] if wait_s is None else wait_s
        parts = self._in[from_replica].recv(key, patience_s)
        found = tuple(TensorSpec.of(part) for part in parts)
        if specs is not None and found != tuple(specs):
            raise FrameError(
                f"{key} of {self.name_of(from_replica)} came as {found}, expected {tuple(specs)}; "
                "do all clouds run the same experiment file?"
            )
        return tuple(part.to(self._device) for part in parts)


class ReplicaEnds(PeerEnds):
    """To the ranks that train the same share of the same stages in the other replicas. Of a stage
    with unequal numbers of lanes the surplus ranks have no peers.

    num_shares: ranks that carry something of these stages across; num_parts: of all stages of a
    replica."""

    def __init__(self, ends: Ends, layout: ClusterLayout, device: torch.device) -> None:
        own = layout.placement(ends.rank)
        stage = min(own.stages)
        self.num_shares = _num_shares(layout, stage)
        self.num_parts = sum(_num_shares(layout, head) for head in _heads(layout))
        lane = layout.ranks_of(stage, own.replica).index(ends.rank)
        peers: tuple[int, ...] = ()
        if lane < self.num_shares:
            peers = tuple(ranks[lane] for ranks in layout.replicas_of(stage))
        super().__init__(
            ends, layout, device, f"averaging.{stage}", stage, own.replica, layout.num_replicas,
            peers,
        )  # fmt: skip

    @staticmethod
    def join_lines(ends: Ends, layout: ClusterLayout) -> None:
        """Called in every rank: a line for each way between the replicas of each stage."""
        for stage in _heads(layout):
            everyone = sorted(rank for ranks in layout.replicas_of(stage) for rank in ranks)
            _join(ends, f"averaging.{stage}", everyone)


class HubEnds(ReplicaEnds):
    """Links between replica 0 and each other one, which may end and begin again.

    rejoin: called in replica 0 for each rank of a cloud that has begun again.
    """

    def __init__(
        self,
        ends: Ends,
        layout: ClusterLayout,
        device: torch.device,
        rejoin: Callable[[int], None],
    ) -> None:
        super().__init__(ends, layout, device)
        self._rejoin = rejoin
        self._ended: set[int] = set()
        self._back: set[int] = set()  # of these the ones whose cloud has begun again

    def recv(
        self,
        from_replica: int,
        key: MessageKey,
        specs: Sequence[TensorSpec] | None,
        wait_s: float | None = None,
    ) -> Parts:
        """Of a replica that has begun again: first LinkClosed for what it was, then its new
        messages."""
        if self.replica == HUB:
            self._look_for(from_replica)
        try:
            return super().recv(from_replica, key, specs, wait_s)
        except LinkClosed:
            self._end(from_replica)
            raise

    def _open(self, replica: int) -> None:
        if HUB in (self.replica, replica):
            super()._open(replica)

    def _look_for(self, replica: int) -> None:
        ranks = self._ranks_of(replica)
        if replica not in self._back and self._ends.begins_again(ranks):
            self._back.add(replica)
            if replica not in self._ended:
                self._end(replica)
                raise LinkClosed(f"{self.name_of(replica)} has begun again")
        if replica in self._back:
            self._back.discard(replica)
            self._ended.discard(replica)
            for rank in ranks:
                self._rejoin(rank)
            self._open(replica)

    def _end(self, replica: int) -> None:
        self._ended.add(replica)
        for rank in self._ranks_of(replica):
            self._ends.forget(rank)

    def _ranks_of(self, replica: int) -> tuple[int, ...]:
        return self._layout.ranks_in(self._layout.stage_cloud(0, replica))


def _heads(layout: ClusterLayout) -> list[int]:
    """The first stage of every rank, which stands for all that it holds."""
    return sorted({min(layout.placement(rank).stages) for rank in range(layout.num_ranks)})


def _num_shares(layout: ClusterLayout, stage: int) -> int:
    return min(len(ranks) for ranks in layout.replicas_of(stage))


def tied_ends(ends: Ends, layout: ClusterLayout, device: torch.device) -> PeerEnds | None:
    """Between the leaders of the first and the last stage of each pipeline; as "replicas" 0 and 1.
    Every rank calls it. None for a rank that is neither, or both."""
    last, found = layout.num_stages - 1, None
    for replica in range(layout.num_replicas):
        peers = tuple(layout.ranks_of(stage, replica)[0] for stage in (0, last))
        if peers[0] == peers[1]:
            continue
        line = f"tied.{replica}"
        _join(ends, line, sorted(peers))
        if ends.rank in peers:
            own = peers.index(ends.rank)
            found = PeerEnds(ends, layout, device, line, own * last, own, 2, peers)
    return found


def _join(ends: Ends, line: str, ranks: Sequence[int]) -> None:
    for way in ("up", "down"):  # so that both flow at once
        ends.line(f"{line}.{way}", ranks)
