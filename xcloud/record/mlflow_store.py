"""The MLflow store: its location, environment, artifacts, and the prepared views of its pages.
Does not log runs.

`<root>/mlflow.db` (sqlite) and `<root>/artifacts`, or a tracking server. MLflow's own defaults
are not relied on: they depend on the working directory and on what older versions left there.

MLflow's table of runs shows no metrics until columns are selected by hand, and MLflow has no API
for that. A view stored in an experiment tag does it; the link's viewStateShareKey names it. That
is what the UI's "share" button writes; the format is private to MLflow 3.17.
"""

import json
import logging
import os
import sqlite3
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xcloud.base.project import project_root
from xcloud.base.units import LESS_IS_BETTER

LOCK_TIMEOUT_S = 120.0
REPORT_TAG = "report_of_sweep"

UI_HOST, UI_PORT = "127.0.0.1", 5000  # where `python -m xcloud ui` serves by default
VIEW_KEY = "xcloud"  # of the view of all runs
VIEW_METRICS = ("accuracy", "bleu", "f1", "perplexity", "step_time_s", "wan_bytes_per_step")
COSTS = ("step_time_s", "wan_bytes_per_step")
FIGURES, PARALLEL = "figures", "parallel"  # sections of charts

log = logging.getLogger(__name__)


def prepare_environment() -> None:
    """Set MLflow's environment variables; call before the first `import mlflow`."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    # Left over from another tool, it would make our run write into that tool's run.
    os.environ.pop("MLFLOW_RUN_ID", None)
    # MLflow's defaults for a server that is down: eight attempts of two minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    # MLflow 3.17 uses a loader that SQLAlchemy 2.1 will drop; users cannot fix that.
    warnings.filterwarnings("ignore", "The ``noload`` loader strategy", DeprecationWarning)
    # It logs the creation of tables at INFO, in the middle of the progress line.
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
        path = str(self.database).replace("%", "%25").replace("?", "%3F")  # it is unquoted
        return self.uri or f"sqlite:///{path}"

    def client(self) -> Any:
        """An MlflowClient; creates the tables of an empty store."""
        from mlflow import MlflowClient

        return MlflowClient(self.tracking_uri)

    @property
    def server(self) -> str:
        """Where it is shown."""
        return self.uri or f"http://{UI_HOST}:{UI_PORT}"

    def open(self) -> tuple[Any, str]:
        """A client and the experiment's id; creates both if missing, and in a store on this
        machine the view of all runs."""
        from filelock import FileLock

        if self.uri is not None:
            client = self.client()
            return client, self._experiment_id(client, artifact_location=None)
        self.artifacts.mkdir(parents=True, exist_ok=True)
        # Without the lock, three of four runs that created the tables concurrently crashed.
        with FileLock(self.root.absolute() / ".store.lock", timeout=LOCK_TIMEOUT_S):
            try:
                self.follow_move()
            except sqlite3.Error as error:  # Another MLflow's tables; logging may work.
                log.warning("could not look for moved artifacts in %s: %s", self.database, error)
            client = self.client()
            experiment_id = self._experiment_id(client, self.artifacts.as_uri())
            try:
                view = json.dumps(prepared_view())
                client.set_experiment_tag(experiment_id, view_tag(VIEW_KEY), view)
            except Exception as error:  # A view is not worth a run.
                log.debug("could not prepare the view of runs: %s", error)
            return client, experiment_id

    def write_view(self, key: str, view: Mapping[str, object]) -> str:
        """Keep a view of the runs under `key`, for page(); returns the experiment's id."""
        client, experiment_id = self.open()
        client.set_experiment_tag(experiment_id, view_tag(key), json.dumps(view))
        return experiment_id

    def keep_report(self, sweep: str, paths: Sequence[Path]) -> str:
        """Log a sweep's tables and pictures to a run of their own, reused every time; returns its
        id. It has a different tag from the sweep's runs, so it is not listed among them."""
        client, experiment_id = self.open()
        runs = client.search_runs([experiment_id], f"tags.{REPORT_TAG} = '{sweep}'", max_results=1)
        run = runs[0] if runs else client.create_run(
            experiment_id, tags={REPORT_TAG: sweep}, run_name=f"report of sweep {sweep}"
        )  # fmt: skip
        for path in paths:
            client.log_artifact(run.info.run_id, str(path))
        client.set_terminated(run.info.run_id)
        return str(run.info.run_id)

    def artifacts_of_sweep(self, sweep: str) -> list[Path]:
        """Artifact folders of the runs with this `sweep` tag, oldest first; downloaded copies if
        the store is a server."""
        if self.uri is None and not self.database.exists():
            return []
        client = self.client()
        experiment = client.get_experiment_by_name(self.experiment)
        runs = client.search_runs(
            [experiment.experiment_id] if experiment else [],
            f"tags.sweep = '{sweep}'",
            order_by=["attributes.start_time ASC"],
        )
        ids = [run.info.run_id for run in runs]
        if self.uri is None:
            return [self.artifacts / run_id / "artifacts" for run_id in ids]
        from mlflow.artifacts import download_artifacts

        return [Path(download_artifacts(run_id=one, tracking_uri=self.uri)) for one in ids]

    def follow_move(self) -> None:
        """Update the experiment's artifact location after the project's folder has moved.

        MLflow stores absolute paths: without this, artifacts of older runs are lost and
        new ones go to the old folder (mlflow/mlflow#3144). MLflow has no API for it, so this
        writes to MLflow's tables.
        """
        if not self.database.exists():
            return
        new = self.artifacts.as_uri()
        with closing(sqlite3.connect(self.database, timeout=30)) as database, database:
            row = database.execute(
                "SELECT experiment_id, artifact_location FROM experiments WHERE name = ?",
                (self.experiment,),
            ).fetchone()
            if row is None or row[1] == new:
                return
            key, old = row
            database.execute(
                "UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?", (new, key)
            )
            database.execute(
                "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?) "
                "WHERE experiment_id = ? AND substr(artifact_uri, 1, ?) = ?",
                (new, len(old) + 1, key, len(old), old),
            )

    def _experiment_id(self, client: Any, artifact_location: str | None) -> str:
        experiment = client.get_experiment_by_name(self.experiment)
        if experiment is None:
            # On a server two runs may race here; the loser's next attempt finds it.
            return str(client.create_experiment(self.experiment, artifact_location))
        if experiment.lifecycle_stage != "active":
            raise RuntimeError(
                f"experiment {self.experiment!r} was deleted in MLflow; restore it with "
                f"MLFLOW_TRACKING_URI={self.tracking_uri} mlflow experiments restore "
                f"--experiment-id {experiment.experiment_id}, or choose another tracker.experiment"
            )
        return str(experiment.experiment_id)


