"""What MLflow is given of a run, and where it lies: names of values, points of curves, the store
with its artifacts and pages, and `python -m xcloud ui`, which shows them in the browser with
MLflow's server. Does not log runs.

Curves over steps are `dev/…`, `train/…`, `update/…`, `wall_time/…`, `wan/…`; final values have
plain names (`bleu`, `step_time_s`), so a table of runs shows one value each. MLflow makes a
section of charts of each prefix, in the order of the alphabet, as are the charts in it.

A store is `<root>/mlflow.db` (sqlite) and `<root>/artifacts`, or a tracking server. Artifacts are
addressed relative to the server that shows them (mlflow-artifacts:/), so a project can be moved.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import glob
import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import posixpath
import re
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import ConfigError, RunFailed
from xcloud.base.locks import locked
from xcloud.base.project import project_root, python_command
from xcloud.base.terminal import say, signals_to_stop
from xcloud.base.units import LESS_IS_BETTER
from xcloud.base.wording import check_name
from xcloud.record.events import Event, StepTotals
from xcloud.record.run_record import RunRecord

# where `python -m xcloud ui` serves by default
UI_HOST = "127.0.0.1"
UI_PORT = 5000
COSTS = ("step_time_s", "wan_bytes_per_step")  # beside a score
START_TIMEOUT_S = 120.0  # about 6 s on two idle cores
VIEW_TAG = "mlflow.sharedViewState."
PROCESS_TAG = "xcloud_process"  # which process of which machine records a run
STEPS_PER_ATTEMPT = 10**9  # of MLflow's steps; see final_step
CLOCK_SET_S = 60.0  # by which the start of a process may seem to change while it runs
LOAD = "system/cpu_utilization_percentage"
KIND_TAG = "mlflow.experimentKind"  # without it MLflow shows an experiment as a chat application


def step_metrics(totals: StepTotals) -> dict[str, float]:
    """Return the values of one step for the curves of training."""
    metrics = {"train/loss": totals.loss}  # MLflow's table of metrics has them in this order
    metrics |= {f"wan/bytes_{kind}": num or None for kind, num in totals.sums("sent").items()}
    metrics |= {f"train/{name}": value for name, value in totals.values.items()}
    for kind in ("compute_s", "codec_s", "waiting_s"):
        # A section of its own, after "train", whose first chart then is the loss.
        metrics |= {f"wall_time/{kind}_{cloud}": s for cloud, s in totals.mean_s(kind).items()}
    metrics |= {f"update/{name}": getattr(totals, name) for name in ("grad_norm", "learning_rate")}
    # The time comes last, so once MLflow has it, MLflow has all of the step.
    metrics["train/step_s"] = totals.step_s
    return legal(metrics)


def quality_metrics(event: Event) -> dict[str, float]:
    """Return the values of a split's scores for its curves, from a "quality" event; its step is
    event["step"]."""
    return legal({f"{event['split']}/{name}": value for name, value in event["values"].items()})


def legal_name(name: str) -> str:
    """Return the closest name that MLflow accepts: letters, digits, `_ - . / space`, no path
    tricks."""
    legal = posixpath.normpath(re.sub(r"[^\w\-. /]", "_", name)).strip("/ ")
    return re.sub(r"^\.+", "_", legal)[:250].rstrip("/ ") or "_"  # ".." would be a folder


def legal(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return metrics that are known, by names that MLflow accepts."""
    return {legal_name(name): float(x) for name, x in metrics.items() if x is not None}


class CurvePoint(NamedTuple):
    """One value of a curve, as in MLflow's Metric."""

    key: str
    value: float
    at_ms: int
    step: int


def points_of(metrics: Mapping[str, float], at_s: float, step: int) -> list[CurvePoint]:
    return [
        CurvePoint(key=key, value=value, at_ms=int(1000 * at_s), step=step)
        for key, value in metrics.items()
    ]


def final_step(summary: Mapping[str, Any]) -> int:
    """Return the step at which MLflow has the final values of an attempt. MLflow shows the value
    of the highest step, and a resumed run may end earlier than it had come to before."""
    attempt = int(summary.get("num_resumes") or 0)
    return attempt * STEPS_PER_ATTEMPT + int(summary.get("num_steps") or 0)


def final_values(record: RunRecord, at_s: float) -> list[CurvePoint]:
    """Return the values of a run in a table of runs."""
    return points_of(legal(record.metrics), at_s, final_step(record.summary))


