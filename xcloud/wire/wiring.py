"""Joins the ranks: process groups, links and channels of one rank, from the layout.

Every boundary has one process group for each direction, so that both directions flow at once; the
small messages besides go through a third kind of group (control_wiring.py). Compression and
the emulated link act where a boundary leaves a cloud; inside a cloud messages go as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from xcloud.base.errors import LinkClosed, LinkTimeout
from xcloud.cluster.layout import ClusterLayout
from xcloud.cluster.link import LinkRecord, LinkStats
from xcloud.cluster.link_end import ReceivingEnd
from xcloud.cluster.liveness import Heartbeat
from xcloud.cluster.transport import Transport
from xcloud.comm.activation_cache import ActivationCache, CachingChannel
from xcloud.comm.boundary import Boundary, BoundaryField
from xcloud.comm.channel import (
    PLAIN,
    Codec,
    Codecs,
    Loopback,
    ReceiveChannel,
    Receiver,
    SelectableCodecs,
    SendChannel,
    Sender,
)
from xcloud.comm.compression import Compression, CompressionPlan, Selectable, Selection
from xcloud.comm.compressor import ChannelId
from xcloud.comm.state import MEMORY, State, join_states, load_states, split_state, states_of
from xcloud.comm.step_clock import StepClock
from xcloud.parallel.control import Control, StageSums
from xcloud.parallel.guard import ReceiveGuard, SendGuard
from xcloud.parallel.pipeline import BoundaryPorts
from xcloud.parallel.rank_group import RankGroup
from xcloud.parallel.schedule import Schedule, most_in_flight
from xcloud.security.defences import Defence, Defences
from xcloud.security.observer import Observer
from xcloud.wire.control import join_control, join_control_of, join_sums
from xcloud.wire.ends import FRAME_SLACK_BYTES, Ends, OnReport
from xcloud.wire.replicas import HubEnds, PeerEnds, ReplicaEnds, tied_ends

_FORWARD_AHEAD = 32
"""Messages that may be under way forward where no gradient holds back the sender: an evaluation's
pieces, and training over a boundary that no gradient crosses. More wait in the sender's queue."""


@dataclass
class Wiring:
    """All ends that one rank holds. channels: every one that ends here, by its identity in words.
    guards: around those that cross clouds; wan_sends, wan_receives: these by end. control: None
    where there is one rank. replicas: links to this rank's counterparts; None where the pipeline
    stands once. tied: to the pipeline's other end, where a matrix is tied over two ranks.
    switches: which choice of a Selectable compression its channels use.
    is_elastic: other clouds may be late or gone, and only merges wait for them."""

    ends: Ends
    sums: StageSums
    ports: dict[int, BoundaryPorts] = field(default_factory=dict)
    lanes: dict[int, RankGroup] = field(default_factory=dict)
    control: Control | None = None
    replicas: ReplicaEnds | None = None
    tied: PeerEnds | None = None
    is_elastic: bool = False
    channels: dict[str, SendChannel | ReceiveChannel] = field(default_factory=dict)
    guards: list[SendGuard | ReceiveGuard] = field(default_factory=list)
    wan_sends: list[SendChannel] = field(default_factory=list)
    wan_receives: list[tuple[ChannelId, ReceivingEnd]] = field(default_factory=list)
    switches: Selection = field(default_factory=Selection)

    @property
    def wan_records(self) -> list[LinkRecord]:
        return self.ends.records

    @property
    def wan_stats(self) -> list[LinkStats]:
        """Of the links in the order of `wan_records`."""
        return [link.stats for link in self.ends.wan_outs]

    @property
    def is_emulated(self) -> bool:
        return self.ends.is_emulated

    def observe(self, observer: Observer) -> None:
        """From now on it notes what passes between this rank and other clouds."""
        for guard in self.guards:
            guard.observer = observer

    def state_dict(self) -> State:
        """What the channels carry from step to step; links and counters begin anew."""
        return join_states({MEMORY: states_of(self.channels)})

    def load_state_dict(self, state: State) -> None:
        """The state of the same rank in the same experiment; ValueError otherwise."""
        own = split_state(state, (MEMORY,), "a rank's channels")[MEMORY]
        load_states(self.channels, own, "a rank's channels")

    def alive(self) -> AbstractContextManager[object]:
        """While the block lasts the other ranks are told that this one lives."""
        if self.control is None:
            return nullcontext()
        return Heartbeat(self.ends.layout.liveness.interval_s, self.control.say_alive)

    def expect_signs_of_life(self) -> None:
        """From now on a rank that is silent for lost_after_s is lost, in a step too. Not where
        links are emulated, which hold messages back, or where clouds may leave and come back."""
        if not self.is_elastic and not self.ends.is_emulated:
            for life in self.ends.lives.values():
                life.beats = True

    def meet(self) -> None:
        """Wait until every rank has come here, see Control.meet; where clouds may leave, every
        one of the first cloud."""
        if self.control is None:
            return
        if not self.is_elastic:
            self.control.meet()
        elif self.ends.rank in self.first_cloud:
            self.control.meet(self.first_cloud)

    @property
    def first_cloud(self) -> tuple[int, ...]:
        """Ranks of the cloud that rank 0 is in."""
        return self.ends.layout.ranks_in(self.ends.layout.cloud_of(0))

    def close(self) -> None:
        """Deliver everything, hear every peer's goodbye, as long as it gives signs of life."""
        self.ends.close(*([LinkClosed, LinkTimeout] if self.is_elastic else []))


