"""Joins one rank of a pipeline to the others, as its job and layout say: groups, links for
small messages around rank 0, replicas, and the channels of the stage boundaries that end in it.

A boundary has a line for each direction, so that both flow at once. Compression, defences and the
emulated link act where it leaves a cloud; inside a cloud messages go as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from xcloud.base.errors import LinkClosed, LinkTimeout
from xcloud.cluster.frame import Frame, Kind
from xcloud.cluster.link_end import ignore
from xcloud.comm.channel import (
    BoundaryField,
    Codec,
    Codecs,
    ReceiveChannel,
    Receiver,
    SendChannel,
    Sender,
)
from xcloud.comm.compression import ChannelId, Compression, CompressionPlan
from xcloud.comm.compression_plans import Selectable, SelectableCodecs, Selection
from xcloud.comm.state import MEMORY, StatefulParts, StateTree
from xcloud.comm.step_clock import StepClock
from xcloud.job.experiment import Experiment
from xcloud.parallel.activation_cache import (
    MEGABYTE,
    ActivationCache,
    ActivationCaches,
    CachingChannel,
)
from xcloud.parallel.control import REPORT_CAPACITY_BYTES, Control, StageSums, note_ages
from xcloud.parallel.exchange import RankGroup
from xcloud.parallel.pipeline import BoundaryPorts
from xcloud.parallel.schedule import most_in_flight
from xcloud.wire.ends import FRAME_SLACK_BYTES, Ends, OnReport
from xcloud.wire.further_ends import (
    Guard,
    LineMeters,
    Loopback,
    PeerLinks,
    replica_links,
    tied_links,
)

T = TypeVar("T")

_CONTROL_AHEAD = 8  # small messages under way on a control link: a norm, reports


@dataclass(frozen=True)
class Wiring(StatefulParts):
    """All ends that one rank holds. groups: by stage, the ranks that hold it. control: None where
    there is one rank. replicas: links to this rank's counterparts; None where the pipeline stands
    once. tied: to the pipeline's other end, where a matrix is tied over two ranks. is_elastic:
    other clouds may be late or gone, and only merges wait for them."""

    ends: Ends
    groups: dict[int, RankGroup]
    control: Control | None
    sums: StageSums
    replicas: PeerLinks | None
    tied: PeerLinks | None
    boundaries: Boundaries
    is_elastic: bool

    def parts(self) -> StateTree:
        """What the channels carry from step to step; links and counters begin anew."""
        return {MEMORY: self.boundaries.channels}

    def expect_signs_of_life(self) -> None:
        """From now on a rank that is silent for lost_after_s is lost, in a step too. Not where
        links are emulated, which hold messages back, or where clouds may leave and come back."""
        if not self.is_elastic and not self.ends.is_emulated:
            for life in self.ends.lives.values():
                life.beats = True

    def meet(self) -> None:
        """See Control.meet; where clouds may leave, of the first cloud."""
        if self.control is None:
            return
        if not self.is_elastic:
            self.control.meet()
        elif self.ends.rank in (first := self.ends.layout.ranks_in(self.ends.layout.cloud_of(0))):
            self.control.meet(first)

    def close(self) -> None:
        """Deliver everything, hear every peer's goodbye, as long as it sends heartbeats."""
        self.ends.close(*([LinkClosed, LinkTimeout] if self.is_elastic else []))


def wire(
    job: Experiment, ends: Ends, clock: StepClock, device: torch.device, on_report: OnReport
) -> Wiring:
    """Every rank calls it. on_report: in rank 0, in the background, of each other's report."""
    layout = job.cluster
    groups = {}
    for stage in range(layout.num_stages):
        for ranks in layout.replicas_of(stage):
            group = ends.group(ranks, device)
            if group is not None:
                groups[stage] = group
    control = join_control(ends, on_report) if layout.num_ranks > 1 else None
    sums = _join_sums(job, ends, control)
    replicas = None
    if layout.num_replicas > 1:
        rejoin = None
        if job.roster.is_elastic:
            assert control is not None
            rejoin = partial(_join_peer, control, ends, on_report)
        replicas = replica_links(ends, layout, device, rejoin)
    tied = tied_links(ends, layout, device) if job.ties_ends else None
    boundaries = join_boundaries(job, ends, clock, device)
    return Wiring(ends, groups, control, sums, replicas, tied, boundaries, job.roster.is_elastic)


