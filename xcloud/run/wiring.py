"""Joins the ranks: process groups, links and channels of one rank, from the layout.

Every border has one process group for each direction, so that both directions flow at once; the
small messages besides go through a third kind of group, in a star around rank 0. Compression and
the emulated link act where a border leaves a cloud; inside a cloud messages go as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from xcloud.cluster.emulated_link import LinkClock
from xcloud.cluster.frame import Frame, Kind
from xcloud.cluster.gloo_link import GlooInLink, GlooOutLink
from xcloud.cluster.layout import ClusterLayout
from xcloud.cluster.link import InLink, LinkStats, OutLink
from xcloud.cluster.link_profile import LinkProfile
from xcloud.cluster.liveness import Heartbeat, Liveness, PeerLife
from xcloud.cluster.machine import machine_id
from xcloud.cluster.message_log import CONTROL, LinkLog, LinkName, MessageLog
from xcloud.cluster.one_way_layout import OneWayLayout
from xcloud.cluster.window import LinkWindow
from xcloud.cluster.wire_record import LinkRecord
from xcloud.comm.border import Border, BorderField
from xcloud.comm.channel import PLAIN, Codec, Codecs, ReceiveChannel, SendChannel
from xcloud.comm.draws import ChannelId
from xcloud.comm.memory import State, join_states, split_state
from xcloud.comm.per_border import PerBorder
from xcloud.comm.phases import Compression, Phased
from xcloud.comm.step_clock import StepClock
from xcloud.errors import ConfigError
from xcloud.parallel.control import REPORT_CAPACITY_BYTES, Control, note_ages
from xcloud.parallel.pipeline import BorderPorts
from xcloud.parallel.rank_group import RankGroup
from xcloud.parallel.schedule import Schedule, most_in_flight
from xcloud.security.defences import Defences

_FRAME_SLACK_BYTES = 4096
_FOREVER = timedelta(days=30)  # links have their own, better informed deadlines
_CONTROL_AHEAD = 8  # small messages under way on a control link: a norm, reports
_FORWARD_AHEAD = 32
"""Messages that may be under way forward where no gradient holds back the sender: an evaluation's
pieces, and training over a border that no gradient crosses. More wait in the sender's queue."""


@dataclass
class Wiring:
    """All ends that one rank holds. wan_*: those that leave its cloud."""

    liveness: Liveness
    ports: dict[int, BorderPorts] = field(default_factory=dict)
    lanes: dict[int, RankGroup] = field(default_factory=dict)
    control: Control | None = None
    outs: list[OutLink] = field(default_factory=list)
    ins: list[InLink] = field(default_factory=list)
    wan_outs: list[OutLink] = field(default_factory=list)
    wan_records: list[LinkRecord] = field(default_factory=list)
    wan_forward: list[SendChannel] = field(default_factory=list)
    wan_backward: list[SendChannel] = field(default_factory=list)
    is_emulated: bool = False

    @property
    def wan_stats(self) -> list[LinkStats]:
        return [link.stats for link in self.wan_outs]

    @property
    def channels(self) -> dict[str, SendChannel | ReceiveChannel]:
        """Every channel that ends here, by its identity in words."""
        return {
            str(channel.identity): channel
            for ports in self.ports.values()
            for ends in (
                ports.forward_out, ports.forward_in, ports.backward_out, ports.backward_in
            )
            for channel in ends.values()
        }  # fmt: skip

    def state_dict(self) -> State:
        """What the channels carry from step to step; links and counters begin anew."""
        return join_states({name: end.state_dict() for name, end in self.channels.items()})

    def load_state_dict(self, state: State) -> None:
        """The state of the same rank in the same experiment; ValueError otherwise."""
        channels = self.channels
        for name, part in split_state(state, channels, "a rank's channels").items():
            channels[name].load_state_dict(part)

    def alive(self) -> AbstractContextManager[object]:
        """While the block lasts the other ranks are told that this one lives. For whatever may
        take long outside a training step."""
        if self.control is None:
            return nullcontext()
        return Heartbeat(self.liveness.interval_s, self.control.say_alive)

    def meet(self) -> None:
        """Wait until every rank has come here; see Control.meet."""
        if self.control is not None:
            self.control.meet()

    def close(self) -> None:
        """Deliver everything, hear every peer's goodbye, as long as it gives signs of life."""
        with self.alive():
            for out in reversed(self.outs):  # the control links, which bear signs of life, last
                out.close(self.liveness.lost_after_s)
        for incoming in self.ins:
            incoming.close(self.liveness.lost_after_s)


