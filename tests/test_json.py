"""Every command that prints facts prints them as JSON, too."""

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xcloud.__main__ import main
from xcloud.record.files import state_file
from xcloud.security.audit import audit_file


def folder(run_dir: Path) -> None:
    """Write what a run of one rank would leave, which waits for another."""
    now = time.time()
    waits = [{"rank": 1, "message": "gradient of step 8", "since": now - 12}]
    state = {
        "rank": 0, "pid": os.getpid(), "host": socket.gethostname(), "written": now,
        "ended": False, "phase": "training", "phase_since": now - 60, "waits_for": waits,
        "step": 7, "step_at": now - 13,
    }  # fmt: skip
    state_file(run_dir, 0).write_text(json.dumps(state))
    audit = {
        "rank": 0, "cloud": "a", "num_ranks": 1, "crosses_clouds": True, "messages": [],
        "received": [], "unframed": [], "reports": {},
    }  # fmt: skip
    audit_file(run_dir, 0).write_text(json.dumps(audit))


@pytest.mark.parametrize(
    ("words", "holds"),
    [
        (["status", "RUN"], lambda found: found["ranks"][0]["waits_for"][0]["rank"] == 1),
        (["status", "RUN"], lambda found: found["waited_for_by"] == {"1": [0]}),
        (["claims"], lambda found: {"name", "verdict", "claim"} <= found[0].keys()),
        (["settings", "training"], lambda found: any("batch_size" in one["key"] for one in found)),
        (["wire-audit", "RUN"], lambda found: isinstance(found, dict)),
        (["report"], lambda found: found == []),
    ],
)
def test_a_command_that_prints_facts_prints_them_as_json(
    words: list[str],
    holds: Callable[[Any], bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    folder(tmp_path)
    assert main([*(str(tmp_path) if word == "RUN" else word for word in words), "--json"]) == 0
    assert holds(json.loads(capsys.readouterr().out))
