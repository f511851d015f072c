"""Whole sweeps through `run.py -m`, with real processes and the toy task of tests/conf."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.runs import command, completed, no_workers

pytestmark = pytest.mark.slow
TOY = ["run.py", "--config-dir", "tests/conf", "-m", "+exp=toy", "tracker=none"]


def words(folder: Path, *overrides: str) -> list[str]:
    return [*TOY, f"hydra.sweep.dir={folder}", f"sweep={folder.name}", *overrides]


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return completed(*words(folder, *overrides), log=folder.with_suffix(".log"))


def statuses(folder: Path) -> dict[str, str]:
    return {
        path.parent.name: json.loads(path.read_text())["status"]
        for path in folder.glob("*/summary.json")
    }


@pytest.mark.nightly
def test_a_failing_point_is_said_the_others_go_on_and_the_next_command_repeats_only_it(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "story"
    first = run(folder, "model.fail_stage=1,-1", "compression=int8")

    assert first.returncode == 1, first.stderr
    said = first.stdout
    assert "2 points, 2 to run" in said and "sweep=story" in said
    failed = "fail_stage=1 s1: FAILED"
    assert "the toy stage was asked to fail" in said[said.index(failed) :].splitlines()[0]
    assert said.index(failed) < said.index("[2/2] fail_stage=-1 s1")
    assert "fail_stage=-1 s1: finished in" in said
    assert "Traceback" not in first.stdout + first.stderr
    assert statuses(folder) == {"fail_stage=1_s1": "failed", "fail_stage=-1_s1": "finished"}
    for name in ("table.csv", "points.csv", "quality_and_ratio.png", "step_time.png"):
        assert (folder / name).exists(), name
    experiment = (folder / "fail_stage=-1_s1" / "experiment.yaml").read_text()
    assert "sweep: story" in experiment and "label: fail_stage=-1" in experiment

    # Somebody may edit the code between the two commands; that has a test of its own.
    accept = "hydra.launcher.accept_changes=true"
    again = run(folder, "model.fail_stage=1,-1", "compression=int8", accept)
    assert again.returncode == 1
    assert "1 to run, 1 finished before" in again.stdout
    assert "fail_stage=1 s1 runs again; failed" in again.stdout
    assert "[1/1] fail_stage=1 s1" in again.stdout


def test_a_bad_point_refuses_the_sweep(tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    rates = "compression.forward.svd.rate=0.2,2"
    refused = run(folder, "compression=none,svd_fp16_int8", rates)

    assert refused.returncode == 2
    assert "3 of 4 points" in refused.stderr
    assert "forward.svd.rate=0.2: Chain member 'svd' must be a comp" in refused.stderr
    assert "compression=svd_fp16_int8 compression.forward.svd.rate=2: Svd.rate" in refused.stderr
    assert "Traceback" not in refused.stderr and not folder.exists()


def test_an_unknown_option_is_said_with_those_there_are_wherever_m_stands(tmp_path: Path) -> None:
    moved = [word for word in words(tmp_path / "bad", "compression=int8,int9") if word != "-m"]
    moved.insert(moved.index("+exp=toy") + 1, "-m")
    refused = completed(*moved, log=tmp_path / "log")

    assert refused.returncode == 2, refused.stderr
    assert "no compression/int9; did you mean 'int8'? There are: bf16, " in refused.stderr
    assert "provider" not in refused.stderr


@pytest.mark.parametrize(
    ("parallel", "number"),
    [(1, signal.SIGINT), pytest.param(2, signal.SIGTERM, marks=pytest.mark.nightly)],
)
def test_ctrl_c_ends_every_rank_and_leaves_a_sweep_to_continue(
    parallel: int, number: signal.Signals, tmp_path: Path
) -> None:
    folder = tmp_path / "cut"
    overrides = ["seed=1,2,3", "training.max_steps=100000", f"hydra.launcher.parallel={parallel}"]
    log = tmp_path / "log"
    sweep = command(*words(folder, *overrides), log=log)
    deadline = time.monotonic() + 180
    while log.read_text().count("step 1/100000") < parallel:
        assert sweep.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)

    sweep.send_signal(number)
    assert sweep.wait(120) == 130
    assert no_workers(folder)
    said = log.read_text()
    assert "interrupted, 3 of 3 points are left" in said and "sweep=cut" in said
    assert "Traceback" not in said
    assert set(statuses(folder).values()) == {"stopped"} and len(statuses(folder)) == parallel


@pytest.mark.nightly
def test_points_at_once_say_their_names_and_end_in_one_table(tmp_path: Path) -> None:
    folder = tmp_path / "both"
    one_rank = ["compression=int8,none", "cluster=local"]
    done = run(folder, *one_rank, "hydra.launcher.parallel=2")

    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    # Nothing leaves a cloud, so the compressions bear one label and the table tells them apart.
    names = {line[1 : line.index("]")] for line in lines if line.startswith("[off")}
    assert len(names) == 2 and any("training" in line for line in lines)
    assert sum(": finished in" in line for line in lines) == 2
    assert "2 points ran at once" in done.stdout
    assert len(statuses(folder)) == 2
    assert all((folder / name / "run.log").read_text() for name in statuses(folder))


@pytest.mark.nightly
def test_hydras_own_launcher_still_works_and_the_report_reads_its_sweep(tmp_path: Path) -> None:
    folder = tmp_path / "basic"
    done = run(folder, "seed=1", "hydra/launcher=basic", "cluster=local")

    assert done.returncode == 0, done.stderr
    assert statuses(folder) == {"0": "finished"}
    table = completed("-m", "xcloud", "report", str(folder), log=tmp_path / "report.log")
    assert table.returncode == 0 and "off" in table.stdout