def wire(
    rank: int,
    layout: ClusterLayout,
    borders: dict[int, Border],
    compression: Compression | Phased | PerBorder,
    max_samples: int,
    device: torch.device,
    clock: StepClock,
    run_dir: Path,
    on_report: Callable[[Frame], None],
    schedule: Schedule,
    defences: Defences | None = None,
    *,
    seed: int,
) -> Wiring:
    """Build this rank's ends. Every rank calls it at the same time with the same arguments.

    borders: by the stage before the border. max_samples: of any micro-batch. on_report: called in
    rank 0, in a background thread, for each report of another rank. schedule: says how many
    messages a link must be able to hold. defences: noise on what leaves a cloud that holds the
    first stage (forward) or the last one (backward). seed: of the experiment, for compressors that
    draw random numbers.
    """
    wiring = Wiring(layout.liveness)
    if layout.num_ranks == 1:
        wiring.ports = {stage: BorderPorts(border) for stage, border in borders.items()}
        wiring.lanes = {stage: RankGroup.alone() for stage in range(layout.num_stages)}
        return wiring
    lives = {peer: PeerLife(layout.liveness) for peer in range(layout.num_ranks) if peer != rank}
    clocks = LinkClocks(rank, layout, run_dir)
    builder = _Builder(rank, layout, clocks, wiring, clock.messages, lives, seed)
    builder.join_lanes()
    builder.join_control(on_report)
    for stage, border in sorted(borders.items()):
        builder.join_border(
            stage, border, compression.at_border(stage), max_samples, device, clock, schedule
        )
    for stage, ports in wiring.ports.items():
        ports.crosses_clouds = layout.stage_cloud(stage) != layout.stage_cloud(stage + 1)
        if defences is not None:
            ports.defences = defences.at(stage, layout.stage_cloud, layout.num_stages - 1)
    return wiring


class LinkClocks:
    """Clocks of the emulated links, one for each direction between two clouds."""

    def __init__(self, rank: int, layout: ClusterLayout | OneWayLayout, run_dir: Path) -> None:
        self._rank, self._layout, self._run_dir = rank, layout, run_dir
        self._clocks: dict[str, LinkClock] = {}
        # A name that no earlier run in this folder used: link time starts at 0 in every run.
        nonce = torch.tensor([time.time_ns()])
        dist.broadcast(nonce, 0)
        self._nonce = int(nonce)
        emulated = [layout.wan, *layout.links.values()]
        if layout.crosses_clouds and any(isinstance(wan, LinkProfile) for wan in emulated):
            self._refuse_several_machines()

    def _refuse_several_machines(self) -> None:
        """Delivery times are by the machine's own clock, which another machine does not share."""
        mine = torch.tensor([machine_id()])
        hosts = [torch.zeros_like(mine) for _ in range(self._layout.num_ranks)]
        dist.all_gather(hosts, mine)
        if any(int(other) != int(mine) for other in hosts):
            raise ConfigError(
                "an emulated link (cluster.wan) works between ranks on one machine only; this run "
                "spans several: set cluster.wan=real"
            )

    def to(self, peer: int) -> LinkClock | None:
        """Clock for messages from this rank to `peer`; None where nothing is emulated."""
        wan = self._layout.wan_between(self._rank, peer)
        if not isinstance(wan, LinkProfile):
            return None
        here = self._layout.placement(self._rank).cloud
        there = self._layout.placement(peer).cloud
        name = f"link-{here}-to-{there}.{self._nonce}.clock"
        if name not in self._clocks:
            self._clocks[name] = LinkClock(wan, self._run_dir / name)
        return self._clocks[name]


