"""A sweep as pages that need no server: `python -m xcloud report SWEEP --site DIR`. A front page
with pictures and the table, and a page a setting with its runs and the command of each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from xcloud.report.site import Cell, Page, Picture, Table, write_site
from xcloud.sweep.points import varying
from xcloud.sweep.results import Result, Results
from xcloud.sweep.state import read_points
from xcloud.sweep.table import cells_of, remarks_of

_OF_A_RUN = ("seed", "status", "cause", "folder")  # beside its figures


def write_sweep_site(results: Results, pictures: Sequence[Path], title: str, folder: Path) -> Path:
    """Returns the index. pictures: files, which are copied."""
    cells = cells_of(results)
    names = [_page_name(number, str(setting)) for number, setting in enumerate(cells["setting"])]
    table = Table(
        "Settings, best first",
        list(cells.columns),
        [
            [Cell(str(first), f"{name}.html"), *(Cell(str(text)) for text in rest)]
            for name, (first, *rest) in zip(names, cells.itertuples(index=False), strict=True)
        ],
    )
    shown = [Picture(str(path), path.stem.replace("_", " ")) for path in pictures]
    facts = [("Note", line) for line in remarks_of(results)]
    front = Page("index", title, facts, "", shown, [table])
    by_number = dict(zip(results.rows.index, names, strict=True))
    pages = [
        _setting_page(by_number[number], results, runs)
        for number, runs in enumerate(results.of_row)
        if number in by_number
    ]
    return write_site(front, pages, folder)


def _setting_page(name: str, results: Results, runs: Sequence[Result]) -> Page:
    settings = runs[0].settings
    differing = [key for key in varying([r.settings for r in results.runs]) if key != "seed"]
    what = [[Cell(key), Cell(str(settings.get(key, "–")))] for key in differing]
    points = results.points.loc[[results.runs.index(run) for run in runs]]
    figures = [c for c in points.columns if c not in {*differing, "sweep", "label", "identity"}]
    columns = [c for c in (*_OF_A_RUN, *figures) if points[c].notna().any()]
    columns = list(dict.fromkeys(columns))
    lines = [[Cell(_text(row[column])) for column in columns] for _, row in points.iterrows()]
    tables = [Table("What differs", ("setting", "value"), what)] if what else []
    return Page(
        name, runs[0].label, (), _command(runs[0]), (), [*tables, Table("Runs", columns, lines)],
        up="All settings",
    )  # fmt: skip


def _command(run: Result) -> str:
    """That made the run; empty where sweep.json does not know it."""
    entry = read_points(run.run_dir.parent).get(run.run_dir.name)
    return shlex.join(["python", "run.py", *entry["overrides"]]) if entry else ""


def _page_name(number: int, setting: str) -> str:
    return f"{number}-{re.sub(r'[^A-Za-z0-9]+', '-', setting).strip('-')[:60]}"


def _text(value: object) -> str:
    if value is None or (isinstance(value, float) and pd.isna(value)):
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
