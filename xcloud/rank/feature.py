"""What a feature is to the rest of the package: a folder in features/ and a line in
feature_list.py. A Feature says what a job needs for it; a FeatureAtRank is at work in one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from xcloud.contracts.model import BuildContext, Stage, TaskData
from xcloud.job.job import PipelineJob
from xcloud.job.leaving import Outbound
from xcloud.job.needs import Conflict, FeatureUse
from xcloud.pipeline.exchange import Exchange, RankGroup
from xcloud.pipeline.hook import Hook
from xcloud.pipeline.pipeline import BoundaryPorts, Pipeline
from xcloud.pipeline.trainer import Trainer
from xcloud.pipeline.wiring import MakeReceiver, Wiring
from xcloud.rank.reports import MemoryMeter
from xcloud.rank.role import RankContext
from xcloud.simulator.costs import Profile
from xcloud.simulator.plan import Plan
from xcloud.simulator.pricing import OverEpochs, Pricer

Watch = Callable[[int, int, Mapping[str, Tensor]], None]
"""Called with what a replica contributed to an average: (step, replica, tensors by name)."""

MakeGuard = Callable[..., Callable[[Sequence[Tensor]], Sequence[Tensor]]]
"""Makes the function that changes a contribution before it leaves its cloud. The arguments are the
names of its tensors, num_parts (number of messages that together are one contribution) and silent
(names of tensors that must not be sent)."""


class Feature:
    """Something that a job may use beyond a plain pipeline. A feature overrides what it has.

    uses: the ways in which settings ask for it, with what it then needs of the job.
    noises: the reason to refuse it beside features that need exact gradients or weights, or None.
    ends_early: the reason to refuse it beside features that need to know the last update, or None.
    left_out_of_trials: settings, by dotted name, that run a job without it. A planner's trial has
        these where the feature is not among what it measures.
    at_work: the class of the feature at work in one rank; None where it does nothing there.
    headline: what the headline of a job says of it, such as "beta {job.task.beta:g}".
    """

    uses: Sequence[FeatureUse] = ()
    noises: Conflict | None = None
    ends_early: Conflict | None = None
    left_out_of_trials: Mapping[str, Any] = MappingProxyType({})
    at_work: ClassVar[type[FeatureAtRank] | None] = None
    headline = ""

    def is_used(self, job: PipelineJob) -> bool:
        """Return whether the job uses the feature."""
        return any(use.asked(job) for use in self.uses)

    def adjusted(self, job: PipelineJob) -> Mapping[str, Any]:
        """Return the settings of the job that the feature sets before anything is checked."""
        return {}

    def check(self, job: PipelineJob) -> None:
        """Raise ConfigError if the job asks for the feature and lacks what it needs."""
        for use in self.uses:
            if not use.reads_model:
                use.check(job)

    def check_model(self, job: PipelineJob) -> None:
        """Raise ConfigError for what only files of the model can show."""
        for use in self.uses:
            if use.reads_model:
                use.check(job)

    def describe(self, job: PipelineJob) -> str:
        """Return what the headline of the job says of the feature, which it uses."""
        return self.headline.format(job=job)

    def leaving(self, job: PipelineJob) -> Iterable[Outbound]:
        """Return what the feature sends from cloud to cloud, as far as settings tell."""
        return ()

    def measured(self, job: PipelineJob, run_dir: Path) -> Mapping[str, Any]:
        """Return what the summary has of it that is measured after a run has finished."""
        return {}

    def price_lacks(self, profile: Profile) -> str:
        """Return what a planner's price of the feature lacks with this profile; empty: nothing."""
        return ""

    def over_epochs(self, job: PipelineJob, pricer: Pricer, plan: Plan) -> OverEpochs | None:
        """Return how a step of the plan changes after the first epoch; None: it does not, or that
        is not known."""
        return None

    def at_rank(self, context: RankContext[PipelineJob]) -> FeatureAtRank | None:
        """Return the feature at work in one rank; None where it does nothing there."""
        return None if self.at_work is None else self.at_work(context, self)


@dataclass(frozen=True)
class BuiltRank:
    """The objects that a rank has built before its trainer.

    memory: was made before there was a model.
    """

    context: RankContext[PipelineJob]
    wiring: Wiring
    data: TaskData
    stages: Mapping[int, Stage]
    memory: MemoryMeter


class FeatureAtRank:
    """A feature at work in one rank. A feature overrides what it has.

    The methods stand in the order in which a rank is built (train/building.py). Some of them take
    how something is made and return another way to make it.
    """

    changes_each_gradient = False
    """It changes the gradient of every micro-batch, so none may be summed over ranks before."""
    hides_losses = False
    """Replicas may not tell each other their losses."""
    watch: Watch | None = None
    """Sees what other replicas contribute to averages."""
    guard: MakeGuard | None = None
    """Changes what this replica contributes to averages."""
    pipeline: Callable[..., Pipeline] | None = None
    """Makes the pipeline, from the arguments of Pipeline."""
    trainer: Callable[..., Trainer] | None = None
    """Makes the trainer, from the arguments of Trainer."""
    resumed: str = ""
    """A note for the user when a run resumes from a checkpoint; empty: no note."""

    def __init__(self, context: RankContext[PipelineJob], feature: Feature) -> None:
        self.context = context
        self.feature = feature

    def receiver(self, make: MakeReceiver) -> MakeReceiver:
        """Return what makes the receiving end of a channel."""
        return make

    def build_context(self, stage: int, group: RankGroup, context: BuildContext) -> BuildContext:
        """Return what a stage is built with. group: the ranks that hold it."""
        return context

    def ports(self, ports: dict[int, BoundaryPorts], built: BuiltRank) -> dict[int, BoundaryPorts]:
        """Return the ends of the boundaries through which the stages send and receive."""
        return ports

    def complete(self, built: BuiltRank, pipeline: Pipeline) -> None:
        """Act once the stages have all the values that a run begins with, which a checkpoint to go
        on from has not replaced yet."""

    def exchange(
        self, built: BuiltRank, watch: Watch | None, guard: MakeGuard | None
    ) -> Exchange | None:
        """Return the exchange of gradients that replaces the sum over a stage's ranks. watch,
        guard: functions of another feature."""
        return None

    def hook(self, built: BuiltRank, trainer: Trainer) -> Hook | None:
        """Return what acts on an update, with a state that a checkpoint keeps."""
        return None

    def observer(self, built: BuiltRank, trainer: Trainer) -> Hook | None:
        """Return what looks at an update without a state. Called after the hooks of all features
        and after evaluation."""
        return None
