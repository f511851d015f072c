"""Points as jobs of a cluster: what is refused, followed, submitted again; and a real Slurm."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from hydra_plugins.xcloud_launcher import SweepLauncher
from omegaconf import OmegaConf

from tests import slurm
from tests.owners import Owners, address
from tests.runs import ROOT, wait_for
from tests.sweep_runs import points, write_run
from xcloud.base.errors import ConfigError, RunFailed
from xcloud.study import cluster, point_process
from xcloud.study.cluster import (
    JOB_FILE,
    Jobs,
    check_shared_locks,
    is_full,
    mount_of,
    runner_of,
)
from xcloud.study.point_process import PointJob
from xcloud.study.points import Point, SweepState, name_points
from xcloud.study.runner import REFUSED, LauncherSettings

STANDS_STILL_S = 300.0
MOUNTS = """21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
22 21 0:30 / /shared rw,relatime - nfs4 server:/x rw,vers=4.2,local_lock=none
23 21 0:31 / /shared/fast rw - nfs server:/y rw,vers=3,nolock
24 21 0:32 / /lustre rw - lustre 10.0.0.1:/l rw,localflock
"""


@pytest.mark.parametrize(
    ("folder", "place", "options"),
    [
        ("/shared/sweep", "/shared", {"local_lock=none"}),
        ("/shared/fast/sweep", "/shared/fast", {"nolock"}),
        ("/sharedother", "/", {"relatime"}),
        ("/lustre/a/b", "/lustre", {"localflock"}),
    ],
)
def test_the_mount_of_a_folder_says_whether_its_locks_hold_between_machines(
    folder: str, place: str, options: set[str], tmp_path: Path
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    found, _, given = mount_of(Path(folder), table)
    assert found == place and options <= {*given}


def test_a_folder_without_shared_locks_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_shared_locks(tmp_path / "fine")
    mount = "/shared/fast", "nfs", ["rw", "nolock"]
    monkeypatch.setattr(cluster, "mount_of", lambda folder: mount)
    with pytest.raises(ConfigError, match=r"shared/fast .nfs., mounted with nolock.*sweep.dir"):
        check_shared_locks(tmp_path / "other")


def test_a_machine_without_slurm_is_said_and_settings_of_jobs_need_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no sbatch here"):
        runner_of(LauncherSettings(on="slurm"), folder=tmp_path)
    with pytest.raises(ConfigError, match=r"hydra\.launcher\.job is for hydra\.launcher\.on"):
        LauncherSettings(job={"timeout_min": 3})


def test_hydra_s_launcher_ends_where_its_jobs_cannot_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    launcher = SweepLauncher(on="slurm")
    launcher.config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}})
    launcher.settings = LauncherSettings(on="slurm")
    with pytest.raises(SystemExit) as ended:
        launcher.run_points([("seed=1",)], drops_invalid=True)
    assert ended.value.code == REFUSED and "no sbatch here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "full"),
    [
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit", True),
        ("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying", True),
        ("sbatch: error: invalid partition specified: gpu", False),
    ],
)
def test_a_full_queue_is_told_from_a_job_that_is_refused(said: str, full: bool) -> None:
    assert is_full(said) is full


class JobsThatEnd(Jobs):
    """Jobs of which each ends as `statuses` says, at once."""

    def __init__(self, statuses: list[str], point: Point) -> None:
        self._on = "local"
        self.statuses = statuses
        self.num_submitted = 0
        self.point = point
        self._jobs_dir = Path("jobs")

    def _running(self, run_dir: Path) -> Any:
        return None

    def _submit(self, point: Point, run_dir: Path) -> Any:
        self.num_submitted += 1
        self.run_dir = run_dir
        return SimpleNamespace(id="7", on="local")

    def _follow(self, point: Point, job: Any) -> None:
        (self.run_dir / JOB_FILE).touch()
        status = self.statuses.pop(0)
        if status != "nothing":
            write_run(self.run_dir, self.point.named, status=status, cause=f"it {status}")


def test_a_job_s_own_process_does_not_load_torch(tmp_path: Path) -> None:
    file = tmp_path / "job.pkl"
    file.write_bytes(pickle.dumps(PointJob("run", threads="1")))
    code = (
        "import pickle, sys; job = pickle.load(open(sys.argv[1], 'rb')); "
        "print(type(job).__name__, 'torch' in sys.modules)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, file], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == ["PointJob", "False"], said.stderr


def one_point() -> Point:
    found = points("seed=1")
    name_points(found)
    return found[0]


def test_a_job_that_is_warned_while_it_waits_saves_its_point_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """submitit calls checkpoint in a signal's handler, in the thread that waits in __call__."""
    kept = SimpleNamespace(DelayedSubmission=lambda job: ("again", job.run_dir, job.threads))
    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(helpers=kept))
    monkeypatch.setitem(sys.modules, "submitit.helpers", kept)
    monkeypatch.setattr(
        point_process, "start_point", lambda *given, **named: subprocess.Popen(["sleep", "60"])
    )
    job = PointJob(str(tmp_path), threads="1")
    found: list[Any] = []
    before = signal.signal(signal.SIGUSR2, lambda *given: found.append(job.checkpoint()))
    warning = Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2))
    try:
        warning.start()
        assert job() == -signal.SIGTERM
    finally:
        warning.cancel()
        signal.signal(signal.SIGUSR2, before)
    assert found == [("again", str(tmp_path), "1")]


