"""What every kind of job has: settings that do not depend on the kind, and what the tools around a
run (launcher, monitor, sweeps) ask of it. PipelineJob: the settings of one whose model is cut into
stages, and what follows from them; Experiment (experiment.py) refuses what does not go together.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Protocol, Self

from pydantic import SkipValidation

from xcloud.base.errors import ConfigError
from xcloud.base.project import project_root
from xcloud.base.settings import NotNegative, settings
from xcloud.cluster.layout import ClusterLayout, Layout
from xcloud.comm.boundary import Boundary
from xcloud.comm.compression import CompressionPlan
from xcloud.contracts.model import SplitModel
from xcloud.contracts.task import Task
from xcloud.job.places import Places
from xcloud.parallel.part import FurtherPart
from xcloud.parallel.schedule import Schedule
from xcloud.parallel.strategy import Strategy
from xcloud.plan.settings import Autopilot, Planning
from xcloud.record.summary import RunStatistics
from xcloud.record.tracking import Tracker
from xcloud.security.defences import Defence
from xcloud.security.leak_meter import LeakMeter
from xcloud.security.policy import Visibility
from xcloud.training.batch_plan import BatchPlan
from xcloud.training.pinned_batches import PinnedBatchPlan
from xcloud.training.settings import Checkpoints, Training


@settings("launch")
class Launch:
    """How run.py starts the ranks of a run on this machine.

    max_restarts: how often, if some die, all are started again from the last checkpoint.
    """

    max_restarts: NotNegative = 3


class AnyTraining(Protocol):
    """max_steps: updates in all. checkpoint: when to save what the run can resume from."""

    @property
    def max_steps(self) -> int: ...

    @property
    def checkpoint(self) -> Checkpoints: ...


@settings(kw_only=True)
class Names:
    """What a run is called by.

    profile: which size of data and model was asked for (demo, files, paper); it only names them.
    sweep: a name that runs share which belong together.
    label: distinguishes this run from others of its sweep, seeds apart; the launcher gives it.
    """

    name: str
    seed: NotNegative = 1
    profile: str = "demo"
    sweep: str | None = None
    label: str | None = None


@settings(kw_only=True)
class Job(Names, ABC):
    """One frozen object that describes a run. Experiment is one, OneWayExperiment another.

    cache_dir: relative to the project's folder.
    plan: what to find out before the run (planner/planning.py); null in whatever is run.
    autopilot: what may change while it runs (rank/autopilot.py); null: nothing.
    """

    cluster: SkipValidation[Layout[Any]]
    training: SkipValidation[AnyTraining]
    tracker: SkipValidation[Tracker]
    cache_dir: str = ".cache"
    launch: Launch = field(default_factory=Launch)
    plan: Planning | None = None
    autopilot: Autopilot | None = None

    @classmethod
    def of(cls, made: object) -> Job:
        """Raises ConfigError for what is no job."""
        if not isinstance(made, Job):
            raise ConfigError(
                f"_target_ must make a job, such as xcloud's Experiment, got {made!r}"
            )
        return made

    @property
    def run_name(self) -> str:
        """Begins with what tells runs apart: "int8+int8 two_clouds abnet_iwslt s1", in a sweep
        "int8+int8 s1"."""
        return f"{self.label or f'{self.variant} {self.cluster.name} {self.name}'} s{self.seed}"

    @property
    @abstractmethod
    def variant(self) -> str:
        """What distinguishes this run from others of the same name and cluster, in a word."""

    @property
    def headline(self) -> str:
        """What this run is, in one line."""
        return f"{self.name} [{self.profile}]: {'; '.join(self._described)}"

    @property
    @abstractmethod
    def _described(self) -> Sequence[str]:
        """The parts of the headline that depend on the kind."""

    @property
    @abstractmethod
    def compression_in_force(self) -> str:
        """Its label; "off" where nothing crosses between clouds."""

    @property
    def strategy_in_force(self) -> str:
        """How several clouds are used; "" where there is one way only."""
        return ""

    @property
    def defences_in_force(self) -> str:
        return "none"

    @property
    def leak_meter(self) -> LeakMeter | None:
        """Measures, after the run, what other clouds could recover; None where it is off."""
        return None

    @property
    def checkpoint(self) -> Checkpoints:
        """When to save what the run can resume from."""
        return self.training.checkpoint

    @property
    def max_steps(self) -> int:
        """Updates in all."""
        return self.training.max_steps

    @property
    @abstractmethod
    def schedule_label(self) -> str:
        """In what order the work is done."""

    def statistics(self) -> RunStatistics:
        """A fresh one, to be fed this run's events."""
        return RunStatistics(self.cluster.num_ranks)

    @property
    def essential_ranks(self) -> frozenset[int]:
        """The run fails with any of these; the others may be lost. By default none can."""
        return frozenset(range(self.cluster.num_ranks))

    @property
    def saving_ranks(self) -> frozenset[int]:
        """Those that save what the run can resume from; the others begin with what these send."""
        return frozenset(range(self.cluster.num_ranks))

    @property
    def may_report(self) -> Mapping[str, frozenset[int]]:
        """Ranks besides 0 that may report a kind of event, or the "loss"; by default any rank."""
        return {}

    @property
    def is_elastic(self) -> bool:
        """Whether ranks may begin at any time, also again."""
        return False

    @property
    def restart_s(self) -> float | None:
        """Seconds after which lost ranks that the run can do without begin again; None: never."""
        return None

    @property
    def places(self) -> Places:
        """Who holds what. By default it cannot change from one attempt to the next."""
        return Places()

    @property
    def pipeline(self) -> PipelineJob:
        """This job, where its model is cut into stages. Raises ConfigError for another kind."""
        raise ConfigError("plan= knows jobs whose model is cut into stages, and this is another")

    def held_by(self, cloud: str, what: str) -> frozenset[str] | None:
        """Names of the batch fields ("holders") or of the parts of the model ("weights") that its
        ranks hold; None for a kind of job that has no such names."""
        return None

    def refused_with(self, ranks: frozenset[int]) -> frozenset[int]:
        """Ranks that must leave before the start so that the run can do without `ranks`, which
        they include; empty if it cannot."""
        return frozenset()

    @abstractmethod
    def check(self) -> None:
        """Raise DataError or ConfigError for what is missing, before anything starts."""

    def next_command(self, run_dir: Path) -> str | None:
        """What to do with what a finished run left, to be copied; None: nothing in particular."""
        return None

    @property
    def cache_path(self) -> Path:
        return project_root() / self.cache_dir  # an absolute one stays as it is


