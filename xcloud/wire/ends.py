"""The link ends of one rank and what they share: names, clocks, records, heartbeats. Which ends
a rank needs is up to its wiring (wiring.py) or its role.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from xcloud.base.errors import ConfigError, LinkError
from xcloud.cluster.frame import Frame, Kind
from xcloud.cluster.layout import Layout
from xcloud.cluster.link import CONTROL, LinkClock, LinkName, LinkRecord, MessageLog
from xcloud.cluster.link_end import InSettings, OutSettings, ReceivingEnd, SendingEnd, ignore
from xcloud.cluster.link_profile import LinkWindow
from xcloud.cluster.liveness import PeerLife
from xcloud.cluster.transport import CPU, Transport
from xcloud.parallel.exchange import RankGroup

FRAME_SLACK_BYTES = 4096

Handlers = Mapping[Kind, Callable[[Frame], None]]
OnReport = Callable[[int, Frame], None]
"""Takes another rank's report, with the rank by whose link it came."""


class Ends:
    """Every rank makes its ends at the same time, from the same layout.

    records: of the links that leave the cloud. lives: signs of life of the other ranks.
    """

    def __init__(
        self,
        transport: Transport,
        layout: Layout[Any],
        run_dir: Path,
        messages: MessageLog | None = None,
    ) -> None:
        self.layout = layout
        self._ends: list[tuple[int, SendingEnd | ReceivingEnd]] = []  # with the peer, as made
        self.records: list[LinkRecord] = []
        self.lives = {
            peer: PeerLife(layout.liveness)
            for peer in range(layout.num_ranks)
            if peer != transport.rank
        }
        self._transport, self._messages = transport, messages
        self._clocks = LinkClocks(transport, layout, run_dir)

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def run_dir(self) -> Path:
        return self._clocks.run_dir

    @property
    def outs(self) -> list[SendingEnd]:
        return [end for _, end in self._ends if isinstance(end, SendingEnd)]

    @property
    def _ins(self) -> list[ReceivingEnd]:
        return [end for _, end in self._ends if isinstance(end, ReceivingEnd)]

    @property
    def computing(self) -> AbstractContextManager[object]:
        """See Transport."""
        return self._transport.computing

    @property
    def is_emulated(self) -> bool:
        return self._clocks.are_used

    def line(self, name: str, ranks: Sequence[int]) -> None:
        """See Transport."""
        self._transport.line(name, ranks)

    def group(self, ranks: Sequence[int], device: torch.device = CPU) -> RankGroup | None:
        """The group of these ranks, in this order; None outside it. device: see Transport."""
        joined = self._transport.group(ranks, device)
        if self.rank not in ranks:
            return None
        return RankGroup(self.rank, tuple(ranks), joined, self.lives)

    def out(
        self,
        line: str,
        peer: int,
        capacity_bytes: int,
        window: LinkWindow,
        boundary: int = CONTROL,
    ) -> SendingEnd:
        """boundary: stage before it, for logs and records of messages between stages."""
        record = self._record(LinkName(boundary, self.rank, peer))
        if record.to is not None:
            self.records.append(record)
        settings = OutSettings(
            self._name(peer), capacity_bytes, self._clocks.to(peer), window, record,
            self.lives[peer], self.layout.overdue_s(self.rank, peer, capacity_bytes),
        )  # fmt: skip
        end = self._transport.out(line, peer, settings)
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
    ) -> ReceivingEnd:
        wan = self.layout.wan_between(self.rank, peer)
        settings = InSettings(
            self._name(peer), capacity_bytes, self.handled(peer, handlers or {}), window,
            self._record(LinkName(boundary, peer, self.rank)), self.lives[peer],
            self.layout.overdue_advice(self.rank, peer), wan is not None and wan.emulated, on_end,
            on_arrival,
        )  # fmt: skip
        end = self._transport.incoming(line, peer, settings)
        self._ends.append((peer, end))
        return end

    def handled(self, peer: int, handlers: Handlers) -> Handlers:
        """The functions that take messages of `peer`, for each kind that has one."""
        return handlers

    def both(
        self,
        line: str,
        peer: int,
        capacity_bytes: int,
        under_way: int,
        handlers: Handlers | None = None,
    ) -> tuple[SendingEnd, ReceivingEnd]:
        """A link to `peer`, and one from it."""
        window = self.window(under_way, capacity_bytes)
        out = self.out(line, peer, capacity_bytes, window)
        return out, self.incoming(line, peer, capacity_bytes, window, handlers)

    def star(
        self, line: str, ranks: Sequence[int], capacity_bytes: int, under_way: int
    ) -> tuple[dict[int, SendingEnd], dict[int, ReceivingEnd]]:
        """Links between the first of `ranks`, one of which this rank is, and each other one: by
        peer, those to it and those from it."""
        peers = ranks[1:] if self.rank == ranks[0] else ranks[:1]
        ends = {peer: self.both(line, peer, capacity_bytes, under_way) for peer in peers}
        return {p: out for p, (out, _) in ends.items()}, {p: end for p, (_, end) in ends.items()}

    def forget(self, peer: int) -> None:
        """A lost rank's ends are not closed. What they sent stays counted."""
        self._ends = [(other, end) for other, end in self._ends if other != peer]

    def begins_again(self, ranks: Sequence[int]) -> bool:
        """See Transport."""
        return self._transport.begins_again(ranks)

    def window(self, under_way: int, frame_bytes: int) -> LinkWindow:
        """Of the same arguments at both ends of a link."""
        return LinkWindow.covering(under_way, frame_bytes, self.layout.link_budget_bytes)

    def close(self, *may_be_gone: type[LinkError]) -> None:
        """Deliver everything, hear every peer's goodbye, as long as it sends heartbeats.

        may_be_gone: errors of an end that do not matter: its peer may have left before.
        """
        patience_s = self.layout.liveness.lost_after_s
        # Those made first, which carry heartbeats, last.
        ends: list[SendingEnd | ReceivingEnd] = [*reversed(self.outs), *self._ins]
        for end in ends:
            with contextlib.suppress(*may_be_gone):
                end.close(patience_s)

    def leaves_cloud(self, peer: int) -> bool:
        return self.layout.wan_between(self.rank, peer) is not None

    def _record(self, name: LinkName) -> LinkRecord:
        """Of messages inside a cloud nothing but their number is noted."""
        if self.layout.wan_between(name.sender, name.receiver) is None:
            return LinkRecord(name)
        return LinkRecord(name, self.layout.cloud_of(name.receiver), self._messages)

    def _name(self, peer: int) -> str:
        return f"rank {peer} of cloud {self.layout.placement(peer).cloud!r}"


class LinkClocks:
    """Clocks of the emulated links, one for each direction between two clouds."""

    def __init__(self, transport: Transport, layout: Layout[Any], run_dir: Path) -> None:
        self._rank, self._layout, self.run_dir = transport.rank, layout, run_dir
        self._clocks: dict[str, LinkClock] = {}
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

    @property
    def are_used(self) -> bool:
        return bool(self._clocks)

    def to(self, peer: int) -> LinkClock | None:
        """Clock for messages from this rank to `peer`; None where nothing is emulated."""
        wan = self._layout.wan_between(self._rank, peer)
        if wan is None or not wan.emulated or wan.profile is None:
            return None
        here = self._layout.placement(self._rank).cloud
        there = self._layout.placement(peer).cloud
        name = f"link-{here}-to-{there}.{self._run_number}.clock"
        if name not in self._clocks:
            self._clocks[name] = LinkClock(wan.profile, self.run_dir / name)
        return self._clocks[name]
