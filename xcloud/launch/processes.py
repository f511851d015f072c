"""The processes of a run on this machine: they are started here and watched. Computes nothing.

Ranks are child processes: that works in plain runs, in sweeps and under any launcher, and leaves
no orphans (each child asks the kernel to end it with its parent).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from xcloud.base.errors import ConfigError, RunFailed
from xcloud.base.project import module_paths, python_command
from xcloud.launch.failures import EXIT_START_AGAIN, first_cause, lost_clouds, own_failures
from xcloud.net.addresses import INTERFACE_VARIABLE
from xcloud.net.failure_detector import LAUNCHER, FailureDetector
from xcloud.net.link_profile import DEFAULT_LIVENESS, Liveness
from xcloud.net.transport import num_cores
from xcloud.record.files import rank_file

POLL_EVERY_S = 0.1
END_WITHIN_S = 5.0
# A rank that may be lost can be in a checkpoint, or wait for a line.
LATE_S = 15.0  # how long a dispensable rank may take to end after the others
_FINAL_REPORTS_S = 3.0  # how long after a failure the others may take to report their last steps
_STOPPED_CODES = (EXIT_START_AGAIN, -signal.SIGUSR1)  # the signal before it could be handled
WAYS_TO_STOP = "Ctrl+C, SIGTERM, SIGUSR1 or a terminal that has closed"
LIBRARY_SETTINGS = {  # of memory, for texts of many lengths: CHANGELOG.md has what it saves
    "LRU_CACHE_CAPACITY": "16",  # prepared matrix products kept, one for each shape (oneDNN)
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
    "MALLOC_ARENA_MAX": "2",  # glibc's; other C libraries pass these over
    # Tensors come from the heap, which is not given back: activations need no new pages in every
    # step. Long messages of links have pages of their own (net/frame.py).
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "GOMP_SPINCOUNT": "10000",  # a thread that waits for others gives a busy core away (OpenMP)
}


class RunStopped(KeyboardInterrupt):
    """The end of a run before its time, as it was asked to (Ctrl+C, SIGTERM, SIGUSR1,
    SIGHUP)."""


def num_threads(num_processes: int) -> str:
    """Return OMP_NUM_THREADS for each of so many processes: as the environment sets it, else an
    equal share of this machine's cores.

    Raises ConfigError if it is set to anything but positive numbers, of which OpenMP would say so
    in a log and use all cores in every process.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").strip()
    if not given:
        # Rounded down: ranks that share a core slow each other more than an idle core costs.
        return str(max(1, num_cores() // num_processes))
    if not re.fullmatch(r"[1-9][0-9]{0,8}(\s*,\s*[1-9][0-9]{0,8})*", given):
        raise ConfigError(
            f"the environment variable OMP_NUM_THREADS is {given!r}, not a number of threads from "
            "1 on; unset it, and the processes share the cores"
        )
    return given


def start_process(
    command: list[str], environment: dict[str, str], log: Path, speaks: bool = False
) -> subprocess.Popen[bytes]:
    """Start a process that writes to a log and gets no Ctrl+C of its own.

    speaks: True to send what it prints, except errors, to this process's output instead.
    """
    # Opened for the child, which keeps it open.
    with open(log, "ab") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=None if speaks else file,
            stderr=file,
            env=environment,
            start_new_session=True,  # Ctrl+C reaches the parent alone
        )


class LocalRanks:
    """The worker processes of one run.

    essential: ranks whose failure fails the run. The others may be lost once they are ready; the
        remaining ranks report that. None: all ranks.
    restart_s: seconds to wait before restarting a cloud that lost a rank. None: never. A rank that
        reported an error of its own is not restarted.
    liveness: limits on silence. An essential rank that is suspended (SIGSTOP) for lost_after_s is
        ended, whatever the others wait for. Until all have joined, this applies to every rank.
    experiment_file: the experiment file that the ranks read. None: the one in the run folder.
    first_rank: number of the first rank that this launcher starts; other owners start the rest.
    max_restarts: number of times that all ranks may be restarted without a new checkpoint that all
        have agreed on. Failures of these ranks count apart from those of other owners' ranks.
    speaker: the rank whose output this command shows, if any.
    interface: the variable that says where gloo listens.
    """

    speaker: int | None = None
    # Ranks of one machine meet over its loop: a firewall or a name server has no say. Whatever the
    # shell has set is for runs over several machines.
    interface: Mapping[str, str] = {INTERFACE_VARIABLE: "lo" if sys.platform == "linux" else "lo0"}

    def __init__(
        self,
        run_dir: Path,
        cloud_of_rank: list[str],
        essential: frozenset[int] | None = None,
        restart_s: float | None = None,
        liveness: Liveness = DEFAULT_LIVENESS,
        experiment_file: Path | None = None,
        first_rank: int = 0,
        max_restarts: int = 0,
    ) -> None:
        self.run_dir = run_dir
        self.clouds = cloud_of_rank
        self.experiment_file = experiment_file or run_dir
        self.ranks = range(first_rank, first_rank + len(cloud_of_rank))
        self.essential = frozenset(self.ranks) if essential is None else essential
        self.processes: list[subprocess.Popen[bytes]] = []
        self.is_asked_to_stop = False
        self.max_restarts = max_restarts
        self._restart_s = restart_s
        self._liveness = liveness
        self._detector = self._new_detector()
        self.since_s: dict[object, float] = {}  # when something was first seen, see for_s
        self._suspended = set[int]()  # ranks that were given up
        self._failed: dict[int, int] | None = None

    def start(self) -> None:
        """Start all ranks. It may be called again once `wait` has raised RunFailed."""
        # Read once, since the signal may come while the ranks are started.
        was_asked = self.is_asked_to_stop
        if was_asked:
            raise RunStopped
        # Files of an attempt that was killed, by which ranks would find nobody.
        self._remove_rendezvous()
        for stale in self.run_dir.glob("rank*.error.json"):  # a rank may die before it looks
            stale.unlink(missing_ok=True)
        self.processes = []
        self.since_s.clear()
        self._suspended.clear()
        self._failed = None
        self._detector = self._new_detector()
        for rank in self.ranks:
            self.processes.append(self.start_rank(rank))
        if self.is_asked_to_stop:  # meanwhile: the last ones were not there to hear it
            self.ask_to_stop()

    def words_of(self, rank: int) -> list[str]:
        """Return the command of a rank, after `python -m xcloud`."""
        words = ["worker", str(self.experiment_file)]
        return [*words, "--rank", str(rank), "--parent", str(os.getpid())]

    def start_rank(self, rank: int) -> subprocess.Popen[bytes]:
        command = python_command("xcloud", *self.words_of(rank))
        # What the user has set counts more than what saves memory, and less than what the ranks
        # need.
        environment = {
            **LIBRARY_SETTINGS,
            "TOKENIZERS_PARALLELISM": "false",
            **os.environ,
            "OMP_NUM_THREADS": num_threads(len(self.clouds)),
            **module_paths(),
            **self.interface,
            # The number among the ranks of this machine, by which a rank takes its GPU.
            "LOCAL_RANK": str(self.ranks.index(rank)),
        }
        more = {"speaks": True} if rank == self.speaker else {}
        return start_process(command, environment, log=self.log(rank), **more)

    def ask_to_stop(self) -> None:
        """Have all ranks save the step under way and end; those that do not train yet just end."""
        self.is_asked_to_stop = True
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)

    def who_stopped(self, asked: int | None) -> str:
        """Say who had the run end early. asked: the rank, other than 0, that reported it."""
        return f"interrupted ({WAYS_TO_STOP})"

    @property
    def failed(self) -> dict[int, int]:
        """The exit codes of the ranks that have failed, without those that were ended for it."""
        # Kept once the run has failed, as ranks that are ended afterwards fail, too.
        if self._failed is not None:
            return self._failed
        ended = {r: p.poll() or 0 for r, p in zip(self.ranks, self.processes, strict=False)}
        return {r: code for r, code in ended.items() if code not in (0, *_STOPPED_CODES)}

    def log(self, rank: int) -> Path:
        return self.run_dir / f"rank{rank}.log"

    def wait(self, meanwhile: Callable[[], bool]) -> None:
        """Wait until all ranks are done, calling `meanwhile` often. That returns whether all ranks
        are known to have joined. Every rank is essential until it is ready, because the others
        would wait for it.

        Raises RunFailed naming the first cause if an essential rank fails. The others notice,
        report the rest and end; those that do not are ended, as are all ranks on any other
        exception (Ctrl+C). Raises RunStopped once all ranks have ended early as they were asked.
        """
        try:
            # `meanwhile` follows the run's events, many times a second.
            while not self.is_over(have_joined=meanwhile()):
                time.sleep(POLL_EVERY_S)
        finally:
            self.end()

    def is_over(self, have_joined: bool) -> bool:
        """Return whether the run is over. The first condition that applies decides:

        a rank stopped before all joined, longer than     the run has stopped, since those that
        END_WITHIN_S ago                                  wait for it inside torch get no signal
        one failed that is essential or was not ready,    the run fails, once those that have
        as nobody is before all joined                    joined have reported
        an essential one runs                             the run continues; lost clouds restart
        another one runs, for LATE_S at most              the run continues
        an essential one stopped                          the run has stopped
        """
        self._end_suspended(self.essential if have_joined else self.ranks)
        codes = [process.poll() for process in self.processes]
        needed = [codes[self.ranks.index(rank)] for rank in self.essential]
        is_stopped = any(code in _STOPPED_CODES for code in codes)
        # The others wait inside torch for the one that has stopped, and hear no signal there.
        if is_stopped and not have_joined and self.for_s("stop") > END_WITHIN_S:
            raise RunStopped
        # The run can do without ranks that are ready, of those that may be lost.
        failed = self.failed
        ready = {rank for rank in failed if rank_file(self.run_dir, rank, "ready").exists()}
        # Ranks whose loss the run survives are left out.
        if failed.keys() - (ready - self.essential):
            cause = first_cause(
                self.run_dir,
                clouds=dict(zip(self.ranks, self.clouds, strict=True)),
                failed=lambda: self.failed,
                suspended=dict.fromkeys(self._suspended, self._liveness.lost_after_s),
            )
            # The others report their last steps before they lose the failed one, which the record
            # is made of.
            until_s = time.monotonic() + (_FINAL_REPORTS_S if have_joined else 0.0)
            while time.monotonic() < until_s and any(p.poll() is None for p in self.processes):
                time.sleep(POLL_EVERY_S)
            if self.is_asked_to_stop and not own_failures(self.failed):
                raise RunStopped  # ranks that are asked to end go one by one, and others lose them
            self._failed = self.failed
            raise RunFailed(cause)
        # Any essential rank that still runs.
        if None in needed:
            if have_joined and self._restart_s is not None and not self.is_asked_to_stop:
                self.start_lost_clouds(self._restart_s)
            return False
        # Ranks that may be lost get some time to end by themselves.
        if self.for_s("end") <= LATE_S and None in codes:
            return False
        if any(code in _STOPPED_CODES for code in needed):
            raise RunStopped
        return True

    def start_lost_clouds(self, after_s: float) -> None:
        """Restart the clouds that lost a rank at least after_s seconds ago."""
        # Ranks that end with 0 have finished.
        ended = {rank: process.poll() for rank, process in enumerate(self.processes)}
        codes = {rank: code for rank, code in ended.items() if code}
        for cloud in lost_clouds(self.run_dir, clouds=self.clouds, codes=codes):
            if self.for_s(cloud) < after_s:
                continue
            del self.since_s[cloud]
            # All ranks of the cloud: they hold a state together, and it is gone.
            own = [rank for rank, other in enumerate(self.clouds) if other == cloud]
            for rank in own:
                self.processes[rank].kill()
            for rank in own:
                self.processes[rank].wait()
                rank_file(self.run_dir, rank, "error.json").unlink(missing_ok=True)
                # The log of the lost attempt is kept, once.
                self.log(rank).replace(self.log(rank).with_suffix(".before.log"))
                self.processes[rank] = self.start_rank(rank)

    def for_s(self, what: object) -> float:
        """Return the seconds since this was asked first."""
        now_s = time.monotonic()
        return now_s - self.since_s.setdefault(what, now_s)

    def _new_detector(self) -> FailureDetector:
        # One more than the highest rank, as peers are numbered through all owners.
        detector = FailureDetector(
            rank=LAUNCHER, num_ranks=self.ranks.stop, liveness=self._liveness
        )
        for peer in detector.peers.values():
            # From now on silence counts.
            peer.mark_alive()
        return detector

    def _end_suspended(self, watched: Collection[int]) -> None:
        """End ranks that have been suspended all along for lost_after_s. They would keep others
        waiting where no link looks for heartbeats: while they join, and in a collective."""
        for rank, process in zip(self.ranks, self.processes, strict=False):
            is_stopped = False
            with suppress(psutil.Error):
                is_stopped = process.poll() is None and (
                    psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
                )
            # A rank that runs is alive, whatever it does: only one that is stopped is silent here.
            if not is_stopped:
                self._detector.peers[rank].mark_alive()
        for rank in {*self._detector.silent()}.intersection(watched):
            self._suspended.add(rank)
            self.processes[self.ranks.index(rank)].kill()

    def end(self) -> None:
        """Terminate what still runs; kill what does not obey."""
        # All get the same deadline, as they end side by side.
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
        self._remove_rendezvous()

    def _remove_rendezvous(self) -> None:
        """Delete the files of the rendezvous, which are still there after a kill."""
        for name in ("rendezvous", "link-*.clock", "rank*.ready"):
            for path in self.run_dir.glob(name):
                path.unlink(missing_ok=True)
