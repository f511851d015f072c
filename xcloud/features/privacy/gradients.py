"""DP-SGD: gradients of single samples, clipped and noised (noise.py has the
mathematics)."""

from __future__ import annotations

import math

import numpy as np
import torch

from xcloud.features.privacy.noise import clip_factor
from xcloud.features.privacy.settings import Privacy
from xcloud.pipeline.hook import Hook
from xcloud.pipeline.trainer import Trainer
from xcloud.security.defences import normal


class PrivateGradients(Hook):
    """The hook that clips the gradient of every sample at every stage, and noises their sum.

    It stands between the pipeline, whose micro-batches are single samples, and the exchange. The
    noise of a stage is added by one rank of each replica.
    """

    def __init__(self, privacy: Privacy, trainer: Trainer) -> None:
        self._privacy = privacy
        self._stages = trainer.stages
        self._feed = trainer.feed
        self._clock = trainer.pipeline.clock
        # Stages lie in different ranks that do not know each other's norms: n stages clipped to
        # clip / sqrt(n) together have a norm of at most clip.
        self._limit = privacy.clip / math.sqrt(trainer.pipeline.num_stages)
        self._sums = {n: torch.zeros_like(stage.buffer.flat) for n, stage in self._stages.items()}
        # Not drawn from the run's seed: the other clouds know that one too.
        self._chance = np.random.default_rng()

    def begin(self, step: int) -> None:
        for total in self._sums.values():
            total.zero_()

    def after_micro_batch(self, stage: int) -> None:
        """Move the sample's gradient, clipped, from the buffer to the sum."""
        buffer = self._stages[stage].buffer
        # Losses are divided by the weight of the whole update.
        factor = clip_factor([buffer.gradients], limit=self._limit / self._feed.work.num_samples)
        self._sums[stage].add_(buffer.flat, alpha=factor)
        buffer.zero()

    def after_backward(self, step: int) -> None:
        deviation = self._privacy.noise * self._privacy.clip / self._feed.work.num_samples
        with self._clock.during("clip"):
            for number, stage in self._stages.items():
                stage.buffer.flat.copy_(self._sums[number])
                # One rank of each replica, as the sum over the ranks of a stage would add it
                # several times.
                if stage.group.leads and deviation:
                    gradients = stage.buffer.gradients
                    gradients.add_(deviation * normal(gradients, chance=self._chance))
