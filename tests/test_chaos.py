"""A few faults of benchmarks/chaos.py: none may change the weights, hang, or leave orphans."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos import Outcome, draw, report

ROOT = Path(__file__).parent.parent


def test_the_faults_of_a_seed_are_always_the_same_and_are_counted_by_kind() -> None:
    kinds = ["kill rank", "truncated checkpoint"]
    drawn = draw(20, 5, ["a", "b"], kinds)
    assert drawn == draw(20, 5, ["a", "b"], kinds) != draw(20, 6, ["a", "b"], kinds)
    assert {one.kind for one in drawn} == set(kinds) and drawn[3].job == "b"

    told = report([
        Outcome(0, "kill rank", "a", "step", "recovered", noticed_s=2.0, steps_lost=3),
        Outcome(1, "kill rank", "b", "step", "missed"),
        Outcome(2, "kill rank", "a", "end", "hang", noticed_s=4.0),
    ])  # fmt: skip
    assert told["faults"] == 2
    assert told["kinds"]["kill rank"] == {
        "recovered": 1, "missed": 1, "hang": 1,
        "noticed_s_median": 3.0, "noticed_s_most": 4.0, "steps_lost_mean": 3,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks its ranks, reads /proc")
def test_runs_with_a_fault_come_to_the_same_weights_or_say_why_not(tmp_path: Path) -> None:
    words = [
        "--faults", "10", "--seed", "4", "--deadline", "120", "--out", str(tmp_path / "out"),
        "--jobs", "int4, delta memory", "one-way", "--kinds", "kill rank", "kill launcher",
        "pause rank", "SIGTERM", "truncated checkpoint", "all checkpoints damaged",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", *words], cwd=ROOT, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    verdicts = json.loads((tmp_path / "out").read_text())["verdicts"]
    assert verdicts["recovered"] >= 6
