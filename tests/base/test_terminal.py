"""What is printed: on any terminal, from anywhere, and what a process sets up for itself."""

import ast
import io
import json
import os
import pty
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from tests.feature_rows import feature_rows
from tests.nightly import first_daily
from tests.runs import ROOT
from xcloud.base.terminal import can_rewrite, is_terminal, printable, say, signals_to_stop
from xcloud.record.run_record import RunRecord
from xcloud.show.display import ProgressLine
from xcloud.show.status import describe
from xcloud.show.tables import (
    Column,
    console_of,
    print_report,
    print_table,
    write_csv,
)

ESCAPES = "\x1b]0;owned\x07 \x9b2J \r over \x08 \u202e txt"
PRINTERS = {"print", "sys.stdout.write", "sys.stderr.write"}


def test_control_characters_are_written_out_and_text_stays() -> None:
    shown = printable(ESCAPES)
    assert shown.isprintable() and "owned" in shown and r"\x1b]0;" in shown
    assert printable("año\n\t日本 🙂") == "año\n\t日本 🙂"


def nodes_where(path: Path, words: set[str]) -> Iterator[ast.AST]:
    """Yield the nodes of a file that has one of these words, and none of any other one."""
    text = path.read_text("utf-8")
    if any(word in text for word in words):
        yield from ast.walk(ast.parse(text))


def test_everything_is_printed_by_one_function() -> None:
    """A print of its own would show the escapes of a file or a peer."""
    own = {"xcloud/base/terminal.py"}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in [*ROOT.glob("xcloud/**/*.py"), ROOT / "run.py"]
        if path.relative_to(ROOT).as_posix() not in own
        for node in nodes_where(path, PRINTERS)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PRINTERS
    ]
    assert found == []


def test_whether_a_stream_is_a_terminal_is_asked_in_one_place() -> None:
    """rich and others take FORCE_COLOR for an answer, and would rewrite lines of a file."""
    own = "xcloud/base/terminal.py"
    asks = {"isatty", "is_terminal", "is_dumb_terminal", "is_interactive"}
    found = {
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for path in [*ROOT.glob("xcloud/**/*.py"), ROOT / "run.py"]
        if path.relative_to(ROOT).as_posix() != own
        for node in nodes_where(path, asks)
        if isinstance(node, ast.Attribute) and node.attr in asks
    }
    assert found == set()


def test_a_terminal_is_what_the_system_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with os.fdopen(ours), os.fdopen(theirs, "w") as terminal:
        assert is_terminal(terminal) and can_rewrite(terminal)
        monkeypatch.setenv("TERM", "dumb")
        assert is_terminal(terminal) and not can_rewrite(terminal)
    assert not is_terminal(terminal), "it has been closed"
    assert not is_terminal(io.StringIO()) and not is_terminal(None)


def shown_by_status(folder: Path) -> str:
    refused = {"event": "refused_reports", "sender": 1, "num": 3, "reason": ESCAPES}
    (folder / "events.jsonl").write_text(json.dumps(refused) + "\n")
    state = {
        "rank": 0, "phase": ESCAPES, "phase_since": 0, "ended": False, "written": 0, "pid": 1,
        "host": "x", "waits_for": [{"rank": 1, "message": ESCAPES, "since": 0}],
    }  # fmt: skip
    (folder / "rank0.state.json").write_text(json.dumps(state))
    return describe(folder)


def shown_by_progress(folder: Path) -> str:
    stream = io.StringIO()
    line = ProgressLine(5, stream=stream)
    for event in (
        {"event": "note", "cloud": ESCAPES, "text": ESCAPES},
        {"event": "start", "cloud": "a", "headline": ESCAPES},
        {"event": "phase", "name": ESCAPES},
        *({key: ESCAPES if key != "event" and isinstance(value, str) else value
           for key, value in event.items()}
          for rows in feature_rows().values() for told in rows.told for event in told.events
          if rows.figure and rows.figure.notice),
        {"event": "resume", "step": 2, "changed": [ESCAPES]},
        {"event": "quality", "split": "test", "step": 5, "values": {ESCAPES: 1.0},
         "samples_text": ESCAPES},
    ):  # fmt: skip
        line.show(event)
    line.close()
    return stream.getvalue()


