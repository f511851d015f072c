"""The end of a sweep, and `python -m xcloud report SWEEP [OTHER ...]`: tables and pictures from
run folders or from MLflow, pages of HTML and in MLflow, comparisons of sweeps. Runs nothing."""

from __future__ import annotations

import argparse
import logging
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from xcloud.base.project import project_root
from xcloud.base.units import score_text
from xcloud.record.mlflow_store import COSTS, Store, prepare_environment
from xcloud.record.tracking import Tracker
from xcloud.report.tables import Page, Picture, Table, write_site
from xcloud.sweep import table
from xcloud.sweep.points import Settings, differences, is_number, read_points, varying
from xcloud.sweep.results import Result, Results, from_folder, known_sweeps, open_sweep, swept_of

MOST_DIFFERENCES = 12
MOST_PARAMS = 6  # columns of MLflow's table; more do not fit a window
_FIRST_OF_A_RUN = ["seed", "status", "cause", "folder"]  # then its figures

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m xcloud report", description=__doc__)
    parser.add_argument("sweep", nargs="*", help="name of a sweep, or its folder; none: list them")
    parser.add_argument("--to", type=Path, help="where table.csv, points.csv and pictures go")
    parser.add_argument("--site", type=Path, help="write the sweep as pages without a server here")
    parser.add_argument("--root", default="mlruns", help="folder of mlflow.db (tracker.root)")
    parser.add_argument("--uri", help="address of a tracking server (tracker.uri)")
    parser.add_argument("--experiment", default="xcloud", help="in MLflow (tracker.experiment)")
    settings = parser.parse_args(arguments)
    if not settings.sweep:
        print("\n".join(known_sweeps()) or "there is no sweep in multirun/ yet")
        return 0
    store = Store(project_root() / settings.root, settings.experiment, settings.uri)
    opened = [open_sweep(name, store) for name in dict.fromkeys(settings.sweep)]
    folders = [folder for folder, _ in opened]
    target = settings.to or folders[0].parent / "+".join(folder.name for folder in folders)
    results = Results([run for _, runs in opened for run in runs])
    title = " and ".join(folder.name for folder in folders)
    written = report(results, target, title)
    if settings.site:
        pictures = [path for path in written if path.suffix == ".png"]
        print(write_sweep_site(results, pictures, f"Sweep {title}", settings.site))
    if len(opened) > 1:
        _compare(results)
    return 0


def report(results: Results, folder: Path, title: str) -> list[Path]:
    """Print the table; write CSV and pictures into `folder`. Returns the files."""
    from xcloud.sweep import pictures

    table.print_sweep(results)
    written = [*table.write_csv(folder, results)]
    written += pictures.write_pictures(folder, results, title)
    if swept := swept_of(results):
        table.print_swept(swept)
        written.append(table.write_swept(folder, swept))
        written.append(pictures.write_swept_picture(folder, swept, title))
    reference, curves = pictures.curves_of(results)
    if curves:
        written.append(pictures.write_losses(folder, reference, curves, title))
    print(f"in {folder}: {', '.join(path.name for path in written)}", flush=True)
    return written


def close_sweep(folder: Path, tracker: Tracker) -> None:
    """Close a sweep: print its table, make pictures, log both to MLflow and print the links."""
    results = Results(from_folder(folder))
    if not results.runs:
        return
    written = report(results, folder, f"sweep {folder.name}")
    score = next(iter(results.scores), "bleu")
    all_settings = [run.settings for run in results.runs]
    for line in page_in_mlflow(results.sweeps[0], tracker, all_settings, score, written):
        print(line, flush=True)


def write_sweep_site(results: Results, pictures: Sequence[Path], title: str, folder: Path) -> Path:
    """The sweep as pages that need no server: a front page with pictures and the table, and a page
    a setting with its runs and the command of each. Returns the index. pictures are copied."""
    cells = table.cells_of(results)
    links = [
        f"{number}-{re.sub(r'[^A-Za-z0-9]+', '-', setting).strip('-')[:60]}"
        for number, setting in enumerate(cells.setting)
    ]
    settings = Table("Settings, best first", cells, [f"{link}.html" for link in links])
    shown = [Picture(str(path), path.stem.replace("_", " ")) for path in pictures]
    facts = [("Note", line) for line in table.remarks_of(results)]
    pages = [
        _setting_page(link, results, results.of_row[number])
        for link, number in zip(links, results.rows.index, strict=True)
    ]
    return write_site(Page("index", title, facts, "", shown, [settings]), pages, folder)