def test_a_job_that_stopped_is_submitted_again_and_one_that_failed_is_not(tmp_path: Path) -> None:
    point = one_point()
    jobs = JobsThatEnd(["stopped", "stopped", "finished"], point)
    jobs.run(point, run_dir=tmp_path)
    assert jobs.num_submitted == 3

    jobs = JobsThatEnd(["failed"], point)
    with pytest.raises(RunFailed, match="it failed"):
        jobs.run(point, run_dir=tmp_path)
    assert jobs.num_submitted == 1


class Queue:
    """What `Jobs` uses of submitit and of Slurm's commands, for one job at a time.

    states: of the first job, as squeue tells them; then it has ended, as each later one has.
    ends: what each job leaves: the status of a run, or "nothing".
    """

    def __init__(
        self, states: Sequence[str], ends: Sequence[str], refusals: Sequence[str]
    ) -> None:
        self.states, self.ends, self.refusals = [*states], [*ends], [*refusals]
        self.is_cancelled = self.is_there = False
        self.chosen: dict[str, Any] = {}
        self.commands: list[list[str]] = []
        self.leave: Callable[[str], None] = lambda status: None

    def AutoExecutor(self, folder: Path, cluster: str, **more: Any) -> Queue:
        return self

    def update_parameters(self, **chosen: Any) -> None:
        self.chosen |= chosen

    def submit(self, job: PointJob) -> Any:
        if self.refusals:
            raise RuntimeError(f"failed\nsbatch: error: {self.refusals.pop(0)}")
        self.is_there = True
        return SimpleNamespace(job_id="41")

    def run(self, command: list[str], **more: Any) -> Any:
        self.commands.append(command)
        said = "JobState=CANCELLED" if self.is_cancelled else "JobState=COMPLETED"
        if command[0] == "squeue":
            state = self.states.pop(0) if self.states else "COMPLETED"
            said = f"41 {state}\n"
            if state == "COMPLETED" and self.is_there:
                self.is_there = False
                self.leave(self.ends.pop(0))
        return SimpleNamespace(returncode=0, stdout=said, stderr="")


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Queue, Jobs]]:
    def made(*ends: str, states: Sequence[str] = (), refusals: Sequence[str] = ()) -> Any:
        found = Queue(states, ends, refusals)
        monkeypatch.setitem(sys.modules, "submitit", found)
        monkeypatch.setattr(cluster.shutil, "which", lambda name: name)
        monkeypatch.setattr(cluster.subprocess, "run", found.run)
        monkeypatch.setattr(cluster, "POLL_S", {"slurm": 0.0, "local": 0.0})
        for name, value in (("FULL_AFTER_S", 0.0), ("SETTLE_S", 0.0), ("MAX_AGAIN", 3)):
            monkeypatch.setattr(cluster, name, value)
        return found, Jobs("slurm", {"timeout_min": 7}, tmp_path / "sweep")

    return made


