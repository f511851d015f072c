"""`python -m xcloud site`: the records as pages, with a picture each."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from xcloud.base.project import project_root
from xcloud.claims.claims import FILE, Claim, Estimate, Figure, judge, read_claims
from xcloud.claims.list import Records, read_records
from xcloud.claims.records import Record
from xcloud.report.site import Cell, Page, Picture, Table, write_site

NUM_HEADLINES = 4


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
        ("Minutes", f"{claim.human_minutes} of yours, {claim.machine_minutes} of the machine"),
    ]  # fmt: skip
    if record:
        where = ", ".join(f"{name} {value}" for name, value in record.environment.items())
        facts.append(("Made", f"{record.made_at}, commit {record.commit}; {where}"))
        if record.note:
            facts.append(("Note", record.note))
    tables = [Table("Rules", ("rule", "came to", "met"), rules)]
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
    return Page(
        "index", "xcloud: what is claimed and what was measured", (), "", pictures, [table]
    )


def draw(claim: Claim, record: Record, path: Path) -> bool:
    """The claim's figure by row, mean and standard error over seeds; False if no row has it."""
    from xcloud.report.figures import LINES, canvas, save  # draws: only where a site is made

    column, where = claim.rules[0].figure.column, claim.rules[0].figure.where
    names = dict.fromkeys(row["row"] for row in record.rows)
    found = {name: Figure(name, column, where=where).of(record.rows) for name in names}
    drawn: dict[str, Estimate] = {name: one for name, one in found.items() if one is not None}
    if not drawn:
        return False
    figure = canvas("", 6.4, 0.8 + 0.32 * len(drawn))
    axes = figure.subplots()
    means, errors = (
        [getattr(one, key) or 0.0 for one in drawn.values()] for key in ("mean", "error")
    )
    axes.errorbar(means, list(drawn), xerr=errors, fmt="o", color=LINES[1], capsize=3)
    axes.margins(y=0.25)
    axes.invert_yaxis()
    axes.set_xlabel(column)
    axes.grid(axis="x", alpha=0.3)
    save(figure, path)
    return True


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m xcloud site", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("site"))
    given = parser.parse_args(words)
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


def _text(value: object) -> str:
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
