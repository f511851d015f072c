"""Where a boundary leaves a cloud: defences on what leaves, notes for the leak meter on what
passes. Knows no compressor and no link; a guard is a channel's end to the pipeline.
"""

from __future__ import annotations

import numpy as np

from xcloud.cluster.frame import Kind, MessageKey, TensorSpec
from xcloud.comm.boundary import Message, Samples
from xcloud.comm.channel import NOTHING_KNOWN, ReceiveChannel, SendChannel
from xcloud.comm.compressor import Parts
from xcloud.security.defences import LABEL, Defence
from xcloud.security.observer import Observer, Stream


class _Guard:
    """observer: set once the data is loaded, if the leak meter is on."""

    observer: Observer | None = None

    def __init__(self, channel: SendChannel | ReceiveChannel, how: str) -> None:
        self._boundary, self._direction = channel.identity.boundary, channel.identity.direction
        self._floating = [f for f in channel.fields if f.dtype.is_floating_point]
        self._how = how

    def _note(self, key: MessageKey, message: Message, samples: Samples) -> None:
        observer = self.observer
        if observer is None or key.kind is Kind.EVALUATION or not observer.wants(key.step):
            return
        for field in self._floating:
            stream = Stream(self._direction, self._boundary, self._how, field.name)
            counts = field.counts(message.get("counts"))
            observer.message(stream, samples["ids"], counts, message[field.name])


class SendGuard(_Guard):
    """A Sender. Noise is part of the graph: the gradient that returns is of what was sent."""

    def __init__(self, channel: SendChannel, defence: Defence | None) -> None:
        super().__init__(channel, "sent")
        self.channel, self._defence = channel, defence
        # Not drawn from the run's seed: the receiver knows that one too.
        self._chance = np.random.default_rng()

    def send(self, key: MessageKey, message: Message, samples: Samples) -> Message:
        sent = self.channel.send(key, self._protected(message, samples), samples)
        self._note(key, sent, samples)
        return sent

    def send_start(self, tensors: Parts) -> None:
        self.channel.send_start(tensors)

    def _protected(self, message: Message, samples: Samples) -> Message:
        if self._defence is None:
            return message
        labels = samples[LABEL] if self._defence.needs_labels else None
        protected = dict(message)
        with self.channel.clock.during("compress"):
            for field in self._floating:
                counts = field.counts(message.get("counts"))
                value = message[field.name]
                protected[field.name] = self._defence.protect(value, counts, labels, self._chance)
        return protected


class ReceiveGuard(_Guard):
    """A Receiver."""

    def __init__(self, channel: ReceiveChannel) -> None:
        super().__init__(channel, "received")
        self.channel = channel

    def recv(self, key: MessageKey, samples: Samples, known: Message = NOTHING_KNOWN) -> Message:
        message = self.channel.recv(key, samples, known)
        self._note(key, message, samples)
        return message

    def recv_start(self, specs: tuple[TensorSpec, ...]) -> Parts:
        return self.channel.recv_start(specs)
