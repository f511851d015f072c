"""What a sweep refuses, skips, runs again and says; runs are faked, files are real."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import xcloud
from tests.nightly import first_daily
from tests.sweep_runs import FakeRuns, compose, points, run_sweep
from xcloud.base.errors import ConfigError, RunFailed
from xcloud.base.project import code_digests
from xcloud.features.checkpoints import resume
from xcloud.launch import local
from xcloud.launch.processes import RunStopped
from xcloud.record.checkpoint_files import CheckpointFolder
from xcloud.study import runner
from xcloud.study.points import (
    BESIDE_CODE,
    Decision,
    Point,
    SweepState,
    code_fingerprint,
    name_points,
)
from xcloud.study.runner import OUTPUT_FILE, Processes, check_name

GRID = ["seed=1", "seed=2", "seed=3"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "multirun" / "s"


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have their own tests, and take most of the time."""
    monkeypatch.setattr("xcloud.study.pictures.write_pictures", lambda *arguments, **named: [])


def test_a_wrong_point_refuses_the_sweep_with_its_reason(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir(parents=True)
    (folder / "multirun.yaml").touch()  # Hydra has written it by then
    runs = FakeRuns()

    assert run_sweep(folder, ["seed=1", "seed=-1", "training.max_steps=0"], runs) == 2
    said = capsys.readouterr().err
    assert "nothing was started; 2 of 3 points" in said
    assert "seed=-1: seed must be" in said and "training.max_steps=0: training.max_steps" in said
    assert runs.names == [] and not folder.exists()


def test_a_failed_point_is_said_and_the_others_go_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = FakeRuns(fail=["none s1"])

    assert run_sweep(folder, GRID, runs) == 1
    assert runs.names == ["none s1", "none s2", "none s3"]
    said = capsys.readouterr().out
    failed = next(line for line in said.splitlines() if line.startswith("none s1: FAILED"))
    assert "asked to fail; the others continue" in failed and said.index(failed) < said.index(
        "[2/3]"
    )
    assert "1 of 3 points failed" in said and "sweep=s" in said.splitlines()[-1]
    assert "asked to fail" in (folder / "points.csv").read_text()


def test_an_interrupted_point_goes_on_in_its_folder_unless_something_changed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_sweep(folder, GRID, FakeRuns(fail=["none s1", "none s2"])) == 1
    first, second = (next(folder.glob(f"*{seed}")) for seed in ("s1", "s2"))
    saved = CheckpointFolder(first)
    saved.write(40, 0, {"step": 40}, {})
    saved.mark_agreed(40, 0, {})
    capsys.readouterr()

    runs = FakeRuns()
    assert run_sweep(folder, GRID, runs) == 0
    said = capsys.readouterr().out
    assert runs.names == ["none s1", "none s2"]
    assert "none s1 resumes; from step 40; failed" in said and "none s2 runs again; failed" in said
    assert saved.agreed_steps() == [40]
    assert [path.name for path in (folder / "earlier").iterdir()] == [second.name]


def test_points_that_are_wrong_for_one_reason_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = [f"training.max_steps={steps} seed={seed}" for steps in (0, 5) for seed in (1, 2, 3)]

    assert run_sweep(folder, grid, FakeRuns()) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "3 of 6 points" in said[0]
    assert "training.max_steps=0 seed=1 (and 2 more): training.max_steps must be" in said[1]


def test_stop_on_failure_starts_nothing_more(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = FakeRuns(fail=["none s2"])

    assert run_sweep(folder, GRID, runs, stop_on_failure=True) == 1
    assert runs.names == ["none s1", "none s2"]
    said = capsys.readouterr().out
    failed = next(line for line in said.splitlines() if "FAILED" in line)
    assert failed.endswith("no other starts"), "and no time left is promised"
    assert "1 not tried (stop_on_failure); to run all of these again" in said


def test_points_at_once_stop_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Slow(FakeRuns):
        def run(self, point: Point, run_dir: Path) -> None:
            time.sleep(0.1 if point.name == "none s1" else 0.3)
            super().run(point, run_dir)

    runs = Slow(fail=["none s1"])

    assert run_sweep(folder, GRID, runs, parallel=2, stop_on_failure=True) == 1
    assert sorted(runs.names) == ["none s1", "none s2"]
    said = capsys.readouterr().out
    assert "none s2: finished" in said and "1 not tried (stop_on_failure)" in said


def test_a_point_whose_folder_cannot_be_made_has_failed_and_the_others_go_on(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = SweepState.begin

    def fail(state: SweepState, decision: Decision, at_once: int) -> Path:
        if decision.point.name == "none s1":
            raise OSError(28, "No space left on device")
        return begin(state, decision, at_once)

    class Broken(FakeRuns):
        def run(self, point: Point, run_dir: Path) -> None:
            if point.name == "none s2":
                raise ZeroDivisionError("oh")
            super().run(point, run_dir)

    monkeypatch.setattr(SweepState, "begin", fail)

    assert run_sweep(folder, GRID, Broken()) == 1
    said = capsys.readouterr().out
    assert "none s1: FAILED" in said and "No space left on device" in said
    assert "none s2: FAILED" in said and "ZeroDivisionError: oh" in said
    assert "none s3: finished" in said


def test_a_point_goes_on_when_its_output_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (point,) = points("seed=1")
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho one\necho two\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    (tmp_path / OUTPUT_FILE).symlink_to("/dev/full")

    Processes(1).run(point, tmp_path)
    said = capsys.readouterr().out.splitlines()
    assert [line.split("] ")[1] for line in said] == ["one", "two"]


def test_the_same_command_skips_what_is_finished_and_runs_what_failed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_sweep(folder, GRID, FakeRuns(fail=["none s2"]))
    capsys.readouterr()
    again = FakeRuns()

    assert run_sweep(folder, GRID, again) == 0
    assert again.names == ["none s2"]
    said = capsys.readouterr().out
    assert "3 points, 1 to run, 2 finished before" in said
    assert "none s2 runs again; failed: asked to fail" in said
    assert (folder / "earlier" / "none_s2" / "summary.json").exists()
    third = FakeRuns()
    assert run_sweep(folder, GRID, third) == 0 and third.names == []


def test_ctrl_c_leaves_a_sweep_that_can_be_continued(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_sweep(folder, GRID[:1], FakeRuns())

    assert run_sweep(folder, GRID, FakeRuns(fail=["interrupt"])) == 130
    assert "interrupted, 2 of 3 points are left" in capsys.readouterr().out
    again = FakeRuns()
    assert run_sweep(folder, GRID, again) == 0
    assert again.names == ["none s2", "none s3"]


def test_ctrl_c_counts_points_of_older_code_that_were_still_to_come(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_sweep(folder, GRID, FakeRuns())
    monkeypatch.setattr("xcloud.study.points.code_fingerprint", lambda: "other")

    assert run_sweep(folder, GRID, FakeRuns(fail=["interrupt"])) == 130
    assert "interrupted, 3 of 3 points are left" in capsys.readouterr().out


def test_a_point_that_was_killed_is_run_again(folder: Path) -> None:
    run_sweep(folder, GRID[:1], FakeRuns())
    (folder / "none_s1" / "summary.json").unlink()
    again = FakeRuns()

    assert run_sweep(folder, GRID[:1], again) == 0
    assert again.names == ["none s1"]


def test_a_change_of_config_is_said_and_the_point_runs_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_sweep(folder, GRID[:1], FakeRuns())
    path = folder / "none_s1" / "experiment.yaml"
    path.write_text(path.read_text().replace("max_steps: 8", "max_steps: 7"))
    kept, again = FakeRuns(), FakeRuns()

    assert run_sweep(folder, GRID[:1], kept, accept_changes=True) == 0
    assert kept.names == []
    change = "config changed since: training.max_steps 7 -> 8"
    assert f"none s1 is kept; {change}" in capsys.readouterr().out
    assert run_sweep(folder, GRID[:1], again) == 0
    assert again.names == ["none s1"]
    assert f"none s1 runs again; {change}" in capsys.readouterr().out


def test_a_change_of_code_is_said_and_the_point_runs_again(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_sweep(folder, GRID[:1], FakeRuns())
    capsys.readouterr()
    monkeypatch.setattr("xcloud.study.points.code_fingerprint", lambda: "other code")
    again = FakeRuns()

    assert run_sweep(folder, GRID[:1], again) == 0
    assert again.names == ["none s1"]
    said = capsys.readouterr().out
    assert "none s1 runs again; code changed since" in said and "accept_changes=true" in said


@pytest.mark.parametrize("status", first_daily(["finished", "failed"], count=1))
def test_a_point_whose_files_are_others_runs_again_from_the_start(
    status: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under the same names, so no setting differs: its result is of other data, and its checkpoint
    too."""
    run_sweep(folder, GRID[:1], FakeRuns(fail=["none s1"] if status == "failed" else []))
    capsys.readouterr()
    monkeypatch.setattr(
        "xcloud.study.points.inputs_of", lambda *of, **named: {"task.data.path": "another"}
    )
    again = FakeRuns()

    assert run_sweep(folder, GRID[:1], again) == 0
    assert again.names == ["none s1"]
    if status == "finished":
        assert (
            "none s1 runs again; other contents since: task.data.path" in capsys.readouterr().out
        )
    third = FakeRuns()
    assert run_sweep(folder, GRID[:1], third) == 0 and third.names == []


def test_code_that_decides_nothing_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Path(xcloud.__file__).parent
    beside = [name for name in BESIDE_CODE if not name.endswith(".py")]
    assert all((package / name).exists() for name in BESIDE_CODE)
    digests = partial(code_digests, tmp_path)
    monkeypatch.setattr("xcloud.study.points.code_digests", digests)
    for name in beside:
        (tmp_path / name).mkdir()
    (tmp_path / "a.py").write_text("1")
    before = code_fingerprint()

    for name in beside:
        (tmp_path / name / "table.py").write_text("2")
    (tmp_path / "notes.md").write_text("3")
    assert code_fingerprint() == before
    (tmp_path / "a.py").write_text("4")
    assert code_fingerprint() != before


def test_another_command_adds_points_to_the_sweep(folder: Path) -> None:
    run_sweep(folder, ["compression=none"], FakeRuns())
    more = FakeRuns()

    assert run_sweep(folder, ["compression=int8 training.max_steps=9"], more) == 0
    assert more.names == ["int8+int8 max_steps=9 s1"]
    assert len(json.loads((folder / "sweep.json").read_text())["points"]) == 2


def test_two_points_never_share_a_folder(folder: Path) -> None:
    run_sweep(folder, ["training.max_steps=9"], FakeRuns())
    found = points("training.max_steps=8")
    name_points(found)

    decision = SweepState(folder).decide(found, accept_changes=False)[0]
    assert (decision.verdict, decision.folder) == ("run", "none_s1-2")


def test_a_finished_run_stays_with_the_point_whose_result_it_is(folder: Path) -> None:
    """As when a default is edited between two commands: the words of another point made it."""
    run_sweep(folder, ["seed=1"], FakeRuns())
    (entry,) = SweepState(folder).points.values()
    found = points("seed=1 training.max_steps=9", "seed=1")
    entry["overrides"] = list(found[0].overrides)
    (folder / "sweep.json").write_text(json.dumps({"points": SweepState(folder).points | {
        "none_s1": entry}}))  # fmt: skip
    name_points(found)

    changed, same = SweepState(folder).decide(found, accept_changes=False)
    assert (same.verdict, same.folder) == ("skip", "none_s1")
    assert changed.verdict == "run" and changed.folder != "none_s1"


def test_a_point_that_begins_while_the_sweep_ends_is_ended_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes(1)
    processes.end()
    asleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(
        "xcloud.study.runner.start_point",
        lambda *given, **named: subprocess.Popen(asleep, stdout=subprocess.PIPE, encoding="utf-8"),
    )
    (point,) = points("seed=1")
    folder.mkdir(parents=True)
    with pytest.raises(RunFailed, match="exit code -15"):
        processes.run(point, folder)


def test_the_same_experiment_runs_once(folder: Path) -> None:
    runs = FakeRuns()

    assert run_sweep(folder, ["seed=1", "seed=1 compression=none"], runs) == 0
    assert len(runs.names) == 1


def test_two_processes_cannot_run_one_sweep(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_sweep(folder, GRID[:1], FakeRuns())
    with SweepState(folder).lock():
        assert run_sweep(folder, GRID, FakeRuns()) == 2

    assert "another process runs it" in capsys.readouterr().err


def test_a_damaged_state_is_refused_and_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text("{")

    assert run_sweep(folder, GRID, FakeRuns()) == 2
    assert "sweep.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a/b", "../up", "", "with blank", ".hidden", "ü"])
def test_a_name_that_is_no_folder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="sweep must be a name"):
        check_name(name)


def test_the_sweep_and_its_label_are_in_the_experiment(folder: Path) -> None:
    run_sweep(folder, ["seed=1", "seed=2"], FakeRuns())

    text = (folder / "none_s2" / "experiment.yaml").read_text()
    assert "sweep: s\n" in text and "label: none\n" in text
    assert compose(["seed=1"]).sweep is None  # the composed config was not ours to change


class Run:
    """A stand-in for the process of a point. ends: when it is waited for."""

    def __init__(self, heard: list[Any], ends: bool | None = True) -> None:
        self.heard = heard
        self.ends = ends

    def terminate(self) -> None:
        self.heard.append("ask")

    def kill(self) -> None:
        self.heard.append("kill")

    def wait(self, within_s: float | None) -> None:
        self.heard.append(within_s)
        if self.ends is None and within_s is None:
            raise KeyboardInterrupt
        if not self.ends:
            raise subprocess.TimeoutExpired("run", within_s or 0.0)


def test_runs_of_a_sweep_are_all_asked_before_one_is_waited_for_and_killed_at_a_second_ctrl_c(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[Any] = []
    ignored: list[Any] = []
    monkeypatch.setattr(runner.signal, "signal", lambda *of: ignored.append(of))
    processes = Processes(1)
    processes.running += [Run(heard), Run(heard)]  # type: ignore[list-item]
    processes.end()
    assert heard == ["ask", "ask", None, None] and ignored == [] and processes.is_ending
    heard.clear()
    processes.running[:] = [Run(heard, ends=None), Run(heard)]  # type: ignore[list-item]
    processes.end()
    assert heard == ["ask", "ask", None, "ask", "ask", 60.0, "kill", 60.0]
    assert ignored == [(signal.SIGINT, signal.SIG_IGN)]


@pytest.mark.parametrize(
    ("ends", "code"),
    [(None, 0), (RunFailed("it died"), 1), (RunStopped("s"), 75), (KeyboardInterrupt(), 130)],
)
def test_the_process_of_a_point_runs_its_file_and_says_by_a_code_how_it_ended(
    ends: BaseException | None,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran: list[Any] = []

    def run(settings: Any, run_dir: Path, resumes: Any) -> None:
        ran.append((settings, run_dir, resumes))
        if ends is not None:
            raise ends

    monkeypatch.setattr(local, "run", run)
    monkeypatch.setattr(runner.Settings, "load", lambda file: file)
    monkeypatch.setattr(runner, "ctypes", Mock())
    words = ["runner", str(tmp_path), "--parent", str(os.getppid())]
    monkeypatch.setattr(sys, "argv", words)
    assert runner.main() == code
    assert ran == [(tmp_path / "experiment.yaml", tmp_path, resume.check_can_go_on)]
    assert capsys.readouterr().out == ("xcloud: it died\n" if code == 1 else "")
    if sys.platform == "linux":
        monkeypatch.setattr(sys, "argv", [*words[:-1], "1234567"])
        assert runner.main() == 1 and len(ran) == 1, "the sweep has ended"
