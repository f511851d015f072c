"""What changes a rank's gradients before the optimizer: differential privacy (DP-SGD; the
mathematics are those of security/defences.py), the matrix that both ends of a pipeline hold, and
the exchange with other replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xcloud.comm.compressor import Chain, seed_from
from xcloud.comm.state import StateTree
from xcloud.comm.tensor_codec import Choose, TensorCodec
from xcloud.experiment import Experiment
from xcloud.features.replicas.averaging import AllToAll, Averager
from xcloud.features.replicas.outer import Replicas
from xcloud.pipeline.batch_plan import BatchPlan, replica_samples
from xcloud.pipeline.exchange import Exchange, FlatBuffer, RankGroup, Work
from xcloud.pipeline.part import Part, StepReport
from xcloud.pipeline.trainer import Trainer
from xcloud.pipeline.wiring import Wiring
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

TIED = "embeddings.weight"
"""What choices of a compressor know a tied matrix by; its two ends have two names for it."""


@dataclass(frozen=True)
class TiedGradients(Part):
    """A matrix that the first and the last stage both hold (embeddings and head), of one rank that
    holds one end or both. In every update both get the sum of the two gradients, so they stay
    equal bit for bit, whatever compressor the gradients cross through.

    held: the matrix by stage. groups: the ranks of these stages; the first of each speaks for it.
    averager: between the two ends; None in ranks that do not speak, and where both are here.
    """

    name = "tied"

    held: Mapping[int, nn.Parameter]
    groups: Mapping[int, RankGroup]
    averager: Averager | None
    buffers: Mapping[int, FlatBuffer]

    def after_exchange(self, step: int) -> None:
        """Of the norm the first end counts."""
        held = [self.held[stage].grad for stage in sorted(self.held)]
        gradients = [gradient for gradient in held if gradient is not None]
        if len(gradients) == 2:
            gradients[0] += gradients[1]
            gradients[1].copy_(gradients[0])
        else:
            self._across(step, gradients[0])
        last = max(self.held)
        if last:
            own = torch.linalg.vector_norm(gradients[-1], dtype=torch.float64)
            self.buffers[last].squares_elsewhere = -(float(own) ** 2)

    def _across(self, step: int, gradient: Tensor) -> None:
        (group,) = self.groups.values()
        merged = gradient
        if self.averager is not None:
            # One that is not finite stays where it is, and stops or skips the update by its norm;
            # compressors may not accept it.
            is_finite = bool(gradient.isfinite().all())
            self.averager.start(step, [gradient if is_finite else torch.zeros_like(gradient)])
            ((merged,),) = self.averager.finish(step).changes
            merged = merged if is_finite else gradient
        gradient.copy_(group.from_leader(merged.clone()))

    def after_update(self, step: int, report: StepReport) -> None:
        if self.averager is not None:
            self.averager.settle(report.skipped is None)

    def children(self) -> StateTree:
        return {"averager": self.averager}


def join_tied(wiring: Wiring, trainer: Trainer, choose: Choose, seed: int) -> TiedGradients | None:
    """For ranks that hold an end of a tied matrix; opens the link to the other end."""
    ends = {stage: module.tied() for stage, module in trainer.pipeline.stages.items()}
    held = {stage: tied for stage, tied in ends.items() if tied is not None}
    if not held:
        return None
    averager, links = None, wiring.tied
    if links is not None:
        (parameter,) = held.values()
        within = len({peer.cloud for peer in links.peers}) == 1
        averager = AllToAll(
            links, TensorCodec(
                {TIED: parameter.shape},
                lambda name, shape: Chain() if within else choose(name, shape),
                seed_from(seed, "tied"), True, parameter.dtype, parameter.device, links.replica,
            )
        )  # fmt: skip
        links.open(averager.max_bytes)
    groups = {stage: wiring.groups[stage] for stage in held}
    buffers = {stage: trainer.stages[stage].buffer for stage in held}
    return TiedGradients(held, groups, averager, buffers)


def replicas_exchange(
    job: Experiment,
    wiring: Wiring,
    stages: Mapping[int, nn.Module],
    reporter: Reporter,
    watch: Callable[[int, int, Mapping[str, Tensor]], None] | None,
) -> Exchange:
    """watch: see Terms."""
    assert wiring.replicas is not None and job.strategy.averaging is not None
    numbers = replica_samples(
        job.training.batch_size,
        num_micro_batches=job.schedule.num_micro_batches,
        num_passes=job.training.accumulate_steps,
        num_replicas=job.cluster.num_replicas,
    )
    return job.strategy.averaging.join(
        Replicas(
            wiring.replicas,
            wiring.groups[min(stages)],  # the same ranks hold all stages of this one
            stages, job.compression.for_tensor, job.seed, job.max_steps,
            [Work(number, float(number * job.task.max_length)) for number in numbers],
            reporter, job.security.privacy, watch,
        )
    )  # fmt: skip


def overlapped_sums(trainer: Trainer, groups: Mapping[int, RankGroup]) -> OverlappedSums:
    """Of a rank of a cloud of several. groups: by stage."""

    def num_backwards() -> dict[int, int]:
        """Micro-batches of this rank in an update, by stage."""
        m, passes = trainer.schedule.num_micro_batches, trainer.settings.accumulate_steps
        turns = trainer.pipeline.turns
        return {s: passes * len(range(first, m, period)) for s, (first, period) in turns.items()}

    return OverlappedSums(trainer.buffers, groups, num_backwards)


class PrivateGradients(Part):
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
class PrivacyAccount(Part):
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
