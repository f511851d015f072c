"""DP-SGD in one rank: clips the gradient of every sample at every stage, and noises their sum.
What it guarantees is security/privacy.py's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from xcloud.parallel.exchange import FlatBuffer
from xcloud.security.privacy import SamplePrivacy, clip_factor, noise_like


class PrivateGradients:
    """Stands between the pipeline, whose micro-batches are single samples, and the exchange.

    buffers: by stage. num_stages: of the model. noisy: stages at which this rank adds the noise:
    one rank of a replica does.
    """

    def __init__(
        self,
        privacy: SamplePrivacy,
        buffers: Mapping[int, FlatBuffer],
        num_stages: int,
        noisy: frozenset[int],
    ) -> None:
        self._privacy, self._buffers, self._noisy = privacy, buffers, noisy
        self._limit = privacy.clip / math.sqrt(num_stages)
        self._sums = {stage: torch.zeros_like(buffer.flat) for stage, buffer in buffers.items()}
        self._num_samples = 1
        # Not drawn from the run's seed: the other clouds know that one too.
        self._chance = np.random.default_rng()

    def begin(self, num_samples: int) -> None:
        """num_samples: of the whole update, by whose weight losses are divided."""
        self._num_samples = num_samples
        for total in self._sums.values():
            total.zero_()

    def take(self, stage: int) -> None:
        """After the backward of a micro-batch: its gradient is the buffer's, and leaves it."""
        buffer = self._buffers[stage]
        factor = clip_factor([buffer.gradients], self._limit / self._num_samples)
        self._sums[stage].add_(buffer.flat, alpha=factor)
        buffer.zero()

    def finish(self) -> None:
        """The noised sums into the buffers."""
        deviation = self._privacy.noise * self._privacy.clip / self._num_samples
        for stage, buffer in self._buffers.items():
            buffer.flat.copy_(self._sums[stage])
            if stage in self._noisy and deviation:
                buffer.gradients.add_(noise_like(buffer.gradients, deviation, self._chance))