@dataclass
class _Builder:
    rank: int
    layout: ClusterLayout
    clocks: LinkClocks
    wiring: Wiring
    log: MessageLog | None
    lives: dict[int, PeerLife]
    seed: int

    def join_lanes(self) -> None:
        """One group for the ranks of each stage that has several."""
        for stage in range(self.layout.num_stages):
            ranks = self.layout.ranks_of(stage)
            group = dist.new_group(list(ranks), timeout=_FOREVER) if len(ranks) > 1 else None
            if self.rank in ranks:
                self.wiring.lanes[stage] = RankGroup(self.rank, ranks, group)

    def join_control(self, on_report: Callable[[Frame], None]) -> None:
        group = dist.new_group(timeout=_FOREVER)
        peers = range(1, self.layout.num_ranks) if self.rank == 0 else (0,)
        capacity = REPORT_CAPACITY_BYTES + _FRAME_SLACK_BYTES
        handlers = (
            {Kind.REPORT: on_report}
            if self.rank == 0
            else {Kind.ALIVE: partial(note_ages, self.lives)}
        )
        window = self._window(_CONTROL_AHEAD, capacity)
        out = {peer: self._out(group, peer, capacity, CONTROL, window) for peer in peers}
        incoming: dict[int, InLink] = {}
        for peer in peers:
            incoming[peer] = self._in(group, peer, capacity, CONTROL, window, handlers)
        overdue_s = max(self.layout.overdue_s(self.rank, peer, 1024) for peer in peers)
        self.wiring.control = Control(
            self.rank, self.layout.leaders, out, incoming, overdue_s, self.lives
        )

    def join_border(
        self,
        stage: int,
        border: Border,
        compression: Compression | Phased,
        max_samples: int,
        device: torch.device,
        clock: StepClock,
        schedule: Schedule,
    ) -> None:
        """Channels between the ranks of `stage` and those of the next one."""
        before, behind = self.layout.ranks_of(stage), self.layout.ranks_of(stage + 1)
        everyone = sorted({*before, *behind})
        groups = [dist.new_group(everyone, timeout=_FOREVER) for _ in ("forward", "backward")]
        if self.rank not in everyone:
            return
        ports = BorderPorts(border)
        self.wiring.ports[stage] = ports
        crosses = self.layout.stage_cloud(stage) != self.layout.stage_cloud(stage + 1)
        # Which lanes meet: micro-batch i joins lane i mod n before with lane i mod n behind.
        meets = [
            (self.layout.owner(stage, i), self.layout.owner(stage + 1, i))
            for i in range(len(before) * len(behind))
        ]
        actions = schedule.actions(stage, self.layout.num_stages)
        in_flight = most_in_flight(actions, lambda i: meets[i % len(meets)])
        for direction, group in zip(("forward", "backward"), groups, strict=True):
            fields = border.fields if direction == "forward" else border.gradient_fields
            if not fields:
                continue
            codecs = _codecs(compression, direction) if crosses else _plain
            frame, capacity = _frame_bytes(
                fields, codecs(), max_samples, border.max_rows_per_sample
            )
            if direction == "forward":
                start = sum(spec.num_bytes for spec in border.start)
                capacity = max(capacity, start + _FRAME_SLACK_BYTES)
            for a, b in sorted(set(meets)):
                sender, receiver = (a, b) if direction == "forward" else (b, a)
                if sender == receiver:
                    continue
                identity = ChannelId(self.seed, stage, direction, sender, receiver)
                under_way = in_flight[a, b]
                if direction == "forward":
                    under_way = max(under_way, _FORWARD_AHEAD)
                window = self._window(under_way, frame)
                if sender == self.rank:
                    link = self._out(group, receiver, capacity, stage, window)
                    channel = SendChannel(link, fields, codecs, clock, identity)
                    (ports.forward_out if direction == "forward" else ports.backward_out)[
                        receiver
                    ] = channel
                    if crosses:
                        wan = self.wiring.wan_forward, self.wiring.wan_backward
                        wan[direction == "backward"].append(channel)
                elif receiver == self.rank:
                    inlink = self._in(group, sender, capacity, stage, window)
                    overdue_s = self.layout.overdue_s(self.rank, sender, capacity)
                    (ports.forward_in if direction == "forward" else ports.backward_in)[sender] = (
                        ReceiveChannel(inlink, fields, codecs, clock, identity, device, overdue_s)
                    )

    def _window(self, under_way: int, frame_bytes: int) -> LinkWindow:
        """Of the same arguments at both ends of a link."""
        return LinkWindow.covering(under_way, frame_bytes, self.layout.link_budget_bytes)

    def _out(
        self, group: dist.ProcessGroup, peer: int, capacity: int, border: int, window: LinkWindow
    ) -> GlooOutLink:
        clock = self.clocks.to(peer)
        self.wiring.is_emulated |= clock is not None
        log = self._log(LinkName(border, self.rank, peer))
        leaves_cloud = self.layout.wan_between(self.rank, peer) is not None
        record = None
        if leaves_cloud:
            there = self.layout.placement(peer).cloud
            record = LinkRecord(there, peer, None if border == CONTROL else border)
            self.wiring.wan_records.append(record)
        link = GlooOutLink(
            group, peer, self._name(peer), capacity, clock, window,
            log=log, record=record, life=self.lives[peer],
            overdue_s=self.layout.overdue_s(self.rank, peer, capacity),
        )  # fmt: skip
        self.wiring.outs.append(link)
        if leaves_cloud:
            self.wiring.wan_outs.append(link)
        return link

    def _in(
        self,
        group: dist.ProcessGroup,
        peer: int,
        capacity: int,
        border: int,
        window: LinkWindow,
        handlers: Mapping[Kind, Callable[[Frame], None]] | None = None,
    ) -> GlooInLink:
        log = self._log(LinkName(border, peer, self.rank))
        link = GlooInLink(
            group, peer, self._name(peer), capacity, handlers, window,
            log=log, life=self.lives[peer], advice=self.layout.overdue_advice(self.rank, peer),
        )  # fmt: skip
        self.wiring.ins.append(link)
        return link

    def _log(self, name: LinkName) -> LinkLog | None:
        """Only messages between clouds are noted."""
        if self.log is None or self.layout.wan_between(name.sender, name.receiver) is None:
            return None
        return LinkLog(name, self.log)

    def _name(self, peer: int) -> str:
        return f"rank {peer} of cloud {self.layout.placement(peer).cloud!r}"