def leaves(run_dir: Path, point: Point) -> Callable[[str], None]:
    def leave(status: str) -> None:
        if status != "nothing":
            write_run(run_dir, point.named, status=status, cause=f"it {status}")

    return leave


def test_a_point_waits_runs_stops_and_comes_back_in_its_queue_and_each_is_said_once(
    queue: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = ["PENDING", "PENDING", "RUNNING", "RUNNING"]
    slurm, jobs = queue("stopped", "finished", states=states, refusals=["try again later"] * 2)
    point, run_dir = one_point(), tmp_path / "run"
    run_dir.mkdir()
    slurm.leave = leaves(run_dir, point)
    jobs.run(point, run_dir)

    name = f"[{point.name}]"
    assert capsys.readouterr().out.splitlines() == [
        "the queue takes no more jobs now: sbatch: error: try again later",
        f"{name} job 41: pending",
        f"{name} job 41: running",
        f"{name} stopped: it stopped",
    ]
    assert slurm.chosen == {"timeout_min": 7, "name": point.folder, "cpus_per_task": 2}
    assert (run_dir / "experiment.yaml").exists() and not jobs.is_running(run_dir)
    assert not jobs.followed


@pytest.mark.parametrize(
    ("ends", "is_cancelled", "said"),
    [
        (["failed"], False, "it failed"),
        (["stopped"], True, "it stopped"),  # who cancels a job does not want it back
        (["stopped"] * 3, False, "it has stopped 3 times without finishing"),
        (["nothing"], False, r"its job 41 ended without a result; see .*sweep/run"),
    ],
)
def test_why_a_job_has_not_finished_its_point_is_said(
    queue: Callable[..., Any], ends: list[str], is_cancelled: bool, said: str, tmp_path: Path
) -> None:
    slurm, jobs = queue(*ends)
    slurm.is_cancelled = is_cancelled
    point, run_dir = one_point(), tmp_path / "run"
    run_dir.mkdir()
    slurm.leave = leaves(run_dir, point)
    with pytest.raises(RunFailed, match=said):
        jobs.run(point, run_dir)
    assert not slurm.ends
    if ends == ["nothing"]:
        slurm, jobs = queue("nothing")
        (run_dir / point_process.OUTPUT_FILE).write_text("a\nxcloud: out of memory\n")
        with pytest.raises(RunFailed, match=r"^out of memory$"):
            jobs.run(point, run_dir)
        _, jobs = queue(refusals=["invalid partition"])
        with pytest.raises(RunFailed, match="the job was not taken: sbatch: error: invalid part"):
            jobs.run(point, run_dir)
        (run_dir / JOB_FILE).write_text(json.dumps({"on": "local", "id": "1", "host": "other"}))
        with pytest.raises(ConfigError, match="is run by a job on other"):
            jobs.run(point, run_dir)


@pytest.mark.parametrize("is_twice", [False, True])
def test_ctrl_c_leaves_jobs_alone_and_a_second_one_cancels_them(
    queue: Callable[..., Any],
    is_twice: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    slurm, jobs = queue()
    jobs.followed = [cluster.SubmittedJob("slurm", number, "here") for number in ("41", "42")]

    def sleep(seconds: float) -> None:
        if is_twice:
            raise KeyboardInterrupt

    monkeypatch.setattr(cluster.time, "sleep", sleep)
    before = signal.getsignal(signal.SIGINT)
    try:
        jobs.end()
    finally:
        signal.signal(signal.SIGINT, before)
    cancels = [["scancel", "41"], ["scancel", "42"]] if is_twice else []
    assert slurm.commands == cancels
    said = capsys.readouterr().out
    assert "2 jobs continue; the same command follows them" in said
    assert ("cancelled" in said.splitlines()) == is_twice


def test_a_point_that_a_job_runs_is_followed_whatever_has_changed(tmp_path: Path) -> None:
    point = one_point()
    state = SweepState(tmp_path)
    (decision,) = state.decide([point], accept_changes=False)
    run_dir = state.begin(decision, parallel=1)
    (run_dir / "mark").touch()

    (again,) = SweepState(tmp_path).decide([point], False, is_running=lambda folder: True)
    assert again.verdict == "follow" and state.begin(again, parallel=1) == run_dir
    assert (run_dir / "mark").exists()
    (ended,) = SweepState(tmp_path).decide([point], False)
    assert ended.verdict == "again"


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    pytest.importorskip("submitit")
    if not slurm.is_installed():
        pytest.skip("needs slurm-wlm and munge, and root")
    with slurm.slurm(tmp_path / "slurm") as environment:
        paths = [str(ROOT), *(path for path in sys.path if path)]
        yield {**environment, "PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1"}


def sweep(folder: Path, environment: dict[str, str], *more: str) -> subprocess.Popen[bytes]:
    words = [
        "run.py", "--config-dir", "tests/conf", "-m", "+exp=toy", "tracker=none", "cluster=local",
        f"hydra.sweep.dir={folder}", f"sweep={folder.name}", "hydra.launcher.on=slurm",
        "hydra.launcher.job={timeout_min: 30}", *more,
    ]  # fmt: skip
    with open(folder.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment, stdout=log, stderr=log
        )


def finished(folder: Path) -> int:
    found = [json.loads(path.read_text()) for path in folder.glob("*/summary.json")]
    return sum(summary["status"] == "finished" for summary in found)


def follow(folder: Path, is_over: Callable[[], bool]) -> None:
    """Wait until it is over. Fail if no point finishes for so long that the sweep stands still: a
    point takes 15 s of processor, and how much of one it gets the machine decides."""
    before = -1
    while not is_over():
        if (now := finished(folder)) != before:
            before = now
            until_s = time.monotonic() + STANDS_STILL_S
        assert time.monotonic() < until_s, f"{now} finished, and no further one\n{log_of(folder)}"
        time.sleep(0.5)


def log_of(folder: Path) -> str:
    return folder.with_suffix(".log").read_text()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_points_of_a_sweep_on_slurm_run_once_though_the_launcher_is_killed_in_the_middle(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    folder = tmp_path / "grid"
    words = ["seed=" + ",".join(map(str, range(1, 25))), "hydra.launcher.parallel=24"]
    first = sweep(folder, environment, *words)
    follow(folder, lambda: finished(folder) >= 8 or first.poll() is not None)
    assert first.poll() is None, log_of(folder)
    first.kill()
    first.wait()

    again = sweep(folder, environment, *words)
    follow(folder, lambda: again.poll() is not None)
    assert again.returncode == 0, log_of(folder)
    assert finished(folder) == 24
    ids = [json.loads(path.read_text())["id"] for path in folder.glob("*/job.json")]
    assert sorted(map(int, ids)) == list(range(1, 25))  # no point was submitted twice
    said = log_of(folder)
    assert "is followed; a job runs it" in said and (folder / "table.csv").exists()
    assert not list(folder.glob("earlier/*"))


@pytest.mark.slow
@pytest.mark.nightly
def test_a_job_that_is_requeued_goes_on_and_ctrl_c_leaves_jobs_alone(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    folder = tmp_path / "long"
    words = ["seed=1", "training.max_steps=1500", "training.checkpoint.every_steps=10"]
    first = sweep(folder, environment, *words)
    run_dir = folder / "off_s1"
    wait_for(lambda: list(run_dir.glob("checkpoints/*")) != [] or first.poll() is not None, 200)
    assert first.poll() is None, log_of(folder)
    first.send_signal(signal.SIGINT)
    assert first.wait(60) == 130
    job = json.loads((run_dir / JOB_FILE).read_text())["id"]
    assert "RUNNING" in slurm.asked(["squeue", "-h", "-j", job, "-o", "%T"], environment)

    slurm.asked(["scancel", "--signal=USR2", job], environment)  # the steps, as near its end
    assert sweep(folder, environment, *words).wait(280) == 0
    assert finished(folder) == 1
    events = (run_dir / "events.jsonl").read_text()
    assert '"event": "resume"' in events or '"event":"resume"' in events


@pytest.mark.slow
@pytest.mark.nightly
def test_jobs_of_this_machine_survive_the_command_that_started_them(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    folder = tmp_path / "here"
    paths = [str(ROOT), *(path for path in sys.path if path)]
    environment = {"PYTHONPATH": ":".join(paths), "PATH": slurm.PATH, "HOME": str(tmp_path)}
    words = ["hydra.launcher.on=local", "seed=1,2", "hydra.launcher.parallel=2"]
    first = sweep(folder, environment, *words)
    wait_for(lambda: len([*folder.glob("*/job.json")]) == 2 or first.poll() is not None, 200)
    first.kill()
    first.wait()
    ids = {json.loads(path.read_text())["id"] for path in folder.glob("*/job.json")}
    assert all(psutil.pid_exists(int(job)) for job in ids)

    assert sweep(folder, environment, *words).wait(200) == 0
    assert finished(folder) == 2
    assert {json.loads(path.read_text())["id"] for path in folder.glob("*/job.json")} == ids


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_batch_script_saves_when_slurm_warns_it_and_goes_on_in_its_queue(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    more = ["training.max_steps=1500", "training.checkpoint.every_steps=100"]
    owners = Owners(tmp_path, [address("cloud_b"), *more])
    jobs = {}
    for cloud in owners.clouds:
        files = tmp_path / f"owner_{cloud}"
        shutil.copy(owners.file, files)
        given = {
            "CLOUD": cloud, "FILES": files, "XCLOUD": sys.prefix, "OMP_NUM_THREADS": "1",
            "PYTHONPATH": environment["PYTHONPATH"],
        }  # fmt: skip
        words = [
            "sbatch", "--parsable", f"--chdir={files}", "--cpus-per-task=1", "--gpus-per-node=0",
            "--export=" + ",".join(f"{name}={value}" for name, value in given.items()),
            str(ROOT / "deploy/xcloud.sbatch"),
        ]  # fmt: skip
        jobs[cloud] = slurm.asked(words, environment).strip()

    def said() -> str:
        logs = sorted(tmp_path.glob("owner_*/*.log"))
        return f"{jobs}" + "".join(f"\n{path.name}\n{path.read_text()}" for path in logs)

    def queued() -> set[str]:
        return {*slurm.asked(["squeue", "-h", "-o", "%i"], environment).split()}

    run_dir = tmp_path / "owner_cloud_a/run-cloud_a"
    wait_for(lambda: [*run_dir.glob("checkpoints/*")] != [] or queued() < {*jobs.values()}, 300)
    assert queued() == {*jobs.values()}, said()
    warned = ["scancel", "--signal=USR1", "--batch", jobs["cloud_a"]]  # as 300 s before its end
    assert not slurm.asked(warned, environment)
    wait_for(lambda: not queued(), 900)
    for job in jobs.values():
        shown = slurm.asked(["scontrol", "show", "job", job], environment)
        assert "Restarts=1 " in shown and "JobState=COMPLETED" in shown, shown + said()
    assert '"event":"resume"' in (run_dir / "events.jsonl").read_text().replace(" ", "")


def test_a_job_of_this_machine_is_the_process_that_began_when_it_did(
    queue: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, jobs = queue()
    process = psutil.Process()
    own = cluster.SubmittedJob("local", str(os.getpid()), "here", process.create_time())
    assert jobs.state_of(own) == "RUNNING" and not jobs.was_cancelled(own)
    earlier = cluster.SubmittedJob("local", own.id, "here", process.create_time() - 1.0)
    assert jobs.state_of(earlier) is None, "its number was given to another process"
    monkeypatch.setattr(psutil.Process, "status", lambda process: psutil.STATUS_ZOMBIE)
    assert jobs.state_of(own) is None
    monkeypatch.setattr(psutil, "Process", Mock(side_effect=psutil.NoSuchProcess(1)))
    assert jobs.state_of(own) is None


def test_a_second_ctrl_c_ends_the_runs_of_this_machine_too(
    queue: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, jobs = queue()
    asked: list[int] = []
    children = [SimpleNamespace(terminate=lambda n=n: asked.append(n)) for n in (7, 8)]

    def process(number: int) -> Any:
        if number == 41:
            raise psutil.NoSuchProcess(41)
        return SimpleNamespace(children=lambda recursive: children if recursive else [])

    monkeypatch.setattr(psutil, "Process", process)
    monkeypatch.setattr(cluster.time, "sleep", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(cluster.signal, "signal", lambda *of: None)
    jobs.followed = [cluster.SubmittedJob("local", number, "here") for number in ("41", "42")]
    jobs.end()
    assert asked == [7, 8]
