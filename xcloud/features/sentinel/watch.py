"""A rank's watch over what arrives from other clouds in training: activations and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from xcloud.base.errors import FrameError
from xcloud.comm.channel import NOTHING_KNOWN, Message, ReceiveChannel, Samples
from xcloud.comm.state import MEMORY, StatefulTree, StateTree
from xcloud.features.sentinel.baseline import Baseline, Departure
from xcloud.features.sentinel.measures import measure
from xcloud.features.sentinel.settings import OnDeparture
from xcloud.net.frame import Kind, MessageKey
from xcloud.pipeline.ends import Ends
from xcloud.pipeline.hook import Hook, StepReport
from xcloud.pipeline.pipeline import BoundaryPorts
from xcloud.record.reporter import Reporter


@dataclass
class WatchedStream(StatefulTree):
    """One floating field of a channel, in the hands of one compressor: another one leaves other
    errors, so what is usual is learned for each.

    measured: the measures of this step's messages.
    """

    sender: int
    name: str
    baseline: Baseline
    measured: list[Tensor] = field(default_factory=list)

    child_names = ("baseline",)

    def judge(self) -> Departure | None:
        """Judge the messages of the step that has ended."""
        if not self.measured:
            return None
        # One value a step, over all its micro-batches: how many there are must not matter.
        mean = torch.stack(self.measured).mean(0).cpu()
        self.measured.clear()
        return self.baseline.judge(mean)


class WatchedEnd:
    """A receiving channel of a boundary whose training messages are measured as they arrive."""

    def __init__(self, end: ReceiveChannel) -> None:
        self._end = end
        self._fields = [f for f in end.fields if f.dtype.is_floating_point]
        identity = end.identity
        self.streams: dict[str, dict[str, WatchedStream]] = {}
        for one in self._fields:
            num_features = torch.Size(one.features).numel()
            self.streams[one.name] = {
                codec: WatchedStream(
                    sender=identity.sender,
                    name=f"{one.name} {identity.direction} over boundary {identity.boundary}",
                    baseline=Baseline(num_features),
                )
                for codec in end.codecs[one.name].children()
            }

    def __getattr__(self, name: str) -> Any:  # recv_start, identity, fields
        return getattr(self._end, name)

    def recv(self, key: MessageKey, samples: Samples, known: Message = NOTHING_KNOWN) -> Message:
        message = self._end.recv(key, samples, known)
        if key.kind is not Kind.EVALUATION:
            with self._end.clock.during("decompress"):
                for one in self._fields:
                    rows = message[one.name]
                    # A micro-batch without a row in this field (no answer in any text) has no
                    # mean.
                    if rows.numel():
                        self._stream(one.name, step=key.step).measured.append(measure(rows))
        return message

    def _stream(self, name: str, step: int) -> WatchedStream:
        codecs = self._end.codecs[name]
        # By the step of the message, as the autopilot may have switched in between.
        in_force = codecs.at(step)
        number = next(n for n, codec in codecs.children().items() if codec is in_force)
        return self.streams[name][number]


class Sentinel(Hook):
    """The hook of a rank that judges, after each update, what arrived from other clouds."""

    name = "sentinel"

    def __init__(
        self,
        ends: Mapping[str, WatchedEnd],
        layout: Any,
        reporter: Reporter,
        on_departure: OnDeparture,
    ) -> None:
        self._ends = ends
        self._layout = layout
        self._reporter = reporter
        self._on_departure = on_departure

    def children(self) -> StateTree:
        """Return the usual values, which mean nothing with another compressor or other ranks."""
        # MEMORY is dropped on resuming with another compressor or other ranks.
        return {MEMORY: {name: end.streams for name, end in self._ends.items()}}

    def after_update(self, step: int, report: StepReport) -> None:
        for end in self._ends.values():
            for streams in end.streams.values():
                for stream in streams.values():
                    departure = stream.judge()
                    if departure is not None:
                        self._tell(step, stream=stream, departure=departure)

    def _tell(self, step: int, stream: WatchedStream, departure: Departure) -> None:
        cloud = self._layout.cloud_of(stream.sender)
        said = (
            f"step {step}: what rank {stream.sender} ({cloud}) sends, {stream.name}, has changed "
            f"suddenly: {departure.in_words}"
        )
        if self._on_departure == "stop":
            raise FrameError(f"{said}; security.on_departure=stop ends the run")
        self._reporter.event(
            "departure", step=step, sender=stream.sender, peer=cloud, stream=stream.name,
            statistic=departure.statistic, value=departure.value, usual=departure.usual,
            deviation=departure.deviation,
        )  # fmt: skip


def watched(
    ports: dict[int, BoundaryPorts], ends: Ends
) -> tuple[dict[int, BoundaryPorts], dict[str, WatchedEnd]]:
    """Return the same ports, with receiving ends from other clouds watched, and those ends by the
    name of their channel."""
    found: dict[str, WatchedEnd] = {}

    def of(side: Mapping[int, Any]) -> dict[int, Any]:
        by_peer = dict(side)
        for peer, end in side.items():
            if ends.leaves_cloud(peer):
                watched_end = WatchedEnd(end)
                identity = end.identity
                number = f"{identity.boundary} {identity.direction} {identity.sender}"
                found[number] = by_peer[peer] = watched_end
        return by_peer

    changed = {
        stage: replace(own, forward_in=of(own.forward_in), backward_in=of(own.backward_in))
        for stage, own in ports.items()
    }
    return changed, found
