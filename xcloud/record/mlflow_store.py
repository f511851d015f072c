"""The MLflow store: its location, environment and artifacts, links to its pages, and `python -m
xcloud ui`, which shows them in the browser with MLflow's server. Does not log runs.

`<root>/mlflow.db` (sqlite) and `<root>/artifacts`, or a tracking server. MLflow's own defaults
are not relied on: they depend on the working directory and on what older versions left there.
Artifacts are addressed relative to the server that shows them (mlflow-artifacts:/), so a project
can be moved; of a store on this machine they are put where `python -m xcloud ui` serves them.

Plain `mlflow ui` would open an empty mlflow.db in the working directory, look for artifacts
there, start 14 processes, and show experiments on a page made for chat applications.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xcloud.base.errors import ConfigError, RunFailed
from xcloud.base.project import project_root
from xcloud.base.units import LESS_IS_BETTER

LOCK_TIMEOUT_S = 120.0
REPORT_TAG = "report_of_sweep"
UI_HOST, UI_PORT = "127.0.0.1", 5000  # where `python -m xcloud ui` serves by default
SCORES = ("accuracy", "bleu", "f1", "perplexity")  # columns of the table of all runs
COSTS = ("step_time_s", "wan_bytes_per_step")  # beside a score
ALL_RUNS = "xcloud"  # the view of all runs
LATEST_SWEEPS = 5  # to print links of
LATEST_RUNS = 1000  # to search for them
START_TIMEOUT_S = 120.0  # about 6 s on two idle cores
STOP_TIMEOUT_S = 10.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m xcloud ui", description="Show the recorded runs in the browser (MLflow)."
    )
    parser.add_argument("--port", type=int, default=UI_PORT)
    parser.add_argument("--root", default="mlruns", help="folder of mlflow.db (tracker.root)")
    parser.add_argument("--sweep", help="print the links of this sweep only")
    settings = parser.parse_args(arguments)

    store, port = Store(project_root() / settings.root), settings.port
    if not store.database.exists():
        raise ConfigError(
            f"No runs are recorded yet: {store.database} does not exist. A run with "
            "tracker=mlflow makes it; for another folder use --root."
        )
    if not _is_free(port):
        raise ConfigError(f"Port {port} is in use; choose another: --port {port + 1}")
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler)  # KeyboardInterrupt
    return _serve(store, port, settings.sweep)


def links(client: Any, port: int, sweep: str | None = None) -> Iterator[str]:
    """For each experiment with a run: links to its table of runs, to charts and to its models;
    then to table and charts of the latest sweeps. Or those of one sweep. client: an
    MlflowClient."""
    for experiment in client.search_experiments(order_by=["creation_time ASC"]):
        key = experiment.experiment_id
        pages = Pages(f"http://{UI_HOST}:{port}", key)
        chosen = f"tags.sweep = '{sweep}'" if sweep else ""
        runs = client.search_runs([key], chosen, max_results=LATEST_RUNS)  # the latest first
        if runs and not sweep:
            yield f"{experiment.name}:"
            yield f"  runs     {pages.runs()}"
            yield f"  charts   {pages.charts()}"
            yield f"  models   {pages.models}"
        sweeps = dict.fromkeys(run.data.tags["sweep"] for run in runs if "sweep" in run.data.tags)
        for name in reversed(list(sweeps)[:LATEST_SWEEPS]):
            yield f"sweep {name}:"
            yield f"  table    {pages.runs(view_of_sweep(name))}"
            yield f"  charts   {pages.charts(view_of_sweep(name))}"


def _serve(store: Store, port: int, sweep: str | None) -> int:
    prepare_environment()
    server_log = store.root / "ui.log"
    command = [sys.executable, "-m", "mlflow", "server", "--host", UI_HOST, "--port", str(port)]
    command += ["--backend-store-uri", store.tracking_uri, "--workers", "1"]
    command += ["--artifacts-destination", store.artifacts.as_uri()]
    with server_log.open("w") as log:
        # A session of its own: Ctrl+C reaches only us, and we end its whole process group.
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            cwd=store.root, env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            start_new_session=True,
        )  # fmt: skip
    try:
        print("Starting MLflow's server ...", flush=True)
        lines = list(links(store.client(), port, sweep))  # imports MLflow while the server does
        if not lines:
            what = f"sweep {sweep!r}" if sweep else "run"
            raise ConfigError(f"No {what} is recorded in {store.database}.")
        if not _answers(server, port):
            end = "\n".join(server_log.read_text().splitlines()[-20:])
            raise RunFailed(f"It did not start; the end of {server_log}:\n{end}")
        print("\n".join([*lines, "Ctrl+C ends it."]), flush=True)
        return server.wait()
    except KeyboardInterrupt:
        print("\nStopping.", flush=True)
        return 0
    finally:
        _end(server)


def _answers(server: subprocess.Popen[bytes], port: int) -> bool:
    until_s = time.monotonic() + START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < until_s:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://{UI_HOST}:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return True
        time.sleep(0.2)
    return False


def _end(server: subprocess.Popen[bytes]) -> None:
    for number in STOP_SIGNALS:  # a second Ctrl+C must not leave the server running
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(server.pid, number)
            server.wait(STOP_TIMEOUT_S)


def _is_free(port: int) -> bool:
    try:
        socket.create_server((UI_HOST, port)).close()
    except OSError:
        return False
    return True
