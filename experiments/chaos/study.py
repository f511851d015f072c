"""Faults at random moments of small runs, as rows.

    python -m experiments.chaos.study OUT [OPTION ...]

Runs benchmarks.chaos with these options, which says each fault of each run to OUT/faults.jsonl,
and writes a row a run to OUT/rows.jsonl, unless there are some: how many faults it got, how many
of them were survived, recovered or refused by name, and whether it came to the bits of an
undisturbed run. Linux; root for cut lines and full disks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.chaos_record import GOOD
from experiments.claims.reproduce import StudyRows
from xcloud.base.project import project_root


def main() -> None:
    out, *options = sys.argv[1:]
    rows, record = StudyRows(Path(out)), Path(out).resolve() / "faults.jsonl"
    if rows.read():
        return
    record.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)  # of one that was interrupted
    command = [sys.executable, "-m", "benchmarks.chaos", *options, "--record", str(record)]
    subprocess.run(command, cwd=project_root())  # its exit code is a verdict, which the rows hold
    for line in record.read_text(encoding="utf-8").splitlines():
        rows.write(row_of(json.loads(line)))


def row_of(run: Mapping[str, Any]) -> dict[str, Any]:
    verdicts = [fault["verdict"] for fault in run["faults"] if fault["verdict"] != "missed"]
    survived = [verdict in ("recovered", "refused") for verdict in verdicts]
    return {
        "row": "any job", "run": run["number"], "job": run["job"], "started by": run["form"],
        "faults": len(verdicts), "survived": sum(survived) / max(1, len(verdicts)),
        "good": float(run["verdict"] in GOOD),
    }  # fmt: skip


if __name__ == "__main__":
    main()
