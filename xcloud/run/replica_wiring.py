"""One rank's links to its counterparts in the other replicas, over the ends of its cloud."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xcloud.cluster.frame import MessageKey
from xcloud.cluster.layout import ClusterLayout
from xcloud.cluster.link import InLink, OutLink, Parts
from xcloud.cluster.tensor_spec import TensorSpec
from xcloud.errors import FrameError
from xcloud.run.ends import FRAME_SLACK_BYTES, Ends

_AHEAD = 4  # messages under way on a link


class ReplicaEnds:
    """ReplicaLinks of one rank. Its lines are joined with all others; its ends are made by `open`,
    once it is known how long a message may be.

    peers: by replica, the rank that trains the same share there, this rank's own included. Of a
    stage with unequal numbers of lanes the surplus ranks have none. num_parts: ranks of a replica
    that carry something across; num_shares: those of them that hold what this rank holds.
    """

    def __init__(self, ends: Ends, layout: ClusterLayout, device: torch.device) -> None:
        self._ends, self._layout, self._device = ends, layout, device
        own = layout.placement(ends.rank)
        self.replica, self.num_replicas, self._stage = (
            own.replica,
            layout.num_replicas,
            min(own.stages),
        )
        self.num_shares = min(len(ranks) for ranks in layout.replicas_of(self._stage))
        self.num_parts = sum(
            min(len(ranks) for ranks in layout.replicas_of(stage)) for stage in _heads(layout)
        )
        lane = layout.ranks_of(self._stage, own.replica).index(ends.rank)
        self.peers: tuple[int, ...] = ()
        if lane < self.num_shares:
            self.peers = tuple(ranks[lane] for ranks in layout.replicas_of(self._stage))
        self.raw_bytes = 0
        self._out: dict[int, OutLink] = {}
        self._in: dict[int, InLink] = {}
        self._overdue_s: dict[int, float] = {}

    @staticmethod
    def join_lines(ends: Ends, layout: ClusterLayout) -> None:
        """Called in every rank: a line for each way between the replicas of each stage."""
        for stage in _heads(layout):
            everyone = sorted(rank for ranks in layout.replicas_of(stage) for rank in ranks)
            for way in ("up", "down"):  # so that both flow at once
                ends.line(_line(stage, way), everyone)

    def open(self, capacity_bytes: int) -> None:
        """Make the ends. capacity_bytes: of the longest message, frame included; the same in all
        replicas."""
        capacity = capacity_bytes + FRAME_SLACK_BYTES
        window = self._ends.window(_AHEAD, capacity)
        for replica, peer in enumerate(self.peers):
            if replica == self.replica:
                continue
            ways = ("up", "down") if self.replica < replica else ("down", "up")
            out, incoming = (_line(self._stage, way) for way in ways)
            rank, layout = self._ends.rank, self._layout
            overdue_s = layout.overdue_s(rank, peer, capacity)
            self._out[replica] = self._ends.out(
                out, peer, capacity, window, self._stage, overdue_s
            )
            self._in[replica] = self._ends.incoming(
                incoming, peer, capacity, window, border=self._stage,
                advice=layout.overdue_advice(rank, peer),
            )  # fmt: skip
            self._overdue_s[replica] = overdue_s

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


def _heads(layout: ClusterLayout) -> list[int]:
    """Of every rank the first stage, which names what it holds."""
    return sorted({min(layout.placement(rank).stages) for rank in range(layout.num_ranks)})


def _line(stage: int, way: str) -> str:
    return f"averaging.{stage}.{way}"
