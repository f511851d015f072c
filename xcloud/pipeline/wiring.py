"""Joins one rank of a pipeline to the others, as its job and layout say: groups, links for
small messages around rank 0, replicas, and the channels of the stage boundaries that end in it.

A boundary has a line for each direction, so that both flow at once. Compression, defences and the
emulated link act where it leaves a cloud; inside a cloud messages go as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

import torch

from xcloud.base.errors import LinkClosed, LinkTimeout
from xcloud.comm.channel import (
    NOTHING_KNOWN,
    Boundary,
    BoundaryField,
    Codecs,
    Message,
    ReceiveChannel,
    Samples,
    SendChannel,
)
from xcloud.comm.compression import ChannelId, Compression
from xcloud.comm.compression_plans import Selectable, Selection
from xcloud.comm.state import MEMORY, State, StatefulTree, StateTree, states_of
from xcloud.comm.step_clock import StepClock
from xcloud.layout import ClusterLayout
from xcloud.net.frame import Frame, Kind, MessageKey, Tensors, TensorSpec
from xcloud.net.link_end import ignore
from xcloud.pipeline.control import REPORT_CAPACITY_BYTES, Control, StageSums
from xcloud.pipeline.crossing import CrossedJob, codecs_of, guarded, learns
from xcloud.pipeline.ends import FRAME_SLACK_BYTES, Ends, OnReport
from xcloud.pipeline.exchange import RankGroup
from xcloud.pipeline.line_meter import LineMeters
from xcloud.pipeline.pipeline import BoundaryPorts
from xcloud.pipeline.schedule import Schedule, max_in_flight

T = TypeVar("T")

_CONTROL_AHEAD = 8  # small messages under way on a control link: a norm, reports


MakeReceiver = Callable[..., ReceiveChannel]
"""Builds the receiving end of a channel from the arguments of ReceiveChannel. A feature that keeps
what arrived builds one of its own."""


@dataclass(eq=False)
class Loopback:
    """Both ends of a boundary between two stages of one rank: hands over what it is given."""

    _messages: dict[MessageKey, Message] = field(default_factory=dict)
    _start: Tensors = ()

    def send(
        self, key: MessageKey, message: Message, samples: Samples, known: Message = NOTHING_KNOWN
    ) -> Message:
        self._messages[key] = {name: value.detach() for name, value in message.items()}
        return message

    def learn_from_gradients(self, step: int, gradients: Message) -> None:
        """Nothing is lost here, so there is nothing to learn."""

    def send_start(self, tensors: Tensors) -> None:
        self._start = tensors

    def recv(self, key: MessageKey, samples: Samples, known: Message = NOTHING_KNOWN) -> Message:
        return {**known, **self._messages.pop(key)}

    def recv_start(self, specs: tuple[TensorSpec, ...]) -> Tensors:
        return self._start


class _Roster(Protocol):
    @property
    def is_elastic(self) -> bool:
        """True where clouds may be late, leave and come back."""


class WiredJob(CrossedJob, Protocol):
    """The job as the wiring reads it (job/job.py: PipelineJob)."""

    @property
    def roster(self) -> _Roster: ...
    @property
    def boundaries(self) -> Mapping[int, Boundary]: ...
    @property
    def schedules(self) -> Sequence[Schedule]: ...
    @property
    def max_micro_batch(self) -> int: ...


class AveragingLinks(Protocol):
    """Links over which ranks average the same values."""

    raw_bytes: int
    """FP32 bytes of what went to other clouds."""


@dataclass(frozen=True)
class Wiring(StatefulTree):
    """All ends that one rank holds.

    groups: the ranks that hold each stage.
    control: the control links. None if there is one rank.
    is_elastic: True if other clouds may be late or gone. Then only averaging waits for them.
    rejoin: makes the control links to a rank of a cloud that has restarted. None if clouds may not
        leave.
    averaging: links of the features that average over clouds. Each feature adds its own.
    """

    ends: Ends
    groups: dict[int, RankGroup]
    control: Control | None
    sums: StageSums
    boundaries: Boundaries
    is_elastic: bool
    rejoin: Callable[[int], None] | None = None
    averaging: list[AveragingLinks] = field(default_factory=list)

    def children(self) -> StateTree:
        """Return what the channels carry from step to step; links and counters restart."""
        return {MEMORY: self.boundaries.channels}

    def start_failure_detection(self) -> None:
        """Count a rank as lost from now on after lost_after_s of silence, in a step too. Does
        nothing where links are emulated, which hold messages back, or where clouds may leave and
        come back."""
        if not self.is_elastic and not self.ends.is_emulated:
            for peer in self.ends.detector.peers.values():
                peer.silence_is_loss = True

    def barrier(self, claim: bool = False) -> bool:
        """Block until all ranks are here; where clouds may leave, those of the first cloud. Return
        whether any of them has a claim. See Control.barrier."""
        layout = self.ends.layout
        ranks = layout.ranks_in(layout.cloud_of(0)) if self.is_elastic else range(layout.num_ranks)
        if self.control is not None and self.ends.rank in ranks:
            return self.control.barrier(ranks, claim=claim) != 0
        return claim

    def close(self) -> None:
        """Deliver everything, and wait for every peer to close, as long as it sends heartbeats."""
        self.ends.close(*([LinkClosed, LinkTimeout] if self.is_elastic else []))


def wire(
    job: WiredJob,
    ends: Ends,
    clock: StepClock,
    device: torch.device,
    on_report: OnReport,
    make_receiver: MakeReceiver = ReceiveChannel,
) -> Wiring:
    """Join this rank to the others. Every rank calls it at the same time.

    on_report: called in rank 0, in the background, with each report of another rank.
    make_receiver: see MakeReceiver.
    """
    layout = job.cluster
    is_elastic = job.roster.is_elastic
    # All ranks ask for all groups in one order, as torch makes a group only where everybody calls.
    groups = {
        stage: group
        for stage in range(layout.num_stages)
        for ranks in layout.replicas_of(stage)
        if (group := ends.group(ranks, device=device)) is not None
    }
    # Before the boundaries: these links carry heartbeats, and are the last to be closed.
    control = join_control(ends, on_report=on_report) if layout.num_ranks > 1 else None
    # A cloud that comes back has new processes, to which rank 0 needs new control links.
    rejoin = None
    if control is not None and is_elastic:
        rejoin = partial(_join_peer, control, ends, on_report)
    return Wiring(
        ends=ends,
        groups=groups,
        control=control,
        sums=_join_sums(job, ends=ends, control=control),
        boundaries=Boundaries(job, ends, clock, device, make_receiver=make_receiver),
        is_elastic=is_elastic,
        rejoin=rejoin,
    )


def join_control(ends: Ends, on_report: OnReport) -> Control:
    """Make the links of reports, checkpoints and heartbeats, between rank 0 and each other rank of
    any job. on_report: see wire."""
    everyone = range(ends.layout.num_ranks)
    peers = everyone[1:] if ends.rank == 0 else everyone[:1]
    control = Control(
        rank=ends.rank,
        out={},
        incoming={},
        overdue_s=ends.overdue_s(peers),
        detector=ends.detector,
    )
    for peer in peers:
        _join_peer(control, ends=ends, on_report=on_report, peer=peer)
    return control


def _join_peer(control: Control, ends: Ends, on_report: OnReport, peer: int) -> None:
    """Make the control links to one peer, also again to one that has come back."""
    handlers = {
        Kind.ALIVE: partial(ends.detector.receive, peer),
        Kind.CHECKPOINT: partial(control.receive, peer),
    }
    if ends.rank == 0:
        handlers[Kind.REPORT] = partial(on_report, peer)
    # A report is the longest of these messages; norms and barriers go beside it.
    capacity = REPORT_CAPACITY_BYTES + FRAME_SLACK_BYTES
    control.out[peer], control.incoming[peer] = ends.both(
        "control", peer=peer, capacity_bytes=capacity, under_way=_CONTROL_AHEAD, handlers=handlers
    )
    ends.detector.beat_over(peer, out=control.out[peer])


def _join_sums(job: WiredJob, ends: Ends, control: Control | None) -> StageSums:
    """Join the stages' sums: in the replica of rank 0 over the links of `control`, in others over
    a star of their own."""
    layout = job.cluster
    rank = ends.rank
    sums = StageSums(rank=rank, leader_of=layout.leader_of(layout.placement(rank).replica))
    first, *others = sums.leaders
    # Rank 0 has a link to every rank already. Norms of another replica do not pass through its
    # cloud.
    if first == 0 and control is not None:
        return replace(
            sums, out=control.out, incoming=control.incoming, overdue_s=control.overdue_s
        )
    if rank not in sums.leaders or not others:
        return sums
    peers = others if rank == first else [first]
    star = {
        p: ends.both("norms", peer=p, capacity_bytes=FRAME_SLACK_BYTES, under_way=_CONTROL_AHEAD)
        for p in peers
    }
    return replace(
        sums,
        out={peer: out for peer, (out, _) in star.items()},
        incoming={peer: incoming for peer, (_, incoming) in star.items()},
        overdue_s=ends.overdue_s(peers),
    )


def rank_pairs(layout: ClusterLayout, stage: int) -> list[tuple[int, int]]:
    """Return between which ranks each micro-batch of a period crosses from `stage` to the next.
    Those of replica r are every R-th, from the r-th on."""
    return [
        (layout.owner(stage, micro_batch=i), layout.owner(stage + 1, micro_batch=i))
        for i in range(layout.rank_period(stage))
    ]


_FORWARD_AHEAD = 32
"""How many receives to post, as far as the budget of the link goes, where no gradient limits the
sender: in evaluations, and over a boundary that no gradient crosses."""


class Boundaries:
    """The boundaries of one rank, in its replica of the pipeline.

    ports: the ports of each boundary, by the stage before it.
    channels: all channels that end here, by their identity in words.
    wan_sends: the sending channels that cross clouds.
    """

    def __init__(
        self,
        job: WiredJob,
        ends: Ends,
        clock: StepClock,
        device: torch.device,
        make_receiver: MakeReceiver,
    ) -> None:
        self.ports: dict[int, BoundaryPorts] = {}
        self.channels: dict[str, SendChannel | ReceiveChannel] = {}
        self.wan_sends: list[SendChannel] = []
        self._job = job
        self._ends = ends
        self._clock = clock
        self._device = device
        self._make_receiver = make_receiver
        self._shared: dict[type, object] = {}
        for stage in sorted(job.boundaries):
            self._join(stage)

    def shared(self, kind: type[T]) -> T:
        """Return the one object of this class that all channels use, made when first asked for."""
        found = self._shared.setdefault(kind, kind())
        assert isinstance(found, kind)
        return found

    def learned(self, stage: int) -> State | None:
        """Return what the compressors behind a stage of this rank have learned, on the way to
        another cloud of the first micro-batch in the first replica; None if none of them learns,
        or none is here."""
        layout = self._job.cluster
        for channel in self.wan_sends:
            identity = channel.identity
            if (identity.boundary, identity.direction) != (stage, "forward"):
                continue
            ends = (layout.owner(stage, micro_batch=0), layout.owner(stage + 1, micro_batch=0))
            if (identity.sender, identity.receiver) == ends and learns(channel.learned()):
                return states_of(channel.learned())
        return None

    def _join(self, stage: int) -> None:
        job = self._job
        layout = job.cluster
        rank = self._ends.rank
        all_pairs = rank_pairs(layout, stage=stage)
        pairs = {*all_pairs[layout.placement(rank).replica :: layout.num_replicas]}
        # A direction is a pair of its two ends, so ranks elsewhere have nothing to do for it
        # (docs/decisions/0018).
        if not any(rank in pair for pair in pairs):
            return
        # A boundary joins only ranks that have a micro-batch in common: with a and b ranks these
        # are as many pairs as their least common multiple.
        in_flight: Counter[tuple[int, int]] = Counter()
        for schedule in job.schedules:
            fitted = schedule.for_lanes(layout.num_stages, num_lanes=layout.num_lanes)
            actions = fitted.actions(stage, num_stages=layout.num_stages)
            # The most of all schedules that the run may switch to: links are made once.
            in_flight |= max_in_flight(actions, link=lambda i: all_pairs[i % len(all_pairs)])
        boundary = job.boundaries[stage]
        self.ports[stage] = BoundaryPorts(boundary)
        for a, b in sorted(pair for pair in pairs if rank in pair):
            # What waits for nothing from behind may be blocked, and is in flight one at a time.
            under_way = in_flight[a, b] if boundary.gradient_fields else 1
            self._join_one_way(
                stage, direction="forward", sender=a, receiver=b, under_way=under_way
            )
            if boundary.gradient_fields:
                self._join_one_way(
                    stage, direction="backward", sender=b, receiver=a, under_way=in_flight[a, b]
                )

    def _join_one_way(
        self, stage: int, direction: str, sender: int, receiver: int, under_way: int
    ) -> None:
        """Make the end, or both ends, of one direction between two ranks that this rank holds.

        What moves: activations from `sender`, before the boundary, to `receiver` behind it
        (direction "forward"), or their gradients the other way ("backward").
        """
        job = self._job
        ends = self._ends
        ports = self.ports[stage]
        boundary = ports.boundary
        if direction == "forward":
            fields, outs, ins = boundary.fields, ports.forward_out, ports.forward_in
            # A measured cut sends its decoder over the same link before the first micro-batch.
            least_bytes = sum(spec.num_bytes for spec in boundary.start) + FRAME_SLACK_BYTES
            ahead = _FORWARD_AHEAD
        else:
            fields, outs, ins = boundary.gradient_fields, ports.backward_out, ports.backward_in
            least_bytes = ahead = 0
        if sender == receiver:  # one rank holds both stages: what it sends it takes itself
            outs[receiver] = ins[sender] = Loopback()
            return

        # Inside a cloud messages cross as they are.
        wan = job.cluster.wan_between(sender, peer=receiver)
        compression = Compression() if wan is None else job.compression.at_boundary(stage)
        codecs = partial(codecs_of, compression, direction, partial(self.shared, Selection))
        frame, capacity = self._frame_bytes(boundary, fields=fields, codecs=codecs())
        capacity = max(capacity, least_bytes)
        window = ends.window(under_way, frame_bytes=frame, ahead=ahead)
        line = f"{stage}.{direction}"
        identity = ChannelId(
            seed=job.seed, boundary=stage, direction=direction, sender=sender, receiver=receiver
        )
        if sender == ends.rank:
            # Outwards: the stage, then a defence, the channel (memory, compressor), the link.
            link = ends.out(
                line,
                receiver,
                capacity,
                window,
                boundary=stage,
                blocked=partial(self._clock.during, "wait"),
            )
            channel = SendChannel(
                link=link, fields=fields, new_codecs=codecs, clock=self._clock, identity=identity
            )
            self.channels[str(identity)] = outs[receiver] = channel
            if wan is not None:  # a defence changes what leaves the cloud, in front of the channel
                self.wan_sends.append(channel)
                outs[receiver] = guarded(job, stage, direction, channel)
            return
        # Inwards: the link, then the channel, the stage. Only an autopilot that may change the
        # compression asks how fast the line is.
        measure: Callable[[Frame, float], None] = ignore
        if isinstance(compression, Selectable) and wan is not None and wan.is_metered:
            measure = self.shared(LineMeters).of(identity)
        inlink = ends.incoming(line, sender, capacity, window, boundary=stage, on_arrival=measure)
        received = self._make_receiver(
            link=inlink,
            fields=fields,
            new_codecs=codecs,
            clock=self._clock,
            identity=identity,
            device=self._device,
            overdue_s=job.cluster.overdue_s(ends.rank, peer=sender, num_bytes=capacity),
            max_rows_per_sample=boundary.max_rows_per_sample,
        )
        self.channels[str(identity)] = ins[sender] = received

    def _frame_bytes(
        self, boundary: Boundary, fields: Sequence[BoundaryField], codecs: Codecs
    ) -> tuple[int, int]:
        """Return the bytes of two frames: the one that codecs make of the most rows, which bounds
        what is under way, and the longest that can come, so that receives can wait before it is
        known."""
        frame = capacity = FRAME_SLACK_BYTES
        for entry in fields:
            rows = entry.max_rows(
                self._job.max_micro_batch, max_rows_per_sample=boundary.max_rows_per_sample
            )
            spec = entry.spec(rows)
            coded = codecs.max_bytes(spec) if entry.is_compressed else spec.num_bytes
            frame += coded
            capacity += max(spec.num_bytes, coded)
        return frame, capacity
