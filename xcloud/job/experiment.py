"""Experiment: the one frozen object that describes the training of a model cut into stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import partial
from itertools import product

from pydantic import SkipValidation

from xcloud.base.errors import ConfigError
from xcloud.base.settings import settings
from xcloud.cluster.layout import ClusterLayout
from xcloud.comm.boundary import Boundary
from xcloud.comm.compression import CompressionPlan
from xcloud.contracts.model import SplitModel
from xcloud.contracts.task import Task
from xcloud.job.experiment_checks import (
    check_autopilot,
    check_choices,
    check_defences,
    check_feedback,
    check_keeping,
    check_privacy,
    check_sharded,
    check_tied,
    check_visibility,
)
from xcloud.job.job import Job
from xcloud.parallel.local_updates import LocalUpdates
from xcloud.parallel.schedule import Schedule
from xcloud.parallel.strategy import Strategy
from xcloud.security.defences import Defence
from xcloud.security.observer import LeakMeter
from xcloud.security.visibility import Visibility
from xcloud.training.batch_plan import BatchPlan, PinnedBatchPlan
from xcloud.training.settings import Training


@settings(kw_only=True)
class Experiment(Job):
    """What runs where, how it trains and what is written down. Raises ConfigError for settings
    that do not fit together. cluster: once built, with the replicas that the strategy makes."""

    task: SkipValidation[Task]
    model: SkipValidation[SplitModel]
    cluster: ClusterLayout
    schedule: SkipValidation[Schedule]
    compression: CompressionPlan
    training: Training
    security: Visibility = field(default_factory=Visibility)
    strategy: Strategy = field(default_factory=Strategy)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cluster", self.strategy.arrange(self.cluster))
        if self.autopilot is not None:
            check_autopilot(self)
            object.__setattr__(self, "compression", self.autopilot.around(self.compression))
            check_choices(self)
        micro_batches = self.schedule.num_micro_batches
        fewest = self.cluster.min_micro_batches()
        if micro_batches < fewest:
            raise ConfigError(
                f"schedule.num_micro_batches is {micro_batches}, but {fewest} ranks of this "
                "cluster hold the same stage, and each needs a micro-batch; set it to at least "
                f"{fewest}"
            )
        if self.training.batch_size < self.num_pieces:
            raise ConfigError(
                f"training.batch_size is {self.training.batch_size}, too few for "
                f"{micro_batches} micro-batches (schedule.num_micro_batches) times "
                f"{self.training.accumulate_steps} passes (training.accumulate_steps)"
            )
        layout = self.cluster
        if layout.num_replicas > 1:
            _ = self.compression.averaging_label  # raises for one that cannot be
            check_feedback(self)
        for boundary in self.compression.boundaries:
            if boundary >= layout.num_stages - 1:
                raise ConfigError(
                    f"compression.boundary_{boundary}: there is no such boundary; this cluster "
                    f"has {layout.num_stages} stages, so boundaries 0 to {layout.num_stages - 2}"
                )
        stages = range(layout.num_stages)
        fields = {stage: self.model.fields(stage, layout.num_stages) for stage in stages}
        for replica in range(layout.num_replicas):
            check_visibility(self, replica, fields)
        if self.ties_ends:
            check_tied(self)
        check_sharded(self)
        self.security.defences.check(fields[layout.num_stages - 1])
        for replica in range(layout.num_replicas):
            check_defences(self, replica)
        check_privacy(self)

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
    def compression_in_force(self) -> str:
        """The compression's label: of boundaries that leave a cloud, of what replicas average;
        "off" where there is neither."""
        layout, compression = self.cluster, self.compression
        if not layout.crosses_clouds:
            return "off"
        if any(layout.leaves_cloud(stage) for stage in range(layout.num_stages - 1)):
            return "none" if compression.is_identity else compression.label
        averaging = compression.averaging_label
        return "none" if averaging == "none" else f"averaging {averaging}"

    @property
    def strategy_in_force(self) -> str:
        """Its label; "" for a pipeline, which is what the cluster says."""
        return "" if self.strategy.averaging is None else self.strategy.label

    @property
    def defences_in_force(self) -> str:
        """The defences' label; "off" where no boundary is one that they act on, "none" if none."""
        defences = self.security.defences
        if not defences.label:
            return "none"
        boundaries = product(range(self.cluster.num_stages - 1), range(self.cluster.num_replicas))
        acts = any(self.defences_at(stage, replica) for stage, replica in boundaries)
        return defences.label if acts else "off"

    @property
    def leak_meter(self) -> LeakMeter | None:
        """Off in one cloud: nothing is seen by another."""
        return self.security.meter if self.cluster.crosses_clouds else None

    @property
    def variant(self) -> str:
        return " ".join(filter(None, (self.strategy_in_force, self.compression_in_force)))

    @property
    def _described(self) -> Sequence[str]:
        compression = self.compression_in_force
        if compression == "off" and not self.compression.is_identity:
            compression = (
                f"off (no boundary between clouds, so {self.compression.label} does not act)"
            )
        parts = [self.task.describe(), self.model.describe(), self.cluster.describe()]
        parts.append(f"compression: {compression}")
        if self.training.activation_cache_mb:
            parts.append(f"keeps up to {self.training.activation_cache_mb} MB of frozen rows")
        if self.strategy_in_force:
            parts.append(f"strategy: {self.strategy.describe(self.cluster)}")
        if defences := self.security.defences.label:
            off = " (off: nothing they protect leaves its cloud)"
            parts.append(f"defences: {defences}{off * (self.defences_in_force == 'off')}")
        if self.security.privacy is not None:
            parts.append(self.security.privacy.label)
        if self.security.meter is not None and not self.cluster.crosses_clouds:
            parts.append("leak meter: off (one cloud)")
        return parts

    @property
    def is_elastic(self) -> bool:
        return self.strategy.is_elastic and self.cluster.num_replicas > 1

    @property
    def scores_first(self) -> bool:
        """Whether the test set is scored before the first step too, for comparison."""
        return getattr(self.model, "is_pretrained", False) and not self.is_elastic

    @property
    def essential_ranks(self) -> frozenset[int]:
        local = self.strategy.averaging
        if not self.is_elastic or not isinstance(local, LocalUpdates) or local.leave == "fail":
            return super().essential_ranks
        return self.saving_ranks

    @property
    def may_report(self) -> Mapping[str, frozenset[int]]:
        """Only who holds the end of a pipeline knows how good it is."""
        ends = self.cluster.replicas_of(self.cluster.num_stages - 1)
        leads = [ranks[0] for ranks in ends]
        return {"loss": frozenset(leads), "quality": frozenset(leads[:1])}

    @property
    def saving_ranks(self) -> frozenset[int]:
        """Where clouds may leave and come back those of the first, which merges for all."""
        if not self.is_elastic:
            return super().saving_ranks
        return frozenset(self.cluster.ranks_in(self.cluster.stage_cloud(0)))

    @property
    def restart_s(self) -> float | None:
        local = self.strategy.averaging
        return local.restart_s if isinstance(local, LocalUpdates) else None

    @property
    def schedule_label(self) -> str:
        return self.schedule.label

    def check(self) -> None:
        """Raise DataError if data or a checkpoint are missing, ConfigError for a cut that the
        model cannot have."""
        asked, given = getattr(self.task, "answers", None), getattr(self.model, "output", None)
        if asked and given and asked != given:
            raise ConfigError(
                f"{self.task.describe()} needs model.output={asked}, and it is {given}"
            )
        self.task.check()
        check_keeping(self, self.boundaries)

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

    def held_by(self, cloud: str, what: str) -> frozenset[str]:
        if what == "holders":
            return self.fields_of_cloud(cloud)
        stages, num_stages = self.cluster.clouds[cloud].stages or (), self.cluster.num_stages
        return frozenset[str]().union(*(self.model.parts(s, num_stages) for s in stages))

    def fields_of(self, rank: int) -> frozenset[str]:
        """Batch fields that this rank reads, and so loads."""
        stages = self.cluster.placement(rank).stages
        return frozenset().union(
            *(self.model.fields(stage, self.cluster.num_stages) for stage in stages)
        )
