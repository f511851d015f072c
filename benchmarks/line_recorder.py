"""Records which tests run which lines, in every process of the tests: for benchmarks/mutations.py.

A folder with a `sitecustomize.py` that calls `start` is put into PYTHONPATH, so that the ranks and
commands that tests start are seen too; pytest names the running test in the environment. As a
plugin of pytest (`-p benchmarks.line_recorder`) it records how long each test takes.

PYTEST_DONT_REWRITE: it is imported before pytest.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

LINES = "XCLOUD_RECORDED_LINES"
"""Variable of the environment: a JSON file {absolute path: [lines]}. Line 0 stands for a call of
any function of the file."""


def start() -> None:
    """Record from now on, if the environment names lines."""
    if path := os.environ.get(LINES):
        recorder = LineRecorder(json.loads(Path(path).read_text(encoding="utf-8")))
        threading.settrace(recorder)
        sys.settrace(recorder)


def output_of(lines: str | Path) -> Path:
    """Return the file of JSON rows: [test, "line", file, line], [test, "took", seconds] of each
    phase, [test, "failed"]."""
    return Path(f"{lines}.rows")


def _write(*row: Any) -> None:
    """Append a row; one write, so that rows of several processes stay whole."""
    with output_of(os.environ[LINES]).open("a", encoding="utf-8") as output:
        output.write(json.dumps(row) + "\n")


def pytest_runtest_logreport(report: Any) -> None:
    _write(report.nodeid, "took", report.duration)
    if report.failed:
        _write(report.nodeid, "failed")


class LineRecorder:
    """A trace function that records the first time that a test runs one of some lines."""

    def __init__(self, lines: dict[str, Iterable[int]]) -> None:
        self.lines = {file: set(lines[file]) for file in lines}
        self._seen = set[tuple[str, str, int]]()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if file == "<string>":  # a method that dataclass wrote
            file = frame.f_globals.get("__file__", "")
        lines = self.lines.get(file)
        if lines is None:
            return None
        if 0 in lines and frame.f_code.co_name != "<module>":
            self._record(file, line=0)
        return self._look_at_line

    def _look_at_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if frame.f_lineno in self.lines.get(file, ()):
            self._record(file, frame.f_lineno)
        return self._look_at_line

    def _record(self, file: str, line: int) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        if test and (test, file, line) not in self._seen:
            self._seen.add((test, file, line))
            _write(test, "line", file, line)
