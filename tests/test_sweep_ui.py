"""Pages in a real browser: a sweep's rows and charts in MLflow's UI, and our own pages."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from tests.chromium import browser, chromium
from tests.runs import completed
from xcloud.show.tables import Page, Table, write_site
from xcloud.tracking.mlflow_store import UI_HOST

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.xdist_group("sweep_ui"),  # one sweep for all of them
    pytest.mark.skipif(chromium() is None, reason="no Chromium here (apt-get install chromium)"),
]
ROOT = Path(__file__).parent.parent
RATE = "compression.forward.svd.rate"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A store with a sweep of two points, and what the sweep said."""
    folder = tmp_path_factory.mktemp("ui")
    command = ["run.py", "--config-dir", "tests/conf", "-m", "+exp=toy"]
    command += ["compression=svd_fp16_int8", f"{RATE}=0.2,0.6", "sweep=seen"]
    command += [f"hydra.sweep.dir={folder}/seen", f"tracker.root={folder}/mlruns"]
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
