"""The MLflow store: its location, environment and artifacts, and links to its pages. Does not log
runs.

`<root>/mlflow.db` (sqlite) and `<root>/artifacts`, or a tracking server. MLflow's own defaults
are not relied on: they depend on the working directory and on what older versions left there.
Artifacts are addressed relative to the server that shows them (mlflow-artifacts:/), so a project
can be moved; of a store on this machine they are put where `python -m xcloud ui` serves them.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xcloud.base.project import project_root
from xcloud.base.units import LESS_IS_BETTER

LOCK_TIMEOUT_S = 120.0
REPORT_TAG = "report_of_sweep"
UI_HOST, UI_PORT = "127.0.0.1", 5000  # where `python -m xcloud ui` serves by default
SCORES = ("accuracy", "bleu", "f1", "perplexity")  # columns of the table of all runs
COSTS = ("step_time_s", "wan_bytes_per_step")  # beside a score
ALL_RUNS = "xcloud"  # the view of all runs
VIEW_TAG = "mlflow.sharedViewState."


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

    def open(self) -> tuple[Any, str]:
        """A client and the experiment's id; creates both if missing."""
        from filelock import FileLock

        if self.uri is not None:
            client = self.client()
            return client, self._experiment_id(client)
        self.artifacts.mkdir(parents=True, exist_ok=True)
        # Without the lock, three of four runs that created the tables concurrently crashed.
        with FileLock(self.root.absolute() / ".store.lock", timeout=LOCK_TIMEOUT_S):
            if not self.database.exists():
                # A run may end meanwhile, and MLflow refuses a store with half of its tables.
                new = replace(self, root=self.root / ".new")
                shutil.rmtree(new.root, ignore_errors=True)
                new.root.mkdir()
                new.client()
                new.database.rename(self.database)
                new.root.rmdir()
            client = self.client()
            return client, self._experiment_id(client)

    def _experiment_id(self, client: Any) -> str:
        experiment = client.get_experiment_by_name(self.experiment)
        if experiment is None:
            # On a server two runs may race here; the loser's next attempt finds it.
            place = "mlflow-artifacts:/" if self.uri is None else None
            client.create_experiment(self.experiment, place)
            experiment = client.get_experiment_by_name(self.experiment)
        if experiment.lifecycle_stage != "active":
            raise RuntimeError(
                f"experiment {self.experiment!r} was deleted in MLflow; restore it with "
                f"MLFLOW_TRACKING_URI={self.tracking_uri} mlflow experiments restore "
                f"--experiment-id {experiment.experiment_id}, or choose another tracker.experiment"
            )
        if VIEW_TAG + ALL_RUNS not in experiment.tags:
            show_first(client, experiment.experiment_id, ALL_RUNS, (*SCORES, *COSTS))
        return str(experiment.experiment_id)

    def keep(self, client: Any, run_id: str, path: Path) -> None:
        """Log a file, or a folder under its own name. Raises OSError if it cannot be read."""
        if self.uri is not None and path.is_dir():
            client.log_artifacts(run_id, str(path), path.name)
        elif self.uri is not None:
            client.log_artifact(run_id, str(path))
        elif path.is_dir():
            shutil.copytree(path, self._folder(run_id) / path.name, dirs_exist_ok=True)
        else:
            self._folder(run_id).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self._folder(run_id) / path.name)

    def _folder(self, run_id: str) -> Path:
        return self.artifacts / run_id / "artifacts"

    def keep_report(self, sweep: str, paths: Sequence[Path]) -> str:
        """Log a sweep's tables and pictures to a run of their own, reused every time; returns its
        id. It has a different tag from the sweep's runs, so it is not listed among them."""
        client, experiment_id = self.open()
        runs = client.search_runs([experiment_id], f"tags.{REPORT_TAG} = '{sweep}'", max_results=1)
        run = runs[0] if runs else client.create_run(
            experiment_id, tags={REPORT_TAG: sweep}, run_name=f"report of sweep {sweep}"
        )  # fmt: skip
        for path in paths:
            self.keep(client, run.info.run_id, path)
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
            return [self._folder(run_id) for run_id in ids]
        from mlflow.artifacts import download_artifacts

        return [Path(download_artifacts(run_id=one, tracking_uri=self.uri)) for one in ids]

    def pages(self, experiment_id: str) -> Pages:
        return Pages(self.uri or f"http://{UI_HOST}:{UI_PORT}", experiment_id)


@dataclass(frozen=True)
class Pages:
    """Links to what a server shows of an experiment. Without workflowType MLflow opens its page
    for chat applications, with a pop-up."""

    server: str
    experiment_id: str

    def _page(self, path: str) -> str:
        server = self.server.rstrip("/")
        return f"{server}/#/experiments/{self.experiment_id}/{path}?workflowType=machine_learning"

    def runs(self, view: str = ALL_RUNS) -> str:
        return self._page("runs") + f"&viewStateShareKey={view}"

    def charts(self, view: str = ALL_RUNS) -> str:
        return self.runs(view) + "&compareRunsMode=CHART"

    @property
    def models(self) -> str:
        """Finished models, with scores, step time and bytes."""
        return self._page("models")

    def artifacts(self, run_id: str) -> str:
        return self._page(f"runs/{run_id}/artifacts")


def view_of_sweep(sweep: str) -> str:
    return f"sweep-{sweep}"


def show_first(
    client: Any,
    experiment_id: str,
    view: str,
    metrics: Sequence[str],
    params: Sequence[str] = (),
    sweep: str | None = None,
) -> None:
    """Make Pages.runs(view) show these columns, best first by the first of them; of a sweep only
    its runs. MLflow shows no figure in its table of runs until columns are selected by hand, and
    has no call for that: this is the tag that its "share" button sets, with the least in it."""
    state = {
        "searchFilter": f"tags.sweep = '{sweep}'" if sweep else "",
        "orderByKey": f"metrics.`{metrics[0]}`" if sweep else "attributes.start_time",
        "orderByAsc": bool(sweep) and metrics[0] in LESS_IS_BETTER,
        "selectedColumns": [f"params.`{name}`" for name in params]
        + [f"metrics.`{name}`" for name in metrics],
    }
    client.set_experiment_tag(experiment_id, VIEW_TAG + view, json.dumps(state))


def ui_command(root: Path) -> str:
    """The command that serves the store in the folder `root`."""
    is_usual = root == project_root() / "mlruns"
    return "python -m xcloud ui" + ("" if is_usual else f" --root {root}")
