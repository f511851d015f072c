"""Ranks without the two seconds of CPU that importing torch takes in each, more than a toy run.

A server (`python -m tests.warm_ranks FD FD`), one for all processes of xdist, has imported what a
rank imports, forks for each rank and runs the rank's command in the child. Environment, log,
signals, exit codes and the end with the parent are as launch.py makes them. Linux only.
Torchrun and the main job start cold, and show the real start. `command` starts any other
python warm, run.py too, for tests of what it does after that: its ranks are then forked from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from xcloud.base.run_folder import LOCK_FILE


class Child:
    """What launch.py uses of a Popen. A subclass says how the process is waited for."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def _ended(self) -> int | None:
        """The exit code, negative for a signal; None while the process goes on."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._ended()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until_s = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if until_s is not None and time.monotonic() >= until_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # its number is not given to another process before that
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork() -> int:
    """os.fork of a process of one thread: what others hold would stay locked in the child. That of
    jemalloc (in pyarrow) begins anew there."""
    others = {*Path("/proc/self/task").iterdir()} - {Path(f"/proc/self/task/{os.getpid()}")}
    names = set()
    for thread in others:
        with contextlib.suppress(OSError):  # it has just ended
            names.add((thread / "comm").read_text().strip())
    assert names <= {"jemalloc_bg_thd"}, f"a fork with threads: {names}"
    return os.fork()


def become(body: Callable[[], object], log: Path, how: int = os.O_APPEND) -> NoReturn:
    """In a child: run `body` in a session of its own, with its output in `log` (how: os.O_APPEND
    or os.O_TRUNC), and end as a Python process does."""
    code = 1
    try:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | how, 0o666)
        for there, here in ((os.open(os.devnull, os.O_RDONLY), 0), (file, 1), (file, 2)):
            os.dup2(there, here)
        body()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


ROOT = Path(__file__).parent.parent
IMPORTED_BY_RANKS = (
    "torch",
    "torch._dynamo",  # by the first optimizer
    "torch.fx.experimental.symbolic_shapes",  # by the first backward pass from a gradient
    "torch.profiler._cupti_monitor",
    "matplotlib.backends.backend_agg",  # by every launcher
    "xcloud.__main__",
    "xcloud.launch.worker",
    "tests.one_way_toy",
    "tests.toy",
)


class WarmRank(Child):
    """A child of the server."""

    def __init__(self, server: Server, pid: int) -> None:
        super().__init__(pid)
        self.server = server

    def _ended(self) -> int | None:
        if self.server.lock.locked():  # as in Popen: a signal's handler may ask amid a question
            return None
        code: int | None = self.server.ask({"poll": self.pid})
        return code


class ServerProcess:
    """A server that ends with the process that started it, or when it is closed."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs, socket.socket(socket.AF_UNIX) as listener:
            listener.bind("")  # Linux chooses an address that is no file
            listener.listen()
            self.address: bytes = listener.getsockname()
            numbers = (theirs.fileno(), listener.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_ranks", *map(str, numbers)],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
                pass_fds=numbers,
                start_new_session=True,
            )

    def leave(self) -> None:
        self._ours.close()

    def close(self) -> None:
        self.leave()
        self._process.wait()


class Server:
    """A connection to `serve`. One request at a time, whichever thread asks."""

    def __init__(self, address: bytes) -> None:
        self.lock = threading.Lock()
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(address)
        self.lines = self.socket.makefile("rw", encoding="utf-8")

    def ask(self, request: dict[str, Any]) -> Any:
        with self.lock:
            self.lines.write(json.dumps(request) + "\n")
            self.lines.flush()
            return json.loads(self.lines.readline())

    def start(
        self, command: list[str], environment: dict[str, str], log: Path, cwd: Path | None = None
    ) -> WarmRank:
        """In place of launch.start_process."""
        where = {"cwd": str(cwd or Path.cwd()), "log": str(log.resolve())}
        pid: int = self.ask({"command": command, "environment": environment, **where})
        return WarmRank(self, pid)

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