def join_control(ends: Ends, on_report: OnReport) -> Control:
    """Reports, checkpoints and heartbeats, between rank 0 and each other rank of any job.
    on_report: see wire."""
    layout, everyone = ends.layout, range(ends.layout.num_ranks)
    peers = everyone[1:] if ends.rank == 0 else everyone[:1]
    overdue_s = max(layout.overdue_s(ends.rank, peer, 1024) for peer in peers)
    control = Control(ends.rank, {}, {}, overdue_s, ends.lives)
    for peer in peers:
        _join_peer(control, ends, on_report, peer)
    return control


def _join_peer(control: Control, ends: Ends, on_report: OnReport, peer: int) -> None:
    """The links to one peer, also again to one that has come back."""
    handlers: dict[Kind, Callable[[Frame], None]] = (
        {Kind.REPORT: partial(on_report, peer)}
        if ends.rank == 0
        else {Kind.ALIVE: partial(note_ages, ends.lives)}
    )
    handlers[Kind.CHECKPOINT] = partial(control.hear, peer)
    capacity = REPORT_CAPACITY_BYTES + FRAME_SLACK_BYTES
    control.out[peer], control.incoming[peer] = ends.both(
        "control", peer, capacity, _CONTROL_AHEAD, handlers
    )


def _join_sums(job: Experiment, ends: Ends, control: Control | None) -> StageSums:
    """In the replica of rank 0 over the links of `control`, in others over a star of their own."""
    layout, rank = job.cluster, ends.rank
    leader_of = layout.leader_of(layout.placement(rank).replica)
    leaders = sorted({*leader_of})
    if 0 in leaders and control is not None:
        return StageSums(rank, leader_of, control.out, control.incoming, control.overdue_s)
    if rank not in leaders or len(leaders) == 1:
        return StageSums(rank, leader_of)
    peers = leaders[1:] if rank == leaders[0] else leaders[:1]
    star = {p: ends.both("norms", p, FRAME_SLACK_BYTES, _CONTROL_AHEAD) for p in peers}
    overdue_s = max(layout.overdue_s(rank, peer, 1024) for peer in peers)
    out, incoming = {p: out for p, (out, _) in star.items()}, {p: i for p, (_, i) in star.items()}
    return StageSums(rank, leader_of, out, incoming, overdue_s)


_FORWARD_AHEAD = 32
"""Messages that may be under way forward where no gradient holds back the sender: an evaluation's
pieces, and training over a boundary that no gradient crosses. More wait in the sender's queue."""


@dataclass(frozen=True)
class Boundaries:
    """ports: by the stage before the boundary. channels: every one that ends here, by its identity
    in words. wan_sends: those that cross clouds."""

    ports: dict[int, BoundaryPorts] = field(default_factory=dict)
    channels: dict[str, SendChannel | ReceiveChannel] = field(default_factory=dict)
    wan_sends: list[SendChannel] = field(default_factory=list)
    _shared: dict[type, object] = field(default_factory=dict)

    def shared(self, kind: type[T]) -> T:
        """The one object of this class that all channels use, made when it is first asked for."""
        found = self._shared.setdefault(kind, kind())
        assert isinstance(found, kind)
        return found


def join_boundaries(
    job: Experiment, ends: Ends, clock: StepClock, device: torch.device
) -> Boundaries:
    """Those of this rank, in its replica of the pipeline."""
    joined = Boundaries()
    for stage in sorted(job.boundaries):
        _Joint(job, ends, clock, device, joined, stage).join()
    return joined


