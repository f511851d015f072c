"""Link ends of features, beside the channels and control links that every run has: within one
rank, behind a defence, timed for the autopilot; and one rank's links to others that train the same
values, in the other replicas and, where a matrix is tied, at the pipeline's other end.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from xcloud.comm.channel import NOTHING_KNOWN, Message, Samples, SendChannel
from xcloud.comm.compression import ChannelId
from xcloud.contracts.model import Stage
from xcloud.net.frame import Frame, Kind, MessageKey, TensorSpec
from xcloud.net.link import Parts
from xcloud.pipeline.pipeline import BoundaryPorts
from xcloud.security.defences import LABEL, Defence


class Loopback:
    """Both ends of a boundary between two stages of one rank: hands over what it is given."""

    def __init__(self) -> None:
        self._messages: dict[MessageKey, Message] = {}
        self._start: Parts = ()

    def send(self, key: MessageKey, message: Message, samples: Samples) -> Message:
        self._messages[key] = {name: value.detach() for name, value in message.items()}
        return message

    def send_start(self, tensors: Parts) -> None:
        self._start = tensors

    def recv(self, key: MessageKey, samples: Samples, known: Message = NOTHING_KNOWN) -> Message:
        return self._messages.pop(key)

    def recv_start(self, specs: tuple[TensorSpec, ...]) -> Parts:
        return self._start


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


_NUM_PROBES = 9


class LineMeter:
    """Of all links from one rank to this one, whose threads call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._delays_s: deque[float] = deque(maxlen=_NUM_PROBES)
        self._arrived_at_s = 0.0

    @property
    def delay_s(self) -> float:
        """Clock difference + latency; 0 before the first probe."""
        with self._lock:
            return statistics.median(self._delays_s) if self._delays_s else 0.0

    def probe(self, sent_at_s: float, arrived_at_s: float) -> None:
        with self._lock:
            self._delays_s.append(arrived_at_s - sent_at_s)

    def busy_s(self, sent_at_s: float, arrived_at_s: float) -> float:
        """Of a message that has just arrived; 0 before the first probe."""
        with self._lock:
            before_s, self._arrived_at_s = self._arrived_at_s, arrived_at_s
            if not self._delays_s:
                return 0.0
            start_s = max(sent_at_s + statistics.median(self._delays_s), before_s)
            return max(0.0, arrived_at_s - start_s)


@dataclass
class LineMeters:
    """Of the real lines that boundaries cross: a meter for each sender, and by channel the seconds
    that its messages kept the line busy. A heartbeat is a probe."""

    by_sender: dict[int, LineMeter] = field(default_factory=dict)
    line_s: dict[ChannelId, float] = field(default_factory=dict)

    def of(self, channel: ChannelId) -> Callable[[Frame, float], None]:
        """To be given every frame of this channel's link, and when it came."""
        meter = self.by_sender.setdefault(channel.sender, LineMeter())
        self.line_s[channel] = 0.0

        def take(frame: Frame, now_s: float) -> None:
            if frame.deliver_at_s >= 0:  # nobody says when it was sent
                return
            sent_at_s = -frame.deliver_at_s
            if frame.key.kind is Kind.ALIVE:
                return meter.probe(sent_at_s, now_s)
            busy_s = meter.busy_s(sent_at_s, now_s)
            self.line_s[channel] += busy_s * (frame.key.kind.traffic == channel.direction)

        return take


@torch.no_grad()
def hand_over(stages: Mapping[int, Stage], ports: Mapping[int, BoundaryPorts]) -> None:
    """Before the first step: what stages hand to their successors once (Boundary.start)."""
    for stage, module in sorted(stages.items()):
        before, after = ports.get(stage - 1), ports.get(stage)
        if before is not None and before.boundary.start:
            for giver in before.forward_in.values():  # every rank before hands over the same
                module.take_over(giver.recv_start(before.boundary.start))
        if after is not None and after.boundary.start:
            handed = tuple(tensor.detach() for tensor in module.hand_over())
            found = tuple(TensorSpec.of(tensor) for tensor in handed)
            assert found == after.boundary.start, (found, after.boundary.start)
            for taker in after.forward_out.values():
                taker.send_start(handed)
