"""The shell around every role: what it reports, closes and leaves behind. One rank, no network."""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from omegaconf import OmegaConf
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.one_way_toy import cloud, feed_config
from tests.toy import toy_config
from xcloud.base.errors import ConfigError, LinkClosed
from xcloud.features.checkpoints.restored import restored
from xcloud.features.checkpoints.resume import RankCheckpoints
from xcloud.features.checkpoints.saving import about_part
from xcloud.job import config as configs
from xcloud.job.config import Settings
from xcloud.job.given import read_settings
from xcloud.job.job import Job
from xcloud.launch import failures, one_rank, rank_process, several_machines, worker
from xcloud.launch.several_machines import TorchrunProcess
from xcloud.launch.torchrun import torchrun
from xcloud.net.memory_transport import MemoryWorld
from xcloud.rank import agreement
from xcloud.rank.agreement import Verdict
from xcloud.rank.role import Role
from xcloud.rank.stop_signal import StopSignal
from xcloud.rank.task_data import Evaluator
from xcloud.record.checkpoint_files import CheckpointFolder

CONFIG = OmegaConf.create(feed_config({"d": cloud(1), "a": cloud(1, 1.0)}, "local"))


class Noting(Role[Any]):
    """Notes what the shell calls; fails where it is told to."""

    called: list[str]
    fails_in = ""

    def run(self) -> None:
        self._call("run")

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str) -> None:
        self.called.append(name)
        self.reporter.event(name)
        if self.fails_in == name:
            raise LinkClosed(f"broke in {name}")


def live(
    job: Job, run_dir: Path, verdict: Verdict | None = None, asked: StopSignal | None = None
) -> bool:
    """Run the one rank of a job to its end. Return whether it was stopped early."""
    process = one_rank.Process(asked or StopSignal())
    transport = MemoryWorld().transport(0)
    return one_rank.run_rank(Settings(job, {}), run_dir, verdict or Verdict(), process, transport)


def saving_job(max_steps: int, every_steps: int) -> Job:
    """A toy job of one rank that saves after so many steps each time."""
    steps = [f"training.max_steps={max_steps}", f"training.checkpoint.every_steps={every_steps}"]
    return Settings.of(toy_config("local", steps)).job


@pytest.mark.parametrize("fails_in", ["", "run", "close"])
def test_what_was_said_and_sent_is_kept_however_a_rank_ends(
    fails_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    role = type("Told", (Noting,), {"called": called, "fails_in": fails_in})
    monkeypatch.setattr(one_rank, "role_of", lambda job, rank: role)
    job = Settings.of(CONFIG).job

    if fails_in:
        with pytest.raises(LinkClosed, match=f"broke in {fails_in}"):
            live(job, tmp_path)
    else:
        live(job, tmp_path)
    assert called == (["run"] if fails_in == "run" else ["run", "close"])
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events] == (called if fails_in else ["run"])
    assert json.loads((tmp_path / "rank0.wire.json").read_text())["rank"] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs a signal at the parent's death")
