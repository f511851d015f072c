"""What every kind of job has: settings that do not depend on the kind, and what the tools around a
run (launcher, monitor, sweeps) ask of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Protocol

from pydantic import SkipValidation

from xcloud.base.project import project_root
from xcloud.base.settings import NotNegative, settings
from xcloud.cluster.layout import Layout
from xcloud.plan.settings import Autopilot, Planning
from xcloud.record.summary import RunStatistics
from xcloud.record.tracking import Tracker
from xcloud.security.observer import LeakMeter
from xcloud.training.settings import Checkpoints


@settings("launch")
class Launch:
    """How run.py starts the ranks of a run on this machine.

    max_restarts: how often, if some die, all are started again from the last checkpoint.
    """

    max_restarts: NotNegative = 3


class AnyTraining(Protocol):
    """max_steps: updates in all. checkpoint: when to save what the run can go on from."""

    @property
    def max_steps(self) -> int: ...

    @property
    def checkpoint(self) -> Checkpoints: ...


@settings(kw_only=True)
class Job(ABC):
    """One frozen object that describes a run. Experiment is one, OneWayExperiment another.

    profile: which size of data and model was asked for (demo, files, paper); it only names them.
    sweep: a name that runs share which belong together.
    label: what tells this run from others of its sweep, seeds apart; the launcher gives it.
    cache_dir: relative to the project's folder.
    plan: what to find out before the run (planner/planning.py); null in whatever is run.
    autopilot: what may change while it runs (rank/autopilot.py); null: nothing.
    """

    name: str
    cluster: SkipValidation[Layout[Any]]
    training: SkipValidation[AnyTraining]
    tracker: SkipValidation[Tracker]
    seed: NotNegative = 1
    profile: str = "demo"
    sweep: str | None = None
    label: str | None = None
    cache_dir: str = ".cache"
    launch: Launch = field(default_factory=Launch)
    plan: Planning | None = None
    autopilot: Autopilot | None = None

    @property
    def run_name(self) -> str:
        """Tells runs apart: "abnet_iwslt two_clouds int8+int8 s1", in a sweep "int8+int8 s1"."""
        return f"{self.label or f'{self.name} {self.cluster.name} {self.variant}'} s{self.seed}"

    @property
    @abstractmethod
    def variant(self) -> str:
        """What tells this run from others of the same name and cluster, in a word."""

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
        """When to save what the run can go on from."""
        return self.training.checkpoint

    @property
    def max_steps(self) -> int:
        """Updates in all."""
        return self.training.max_steps

    @property
    @abstractmethod
    def schedule_label(self) -> str:
        """In what order the work is done."""

    @property
    def facts(self) -> dict[str, str]:
        """For the pictures of a run."""
        return {
            "schedule": self.schedule_label,
            "link": self.cluster.describe_link(),
            "compression": self.compression_in_force,
            **({"strategy": self.strategy_in_force} if self.strategy_in_force else {}),
        }

    @property
    def why_not_in_turns(self) -> str:
        """Why its steps cannot be timed in turns with those of other jobs; "" if they can."""
        return ""

    def statistics(self) -> RunStatistics:
        """A fresh one, to be fed this run's events."""
        return RunStatistics(self.cluster.num_ranks)

    @property
    def essential_ranks(self) -> frozenset[int]:
        """The run fails with any of these; the others may be lost. By default none can."""
        return frozenset(range(self.cluster.num_ranks))

    @property
    def saving_ranks(self) -> frozenset[int]:
        """Those that save what the run can go on from; the others begin with what these tell."""
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

    @property
    def next_experiment(self) -> Sequence[str]:
        """Command line of the experiment that runs after this one; empty: none."""
        return ()

    def leaves(self, run_dir: Path) -> Mapping[str, str]:
        """Settings of another experiment that make it read what a finished run left."""
        return {}

    def next_command(self, run_dir: Path) -> str | None:
        """What to do with what a finished run left, to be copied; None: nothing in particular."""
        return None

    @property
    def cache_path(self) -> Path:
        return project_root() / self.cache_dir  # an absolute one stays as it is
