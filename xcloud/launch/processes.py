"""Starts the ranks of a run on this machine and watches them. Computes nothing, imports no torch.

Ranks are child processes: that works in plain runs, in sweeps and under any launcher, and leaves
no orphans (each child asks the kernel to end it with its parent).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path

import psutil

from xcloud.base.errors import RunFailed
from xcloud.cluster.transport import num_cores
from xcloud.record.rank_state import error_file, failure_of, ready_file, state_file

POLL_EVERY_S = 0.1
END_WITHIN_S = 5.0
LATE_S = 15.0  # how long a dispensable rank may take to end after the others
_LAST_WORDS_S = 3.0  # how long after a failure the others may take to report their last steps
_SETTLE_S = 1.5  # how long after the first failure to look for an earlier cause
EXIT_START_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: asked to end, and can go on where it was
MEMORY_SETTINGS = {  # for texts of many lengths: CHANGELOG.md has what it saves
    "LRU_CACHE_CAPACITY": "16",  # prepared matrix products kept, one for each shape (oneDNN)
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
    "MALLOC_ARENA_MAX": "2",  # glibc's; other C libraries pass these over
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),  # tensors from the heap, which is not given back
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}


class RunStopped(KeyboardInterrupt):
    """The run has ended before its time, as it was asked to (Ctrl+C, SIGTERM, SIGUSR1)."""


def start_process(
    command: list[str], environment: dict[str, str], log: Path
) -> subprocess.Popen[bytes]:
    with open(log, "ab") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl+C reaches the parent alone
        )


def end_with_parent() -> None:
    """In a rank: the kernel ends it with the process that has started it. Linux only."""
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG. A rank that is stopped (SIGSTOP) would keep SIGTERM pending for ever.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Condition(Enum):
    """Of a rank's process."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"  # it ended early, as it was asked to
    FAILED = "failed"

    @classmethod
    def of(cls, process: subprocess.Popen[bytes]) -> Condition:
        code = process.poll()
        if code is None:
            return cls.RUNNING
        if code in (EXIT_START_AGAIN, -signal.SIGUSR1):  # before it could be handled
            return cls.STOPPED
        return cls.DONE if code == 0 else cls.FAILED


