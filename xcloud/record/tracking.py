"""What keeps a record of a run outside of its folder: the protocol, what it is given, and none.
MLflow's is mlflow_tracker.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from xcloud.base.settings import settings
from xcloud.record.events import StepCollector

if TYPE_CHECKING:
    from xcloud.record.mlflow_store import Store

Status = Literal["finished", "failed", "stopped"]


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is to record.

    params: may be nested; keys are joined by dots. run_dir: where events.jsonl is written. steps:
    a fresh collector of the run's job. num_steps: that are planned.
    """

    name: str
    params: Mapping[str, object]
    tags: Mapping[str, str]
    run_dir: Path
    steps: StepCollector
    num_steps: int


class Recording(Protocol):
    """artifact … → finish → places, from one thread; nothing raises."""

    def artifact(self, path: Path) -> None:
        """Keep a file or folder; it must not change until `finish` returns."""

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None: ...
    def places(self) -> Mapping[str, str]:
        """Where the run was recorded, how to see it, and what the record lacks: label -> text."""


class Tracker(Protocol):
    """Settings; `start` begins the record of a run."""

    @property
    def store(self) -> Store | None:
        """Where runs of a sweep are recorded together, if there is such a place."""

    def start(self, run: TrackedRun) -> Recording: ...


@settings("tracker")
class NullTracker:
    """Keep no record outside the run folder; a Recording, too."""

    store: ClassVar[None] = None

    def start(self, run: TrackedRun) -> NullTracker:
        return self

    def artifact(self, path: Path) -> None:
        pass

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        pass

    def places(self) -> dict[str, str]:
        return {}
