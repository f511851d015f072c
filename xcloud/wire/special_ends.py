"""Ends of a boundary besides a plain channel: within one rank, and behind a defence."""

from __future__ import annotations

import numpy as np

from xcloud.cluster.frame import MessageKey, TensorSpec
from xcloud.comm.boundary import Message, Samples
from xcloud.comm.channel import NOTHING_KNOWN, SendChannel
from xcloud.comm.compressor import Parts
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