def wire(
    transport: Transport,
    layout: ClusterLayout,
    boundaries: dict[int, Boundary],
    compression: CompressionPlan,
    max_samples: int,
    device: torch.device,
    clock: StepClock,
    run_dir: Path,
    on_report: OnReport,
    schedule: Schedule,
    defences: Defences | None = None,
    *,
    seed: int,
    ties_ends: bool = False,
    is_elastic: bool = False,
    kept_bytes: int = 0,
    other_schedules: Sequence[Schedule] = (),
) -> Wiring:
    """Build this rank's ends. Every rank calls it at the same time with the same arguments.

    boundaries: by the stage before the boundary. max_samples: of any micro-batch. on_report:
    called in rank 0, in a background thread, for each report of another rank. schedule: says how
    many messages a link must be able to hold; other_schedules: that may take its place.
    defences: noise on what leaves a cloud that holds the first stage (forward) or the last one
    (backward). seed: of the experiment, for compressors that draw random numbers. ties_ends:
    whether the first and the last stage train a matrix in common. is_elastic: see Wiring.
    kept_bytes: most that a rank keeps of the rows that come over a constant boundary.
    """
    ends = Ends(transport, layout, run_dir, clock.messages)
    replica = layout.placement(ends.rank).replica
    sums = StageSums(ends.rank, layout.leader_of(replica))
    wiring = Wiring(ends, sums, is_elastic=is_elastic)
    for stage in range(layout.num_stages):
        for ranks in layout.replicas_of(stage):
            lanes = ends.group(ranks)
            if lanes is not None:
                wiring.lanes[stage] = lanes
    if layout.num_ranks > 1:
        wiring.control = join_control(ends, layout, on_report)
        wiring.sums = join_sums(ends, layout, replica, wiring.control)
    if layout.num_replicas > 1:
        ReplicaEnds.join_lines(ends, layout)
        wiring.replicas = ReplicaEnds(ends, layout, device)
        if is_elastic:
            assert wiring.control is not None
            rejoin = partial(join_control_of, wiring.control, ends, layout, on_report)
            wiring.replicas = HubEnds(ends, layout, device, rejoin)
    if ties_ends:
        wiring.tied = tied_ends(ends, layout, device)
    for stage, boundary in sorted(boundaries.items()):
        for number in range(layout.num_replicas):
            cloud_of = partial(layout.stage_cloud, replica=number)
            protected = {}
            if defences is not None:
                protected = defences.at(stage, cloud_of, layout.num_stages - 1)
            _BoundaryBuilder(
                wiring, layout, number, stage, boundary, compression.at_boundary(stage),
                max_samples,
                device, clock, [schedule, *other_schedules], protected, seed, kept_bytes,
            ).join()  # fmt: skip
    return wiring


