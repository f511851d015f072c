"""Experiment: the one frozen object that describes the training of a model cut into stages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from itertools import product

from xcloud.cluster.layout import ClusterLayout
from xcloud.comm.border import Border
from xcloud.comm.per_border import PerBorder
from xcloud.comm.phases import Compression, Phased
from xcloud.contracts.split_model import SplitModel
from xcloud.contracts.task import Task
from xcloud.errors import ConfigError
from xcloud.job.job import Job
from xcloud.parallel.schedule import Schedule
from xcloud.parallel.strategy import Strategy
from xcloud.security.defences import LABEL, Defence
from xcloud.security.observer import LeakMeter
from xcloud.security.privacy import CloudPrivacy, SamplePrivacy
from xcloud.security.visibility import Visibility
from xcloud.training.batch_plan import BatchPlan, PinnedBatchPlan
from xcloud.training.settings import Training


@dataclass(frozen=True, kw_only=True)
class Experiment(Job):
    """What runs where, how it trains and what is written down. Raises ConfigError for settings
    that do not fit together. cluster: once built, with the replicas that the strategy makes."""

    task: Task
    model: SplitModel
    cluster: ClusterLayout
    schedule: Schedule
    compression: Compression | Phased | PerBorder
    training: Training
    security: Visibility = field(default_factory=Visibility)
    strategy: Strategy = field(default_factory=Strategy)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "cluster", self.strategy.arrange(self.cluster))
        micro_batches = self.schedule.num_micro_batches
        fewest = self.cluster.min_micro_batches()
        if micro_batches < fewest:
            raise ConfigError(
                f"schedule.num_micro_batches is {micro_batches}, but {fewest} ranks of this "
                "cluster hold the same stage, and each needs a micro-batch; set it to at least "
                f"{fewest}"
            )
        pieces = micro_batches * self.training.accumulate_steps
        if self.training.batch_size < pieces:
            raise ConfigError(
                f"training.batch_size is {self.training.batch_size}, too few for "
                f"{micro_batches} micro-batches (schedule.num_micro_batches) times "
                f"{self.training.accumulate_steps} passes (training.accumulate_steps)"
            )
        layout = self.cluster
        if layout.num_replicas > 1:
            _ = self.compression.averaging_label  # raises for one that cannot be
        if isinstance(self.compression, PerBorder):
            for border in self.compression.borders:
                if border >= layout.num_stages - 1:
                    raise ConfigError(
                        f"compression.border_{border}: there is no such border; this cluster has "
                        f"{layout.num_stages} stages, so borders 0 to {layout.num_stages - 2}"
                    )
        stages = range(layout.num_stages)
        fields = {stage: self.model.fields(stage, layout.num_stages) for stage in stages}
        for replica in range(layout.num_replicas):
            self._check_visibility(replica, fields)
        self.security.defences.check(fields[layout.num_stages - 1])
        for replica in range(layout.num_replicas):
            self._check_defences(replica)
        self._check_privacy()

    def _check_visibility(self, replica: int, fields: dict[int, frozenset[str]]) -> None:
        layout, clouds = self.cluster, tuple(self.cluster.clouds)
        stage_cloud = {stage: layout.stage_cloud(stage, replica) for stage in fields}
        try:
            self.security.check(clouds, fields, stage_cloud)
            if self.security.weights:
                parts = {stage: self.model.parts(stage, layout.num_stages) for stage in fields}
                self.security.check_weights(clouds, parts, stage_cloud)
        except ConfigError as error:
            if replica == 0:
                raise
            raise ConfigError(
                f"{error} strategy={self.strategy.name} puts stages {sorted(fields)} there too."
            ) from error

    def _check_defences(self, replica: int) -> None:
        """A defence that reads labels must act in ranks that load them."""
        layout = self.cluster
        for stage in range(layout.num_stages - 1):
            acting = self._defences_at(stage, replica).get("backward")
            if acting is None or not acting.needs_labels:
                continue
            for rank in layout.ranks_of(stage + 1, replica):
                if LABEL not in self.fields_of(rank):
                    raise ConfigError(
                        f"security.defences.backward: {acting.label} needs labels in rank {rank} "
                        f"of cloud {layout.placement(rank).cloud!r}, which sends gradients away "
                        f"but reads none; let its ranks hold the last stage too "
                        "(one_stage_per_rank: false)"
                    )

    def _check_privacy(self) -> None:
        """Clipping with noise must protect from whoever sees what the other clouds get."""
        privacy, layout = self.security.privacy, self.cluster
        if isinstance(privacy, CloudPrivacy) and layout.num_replicas == 1:
            raise ConfigError(
                "security/privacy=cloud noises what replicas in several clouds give to an "
                "averaging, and here is one replica; choose strategy=data_parallel or "
                "local_updates, or security/privacy=sample"
            )
        if not isinstance(privacy, SamplePrivacy):
            return
        if any(layout.leaves_cloud(stage) for stage in range(layout.num_stages - 1)):
            raise ConfigError(
                "security/privacy=sample noises parameter gradients, but this cluster cuts the "
                "model between clouds, which pass each sample's activations and gradients on "
                "without that noise, so its epsilon would not hold there. Keep each replica in "
                "one cloud (strategy=data_parallel), or noise what crosses (security/defences)"
            )
        pieces = self.schedule.num_micro_batches * self.training.accumulate_steps
        if self.training.batch_size != pieces:
            raise ConfigError(
                "security/privacy=sample clips each sample's gradient, so every micro-batch must "
                f"be one sample, but training.batch_size is {self.training.batch_size} and there "
                f"are {pieces} micro-batches (schedule.num_micro_batches * "
                "training.accumulate_steps); make them equal, most cheaply by "
                "training.accumulate_steps"
            )

    def _defences_at(self, stage: int, replica: int) -> dict[str, Defence]:
        cloud_of = partial(self.cluster.stage_cloud, replica=replica)
        return self.security.defences.at(stage, cloud_of, self.cluster.num_stages - 1)

    @property
    def compression_in_force(self) -> str:
        """The compression's label: of borders that leave a cloud, of what replicas average; "off"
        where there is neither."""
        layout, compression = self.cluster, self.compression
        if not layout.crosses_clouds:
            return "off"
        if any(layout.leaves_cloud(stage) for stage in range(layout.num_stages - 1)):
            return "none" if compression.is_identity else compression.label
        averaging = compression.averaging_label
        return "none" if averaging == "none" else f"averaging {averaging}"

    @property
    def defences_in_force(self) -> str:
        """The defences' label; "off" where no border is one that they act on, "none" if none."""
        defences = self.security.defences
        if not defences.label:
            return "none"
        borders = product(range(self.cluster.num_stages - 1), range(self.cluster.num_replicas))
        acts = any(self._defences_at(stage, replica) for stage, replica in borders)
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
        if self.strategy.averaging is not None:
            line += f"; strategy: {self.strategy.describe(self.cluster)}"
        if defences := self.security.defences.label:
            line += f"; defences: {defences}"
            if self.defences_in_force == "off":
                line += " (off: nothing they protect leaves its cloud)"
        if self.security.privacy is not None:
            line += f"; {self.security.privacy.label}"
        if self.security.meter is not None and not self.cluster.crosses_clouds:
            line += "; leak meter: off (one cloud)"
        return line

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
            if layout.leaves_cloud(stage) and self.compression.at_border(stage).has_memory
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
