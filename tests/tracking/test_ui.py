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

import pytest

from tests.sweep_runs import blank_store
from xcloud.base.errors import ConfigError
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
