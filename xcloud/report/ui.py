"""`python -m xcloud ui`: show the recorded runs in the browser, with MLflow's server.

Plain `mlflow ui` would open an empty mlflow.db in the working directory, start 14 processes, and
show experiments on a page made for chat applications.
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
from collections.abc import Sequence
from typing import Any

from xcloud.base.project import project_root
from xcloud.record.mlflow_store import (
    UI_HOST,
    UI_PORT,
    VIEW_KEY,
    Store,
    page,
    prepare_environment,
    sweep_key,
    view_tag,
)

HOST = UI_HOST
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
    store.follow_move()
    return _serve(store, port, settings.sweep)


def _refuse(why: str) -> int:
    print(why, file=sys.stderr)
    return 1


def links(client: Any, port: int) -> list[str]:
    """For each experiment with a run: links to its runs with our columns, to charts of all curves
    and to the plain table; then the latest sweeps. client: an MlflowClient."""
    lines = []
    server = f"http://{HOST}:{port}"
    for experiment in client.search_experiments(order_by=["creation_time ASC"]):
        key = experiment.experiment_id
        if client.search_runs([key], max_results=1):
            lines.append(f"{experiment.name}:")
            lines.append(f"  figures  {page(server, key, VIEW_KEY)}")
            lines.append(f"  charts   {page(server, key, charts=True)}")
            lines.append(f"  all      {page(server, key)}")
    return lines + sweep_links(client, port)


def sweep_links(client: Any, port: int, sweep: str | None = None) -> list[str]:
    """Links to table and charts of one sweep, or of the latest ones. client: an MlflowClient."""
    experiments = {e.experiment_id: e for e in client.search_experiments()}
    latest_first = client.search_runs(
        list(experiments),
        "tags.sweep != ''" if sweep is None else f"tags.sweep = '{sweep}'",
        order_by=["attributes.start_time DESC"],
        max_results=LATEST_RUNS,
    )
    of_runs = ((run.info.experiment_id, run.data.tags["sweep"]) for run in latest_first)
    prepared = [
        (key, name)
        for key, name in dict.fromkeys(of_runs)
        if view_tag(sweep_key(name)) in experiments[key].tags
    ]
    server, lines = f"http://{HOST}:{port}", []
    for key, name in reversed(prepared[:LATEST_SWEEPS]):
        lines.append(f"sweep {name}:")
        lines.append(f"  table    {page(server, key, sweep_key(name))}")
        lines.append(f"  charts   {page(server, key, sweep_key(name), charts=True)}")
    return lines


def _serve(store: Store, port: int, sweep: str | None = None) -> int:
    prepare_environment()
    server_log = store.root / "ui.log"
    command = [sys.executable, "-m", "mlflow", "ui", "--host", HOST, "--port", str(port)]
    command += ["--backend-store-uri", store.tracking_uri, "--workers", "1"]
    command += ["--default-artifact-root", store.artifacts.as_uri()]
    with server_log.open("w") as log:
        # A session of its own: Ctrl+C reaches only us, and we end its whole process group.
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            cwd=store.root, env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            start_new_session=True,
        )  # fmt: skip
    try:
        print("Starting MLflow's server ...", flush=True)
        client = store.client()  # imports MLflow while the server does
        lines = sweep_links(client, port, sweep) if sweep else links(client, port)
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
            with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return True
        time.sleep(0.2)
    return False


def _end(server: subprocess.Popen[bytes]) -> None:
    for number in STOP_SIGNALS:  # a second Ctrl+C must not leave the server running
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            server.wait(STOP_TIMEOUT_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _is_free(port: int) -> bool:
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True