def view_tag(key: str) -> str:
    """The experiment tag under which MLflow looks up a view."""
    return f"mlflow.sharedViewState.{key}"


def sweep_key(sweep: str) -> str:
    return f"sweep-{sweep}"


def page(server: str, experiment_id: str, key: str | None = None, *, charts: bool = False) -> str:
    """Link to the runs of an experiment, shown with the view `key`.

    Without workflowType MLflow opens its page for chat applications, with a pop-up.
    """
    link = f"{server.rstrip('/')}/#/experiments/{experiment_id}/runs"
    link += "?workflowType=machine_learning"
    link += "&compareRunsMode=CHART" if charts else ""
    return link + (f"&viewStateShareKey={key}" if key else "")


def ui_command(root: Path) -> str:
    """The command that serves the store in the folder `root`."""
    is_usual = root == project_root() / "mlruns"
    return "python -m xcloud ui" + ("" if is_usual else f" --root {root}")


def artifacts_page(server: str, experiment_id: str, run_id: str) -> str:
    run = f"{server.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"
    return f"{run}/artifacts?workflowType=machine_learning"


def prepared_view(
    sweep: str | None = None,
    params: Sequence[str] = (),
    numbers: Sequence[str] = (),
    axes: Sequence[str] = (),
    score: str = "bleu",
) -> dict[str, Any]:
    """A view with metrics as columns, best score first, and charts of the score against its costs.

    sweep: only its runs. params: settings shown as columns. numbers: settings to plot the score
    against. axes: of the parallel coordinates, which omit a run that lacks one of them.
    """
    # MLflow sorts columns by name: in a sweep show only as many as fit into any window.
    metrics = [score, *COSTS] if sweep else list(dict.fromkeys([score, *VIEW_METRICS]))
    columns = [f"params.`{name}`" for name in params] + [f"metrics.`{name}`" for name in metrics]
    charts = [_scatter({"key": number, "type": "PARAM"}, score) for number in numbers]
    charts += [_scatter({"key": cost, "type": "METRIC"}, score) for cost in COSTS]
    sections = [_section(FIGURES, f"Sweep {sweep}" if sweep else "Quality and cost", columns=2)]
    if axes:
        sections.append(_section(PARALLEL, "All settings and figures", columns=1))
        charts.append(
            {
                "uuid": "parallel coordinates",
                "type": "PARALLEL",
                "selectedParams": list(axes),
                "selectedMetrics": ["compression_ratio", "step_time_s", score],
                **_shown(PARALLEL),
            }
        )
    return {
        "orderByKey": f"metrics.`{score}`",
        "orderByAsc": score in LESS_IS_BETTER,
        "searchFilter": f"tags.sweep = '{sweep}'" if sweep else "",
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": columns if sweep else [*columns, "tags.`sweep`"],
        "runsExpanded": {},
        "runsPinned": [],
        "runsHidden": [],
        "runsHiddenMode": "SHOW_ALL",  # else charts show the first 10
        "groupBy": None,
        "hideEmptyCharts": True,
        "useGroupedValuesInCharts": True,
        "globalLineChartConfig": {},
        "isAccordionReordered": True,
        "compareRunSections": sections,
        "compareRunCharts": charts,
    }


def _scatter(x: dict[str, str], score: str) -> dict[str, Any]:
    return {
        "uuid": f"{score} against {x['key']}",
        "type": "SCATTER",
        "xaxis": x,
        "yaxis": {"key": score, "type": "METRIC"},
        **_shown(FIGURES),
    }


def _shown(section: str) -> dict[str, Any]:
    return {
        "metricSectionId": section,
        "runsCountToCompare": 100,
        "deleted": False,
        "isGenerated": False,
    }


def _section(key: str, name: str, columns: int) -> dict[str, Any]:
    return {
        "uuid": key,
        "name": name,
        "columns": columns,
        "display": True,
        "isReordered": True,
        "deleted": False,
        "isGenerated": False,
    }