def _plain() -> Codecs:
    return Codecs([(None, PLAIN)])


def _codecs(compression: Compression | Phased, direction: str) -> Callable[[], Codecs]:
    """Makes fresh codecs: every channel has its own state."""
    phases: list[tuple[int | None, Compression]] = (
        [(phase.until_step, phase.compression) for phase in compression.phases.values()]
        if isinstance(compression, Phased)
        else [(None, compression)]
    )

    def make() -> Codecs:
        return Codecs(
            [
                (until, Codec(c.forward, c.forward_memory))
                if direction == "forward"
                else (until, Codec(c.backward, c.backward_memory))
                for until, c in phases
            ]
        )

    return make


def _frame_bytes(
    fields: tuple[BorderField, ...], codecs: Codecs, max_samples: int, max_rows: int
) -> tuple[int, int]:
    """Bytes of the frame that codecs make of the most rows, which bounds what is under way, and of
    the longest frame that can come, so that receives can wait before it is known."""
    frame = capacity = _FRAME_SLACK_BYTES
    for entry in fields:
        rows = max_samples * (max_rows if entry.rows == "counted" else 1)
        spec = entry.spec(rows)
        coded = codecs.max_bytes(spec) if spec.is_floating else spec.num_bytes
        frame += coded
        capacity += max(spec.num_bytes, coded)
    return frame, capacity
