"""The benchmark for a quarter of an hour on a GPU, with toy shapes on this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_quarter import PARTS, bars
from tests.runs import ROOT


def test_bars_are_shares_of_two_figures_that_are_both_there() -> None:
    fast, slow = {"tokens_per_s": 100.0}, {"tokens_per_s": 84.0}
    table = {
        "lora": {
            "a bfloat16 own": slow, "a bfloat16 plain": fast,
            "a nf4 own": fast, "a nf4 plain": {"left_out": "no bitsandbytes"},
            "took_s": 3.0,
        },
        "cut": {"one process": fast, "cut, free line": slow, "failed": "RuntimeError: later"},
    }  # fmt: skip
    assert dict(bars(table)) == {
        "a bfloat16 own / plain": {"share": 0.84, "at_least": 0.8, "holds": True},
        "cut / one process": {"share": 0.84, "at_least": 0.85, "holds": False},
    }
    assert not dict(bars({}))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_all_parts_run_with_toy_shapes(tmp_path: Path) -> None:
    file = tmp_path / "toy.json"
    command = [sys.executable, "-m", "benchmarks.gpu_quarter", "--toy", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads(file.read_text())
    assert not any("failed" in table[part] for part in PARTS)
    assert {"toy bfloat16 own / plain", "cut / one process", "INT4 / free"} <= {*table["bars"]}
