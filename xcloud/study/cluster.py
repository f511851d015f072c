"""Points of a sweep as jobs of a cluster (`hydra.launcher.on=slurm`), beside `runner.Processes`:
one job a point, submitted by submitit, an extra. `on=local` runs such jobs on this machine.

    multirun/NAME/<point>/job.json    which job runs the point
    multirun/.jobs/NAME/<point>/      what submitit writes, links too, which no run folder may hold

Jobs do not end with the command that submitted them: the same command finds and follows them. What
became of a point its summary.json says, as of any run. A job whose time is over, or which is
preempted, saves the step under way and is queued again; one that stopped for another reason and
asks for a restart (exit code 75) is submitted again.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Any

import psutil

from xcloud.base.errors import ConfigError, RunFailed
from xcloud.base.locks import LockTaken, locked
from xcloud.base.terminal import say
from xcloud.job.config import EXPERIMENT_FILE
from xcloud.launch.processes import num_threads
from xcloud.record.files import read_json, replace_text
from xcloud.record.summary import SUMMARY_FILE, read_summary
from xcloud.study.point_process import OUTPUT_FILE, PointJob
from xcloud.study.points import Point
from xcloud.study.runner import LauncherSettings, PointRunner, Processes

JOB_FILE = "job.json"
JOBS_DIR = ".jobs"
POLL_S = {"slurm": 5.0, "local": 0.5}
FULL_AFTER_S = 30.0  # between two attempts to submit to a queue that takes no more
SETTLE_S = 60.0  # a shared folder may show what a job wrote last after the job is gone
MAX_AGAIN = 20  # a point that stops so often without finishing is not submitted again
CANCEL_WITHIN_S = 5.0
# Of a mount: locks of one machine do not hold on another one.
OWN_LOCKS = {"nolock", "local_lock=all", "local_lock=flock", "localflock", "noflock"}


def runner_of(chosen: LauncherSettings, folder: Path) -> PointRunner:
    """Return what runs the points of a sweep in this folder.

    Raises ConfigError for jobs that cannot be run here.
    """
    if chosen.on == "here":
        return Processes(chosen.parallel)
    return Jobs(chosen.on, given=chosen.job, folder=folder)


@dataclass(frozen=True)
class SubmittedJob:
    """A job that was submitted. started_s: of a process of this machine, when it began, by which
    it is told from a later one with the same id."""

    on: str
    id: str
    host: str
    started_s: float | None = None


class Jobs:
    """Runs points as jobs; used as `Processes` is.

    on: the place where the jobs run, "slurm" or "local".
    given: the parameters of submitit for a job, such as {timeout_min: 60, slurm_partition: gpu}.
    folder: the folder of the sweep, which login node and compute nodes share.
    Raises ConfigError, before anything is submitted, if the jobs cannot work here.
    """

    def __init__(self, on: str, given: Mapping[str, Any] | None, folder: Path) -> None:
        self._on = on
        self._given = dict(given or {})
        self._ending = Event()
        self._submitting = Lock()
        self._asking = Lock()
        self._asked_at_s = 0.0
        self._queued: dict[str, str] = {}
        self.followed: list[SubmittedJob] = []
        self._said = set[str]()
        # Looked for first: without it every point would fail by itself.
        if on == "slurm" and shutil.which("sbatch") is None:
            raise ConfigError(
                "hydra.launcher.on=slurm: there is no sbatch here; give the command on a machine "
                "that submits to the cluster"
            )
        # A run folder that two jobs write into is lost.
        check_shared_locks(folder)
        self._jobs_dir = folder.parent / JOBS_DIR / folder.name
        self._executor(
            self._jobs_dir
        )  # so that a wrong parameter is refused before anything is submitted

    def run(self, point: Point, run_dir: Path) -> None:
        """Submit the job of a point, or follow the one that runs it, until the point has finished.

        Raises RunFailed with the reason if it fails.
        """
        # Slurm ends a job at its time limit; the run saves and asks to be started again.
        for _ in range(MAX_AGAIN):
            job = self._running(run_dir)
            if job is None:
                # The file that a killed job left is the one it ran with.
                if not (run_dir / EXPERIMENT_FILE).exists():
                    point.named.write(run_dir / EXPERIMENT_FILE)
                job = self._submit(point, run_dir)
            self._follow(point, job=job)
            summary = self._summary(run_dir)
            # Written by the run itself: a job that is gone may have finished.
            if summary.get("status") == "finished":
                return
            # Only "stopped" asks to go on. Who cancels a job does not want it back.
            if summary.get("status") != "stopped" or self.was_cancelled(job):
                logs = self._jobs_dir / run_dir.name
                raise RunFailed(_cause(run_dir, job=job, summary=summary, logs=logs))
            say(f"[{point.name}] stopped: {summary.get('cause') or 'as it was asked to'}")
        raise RunFailed(f"it has stopped {MAX_AGAIN} times without finishing; see {run_dir}")

    def is_running(self, run_dir: Path) -> bool:
        """Return whether a job of this folder is queued or runs."""
        return self._running(run_dir) is not None

    def end(self) -> None:
        """Leave the jobs to themselves; cancel them at a second Ctrl+C within a few seconds."""
        self._ending.set()
        jobs = len(self.followed)
        say(
            f"\n{jobs} job{'s' * (jobs != 1)} continue; the same command follows them. "
            f"Ctrl+C once more within {CANCEL_WITHIN_S:g} s, to cancel them"
        )
        try:
            # Time for a second Ctrl+C.
            time.sleep(CANCEL_WITHIN_S)
        except KeyboardInterrupt:
            # From here on Ctrl+C would leave some jobs uncancelled.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for job in self.followed:
                if job.on == "slurm":
                    subprocess.run(["scancel", job.id], check=False)
                else:
                    with suppress(psutil.Error):
                        # submitit's process on this machine waits for the run, which is its child.
                        for child in psutil.Process(int(job.id)).children(recursive=True):
                            child.terminate()
            say("cancelled")

    def _executor(self, folder: Path) -> Any:
        try:
            from submitit import AutoExecutor
        except ImportError:
            raise ConfigError(
                f"hydra.launcher.on={self._on} needs submitit: pip install 'xcloud[slurm]'"
            ) from None
        # A run may be requeued as often as it needs: it goes on where it was.
        executor = AutoExecutor(folder, cluster=self._on, slurm_max_num_timeout=10_000)
        try:
            executor.update_parameters(**{"timeout_min": 24 * 60, **self._given})
        except (NameError, TypeError, ValueError) as error:
            raise ConfigError(f"hydra.launcher.job: {error}") from None
        return executor

    def _submit(self, point: Point, run_dir: Path) -> SubmittedJob:
        num_processes = point.experiment.cluster.num_processes
        executor = self._executor(self._jobs_dir / run_dir.name)
        # Slurm bounds a job's name.
        chosen = {"name": point.folder[:60], "cpus_per_task": num_processes} | self._given
        executor.update_parameters(**chosen)
        run = PointJob(str(run_dir), threads=num_threads(num_processes))
        while True:
            try:
                # A process inherits what is blocked; threads share the mask, so one submits at a
                # time.
                # Ctrl+C in the terminal reaches all processes that it started, and jobs stay.
                stops = {signal.SIGINT, signal.SIGHUP}
                with self._submitting:
                    before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)
                    try:
                        made = executor.submit(run)
                    finally:
                        signal.pthread_sigmask(signal.SIG_SETMASK, before)
                break
            except Exception as error:
                said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                if not is_full(said):
                    # A full queue is waited for, any other refusal is the point's failure.
                    raise RunFailed(f"the job was not taken: {said}") from error
                self._say_once(f"the queue takes no more jobs now: {said}")
                if self._ending.wait(FULL_AFTER_S):
                    raise KeyboardInterrupt from None
        # A process id comes back; the moment at which its process began tells it apart.
        started_s = None
        if self._on == "local":
            started_s = psutil.Process(int(made.job_id)).create_time()
        job = SubmittedJob(self._on, str(made.job_id), socket.gethostname(), started_s)
        replace_text(run_dir / JOB_FILE, text=json.dumps(vars(job)))
        with self._asking:
            # Until Slurm is asked again the job counts as waiting.
            self._queued[job.id] = "PENDING"
        return job

    def _follow(self, point: Point, job: SubmittedJob) -> None:
        """Block until a job is neither queued nor runs, and say what becomes of it."""
        self.followed.append(job)
        # Only changes are said.
        said = ""
        while (state := self.state_of(job)) is not None:
            if state != said:
                said = state
                say(f"[{point.name}] job {job.id}: {state.lower()}")
            if self._ending.wait(POLL_S[self._on]):
                raise KeyboardInterrupt
        self.followed.remove(job)

    def _running(self, run_dir: Path) -> SubmittedJob | None:
        """Return the job of a folder that is queued or runs; None if there is none."""
        kept = read_json(run_dir / JOB_FILE)
        try:
            job = SubmittedJob(**kept)
        except TypeError:  # there is no such file, or not one of ours
            return None
        if job.on == "local" and job.host != socket.gethostname():
            raise ConfigError(f"{run_dir} is run by a job on {job.host}: give the command there")
        return job if self.state_of(job) is not None else None

    def state_of(self, job: SubmittedJob) -> str | None:
        """Return the state of a job that is queued or runs; None for one that has ended."""
        if job.on == "local":
            try:
                process = psutil.Process(int(job.id))
                # The id may have been given to another process since.
                is_it = process.create_time() == job.started_s
                return "RUNNING" if is_it and process.status() != psutil.STATUS_ZOMBIE else None
            except psutil.NoSuchProcess:
                return None
        # Threads of all points share one question in POLL_S: Slurm is asked for all jobs at once.
        with self._asking:
            if time.monotonic() > self._asked_at_s + POLL_S["slurm"]:
                self._ask_slurm()
            return self._queued.get(job.id)

    def _ask_slurm(self) -> None:
        """Ask for the states of this user's jobs. While Slurm does not answer they stay."""
        # All states, as a job that is requeued is not among the usual ones for a moment.
        command = ["squeue", "--noheader", "--me", "--states=all", "--format=%i %T"]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        self._asked_at_s = time.monotonic()
        if asked.returncode:
            self._say_once(f"squeue does not answer: {asked.stderr.strip()}")
            return
        states = dict(line.split() for line in asked.stdout.splitlines() if line.strip())
        self._queued = {key: state for key, state in states.items() if state not in ENDED}

    def was_cancelled(self, job: SubmittedJob) -> bool:
        """Return whether somebody has cancelled a job, which then must not come back."""
        if job.on != "slurm":
            return False
        command = ["scontrol", "show", "job", "--oneliner", job.id]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        return "JobState=CANCELLED" in asked.stdout

    def _summary(self, run_dir: Path) -> dict[str, Any]:
        """Return the figures of a run whose job has ended. Its last words may come late."""
        # A shared folder may show the last file late (SETTLE_S).
        until_s = time.monotonic() + (SETTLE_S if self._on == "slurm" else 2.0)
        file = run_dir / SUMMARY_FILE
        while True:
            with suppress(OSError):
                # A summary older than the job is an earlier attempt's.
                if file.stat().st_mtime_ns >= (run_dir / JOB_FILE).stat().st_mtime_ns:
                    return read_summary(run_dir)
            if time.monotonic() > until_s or self._ending.wait(1.0):
                return {}  # what there is an earlier attempt has left

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(text)


ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
}  # fmt: skip