def test_a_rank_reads_its_checkpoints_before_any_other_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole files: disks of unequal speed may differ by more than ranks that have met wait."""
    called: list[str] = []

    def agree(*all: Any) -> Verdict:
        raise ConfigError("enough")

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(StopSignal, "install", lambda *all, **named: None)
    monkeypatch.setattr(RankCheckpoints, "table", lambda self: called.append("table") or {})
    monkeypatch.setattr(rank_process, "rendezvous_here", lambda *all: called.append("join"))
    monkeypatch.setattr(one_rank, "agree", agree)
    monkeypatch.setattr(os, "_exit", sys.exit)
    configs.Settings.of(CONFIG).write(tmp_path / configs.EXPERIMENT_FILE)
    CheckpointFolder(tmp_path).write(1, 0, {}, {})
    with pytest.raises(SystemExit):
        worker.main([str(tmp_path), "--rank", "0"])
    assert called == ["table", "join"]


@pytest.mark.parametrize(("from_step", "left"), [(0, [9, 5]), (5, [5])])
def test_a_run_that_begins_anew_deletes_no_complete_part(
    from_step: int, left: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Going(Noting):
        called = []  # noqa: RUF012

        def run(self) -> None:
            restored(self.context, {}, None, {}).close(is_finished=False)

    monkeypatch.setattr(one_rank, "role_of", lambda job, rank: Going)
    job = Settings.of(CONFIG).job
    folder = CheckpointFolder(tmp_path)
    for step in (5, 9):
        folder.write(step, 0, {}, about_part(job.places, {}, 7, {}))
    live(job, tmp_path, Verdict(from_step=from_step))
    assert folder.steps() == left


def test_a_stopped_rank_ends_with_its_launcher() -> None:
    read_end, write_end = os.pipe()
    launcher = os.fork()
    if not launcher:
        here = os.getpid()
        if not (rank := os.fork()):
            rank_process.tie_to_parent(here)
            os.write(write_end, b"1")
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        os.read(read_end, 1)
        os.waitpid(rank, os.WUNTRACED)
        os.write(write_end, str(rank).encode())
        os._exit(0)
    os.waitpid(launcher, 0)
    rank = int(os.read(read_end, 20))
    stat = Path(f"/proc/{rank}/stat")
    until_s = time.monotonic() + 5
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        if time.monotonic() > until_s:
            os.kill(rank, signal.SIGKILL)
            pytest.fail("the rank outlives its launcher")
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["try #2", "why?", "50%20 ü"])
def test_ranks_meet_in_their_run_folder_whatever_its_name(name: str, tmp_path: Path) -> None:
    run_dir = tmp_path / name
    run_dir.mkdir()
    job = Settings.of(OmegaConf.create(feed_config({"d": cloud(1), "a": cloud(1, 1.0)}))).job
    agreement.rendezvous_here(job, 0, run_dir).write("here", "yes")

    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert "rendezvous" in {path.name for path in run_dir.iterdir()}


def test_an_error_of_our_own_is_said_in_one_line_and_its_traceback_kept_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        raise ConfigError("max_steps is negative") from KeyError("cause")
    except ConfigError as error:
        failures.write_failure(tmp_path, 3, error)
    assert capsys.readouterr().err == "xcloud: rank 3: max_steps is negative\n"
    kept = json.loads((tmp_path / "rank3.error.json").read_text())
    assert kept["message"] == "max_steps is negative" and "KeyError" in "".join(kept["traceback"])

    failures.write_failure(tmp_path, 3, LinkClosed("what follows from it"))
    assert json.loads((tmp_path / "rank3.error.json").read_text()) == kept
    assert not capsys.readouterr().err
    failures.write_failure(tmp_path, 4, ValueError("a defect"))
    assert "ValueError: a defect" in capsys.readouterr().err


def test_a_run_folder_holds_the_experiment_that_was_run_in_it(tmp_path: Path) -> None:
    (mine := tmp_path / "mine.yaml").write_text("# mine")
    several_machines.keep_experiment(mine, Settings.of(CONFIG), run_dir=tmp_path)
    kept = tmp_path / "experiment.yaml"
    assert read_settings(kept).job == Settings.of(CONFIG).job
    kept.write_text("# mine")
    several_machines.keep_experiment(kept, Settings.of(CONFIG), run_dir=tmp_path)
    assert kept.read_text() == "# mine"


class Monitored:
    """A process that follows the run, and how it ends."""

    pid = 7

    def __init__(self, code: int) -> None:
        self.code, self.waited_s = code, list[float]()

    def wait(self, timeout: float) -> int:
        self.waited_s.append(timeout)
        return self.code


def of_torchrun(run_dir: Path, rank: int, is_first: bool, monitor: Any = None) -> TorchrunProcess:
    """A rank of two that torchrun has started, once it has found the other one."""
    process = TorchrunProcess.__new__(TorchrunProcess)
    (run_dir / "given.yaml").write_text("# given")
    process.file, process.run_dir, process.rank = run_dir / "given.yaml", run_dir, rank
    process.is_first_here, process.monitor = is_first, monitor
    process.detector = cast(Any, SimpleNamespace(close=lambda: process.state.enter("closed")))
    process.asked = cast(Any, SimpleNamespace(was_asked=False))
    process.state = cast(Any, SimpleNamespace(listener=None, entered=[], close=None))
    process.state.enter = process.state.entered.append  # type: ignore[attr-defined,method-assign]
    return process


def two_ranks(run_dir: Path, monkeypatch: pytest.MonkeyPatch, step: int = 4) -> Settings:
    """Settings of them; step: of their last checkpoint."""
    folder = CheckpointFolder(run_dir)
    folder.write(step, 1, {"x": 1}, {})
    folder.mark_agreed(step, 1, {})
    (run_dir / "endings").mkdir()
    monkeypatch.setenv(failures.ENDINGS, str(run_dir / "endings"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    return Settings.of(toy_config("two_clouds"))


LAST = "last checkpoint: step 4; give the same command in every cloud"


@pytest.mark.parametrize(
    ("rank", "is_first", "is_stopped", "expected"),
    [
        (1, True, False, ["resumes from step 4", "this cloud's part of the model: "]),
        (1, True, True, ["resumes from step 4", "stopped by cloud_a", LAST]),
        (1, False, True, []),
        (0, True, True, ["resumes from step 4"]),  # the monitor says the rest
    ],
)
def test_one_rank_of_each_machine_says_how_the_run_began_and_ended(
    rank: int,
    is_first: bool,
    is_stopped: bool,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = two_ranks(tmp_path, monkeypatch)
    monitor = Monitored(0)
    monkeypatch.setattr(several_machines, "start_monitor", lambda *_, **__: monitor)
    monkeypatch.setattr(rank_process.RankProcess, "play", lambda *_: is_stopped)
    (tmp_path / "model").mkdir()
    (tmp_path / "link-1.clock").touch()
    process = of_torchrun(tmp_path, rank, is_first)
    assert process.play(settings, cast(Any, None), Verdict(from_step=4)) is is_stopped

    headline = [settings.job.headline] if is_first else []
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line in headline] == headline
    told = [line for line in lines if line.startswith(("resumes", "stopped", "last", "this cl"))]
    assert len(told) == len(expected)
    assert all(line.startswith(start) for line, start in zip(told, expected, strict=True))
    assert (tmp_path / "experiment.yaml").exists() == is_first
    assert not (tmp_path / "link-1.clock").exists()
    ending = tmp_path / "endings" / str(rank)
    assert ending.exists() == is_stopped
    assert (process.state.listener is not None) == (is_first and rank != 0)
    assert len(monitor.waited_s) == (rank == 0)


def test_a_monitor_that_was_killed_is_told_with_the_command_that_writes_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = two_ranks(tmp_path, monkeypatch)
    for code, is_told in ((-9, True), (1, False)):
        (tmp_path / "summary.json").write_text("{}")
        monkeypatch.setattr(
            several_machines, "start_monitor", lambda *_, code=code, **__: Monitored(code)
        )
        monkeypatch.setattr(rank_process.RankProcess, "play", lambda *_: False)
        of_torchrun(tmp_path, 0, True).play(settings, cast(Any, None), Verdict())
        command = f"python -m xcloud monitor {tmp_path} --experiment {tmp_path}/given.yaml --again"
        assert (command in capsys.readouterr().out) == is_told
        assert (tmp_path / "summary.json").exists() != is_told


@pytest.mark.parametrize(
    ("error", "ending"), [(ConfigError("no"), "refused"), (LinkClosed("gone"), None)]
)
def test_a_rank_that_fails_lets_the_table_be_written_and_says_how_to_go_on(
    error: Exception,
    ending: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    two_ranks(tmp_path, monkeypatch)
    monkeypatch.setattr(rank_process.RankProcess, "fail", lambda *_: 3)
    monitor = Monitored(1)
    process = of_torchrun(tmp_path, 1, True, monitor)
    assert process.fail(error) == 3
    assert process.state.entered == ["closed"] and len(monitor.waited_s) == 1  # type: ignore[attr-defined]
    assert capsys.readouterr().out.splitlines() == [LAST]
    told = [file.read_text() for file in (tmp_path / "endings").iterdir()]
    assert told == ([] if ending is None else [ending])


@pytest.mark.parametrize(
    ("ends_with", "code", "said"),
    [
        (None, 0, ""),
        (ChildFailedError("x", {1: ProcessFailure(0, 7, 75, "")}), 75, ""),
        (ChildFailedError("x", {1: ProcessFailure(0, 7, 1, "")}), 1, ""),
        (ChildFailedError("x", {1: ProcessFailure(0, 7, -9, "")}), 1, "rank 1 was ended by SIGK"),
        (SignalException("x", signal.SIGINT), 75, ""),
        (DistNetworkError("name: EADDRINUSE"), 1, "host:123: the port is taken"),
    ],
    ids=["well", "stopped", "failed", "killed", "asked", "port"],
)
def test_torchrun_repeats_nothing_and_names_what_its_ranks_could_not_say(
    ends_with: BaseException | None, code: int, said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def run(given: argparse.Namespace) -> None:
        assert given.training_script_args == ["worker", "file"]
        if ends_with is not None:
            raise ends_with

    monkeypatch.setattr("torch.distributed.run.run", run)
    monkeypatch.setattr("logging.disable", lambda level: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    words = ["--master-addr=host", "--master-port=123", "-m", "xcloud", "worker", "file"]
    assert torchrun(words) == code
    shown = capsys.readouterr()
    assert shown.out == "waiting for all machines at host:123\n"
    assert (said in shown.err) if said else (not shown.err)


def test_a_request_to_end_is_noted_only_while_work_can_be_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    monkeypatch.setattr(os, "_exit", sys.exit)
    asked = StopSignal()
    asked.install(signal.SIGUSR1, exit_code=75)
    try:
        with pytest.raises(SystemExit) as at_once, asked.armed(can_save=False):
            signal.raise_signal(signal.SIGUSR1)
        assert at_once.value.code == 75 and not asked.was_asked
        with asked.armed(can_save=True):
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)  # one Ctrl+C may come twice
        assert asked.was_asked
        with pytest.raises(SystemExit) as afterwards:
            signal.raise_signal(signal.SIGUSR1)
        assert afterwards.value.code == 75
        with pytest.raises(ZeroDivisionError), asked.armed(can_save=True):
            _ = 1 // 0
        signal.raise_signal(signal.SIGUSR1)
        asked.asked_at_s = time.monotonic() - 60
        with pytest.raises(SystemExit) as again:
            signal.raise_signal(signal.SIGUSR1)
        assert again.value.code == 128 + signal.SIGUSR1
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_during_the_last_evaluation_is_not_kept_for_a_step_that_never_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, evaluate = StopSignal(), Evaluator.evaluate
    armed: list[tuple[object, ...]] = []

    def noted(evaluator: Evaluator, *given: Any) -> Any:
        armed.append((*given, asked.is_armed))
        return evaluate(evaluator, *given)

    monkeypatch.setattr(Evaluator, "evaluate", noted)
    job = saving_job(max_steps=2, every_steps=1)
    assert not live(job, tmp_path, asked=asked)
    assert armed[-1] == ("test", 2, False)


def test_a_signal_while_the_last_step_is_saved_ends_the_run_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, write = StopSignal(), CheckpointFolder.write

    def write_and_hear(folder: CheckpointFolder, step: int, *rest: Any) -> int:
        assert asked.is_armed, "a signal would end the process with half a file"
        asked.asked_at_s = time.monotonic() if step == 3 else None
        return write(folder, step, *rest)

    monkeypatch.setattr(CheckpointFolder, "write", write_and_hear)
    job = saving_job(max_steps=3, every_steps=2)
    assert live(job, tmp_path, asked=asked)
    assert CheckpointFolder(tmp_path).agreed_steps() == [3, 2]
    told = (tmp_path / "events.jsonl").read_text()
    assert '"event":"stop"' in told and '"name":"evaluation"' not in told


def test_a_model_that_wrote_an_answer_goes_on_training() -> None:
    stage: Any = torch.nn.Dropout()
    stage.follow = lambda tokens: iter([stage.training])
    pipeline = SimpleNamespace(stages=[stage], autocast=contextlib.nullcontext)
    written = list(Evaluator._follow(cast(Any, SimpleNamespace(pipeline=pipeline)), [1]))
    assert written == [False] and stage.training


def test_torchrun_must_start_the_ranks_of_the_file_and_no_run_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Settings.of(toy_config("two_clouds", ["training.max_steps=5"])).job
    for started, is_right in ((1, False), (2, True), (3, False)):
        monkeypatch.setenv("WORLD_SIZE", str(started))
        refuses = contextlib.nullcontext() if is_right else pytest.raises(
            ConfigError, match=f"torchrun started {started} ranks in all, but .* have 2"
        )  # fmt: skip
        with refuses:
            several_machines.check_started(job)
    for status, num_steps, is_done in (
        ("finished", 5, True), ("finished", 6, True), ("finished", 4, False), ("failed", 5, False),
    ):  # fmt: skip
        (tmp_path / "summary.json").write_text(
            json.dumps({"status": status, "num_steps": num_steps})
        )
        refuses = pytest.raises(ConfigError, match="holds a finished run") if is_done else (
            contextlib.nullcontext()
        )  # fmt: skip
        with refuses:
            several_machines.check_unfinished(job, tmp_path)


def test_who_has_stopped_a_run_is_said_as_far_as_it_is_known() -> None:
    two, three = ["a", "b"], ["a", "b", "c"]
    assert several_machines.stopped_by(two, "b", was_asked=True).startswith("stopped by b (")
    assert several_machines.stopped_by(two, "b", was_asked=False) == "stopped by a"
    assert "another cloud or machine" in several_machines.stopped_by(three, "b", was_asked=False)
