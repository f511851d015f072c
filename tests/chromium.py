"""Headless Chromium over its debugging pipe, for tests that look at a page as a person would.

No driver and no package: commands are JSON, ended by a zero byte, on file descriptors 3 and 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--remote-debugging-pipe", "--disable-dev-shm-usage", "--window-size=1600,1400"),
]


def chromium() -> str | None:
    """The browser's command, or None where there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


class Page:
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
def browser(profile: Path) -> Iterator[Page]:
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
        yield Page(we_write, we_read)
    finally:
        os.close(we_write)  # the browser ends with its pipe
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(we_read)