def shown_by_tables(folder: Path) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=200)
    print_table(console, [Column(ESCAPES)], [[ESCAPES]])
    print_report(
        RunRecord({"name": ESCAPES, "status": "failed", "num_steps": 0, "cause": ESCAPES}),
        {ESCAPES: ESCAPES},
        console,
    )
    return stream.getvalue()


def shown_by_say(folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream := io.StringIO())
        say(ESCAPES)
    return stream.getvalue()


@pytest.mark.parametrize(
    "shown", [shown_by_status, shown_by_progress, shown_by_tables, shown_by_say]
)
def test_nothing_that_came_from_elsewhere_steers_the_terminal(shown, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    text = shown(tmp_path)
    assert "owned" in text
    assert not [mark for mark in text if mark not in "\n\t" and not mark.isprintable()]


def test_a_spreadsheet_computes_nothing_of_a_run(tmp_path: Path) -> None:
    evil = ["=HYPERLINK(1)", "+1+2", "-2+3", "@SUM(1)", "\t=1", " =1", "\n=1"]
    fine = ["int8", "-0.5", "-1.2 MB", "a=1", "-", "", "fp16+int8"]
    table = pd.DataFrame({"=label": [*evil, *fine], "value": -1.5})
    write_csv(table, tmp_path / "new" / "table.csv")
    read = pd.read_csv(tmp_path / "new" / "table.csv", keep_default_na=False)
    assert list(read["'=label"]) == [*(f"'{text}" for text in evil), *fine]
    assert set(read["value"]) == {-1.5}


def test_a_long_cell_stays_one_line_where_output_goes_on_to_a_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A column that wraps on a terminal would cut words in two there."""
    cell = "local_updates: 8% less " * 40
    columns = [Column("next", right=False, wraps=True), Column("step")]
    print_table(console_of(), columns=columns, rows=[[cell, "1 s"]])
    assert cell.strip() in capsys.readouterr().out


def test_a_run_without_a_step_has_no_closing_table() -> None:
    assert RunRecord({"num_steps": 0}).markdown == ""


PROCESS = """
import os, sys
from xcloud.base.terminal import prepare_process, say
prepare_process()
import matplotlib
open("made", "w").close()
say("año → 日本 " + "x" * int(sys.argv[1]))
say("told", error=True)
say(os.get_terminal_size(0) if os.isatty(1) else "no terminal")
"""


def prepared(cwd: Path, *words: str, **more: object) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **more.pop("env", {})}  # type: ignore[dict-item]
    return subprocess.run(
        [sys.executable, "-c", PROCESS, *(words or ["1"])],
        cwd=cwd, env=environment, timeout=60, **more,  # type: ignore[call-overload]
    )  # fmt: skip


@pytest.mark.parametrize("encoding", first_daily(["latin-1", "ascii", "cp1252", "utf-8"], count=2))
def test_what_a_terminal_cannot_show_is_shown_by_its_number(encoding: str, tmp_path: Path) -> None:
    done = prepared(tmp_path, capture_output=True, env={"PYTHONIOENCODING": encoding})
    assert done.returncode == 0, done.stderr
    first = done.stdout.decode(encoding).splitlines()[0]
    assert first == "año → 日本 x".encode(encoding, "backslashreplace").decode(encoding)


@pytest.mark.parametrize(
    "closed", first_daily(["<&- >&- 2>&-", ">&-", "2>&-", ">&- 2>&-"], count=1)
)
def test_closed_streams_are_no_error(closed: str, tmp_path: Path) -> None:
    command = f'exec "$0" -c "$1" 1 {closed}'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, PROCESS],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0
    assert (tmp_path / "made").read_bytes() == b""  # nothing was printed into the next file


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = prepared(tmp_path, "1000000", stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert done.returncode == 0 and done.stderr == b"told\n"


def test_a_terminal_that_has_closed_is_no_error(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    os.close(ours)
    done = prepared(tmp_path, stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert done.returncode == 0


def test_files_are_private_and_pictures_need_no_screen(tmp_path: Path) -> None:
    broken = {"MPLBACKEND": "module://matplotlib_inline.backend_inline_that_is_not_here"}
    assert prepared(tmp_path, capture_output=True, env=broken).returncode == 0
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o600


def test_nohup_keeps_its_meaning() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in signals_to_stop()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in signals_to_stop()
    finally:
        signal.signal(signal.SIGHUP, before)