@dataclass
class Thinner:
    """A choice of at most `points` points of a curve of num_steps: of so many steps the smallest,
    the largest and the last value, each at its own step, for a store can only append. Where such a
    bucket ends follows from the number of the step alone, so a run that resumes, or a store that
    comes back, gets the same points again."""

    points: int
    num_steps: int
    _bucket: int = -1
    _curves: dict[str, list[CurvePoint]] = field(default_factory=dict)  # of that bucket

    def feed(self, points: Sequence[CurvePoint]) -> list[CurvePoint]:
        """Take the values of the next step; returns the points that are known by then."""
        # Three points a bucket, and one bucket may be short.
        is_long = self.num_steps > self.points
        width = 3 * self.num_steps // (self.points - 3) + 1 if is_long else 1
        bucket, after = (step // width for step in (points[0].step, points[0].step + 1))
        known = [] if bucket == self._bucket else self.close()
        self._bucket = bucket
        for point in points:
            self._curves.setdefault(point.key, []).append(point)
        return known if bucket == after else known + self.close()

    def close(self) -> list[CurvePoint]:
        """The rest, by step; of the last step in the order in which the values were given."""
        kept = dict.fromkeys(
            point
            for curve in self._curves.values()
            for point in (min(curve, key=_height), max(curve, key=_height), curve[-1])
        )
        self._curves = {}
        return sorted(kept, key=lambda point: point.step)


def _height(point: CurvePoint) -> float:
    """Return the height of a value; not a number counts as the largest, so that it is seen."""
    return math.inf if math.isnan(point.value) else point.value


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


def without_password(text: str) -> str:
    """Return a text without the user and password of any address in it."""
    return re.sub(r"(?<=://)[^/?#\s@]*@", "", text)


def check_no_password(what: str, uri: str | None) -> None:
    """Refuse an address with a user or a password: it would stand in experiment.yaml, in the
    record of the run, and in the links that are printed."""
    if uri is not None and uri != without_password(uri):
        raise ConfigError(
            f"{what} must be an address without user and password, such as "
            f"{without_password(uri)}; give them as MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD in the environment"
        )


@dataclass(frozen=True)
class Store:
    """An experiment in MLflow: in the folder `root`, which `python -m xcloud ui` serves at `port`,
    or on the server at `uri`."""

    root: Path
    experiment: str = "xcloud"
    uri: str | None = None
    port: int = UI_PORT

    @property
    def database(self) -> Path:
        return self.root.absolute() / "mlflow.db"

    @property
    def tracking_uri(self) -> str:
        path = str(self.database).replace("%", "%25").replace("?", "%3F")  # it is unquoted
        return self.uri or f"sqlite:///{path}"

    @property
    def remedy(self) -> str:
        """What to do about an experiment that is deleted."""
        return (
            f"If the experiment {self.experiment!r} was deleted there: restore it "
            f"(MLFLOW_TRACKING_URI={shlex.quote(without_password(self.tracking_uri))} mlflow "
            "experiments restore --experiment-id ID), choose another one with "
            "tracker.experiment=NAME, or record nothing there with tracker=none"
        )

    def check(self) -> None:
        """Raise ConfigError if the store would refuse all of a run: its experiment is deleted, or
        what lies in its place is no store. It asks in a moment, without MLflow; a server that does
        not answer may come back, and is no reason."""
        stage = self._stage_here() if self.uri is None else self._stage_at_server()
        if stage == "deleted":
            raise ConfigError(
                f"MLflow at {without_password(self.tracking_uri)} would refuse all of this run: "
                f"its experiment {self.experiment!r} is deleted. {self.remedy}"
            )

    def _stage_here(self) -> str:
        if not self.database.exists():
            return ""
        ask = "SELECT lifecycle_stage FROM experiments WHERE name = ?"
        try:
            place = f"{self.database.as_uri()}?mode=ro"
            with contextlib.closing(sqlite3.connect(place, uri=True, timeout=1.0)) as database:
                found = database.execute(ask, (self.experiment,)).fetchone()
                of_store = database.execute("SELECT version_num FROM alembic_version").fetchone()
        except sqlite3.DatabaseError as error:
            is_operational = isinstance(error, sqlite3.OperationalError)
            if is_operational and ("locked" in str(error) or "no such table" in str(error)):
                return ""  # another process writes, or MLflow is about to make its tables
            raise ConfigError(
                f"{self.database} is no store of MLflow ({error}): move it away, or choose "
                "another folder with tracker.root=FOLDER"
            ) from None
        # MLflow would try for over a minute, and then name only the number of the schema. Each
        # schema that it knows is a file of its migrations; MLflow itself takes seconds to import.
        package = importlib.util.find_spec("mlflow")
        assert package is not None and package.origin is not None
        known = Path(package.origin).parent / "store" / "db_migrations" / "versions"
        schema = str(of_store[0]) if of_store else ""
        if not any(known.glob(f"{glob.escape(schema)}_*.py")):
            raise ConfigError(
                f"{self.database} was written by another release of MLflow (schema {schema!r}) "
                f"than the installed {importlib.metadata.version('mlflow')}: install a newer "
                "one (pip install -U mlflow), or choose another folder with tracker.root=FOLDER"
            )
        return found[0] if found else ""

    def _stage_at_server(self) -> str:
        named = urllib.parse.urlencode({"experiment_name": self.experiment})
        page = f"{self.tracking_uri.rstrip('/')}/api/2.0/mlflow/experiments/get-by-name?{named}"
        request = urllib.request.Request(page)
        if token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        elif user := os.environ.get("MLFLOW_TRACKING_USERNAME"):
            both = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
            coded = base64.b64encode(both.encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {coded}")
        try:
            with urllib.request.urlopen(request, timeout=5.0) as answer:
                return str(parsed_json(answer.read(10**6))["experiment"]["lifecycle_stage"])
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                raise ConfigError(
                    f"MLflow at {self.tracking_uri} would refuse all of this run: HTTP "
                    f"{error.code}. Give MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, "
                    "or MLFLOW_TRACKING_TOKEN, in the environment"
                ) from None
            return ""
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def client(self) -> Any:
        """An MlflowClient; creates the tables of an empty store."""
        from mlflow import MlflowClient

        return MlflowClient(self.tracking_uri)

    def open(self) -> tuple[Any, str]:
        """A client and the experiment's id; creates both if missing."""
        if self.uri is not None:  # two runs may race; the loser's next attempt finds all there
            return self._opened(None)
        self.artifacts().mkdir(parents=True, exist_ok=True)
        # Without the lock, three of four runs that created the tables concurrently crashed.
        with locked(self.root.absolute() / ".store.lock", wait_s=120.0):
            if not self.database.exists():  # MLflow refuses a store with half of its tables
                new = replace(self, root=self.root / ".new")
                shutil.rmtree(new.root, ignore_errors=True)
                new.root.mkdir()
                new.client()
                new.database.rename(self.database)
                new.root.rmdir()
            return self._opened("mlflow-artifacts:/")

    def _opened(self, place: str | None) -> tuple[Any, str]:
        client = self.client()
        experiment = client.get_experiment_by_name(self.experiment)
        if experiment is None:
            made = client.create_experiment(self.experiment, place)
            experiment = client.get_experiment(made)
        if VIEW_TAG + view_of(None) not in experiment.tags:
            columns = ("accuracy", "bleu", "f1", "perplexity", "reward_accuracy", *COSTS)
            show_first(client, experiment_id=experiment.experiment_id, metrics=columns)
        if KIND_TAG not in experiment.tags:
            kind = "custom_model_development"
            client.set_experiment_tag(experiment.experiment_id, KIND_TAG, kind)
        return client, str(experiment.experiment_id)

    def artifacts(self, run_id: str = "") -> Path:
        """The folder of all runs, or of one, in a store on this machine."""
        folder = self.root.absolute() / "artifacts"
        return folder / run_id / "artifacts" if run_id else folder

    def keep(self, client: Any, run_id: str, path: Path) -> None:
        """Log a file. Raises OSError if it cannot be read."""
        if self.uri is not None:
            client.log_artifact(run_id, str(path))
        else:
            self.artifacts(run_id).mkdir(parents=True, exist_ok=True)
            kept = self.artifacts(run_id) / path.name
            if kept.is_symlink():  # into which the copy would be written
                kept.unlink()
            shutil.copyfile(path, kept)

    def end_lost_runs(self, client: Any, experiment_id: str) -> None:
        """End the runs that MLflow still shows as running although the process of this machine
        that recorded them is gone, as after a SIGKILL."""
        runs = client.search_runs(
            [experiment_id], f"attributes.status = 'RUNNING' AND tags.{PROCESS_TAG} LIKE '%'"
        )
        for run in runs:
            if not _is_gone(run.data.tags.get(PROCESS_TAG, "")):
                continue
            key = run.info.run_id
            loads = client.get_metric_history(key, LOAD)
            at_ms = max([run.info.start_time, *(load.timestamp for load in loads)])
            client.set_tag(key, "status", "lost")
            client.set_tag(
                key, "cause",
                "its process is gone and did not write how it ended: it was killed, or the "
                "machine went down. python -m xcloud status RUN says how to go on",
            )  # fmt: skip
            client.set_terminated(key, "FAILED", at_ms)

    def show_sweep(
        self, sweep: str, metrics: Sequence[str], params: Sequence[str], files: Sequence[Path]
    ) -> Iterator[str]:
        """Prepare a sweep's page; yields lines with its links. files: its tables and pictures,
        logged to a run of their own, reused every time, which is not listed among the sweep's."""
        client, key = self.open()
        show_first(client, experiment_id=key, metrics=metrics, params=params, sweep=sweep)
        yield f"MLflow table   {self.runs(key, sweep=sweep)}"
        yield f"MLflow charts  {self.charts(key, sweep=sweep)}"
        if files:
            mark = {"report_of_sweep": sweep}
            name = f"report of sweep {sweep}"
            runs = client.search_runs(
                [key], _of_sweep(sweep, tag="report_of_sweep"), max_results=1
            )
            run = runs[0] if runs else client.create_run(key, tags=mark, run_name=name)
            for path in files:
                self.keep(client, run.info.run_id, path)
            client.set_terminated(run.info.run_id)
            yield f"MLflow report  {self.page(key, path=f'runs/{run.info.run_id}/artifacts')}"
        if self.uri is None:
            yield f"served by      {ui_command(self.root)} --sweep {sweep}"

    def artifacts_of_sweep(self, sweep: str) -> list[Path]:
        """Artifact folders of the runs with this `sweep` tag, oldest first; downloaded copies if
        the store is a server."""
        chosen = _of_sweep(sweep)
        if self.uri is None and not self.database.exists():
            return []
        client = self.client()
        experiment = client.get_experiment_by_name(self.experiment)
        keys = [experiment.experiment_id] if experiment else []
        order = ["attributes.start_time ASC"]
        runs = client.search_runs(keys, chosen, order_by=order)
        if self.uri is None:
            return [self.artifacts(run.info.run_id) for run in runs]
        return [Path(client.download_artifacts(run.info.run_id, "")) for run in runs]

    def page(self, experiment_id: str, path: str) -> str:
        """A link. Without workflowType MLflow opens its page for chat applications."""
        server = (self.uri or f"http://{UI_HOST}:{self.port}").rstrip("/")
        return f"{server}/#/experiments/{experiment_id}/{path}?workflowType=machine_learning"

    def runs(self, experiment_id: str, sweep: str | None = None) -> str:
        """A link to the table of all runs, or of a sweep's."""
        return self.page(experiment_id, path="runs") + f"&viewStateShareKey={view_of(sweep)}"

    def charts(self, experiment_id: str, sweep: str | None = None) -> str:
        return self.runs(experiment_id, sweep=sweep) + "&compareRunsMode=CHART"


def this_process() -> str:
    """Return the value of PROCESS_TAG for this process: its machine, its number and since when it
    runs."""
    return f"{_machine()} {os.getpid()} {psutil.Process().create_time():.0f}"


def _is_gone(process: str) -> bool:
    """Return whether a process of this machine has ended. None of another machine has, as it
    cannot be asked, and nobody knows of a text that is not this_process()'s."""
    machine, *found = process.rsplit(" ", 2)
    if machine != _machine():
        return False
    try:
        number, since_s = found
        started_s = psutil.Process(int(number)).create_time()
        return bool(abs(started_s - float(since_s)) > CLOCK_SET_S)
    except psutil.NoSuchProcess:
        return True
    except (ValueError, psutil.AccessDenied):
        return False


def _machine() -> str:
    """Name what tells apart processes of equal numbers: the host, and of a container its own
    numbering."""
    numbering = ""
    with contextlib.suppress(OSError):
        numbering = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {numbering}"


def _of_sweep(sweep: str | None, tag: str = "sweep") -> str:
    """Return MLflow's filter for the runs of a sweep, or for all.

    Raises ConfigError for what is no name of a sweep: a quote would end the filter.
    """
    if not sweep:
        return ""
    check_name("sweep", name=sweep)
    return f"tags.{tag} = '{sweep}'"


def view_of(sweep: str | None) -> str:
    return f"sweep-{sweep}" if sweep else "xcloud"


def show_first(
    client: Any,
    experiment_id: str,
    metrics: Sequence[str],
    params: Sequence[str] = (),
    sweep: str | None = None,
) -> None:
    """Make Store.runs show these columns, best first by the first of them; of a sweep only its
    runs. MLflow shows no figure in its table of runs until columns are selected by hand, and has
    no call for that: this is the tag that its "share" button sets, with the least in it."""
    state = {
        "searchFilter": _of_sweep(sweep),
        "orderByKey": f"metrics.`{metrics[0]}`" if sweep else "attributes.start_time",
        "orderByAsc": bool(sweep) and metrics[0] in LESS_IS_BETTER,
        "selectedColumns": [f"params.`{name}`" for name in params]
        + [f"metrics.`{name}`" for name in metrics],
    }
    client.set_experiment_tag(experiment_id, VIEW_TAG + view_of(sweep), json.dumps(state))


def ui_command(root: Path) -> str:
    """The command that serves the store in the folder `root`."""
    is_usual = root == project_root() / "mlruns"
    return "python -m xcloud ui" + ("" if is_usual else f" --root {root}")


def main(arguments: Sequence[str] | None = None) -> int:
    about = "Show the recorded runs in the browser (MLflow)."
    parser = argparse.ArgumentParser(prog="python -m xcloud ui", description=about)
    parser.add_argument("--port", type=int, default=UI_PORT)
    parser.add_argument("--root", default="mlruns", help="folder of mlflow.db (tracker.root)")
    parser.add_argument("--sweep", help="print the links of this sweep only")
    given = parser.parse_args(arguments)
    store = Store(root=project_root() / given.root, port=given.port)
    if not store.database.exists():
        why = f"{store.database} does not exist; for another folder use --root."
        raise ConfigError(f"No runs are recorded yet: {why}")
    try:
        socket.create_server((UI_HOST, store.port)).close()
    except OSError:
        other = f"choose another: --port {store.port + 1}"
        raise ConfigError(f"Port {store.port} is in use; {other}") from None
    stops = signals_to_stop()
    for number in stops:
        signal.signal(number, signal.default_int_handler)  # KeyboardInterrupt
    prepare_environment()
    command = python_command("mlflow", "server", "--host", UI_HOST, "--workers", "1")
    command += ["--port", str(store.port), "--backend-store-uri", store.tracking_uri]
    command += ["--artifacts-destination", store.artifacts().as_uri()]
    own = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONSAFEPATH": "1"}
    log_file = store.root / "ui.log"
    with log_file.open("w") as log:
        # A session of its own: Ctrl+C reaches only us, and we end its whole process group.
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            cwd=store.root, env=own, start_new_session=True,
        )  # fmt: skip
    try:
        say("Starting MLflow's server ...")
        lines = list(links(store, sweep=given.sweep))  # imports MLflow while the server does
        if not lines:
            what = f"sweep {given.sweep!r}" if given.sweep else "run"
            raise ConfigError(f"No {what} is recorded in {store.database}.")
        if not _answers(server, port=store.port):
            end = "\n".join(log_file.read_text().splitlines()[-20:])
            raise RunFailed(f"It did not start; the end of {log_file}:\n{end}")
        say("\n".join([*lines, "Ctrl+C ends it."]))
        return server.wait()
    except KeyboardInterrupt:
        say("\nStopping.")
        return 0
    finally:
        for number in stops:  # a second Ctrl+C must not leave the server running
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(server.pid, number)
                server.wait(10.0)


def links(store: Store, sweep: str | None = None) -> Iterator[str]:
    """For each experiment with a run: links to its table of runs, to charts and to its models;
    then to table and charts of its five latest sweeps. Or those of one sweep."""
    client = store.client()
    for experiment in client.search_experiments(order_by=["creation_time ASC"]):
        key = experiment.experiment_id
        store.end_lost_runs(client, experiment_id=key)
        chosen = _of_sweep(sweep)
        runs = client.search_runs([key], chosen, max_results=1000)  # the latest first
        if runs and not sweep:
            yield f"{experiment.name}:"
            yield f"  runs     {store.runs(key)}"
            yield f"  charts   {store.charts(key)}"
            yield f"  models   {store.page(key, path='models')}"
        sweeps = dict.fromkeys(run.data.tags["sweep"] for run in runs if "sweep" in run.data.tags)
        for name in reversed(list(sweeps)[:5]):
            yield f"sweep {name}:"
            yield f"  table    {store.runs(key, sweep=name)}"
            yield f"  charts   {store.charts(key, sweep=name)}"


def _answers(server: subprocess.Popen[bytes], port: int) -> bool:
    page = f"http://{UI_HOST}:{port}/health"
    until_s = time.monotonic() + START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < until_s:
        with contextlib.suppress(OSError), urllib.request.urlopen(page, timeout=5):
            return True
        time.sleep(0.2)
    return False
