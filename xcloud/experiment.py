"""Experiment: the one frozen object that describes the training of a model cut into stages.

FEATURES is the one list of what it may use; what each needs of it stands in needs.py, by which
settings that do not fit together are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product

from xcloud.base.errors import ConfigError
from xcloud.base.settings import settings
from xcloud.job import needs
from xcloud.job.job import Labels, PipelineJob, Roster
from xcloud.job.needs import Feature, check_choices
from xcloud.pretrained import check_checkpoints
from xcloud.security.policy import Meter

Use = tuple[Callable[[PipelineJob], object], Feature]
"""What a job may use: something true where its settings ask for it, and what it needs then."""


def _shards(job: PipelineJob) -> list[str]:
    return [name for name, cloud in job.cluster.clouds.items() if cloud.shard]


def _averages_without_feedback(job: PipelineJob) -> bool:
    averaging = job.strategy.averaging
    return job.cluster.num_replicas > 1 and averaging is not None and not averaging.feedback


def _private_by(job: PipelineJob, unit: str) -> bool:
    return job.security.privacy is not None and job.security.privacy.unit == unit


FEATURES: Sequence[Use] = (
    (lambda job: job.autopilot, needs.AUTOPILOT),
    (_averages_without_feedback, needs.NO_FEEDBACK),
    (lambda job: job.ties_ends, needs.TIED_ENDS),
    (_shards, needs.SHARDS),
    (lambda job: job.security.defences.get("backward"), needs.NOISE_BACKWARD),
    (lambda job: job.security.defences.get("forward"), needs.NOISE_FORWARD),
    (lambda job: _private_by(job, "cloud"), needs.PRIVATE_CLOUD),
    (lambda job: _private_by(job, "sample"), needs.PRIVATE_SAMPLE),
)
CHECKED_LAST: Sequence[Use] = (
    (lambda job: job.training.activation_cache_mb, needs.ACTIVATION_CACHE),
)


def _check(job: PipelineJob, uses: Iterable[Use]) -> None:
    for is_used, feature in uses:
        if used := is_used(job):
            feature.check(job, used)


@settings(kw_only=True)
class Experiment(PipelineJob):
    """A training of a model cut into stages: what runs where, how it trains, what is written down.

    Raises ConfigError for settings that do not fit together.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "cluster", self.strategy.arrange(self.cluster))
        if self.autopilot is not None:
            object.__setattr__(self, "compression", self.autopilot.around(self.compression))
        micro_batches = self.schedule.num_micro_batches
        min_count = self.cluster.min_micro_batches()
        if micro_batches < min_count:
            raise ConfigError(
                f"schedule.num_micro_batches is {micro_batches}, but with strategy="
                f"{self.strategy.name} {min_count} ranks of this cluster hold the same stage, and "
                f"each needs a micro-batch; set it to at least {min_count}"
            )
        if self.training.batch_size < self.num_pieces:
            raise ConfigError(
                f"training.batch_size is {self.training.batch_size}, too few for "
                f"{micro_batches} micro-batches (schedule.num_micro_batches) times "
                f"{self.training.accumulate_steps} passes (training.accumulate_steps); raise it"
            )
        layout = self.cluster
        if layout.num_replicas > 1:
            _ = self.compression.averaged.averaging_choice.label  # raises for one that cannot be
        if self.compression.boundaries:
            needs.check_boundaries(self)
        if self.security.holders or self.security.weights:
            self.security.check(tuple(layout.clouds), self.held_by)
        _check(self, FEATURES)
        if self.autopilot is not None:
            check_choices(self)

    @property
    def labels(self) -> Labels:
        security = self.security
        strategy = ""
        if self.strategy.averaging is not None:
            strategy = self.strategy.label
        in_force = self._compression_in_force
        boundaries = product(range(self.cluster.num_stages - 1), range(self.cluster.num_replicas))
        acts = any(self.defences_at(stage, replica) for stage, replica in boundaries)
        compression = in_force
        defences = ""
        if any(security.defences.values()):
            defences = security.defences_label
        if in_force == "off" and not self.compression.is_identity:
            compression += (
                f" (no boundary between clouds, so {self.compression.label} does not act)"
            )
        described = [self.task.describe(), self.model.describe(), self.cluster.describe()]
        described.append(f"compression: {compression}")
        if self.training.activation_cache_mb:
            described.append(f"keeps up to {self.training.activation_cache_mb} MB of frozen rows")
        if strategy:
            described.append(f"strategy: {self.strategy.describe(self.cluster)}")
        if defences:
            if not acts:
                defences += " (off: nothing they protect leaves its cloud)"
            described.append(f"defences: {defences}")
        if security.privacy is not None:
            described.append(security.privacy.label)
        if security.meter is not None and not self.cluster.crosses_clouds:
            described.append("leak meter: off (one cloud)")
        defences_in_force = "none"
        if any(security.defences.values()):
            defences_in_force = security.defences_label if acts else "off"
        return Labels(
            variant=" ".join(filter(None, (strategy, in_force))),
            compression=in_force,
            schedule=self.schedule.label,
            described=described,
            strategy=strategy,
            defences=defences_in_force,
        )

    @property
    def _compression_in_force(self) -> str:
        """The compression of boundaries that leave a cloud, else of what replicas average."""
        layout = self.cluster
        compression = self.compression
        if not layout.crosses_clouds:
            return "off"
        if any(layout.leaves_cloud(stage) for stage in range(layout.num_stages - 1)):
            return "none" if compression.is_identity else compression.label
        averaging = compression.averaged.averaging_choice.label
        return "none" if averaging == "none" else f"averaging {averaging}"

    @property
    def leak_meter(self) -> Meter | None:
        return self.security.meter if self.cluster.crosses_clouds else None

    @property
    def roster(self) -> Roster:
        """The tasks of ranks.

        Where clouds may leave and come back the first one, which merges for all, saves. Only who
        holds the end of a pipeline knows how good it is.
        """
        everyone = super().roster.essential
        layout = self.cluster
        traits = self.strategy.traits
        leads = [ranks[0] for ranks in layout.replicas_of(layout.num_stages - 1)]
        may_report = {"loss": frozenset(leads), "quality": frozenset(leads[:1])}
        is_elastic = traits.is_elastic and layout.num_replicas > 1
        first = frozenset(layout.ranks_in(layout.stage_cloud(0)))
        saving = first if is_elastic else everyone
        averaging = self.strategy.averaging
        return Roster(
            essential=saving if traits.may_leave else everyone,
            saving=saving,
            may_report=may_report,
            is_elastic=is_elastic,
            restart_s=None if averaging is None else averaging.restart_s,
        )

    @property
    def has_public_texts(self) -> bool:
        return getattr(self.task, "is_public", False) is True

    @property
    def scores_first(self) -> bool:
        """True where the test set is scored before the first step too, for comparison."""
        return getattr(self.model, "is_pretrained", False) and not self.roster.is_elastic

    def check(self) -> None:
        """Raise DataError if data or a checkpoint are missing.

        Raises ConfigError for a cut that the model cannot have.
        """
        asked = getattr(self.task, "answers", None)
        given = getattr(self.model, "output", None)
        if asked and given and asked != given:
            raise ConfigError(
                f"{self.task.describe()} needs model.output={asked}, and it is {given}"
            )
        self.task.check()
        check_checkpoints(self.model)
        _check(self, CHECKED_LAST)

    def held_by(self, cloud: str, what: str) -> frozenset[str]:
        if what == "holders":
            return self.fields_of_cloud(cloud)
        stages = self.cluster.clouds[cloud].stages or ()
        num_stages = self.cluster.num_stages
        return frozenset[str]().union(*(self.model.parts(s, num_stages) for s in stages))