@settings(kw_only=True)
class PipelineJob(Job):
    """What runs where and how it trains. cluster: once built, with the replicas that the strategy
    makes. parts: of every rank, around an update, besides those that the settings ask for."""

    task: SkipValidation[Task]
    model: SkipValidation[SplitModel]
    cluster: ClusterLayout
    schedule: SkipValidation[Schedule]
    compression: CompressionPlan
    training: Training
    security: Visibility = field(default_factory=Visibility)
    strategy: Strategy = field(default_factory=Strategy)
    parts: Mapping[str, SkipValidation[FurtherPart]] = field(default_factory=dict)

    @property
    def pipeline(self) -> Self:
        return self

    @property
    def places(self) -> Places:
        labels = {"compression": self.compression.label, "schedule": self.schedule_label,
                  "cluster": self.cluster.describe()}  # fmt: skip
        return replace(Places.held(self.cluster, self.strategy, self.max_steps), labels=labels)

    @property
    def ties_ends(self) -> bool:
        """Whether the first and the last stage train a matrix in common (tied embeddings)."""
        ties = getattr(self.model, "ties_ends", None)
        return ties is not None and bool(ties(self.cluster.num_stages))

    def defences_at(self, stage: int, replica: int) -> dict[str, Defence]:
        """By direction, of the boundary after `stage`. One acts where a message goes from a cloud
        that holds the protected data (forward: what the first stage reads; backward: what the last
        one reads) to one that does not. Later messages are computed from protected ones."""
        last = self.cluster.num_stages - 1
        first_cloud, here, there, last_cloud = (
            self.cluster.stage_cloud(s, replica) for s in (0, stage, stage + 1, last)
        )
        leaves = {"forward": here == first_cloud != there, "backward": there == last_cloud != here}
        return {way: d for way, d in self.security.chosen_defences.items() if leaves[way]}

    @property
    def boundaries(self) -> dict[int, Boundary]:
        """What crosses from each stage to the next."""
        return {
            stage: self.model.boundary(stage, self.cluster.num_stages, self.task.max_length)
            for stage in range(self.cluster.num_stages - 1)
        }

    @property
    def cached_boundaries(self) -> list[int]:
        """Boundaries after which clouds keep rows of frozen parts."""
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
        """The batches of training. A sample keeps its ranks where a memory is kept for it: both
        ends of a channel must meet it again."""
        layout, size = self.cluster, self.training.batch_size
        periods = [
            layout.rank_period(stage)
            for stage in range(layout.num_stages - 1)
            if layout.leaves_cloud(stage)
            and (self.compression.at_boundary(stage).has_memory or stage in self.cached_boundaries)
        ]
        period, num_micro_batches = math.lcm(*periods), self.schedule.num_micro_batches
        if period == 1:
            return BatchPlan(num_samples, size, self.seed)
        ranks = [i % period for i in range(num_micro_batches)] * self.training.accumulate_steps
        return PinnedBatchPlan(num_samples, size, self.seed, ranks)

    def fields_of_cloud(self, cloud: str) -> frozenset[str]:
        """Batch fields that any rank of the cloud reads."""
        return self._fields(self.cluster.clouds[cloud].stages or ())

    def fields_of(self, rank: int) -> frozenset[str]:
        """Batch fields that this rank reads, and so loads."""
        return self._fields(self.cluster.placement(rank).stages)

    def _fields(self, stages: Sequence[int]) -> frozenset[str]:
        num_stages = self.cluster.num_stages
        return frozenset[str]().union(*(self.model.fields(s, num_stages) for s in stages))