def check_shared_locks(folder: Path) -> None:
    """Raise ConfigError if locks in a folder would not hold between machines: two jobs could write
    into one run."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / ".locks"
    # NFS may have no locks at all, which only trying shows.
    try:
        with locked(probe, wait_s=0):
            pass
    except LockTaken:
        pass
    except OSError as error:
        raise ConfigError(f"hydra.sweep.dir: {error}") from None
    finally:
        probe.unlink(missing_ok=True)
    # Others give locks that hold within one machine alone, which only its options show.
    place, kind, options = mount_of(folder)
    if own := sorted(OWN_LOCKS & set(options)):
        raise ConfigError(
            f"{folder} lies on {place} ({kind}), mounted with {', '.join(own)}: a lock of one "
            "machine does not hold on another one there, so that two jobs could write into one "
            "run; choose a folder on another file system with hydra.sweep.dir=FOLDER"
        )


def mount_of(
    folder: Path, table: Path = Path("/proc/self/mountinfo")
) -> tuple[str, str, list[str]]:
    """Return where the file system of a folder is mounted, its kind and its options."""
    best = ("", "unknown", list[str]())
    with suppress(OSError):
        for line in table.read_text().splitlines():
            before, _, after = line.partition(" - ")
            # The kernel writes a space in a path as an octal number.
            place = before.split()[4].replace("\\040", " ")
            is_above = place == "/" or f"{folder}/".startswith(f"{place}/")
            # The longest mount point above the folder is the one it lies on.
            if is_above and len(place) >= len(best[0]):
                kind, _, special = after.split()[:3]
                best = (place, kind, [*before.split()[5].split(","), *special.split(",")])
    return best


def is_full(said: str) -> bool:
    """Return whether a queue will take a job later, by the last line of why it took none."""
    words = ("limit", "temporarily", "try again", "timed out")
    return any(word in said.lower() for word in words)


def _cause(run_dir: Path, job: SubmittedJob, summary: Mapping[str, Any], logs: Path) -> str:
    # What the run says of itself; else the last line that its process wrote, else its job's logs.
    if cause := summary.get("cause"):
        return str(cause)
    with suppress(OSError):
        lines = (run_dir / OUTPUT_FILE).read_text(errors="replace").strip().splitlines()
        if lines:
            return lines[-1].removeprefix("xcloud: ")
    return f"its job {job.id} ended without a result; see {logs}"