class LocalRanks:
    """The worker processes of one run. essential: ranks whose failure fails the run; the others
    may be lost once they are ready, which the remaining ranks report. None: all ranks.
    restart_s: after which all ranks of a cloud that lost one begin again, unless that one has an
    error of its own; None: never. lost_after_s: an essential rank that is suspended (SIGSTOP) for
    so long is ended, whatever the others wait for, and until all have met any rank; None: never.
    experiment_file: that the ranks read; None: that of the run folder."""

    def __init__(
        self,
        run_dir: Path,
        cloud_of_rank: list[str],
        essential: frozenset[int] | None = None,
        restart_s: float | None = None,
        lost_after_s: float | None = None,
        experiment_file: Path | None = None,
    ) -> None:
        self.run_dir, self.clouds = run_dir, cloud_of_rank
        self.experiment_file = experiment_file or run_dir
        everyone = frozenset(range(len(cloud_of_rank)))
        self.essential = everyone if essential is None else essential
        self.processes: list[subprocess.Popen[bytes]] = []
        self.is_asked_to_stop = False
        self._restart_s, self._lost_after_s = restart_s, lost_after_s
        self._since_s: dict[object, float] = {}  # when something was first seen, see _for_s
        self._environment: dict[str, str] = {}

    def start(self) -> None:
        """May be called again once `wait` has raised RunFailed."""
        self._stop_if_asked()
        self._remove_meeting_point()
        self.processes = []
        self._since_s.clear()
        num_ranks = len(self.clouds)
        threads = max(1, num_cores() // num_ranks)
        self._environment = {
            **MEMORY_SETTINGS,
            "OMP_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **os.environ,
            "LOCAL_WORLD_SIZE": str(num_ranks),
        }
        for rank in range(num_ranks):
            self.processes.append(self._start(rank))
        if self.is_asked_to_stop:  # meanwhile: the last ones were not there to hear it
            self.ask_to_stop()

    def _stop_if_asked(self) -> None:
        if self.is_asked_to_stop:
            raise RunStopped

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "xcloud", "worker", str(self.experiment_file)]
        command += ["--rank", str(rank), "--parent", str(os.getpid())]
        here = {**self._environment, "LOCAL_RANK": str(rank)}
        return start_process(command, here, self.log(rank))

    def ask_to_stop(self) -> None:
        """All ranks save the step under way and end; those that do not train yet just end."""
        self.is_asked_to_stop = True
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)

    @property
    def may_come_right(self) -> bool:
        """Whether a failure may not come again: it was no error that a rank itself has named."""
        failures = [failure_of(self.run_dir, rank) for rank in self._own_failures()]
        return not any(failure and failure["expected"] for failure in failures)

    def log(self, rank: int) -> Path:
        return self.run_dir / f"rank{rank}.log"

    def wait(self, meanwhile: Callable[[], bool]) -> None:
        """Wait until all ranks are done, calling `meanwhile` often. It returns whether the ranks
        have met: until then every rank is essential, because the others would wait for it.

        Raises RunFailed naming the first cause if an essential rank fails. The others notice,
        report the rest and end; those that do not are ended, as are all ranks on any other
        exception (Ctrl+C). Raises RunStopped once all ranks have ended early as they were asked.
        """
        try:
            while not self._is_over(has_met=meanwhile()):
                time.sleep(POLL_EVERY_S)
        finally:
            self.end()

    def _is_over(self, has_met: bool) -> bool:
        """What follows from the conditions of all ranks, the first that applies:

        a rank stopped before all met, END_WITHIN_S ago   the run has stopped: those that wait for
                                                          it inside torch hear no signal
        one failed before all met or it was ready         the run fails
        an essential one failed                           it fails, once the others have reported
        an essential one runs                             the run goes on; lost clouds begin again
        another one runs, for LATE_S at most              the run goes on
        an essential one stopped                          the run has stopped
        """
        self._end_suspended(self.essential if has_met else range(len(self.processes)))
        every = [Condition.of(process) for process in self.processes]
        needed = {every[rank] for rank in self.essential}
        if Condition.STOPPED in every and not has_met and self._for_s("stop") > END_WITHIN_S:
            raise RunStopped
        if Condition.FAILED in every and (not has_met or self._lost_before_ready()):
            self._fail(self._first_cause())
        if Condition.FAILED in needed:
            cause = self._first_cause()
            self._hear_last_words()
            self._fail(cause)
        if Condition.RUNNING in needed:
            if has_met and self._restart_s is not None and not self.is_asked_to_stop:
                self._begin_again(self._restart_s)
            return False
        if self._for_s("end") <= LATE_S and Condition.RUNNING in every:
            return False
        if Condition.STOPPED in needed:
            raise RunStopped
        return True

    def _for_s(self, what: object) -> float:
        """Seconds since this was asked first."""
        now_s = time.monotonic()
        return now_s - self._since_s.setdefault(what, now_s)

    def _end_suspended(self, watched: Iterable[int]) -> None:
        """A suspended rank would keep others waiting where no link looks for heartbeats: while
        they join, and in a collective. Until it is ended it has been suspended all along."""
        for rank in watched:
            key = ("suspended", rank)
            if not _is_suspended(self.processes[rank]):
                if self.processes[rank].poll() is None:
                    self._since_s.pop(key, None)
            elif self._lost_after_s is not None and self._for_s(key) > self._lost_after_s:
                self.processes[rank].kill()

    def _fail(self, cause: str) -> None:
        """Ranks that are asked to end go one by one, and the others lose them."""
        if self.is_asked_to_stop and not self._own_failures():
            raise RunStopped
        raise RunFailed(cause)

    def _begin_again(self, restart_s: float) -> None:
        """Clouds that have lost a rank, by a signal or with another rank, are started again."""
        lost = {self.clouds[r] for r, process in enumerate(self.processes) if process.poll()}
        failed = {self.clouds[r] for r in self._own_failures() if failure_of(self.run_dir, r)}
        if lost and _phase_of(self.run_dir, 0) == "evaluation":  # nothing is left to come back to
            return
        for cloud in lost - failed:
            if self._for_s(cloud) < restart_s:
                continue
            del self._since_s[cloud]
            ranks = [rank for rank, other in enumerate(self.clouds) if other == cloud]
            for rank in ranks:
                self.processes[rank].kill()
                self.processes[rank].wait()
            for rank in ranks:
                error_file(self.run_dir, rank).unlink(missing_ok=True)
                self.log(rank).replace(self.log(rank).with_suffix(".before.log"))
                self.processes[rank] = self._start(rank)

    def _lost_before_ready(self) -> bool:
        return any(
            Condition.of(process) is Condition.FAILED
            and not ready_file(self.run_dir, rank).exists()
            for rank, process in enumerate(self.processes)
            if rank not in self.essential
        )

    def _hear_last_words(self) -> None:
        until_s = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < until_s and any(p.poll() is None for p in self.processes):
            time.sleep(POLL_EVERY_S)

    def end(self) -> None:
        """Terminate what still runs; kill what does not obey."""
        deadline = time.monotonic() + END_WITHIN_S
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGCONT)  # a stopped process handles no other signal
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._remove_meeting_point()

    def _remove_meeting_point(self) -> None:
        """Files by which ranks have met: of no use to others, and after a kill still there."""
        for name in ("rendezvous", "link-*.clock", "rank*.ready"):
            for path in self.run_dir.glob(name):
                path.unlink(missing_ok=True)

    def _first_cause(self) -> str:
        """A rank that lost its peer fails too, often before the peer's exit is noticed; wait a
        moment and name the rank with a cause of its own."""
        settled = time.monotonic() + _SETTLE_S
        while time.monotonic() < settled and not self._own_failures():
            time.sleep(0.05)
        failed = [r for r, p in enumerate(self.processes) if Condition.of(p) is Condition.FAILED]
        rank = (self._own_failures() or failed)[0]
        code = self.processes[rank].poll()
        assert code is not None
        failure = failure_of(self.run_dir, rank)
        if failure is not None:
            what = failure["message"]
        elif ("suspended", rank) in self._since_s:
            what = f"was stopped (SIGSTOP) for more than {self._lost_after_s:g} s and is given up"
        elif code < 0:
            names = {known.value: known.name for known in signal.Signals}
            what = f"was ended by signal {-code} ({names.get(-code, 'real-time')})"
        else:
            what = f"ended with exit code {code}: {self._last_line(rank)}"
        return f"rank {rank} of cloud {self.clouds[rank]!r}: {what} (log: {self.log(rank)})"

    def _own_failures(self) -> list[int]:
        """Ranks whose failure is not just the loss of another rank."""
        found = []
        for rank, process in enumerate(self.processes):
            if Condition.of(process) is not Condition.FAILED:
                continue
            failure = failure_of(self.run_dir, rank)
            if failure is None or not failure["peer_lost"]:
                found.append(rank)
        return found

    def _last_line(self, rank: int) -> str:
        lines = self.log(rank).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "its log is empty"


def _is_suspended(process: subprocess.Popen[bytes]) -> bool:
    """By SIGSTOP."""
    try:
        return process.poll() is None and psutil.Process(process.pid).status() == "stopped"
    except psutil.Error:
        return False


def _phase_of(run_dir: Path, rank: int) -> str:
    try:
        return str(json.loads(state_file(run_dir, rank).read_text())["phase"])
    except (OSError, ValueError, KeyError):
        return ""
