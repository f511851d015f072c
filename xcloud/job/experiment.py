"""Experiment: the one frozen object that describes the training of a model cut into stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from xcloud.base.errors import ConfigError
from xcloud.base.settings import settings
from xcloud.job.features import CHECKED_LAST, FEATURES
from xcloud.job.job import PipelineJob
from xcloud.job.needs import check_choices
from xcloud.security.leak_meter import LeakMeter


@settings(kw_only=True)
class Experiment(PipelineJob):
    """What runs where, how it trains and what is written down. Raises ConfigError for settings
    that do not fit together."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cluster", self.strategy.arrange(self.cluster))
        if self.autopilot is not None:
            object.__setattr__(self, "compression", self.autopilot.around(self.compression))
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
            _ = self.compression.averaged.averaging_label  # raises for one that cannot be
        for boundary in self.compression.boundaries:
            if boundary >= layout.num_stages - 1:
                raise ConfigError(
                    f"compression.boundary_{boundary}: there is no such boundary; this cluster "
                    f"has {layout.num_stages} stages, so boundaries 0 to {layout.num_stages - 2}"
                )
        stages = range(layout.num_stages)
        fields = {stage: self.model.fields(stage, layout.num_stages) for stage in stages}
        for replica in range(layout.num_replicas):
            self._check_visibility(replica, fields)
        for feature in FEATURES:
            feature.check(self)
        if self.autopilot is not None:
            check_choices(self)

    def _check_visibility(self, replica: int, fields: dict[int, frozenset[str]]) -> None:
        layout, clouds = self.cluster, tuple(self.cluster.clouds)
        stage_cloud = {stage: layout.stage_cloud(stage, replica) for stage in fields}
        try:
            self.security.check("holders", clouds, fields, stage_cloud)
            if self.security.weights:
                parts = {stage: self.model.parts(stage, layout.num_stages) for stage in fields}
                self.security.check("weights", clouds, parts, stage_cloud)
        except ConfigError as error:
            if replica == 0:
                raise
            raise ConfigError(
                f"{error} strategy={self.strategy.name} puts stages {sorted(fields)} there too."
            ) from error

    @property
    def compression_in_force(self) -> str:
        """The compression's label: of boundaries that leave a cloud, of what replicas average;
        "off" where there is neither."""
        layout, compression = self.cluster, self.compression
        if not layout.crosses_clouds:
            return "off"
        if any(layout.leaves_cloud(stage) for stage in range(layout.num_stages - 1)):
            return "none" if compression.is_identity else compression.label
        averaging = compression.averaged.averaging_label
        return "none" if averaging == "none" else f"averaging {averaging}"

    @property
    def strategy_in_force(self) -> str:
        """Its label; "" for a pipeline, which is what the cluster says."""
        return "" if self.strategy.averaging is None else self.strategy.label

    @property
    def defences_in_force(self) -> str:
        """The defences' label; "off" where no boundary is one that they act on, "none" if none."""
        if not self.security.chosen_defences:
            return "none"
        boundaries = product(range(self.cluster.num_stages - 1), range(self.cluster.num_replicas))
        acts = any(self.defences_at(stage, replica) for stage, replica in boundaries)
        return self.security.defences_label if acts else "off"

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
        if defences := self.security.defences_label:
            off = " (off: nothing they protect leaves its cloud)"
            parts.append(f"defences: {defences}{off * (self.defences_in_force == 'off')}")
        if self.security.privacy is not None:
            parts.append(self.security.privacy.label)
        if self.security.meter is not None and not self.cluster.crosses_clouds:
            parts.append("leak meter: off (one cloud)")
        return parts

    @property
    def is_elastic(self) -> bool:
        return self.strategy.traits.is_elastic and self.cluster.num_replicas > 1

    @property
    def scores_first(self) -> bool:
        """Whether the test set is scored before the first step too, for comparison."""
        return getattr(self.model, "is_pretrained", False) and not self.is_elastic

    @property
    def essential_ranks(self) -> frozenset[int]:
        if self.is_elastic and self.strategy.traits.may_leave:
            return self.saving_ranks
        return super().essential_ranks

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
        averaging = self.strategy.averaging
        return None if averaging is None else averaging.restart_s

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
        for feature in CHECKED_LAST:
            feature.check(self)

    def held_by(self, cloud: str, what: str) -> frozenset[str]:
        if what == "holders":
            return self.fields_of_cloud(cloud)
        stages, num_stages = self.cluster.clouds[cloud].stages or (), self.cluster.num_stages
        return frozenset[str]().union(*(self.model.parts(s, num_stages) for s in stages))
