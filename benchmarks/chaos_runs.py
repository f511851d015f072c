"""Runs for benchmarks/chaos.py: real processes, forked from one that has imported torch.

Launcher, ranks and monitor are processes of their own, with the signals, parents and exit codes of
`python run.py`, of torchrun, or of ranks on two machines (network namespaces) that a supervisor
starts again; only the seconds of importing are saved. Linux only.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf

from benchmarks.namespaces import ADDRESSES, INTERFACE
from tests.warm_ranks import Child, become
from xcloud.base.errors import XcloudError
from xcloud.features.checkpoints.resume import check_can_go_on
from xcloud.job.config import Settings
from xcloud.job.given import resumed
from xcloud.launch import local
from xcloud.launch import processes as launch
from xcloud.record.checkpoint_files import CheckpointFolder
from xcloud.record.events import EVENTS_FILE
from xcloud.record.files import CHECKPOINTS_DIR

ROOT = Path(__file__).resolve().parent.parent
LOG = "chaos.log"  # in each run folder: what launcher, torchrun or a machine's ranks print
PORT = "29500"
IMPORTED = (
    "torch",
    "torch.fx.experimental.symbolic_shapes",
    "xcloud.launch.worker",
    "xcloud.show.pictures",
    "benchmarks.chaos_jobs",
)
_CLONE_NEWNET = 0x40000000
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def prepare_to_fork() -> None:
    """Import what the children need; no thread may run when they fork."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["XCLOUD_POLICY"] = str(ROOT / "tests" / "policy.yaml")  # the toys
    for name in IMPORTED:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)


def fork(body: Callable[[], object], log: Path, environment: dict[str, str]) -> Child:
    def begin() -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.default_int_handler if number == 2 else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.environ.update(environment)
        os.chdir(ROOT)
        body()

    # A signal must not meet the parent's handlers in the child.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    if pid := os.fork():
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return Child(pid)
    become(begin, log)


class Run(ABC):
    """Processes of one run, however they are started. folders: of the clouds; the first has the
    events."""

    def __init__(self, folders: list[Path], config: dict[str, Any], num_ranks: int) -> None:
        self.folders, self.config, self.num_ranks = folders, config, num_ranks
        self.first = folders[0]
        self.processes: list[Child] = []
        self.failed: set[int] = set()  # ranks that poll() has seen fail

    @abstractmethod
    def start(self) -> None:
        """A new run, or the rest of one."""

    def poll(self) -> int | None:
        """None while any process goes on; then 0, or how the first that failed ended."""
        codes = [process.poll() for process in self.processes]
        return None if None in codes else next(filter(None, codes), 0)

    def has_noticed(self, victim: int | None, said: str) -> bool:
        """Whether somebody else than the rank that was disturbed has ended or begun again because
        of it. said: what the logs hold since then."""
        return self.poll() not in (None, 0) or "start again" in said

    def send(self, number: int) -> None:
        """A signal to whoever starts the ranks."""
        for process in self.processes:
            process.send_signal(number)

    def pid_of_rank(self, rank: int) -> int | None:
        """The newest process of a rank."""
        log = str(self.first / f"rank{rank}.log")
        found = [pid for pid in self.alive() if _link(f"/proc/{pid}/fd/1") == log]
        return found[-1] if found else None

    def alive(self) -> list[int]:
        """Processes that write into the run folders' logs or name one in their command."""
        return sorted({pid for folder in self.folders for pid in _processes_of(folder)})

    def said(self) -> str:
        logs = [folder / LOG for folder in self.folders]
        return "".join(log.read_text(errors="replace") for log in logs if log.exists())

    def begin_anew(self) -> None:
        """What the refusal of damaged checkpoints advises."""
        for folder in self.folders:
            shutil.rmtree(folder / CHECKPOINTS_DIR)

    def agreed_steps(self) -> list[int]:
        """Newest first."""
        return CheckpointFolder(self.first).agreed_steps()


class Launched(Run):
    """`python run.py`, then `resume=RUN_DIR`."""

    def start(self) -> None:
        def be_launcher() -> NoReturn:
            launch.start_process = _start_rank  # type: ignore[assignment]
            sys.exit(_launch(self.first, self.config))

        log = self.first / LOG
        self.processes = [fork(be_launcher, log, {"OMP_NUM_THREADS": "1"})]


