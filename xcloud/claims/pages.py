"""What records are shown as: docs/paper.md, the pages of `python -m xcloud site`, a picture each."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from xcloud.base.project import project_root
from xcloud.claims.claims import FILE, Claim, Estimate, Figure, judge, read_claims
from xcloud.claims.records import FOLDER, Record
from xcloud.report.site import Cell, Page, Picture, Table, write_site

PAPER = Path("docs", "paper.md")
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
        lines += ["", f"## {table}", "", "| cell | published | ours | made better | command | record |",
                  "|---|---|---|---|---|---|"]  # fmt: skip
        for cell, claim in group:
            record = records.get(claim.name)
            link = f"[{record.made_at[:10]}](../{FOLDER}/{claim.name}/README.md)" if record else "–"
            ours, better = (_shown(figure, record) for figure in (cell.ours, cell.better))
            lines.append(
                f"| {cell.cell} | {cell.published} | {ours} | {better} | `{claim.command}` | {link} |"
            )
    return "\n".join(lines) + "\n"


def _shown(figure: Figure | None, record: Record | None) -> str:
    if figure is None:
        return "–"
    found = figure.of(record.rows) if record else None
    named = f" ({figure.row})" if found else ""
    return f"{found or 'not run'}{named}"


def study_page(claim: Claim, record: Record | None, picture: Path | None) -> Page:
    rows = record.rows if record else ()
    rules = [
        [Cell(one.rule.says), Cell(str(one.found or "–")), Cell("yes" if one.is_met else "no")]
        for one in judge(claim, rows)
    ]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    facts = [
        ("Question", claim.means), ("Source", claim.source),
        ("Verdict", record.verdict if record else "not run yet"),
        ("Missing", claim.missing or "nothing that we know of"),
        ("Time", f"{claim.human_minutes} minutes of yours, {claim.machine_minutes} of the machine"),
    ]  # fmt: skip
    if record:
        where = ", ".join(f"{name} {value}" for name, value in record.environment.items())
        facts.append(("Made", f"{record.made_at}, commit {record.commit}; {where}"))
    tables = [Table("Rules, stated before the run", ("rule", "came to", "met"), rules)]
    if rows:
        cells = [[Cell(_text(row.get(name))) for name in columns] for row in rows]
        tables.append(Table("Every run", columns, cells))
    pictures = [Picture(str(picture), claim.title)] if picture else []
    return Page(claim.name, claim.title, facts, claim.command, pictures, tables, up="All claims")


def front_page(claims: Mapping[str, Claim], records: Records, drawn: Mapping[str, Path]) -> Page:
    rows = [
        [Cell(claim.title, f"{name}.html"),
         Cell(records[name].verdict.split(":")[0] if name in records else "not run"),
         Cell(claim.source), Cell(str(claim.machine_minutes))]
        for name, claim in claims.items()
    ]  # fmt: skip
    shown = list(drawn.items())[:NUM_HEADLINES]
    pictures = [Picture(str(path), claims[name].title, f"{name}.html") for name, path in shown]
    table = Table("Claims", ("claim", "state", "source", "machine minutes"), rows)
    return Page("index", "xcloud: what is claimed and what was measured", (), "", pictures, [table])


def draw(claim: Claim, record: Record, path: Path) -> None:
    """The claim's figure by row: mean and standard error over seeds."""
    from xcloud.report.figures import bars  # matplotlib only where something is drawn

    names = list(dict.fromkeys(row["row"] for row in record.rows))
    column = claim.rules[0].figure.column
    estimates: dict[str, Estimate] = {}
    for name in names:
        found = Figure(name, column, where=claim.rules[0].figure.where).of(record.rows)
        if found is not None:
            estimates[name] = found
    bars(estimates, column, path)


def site(words: Sequence[str] | None = None) -> int:
    """Write the records as a static site."""
    parser = argparse.ArgumentParser("python -m xcloud site", description=site.__doc__)
    parser.add_argument("--out", type=Path, default=Path("site"))
    given = parser.parse_args(words)
    claims = read_claims(project_root() / FILE)
    records = read_records(claims)
    given.out.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for name, record in records.items():
        drawn[name] = given.out / f"{name}.png"
        draw(claims[name], record, drawn[name])
    pages = [study_page(claim, records.get(name), drawn.get(name)) for name, claim in claims.items()]
    print(write_site(front_page(claims, records, drawn), pages, given.out).absolute())
    return 0


def _text(value: object) -> str:
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
