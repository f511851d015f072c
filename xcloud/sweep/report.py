"""The end of a sweep, and `python -m xcloud report SWEEP [OTHER ...]`: tables and pictures from
run folders or from MLflow, a page in MLflow, comparisons of several sweeps. Runs nothing."""

from __future__ import annotations

import argparse
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from xcloud.base.errors import XcloudError
from xcloud.base.project import project_root
from xcloud.base.units import score_text
from xcloud.record.mlflow_store import (
    Store,
    artifacts_page,
    page,
    prepare_environment,
    prepared_view,
    sweep_key,
    ui_command,
)
from xcloud.record.tracking import Tracker
from xcloud.sweep.points import (
    CUT_LAYER,
    CUT_RANK,
    Settings,
    differences,
    is_number,
    varying,
)
from xcloud.sweep.results import Results, from_folder, known_sweeps, open_sweep
from xcloud.sweep.table import print_sweep, write_csv

MOST_DIFFERENCES = 12
MOST_PARAMS = 6  # columns of MLflow's table; more do not fit a window
TIMEOUT_S = 30.0  # of MLflow

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
    try:
        opened = [open_sweep(name, store) for name in dict.fromkeys(settings.sweep)]
    except XcloudError as error:
        print(f"xcloud: {error}", file=sys.stderr)
        return 2
    folders = [folder for folder, _ in opened]
    target = settings.to or folders[0].parent / "+".join(folder.name for folder in folders)
    results = Results([run for _, runs in opened for run in runs])
    title = " and ".join(folder.name for folder in folders)
    written = report(results, target, title)
    if settings.site:
        from xcloud.sweep.site import write_sweep_site

        pictures = [path for path in written if path.suffix == ".png"]
        print(write_sweep_site(results, pictures, f"Sweep {title}", settings.site))
    if len(opened) > 1:
        _compare(results)
    return 0


def report(results: Results, folder: Path, title: str) -> list[Path]:
    """Print the table; write CSV and pictures into `folder`. Returns the files."""
    from xcloud.sweep.pictures import curves_of, write_losses, write_pictures
    from xcloud.sweep.swept import print_swept, swept_of, write_swept, write_swept_picture

    print_sweep(results)
    written = [*write_csv(folder, results), *write_pictures(folder, results, title)]
    if swept := swept_of(results):
        print_swept(swept)
        written += [write_swept(folder, swept), write_swept_picture(folder, swept, title)]
    reference, curves = curves_of(results)
    if curves:
        written.append(write_losses(folder, reference, curves, title))
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
    for line in prepare(results.sweeps[0], tracker, all_settings, score, written)():
        print(line, flush=True)


def _compare(results: Results) -> None:
    """Print the settings that differ between sweeps, and compare rows with the same label."""
    first, *others = results.sweeps
    shared = {}
    for sweep in results.sweeps:
        own = [run.settings for run in results.runs if run.sweep == sweep]
        differing = set(varying(own))
        shared[sweep] = {key: own[0][key] for key in own[0] if key not in differing}
    for sweep in others:
        both = {key: pair for key, pair in differences(shared[first], shared[sweep]).items()
                if key in shared[first] and key in shared[sweep]}  # fmt: skip
        lines = [f"  {key}: {old} | {new}" for key, (old, new) in both.items()]
        heading = f"{first} | {sweep}: "
        print(heading + ("settings that differ" if lines else "no common setting differs"))
        for line in lines[:MOST_DIFFERENCES]:
            print(line)
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


def view_of(sweep: str, settings: Sequence[Settings], score: str = "bleu") -> dict[str, Any]:
    """Columns and charts of the settings that differ. A setting that only some points have is
    shown only if it is a number that varies (a compressor's rate); the label covers the rest."""
    shown, numbers = [], []
    for key in varying(settings):
        values = [s[key] for s in settings if s.get(key) is not None]
        is_swept = all(is_number(value) for value in values) and len(set(map(str, values))) > 1
        if key != "seed" and (is_swept or len(values) == len(settings)):
            shown.append(key)
            numbers += [key] if is_swept else []
    shown = shown[:MOST_PARAMS]
    seed = ["seed"] if "seed" in varying(settings) else []
    # The unsplit model has no cut layer, so it is not drawn in the parallel coordinates.
    cut = [key for key in (CUT_LAYER, CUT_RANK) if key in shown]
    everywhere = [key for key in shown if all(s.get(key) is not None for s in settings)]
    everywhere = [*cut, *(key for key in everywhere if key not in cut)]
    return prepared_view(
        sweep,
        params=["label", *shown, *seed],
        numbers=[key for key in numbers if key in shown],
        axes=[*([] if cut else ["label"]), *everywhere, *seed],
        score=score,
    )


def prepare(
    sweep: str,
    tracker: Tracker,
    settings: Sequence[Settings],
    score: str = "bleu",
    files: Sequence[Path] = (),
) -> Callable[[], list[str]]:
    """Start writing a sweep's page in MLflow, which never fails the sweep; call the result to
    wait for it and get its links.

    files: tables and pictures to log as artifacts.
    """
    store = tracker.store
    if store is None:
        return list
    links: list[str] = []

    def write() -> None:
        try:
            prepare_environment()
            experiment_id = store.write_view(sweep_key(sweep), view_of(sweep, settings, score))
            runs = page(store.server, experiment_id, sweep_key(sweep))
            charts = page(store.server, experiment_id, sweep_key(sweep), charts=True)
            lines = [f"MLflow table   {runs}", f"MLflow charts  {charts}"]
            if files:
                run_id = store.keep_report(sweep, files)
                place = artifacts_page(store.server, experiment_id, run_id)
                lines.append(f"MLflow report  {place}")
            if store.uri is None:
                lines.append(f"served by      {ui_command(store.root)} --sweep {sweep}")
            links.extend(lines)
        except Exception as error:  # MLflow may be down or refuse; the sweep continues.
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            links.append(f"MLflow: no page could be prepared: {reason}")
            log.debug("no page for sweep %s", sweep, exc_info=True)

    thread = threading.Thread(target=write, name="sweep page", daemon=True)
    thread.start()

    def wait() -> list[str]:
        thread.join(TIMEOUT_S)
        return list(links) or [f"MLflow: no answer within {TIMEOUT_S:g} s"]

    return wait
