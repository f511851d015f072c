"""Experiment: the one frozen object that describes the training of a model cut into stages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from xcloud.cluster.layout import ClusterLayout
from xcloud.comm.border import Border
from xcloud.comm.per_border import PerBorder
from xcloud.comm.phases import Compression, Phased
from xcloud.errors import ConfigError
from xcloud.job.job import Job
from xcloud.models.split import SplitModel
from xcloud.parallel.schedule import Schedule
from xcloud.security.defences import LABEL
from xcloud.security.observer import LeakMeter
from xcloud.security.visibility import Visibility
from xcloud.tasks.task import Task
from xcloud.training.batch_plan import BatchPlan, PinnedBatchPlan
from xcloud.training.settings import Checkpoints, Training


@dataclass(frozen=True, kw_only=True)
class Experiment(Job):
    """What runs where, how it trains and what is written down. Raises ConfigError for settings
    that do not fit together."""

    task: Task
    model: SplitModel
    cluster: ClusterLayout
    schedule: Schedule
    compression: Compression | Phased | PerBorder
    training: Training
    security: Visibility = field(default_factory=Visibility)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cluster.num_replicas > 1:
            raise ConfigError(
                f"cluster.clouds holds {self.cluster.num_replicas} replicas of the pipeline, but "
                "nothing averages their gradients over clouds yet; set replica: 0 everywhere"
            )
        micro_batches = self.schedule.num_micro_batches
        fewest = self.cluster.min_micro_batches()
        if micro_batches < fewest:
            raise ConfigError(
                f"schedule.num_micro_batches is {micro_batches}, but a stage of this cluster has "
                f"{fewest} ranks, and each needs a micro-batch; set it to at least {fewest}"
            )
        pieces = micro_batches * self.training.accumulate_steps
        if self.training.batch_size < pieces:
            raise ConfigError(
                f"training.batch_size is {self.training.batch_size}, too few for "
                f"{micro_batches} micro-batches (schedule.num_micro_batches) times "
                f"{self.training.accumulate_steps} passes (training.accumulate_steps)"
            )
        layout = self.cluster
        if isinstance(self.compression, PerBorder):
            for border in self.compression.borders:
                if border >= layout.num_stages - 1:
                    raise ConfigError(
                        f"compression.border_{border}: there is no such border; this cluster has "
                        f"{layout.num_stages} stages, so borders 0 to {layout.num_stages - 2}"
                    )
        stages = range(layout.num_stages)
        fields = {stage: self.model.fields(stage, layout.num_stages) for stage in stages}
        stage_cloud = {stage: layout.stage_cloud(stage) for stage in stages}
        self.security.check(tuple(layout.clouds), fields, stage_cloud)
        if self.security.weights:
            parts = {stage: self.model.parts(stage, layout.num_stages) for stage in stages}
            self.security.check_weights(tuple(layout.clouds), parts, stage_cloud)
        self._check_defences(fields[layout.num_stages - 1])

    def _check_defences(self, last_reads: frozenset[str]) -> None:
        """A defence that reads labels must act in ranks that load them."""
        defences, layout = self.security.defences, self.cluster
        defences.check(last_reads)
        for stage in range(layout.num_stages - 1):
            acting = defences.at(stage, layout.stage_cloud, layout.num_stages - 1).get("backward")
            if acting is None or not acting.needs_labels:
                continue
            for rank in layout.ranks_of(stage + 1):
                if LABEL not in self.fields_of(rank):
                    raise ConfigError(
                        f"security.defences.backward: {acting.label} needs labels in rank {rank} "
                        f"of cloud {layout.placement(rank).cloud!r}, which sends gradients away "
                        f"but reads none; let its ranks hold the last stage too "
                        "(one_stage_per_rank: false)"
                    )

    @property
    def compression_in_force(self) -> str:
        """The compression's label; "off" where no border leaves a cloud, for there it acts."""
        if not self.cluster.crosses_clouds:
            return "off"
        return "none" if self.compression.is_identity else self.compression.label

    @property
    def defences_in_force(self) -> str:
        """The defences' label; "off" where no border is one that they act on, "none" if none."""
        defences = self.security.defences
        if not defences.label:
            return "none"
        last = self.cluster.num_stages - 1
        acts = any(defences.at(stage, self.cluster.stage_cloud, last) for stage in range(last))
        return defences.label if acts else "off"

    @property
    def leak_meter(self) -> LeakMeter | None:
        """Off in one cloud: nothing is seen by another."""
        return self.security.meter if self.cluster.crosses_clouds else None

    @property
    def variant(self) -> str:
        return self.compression_in_force

    @property
    def headline(self) -> str:
        """What this run is, in one line."""
        compression = self.compression_in_force
        if compression == "off" and not self.compression.is_identity:
            compression = (
                f"off (no border between clouds, so {self.compression.label} does not act)"
            )
        line = (
            f"{self.name} [{self.profile}]: {self.task.describe()}; {self.model.describe()}; "
            f"{self.cluster.describe()}; compression: {compression}"
        )
        if defences := self.security.defences.label:
            line += f"; defences: {defences}"
            if self.defences_in_force == "off":
                line += " (off: nothing they protect leaves its cloud)"
        if self.security.meter is not None and not self.cluster.crosses_clouds:
            line += "; leak meter: off (one cloud)"
        return line

    @property
    def checkpoint(self) -> Checkpoints:
        return self.training.checkpoint

    @property
    def max_steps(self) -> int:
        return self.training.max_steps

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
        _ = self.borders

    @property
    def borders(self) -> dict[int, Border]:
        """What crosses from each stage to the next."""
        return {
            stage: self.model.border(stage, self.cluster.num_stages, self.task.max_length)
            for stage in range(self.cluster.num_stages - 1)
        }

    @property
    def max_micro_batch(self) -> int:
        """Samples of the largest micro-batch, in training or evaluation."""
        pieces = self.schedule.num_micro_batches * self.training.accumulate_steps
        return max(-(-self.training.batch_size // pieces), self.training.eval_batch_size)

    def batch_plan(self, num_samples: int) -> BatchPlan:
        """The batches of training. A sample keeps its lanes where a memory is kept for it: both
        ends of a channel must meet it again."""
        layout, size = self.cluster, self.training.batch_size
        periods = [
            layout.lane_period(stage)
            for stage in range(layout.num_stages - 1)
            if layout.stage_cloud(stage) != layout.stage_cloud(stage + 1)
            and self.compression.at_border(stage).has_memory
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