@dataclass
class _BoundaryBuilder:
    """Channels between the ranks of `stage` and those of the next one in one replica, as far as
    they end here."""

    wiring: Wiring
    layout: ClusterLayout
    replica: int
    stage: int
    boundary: Boundary
    compression: CompressionPlan
    max_samples: int
    device: torch.device
    clock: StepClock
    schedules: Sequence[Schedule]
    defences: Mapping[str, Defence]
    seed: int
    kept_bytes: int

    def join(self) -> None:
        ends, layout, stage = self.wiring.ends, self.layout, self.stage
        both = (layout.ranks_of(stage, self.replica), layout.ranks_of(stage + 1, self.replica))
        everyone = sorted({*both[0], *both[1]})
        if len(everyone) > 1:
            for direction in ("forward", "backward"):  # a line each, so that both flow at once
                ends.line(self._line(direction), everyone)
        if ends.rank not in everyone:
            return
        # Which lanes meet: those that have a micro-batch in common.
        meets = [
            (layout.owner(stage, i), layout.owner(stage + 1, i))
            for i in range(layout.lane_period(stage))
        ]
        in_flight: Counter[tuple[int, int]] = Counter()
        for schedule in self.schedules:
            actions = schedule.actions(stage, layout.num_stages)
            in_flight |= most_in_flight(actions, lambda i: meets[i % len(meets)])
        ports = BoundaryPorts(self.boundary)
        self.wiring.ports[stage] = ports
        pairs = sorted(set(meets[self.replica :: layout.num_replicas]))
        for a, b in pairs:
            if ends.rank in (a, b) and self._keeps(a, b):
                # A share for each sender: it cannot know what others have sent.
                share = self.kept_bytes // sum(receiver == b for _, receiver in pairs)
                ports.kept[b if ends.rank == a else a] = ActivationCache(share)
            ahead = max(in_flight[a, b], _FORWARD_AHEAD)
            self._join("forward", a, b, ahead, ports.forward_out, ports.forward_in)
            if self.boundary.gradient_fields:
                ahead = in_flight[a, b]
                self._join("backward", b, a, ahead, ports.backward_out, ports.backward_in)

    def _join(
        self,
        direction: str,
        sender: int,
        receiver: int,
        under_way: int,
        outs: dict[int, Sender],
        ins: dict[int, Receiver],
    ) -> None:
        """The end or ends of one direction between two ranks that this rank holds."""
        ends, wiring = self.wiring.ends, self.wiring
        if ends.rank not in (sender, receiver):
            return
        if sender == receiver:
            outs[receiver] = ins[sender] = Loopback()
            return
        crosses = self.layout.wan_between(sender, receiver) is not None
        fields = self.boundary.fields if direction == "forward" else self.boundary.gradient_fields
        codecs = _codecs(self.compression, direction, wiring.switches) if crosses else _plain
        frame, capacity = self._frame_bytes(fields, codecs(), direction)
        window = ends.window(under_way, frame)
        line = self._line(direction)
        identity = ChannelId(self.seed, self.stage, direction, sender, receiver)
        peer = receiver if sender == ends.rank else sender
        overdue_s = self.layout.overdue_s(ends.rank, peer, capacity)
        if sender == ends.rank:
            link = ends.out(line, peer, capacity, window, self.stage, overdue_s)
            channel = SendChannel(link, fields, codecs, self.clock, identity)
            outs[peer] = wiring.channels[str(identity)] = channel
            if crosses:
                outs[peer] = guard = SendGuard(channel, self.defences.get(direction))
                wiring.guards.append(guard)
                wiring.wan_sends.append(channel)
        else:
            advice = self.layout.overdue_advice(ends.rank, peer)
            inlink = ends.incoming(
                line, peer, capacity, window, boundary=self.stage, advice=advice
            )
            kept = wiring.ports[self.stage].kept.get(peer)
            channel_of = ReceiveChannel if kept is None else partial(CachingChannel, kept)
            received = channel_of(
                inlink, fields, codecs, self.clock, identity, self.device, overdue_s,
                self.boundary.max_rows_per_sample,
            )  # fmt: skip
            ins[peer] = wiring.channels[str(identity)] = received
            if crosses:
                ins[peer] = taken = ReceiveGuard(received)
                wiring.guards.append(taken)
                wiring.wan_receives.append((identity, inlink))

    def _keeps(self, sender: int, receiver: int) -> bool:
        crosses = self.layout.wan_between(sender, receiver) is not None
        return bool(self.kept_bytes) and self.boundary.is_constant and crosses

    def _line(self, direction: str) -> str:
        return f"{self.stage}.{direction}" + (f".{self.replica}" if self.replica else "")

    def _frame_bytes(
        self, fields: tuple[BoundaryField, ...], codecs: Codecs, direction: str
    ) -> tuple[int, int]:
        """Bytes of the frame that codecs make of the most rows, which bounds what is under way,
        and of the longest frame that can come, so that receives can wait before it is known."""
        frame = capacity = FRAME_SLACK_BYTES
        for entry in fields:
            rows = entry.max_rows(self.max_samples, self.boundary.max_rows_per_sample)
            spec = entry.spec(rows)
            coded = codecs.max_bytes(spec) if spec.is_floating else spec.num_bytes
            frame += coded
            capacity += max(spec.num_bytes, coded)
        if direction == "forward":
            start = sum(spec.num_bytes for spec in self.boundary.start)
            capacity = max(capacity, start + FRAME_SLACK_BYTES)
        return frame, capacity


def _plain() -> Codecs:
    return Codecs([(None, PLAIN)])


def _codecs(
    compression: CompressionPlan, direction: str, switches: Selection
) -> Callable[[], Codecs]:
    """Makes fresh codecs: every channel has its own state."""

    def codec(c: Compression) -> Codec:
        if direction == "forward":
            return Codec(c.forward, c.forward_memory)
        return Codec(c.backward, c.backward_memory)

    phases = compression.by_step
    if isinstance(compression, Selectable):
        return lambda: SelectableCodecs([codec(c) for _, c in phases], switches)
    return lambda: Codecs([(until, codec(c)) for until, c in phases])