_process: ServerProcess | None = None
_server: Server | None = None


def address() -> bytes:
    """Return the address of a server of this process, which is started if there is none."""
    global _process
    _process = _process or ServerProcess()
    return _process.address


def forget() -> None:
    """In a child: leave the server to the process that has started it."""
    global _process
    if _process is not None:
        _process.leave()
        _process = None


def connect(address: bytes) -> None:
    """Let this process use a server that another process has started."""
    global _server
    _server = Server(address)


def server() -> Server:
    if _server is None:
        connect(address())
    assert _server is not None
    return _server


def start(command: list[str], environment: dict[str, str], log: Path) -> WarmRank:
    return server().start(command, environment, log)


def import_first(*names: str) -> None:
    """For runs whose ranks import more than most."""
    server().ask({"import": names})


def close() -> None:
    """Disconnect, and end the server that this process has started, if any."""
    global _process, _server
    if _server is not None:
        _server.close()
        _server = None
    if _process is not None:
        _process.close()
        _process = None


IMPORTED_BY_COMMANDS = (
    "hydra._internal.core_plugins.basic_sweeper",
    "rich.live",
    "xcloud.launch.local",
    "xcloud.planner.planning",
    "xcloud.show.pictures",
    "xcloud.study.report",
    "xcloud.study.runner",
)


def command(*words: str, log: Path, cwd: Path = ROOT, **more: str) -> WarmRank:
    """`python WORDS`, of a file, -c or -m, with stdout and stderr in `log`. more: of its
    environment. Linux only."""
    import_first(*IMPORTED_BY_COMMANDS)
    log.touch()  # before the child opens it, somebody may read it
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **more}
    return server().start([sys.executable, *words], environment, log, cwd)


def serve(owner: socket.socket, listener: socket.socket) -> None:
    """Answer whoever connects until the owner closes."""
    for name in IMPORTED_BY_RANKS:
        importlib.import_module(name)
    importlib.import_module("xcloud.feature_list").all_features()  # imports them
    importlib.import_module("tests.checkout_once").use()
    gc.freeze()
    ready = selectors.DefaultSelector()
    ready.register(owner, selectors.EVENT_READ)
    ready.register(listener, selectors.EVENT_READ)
    while True:
        found = {key.fileobj: key.data for key, _ in ready.select()}
        if owner in found:
            return
        if listener in found:
            connection, _ = listener.accept()
            lines = connection.makefile("rw", encoding="utf-8")
            ready.register(connection, selectors.EVENT_READ, data=lines)
            del found[listener]
        for connection, lines in found.items():
            if line := lines.readline():
                lines.write(json.dumps(answer(json.loads(line), ready)) + "\n")
                lines.flush()
            else:
                ready.unregister(connection)
                lines.close()
                connection.close()


