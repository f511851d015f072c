"""Defences where a boundary leaves a cloud. Knows no compressor and no link: a guard is the end of
a channel that the pipeline sees.
"""

from __future__ import annotations

import numpy as np

from xcloud.cluster.frame import MessageKey
from xcloud.comm.boundary import Message, Samples
from xcloud.comm.channel import SendChannel
from xcloud.security.defences import LABEL, Defence


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
