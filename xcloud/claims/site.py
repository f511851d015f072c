"""`python -m xcloud site`: the records as pages, with a picture each."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from xcloud.base.project import project_root
from xcloud.claims.claims import FILE, Claim, judge, read_claims
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
    pictures = [
        Picture(str(path), claims[name].title, f"{name}.html")
        for name, path in sorted(drawn.items(), key=lambda one: claims[one[0]].picture is None)
    ][:NUM_HEADLINES]  # those whose claim says what its picture shows
    table = Table("Claims", ("claim", "state", "source", "machine minutes"), rows)
    return Page(
        "index", "xcloud: what is claimed and what was measured", (), "", pictures, [table]
    )


def main(words: Sequence[str] | None = None) -> int:
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


def _text(value: object) -> str:
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
