"""The channels of the stage boundaries that end in one rank. A boundary has a line for each
direction, so that both flow at once. Compression, defences and the emulated link act where it
leaves a cloud; inside a cloud messages go as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from xcloud.cluster.frame import MessageKey
from xcloud.cluster.link_end import ReceivingEnd
from xcloud.comm.activation_cache import MEGABYTE, ActivationCache, CachingChannel
from xcloud.comm.boundary import Boundary, BoundaryField, Message, Samples
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
from xcloud.comm.step_clock import StepClock
from xcloud.job.experiment import Experiment
from xcloud.parallel.pipeline import BoundaryPorts
from xcloud.parallel.schedule import most_in_flight
from xcloud.security.defences import LABEL, Defence
from xcloud.wire.ends import FRAME_SLACK_BYTES, Ends

_FORWARD_AHEAD = 32
"""Messages that may be under way forward where no gradient holds back the sender: an evaluation's
pieces, and training over a boundary that no gradient crosses. More wait in the sender's queue."""


@dataclass(frozen=True)
class Boundaries:
    """ports: by the stage before the boundary. channels: every one that ends here, by its identity
    in words. wan_sends, wan_receives: those that cross clouds. switches: which choice of a
    Selectable compression all of them use."""

    ports: dict[int, BoundaryPorts] = field(default_factory=dict)
    channels: dict[str, SendChannel | ReceiveChannel] = field(default_factory=dict)
    wan_sends: list[SendChannel] = field(default_factory=list)
    wan_receives: list[tuple[ChannelId, ReceivingEnd]] = field(default_factory=list)
    switches: Selection = field(default_factory=Selection)


def join_boundaries(
    job: Experiment, ends: Ends, clock: StepClock, device: torch.device
) -> Boundaries:
    """Every rank calls it at the same time, for all boundaries in every replica."""
    joined = Boundaries()
    for stage in sorted(job.boundaries):
        for replica in range(job.cluster.num_replicas):
            _Joint(job, ends, clock, device, joined, stage, replica).join()
    return joined


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


@dataclass
class _Joint:
    """Between the ranks of `stage` and those of the next one in one replica."""

    job: Experiment
    ends: Ends
    clock: StepClock
    device: torch.device
    joined: Boundaries
    stage: int
    replica: int

    @property
    def _boundary(self) -> Boundary:
        return self.job.boundaries[self.stage]

    def join(self) -> None:
        ends, layout, stage = self.ends, self.job.cluster, self.stage
        both = (layout.ranks_of(stage, self.replica), layout.ranks_of(stage + 1, self.replica))
        everyone = sorted({*both[0], *both[1]})
        if len(everyone) > 1:
            for direction in ("forward", "backward"):
                ends.line(self._line(direction), everyone)
        if ends.rank not in everyone:
            return
        # Which ranks meet: those that have a micro-batch in common.
        meets = [
            (layout.owner(stage, i), layout.owner(stage + 1, i))
            for i in range(layout.rank_period(stage))
        ]
        in_flight: Counter[tuple[int, int]] = Counter()
        for schedule in self.job.schedules:
            actions = schedule.actions(stage, layout.num_stages)
            in_flight |= most_in_flight(actions, lambda i: meets[i % len(meets)])
        ports = self.joined.ports[stage] = BoundaryPorts(self._boundary)
        pairs = sorted(set(meets[self.replica :: layout.num_replicas]))
        for a, b in pairs:
            if ends.rank in (a, b) and self._keeps(a, b):
                # A share for each sender: it cannot know what others have sent.
                share = self._kept_bytes // sum(receiver == b for _, receiver in pairs)
                ports.kept[b if ends.rank == a else a] = ActivationCache(share)
            ahead = max(in_flight[a, b], _FORWARD_AHEAD)
            self._join("forward", a, b, ahead, ports.forward_out, ports.forward_in)
            if self._boundary.gradient_fields:
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
        ends = self.ends
        if ends.rank not in (sender, receiver):
            return
        if sender == receiver:
            outs[receiver] = ins[sender] = Loopback()
            return
        boundary, crosses = self._boundary, self._crosses(sender, receiver)
        fields = boundary.fields if direction == "forward" else boundary.gradient_fields
        compression = self.job.compression.at_boundary(self.stage)
        codecs = _codecs(compression, direction, self.joined.switches) if crosses else _plain
        frame, capacity = self._frame_bytes(fields, codecs(), direction)
        window, line = ends.window(under_way, frame), self._line(direction)
        identity = ChannelId(self.job.seed, self.stage, direction, sender, receiver)
        if sender == ends.rank:
            link = ends.out(line, receiver, capacity, window, self.stage)
            channel = SendChannel(link, fields, codecs, self.clock, identity)
            self.joined.channels[str(identity)] = outs[receiver] = channel
            if crosses:
                self.joined.wan_sends.append(channel)
                if (defence := self._defences().get(direction)) is not None:
                    outs[receiver] = Guard(channel, defence)
            return
        inlink = ends.incoming(line, sender, capacity, window, boundary=self.stage)
        kept = self.joined.ports[self.stage].kept.get(sender)
        channel_of = (
            partial(CachingChannel, kept) if isinstance(kept, ActivationCache) else ReceiveChannel
        )
        received = channel_of(
            inlink, fields, codecs, self.clock, identity, self.device,
            self.job.cluster.overdue_s(ends.rank, sender, capacity), boundary.max_rows_per_sample,
        )  # fmt: skip
        self.joined.channels[str(identity)] = ins[sender] = received
        if crosses:
            self.joined.wan_receives.append((identity, inlink))

    def _crosses(self, sender: int, receiver: int) -> bool:
        return self.job.cluster.wan_between(sender, receiver) is not None

    def _defences(self) -> Mapping[str, Defence]:
        """By direction: of what leaves a cloud that holds the first stage (forward) or the last
        one (backward)."""
        layout = self.job.cluster
        cloud_of = partial(layout.stage_cloud, replica=self.replica)
        return self.job.security.defences.at(self.stage, cloud_of, layout.num_stages - 1)

    @property
    def _kept_bytes(self) -> int:
        return round(self.job.training.activation_cache_mb * MEGABYTE)

    def _keeps(self, sender: int, receiver: int) -> bool:
        crosses = self._crosses(sender, receiver)
        return bool(self._kept_bytes) and self._boundary.is_constant and crosses

    def _line(self, direction: str) -> str:
        return f"{self.stage}.{direction}" + (f".{self.replica}" if self.replica else "")

    def _frame_bytes(
        self, fields: tuple[BoundaryField, ...], codecs: Codecs, direction: str
    ) -> tuple[int, int]:
        """Bytes of the frame that codecs make of the most rows, which bounds what is under way,
        and of the longest frame that can come, so that receives can wait before it is known."""
        frame = capacity = FRAME_SLACK_BYTES
        for entry in fields:
            rows = entry.max_rows(self.job.max_micro_batch, self._boundary.max_rows_per_sample)
            spec = entry.spec(rows)
            coded = codecs.max_bytes(spec) if spec.is_floating else spec.num_bytes
            frame += coded
            capacity += max(spec.num_bytes, coded)
        if direction == "forward":
            start = sum(spec.num_bytes for spec in self._boundary.start)
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