class Torchrun(Run):
    """Cold: the real command."""

    def start(self) -> None:
        file = _experiment_file(self.first, self.config)
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 "--max-restarts", "50", "--monitor-interval", "0.1",
                 "--nproc-per-node", str(self.num_ranks),
                 "-m", "xcloud", "worker", str(file), "--roll-back",
                 "--run-dir", str(self.first)]  # fmt: skip
        environment = {
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        launcher = fork(lambda: os.execv(words[0], words), self.first / LOG, environment)
        self.processes = [launcher]

    def pid_of_rank(self, rank: int) -> int | None:
        workers = [pid for pid in self.alive() if b"\0worker\0" in _read(f"/proc/{pid}/cmdline")]
        wanted = f"RANK={rank}".encode()
        of_rank = [p for p in workers if wanted in _read(f"/proc/{p}/environ").split(b"\0")]
        return of_rank[-1] if of_rank else None


class Machines(Run):
    """The first cloud's ranks in one namespace, all others' in the other, as torchrun would start
    them. Each machine's are started again by themselves once all of them have ended."""

    def __init__(
        self, folders: list[Path], config: dict[str, Any], num_ranks: int,
        hosts: tuple[str, str], num_on_first: int,
    ) -> None:  # fmt: skip
        super().__init__(folders, config, num_ranks)
        self.hosts, self.num_on_first = hosts, num_on_first
        self._ranks = range(num_on_first), range(num_on_first, num_ranks)
        self._num_starts = [1, 1]
        self._seen_at_end: dict[int, int] = {}  # of machines that are done: the other's starts

    def start(self) -> None:
        self.processes = [self._start(rank) for rank in range(self.num_ranks)]

    def poll(self) -> int | None:
        codes = [process.poll() for process in self.processes]
        self.failed |= {rank for rank, code in enumerate(codes) if code}
        if not any(code != 0 for code in codes):
            return 0
        for place, ranks in enumerate(self._ranks):
            ours = [codes[rank] for rank in ranks]
            if None in ours:
                continue
            # One whose ranks have ended well is needed again if the other has begun again since.
            seen = self._num_starts[1 - place]
            if any(ours) or self._seen_at_end.setdefault(place, seen) < seen:
                self._seen_at_end.pop(place, None)
                self._num_starts[place] += 1
                for rank in ranks:
                    self.processes[rank] = self._start(rank)
        return None

    def _start(self, rank: int) -> Child:
        file = _experiment_file(self.first.parent, self.config)
        place = int(rank >= self.num_on_first)
        folder, host = self.folders[place], self.hosts[place]

        def be_rank() -> None:
            with open(f"/run/netns/{host}") as namespace:
                if ctypes.CDLL(None).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(f"cannot enter namespace {host}")
            if rank == 0:
                machines = importlib.import_module("xcloud.launch.several_machines")
                machines._start_monitor = _standing_by(self.first / LOG)
            words = ["worker", str(file), "--roll-back", "--run-dir", str(folder)]
            importlib.import_module("xcloud.__main__").main(words)

        environment = {
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE, "RANK": str(rank),
            "WORLD_SIZE": str(self.num_ranks), "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT,
        }  # fmt: skip
        return fork(be_rank, folder / LOG, environment)

    def has_noticed(self, victim: int | None, said: str) -> bool:
        return bool(self.failed - {victim})

    def pid_of_rank(self, rank: int) -> int | None:
        process = self.processes[rank]
        return process.pid if process.poll() is None else None


def pid_of_monitor(run: Run) -> int | None:
    for pid in run.alive():
        is_one = b"\0monitor\0" in _read(f"/proc/{pid}/cmdline")
        if is_one or _read(f"/proc/{pid}/comm") == b"monitor\n":
            return pid
    return None


def _start_rank(command: list[str], environment: dict[str, str], log: Path) -> Child:
    """In place of launch.start_process."""
    words = command[command.index("xcloud") + 1 :]  # python -P -m xcloud
    return fork(lambda: importlib.import_module("xcloud.__main__").main(words), log, environment)


def _launch(run_dir: Path, config: dict[str, Any]) -> int:
    """The exit codes of run.py."""
    try:
        if (run_dir / EVENTS_FILE).exists():
            found, has_more = resumed(run_dir, [], ROOT / "conf")
            if has_more:
                local.run(found, run_dir, resumes=partial(check_can_go_on, anew=True))
        else:
            local.run(Settings.of(config), run_dir)
    except XcloudError as error:
        print(f"xcloud: {error}", flush=True)
        return 1
    except launch.RunStopped as stopped:
        print(f"xcloud: {stopped}", flush=True)
        return launch.EXIT_START_AGAIN
    except KeyboardInterrupt:
        return 130
    return 0


def _standing_by(log: Path) -> Callable[[Path, Path], Child]:
    """In place of several_machines._start_monitor: a process forked before the rank has any
    thread, which becomes a monitor once it is told to and ends with the rank."""
    its_end, end = os.pipe()
    parent = os.getpid()

    def stand_by() -> None:
        os.close(end)
        words = os.read(its_end, 4096).decode()
        if words:
            ctypes.CDLL(None).prctl(15, b"monitor")  # PR_SET_NAME
            main = importlib.import_module("xcloud.show.following").main
            sys.exit(main([*words.split("\n"), "--parent", str(parent)]))

    child = fork(stand_by, log, {})

    def start_monitor(run_dir: Path, file: Path) -> Child:
        os.write(end, "\n".join([str(run_dir), "--experiment", str(file)]).encode())
        return child

    return start_monitor


def _experiment_file(folder: Path, config: dict[str, Any]) -> Path:
    file = folder / "experiment.yaml"
    if not file.exists():
        file.write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    return file


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _processes_of(run_dir: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        state = _read(f"{process}/stat").rpartition(b")")[2].split()[:1]
        words = _read(f"{process}/cmdline").decode(errors="replace")
        named = any(f"{run_dir}{end}" in words for end in ("/", "\0"))
        if state != [b"Z"] and (named or _link(f"{process}/fd/1").startswith(f"{run_dir}/")):
            found.append(int(process.name))
    return found
