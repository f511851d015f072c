"""Settings of a job whose model is cut into stages, and what follows from them. What does not go
together is refused by Experiment (experiment.py), where it is built.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from functools import partial

from pydantic import SkipValidation

from xcloud.base.settings import settings
from xcloud.cluster.layout import ClusterLayout
from xcloud.comm.boundary import Boundary
from xcloud.comm.compression import CompressionPlan
from xcloud.contracts.model import SplitModel
from xcloud.contracts.task import Task
from xcloud.job.job import Job
from xcloud.parallel.schedule import Schedule
from xcloud.parallel.strategy import Strategy
from xcloud.security.defences import Defence
from xcloud.security.visibility import Visibility
from xcloud.training.batch_plan import BatchPlan, PinnedBatchPlan
from xcloud.training.settings import Training


@settings(kw_only=True)
class PipelineJob(Job):
    """What runs where and how it trains. cluster: once built, with the replicas that the strategy
    makes."""

    task: SkipValidation[Task]
    model: SkipValidation[SplitModel]
    cluster: ClusterLayout
    schedule: SkipValidation[Schedule]
    compression: CompressionPlan
    training: Training
    security: Visibility = field(default_factory=Visibility)
    strategy: Strategy = field(default_factory=Strategy)

    @property
    def ties_ends(self) -> bool:
        """Whether the first and the last stage train a matrix in common (tied embeddings)."""
        ties = getattr(self.model, "ties_ends", None)
        return ties is not None and bool(ties(self.cluster.num_stages))

    def defences_at(self, stage: int, replica: int) -> dict[str, Defence]:
        """By direction, of the boundary behind `stage`."""
        cloud_of = partial(self.cluster.stage_cloud, replica=replica)
        return self.security.defences.at(stage, cloud_of, self.cluster.num_stages - 1)

    @property
    def boundaries(self) -> dict[int, Boundary]:
        """What crosses from each stage to the next."""
        return {
            stage: self.model.boundary(stage, self.cluster.num_stages, self.task.max_length)
            for stage in range(self.cluster.num_stages - 1)
        }

    @property
    def cached_boundaries(self) -> list[int]:
        """Boundaries behind which clouds keep rows of frozen parts."""
        if not self.training.activation_cache_mb:
            return []
        leaves = self.cluster.leaves_cloud
        return [s for s, boundary in self.boundaries.items() if boundary.is_constant and leaves(s)]

    @property
    def schedules(self) -> Sequence[Schedule]:
        """All that the run may use, its own first."""
        if self.autopilot is None:
            return [self.schedule]
        return self.autopilot.schedules(self.schedule, self.cluster.num_stages)

    @property
    def max_micro_batch(self) -> int:
        """Samples of the largest micro-batch, in training or evaluation."""
        fewest = min(s.num_micro_batches for s in self.schedules) * self.training.accumulate_steps
        return max(-(-self.training.batch_size // fewest), self.training.eval_batch_size)

    @property
    def num_pieces(self) -> int:
        """Micro-batches of an update, over all passes."""
        return self.schedule.num_micro_batches * self.training.accumulate_steps

    def batch_plan(self, num_samples: int) -> BatchPlan:
        """The batches of training. A sample keeps its lanes where a memory is kept for it: both
        ends of a channel must meet it again."""
        layout, size = self.cluster, self.training.batch_size
        periods = [
            layout.lane_period(stage)
            for stage in range(layout.num_stages - 1)
            if layout.leaves_cloud(stage)
            and (self.compression.at_boundary(stage).has_memory or stage in self.cached_boundaries)
        ]
        period, num_micro_batches = math.lcm(*periods), self.schedule.num_micro_batches
        if period == 1:
            return BatchPlan(num_samples, size, self.seed)
        lanes = [i % period for i in range(num_micro_batches)] * self.training.accumulate_steps
        return PinnedBatchPlan(num_samples, size, self.seed, lanes)

    def fields_of_cloud(self, cloud: str) -> frozenset[str]:
        """Batch fields that any rank of the cloud reads."""
        stages = self.cluster.clouds[cloud].stages or ()
        return frozenset[str]().union(
            *(self.model.fields(stage, self.cluster.num_stages) for stage in stages)
        )

    def fields_of(self, rank: int) -> frozenset[str]:
        """Batch fields that this rank reads, and so loads."""
        stages = self.cluster.placement(rank).stages
        return frozenset().union(
            *(self.model.fields(stage, self.cluster.num_stages) for stage in stages)
        )