@dataclass
class _Joint:
    """Between the ranks of `stage` and those of the next one, in this rank's replica."""

    job: Experiment
    ends: Ends
    clock: StepClock
    device: torch.device
    joined: Boundaries
    stage: int

    def join(self) -> None:
        job, layout, stage, rank = self.job, self.job.cluster, self.stage, self.ends.rank
        replica, boundary = layout.placement(rank).replica, job.boundaries[stage]
        if not any(rank in layout.ranks_of(s, replica) for s in (stage, stage + 1)):
            return
        # Which ranks meet: those that have a micro-batch in common.
        meets = [
            (layout.owner(stage, i), layout.owner(stage + 1, i))
            for i in range(layout.rank_period(stage))
        ]
        in_flight: Counter[tuple[int, int]] = Counter()
        for schedule in job.schedules:
            actions = schedule.actions(stage, layout.num_stages)
            in_flight |= most_in_flight(actions, lambda i: meets[i % len(meets)])
        ports = self.joined.ports[stage] = BoundaryPorts(boundary)
        pairs = sorted(set(meets[replica :: layout.num_replicas]))
        kept_bytes = round(job.training.activation_cache_mb * MEGABYTE)
        for a, b in pairs:
            if rank not in (a, b):
                continue
            if kept_bytes and boundary.is_constant and layout.wan_between(a, b) is not None:
                # A share for each sender: it cannot know what others have sent.
                share = kept_bytes // sum(receiver == b for _, receiver in pairs)
                peer, caches = b if rank == a else a, self.joined.shared(ActivationCaches)
                caches[stage, peer] = ActivationCache(share)
            ahead = max(in_flight[a, b], _FORWARD_AHEAD)
            self._join("forward", a, b, ahead, ports.forward_out, ports.forward_in)
            if boundary.gradient_fields:
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
        """The end, or both ends, of one direction between two ranks that this rank holds."""
        if sender == receiver:
            outs[receiver] = ins[sender] = Loopback()
            return
        job, ends, stage = self.job, self.ends, self.stage
        boundary, wan = job.boundaries[stage], job.cluster.wan_between(sender, receiver)
        fields = boundary.fields if direction == "forward" else boundary.gradient_fields
        compression: CompressionPlan = Compression()
        if wan is not None:
            compression = job.compression.at_boundary(stage)
        codecs = _codecs(compression, direction, self.joined)
        frame, capacity = self._frame_bytes(fields, codecs(), direction)
        window, line = ends.window(under_way, frame), f"{stage}.{direction}"
        identity = ChannelId(job.seed, stage, direction, sender, receiver)
        if sender == ends.rank:
            link = ends.out(line, receiver, capacity, window, stage)
            channel = SendChannel(link, fields, codecs, self.clock, identity)
            self.joined.channels[str(identity)] = outs[receiver] = channel
            if wan is not None:
                self.joined.wan_sends.append(channel)
                replica = job.cluster.placement(sender).replica
                defence = job.defences_at(stage, replica).get(direction)
                outs[receiver] = channel if defence is None else Guard(channel, defence)
            return
        measure: Callable[[Frame, float], None] = ignore
        if isinstance(compression, Selectable) and wan is not None and wan.is_metered:
            measure = self.joined.shared(LineMeters).of(identity)
        inlink = ends.incoming(line, sender, capacity, window, boundary=stage, on_arrival=measure)
        kept = self.joined.shared(ActivationCaches).get((stage, sender))
        channel_of = ReceiveChannel if kept is None else partial(CachingChannel, kept)
        received = channel_of(
            inlink, fields, codecs, self.clock, identity, self.device,
            job.cluster.overdue_s(ends.rank, sender, capacity), boundary.max_rows_per_sample,
        )  # fmt: skip
        self.joined.channels[str(identity)] = ins[sender] = received

    def _frame_bytes(
        self, fields: tuple[BoundaryField, ...], codecs: Codecs, direction: str
    ) -> tuple[int, int]:
        """Bytes of the frame that codecs make of the most rows, which bounds what is under way,
        and of the longest frame that can come, so that receives can wait before it is known."""
        frame = capacity = FRAME_SLACK_BYTES
        boundary = self.job.boundaries[self.stage]
        for entry in fields:
            rows = entry.max_rows(self.job.max_micro_batch, boundary.max_rows_per_sample)
            spec = entry.spec(rows)
            coded = codecs.max_bytes(spec) if spec.is_floating else spec.num_bytes
            frame += coded
            capacity += max(spec.num_bytes, coded)
        if direction == "forward":
            start = sum(spec.num_bytes for spec in boundary.start)
            capacity = max(capacity, start + FRAME_SLACK_BYTES)
        return frame, capacity


def _codecs(
    compression: CompressionPlan, direction: str, joined: Boundaries
) -> Callable[[], Codecs]:
    """Makes fresh codecs: every channel has its own state."""

    def codec(c: Compression) -> Codec:
        if direction == "forward":
            return Codec(c.forward, c.forward_memory)
        return Codec(c.backward, c.backward_memory)

    phases = compression.by_step
    if isinstance(compression, Selectable):
        selection = joined.shared(Selection)
        return lambda: SelectableCodecs([codec(c) for _, c in phases], selection)
    return lambda: Codecs([(until, codec(c)) for until, c in phases])
