"""`python -m xcloud ui`: show the recorded runs in the browser, with MLflow's server.

Plain `mlflow ui` would open an empty mlflow.db in the working directory, look for artifacts
there, start 14 processes, and show experiments on a page made for chat applications.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from xcloud.base.project import project_root
from xcloud.record.mlflow_store import (
    UI_HOST,
    UI_PORT,
    Pages,
    Store,
    prepare_environment,
    view_of_sweep,
)

LATEST_SWEEPS = 5  # to print links of
LATEST_RUNS = 1000  # to search for them
START_TIMEOUT_S = 120.0  # about 6 s on two idle cores
STOP_TIMEOUT_S = 10.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m xcloud ui", description=__doc__)
    parser.add_argument("--port", type=int, default=UI_PORT)
    parser.add_argument("--root", default="mlruns", help="folder of mlflow.db (tracker.root)")
    parser.add_argument("--sweep", help="print the links of this sweep only")
    settings = parser.parse_args(arguments)

    store, port = Store(project_root() / settings.root), settings.port
    if not store.database.exists():
        return _refuse(
            f"No runs are recorded yet: {store.database} does not exist. A run with "
            "tracker=mlflow makes it; for another folder use --root."
        )
    if not _is_free(port):
        return _refuse(f"Port {port} is in use; choose another: --port {port + 1}")
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler)  # KeyboardInterrupt
    return _serve(store, port, settings.sweep)


def _refuse(why: str) -> int:
    print(why, file=sys.stderr)
    return 1


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
            return _refuse(f"No {what} is recorded in {store.database}.")
        if not _answers(server, port):
            end = "\n".join(server_log.read_text().splitlines()[-20:])
            return _refuse(f"It did not start; the end of {server_log}:\n{end}")
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
