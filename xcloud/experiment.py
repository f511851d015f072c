"""Experiment: the one frozen object that describes the training of a model cut into stages.

It asks the features that it uses (feature_list.py) what they need of it, and refuses settings that
do not fit together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from xcloud.base.errors import ConfigError
from xcloud.base.settings import settings
from xcloud.contracts.model import ModelOfParts
from xcloud.feature_list import FIGURES, all_features
from xcloud.job import needs
from xcloud.job.job import Labels, PipelineJob, Roster
from xcloud.job.leaving import Outbound
from xcloud.pretrained import check_checkpoints
from xcloud.rank.feature import Feature
from xcloud.record.feature_figures import FeatureFigure


@settings(kw_only=True)
class Experiment(PipelineJob):
    """A training of a model cut into stages: what runs where, how it trains, what is written down.

    Raises ConfigError for settings that do not fit together.
    """

    figures: ClassVar[Sequence[FeatureFigure]] = FIGURES

    def __post_init__(self) -> None:
        # A frozen object is completed here, before anybody else sees it.
        object.__setattr__(self, "cluster", self.strategy.arrange(self.cluster))
        # A feature may change settings that it needs otherwise; each sees what those before it
        # have made.
        for feature in self.features:
            for name, value in feature.adjusted(self).items():
                object.__setattr__(self, name, value)
        # Behind the features, which may change the schedule.
        micro_batches = self.schedule.num_micro_batches
        min_count = self.cluster.min_micro_batches()
        if micro_batches < min_count:
            raise ConfigError(
                f"schedule.num_micro_batches is {micro_batches}, but with strategy="
                f"{self.strategy.name} {min_count} ranks of this cluster hold the same stage, and "
                f"each needs a micro-batch; set it to at least {min_count}"
            )
        # Each micro-batch needs a sample.
        if self.training.batch_size < self.num_pieces:
            raise ConfigError(
                f"training.batch_size is {self.training.batch_size}, too few for "
                f"{micro_batches} micro-batches (schedule.num_micro_batches) times "
                f"{self.training.accumulate_steps} passes (training.accumulate_steps); raise it"
            )
        layout = self.cluster
        layout.check_lines()
        # Averages of some compressors cannot be made; asked only where there is something to
        # average.
        if layout.num_replicas > 1:
            _ = self.compression.averaged.averaging_choice.label  # raises for one that cannot be
        if self.compression.boundaries:
            needs.check_boundaries(self)
        needs.check_text_is_read(self)
        if self.security.holders or self.security.weights:
            self.security.check(tuple(layout.clouds), self.held_by)
        # Needs of settings that are no features.
        for use in (needs.SEALED, needs.MAILBOX, *needs.DEFENCES):
            use.check(self)
        for feature in self.features:
            feature.check(self)

    @property
    def features(self) -> list[Feature]:
        """The features that this job uses, also those given as hooks (planner/tour.py)."""
        listed = [feature for feature in all_features() if feature.is_used(self)]
        return listed + [given for given in self.hooks.values() if isinstance(given, Feature)]

    @property
    def labels(self) -> Labels:
        security = self.security
        strategy = self.strategy.label if self.strategy.averaging is not None else ""
        in_force = self._compression_in_force
        # A defence acts where a message leaves the cloud of the data; with all of it in one cloud
        # it does nothing.
        boundaries = product(range(self.cluster.num_stages - 1), range(self.cluster.num_replicas))
        acts = any(self.defences_at(stage, replica) for stage, replica in boundaries)
        compression = in_force
        defences = security.defences_label if any(security.defences.values()) else ""
        # What was chosen is said even where it does not act: two runs that differ only in it are
        # equal.
        if in_force == "off" and not self.compression.is_identity:
            compression += (
                f" (no boundary between clouds, so {self.compression.label} does not act)"
            )
        described = [self.task.describe(), self.model.describe(), self.cluster.describe()]
        described.append(f"compression: {compression}")
        if strategy:
            described.append(f"strategy: {self.strategy.describe(self.cluster)}")
        if defences:
            if not acts:
                defences += " (off: nothing they protect leaves its cloud)"
            described.append(f"defences: {defences}")
        described += filter(None, (feature.describe(self) for feature in self.features))
        defences_in_force = "none"
        # Named in tables as what was in force.
        if any(security.defences.values()):
            defences_in_force = security.defences_label if acts else "off"
        trained = getattr(self.model, "variant", "")
        return Labels(
            variant=" ".join(filter(None, (strategy, in_force, trained))),
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
        # Boundaries first: what replicas average is compressed as well, and is named only where it
        # is all that crosses.
        if any(layout.leaves_cloud(stage) for stage in range(layout.num_stages - 1)):
            if compression.is_identity:
                return "none"
            return compression.label
        averaging = compression.averaged.averaging_choice.label
        return "none" if averaging == "none" else f"averaging {averaging}"

    def leaving(self) -> Iterator[Outbound]:
        yield from super().leaving()
        for feature in self.features:
            yield from feature.leaving(self)

    def measured(self, run_dir: Path) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for feature in self.features:
            found |= feature.measured(self, run_dir)
        return found

    @property
    def roster(self) -> Roster:
        """The tasks of ranks.

        Where clouds may leave and come back the first one, which merges for all, saves. Only who
        holds the end of a pipeline knows how good it is.
        """
        everyone = super().roster.essential
        layout = self.cluster
        traits = self.strategy.traits
        # The first rank of each replica's last stage knows its losses; of the first replica alone
        # the quality is scored.
        leads = [ranks[0] for ranks in layout.replicas_of(layout.num_stages - 1)]
        may_report = {"loss": frozenset(leads), "quality": frozenset(leads[:1])}
        is_elastic = traits.is_elastic and layout.num_replicas > 1
        # Merging goes through the first cloud, which has the state of all.
        first = frozenset(layout.ranks_in(layout.stage_cloud(0)))
        saving = first if is_elastic else everyone
        return Roster(
            essential=saving if traits.may_leave else everyone,
            saving=saving,
            may_report=may_report,
            is_elastic=is_elastic,
            restart_s=traits.restart_s,
        )

    def next_merge(self, step: int) -> int | None:
        traits = self.strategy.traits
        if not traits.trains_locally or self.cluster.num_replicas < 2:
            return None
        # The end of the run merges, whatever `every` says.
        return min(self.max_steps, traits.next_merge(step))

    @property
    def has_public_texts(self) -> bool:
        return getattr(self.task, "is_public", False) is True

    def check(self) -> None:
        """Raise DataError if data or a checkpoint are missing.

        Raises ConfigError for a cut that the model cannot have.
        """
        # A task may say what its model must give, such as a span.
        asked = getattr(self.task, "answers", None)
        given = getattr(self.model, "output", None)
        if asked and given and asked != given:
            raise ConfigError(
                f"{self.task.describe()} needs model.output={asked}, and it is {given}"
            )
        self.task.check()
        check_checkpoints(self.model)
        # Only models that are read from files have this.
        check_files = getattr(self.model, "check_files", None)
        if check_files is not None:
            check_files(self.cluster.num_stages, self.task.max_length)
        for feature in self.features:
            feature.check_model(self)
        needs.EXACT_FIELDS.check(self)

    def held_by(self, cloud: str, what: str) -> frozenset[str]:
        if what == "holders":
            return self.fields_of_cloud(cloud)
        stages = self.cluster.clouds[cloud].stages or ()
        num_stages = self.cluster.num_stages
        model = self.model
        # Other models can be trained; rules on their weights can't be checked.
        if not isinstance(model, ModelOfParts):
            raise ConfigError(
                f"rules on weights name parts of a model, and {model!r} has no method `parts`, "
                "which says what each stage holds"
            )
        return frozenset[str]().union(*(model.parts(s, num_stages) for s in stages))
