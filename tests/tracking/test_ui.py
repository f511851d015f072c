"""`python -m xcloud ui` as a user sees it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.sweep_runs import blank_store
from xcloud.base.errors import ConfigError, RunFailed
from xcloud.base.project import project_root
from xcloud.base.terminal import signals_to_stop
from xcloud.tracking import mlflow_store as ui


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind((ui.UI_HOST, 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    try:
        socket.create_server((ui.UI_HOST, port)).close()
    except OSError:
        return False
    return True


def test_says_so_when_nothing_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"No runs are recorded yet: {tmp_path / 'mlflow.db'}"):
        ui.main(["--root", str(tmp_path)])


def test_says_so_when_the_port_is_taken(tmp_path: Path, port: int) -> None:
    (tmp_path / "mlflow.db").touch()
    with socket.socket() as other:
        other.bind((ui.UI_HOST, port))
        other.listen()
        with pytest.raises(ConfigError, match=f"--port {port + 1}"):
            ui.main(["--root", str(tmp_path), "--port", str(port)])


@pytest.mark.slow
@pytest.mark.nightly
def test_serves_the_store_and_ends_cleanly(tmp_path: Path, port: int) -> None:
    client, experiment_id = blank_store(tmp_path).open()
    client.create_run(experiment_id, run_name="a run")
    command = [sys.executable, "-m", "xcloud", "ui", "--root", str(tmp_path), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "Ctrl+C" in line:
                break
        page = f"http://{ui.UI_HOST}:{port}"
        with urllib.request.urlopen(page, timeout=60) as answer:
            assert answer.status == 200
        links = re.findall(r"http\S+", "".join(lines))
        assert len(links) == 3
        start = f"{page}/#/experiments/{experiment_id}"
        runs = f"{start}/runs?workflowType=machine_learning&viewStateShareKey=xcloud"
        models = f"{start}/models?workflowType=machine_learning"
        assert links == [runs, f"{runs}&compareRunsMode=CHART", models]

        process.send_signal(signal.SIGTERM)  # SIGINT: test_sweep_ui.py
        assert process.wait(60) == 0
        until_s = time.monotonic() + 60
        while not _is_free(port):
            assert time.monotonic() < until_s, "the server outlived the command"
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
            process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


class Server:
    """A stand-in for MLflow's server, which writes and ends as it is told."""

    def __init__(self, command: list[str], stdout: Any, **given: Any) -> None:
        self.pid = 4711
        self.command = command
        self.given = given
        self.waits: list[float] = []
        stdout.write("line\n" * 20 + "no port\n")

    def poll(self) -> int:
        return 1

    def wait(self, *within_s: float) -> int:
        self.waits += within_s
        return 7


@pytest.mark.parametrize("case", ["serves", "dies", "interrupted", "no sweep", "no run"])
def test_the_server_gets_the_folder_of_the_store_and_ends_with_the_command(
    case: str,
    tmp_path: Path,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mlflow.db").touch()
    started: list[Server] = []
    signals: list[Any] = []
    monkeypatch.setattr(
        ui.subprocess,
        "Popen",
        lambda *of, **given: started.append(Server(*of, **given)) or started[0],
    )
    monkeypatch.setattr(ui, "prepare_environment", lambda: None)
    monkeypatch.setattr(ui.os, "killpg", lambda *of: signals.append(of))
    monkeypatch.setattr(ui.signal, "signal", lambda *of: signals.append(of))
    monkeypatch.setattr(
        ui, "links", lambda store, sweep: [] if case.startswith("no ") else ["a", "b"]
    )
    if case != "dies":
        monkeypatch.setattr(ui, "_answers", lambda server, port: True)
    if case == "interrupted":
        monkeypatch.setattr(ui, "_answers", Mock(side_effect=KeyboardInterrupt))
    words = ["--root", str(tmp_path), "--port", str(port)]
    words += ["--sweep", "s"] if case == "no sweep" else []
    errors = {
        "dies": (
            RunFailed,
            f"It did not start; the end of {tmp_path}/ui.log:\n" + "line\n" * 19 + "no port",
        ),
        "no sweep": (ConfigError, f"No sweep 's' is recorded in {tmp_path}/mlflow.db."),
        "no run": (ConfigError, f"No run is recorded in {tmp_path}/mlflow.db."),
    }
    if case in errors:
        kind, said = errors[case]
        with pytest.raises(kind) as error:
            ui.main(words)
        assert str(error.value) == said
    else:
        assert ui.main(words) == {"serves": 7, "interrupted": 0}[case]
        last = {"serves": "a\nb\nCtrl+C ends it.\n", "interrupted": "\nStopping.\n"}[case]
        assert capsys.readouterr().out == "Starting MLflow's server ...\n" + last
    (server,) = started
    options = server.command[server.command.index("server") :]
    assert options == [
        "server", "--host", ui.UI_HOST, "--workers", "1", "--port", str(port),
        "--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db",
        "--artifacts-destination", f"file://{tmp_path}/artifacts",
    ]  # fmt: skip
    assert server.given["cwd"] == tmp_path and server.given["start_new_session"]
    assert server.given["env"]["PYTHONSAFEPATH"] == "1"
    assert server.given["env"]["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    stops = [*signals_to_stop()]
    assert signals == [
        *((number, signal.default_int_handler) for number in stops),
        *((number, signal.SIG_IGN) for number in stops),
        (server.pid, signal.SIGTERM), (server.pid, signal.SIGKILL),
    ]  # fmt: skip
    assert server.waits == [10.0, 10.0]


def test_the_command_names_the_folder_of_a_store_that_is_not_the_usual_one() -> None:
    assert ui.ui_command(project_root() / "mlruns") == "python -m xcloud ui"
    assert ui.ui_command(Path("/data/runs")) == "python -m xcloud ui --root /data/runs"


def test_links_of_all_experiments_and_of_the_five_latest_sweeps(tmp_path: Path) -> None:
    tags = [{"sweep": f"s{number // 2}"} for number in reversed(range(14))] + [{}]
    runs = [SimpleNamespace(data=SimpleNamespace(tags=one)) for one in tags]
    found = {"1": runs, "2": [], "3": runs[-1:]}
    client = SimpleNamespace(
        search_experiments=lambda order_by: [
            SimpleNamespace(name=f"e{k}", experiment_id=k) for k in found
        ],
        search_runs=lambda keys, chosen, max_results: found[keys[0]],
    )
    ended: list[str] = []
    store: Any = SimpleNamespace(
        client=lambda: client,
        end_lost_runs=lambda client, experiment_id: ended.append(experiment_id),
        runs=lambda key, sweep=None: f"runs {key} {sweep}",
        charts=lambda key, sweep=None: f"charts {key} {sweep}",
        page=lambda key, path: f"{path} {key}",
    )
    sweeps = [
        line
        for n in range(2, 7)
        for line in (f"sweep s{n}:", f"  table    runs 1 s{n}", f"  charts   charts 1 s{n}")
    ]
    of_all = [
        [
            f"e{k}:",
            f"  runs     runs {k} None",
            f"  charts   charts {k} None",
            f"  models   models {k}",
        ]
        for k in "13"
    ]
    assert list(ui.links(store)) == [*of_all[0], *sweeps, *of_all[1]] and ended == [*"123"]
    assert list(ui.links(store, sweep="s6")) == sweeps, "what the store is asked for"
