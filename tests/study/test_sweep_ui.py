"""Pages in a real browser: a sweep's rows and charts in MLflow's UI, and our own pages."""

from __future__ import annotations

import base64
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.runs import completed
from xcloud.show.tables import Page, Table, write_site
from xcloud.tracking.mlflow_store import UI_HOST

FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--remote-debugging-pipe", "--disable-dev-shm-usage", "--window-size=1600,1400"),
]


def chromium() -> str | None:
    """The browser's command, or None where there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


class BrowserPage:
    def __init__(self, write_to: int, read_from: int) -> None:
        self._write_to, self._read_from = write_to, read_from
        self._number, self._rest, self._session = 0, b"", None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def call(self, method: str, timeout_s: float = 60.0, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write_to, json.dumps(message).encode() + b"\0")
        until_s = time.monotonic() + timeout_s
        while True:
            answer = self._answer(until_s)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _answer(self, until_s: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready = select.select([self._read_from], [], [], max(0.0, until_s - time.monotonic()))
            assert ready[0], "Chromium does not answer"
            chunk = os.read(self._read_from, 1 << 20)
            assert chunk, "Chromium has gone"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"]
        return result.get("value")

    def wait_for(self, script: str, seconds: float = 60.0) -> Any:
        """Until the expression is true; returns its value."""
        until_s = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            assert time.monotonic() < until_s, f"never true: {script}"
            time.sleep(0.2)
        return value

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[BrowserPage]:
    """A page in a browser of its own; profile: an empty folder for it."""
    command = chromium()
    assert command is not None
    to_read, we_write = os.pipe()
    we_read, to_write = os.pipe()

    def descriptors() -> None:
        # First out of the way: either may be 3 or 4 itself.
        inputs, outputs = os.dup(to_read), os.dup(to_write)
        os.dup2(inputs, 3)
        os.dup2(outputs, 4)

    process = subprocess.Popen(
        [command, *FLAGS, f"--user-data-dir={profile}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=False,
        preexec_fn=descriptors,
        start_new_session=True,
    )
    os.close(to_read)
    os.close(to_write)
    try:
        yield BrowserPage(we_write, we_read)
    finally:
        os.close(we_write)  # the browser ends with its pipe
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(we_read)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.xdist_group("sweep_ui"),  # one sweep for all of them
    pytest.mark.skipif(chromium() is None, reason="no Chromium here (apt-get install chromium)"),
]
ROOT = Path(__file__).parents[2]
RATE = "compression.forward.svd.rate"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A store with a sweep of two points, and what the sweep said."""
    folder = tmp_path_factory.mktemp("ui")
    command = ["run.py", "--config-dir", "tests/conf", "-m", "+exp=toy"]
    command += ["compression=svd_fp16_int8", f"{RATE}=0.2,0.6", "sweep=seen"]
    command += [f"hydra.sweep.dir={folder}/seen", f"+tracker.root={folder}/mlruns"]
    done = completed(*command, log=folder / "log")
    assert done.returncode == 0, done.stdout
    return folder / "mlruns", done.stdout


@pytest.fixture(scope="module")
def links(sweep: tuple[Path, str]) -> Iterator[dict[str, str]]:
    """What `python -m xcloud ui --sweep seen` prints while it serves."""
    with socket.socket() as probe:
        probe.bind((UI_HOST, 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "xcloud", "ui", "--root", str(sweep[0]), "--port", str(port)]
    server = subprocess.Popen(
        [*command, "--sweep", "seen"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        found: dict[str, str] = {}
        for line in server.stdout:
            if link := re.match(r"\s+(\w+)\s+(http\S+)", line):
                found[link[1]] = link[2]
            if "Ctrl+C" in line:
                break
        yield found
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
        server.stdout.close()


def test_the_printed_links_land_on_the_sweeps_rows_and_charts(
    sweep: tuple[Path, str], links: dict[str, str], tmp_path: Path
) -> None:
    for link in links.values():  # the sweep printed the same, for the usual port
        assert re.sub(r":\d+/", ":5000/", link) in sweep[1]
    with browser(tmp_path / "profile") as page:
        page.open(links["table"])
        page.wait_for("document.body.innerText.includes('2 matching runs')")
        page.wait_for("document.body.innerText.includes('fp16(svd(0.6))+int8 s1')")
        text = page.evaluate("document.body.innerText")
        page.screenshot(tmp_path / "table.png")
        for seen in ("fp16(svd(0.2))+int8 s1", "bleu", "step_time_s", "label"):
            assert seen in text, (seen, text)

        page.open(links["charts"])
        page.wait_for("document.querySelectorAll('.js-plotly-plot').length >= 4")
        text = page.evaluate("document.body.innerText")
        page.screenshot(tmp_path / "charts.png")
        assert "bleu" in text and "2 matching runs" in text, text


def test_a_run_prints_where_it_can_be_compared(sweep: tuple[Path, str]) -> None:
    said = next(sweep[0].parent.glob("seen/*/run.log")).read_text()
    assert "compare at   http://127.0.0.1:5000/#/experiments/" in said
    assert "viewStateShareKey=sweep-seen" in said
    assert "python -m xcloud ui --root" in said


def test_an_unknown_sweep_is_said(sweep: tuple[Path, str]) -> None:
    command = [sys.executable, "-m", "xcloud", "ui", "--root", str(sweep[0]), "--sweep", "other"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert done.returncode == 1 and "No sweep 'other' is recorded" in done.stderr


def test_a_page_of_ours_sorts_by_key_and_fits_a_phone(tmp_path: Path) -> None:
    times = ["1.57 s", "412 ms", "-", "0.21 ms", "450 ± 71 ms"]
    counts = ["1,200", "999", "1e+06", "–", "12 ± 3"]
    table = Table("Runs", pd.DataFrame({"step time": times, "tokens/s": counts}))
    command = f"python run.py {' '.join(f'key{n}=value' for n in range(40))}"
    long = Page("index", "x" * 80, [("Record", "/a/folder" * 20)], command, (), [table])
    index = write_site(long, [], tmp_path)
    column = "[...document.querySelectorAll('tbody tr')].map(r => r.cells[{}].innerText)"
    with browser(tmp_path / "profile") as page:
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=360, height=800, deviceScaleFactor=1, mobile=True,
        )  # fmt: skip
        page.open(index.as_uri())
        page.wait_for("document.querySelectorAll('th button').length == 2")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        for index_of, upwards in (
            (0, ["0.21 ms", "412 ms", "450 ± 71 ms", "1.57 s", "-"]),
            (1, ["12 ± 3", "999", "1,200", "1e+06", "–"]),
        ):
            page.evaluate(f"document.querySelectorAll('th button')[{index_of}].focus()")
            for order in (upwards, [*reversed(upwards[:-1]), upwards[-1]]):
                for kind in ("keyDown", "keyUp"):
                    page.call(
                        "Input.dispatchKeyEvent",
                        type=kind, key="Enter", code="Enter", text="\r", windowsVirtualKeyCode=13,
                    )  # fmt: skip
                assert page.evaluate(column.format(index_of)) == order
