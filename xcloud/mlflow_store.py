"""Where MLflow keeps our runs, and what must be set before it is used. Logs nothing itself.

`<root>/mlflow.db` (sqlite) and `<root>/artifacts`, or a tracking server. MLflow's own defaults
are never relied on: they depend on the working directory and on what older versions left there.
"""

import json
import logging
import os
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOCK_TIMEOUT_S = 120.0

# MLflow's table of runs shows no figure until columns are picked by hand. A view in an experiment
# tag picks them; the link's viewStateShareKey names it. The format is MLflow 3.17's own.
VIEW_KEY = "xcloud"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW_KEY}"
VIEW_METRICS = (
    "bleu",
    "step_time_s",
    "compression_ratio",
    "bubble_ratio",
    "wan_bytes_per_step_forward",
    "wan_bytes_per_step_backward",
    "samples_per_s",
    "final_loss",
)

log = logging.getLogger(__name__)


def prepare_environment() -> None:
    """Set what MLflow reads from the environment; call it before the first `import mlflow`."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    # Left over from another tool, it would make our run write into a foreign one.
    os.environ.pop("MLFLOW_RUN_ID", None)
    # MLflow's own patience with a server that is down, eight tries of two minutes, is not ours.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    # MLflow 3.17 uses a loader that SQLAlchemy 2.1 will drop: nothing that a user could mend.
    warnings.filterwarnings("ignore", "The ``noload`` loader strategy", DeprecationWarning)
    # It tells at INFO that it creates tables, in the middle of the progress line.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)


@dataclass(frozen=True)
class Store:
    """An experiment in MLflow: in the folder `root`, or on the server at `uri`."""

    root: Path
    experiment: str = "xcloud"
    uri: str | None = None

    @property
    def database(self) -> Path:
        return self.root.absolute() / "mlflow.db"

    @property
    def artifacts(self) -> Path:
        return self.root.absolute() / "artifacts"

    @property
    def tracking_uri(self) -> str:
        return self.uri or f"sqlite:///{self.database}"

    def open(self) -> tuple[Any, str]:
        """An MlflowClient and the experiment's id; creates store and experiment when missing."""
        from filelock import FileLock
        from mlflow import MlflowClient

        if self.uri is not None:
            client = MlflowClient(self.uri)
            return client, self._experiment_id(client, artifact_location=None)
        self.artifacts.mkdir(parents=True, exist_ok=True)
        # Of four runs that created the tables at the same time, three crashed.
        with FileLock(self.root.absolute() / ".store.lock", timeout=LOCK_TIMEOUT_S):
            try:
                self.follow_move()
            except sqlite3.Error as error:  # Tables of another MLflow; it may still log.
                log.warning("could not look for moved artifacts in %s: %s", self.database, error)
            client = MlflowClient(self.tracking_uri)
            experiment_id = self._experiment_id(client, self.artifacts.as_uri())
            try:
                client.set_experiment_tag(experiment_id, VIEW_TAG, json.dumps(prepared_view()))
            except Exception as error:  # A view is not worth a run.
                log.debug("could not prepare the view of runs: %s", error)
            return client, experiment_id

    def experiments(self) -> dict[str, str]:
        """id -> name of the experiments in the local store that hold a run."""
        query = (
            "SELECT experiment_id, name FROM experiments WHERE lifecycle_stage = 'active' "
            "AND experiment_id IN (SELECT experiment_id FROM runs) ORDER BY experiment_id"
        )
        with self._connect() as database:
            return {str(key): name for key, name in database.execute(query)}

    def follow_move(self) -> None:
        """Point the experiment at `artifacts` again after the project's folder has moved.

        MLflow stores absolute paths: without this, artifacts of older runs are lost from sight
        and new ones go to the old place (mlflow/mlflow#3144).
        """
        if not self.database.exists():
            return
        new = self.artifacts.as_uri()
        with self._connect() as database:
            found = database.execute(
                "SELECT experiment_id, artifact_location FROM experiments WHERE name = ?",
                (self.experiment,),
            ).fetchone()
            if found is None or found[1] == new:
                return
            key, old = found
            database.execute(
                "UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?", (new, key)
            )
            database.execute(
                "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?) "
                "WHERE experiment_id = ? AND substr(artifact_uri, 1, ?) = ?",
                (new, len(old) + 1, key, len(old), old),
            )

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.database, timeout=30)) as database, database:
            yield database

    def _experiment_id(self, client: Any, artifact_location: str | None) -> str:
        found = client.get_experiment_by_name(self.experiment)
        if found is None:
            # On a server two runs may do this at once; the loser's next try finds it.
            return str(client.create_experiment(self.experiment, artifact_location))
        if found.lifecycle_stage != "active":
            raise RuntimeError(
                f"experiment {self.experiment!r} was deleted in MLflow; restore it with "
                f"MLFLOW_TRACKING_URI={self.tracking_uri} mlflow experiments restore "
                f"--experiment-id {found.experiment_id}, or choose another tracker.experiment"
            )
        return str(found.experiment_id)


def prepared_view() -> dict[str, Any]:
    """The runs with their figures as columns, best BLEU first; BLEU against what it costs."""
    shown = {
        "metricSectionId": "figures",
        "runsCountToCompare": 100,
        "deleted": False,
        "isGenerated": False,
    }
    bleu = {"key": "bleu", "type": "METRIC"}
    scatters = [
        {
            "uuid": f"bleu against {cost}",
            "type": "SCATTER",
            "xaxis": {"key": cost, "type": "METRIC"},
            "yaxis": bleu,
            **shown,
        }
        for cost in ("step_time_s", "compression_ratio")
    ]
    return {
        "orderByKey": "metrics.`bleu`",
        "orderByAsc": False,
        "searchFilter": "",
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": [f"metrics.`{name}`" for name in VIEW_METRICS] + ["tags.`sweep`"],
        "runsExpanded": {},
        "runsPinned": [],
        "runsHidden": [],
        "groupBy": None,
        "hideEmptyCharts": True,
        "useGroupedValuesInCharts": True,
        "globalLineChartConfig": {},
        "isAccordionReordered": True,
        "compareRunSections": [
            {
                "uuid": "figures",
                "name": "Quality and cost",
                "display": True,
                "isReordered": True,
                "deleted": False,
                "isGenerated": False,
            }
        ],
        "compareRunCharts": scatters,
    }
