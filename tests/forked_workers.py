"""Processes of pytest-xdist that are forked from the one that starts them, which has imported all
tests: it takes 20 seconds of the processor, and each of them would do so. Linux only."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, NoReturn
from unittest import mock

import pytest
from execnet import gateway_io
from execnet.gateway_base import Popen2IO

from tests import warm_ranks

# First what the server of warm ranks does not import: in a fresh environment both compile, side by
# side. The others are what tests import as they run.
LIBRARIES = (
    "mlflow.store.tracking.sqlalchemy_store",
    "sklearn.linear_model",
    "datasets",
    "peft",
    "xcloud.models.protocol_gpt",
)

# A fork has none of the threads that these libraries start.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Worker(warm_ranks.Child):
    """What execnet uses of a Popen."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        super().__init__(pid)
        self.stdin = stdin
        self.stdout = stdout


class ForkedIO(gateway_io.Popen2IOMaster):
    """A connection to a worker that waits already, in place of one that it would start."""

    def __init__(self, args: object, execmodel: Any) -> None:
        self.popen = _waiting.pop()
        Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)


_waiting = list[Worker]()


def start(count: int, files: Iterable[Path]) -> None:
    """Fork before execnet has threads, and let it use these processes."""
    warm_ranks.address()
    with mock.patch.dict(os.environ, ONE_THREAD):
        import_tests(files)
    for _ in range(count):
        _waiting.append(forked())
    gateway_io.Popen2IOMaster = ForkedIO  # type: ignore[misc]


def import_tests(files: Iterable[Path]) -> None:
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.disable()
    for file in files:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collecting it says why
            importlib.import_module(f"tests.{file.parent.name}.{file.stem}")
    gc.freeze()
    gc.enable()


def forked() -> Worker:
    its_stdin, stdin = os.pipe()
    stdout, its_stdout = os.pipe()
    if not (pid := warm_ranks.fork()):
        be_worker(its_stdin, its_stdout, close=(stdin, stdout))
    os.close(its_stdin)
    os.close(its_stdout)
    return Worker(pid, open(stdin, "wb", buffering=0), open(stdout, "rb"))


def be_worker(stdin: int, stdout: int, close: tuple[int, ...]) -> NoReturn:
    """Do what `python -c` does that execnet would have started."""
    try:
        warm_ranks.forget()
        for worker in _waiting:
            worker.stdin.close()
            worker.stdout.close()
        for number in close:
            os.close(number)
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.close(stdin)
        os.close(stdout)
        sys.stdin = open(0, closefd=False)
        sys.stdout = open(1, "w", closefd=False)
        if line := sys.stdin.readline():  # else the process that starts the workers has ended
            exec(eval(line), {"__name__": "__main__"})
    finally:
        os._exit(0)
