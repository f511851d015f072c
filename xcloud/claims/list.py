"""`python -m xcloud claims`: every claim with its state; docs/paper.md, cell by cell."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from xcloud.base.project import project_root
from xcloud.claims.claims import FILE, Claim, Figure, read_claims
from xcloud.claims.records import FOLDER, Record

PAPER = Path("docs", "paper.md")
HEAD = "| cell | published | ours | made better | command | record |"
Records = Mapping[str, Record]


def read_records(claims: Mapping[str, Claim]) -> dict[str, Record]:
    """Those that there are, by claim."""
    read = {name: Record.read(project_root() / FOLDER / name) for name in claims}
    return {name: record for name, record in read.items() if record is not None}


def paper_page(claims: Mapping[str, Claim], records: Records) -> str:
    """docs/paper.md: every published cell, ours beside it, the same setting made better."""
    lines = [
        "# The paper, cell by cell", "",
        f"Written by `python -m xcloud claims --paper` from `{FILE}` and `{FOLDER}/`. Published "
        "figures are of other data, models and machines: ratios and differences compare, scores "
        "do not. ± is the standard error over seeds.",
    ]  # fmt: skip
    cells = [(cell, claim) for claim in claims.values() for cell in claim.cells]
    for table, group in groupby(cells, key=lambda pair: pair[0].table):
        lines += ["", f"## {table}", "", HEAD, "|---|---|---|---|---|---|"]
        for cell, claim in group:
            record = records.get(claim.name)
            page = f"../{FOLDER}/{claim.name}/README.md"
            link = f"[{record.made_at[:10]}]({page})" if record else "–"
            ours, better = (_shown(figure, record) for figure in (cell.ours, cell.better))
            shown = (cell.cell, cell.published, ours, better, f"`{claim.command}`", link)
            lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _shown(figure: Figure | None, record: Record | None) -> str:
    if figure is None:
        return "–"
    found = figure.of(record.rows) if record else None
    named = f" ({figure.row})" if found else ""
    return f"{found or 'not run'}{named}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m xcloud claims", description=__doc__)
    parser.add_argument("--paper", action="store_true", help=f"write {PAPER} from the records")
    given = parser.parse_args(words)
    claims = read_claims(project_root() / FILE)
    records = read_records(claims)
    if given.paper:
        (project_root() / PAPER).write_text(paper_page(claims, records), encoding="utf-8")
        print(project_root() / PAPER)
        return 0
    for name, claim in claims.items():
        state = records[name].verdict.split(":")[0] if name in records else "not run"
        minutes = f"{claim.human_minutes} + {claim.machine_minutes} min"
        print(f"{name:<24} {state:<16} {minutes:<14} {claim.title}")
    return 0
