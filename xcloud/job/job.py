"""What every kind of job has, and what the training of a model cut into stages has beside it.

A Job has the settings that do not depend on the kind, and answers what the tools around a run
(launcher, monitor, sweeps) ask of it. A PipelineJob has those of a model cut into stages, and what
follows from them. Experiment (experiment.py) refuses what does not go together.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, Self, cast, runtime_checkable

from pydantic import AfterValidator, SkipValidation

from xcloud.base.errors import ConfigError
from xcloud.base.project import MODEL_DIR, project_root
from xcloud.base.settings import CommandLine, NotNegative, WritePath, settings
from xcloud.base.wording import check_label, check_name
from xcloud.comm.channel import Boundary
from xcloud.comm.compression import CompressionPlan
from xcloud.comm.compression_plans import Selectable
from xcloud.contracts.model import SplitModel, Task
from xcloud.feature_settings import OfJob
from xcloud.job.leaving import Outbound, leaving
from xcloud.job.strategy import ModelPlacement, Strategy
from xcloud.layout import ClusterLayout, Layout
from xcloud.pipeline.batch_plan import BatchPlan
from xcloud.pipeline.hook import OwnHook
from xcloud.pipeline.pinned_batches import PinnedBatchPlan
from xcloud.pipeline.schedule import Schedule
from xcloud.pipeline.settings import Checkpoints, Training
from xcloud.record.feature_figures import FeatureFigure
from xcloud.record.summary import RunStatistics
from xcloud.security.defences import Defence
from xcloud.security.policy import Visibility
from xcloud.tracking.tracker import Tracker


@settings("launch")
class Launch:
    """The settings of how run.py starts the ranks of a run on this machine.

    max_restarts: the number of times that all ranks are restarted from one checkpoint if some die.
        After the next checkpoint they may be restarted as often again. Failures of other owners'
        clouds count apart.
    on_event: the command that is called when the run diverges, loses a cloud, resumes or ends,
        with the event as JSON on its standard input (show/notices.py); null: none. Given on the
        command line only: no file of a run keeps it, and none from elsewhere may have it.
    """

    max_restarts: NotNegative = 3
    on_event: CommandLine | None = None


@dataclass(frozen=True)
class Labels:
    """The words by which tables and pictures name a job.

    variant: a text that distinguishes the job from others of the same name and cluster.
    compression: the compression in force; "off" where nothing crosses between clouds.
    schedule: the order in which the work is done.
    described: the items of the headline.
    strategy: the way in which several clouds are used; "" where there is one way only.
    """

    variant: str
    compression: str
    schedule: str
    described: Sequence[str]
    strategy: str = ""
    defences: str = "none"


@dataclass(frozen=True)
class Roster:
    """The tasks of ranks: which ones may be lost, save checkpoints, or report.

    essential: the run fails with any of these; the others may be lost.
    saving: the ranks that write checkpoints. The others get their state from them.
    may_report: the ranks besides 0 that may report a kind of event, or the "loss". Any rank may
        report other kinds.
    is_elastic: ranks may begin at any time, also again.
    restart_s: the seconds to wait before lost ranks are restarted; None: never.
    """

    essential: frozenset[int]
    saving: frozenset[int]
    may_report: Mapping[str, frozenset[int]] = field(default_factory=dict)
    is_elastic: bool = False
    restart_s: float | None = None


def _own_hook(hook: Any) -> Any:
    """Return a hook, or a feature that is given as one (planner/tour.py)."""
    is_hook = isinstance(hook, OwnHook) and not isinstance(hook, str)  # text has a `join`, too
    if not is_hook and not hasattr(hook, "at_rank"):
        raise ConfigError(f"hooks: each must be an OwnHook, got {hook!r}; give it a _target_")
    return hook


@runtime_checkable
class PlanSettings(Protocol):
    """The settings of `plan` (planner/settings.py): what a planner, not the job, asks for."""

    @property
    def mode(self) -> str:
        """The word for what to do with plans: "show" them, or "apply" the best."""


@settings(kw_only=True)
class Job(OfJob, ABC):
    """A frozen object that describes a run. Experiment is one; features/one_way/ has another.

    name: the name of the run, used in its folder, its tables and the tracker.
    seed: the seed of everything random in training. Rows held out or drawn, an emulated line's
        jitter and outages, and a model's own pretraining are the same for every seed, so that runs
        of several seeds differ in their training alone.
    profile: the size of data and model that was asked for (demo, files, paper). It is only a name
        for them.
    sweep: a name shared by runs that belong together.
    label: a text that distinguishes this run from others of its sweep, seeds apart. The launcher
        gives it.
    cluster: the clouds, the ranks in each of them, and the lines between them.
    training: the number of updates, the batches they are made of, and the optimizer.
    tracker: the place to which metrics are sent besides the run folder.
    launch: the settings by which its processes are started and restarted.
    cache_dir: the folder for files that later runs reuse, relative to the project's folder.
    plan: the question to answer before the run (planner/planning.py); null in every job that is
        run.
    """

    name: Annotated[str, AfterValidator(partial(check_label, "name"))]
    seed: NotNegative = 1
    profile: Annotated[str, AfterValidator(partial(check_label, "profile"))] = "demo"
    sweep: Annotated[str, AfterValidator(partial(check_name, "sweep"))] | None = None
    label: Annotated[str, AfterValidator(partial(check_label, "label"))] | None = None
    cluster: SkipValidation[Layout]
    training: SkipValidation[Any]  # with max_steps and checkpoint
    tracker: Tracker
    cache_dir: WritePath = ".cache"
    launch: Launch = field(default_factory=Launch)
    plan: PlanSettings | None = None

    figures: ClassVar[Sequence[FeatureFigure]] = ()
    """The figures that features add to those of a run."""

    @classmethod
    def of(cls, made: object) -> Job:
        if not isinstance(made, Job):
            text = "_target_ must make a job, such as xcloud's Experiment"
            raise ConfigError(f"{text}, got {made!r}")
        return made

    @property
    def run_name(self) -> str:
        """The name of a run, which begins with what distinguishes it from others.

        Such as "int8+int8 two_clouds abnet_iwslt s1", in a sweep "int8+int8 s1".
        """
        # The label of a sweep's point is unlike the others', which is all that a table needs.
        own = self.label or f"{self.labels.variant} {self.cluster.name} {self.name}"
        return f"{own} s{self.seed}"

    @property
    def headline(self) -> str:
        return f"{self.name} [{self.profile}]: {'; '.join(self.labels.described)}"

    @property
    @abstractmethod
    def labels(self) -> Labels: ...

    @property
    def drawn(self) -> dict[str, str]:
        """The labels that a picture of a run bears."""
        labels = self.labels
        found = {
            "schedule": labels.schedule,
            "link": self.cluster.describe_link(),
            "compression": labels.compression,
        }
        return {**found, "strategy": labels.strategy} if labels.strategy else found

    @property
    def roster(self) -> Roster:
        """The tasks of ranks; by default the run needs every rank, and each saves."""
        everyone = frozenset(range(self.cluster.num_ranks))
        return Roster(essential=everyone, saving=everyone)

    def measured(self, run_dir: Path) -> Mapping[str, Any]:
        """Return what the summary has of a finished run that is measured after it."""
        return {}

    @property
    def checkpoint(self) -> Checkpoints:
        return cast(Checkpoints, self.training.checkpoint)

    @property
    def max_steps(self) -> int:
        return int(self.training.max_steps)

    def next_merge(self, step: int) -> int | None:
        """Return the next step in which replicas that train apart merge; None if none do."""
        return None

    def statistics(self) -> RunStatistics:
        return RunStatistics(self.cluster.num_ranks, self.figures, self.cluster.prices)

    @property
    def places(self) -> ModelPlacement:
        """The holders of the model; by default the same in every attempt."""
        return ModelPlacement()

    @property
    def pipeline(self) -> PipelineJob:
        """The job itself, where its model is cut into stages.

        Raises ConfigError for another kind.
        """
        raise ConfigError("plan= is for jobs whose model is split into stages: set plan=none")

    @property
    def has_public_texts(self) -> bool:
        """True if what the job reads is known to be public; False if the job does not say."""
        return False

    def held_by(self, cloud: str, what: str) -> frozenset[str] | None:
        """Return the names of what a cloud's ranks hold; None if this kind of job has none.

        what: "holders" for batch fields, "weights" for parts of the model.
        """
        return None

    @abstractmethod
    def leaving(self) -> Iterable[Outbound]:
        """Return what the run sends from cloud to cloud, as far as its settings tell."""

    @abstractmethod
    def check(self) -> None:
        """Raise DataError or ConfigError for what is missing, before anything starts."""

    def next_command(self, run_dir: Path) -> str | None:
        """Return a command, to be copied, for what a finished run left; None if there is none."""
        return None

    @property
    def cache_path(self) -> Path:
        return project_root() / self.cache_dir  # an absolute one stays as it is


@settings(kw_only=True)
class PipelineJob(Job):
    """A job whose model is cut into stages: what runs where, and how it trains.

    task: the task to learn, and the texts to learn it from.
    model: the network, and the blocks at which it is split into stages.
    cluster: the clouds, the ranks in each of them, and the lines between them. Once the job is
        built, it includes the replicas that the strategy makes.
    schedule: the order in which micro-batches go through the stages.
    compression: the compressors of messages between clouds.
    security: the clouds that may hold each text, and the protection of texts from the others.
    strategy: the way in which replicas of the pipeline learn from each other.
    hooks: hooks around an update that every rank calls, besides those that the settings ask for,
        and features that no list has.
    """

    task: Task
    model: SplitModel
    cluster: ClusterLayout
    schedule: Schedule
    compression: CompressionPlan
    training: Training
    security: Visibility = field(default_factory=Visibility)
    strategy: Strategy = field(default_factory=Strategy)
    hooks: Mapping[str, Annotated[Any, AfterValidator(_own_hook)]] = field(default_factory=dict)

    @property
    def pipeline(self) -> Self:
        return self

    def next_command(self, run_dir: Path) -> str | None:
        """Return the command that the task proposes next, where all stages are on this machine and
        compressed as the settings say."""
        # The command reads all stages from here, and what a codec has learned is chosen while the
        # run goes on.
        stages = range(self.cluster.num_stages)
        files = [run_dir / MODEL_DIR / f"stage{stage}.safetensors" for stage in stages]
        command = getattr(self.task, "next_command", None)
        if command is None or isinstance(self.compression, Selectable):
            return None
        if not all(file.exists() for file in files):
            return None
        said: str | None = command(run_dir)
        return said

    @property
    def places(self) -> ModelPlacement:
        # Labels of groups by which a resume names what has changed.
        labels = {"compression": self.compression.label, "schedule": self.schedule.label,
                  "cluster": self.cluster.describe()}  # fmt: skip
        return ModelPlacement.held(
            self.cluster, strategy=self.strategy, last_step=self.max_steps, labels=labels
        )

    def defences_at(self, stage: int, replica: int) -> dict[str, Defence]:
        """Return the defences of the boundary after `stage`, by direction.

        One acts where a message goes from a cloud that holds the protected data (forward: what the
        first stage reads; backward: what the last one reads) to one that does not. Later messages
        are computed from protected ones.
        """
        last = self.cluster.num_stages - 1
        # Messages behind a cloud that does not hold the protected data are computed from protected
        # ones, so only the boundary where it leaves acts.
        first_cloud, here, there, last_cloud = (
            self.cluster.stage_cloud(s, replica) for s in (0, stage, stage + 1, last)
        )
        # Forward it leaves the first stage's cloud, backward the last one's.
        leaves = {"forward": here == first_cloud != there, "backward": there == last_cloud != here}
        return {w: d for w, d in self.security.defences.items() if d is not None and leaves[w]}

    @cached_property
    def boundaries(self) -> dict[int, Boundary]:
        """The boundaries, by the stage before: what crosses from each stage to the next."""
        return {
            stage: self.model.boundary(
                stage, num_stages=self.cluster.num_stages, max_length=self.task.max_length
            )
            for stage in range(self.cluster.num_stages - 1)
        }

    @cached_property
    def cached_boundaries(self) -> list[int]:
        """The boundaries after which clouds keep rows of frozen parts."""
        # 0 MB: no cache was asked for.
        if not self.training.activation_cache_mb:
            return []
        leaves = self.cluster.leaves_cloud
        # Rows are the same in every epoch only below frozen parts.
        return [s for s, boundary in self.boundaries.items() if boundary.is_constant and leaves(s)]

    @cached_property
    def schedules(self) -> Sequence[Schedule]:
        """All schedules that the run may use, its own first. A feature may add some."""
        return [self.schedule]

    @property
    def features(self) -> Sequence[Any]:
        """The features (rank/feature.py) that the job uses."""
        return ()

    @property
    def max_micro_batch(self) -> int:
        """The number of samples of the largest micro-batch, in training or evaluation."""
        # The fewest micro-batches make the largest ones.
        min_count = min(schedule.num_micro_batches for schedule in self.schedules)
        min_count *= self.training.accumulate_steps  # over all passes
        return max(-(-self.training.batch_size // min_count), self.training.eval_batch_size)

    @property
    def num_pieces(self) -> int:
        """The number of micro-batches of an update, over all passes."""
        return self.schedule.num_micro_batches * self.training.accumulate_steps

    def batch_plan(self, num_samples: int) -> BatchPlan:
        """Return the batches of training.

        A sample keeps its ranks where a memory is kept for it: both ends of a channel must meet it
        again.
        """
        layout = self.cluster
        size = self.training.batch_size
        periods = [
            # Only boundaries that cross a line compress, and so remember.
            layout.rank_period(stage)
            for stage in range(layout.num_stages - 1)
            if layout.leaves_cloud(stage)
            and (self.compression.at_boundary(stage).has_memory or stage in self.cached_boundaries)
        ]
        # Pairs of ranks repeat after as many micro-batches; the lcm is where all boundaries repeat
        # at once.
        period = math.lcm(*periods)
        num_micro_batches = self.schedule.num_micro_batches
        if period == 1:
            return BatchPlan(num_samples, batch_size=size, seed=self.seed)
        # Each pass of an update goes through the same ranks again.
        ranks = [i % period for i in range(num_micro_batches)] * self.training.accumulate_steps
        return PinnedBatchPlan(num_samples, batch_size=size, seed=self.seed, group_of_piece=ranks)

    def leaving(self) -> Iterable[Outbound]:
        return leaving(self)

    def fields_of_cloud(self, cloud: str) -> frozenset[str]:
        """Return the batch fields that any rank of the cloud reads."""
        return self._fields(self.cluster.clouds[cloud].stages or ())

    def fields_of(self, rank: int) -> frozenset[str]:
        """Return the batch fields that this rank reads, and so loads."""
        return self._fields(self.cluster.placement(rank).stages)

    def _fields(self, stages: Sequence[int]) -> frozenset[str]:
        num_stages = self.cluster.num_stages
        return frozenset[str]().union(
            *(self.model.fields(s, num_stages=num_stages) for s in stages)
        )
