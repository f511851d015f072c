"""What benchmarks/chaos.py records, a JSON line for each run, and tables of it."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GOOD = ("equal", "skipped")


@dataclass
class Fault:
    """verdict: recovered, refused (an error named the cause), missed (not injected), or the defect
    that came after it: hang, orphans, unexplained. length_s: of one that lasts. steps_lost: done
    twice because of it, restarts: from a checkpoint (both also of the faults just before it, if
    the run had not got over them yet)."""

    kind: str
    phase: str
    verdict: str = "missed"
    detail: str = ""
    noticed_s: float | None = None
    steps_lost: int | None = None
    restarts: int = 0
    length_s: float = 0.0


@dataclass
class Outcome:
    """Of a run. verdict: equal, different, skipped, or what its last fault led to."""

    seed: int
    number: int
    job: str
    form: str
    faults: list[Fault]
    verdict: str = ""
    detail: str = ""
    wall_s: float = 0.0
    commit: str = ""
    folder: str = ""
    said: list[str] = field(default_factory=list)


def report(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """By kind: what faults led to. Of runs: what they came to."""
    kinds: dict[str, Any] = {}
    told = [(one.form, fault) for one in outcomes for fault in one.faults]
    injected = [(form, fault) for form, fault in told if fault.verdict != "missed"]
    for kind, form in sorted({(fault.kind, form) for form, fault in injected}):
        ours = [fault for where, fault in injected if (fault.kind, where) == (kind, form)]
        noticed = sorted(one.noticed_s for one in ours if one.noticed_s is not None)
        lost = [one.steps_lost for one in ours if one.steps_lost is not None]
        kinds[f"{kind} ({form})"] = {
            "faults": len(ours),
            **Counter(one.verdict for one in ours),
            "went_on_without_restart": sum(not one.restarts for one in ours),
            "noticed_s_median": statistics.median(noticed) if noticed else None,
            "noticed_s_most": noticed[-1] if noticed else None,
            "steps_lost_mean": round(statistics.mean(lost), 1) if lost else None,
        }
    runs = dict(Counter(one.verdict for one in outcomes))
    faults = dict(Counter(fault.verdict for _, fault in injected))
    return {"faults": len(injected), "verdicts": faults, "runs": runs, "kinds": kinds}


def read_record(files: Sequence[Path]) -> list[Outcome]:
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [Outcome(**{**line, "faults": [Fault(**f) for f in line["faults"]]}) for line in lines]


def print_table(outcomes: Sequence[Outcome]) -> None:
    """In Markdown."""
    found = report(outcomes)
    print(
        f"{found['faults']} faults: {found['verdicts']}; {len(outcomes)} runs: {found['runs']}\n"
    )
    print("| fault | injected | recovered | refused | without restart | seconds to notice, median "
          "and most | steps lost, mean |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for kind, row in found["kinds"].items():
        noticed = "–"
        if row["noticed_s_median"] is not None:
            noticed = f"{row['noticed_s_median']:.1f}, {row['noticed_s_most']:.1f}"
        cells = [kind, row["faults"], row.get("recovered", 0), row.get("refused", 0),
                 row["went_on_without_restart"], noticed, row["steps_lost_mean"]]  # fmt: skip
        print(f"| {' | '.join(map(str, cells))} |")
