"""The link ends of one rank and what they share: names, clocks, records, heartbeats. Which ends
a rank needs is up to its wiring (wiring.py) or its role."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import combinations
from pathlib import Path

import torch

from xcloud.base.errors import ConfigError, LinkError
from xcloud.layout import Layout
from xcloud.net.failure_detector import FailureDetector
from xcloud.net.frame import Frame, Kind
from xcloud.net.link import CONTROL, LinkClock, LinkName, LinkRecord, MessageLog, Progress
from xcloud.net.link_end import (
    InSettings,
    OutSettings,
    QueuedBytes,
    ReceivingEnd,
    SendingEnd,
    ignore,
)
from xcloud.net.link_profile import LinkProfile, LinkWindow
from xcloud.net.transport import CPU, Transport
from xcloud.pipeline.exchange import RankGroup

FRAME_SLACK_BYTES = 4096

Handlers = Mapping[Kind, Callable[[Frame], None]]
OnReport = Callable[[int, Frame], None]
"""Takes another rank's report, with the rank by whose link it came."""


class Ends:
    """The link ends of one rank.

    records: the records of the links to and from other clouds.
    detector: the failure detector of this rank, which knows what other ranks are alive.
    queued: bytes of the messages that wait in this rank.
    """

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        run_dir: Path,
        messages: MessageLog | None = None,
    ) -> None:
        self.transport = transport
        self.layout = layout
        self.rank = transport.rank
        self._ends: list[tuple[int, SendingEnd | ReceivingEnd]] = []  # with the peer, as made
        self.records: list[LinkRecord] = []
        self.detector = transport.rendezvous.detector or FailureDetector(
            rank=self.rank, num_ranks=layout.num_ranks, liveness=layout.liveness
        )
        self._messages = messages
        self._run_dir = run_dir
        self._clocks: dict[str, LinkClock] = {}  # by way
        self.queued = QueuedBytes()
        pairs = combinations(layout.clouds, 2)
        if layout.crosses_clouds and any(layout.wan_of(*pair).emulated for pair in pairs):
            # A name that no earlier run in this folder used: link time starts at 0 in every run.
            self._run_number = transport.run_number()
            if len(transport.machines()) > 1:
                # Delivery times are by the machine's clock, which another does not share.
                raise ConfigError(
                    "an emulated link (cluster.wan) works between ranks on one machine only; this "
                    "run spans several: set cluster/wan=real"
                )
            shared = Progress(run_dir / f"link-progress.{self._run_number}.clock")
            self.detector.progress = shared

    @property
    def outs(self) -> list[SendingEnd]:
        return [end for _, end in self._ends if isinstance(end, SendingEnd)]

    @property
    def is_emulated(self) -> bool:
        return bool(self._clocks)

    def group(self, ranks: Sequence[int], device: torch.device = CPU) -> RankGroup | None:
        """Return the group of these ranks, in this order; None outside it. device: see
        Transport."""
        joined = self.transport.group(ranks, device=device)
        if self.rank not in ranks:
            return None
        return RankGroup(
            rank=self.rank, ranks=tuple(ranks), group=joined, peers=self.detector.peers
        )

    def out(
        self,
        line: str,
        peer: int,
        capacity_bytes: int,
        window: LinkWindow,
        boundary: int = CONTROL,
        may_be_late: bool = False,
        blocked: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> SendingEnd:
        """Make a sending end.

        boundary: the stage before it, for logs and records of messages between stages.
        may_be_late: the receiver says how long it waits, whatever else is on its way.
        blocked: see OutSettings.
        """
        record = self._record(LinkName(boundary, self.rank, receiver=peer))
        settings = OutSettings(
            peer_name=self._name(peer),
            capacity_bytes=capacity_bytes,
            window=window,
            record=record,
            peer=self.detector.peers[peer],
            progress=None if may_be_late else self.detector.progress,
            queued=self.queued,
            clock=self.clock_to(peer, boundary),
            overdue_s=self.layout.overdue_s(self.rank, peer=peer, num_bytes=capacity_bytes),
            blocked=blocked,
        )
        end = self.transport.out(line, peer=peer, settings=settings)
        self._ends.append((peer, end))
        return end

    def incoming(
        self,
        line: str,
        peer: int,
        capacity_bytes: int,
        window: LinkWindow,
        handlers: Handlers | None = None,
        boundary: int = CONTROL,
        on_end: Callable[[LinkError], None] = ignore,
        on_arrival: Callable[[Frame, float], None] = ignore,
        may_be_late: bool = False,
    ) -> ReceivingEnd:
        """Make a receiving end. boundary, may_be_late: see `out`."""
        wan = self.layout.wan_between(self.rank, peer=peer)
        record = self._record(LinkName(boundary, peer, receiver=self.rank))
        settings = InSettings(
            peer_name=self._name(peer),
            capacity_bytes=capacity_bytes,
            window=window,
            record=record,
            peer=self.detector.peers[peer],
            progress=None if may_be_late else self.detector.progress,
            queued=self.queued,
            handlers=handlers or {},
            is_emulated=wan is not None and wan.emulated,
            on_end=on_end,
            on_arrival=on_arrival,
        )
        end = self.transport.incoming(line, peer=peer, settings=settings)
        self._ends.append((peer, end))
        return end

    def both(
        self,
        line: str,
        peer: int,
        capacity_bytes: int,
        under_way: int,
        handlers: Handlers | None = None,
        boundary: int = CONTROL,
        may_be_late: bool = False,
    ) -> tuple[SendingEnd, ReceivingEnd]:
        """Make a link to `peer` and one from it. boundary, may_be_late: see `out`."""
        of = (line, peer, capacity_bytes, self.window(under_way, frame_bytes=capacity_bytes))
        out = self.out(*of, boundary=boundary, may_be_late=may_be_late)
        return out, self.incoming(
            *of, handlers=handlers, boundary=boundary, may_be_late=may_be_late
        )

    def forget(self, peer: int) -> None:
        """Leave out a lost rank's ends, which are not closed. What they sent stays counted."""
        self._ends = [(other, end) for other, end in self._ends if other != peer]

    def window(self, under_way: int, frame_bytes: int, ahead: int = 0) -> LinkWindow:
        """Return a link's window; both ends give the same arguments. See LinkWindow.covering."""
        return LinkWindow.covering(
            under_way, frame_bytes, budget_bytes=self.layout.link_budget_bytes, num_ahead=ahead
        )

    def close(self, *may_be_gone: type[LinkError]) -> None:
        """Deliver everything, and wait for every peer to close, as long as it sends heartbeats.
        Errors that are among may_be_gone do not matter: the peer may have left before."""
        patience_s = self.layout.liveness.lost_after_s
        # Those made first, which carry heartbeats, last.
        ends: list[SendingEnd | ReceivingEnd] = [*reversed(self.outs)]
        for end in ends + [end for _, end in self._ends if isinstance(end, ReceivingEnd)]:
            with contextlib.suppress(*may_be_gone):
                end.close(patience_s)

    def overdue_s(self, peers: Iterable[int], num_bytes: int = 1024) -> float:
        """Return how long to wait for a message of this size from the slowest of the peers."""
        return max(
            self.layout.overdue_s(self.rank, peer=peer, num_bytes=num_bytes) for peer in peers
        )

    def leaves_cloud(self, peer: int) -> bool:
        return self.layout.wan_between(self.rank, peer=peer) is not None

    def _record(self, name: LinkName) -> LinkRecord:
        """Build a link's record. Inside a cloud it notes nothing but the number of messages."""
        if self.layout.wan_between(name.sender, peer=name.receiver) is None:
            return LinkRecord(name)
        to = self.layout.cloud_of(name.receiver)
        record = LinkRecord(link=name, to=to, log=self._messages)
        # What leaves or enters the cloud is kept for the figures of a step and for the audit.
        self.records.append(record)
        return record

    def _name(self, peer: int) -> str:
        return f"rank {peer} of cloud {self.layout.placement(peer).cloud!r}"

    def clock_to(self, peer: int, boundary: int) -> LinkClock | None:
        """Return the clock of messages from this rank to `peer`, shared by all ranks of the two
        clouds, or of those between stages by all that send to `peer`; None where nothing is
        emulated. boundary: see `out`."""
        wan = self.layout.wan_between(self.rank, peer=peer)
        if not isinstance(wan, LinkProfile) or not wan.emulated:
            return None
        here = self.layout.cloud_of(self.rank)
        there = self.layout.cloud_of(peer)
        way = f"{here}-to-{there}"
        if wan.is_inbound and boundary != CONTROL:
            # Protocol NanoGPT's clock: one wire into a rank, whoever sends over it.
            way = f"to-rank-{peer}"
        if way not in self._clocks:
            name = f"link-{way}.{self._run_number}.clock"
            self._clocks[way] = LinkClock(profile=wan, path=self._run_dir / name)
        return self._clocks[way]
