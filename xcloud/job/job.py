"""What the tools around a run (launcher, monitor, sweeps) ask of an experiment, whatever kind of
job it describes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from xcloud.cluster.layout import Wan
from xcloud.record.summary import RunStatistics
from xcloud.record.tracking import Tracker
from xcloud.report.progress import ProgressLine
from xcloud.security.observer import LeakMeter


class Place(Protocol):
    """Where a rank stands."""

    @property
    def cloud(self) -> str: ...


class Layout(Protocol):
    """The clouds of a job."""

    @property
    def clouds(self) -> Mapping[str, Any]: ...

    @property
    def wan(self) -> Wan: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def crosses_clouds(self) -> bool: ...

    def placement(self, rank: int) -> Place: ...

    def wan_between(self, rank: int, peer: int) -> Wan | None: ...

    def describe(self) -> str: ...


class Job(Protocol):
    """One frozen object that describes a run. Experiment is one, OneWayExperiment another."""

    @property
    def name(self) -> str: ...

    @property
    def seed(self) -> int: ...

    @property
    def profile(self) -> str: ...

    @property
    def sweep(self) -> str | None: ...

    @property
    def label(self) -> str | None: ...

    @property
    def tracker(self) -> Tracker: ...

    @property
    def cluster(self) -> Layout: ...

    @property
    def run_name(self) -> str: ...

    @property
    def headline(self) -> str: ...

    @property
    def compression_in_force(self) -> str: ...

    @property
    def defences_in_force(self) -> str: ...

    @property
    def leak_meter(self) -> LeakMeter | None:
        """Measures, after the run, what other clouds could recover; None where it is off."""

    @property
    def facts(self) -> dict[str, str]:
        """For the pictures of a run: how it was scheduled, linked and compressed."""

    @property
    def essential_ranks(self) -> frozenset[int]:
        """The run fails with any of these; the others may be lost."""

    def refused_with(self, ranks: frozenset[int]) -> frozenset[int]:
        """Ranks that must leave before the start so that the run can do without `ranks`, which
        they include; empty if it cannot."""

    def check(self) -> None:
        """Raise DataError or ConfigError for what is missing, before anything starts."""

    @property
    def follow_up(self) -> Sequence[str]:
        """Command line of the experiment that runs after this one; empty: none."""

    def leaves(self, run_dir: Path) -> Mapping[str, str]:
        """Settings of another experiment that make it read what a finished run left."""

    def next_command(self, run_dir: Path) -> str | None:
        """What to do with what a finished run left, to be copied; None: nothing in particular."""

    def new_statistics(self) -> RunStatistics: ...

    def new_progress(self) -> ProgressLine: ...
