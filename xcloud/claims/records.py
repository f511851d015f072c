"""A record: a folder with everything that one reproduction of a claim was and came to.

records/NAME/record.json   claim, verdict, rows, commit, environment, digests of data
records/NAME/README.md     the same to read: question, command, table, verdict, what is missing
records/NAME/runs/ROW-seedN/   experiment.yaml, summary.json and run.log of each run
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from xcloud.base.errors import DataError
from xcloud.base.project import commit
from xcloud.claims.claims import Claim, ResultRow, judge
from xcloud.report.site import cell_text

FOLDER, FILE = "records", "record.json"
LIBRARIES = ("torch", "transformers", "tokenizers", "sacrebleu", "numpy")


@dataclass(frozen=True)
class Record:
    """is_quick: of the short run, which judges nothing. data: digests by file name. note: what
    must be known of this record, such as rows older than the rule."""

    claim: str
    made_at: str
    commit: str
    is_quick: bool
    verdict: str
    rows: Sequence[ResultRow]
    environment: Mapping[str, Any]
    data: Mapping[str, str]
    note: str = ""

    @classmethod
    def read(cls, folder: Path) -> Record | None:
        """None where there is no record. Raises DataError for one that cannot be read."""
        path = folder / FILE
        if not path.exists():
            return None
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise DataError(f"{path} is no record: {error}") from None

    @property
    def where(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.environment.items())

    def write(self, folder: Path, claim: Claim) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(vars(self), indent=1, ensure_ascii=False)
        (folder / FILE).write_text(text + "\n", encoding="utf-8")
        (folder / "README.md").write_text(page(claim, self), encoding="utf-8")


def verdict_of(claim: Claim, rows: Sequence[ResultRow], *, is_quick: bool) -> str:
    """ "reproduced" only if every rule is met by a whole run."""
    judged = judge(claim, rows)
    if is_quick:
        return "quick run: judges nothing"
    if all(one.is_met for one in judged):
        return "reproduced"
    missed = [one.rule.says for one in judged if not one.is_met]
    return f"not reproduced: {'; '.join(missed)}"


def page(claim: Claim, record: Record) -> str:
    """README.md of a record."""
    lines = [
        f"# {claim.title}", "",
        f"**Claim.** {claim.means} Source: {claim.source}.", "",
        f"**Command.** `{claim.command}{' --quick' if record.is_quick else ''}` "
        f"({claim.human_minutes} minutes of yours, about {claim.machine_minutes} of the machine).",
        "", "| rule | came to | met |", "|---|---|---|",
    ]  # fmt: skip
    for one in judge(claim, record.rows):
        lines.append(f"| {one.rule.says} | {one.found or '–'} | {'yes' if one.is_met else 'no'} |")
    lines += ["", f"**Verdict.** {record.verdict[0].upper()}{record.verdict[1:]}.", ""]
    if record.note:
        lines += [f"**Note.** {record.note}", ""]
    lines += table(record.rows)
    if record.is_quick and claim.leaves_out:
        lines += ["", f"**Left out by --quick.** {claim.leaves_out}"]
    if claim.missing:
        lines += ["", f"**Missing.** {claim.missing}"]
    lines += ["", f"Commit {record.commit}, {record.made_at}. {record.where}."]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[ResultRow]) -> list[str]:
    """The rows as Markdown, a column for each figure that any of them has."""
    cells = pd.DataFrame(rows, dtype=object).map(cell_text)
    lines = [f"| {' | '.join(cells)} |", "|" + "---|" * len(cells.columns)]
    return lines + [f"| {' | '.join(row)} |" for row in cells.itertuples(index=False)]


def environment() -> dict[str, Any]:
    """Of this machine: what a figure may depend on."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in LIBRARIES},
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
    }


def digests(paths: Sequence[Path]) -> dict[str, str]:
    """sha256 of every file in these folders, by its name there."""
    return {
        str(file.relative_to(path.parent)): hashlib.sha256(file.read_bytes()).hexdigest()
        for path in paths
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def made(
    claim: Claim, rows: Sequence[ResultRow], data: Sequence[Path], at: str, quick: bool
) -> Record:
    verdict = verdict_of(claim, rows, is_quick=quick)
    return Record(claim.name, at, commit(), quick, verdict, rows, environment(), digests(data))
