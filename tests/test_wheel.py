"""The package as a wheel, used in a folder where there is nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.nightly
def test_an_experiment_runs_from_a_wheel_in_an_empty_folder(tmp_path: Path) -> None:
    """Building it asks an index for setuptools, so this is no test for every day."""
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("xcloud-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    empty = tmp_path / "empty"
    empty.mkdir()

    words = ["+exp=abnet_iwslt", "model=transformer", "tracker=none", "task.num_pairs=2600",
             "training.max_steps=4", "training.batch_size=16"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "xcloud", "run", *words], cwd=empty, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(site)},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "abnet_iwslt: finished, 4 steps" in done.stdout
    assert {path.name for path in empty.iterdir()} == {".cache", "outputs"}
