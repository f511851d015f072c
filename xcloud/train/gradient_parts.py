"""What changes a rank's gradients before the optimizer: differential privacy (DP-SGD; the
mathematics are those of security/defences.py), and sums inside a cloud.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from xcloud.pipeline.batch_plan import BatchPlan
from xcloud.pipeline.exchange import RankGroup
from xcloud.pipeline.hook import Hook
from xcloud.pipeline.trainer import Trainer
from xcloud.pipeline.within_cloud import OverlappedSums
from xcloud.record.reporter import Reporter
from xcloud.security.defences import (
    Privacy,
    clip_factor,
    gaussian_epsilon,
    most_squared_uses,
    normal,
    sampled_epsilon,
)


def overlapped_sums(trainer: Trainer, groups: Mapping[int, RankGroup]) -> OverlappedSums:
    """Of a rank of a cloud of several. groups: by stage."""

    def num_backwards() -> dict[int, int]:
        """Micro-batches of this rank in an update, by stage."""
        m, passes = trainer.schedule.num_micro_batches, trainer.settings.accumulate_steps
        turns = trainer.pipeline.turns
        return {s: passes * len(range(first, m, period)) for s, (first, period) in turns.items()}

    return OverlappedSums(trainer.buffers, groups, num_backwards)


class PrivateGradients(Hook):
    """Clips the gradient of every sample at every stage, and noises their sum: between the
    pipeline, whose micro-batches are single samples, and the exchange. The noise of a stage is
    added by one rank of each replica."""

    def __init__(self, privacy: Privacy, trainer: Trainer) -> None:
        self._privacy, self._stages, self._feed = privacy, trainer.stages, trainer.feed
        self._clock = trainer.pipeline.clock
        self._limit = privacy.clip / math.sqrt(trainer.pipeline.num_stages)
        self._sums = {n: torch.zeros_like(stage.buffer.flat) for n, stage in self._stages.items()}
        # Not drawn from the run's seed: the other clouds know that one too.
        self._chance = np.random.default_rng()

    def begin(self, step: int) -> None:
        for total in self._sums.values():
            total.zero_()

    def after_micro_batch(self, stage: int) -> None:
        """Its gradient is the buffer's, and leaves it."""
        buffer = self._stages[stage].buffer
        # Losses are divided by the weight of the whole update.
        factor = clip_factor([buffer.gradients], self._limit / self._feed.work.num_samples)
        self._sums[stage].add_(buffer.flat, alpha=factor)
        buffer.zero()

    def after_backward(self, step: int) -> None:
        deviation = self._privacy.noise * self._privacy.clip / self._feed.work.num_samples
        with self._clock.during("clip"):
            for number, stage in self._stages.items():
                stage.buffer.flat.copy_(self._sums[number])
                if stage.group.leads and deviation:
                    gradients = stage.buffer.gradients
                    gradients.add_(deviation * normal(gradients, self._chance))


@dataclass
class PrivacyAccount(Hook):
    """Of rank 0. contributions: of each cloud to averagings of the same values, in so many
    updates."""

    privacy: Privacy
    trainer: Trainer
    contributions: Callable[[int], int]
    reporter: Reporter

    def finish(self) -> None:
        made = self.trainer.num_updates
        guarantee = account(self.privacy, self.trainer.feed.plan, made, self.contributions(made))
        self.reporter.event("privacy", **guarantee)


def account(
    privacy: Privacy, plan: BatchPlan, num_updates: int, num_contributions: int
) -> dict[str, Any]:
    """num_contributions: of each cloud to averagings of the same values.

    epsilon: against whoever sees all that other replicas gave, and knows the batches, which follow
    from the seed. epsilon_if_sampled: as usually reported, for secret random batches; None where
    Opacus is not installed, and for clouds, which take part in every merge.
    """
    rate, sampled = 1.0, None
    if privacy.unit == "sample":
        uses = most_squared_uses(plan.ids(step) for step in range(1, num_updates + 1))
        rate = min(1.0, plan.batch_size / plan.num_samples)
        try:
            sampled = sampled_epsilon(privacy.noise, rate, num_updates, privacy.delta)
        except ImportError:
            pass
    else:
        uses = num_contributions
    return {
        "unit": privacy.unit,
        "clip": privacy.clip,
        "noise": privacy.noise,
        "delta": privacy.delta,
        "epsilon": gaussian_epsilon(privacy.noise, uses, privacy.delta),
        "epsilon_if_sampled": sampled,
        "sampling_rate": rate,
        "num_updates": num_updates,
    }
