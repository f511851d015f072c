"""A defence before a channel that leaves a cloud."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from xcloud.comm.channel import NOTHING_KNOWN, Message, Samples, SendChannel
from xcloud.net.frame import MessageKey
from xcloud.security.defences import LABEL, Defence


class Guard:
    """A Sender that protects what it sends. Noise is part of the graph: the gradient that returns
    is of what was sent."""

    def __init__(self, channel: SendChannel, defence: Defence) -> None:
        self.fields = channel.fields
        self.identity = channel.identity
        self.send_start = channel.send_start
        self.learn_from_gradients = channel.learn_from_gradients
        self._channel = channel
        self._defence = defence
        # Not drawn from the run's seed: the receiver knows that one too.
        self._chance = np.random.default_rng()

    def send(
        self, key: MessageKey, message: Message, samples: Samples, known: Message = NOTHING_KNOWN
    ) -> Message:
        counts = (known | message).get("counts")
        protected = self._protected(message, counts=counts, samples=samples)
        return self._channel.send(key, protected, samples, known)

    def _protected(self, message: Message, counts: Tensor | None, samples: Samples) -> Message:
        labels = samples[LABEL] if self._defence.needs_labels else None
        protected = dict(message)
        with self._channel.clock.during("compress"):
            for field in self.fields:
                if field.dtype.is_floating_point:
                    protected[field.name] = self._defence.protect(
                        message[field.name],
                        counts=field.counts(counts),
                        labels=labels,
                        chance=self._chance,
                    )
        return protected