def answer(request: dict[str, Any], ready: selectors.BaseSelector) -> Any:
    if "poll" in request:
        pid, status = os.waitpid(request["poll"], os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None
    if "import" in request:
        names = [importlib.import_module(name).__name__ for name in request["import"]]
        gc.freeze()  # or every child copies it all when it collects
        return names
    if pid := fork():
        return pid
    keys = [*ready.get_map().values()]  # or what they hold is closed by itself
    ready.close()
    for key in keys:
        os.close(key.fd)
    become_process(**request)


def become_process(
    command: list[str], environment: dict[str, str], cwd: str, log: str
) -> NoReturn:
    def body() -> None:
        for number in (
            signal.SIGTERM,
            signal.SIGUSR1,
            signal.SIGHUP,
        ):  # a launcher's child has its handlers
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        own = [] if command[1] == "-P" else [cwd]
        sys.path[:0] = [*own, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        importlib.import_module("torch").set_num_threads(int(environment["OMP_NUM_THREADS"]))
        match command[2 - len(own) :]:
            case ["-m", "xcloud", *words]:
                be_rank(words)
            case ["-m", "xcloud.study.runner", *words]:
                sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # no file, as before
                point = importlib.import_module("xcloud.study.runner")
                be_launcher(["point", *words], lambda: sys.exit(point.main()))
            case ["-m", name, *words]:
                be_launcher([name, *words], lambda: runpy.run_module(name, run_name="__main__"))
            case ["-c", code, *words]:
                be_launcher(["-c", *words], lambda: exec(code, {"__name__": "__main__"}))
            case [file, *words]:
                be_launcher([file, *words], lambda: runpy.run_path(file, run_name="__main__"))

    become(body, Path(log), os.O_TRUNC)


def be_rank(words: list[str]) -> None:
    if words[0] == "join":
        main = importlib.import_module("xcloud.__main__").main
        be_launcher(words, lambda: sys.exit(main(words)))
    if "--parent" in words:
        words[words.index("--parent") + 1] = str(os.getppid())
    elif os.environ.get("RANK") == "0":  # without a launcher it starts the monitor, as its child
        started = SimpleNamespace(Popen=start_later(), TimeoutExpired=subprocess.TimeoutExpired)
        importlib.import_module("xcloud.launch.several_machines").subprocess = started
    sys.exit(importlib.import_module("xcloud.__main__").main(words))


def start_later() -> Callable[..., Child]:
    """In place of one Popen of `python -P -m xcloud`: forked now, while there are no threads."""
    read, write = os.pipe()
    if not (pid := fork()):
        os.close(write)
        with open(read, encoding="utf-8") as line:
            command = line.read()
        if not command:  # the parent has ended
            os._exit(0)
        sys.exit(importlib.import_module("xcloud.__main__").main(json.loads(command)[4:]))
    os.close(read)

    def start(command: list[str], env: dict[str, str]) -> Child:
        with open(write, "w", encoding="utf-8") as line:
            json.dump(command, line)
        return Child(pid)

    return start


def be_launcher(words: list[str], body: Callable[[], object]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with the server, as the server with the tests
    importlib.import_module("xcloud.launch.processes").start_process = fork_rank
    importlib.import_module("matplotlib.figure").Figure.savefig = save_empty
    if "tracker=none" in words:  # else a thread of the sweep may be importing MLflow
        importlib.import_module("xcloud.study.runner").start_point = fork_point
    sys.argv = words
    body()


def save_empty(figure: object, path: Path) -> None:
    """In place of Figure.savefig: drawing takes half a second (test_main_job.py draws)."""
    Path(path).touch()


def fork_rank(
    command: list[str], environment: dict[str, str], log: Path, speaks: bool = False
) -> Child:
    """In place of launch.start_process, in a launcher that is a child of the server. What a rank
    that speaks prints is in its log, too."""
    if pid := fork():
        return Child(pid)
    become_process(command, environment, os.getcwd(), str(log))


def close_locks() -> None:
    """Close the locks that this process has from its parent, as starting a program would: another
    thread of the parent may have held one when this one was forked."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").endswith(f"/{LOCK_FILE}"):
                os.close(int(number))


def fork_point(run_dir: Path, threads: str) -> Child:
    """In place of sweep.runner.start_point, likewise."""
    read, write = os.pipe()
    parent = str(os.getpid())
    if pid := os.fork():  # beside threads that wait for other points
        os.close(write)
        child = Child(pid)
        child.stdout = open(read, encoding="utf-8")  # type: ignore[attr-defined]
        return child
    os.close(read)
    close_locks()
    command = [sys.executable, "-P", "-m", "xcloud.study.runner", str(run_dir)]
    command += ["--parent", parent]
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    become_process(command, environment, os.getcwd(), f"/proc/self/fd/{write}")


if __name__ == "__main__":
    # Ends with the tests' process, when the socket closes; PR_SET_PDEATHSIG would end it with the
    # thread that started it.
    its_ends = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    with its_ends[0], its_ends[1]:
        serve(*its_ends)
