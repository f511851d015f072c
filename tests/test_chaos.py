"""A few faults of benchmarks/chaos.py: none may change the weights, hang, or leave orphans."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.chaos import draw
from benchmarks.chaos_record import Fault, Outcome, print_table, read_record, report

ROOT = Path(__file__).parent.parent


def test_the_faults_of_a_seed_are_always_the_same() -> None:
    jobs = ["u-shape", "one-way"]
    drawn = draw(20, 3, 5, jobs)
    assert drawn == draw(20, 3, 5, jobs) != draw(20, 3, 6, jobs)
    assert drawn[3].job == "one-way" and all(len(one.faults) == 3 for one in drawn)

    few = draw(20, 2, 5, jobs, ["kill rank", "NaN"], ["launcher"])
    assert {one.form for one in few} == {"launcher"}
    assert {fault.kind for one in few[::2] for fault in one.faults} == {"kill rank", "NaN"}
    assert {fault.kind for one in few[1::2] for fault in one.faults} == {"kill rank"}


def test_faults_that_were_injected_are_counted_by_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = [
        Fault("kill rank", "step", "recovered", noticed_s=2.0, steps_lost=3, restarts=1),
        Fault("kill rank", "step", "missed"),
        Fault("kill rank", "end", "hang", noticed_s=4.0),
    ]
    outcome = Outcome(1, 0, "a", "launcher", faults, "hang")

    told = report([outcome])

    assert told["faults"] == 2
    assert told["runs"] == {"hang": 1}
    assert told["kinds"]["kill rank (launcher)"] == {
        "faults": 2, "recovered": 1, "hang": 1, "went_on_without_restart": 1,
        "noticed_s_median": 3.0, "noticed_s_most": 4.0, "steps_lost_mean": 3,
    }  # fmt: skip
    record = tmp_path / "record.jsonl"
    record.write_text(json.dumps(asdict(outcome)) + "\n")
    assert read_record([record]) == [outcome]
    print_table([outcome])
    assert "| kill rank (launcher) | 2 | 1 | 0 | 1 | 3.0, 4.0 | 3 |" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)  # some 40 faults: half a minute, minutes on a machine that is busy
@pytest.mark.skipif(sys.platform != "linux", reason="forks its ranks, reads /proc")
def test_runs_with_a_fault_come_to_the_same_weights_or_say_why_not(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    words = [
        "--runs", "2", "--each", "20", "--seed", "4", "--at-once", "2", "--forms", "launcher",
        "--jobs", "int4, delta memory", "one-way", "--kinds", "kill rank", "kill all ranks",
        "kill launcher", "SIGTERM", "pause rank", "pause launcher", "truncated checkpoint",
        "all checkpoints damaged", "--record", str(record),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", *words], cwd=ROOT, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = report(read_record([record]))
    assert told["runs"] == {"equal": 2}
    assert told["faults"] >= 30
