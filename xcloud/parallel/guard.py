"""Where a boundary leaves a cloud: defences on what leaves, notes for the leak meter on what
passes. Knows no compressor and no link; each is a channel's end to the pipeline.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xcloud.cluster.frame import Kind, MessageKey
from xcloud.comm.boundary import Message, Samples
from xcloud.comm.channel import NOTHING_KNOWN, SendChannel
from xcloud.security.defences import LABEL, Defence
from xcloud.security.observer import Observer, Stream


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


class _Observed:
    def __init__(self, observer: Observer, channel: Any, how: str) -> None:
        self._observer, self._channel, self._how = observer, channel, how
        self._floating = [f for f in channel.fields if f.dtype.is_floating_point]

    def _note(self, key: MessageKey, message: Message, samples: Samples) -> None:
        if key.kind is Kind.EVALUATION or not self._observer.wants(key.step):
            return
        identity = self._channel.identity
        for field in self._floating:
            stream = Stream(identity.direction, identity.boundary, self._how, field.name)
            counts = field.counts(message.get("counts"))
            self._observer.message(stream, samples["ids"], counts, message[field.name])


class ObservedSender(_Observed):
    """A Sender. channel: a SendChannel, or its Guard."""

    def __init__(self, observer: Observer, channel: Any) -> None:
        super().__init__(observer, channel, "sent")
        self.send_start = channel.send_start

    def send(self, key: MessageKey, message: Message, samples: Samples) -> Message:
        sent: Message = self._channel.send(key, message, samples)
        self._note(key, sent, samples)
        return sent


class ObservedReceiver(_Observed):
    """A Receiver. channel: a ReceiveChannel."""

    def __init__(self, observer: Observer, channel: Any) -> None:
        super().__init__(observer, channel, "received")
        self.recv_start = channel.recv_start

    def recv(self, key: MessageKey, samples: Samples, known: Message = NOTHING_KNOWN) -> Message:
        message: Message = self._channel.recv(key, samples, known)
        self._note(key, message, samples)
        return message
