"""The pages build as a site without a warning, and the notebook runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK = json.loads((ROOT / "docs" / "first_hour.ipynb").read_text("utf-8"))


def test_the_notebook_is_ten_cells_without_outputs() -> None:
    assert len(NOTEBOOK["cells"]) == 10
    assert not any(cell.get("outputs") for cell in NOTEBOOK["cells"])


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_notebook_runs_from_its_first_cell_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, cell in enumerate(NOTEBOOK["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)

    assert names["result"].status == "finished" and len(names["points"]) == 3
    assert "bytes of gradients became" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.slow
def test_the_pages_build_as_a_site_without_a_warning(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip

    assert built.returncode == 0, built.stderr
    assert (tmp_path / "strategies" / "index.html").exists()
