"""`python -m xcloud claims`: every claim with its state; docs/paper.md, cell by cell.
`python -m xcloud site`: the records as pages, with a picture each.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from experiments.claims.archive import mismatches
from experiments.claims.board import BOARD, board_page
from experiments.claims.claims import (
    FILE,
    UNKNOWN,
    Cell,
    Claim,
    Drawn,
    Estimate,
    Figure,
    judge,
    read_claims,
)
from experiments.claims.reproduce import FOLDER, Record
from xcloud.base.project import project_root
from xcloud.base.terminal import say
from xcloud.base.units import SCORE_NAMES
from xcloud.show.canvas import LINES, TITLE_POINTS, canvas, plain, save
from xcloud.show.tables import Page, Picture, Table, rendered, write_site

NUMBERED = re.compile(r"(.*), (\w+) (\d+)")  # "svd r8, block 3"
PAPER = Path("docs", "paper.md")
NUM_HEADLINES = 4
NOT_PUBLISHED = "–"  # a cell of ours that stands in no paper
AXES = {
    **SCORE_NAMES, "bytes": "bytes between clouds, an update", "step_s": "seconds of a step",
    "tokens_per_s": "tokens a second", "step_off": "real step / formula - 1",
}  # fmt: skip
COMPARED = (
    "Published figures are of other data, models and machines: ratios and differences compare, "
    "scores do not. ± is the standard error over seeds, or where a cell says so over rounds of "
    "timing or runs of one seed; of one seed, over the samples of its test."
)
Records = Mapping[str, Record]


def read_records(claims: Mapping[str, Claim]) -> dict[str, Record]:
    """Return the records that there are, by claim."""
    read = ((name, Record.read(project_root() / FOLDER / name)) for name in claims)
    return {name: record for name, record in read if record is not None}


def paper_page(claims: Mapping[str, Claim], records: Records) -> str:
    """Return the text of docs/paper.md: the cells for which a source prints a figure."""
    tables = {}
    for table, lines in _cells(claims, records=records).items():
        printed = [line for line in lines if line[1].published not in (UNKNOWN, NOT_PUBLISHED)]
        formulas = [claim for claim, cell, _ in printed if isinstance(cell.published, Figure)]
        others = [line for line in printed if not isinstance(line[1].published, Figure)]
        tables[table] = {
            "rows": [shown for *_, shown in others],
            "claims": ", ".join(
                dict.fromkeys(
                    f"{_linked(claim)}: {_state(claim, record=records.get(claim.name))}"
                    for claim, *_ in others
                )
            ),
            "num_formulas": len(formulas),
            "formulas": ", ".join(dict.fromkeys(map(_linked, formulas))),
        }
    paper = Path(__file__).with_name("paper.md")
    return rendered(
        paper,
        tables=tables.items(),
        compared=COMPARED,
        unlike=_unlike(claims),
        withdrawn=[claim for claim in claims.values() if claim.withdrawn],
    )


def _linked(claim: Claim) -> str:
    return f"[{claim.name}](../{FOLDER}/{claim.name}/record.json)"


def _unlike(claims: Mapping[str, Claim]) -> dict[str, list[str]]:
    """Return what must be said of each table: how the sides of its cells differ besides."""
    said: dict[str, list[str]] = {}
    for claim in claims.values():
        for table in dict.fromkeys(cell.table for cell in claim.cells):
            said.setdefault(table, []).extend([claim.unlike] * bool(claim.unlike))
    return {table: [*dict.fromkeys(texts)] for table, texts in said.items()}


def paper_of_site(claims: Mapping[str, Claim], records: Records) -> Page:
    """Return the same as a page of the site, whose first column links to the studies."""
    columns = ["cell", "published", "ours", "made better"]
    tables = []
    for name, lines in _cells(claims, records=records).items():
        cells = pd.DataFrame([shown for *_, shown in lines], columns=columns, dtype=object)
        links = [f"{claim.name}.html" for claim, *_ in lines]
        tables.append(Table(title=name, cells=cells, links=links))
    unlike = dict.fromkeys(text for texts in _unlike(claims).values() for text in texts)
    facts = [("What is compared", COMPARED), *(("Unlike", text) for text in unlike)]
    return Page(
        name="paper", title="The paper, cell by cell", facts=facts, tables=tables, up="All claims"
    )


def _cells(
    claims: Mapping[str, Claim], records: Records
) -> dict[str, list[tuple[Claim, Cell, tuple[str, ...]]]]:
    """Return by table its cells, each with its claim and the texts that are shown: its name, what
    is published, ours, and ours made better."""
    tables: dict[str, list[tuple[Claim, Cell, tuple[str, ...]]]] = {}
    for claim in claims.values():
        for cell in claim.cells:
            line = claim, cell, _line(cell, record=records.get(claim.name))
            tables.setdefault(cell.table, []).append(line)
    return tables


def _line(cell: Cell, record: Record | None) -> tuple[str, ...]:
    ours, better = (
        _shown(figure, record=record, cell=cell.cell) for figure in (cell.ours, cell.better)
    )
    published = cell.published
    if isinstance(published, Figure):
        found = published.of(record.rows) if record else None
        published = UNKNOWN
        if found:
            published = f"{found.mean:.5g} (the formula)"
    return cell.cell, published, ours, better


def _shown(figure: Figure | None, record: Record | None, cell: str) -> str:
    """Show a figure with the name of its row, unless the cell has that name."""
    if figure is None:
        return "–"
    if record and figure.is_missed(record.rows):
        return "not reached"
    found = figure.of(record.rows) if record else None
    if found is None:
        return "not run"
    if figure.row == cell:
        return str(found)
    return f"{found} ({figure.row})"


def main(words: Sequence[str] | None = None) -> int:
    about = "List every claim with its state, and the minutes that it takes to reproduce."
    parser = argparse.ArgumentParser("python -m xcloud claims", description=about)
    pages = (
        f"write {PAPER}, {BOARD}, and a README beside every record (not in git), from the records"
    )
    parser.add_argument("--paper", action="store_true", help=pages)
    check = "hold every row of every record to the summary of its run, and say what differs"
    parser.add_argument("--check", action="store_true", help=check)
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    given = parser.parse_args(words)
    claims = read_claims(project_root() / FILE)
    records = read_records(claims)
    paper = project_root() / PAPER
    if given.paper:
        paper.write_text(paper_page(claims, records=records), encoding="utf-8")
        if board := records.get("board"):
            (project_root() / BOARD).write_text(board_page(board.rows), encoding="utf-8")
        for name, record in records.items():
            record.write(project_root() / FOLDER / name, claims[name])
        say(paper)
        return 0
    if given.check:
        return _check(records)
    if given.json:
        listed = [
            {
                "name": name,
                "verdict": _verdict(claim, record=records.get(name)),
                "human_minutes": claim.human_minutes,
                "machine_minutes": claim.machine_minutes,
                "claim": claim.title,
            }
            for name, claim in claims.items()
        ]
        say(json.dumps(listed, indent=1, ensure_ascii=False))
        return 0
    say(f"{'name':<16} {'state':<28} {'yours + machine':<16} claim")
    for name, claim in claims.items():
        minutes = f"{claim.human_minutes} + {claim.machine_minutes} min"
        say(
            f"{name:<16} {_state(claim, record=records.get(name)):<28} {minutes:<16} {claim.title}"
        )
    return 0


def _check(records: Mapping[str, Record]) -> int:
    """Print what rows and runs differ in, a line each. Return 1 if anything does."""
    wrong = []
    for name, record in records.items():
        folder = project_root() / FOLDER / name
        wrong += [
            f"{name}: {line}"
            for line in mismatches(name, rows=record.rows, note=record.note, folder=folder)
        ]
    num_rows = sum(len(record.rows) for record in records.values())
    say("\n".join(wrong) or f"all {num_rows} rows are what their runs came to")
    return int(bool(wrong))


def _state(claim: Claim, record: Record | None) -> str:
    return _verdict(claim, record=record).split(":")[0]


def _verdict(claim: Claim, record: Record | None) -> str:
    if claim.withdrawn:
        return f"not reproduced: {claim.withdrawn}"
    return record.verdict if record else "not run"


def study_page(claim: Claim, record: Record | None, picture: Path | None) -> Page:
    rows = record.rows if record else ()
    rules = pd.DataFrame(judge(claim, rows=rows), columns=["rule", "came to", "met"], dtype=object)
    facts = [
        ("Question", claim.means), ("Source", claim.source),
        ("Verdict", _verdict(claim, record=record)),
        ("Missing", claim.missing or "nothing that we know of"),
        ("Minutes", f"{claim.human_minutes} of yours, {claim.machine_minutes} of the machine"),
    ]  # fmt: skip
    tables = [Table(title="Rules", cells=rules)]
    if record:
        facts.append(("Record", f"{FOLDER}/{claim.name}, made {record.made_at}, "
                                f"commit {record.commit}; {record.where}"))  # fmt: skip
        facts += [("Note", record.note)] * bool(record.note)
        tables.append(Table(title="Every run", cells=pd.DataFrame(rows, dtype=object)))
        if record.data:
            files = pd.DataFrame(record.data.items(), columns=["file", "sha256"])
            tables.append(Table(title="Data", cells=files))
    if picture:
        pictures = [Picture(file=picture, text=claim.title)]
    else:
        pictures = []
    return Page(
        name=claim.name,
        title=claim.title,
        facts=facts,
        command=claim.command,
        pictures=pictures,
        tables=tables,
        up="All claims",
    )


def front_page(claims: Mapping[str, Claim], records: Records, drawn: Mapping[str, Path]) -> Page:
    states = {name: _state(claim, record=records.get(name)) for name, claim in claims.items()}
    rows = [(claim.title, states[name], claim.source, claim.machine_minutes)
            for name, claim in claims.items()]  # fmt: skip
    cells = pd.DataFrame(rows, columns=["claim", "state", "source", "machine minutes"])
    pictures = [
        Picture(file=path, text=claims[name].title, link=f"{name}.html")
        for name, path in sorted(drawn.items(), key=lambda one: claims[one[0]].picture is None)
    ][:NUM_HEADLINES]  # those whose claim says what its picture shows
    table = Table(title="Claims", cells=cells, links=[f"{name}.html" for name in claims])
    counts = Counter(states.values())
    others = [f"{num} {state}" for state, num in counts.items() if state != "reproduced"]
    listed = f": {', '.join(others)}" * bool(others)
    met = f"{counts['reproduced']} of {len(claims)} claims are reproduced"
    facts = [("State", f"{met} by the rule on their page, claims taken back among them{listed}")]
    paper = Table(
        title="The paper",
        cells=pd.DataFrame({"page": ["every cell, and ours"]}),
        links=["paper.html"],
    )
    title = "xcloud: what is claimed and measured"
    tables = [paper, table]
    return Page(name="index", title=title, facts=facts, pictures=pictures, tables=tables)


def site(words: Sequence[str] | None = None) -> int:
    about = "Write the records as pages that need no server, with a picture each."
    parser = argparse.ArgumentParser("python -m xcloud site", description=about)
    parser.add_argument("--out", type=Path, default=Path("site"), help="folder; default: site")
    given = parser.parse_args(words)
    claims = read_claims(project_root() / FILE)
    records = read_records(claims)
    given.out.mkdir(parents=True, exist_ok=True)
    pictures = {name: given.out / f"{name}.png" for name in records}
    drawn = {
        n: path for n, path in pictures.items() if draw(claims[n], record=records[n], path=path)
    }
    pages = [
        study_page(one, record=records.get(name), picture=drawn.get(name))
        for name, one in claims.items()
    ]
    pages.append(paper_of_site(claims, records=records))
    say(
        write_site(
            front_page(claims, records=records, drawn=drawn), studies=pages, folder=given.out
        ).absolute()
    )
    return 0


def draw(claim: Claim, record: Record, path: Path) -> bool:
    """Draw the figures by row, means and standard errors over seeds, a panel for each choice of
    rows in the rules. Return False if no row has them."""
    drawn: dict[str, Drawn] = {}
    for figure in (rule.figure for rule in claim.rules):
        drawn.setdefault(str(figure.where), Drawn(y=figure.column, where=figure.where))
    shown = [claim.picture] if claim.picture else drawn.values()
    panels = [(one, points) for one in shown if (points := _points(one, record=record))]
    if not panels:
        return False
    wide = min(len(panels), 2)
    high = math.ceil(len(panels) / 2)
    tall = 3.6 * max(1.0, max(len(points) for _, points in panels) / 16)  # names in a list
    picture = canvas("", *((7.2, 4.0) if wide == 1 else (9.6, tall * high)))
    places = picture.subplots(high, wide, squeeze=False).flatten()
    for axes in places[len(panels) :]:
        axes.remove()
    for axes, (one, points) in zip(places, panels, strict=False):
        _panel(axes, shown=one, points=points)
    save(picture, path=path)
    return True


def _points(shown: Drawn, record: Record) -> dict[str, tuple[Estimate, Estimate]]:
    points = {}
    for name in dict.fromkeys(row["row"] for row in record.rows):
        columns = (shown.x or shown.y, shown.y)
        x, y = (
            Figure(row=name, column=column, where=shown.where).of(record.rows)
            for column in columns
        )
        if x and y:
            points[name] = x, y
    return points


def _panel(axes: Axes, shown: Drawn, points: Mapping[str, tuple[Estimate, Estimate]]) -> None:
    axes.set_title(", ".join(shown.where.values()), fontsize=TITLE_POINTS)
    label = AXES.get(shown.y, shown.y)
    if shown.x:
        _scatter(axes, points=points)
        scale = "log" if shown.log else "linear"
        axes.set(xlabel=AXES.get(shown.x, shown.x), ylabel=label, xscale=scale)
    elif any(map(NUMBERED.fullmatch, points)):
        _lines(axes, points={name: y for name, (_, y) in points.items()})
        axes.set_ylabel(label)
    else:
        means, errors = zip(*((y.mean, y.error or 0.0) for _, y in points.values()), strict=True)
        axes.errorbar(means, list(points), xerr=errors, fmt="o", color=LINES[1], capsize=3)
        axes.margins(y=0.25)
        axes.invert_yaxis()
        axes.set_xlabel(label)
    plain(axes, grid="both")


def _scatter(axes: Axes, points: Mapping[str, tuple[Estimate, Estimate]]) -> None:
    """Draw numbered points, named beside the axes from the lowest y to the highest."""
    in_order = sorted(points.items(), key=lambda point: point[1][1].mean)
    for number, (_, (x, y)) in enumerate(in_order, 1):
        axes.errorbar(x.mean, y.mean, xerr=x.error, yerr=y.error, fmt="o", color=LINES[1], ms=4)
        # neighbours apart
        at = (x.mean, y.mean)
        beside = (4, 3 if number % 2 else -10)
        axes.annotate(str(number), at, beside, textcoords="offset points", fontsize=8)
    names = [f"{number}  {name}" for number, (name, _) in enumerate(in_order, 1)]
    axes.legend(
        [Line2D([], [], linestyle="none")] * len(names), names, fontsize=7, loc="center left",
        bbox_to_anchor=(1.0, 0.5), handlelength=0, handletextpad=0, frameon=False,
    )  # fmt: skip


def _lines(axes: Axes, points: Mapping[str, Estimate]) -> None:
    """Draw a line through rows whose names differ in the number at their end; a level one for a
    row without a number."""
    lines: dict[str, list[tuple[int, Estimate]]] = {}
    for name, found in points.items():
        if numbered := NUMBERED.fullmatch(name):
            line, counted, number = numbered.groups()
            lines.setdefault(line, []).append((int(number), found))
            axes.set_xlabel(counted)
        else:
            axes.axhline(found.mean, color="gray", linestyle="--", label=name)
    for colour, (line, marks) in zip(cycle(LINES), lines.items()):
        numbers, estimates = zip(*sorted(marks, key=lambda mark: mark[0]), strict=True)
        means, errors = zip(*((e.mean, e.error or 0.0) for e in estimates), strict=True)
        axes.errorbar(numbers, means, errors, marker="o", color=colour, capsize=3, label=line)
    axes.legend(fontsize=7)
