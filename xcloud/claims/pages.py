"""`python -m xcloud claims`: every claim with its state; docs/paper.md, cell by cell.
`python -m xcloud site`: the records as pages, with a picture each.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import pandas as pd

from xcloud.base.project import project_root
from xcloud.claims.claims import FILE, Claim, Figure, judge, read_claims
from xcloud.claims.reproduce import FOLDER, Record
from xcloud.report.site import Page, Picture, Table, write_site

PAPER = Path("docs", "paper.md")
HEAD = "| cell | published | ours | made better | command | record |"
NUM_HEADLINES = 4
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
        minutes = f"{claim.human_minutes} + {claim.machine_minutes} min"
        print(f"{name:<24} {_state(records.get(name)):<16} {minutes:<14} {claim.title}")
    return 0


def _state(record: Record | None) -> str:
    return record.verdict.split(":")[0] if record else "not run"


def study_page(claim: Claim, record: Record | None, picture: Path | None) -> Page:
    rows = record.rows if record else ()
    judged = [(j.rule.says, j.found, "yes" if j.is_met else "no") for j in judge(claim, rows)]
    rules = pd.DataFrame(judged, columns=["rule", "came to", "met"], dtype=object)
    facts = [
        ("Question", claim.means), ("Source", claim.source),
        ("Verdict", record.verdict if record else "not run yet"),
        ("Missing", claim.missing or "nothing that we know of"),
        ("Minutes", f"{claim.human_minutes} of yours, {claim.machine_minutes} of the machine"),
    ]  # fmt: skip
    if record:
        facts.append(("Made", f"{record.made_at}, commit {record.commit}; {record.where}"))
        facts += [("Note", record.note)] * bool(record.note)
    tables = [Table("Rules", rules)]
    if rows:
        tables.append(Table("Every run", pd.DataFrame(rows, dtype=object)))
    pictures = [Picture(str(picture), claim.title)] if picture else []
    return Page(claim.name, claim.title, facts, claim.command, pictures, tables, up="All claims")


def front_page(claims: Mapping[str, Claim], records: Records, drawn: Mapping[str, Path]) -> Page:
    cells = pd.DataFrame(
        {
            "claim": [claim.title for claim in claims.values()],
            "state": [_state(records.get(name)) for name in claims],
            "source": [claim.source for claim in claims.values()],
            "machine minutes": [claim.machine_minutes for claim in claims.values()],
        }
    )
    pictures = [
        Picture(str(path), claims[name].title, f"{name}.html")
        for name, path in sorted(drawn.items(), key=lambda one: claims[one[0]].picture is None)
    ][:NUM_HEADLINES]  # those whose claim says what its picture shows
    table = Table("Claims", cells, [f"{name}.html" for name in claims])
    return Page("index", "xcloud: what is claimed and measured", (), "", pictures, [table])


def site(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m xcloud site", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("site"))
    given = parser.parse_args(words)
    from xcloud.claims.pictures import draw  # matplotlib: only where a site is made

    claims = read_claims(project_root() / FILE)
    records = read_records(claims)
    given.out.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for name, record in records.items():
        picture = given.out / f"{name}.png"
        if draw(claims[name], record, picture):
            drawn[name] = picture
    pages = [
        study_page(claim, records.get(name), drawn.get(name)) for name, claim in claims.items()
    ]
    print(write_site(front_page(claims, records, drawn), pages, given.out).absolute())
    return 0
