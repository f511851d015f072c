"""Launchers for benchmarks/chaos.py: real processes, forked from one that has imported torch.

A run's launcher and its ranks are processes of their own, with the signals, parents and exit
codes of `python run.py`; only the seconds of importing are saved. Linux only.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf

from xcloud.errors import XcloudError
from xcloud.record.events import EVENTS_FILE
from xcloud.run import launch, local

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER_LOG = "launcher.log"
IMPORTED = (
    "torch",
    "torch.fx.experimental.symbolic_shapes",
    "xcloud.run.worker",
    "xcloud.report.pictures",
    "benchmarks.chaos_jobs",
)


class Forked:
    """What launch.py uses of a Popen, for a child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
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
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork(body: Callable[[], object], log: Path, environment: dict[str, str]) -> Forked:
    if pid := os.fork():
        return Forked(pid)
    code = 1
    try:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for there, here in ((os.open(os.devnull, os.O_RDONLY), 0), (file, 1), (file, 2)):
            os.dup2(there, here)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.default_int_handler if number == 2 else signal.SIG_DFL)
        os.environ.update(environment)
        body()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
        print(ended, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _start_rank(command: list[str], environment: dict[str, str], log: Path) -> Forked:
    """In place of launch.start_process."""
    words = command[3:]  # python -m xcloud

    def be_rank() -> None:
        importlib.import_module("xcloud.__main__").main(words)

    return fork(be_rank, log, environment)


def start_launcher(run_dir: Path, config: dict[str, Any]) -> Forked:
    """What a user does: the run's command if there is no run yet, else resume=RUN_DIR."""

    def be_launcher() -> NoReturn:
        os.chdir(ROOT)
        launch.start_process = _start_rank  # type: ignore[assignment]
        sys.exit(_launch(run_dir, config))

    return fork(be_launcher, run_dir / LAUNCHER_LOG, {"OMP_NUM_THREADS": "1"})


def start_torchrun(run_dir: Path, config: dict[str, Any], num_ranks: int) -> Forked:
    """The same command for a new run and for the rest of one; cold."""
    file = run_dir / "experiment.yaml"
    if not file.exists():
        file.write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "2",
             "--nproc-per-node", str(num_ranks), "-m", "xcloud", "worker", str(file)]  # fmt: skip
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}

    def be_torchrun() -> NoReturn:
        os.chdir(ROOT)
        os.execv(sys.executable, words)

    return fork(be_torchrun, run_dir / LAUNCHER_LOG, environment)


def _launch(run_dir: Path, config: dict[str, Any]) -> int:
    """The exit codes of run.py."""
    try:
        if (run_dir / EVENTS_FILE).exists():
            found, has_more = local.resumed(run_dir, [], ROOT / "conf")
            if has_more:
                local.run(found, run_dir, resumes=True)
        else:
            local.run(OmegaConf.create(config), run_dir)
    except XcloudError as error:
        print(f"xcloud: {error}", flush=True)
        return 1
    except launch.RunStopped as stopped:
        print(f"xcloud: {stopped}", flush=True)
        return launch.EXIT_START_AGAIN
    except KeyboardInterrupt:
        return 130
    return 0


def processes_of(run_dir: Path) -> list[int]:
    """Those that write into the run folder's logs or name it in their command."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
            target = os.readlink(process / "fd" / "1")
            words = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if target.startswith(f"{run_dir}/") or any(
            f"{run_dir}{end}" in words for end in ("/", "\0")
        ):
            found.append(int(process.name))
    return sorted(found)


def pid_of_rank(run_dir: Path, rank: int) -> int | None:
    """The newest process of a rank."""
    found = [p for p in processes_of(run_dir) if _writes_to(p, run_dir / f"rank{rank}.log")]
    return found[-1] if found else None


def pid_of_monitor(run_dir: Path) -> int | None:
    for pid in processes_of(run_dir):
        if b"\0monitor\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def _writes_to(pid: int, log: Path) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/1") == str(log)
    except OSError:
        return False
