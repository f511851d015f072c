"""Copy a run to MLflow: one flat MLflow run for all ranks, filled from the run's events.jsonl.
What is logged, and under which names, comes from tracked_values.py, and how many points of a curve
from thinning.py.

A tracker never delays or ends training. A background thread imports MLflow, opens the store and
sends; it reads the event file itself, and that file is the only backlog. While the store is down
the thread stops reading; once the store answers again it resumes with the first event that has
not arrived. There is one warning; what MLflow still lacks at the end of the run is listed in
`Recorded.missing` and remains in events.jsonl and summary.json.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from xcloud.base.checks import check_int, check_number
from xcloud.base.errors import ConfigError
from xcloud.base.project import project_root
from xcloud.record.mlflow_sender import Sender, TrackedRun, points_of
from xcloud.record.mlflow_store import Store, prepare_environment
from xcloud.record.tracked_values import (
    final_metrics,
)

Status = Literal["finished", "failed", "stopped"]

MLFLOW_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
MIN_POINTS = 500


@dataclass(frozen=True)
class Recorded:
    """Where a run was recorded.

    run_id, experiment_id: MLflow's; None and "" if the store has never answered. uri: of the
    tracking server; None for a store in the folder `root`. missing: a description of what MLflow
    lacks; empty if everything has arrived.
    """

    run_id: str | None
    experiment_id: str
    uri: str | None
    root: str
    sweep: str | None
    missing: str


class Tracker(Protocol):
    """start → artifact … → finish → recorded, from one thread; nothing raises after start."""

    def start(self, run: TrackedRun) -> None: ...
    def artifact(self, path: Path) -> None: ...
    def finish(self, status: Status, summary: Mapping[str, Any]) -> None: ...
    def recorded(self) -> Recorded | None:
        """None if there is no record outside the run folder."""


@dataclass(frozen=True)
class NullTracker:
    """Keep no record outside the run folder."""

    def start(self, run: TrackedRun) -> None:
        pass

    def artifact(self, path: Path) -> None:
        pass

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        pass

    def recorded(self) -> Recorded | None:
        return None


@dataclass
class MlflowTracker:
    """One MLflow run, in `<root>/mlflow.db` and `<root>/artifacts` or on a tracking server.

    Holds only settings until `start`, so that an Experiment with a tracker can be copied and
    pickled.
    """

    root: str = "mlruns"  # relative to the project
    experiment: str = "xcloud"
    uri: str | None = None  # of a tracking server; nothing is kept under root then
    flush_s: float = 1.0  # how often to send
    finish_timeout_s: float = 30.0  # how long `finish` may wait for the store
    points: int = 2000  # of a curve, at most, for all steps of a run

    def __post_init__(self) -> None:
        if not self.root or not self.experiment:
            raise ConfigError("tracker.root and tracker.experiment must not be empty")
        if self.uri is not None and "://" not in self.uri:
            raise ConfigError(
                f"tracker.uri must be the address of a tracking server, such as "
                f"http://host:5000, got {self.uri!r}. For another folder set tracker.root."
            )
        check_number("tracker.flush_s", self.flush_s, 0, 600, above=True)
        check_number("tracker.finish_timeout_s", self.finish_timeout_s, 0, 3600, above=True)
        check_int("tracker.points", self.points, MIN_POINTS, 10**6)
        self._sender: Sender | None = None
        self._sweep: str | None = None

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None until the store has given one."""
        return self._sender.run_id if self._sender else None

    def start(self, run: TrackedRun) -> None:
        assert self._sender is None, "a tracker records one run; make another for the next"
        prepare_environment()
        store = Store(project_root() / self.root, self.experiment, self.uri)
        self._sender = sender = Sender(store, run, self.flush_s, self.points)
        self._sweep = run.tags.get("sweep")
        sender.put("tags", sender.log_tags, run.tags)
        sender.start()

    def artifact(self, path: Path) -> None:
        """Log a file or folder; it must not change until `finish` returns."""
        sender = self._started()
        sender.put(Path(path).name, sender.log_artifact, Path(path).absolute())

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Send the rest and the final values; takes at most `finish_timeout_s`."""
        sender = self._started()
        facts = {key: summary.get(key) for key in ("commit", "profile", "cause")}
        tags = {key: value for key, value in facts.items() if value is not None}
        sender.put("final tags", sender.log_tags, {"status": status, **tags})
        num_steps = int(summary.get("num_steps") or 0)
        final = points_of(final_metrics(summary), time.time(), num_steps)
        sender.put("final values", sender.log_metrics, final)
        sender.close(MLFLOW_STATUS[status], self.finish_timeout_s)

    def recorded(self) -> Recorded | None:
        if (sender := self._sender) is None:
            return None
        return Recorded(
            sender.run_id, sender.experiment_id, self.uri, self.root, self._sweep, sender.missing
        )

    def _started(self) -> Sender:
        assert self._sender is not None, "start() comes first"
        return self._sender