def _setting_page(name: str, results: Results, runs: Sequence[Result]) -> Page:
    settings, entry = runs[0].settings, read_points(runs[0].run_dir.parent)
    differing = [key for key in varying([r.settings for r in results.runs]) if key != "seed"]
    what = pd.DataFrame({"setting": differing, "value": [settings.get(key) for key in differing]})
    points = results.points.loc[[results.runs.index(run) for run in runs]]
    columns = [*_FIRST_OF_A_RUN, *points.columns.difference(_FIRST_OF_A_RUN, sort=False)]
    left_out = {*differing, "sweep", "label", "identity"}
    columns = [name for name in columns if name not in left_out and points[name].notna().any()]
    made = entry.get(runs[0].run_dir.name)  # sweep.json may not know it
    command = shlex.join(["python", "run.py", *made["overrides"]]) if made else ""
    tables = [Table("What differs", what), Table("Runs", points[columns])]
    tables = [one for one in tables if len(one.cells)]
    return Page(name, runs[0].label, (), command, (), tables, up="All settings")


def _compare(results: Results) -> None:
    """Print the settings that differ between sweeps, and compare rows with the same label."""
    first, *others = results.sweeps
    shared = {}  # the settings that all runs of a sweep have
    for sweep in results.sweeps:
        own = [run.settings for run in results.runs if run.sweep == sweep]
        shared[sweep] = {key: own[0][key] for key in own[0].keys() - set(varying(own))}
    for sweep in others:
        found = differences(shared[first], shared[sweep]).items()
        both = [f"  {key}: {old} | {new}" for key, (old, new) in found
                if key in shared[first] and key in shared[sweep]]  # fmt: skip
        heading = "settings that differ" if both else "no common setting differs"
        print("\n".join([f"{first} | {sweep}: {heading}", *both[:MOST_DIFFERENCES]]))
    scored = results.rows[results.rows.score.notna()]
    bases = scored[scored.sweep == first].set_index("setting")
    pairs = scored[scored.sweep != first].merge(bases, on="setting", suffixes=("", "_of_first"))
    for _, row in pairs.iterrows():
        more = score_text(row.score, row[row.score] - row[f"{row.score}_of_first"])
        sign = "" if more.startswith("-") else "+"
        line = f"{row.setting}: {row.sweep} against {first}: {sign}{more}"
        if pd.notna(slower := row.step_time_s / row.step_time_s_of_first):
            line += f", step time x{slower:.2f}"
        print(line)


def columns_of(settings: Sequence[Settings]) -> list[str]:
    """Settings that differ, for MLflow's table. One that only some points have is shown only if it
    is a number that varies (a compressor's rate); the label covers the rest."""
    shown = []
    for key in varying(settings):
        values = [s[key] for s in settings if s.get(key) is not None]
        is_swept = all(map(is_number, values)) and len(set(map(str, values))) > 1
        if is_swept or len(values) == len(settings):
            shown.append(key)
    return ["label", *shown[:MOST_PARAMS]]


def page_in_mlflow(
    sweep: str,
    tracker: Tracker,
    settings: Sequence[Settings],
    score: str = "bleu",
    files: Sequence[Path] = (),
) -> list[str]:
    """Write a sweep's page in MLflow, which never fails the sweep; returns lines with its links.
    files: tables and pictures to log as artifacts."""
    if tracker.store is None:
        return []
    try:
        prepare_environment()
        metrics, params = (score, *COSTS), columns_of(settings)
        return list(tracker.store.show_sweep(sweep, metrics, params, files))
    except Exception as error:  # MLflow may be down or refuse; the sweep continues.
        log.debug("no page for sweep %s", sweep, exc_info=True)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return [f"MLflow: no page could be prepared: {reason}"]
