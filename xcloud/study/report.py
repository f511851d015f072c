"""What is shown of a sweep, at its end and by `python -m xcloud report SWEEP [OTHER ...]`: tables
on the screen and as CSV, pictures, pages of HTML and in MLflow, comparisons. Runs nothing.

table.csv is by setting, points.csv by run, quality_over_setting.csv by the values of a number that
varies by itself.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from xcloud.base.errors import ConfigError
from xcloud.base.project import project_root
from xcloud.base.terminal import printable, say
from xcloud.base.units import (
    UNKNOWN,
    human_percent,
    human_seconds,
    score_name,
    score_text,
    shown_scores,
)
from xcloud.record.events import AVERAGING, TENSORS
from xcloud.show import tables
from xcloud.show.tables import Column, Page, Picture, Table, console_of, print_table, write_site
from xcloud.study.points import (
    UNCOMPRESSED,
    PointSettings,
    differences,
    is_number,
    read_points,
    varying,
)
from xcloud.study.results import (
    RATES,
    PointResult,
    Results,
    Swept,
    drift_of,
    from_folder,
    known,
    known_sweeps,
    open_sweep,
    plus_minus,
    spread,
    spread_text,
    swept_of,
)
from xcloud.tracking.mlflow_store import COSTS, Store, check_no_password, prepare_environment
from xcloud.tracking.tracker import Tracker

if TYPE_CHECKING:
    from rich.console import Console

TABLE_FILE = "table.csv"
POINTS_FILE = "points.csv"
SWEPT_FILE = "quality_over_setting.csv"
PAPER = "paper: "  # prefix of headings of published figures
MAX_DIFFERENCES = 12
MAX_PARAMS = 6  # columns of MLflow's table; more do not fit a window
_BESIDE = ["settings", "published", "reference", "workload", "score", "cluster"]
_PUBLISHED = ("quality", "share", "ratio", "of_one_cloud")
_FIRST_OF_A_RUN = ["seed", "status", "cause", "folder"]  # then its figures


def main(arguments: Sequence[str] | None = None) -> int:
    about = "Make tables and pictures of a sweep, or compare sweeps; runs nothing."
    parser = argparse.ArgumentParser(prog="python -m xcloud report", description=about)
    parser.add_argument("sweep", nargs="*", help="name of a sweep, or its folder; none: list them")
    parser.add_argument("--to", type=Path, help="where table.csv, points.csv and pictures go")
    parser.add_argument("--site", type=Path, help="write the sweep as pages without a server here")
    parser.add_argument("--root", default="mlruns", help="folder of mlflow.db (tracker.root)")
    parser.add_argument("--uri", help="address of a tracking server (tracker.uri)")
    parser.add_argument("--experiment", default="xcloud", help="in MLflow (tracker.experiment)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON only")
    given = parser.parse_args(arguments)
    if not given.sweep and given.json:
        say(json.dumps(known_sweeps(), indent=1))
        return 0
    if not given.sweep:
        say("\n".join(known_sweeps()) or "there is no sweep in multirun/ yet")
        return 0
    # An address is shown and kept, so no password may stand in it.
    check_no_password("--uri", uri=given.uri)
    store = Store(root=project_root() / given.root, experiment=given.experiment, uri=given.uri)
    opened = dict(open_sweep(name, store) for name in given.sweep)
    names = [folder.name for folder in opened]
    # Rows of two sweeps of one name could not be told apart.
    if len({*names}) < len(names):
        raise ConfigError(f"sweeps to compare need names of their own, got {', '.join(names)}")
    results = Results(list(chain(*opened.values())))
    title = " and ".join(names)
    if given.json:
        say(results.rows.to_json(orient="records", indent=1, default_handler=str))
        return 0
    written = report(
        results, folder=given.to or next(iter(opened)).parent / "+".join(names), title=title
    )
    if given.site:
        say(write_sweep_site(results, files=written, title=f"Sweep {title}", folder=given.site))
    if len(opened) > 1:
        compare(results)
    return 0


def report(results: Results, folder: Path, title: str) -> list[Path]:
    """Print the table; write CSV and pictures into `folder`. Returns the files."""
    from xcloud.study import pictures

    print_sweep(results)
    written = write_csv(folder, results=results)
    written += pictures.write_pictures(folder, results=results, title=title)
    # Only where a number varies by itself.
    if swept := swept_of(results):
        print_swept(swept)
        written.append(write_swept(folder, swept))
        written.append(pictures.write_swept_picture(folder, swept, title))
    reference, curves = pictures.curves_of(results)
    if curves:
        written.append(
            pictures.write_losses(
                folder, reference, curves, title=title, colours=pictures.colours_of_curves(results)
            )
        )
    say(f"in {folder}: {', '.join(path.name for path in written)}")
    return written


def close_sweep(folder: Path, tracker: Tracker) -> None:
    """Close a sweep: print its table, make pictures, log both to MLflow and print the links."""
    results = Results(from_folder(folder))
    # A sweep of which nothing ran has no table.
    if results.runs:
        written = report(results, folder=folder, title=f"sweep {folder.name}")
        score = [*results.scores, "bleu"][0]
        all_settings = [run.settings for run in results.runs]
        for line in page_in_mlflow(
            results.sweeps[0], tracker, settings=all_settings, score=score, files=written
        ):
            say(line)


# Tables on the screen and as CSV.


def print_sweep(results: Results, console: Console | None = None) -> None:
    console = console or console_of()
    cells = cells_of(results)
    # Columns that go first where the screen is narrow: published figures, then shares and counts.
    spare = {"share": 1, "runs": 2}
    heads = [
        Column(
            heading=h,
            right=i > 0,
            dim=h.startswith(PAPER),
            spare=3 if h.startswith(PAPER) else spare.get(h, 0),
        )
        for i, h in enumerate(cells)
    ]
    console.print()
    print_table(console, columns=heads, rows=cells.itertuples(index=False))
    for line in remarks_of(results):
        text = printable(line)
        console.print(text, style="dim", markup=False, highlight=False)


def cells_of(results: Results) -> pd.DataFrame:
    """Texts: a column for each figure that any setting has, a line for each setting."""
    cells = pd.DataFrame(dict(_columns(results)), index=results.rows.index)
    # A figure that no setting has is no column.
    return cells.loc[:, [any(cells[heading]) for heading in cells]]


def _columns(results: Results) -> Iterator[tuple[str, list[str]]]:
    """Headings with a cell for each row."""
    rows = [row for _, row in results.rows.iterrows()]
    # Published figures stand beside ours, by the setting that they are of.
    paper = {name: [row.published.get(name, "") for row in rows] for name in _PUBLISHED}
    yield "setting", [row.setting for row in rows]
    if len(results.sweeps) > 1:
        yield "sweep", [row.sweep for row in rows]
    counts = [f"{row.finished} of " * (row.finished != row.runs) + str(row.runs) for row in rows]
    yield "runs", counts
    for index, name in enumerate(shown_scores(results.scores)):
        yield score_name(name), [spread_text(row, score=name) for row in rows]
        if index == 0:
            yield f"{PAPER}{score_name(name)}", paper["quality"]
    yield "step time", [spread(row, name="step_time_s", text=human_seconds) for row in rows]
    # A share of 100 % in each row says nothing.
    if _compares(results):
        yield "share", [spread(row, name="share", text=human_percent) for row in rows]
    yield f"{PAPER}share", paper["share"]
    if rate := _rate(results):
        heading = rate.replace("_per_s", "/s")
        yield heading, [spread(row, name=rate, text="{:,.0f}".format) for row in rows]
        alone = [known(row, name=f"{rate}_share_of_one_cloud") for row in rows]
        yield "of one cloud", [human_percent(share, digits=1) for share in alone]
        yield f"{PAPER}of one cloud", paper["of_one_cloud"]
    ratios = [known(row, name="compression_ratio") for row in rows]
    yield "ratio", [UNKNOWN if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
    yield f"{PAPER}ratio", paper["ratio"]
    per_token = [known(row, name="bytes_per_token") for row in rows]
    if any(value is not None for value in per_token):
        yield "B/token", [UNKNOWN if v is None else f"{v:,.1f}" for v in per_token]


def _compares(results: Results) -> bool:
    """Return whether a share compares a row with another row, or one that would is left out."""
    # A row alone is its own reference.
    rows = results.rows
    return bool((rows.share.dropna() != 1.0).any() or rows.share_left_out.notna().any())


def _drift_remarks(results: Results) -> Iterator[str]:
    """Say which shares are left out, and why; and what compression could save at most."""
    # Left out: the machine computed at another speed for these, so a quotient would show that.
    rows = results.rows
    drifted = rows[rows.share_left_out.notna()]
    for _, row in drifted.iterrows():
        yield (
            f"share – of {row.setting}: its runs spent {row.share_left_out} than the uncompressed "
            "ones, so the step times compare the machine, not the compression. "
            "python -m benchmarks.in_turns times settings in turns."
        )
    keys = ["sweep", "reference"]
    # Links are busiest without compression, so these rows bound what it can save.
    plain = rows[(rows.compression == UNCOMPRESSED) & rows.step_time_s.notna()]
    for _, base in plain.merge(drifted[keys].drop_duplicates(), on=keys).iterrows():
        use = {
            kind: known(base, name=f"link_utilisation_{kind}") for kind in (*TENSORS, AVERAGING)
        }
        busy = {kind: share for kind, share in use.items() if share is not None}
        if busy:
            each = ", ".join(f"{kind} {human_percent(share)}" for kind, share in busy.items())
            most = human_percent(min(1.0, sum(busy.values())))
            yield (
                f"In an uncompressed step ({base.setting}) the link was busy: {each}. "
                f"Compression can save {most} of it at most."
            )
        else:
            yield "How long the link was busy is unknown: only emulated lines measure it."


def _rate(results: Results) -> str:
    """Return the rate that most rows compare with one cloud; empty if none does."""
    names = [name for name in reversed(RATES) if f"{name}_share_of_one_cloud" in results.rows]
    # Of several rates the one that most rows have.
    shares = {name: results.rows[f"{name}_share_of_one_cloud"].count() for name in names}
    if any(shares.values()):
        return max(shares, key=lambda name: shares[name])
    return ""


def remarks_of(results: Results) -> Iterator[str]:
    rows = results.rows
    if (rows.finished > 1).any():
        yield "± is the standard deviation over seeds."
    # One run has no spread; its error over samples is shown instead.
    if any(
        plus_minus(rows[rows[f"{s}_std"].isna()], score=s).notna().any() for s in results.scores
    ):
        yield "± of a score of a single run is its standard error over the test samples."
    crowd = results.num_at_once
    if crowd > 1:
        yield f"{crowd} points ran at once and slowed each other down: do not compare step times."
    yield from _drift_remarks(results)
    if _compares(results):
        yield "share: of the step time of the uncompressed runs of the same sweep."
        if crowd == 1:
            yield (
                "Points run one after another, so their step times differ by the noise of the "
                "machine too: python -m benchmarks.in_turns times them in turns."
            )
    if rate := _rate(results):
        if rate == "tokens_per_s":
            yield "tokens/s: all that were computed; learned_tokens_per_s in points.csv."
        yield "of one cloud: throughput / that of the same work with cluster=one_cloud."
        compared = rows[rows[f"{rate}_share_of_one_cloud"].notna()]
        # Per cloud the number of ranks, since throughput depends on it.
        counts = {
            cluster: sum(
                number
                for key, number in settings.items()
                if fnmatch(key, "cluster.clouds.*.num_ranks") and isinstance(number, int)
            )
            for cluster, settings in zip(compared.cluster, compared.settings, strict=True)
        }
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{cluster} has {count}" for cluster, count in counts.items())
            yield f"Numbers of ranks differ, so the share is not due to the link alone: {listed}."
    unknown = [run for run in results.runs if None in run.summary.get("quality", {}).values()]
    # A score that is not finite has no mean.
    if unknown:
        named = ", ".join(f"{run.label} s{run.settings.get('seed')}" for run in unknown)
        yield f"Means exclude runs whose score is not finite: {named}."
    if len(commits := {str(commit) for commit in results.points.commit.dropna()}) > 1:
        yield f"These runs are of different code: {', '.join(sorted(commits))}."
    # Notes of several rows may be the same one.
    yield from dict.fromkeys(note for entry in rows.published for note in entry["notes"])


def write_csv(folder: Path, results: Results) -> list[Path]:
    """Write table.csv, a row per setting, and points.csv, a row per run, failed ones included."""
    table = results.rows.drop(columns=_BESIDE).round(6)
    # The name says what it is a share of, as a reader of a CSV sees no remark.
    table = table.rename(columns={"share": "share_of_uncompressed_step_time"})
    paper = {f"paper_{n}": [e.get(n) for e in results.rows.published] for n in _PUBLISHED}
    table = table.assign(**paper)
    return [
        tables.write_csv(table, path=folder / TABLE_FILE),
        tables.write_csv(results.points, path=folder / POINTS_FILE),
    ]


def print_swept(swept: Swept, console: Console | None = None) -> None:
    """Print a table for each score: a row per value, a column per line; then the rows without the
    setting, repeated for every line."""
    console = console or console_of()
    for score in swept.scores:
        texts = swept.rows.assign(text=swept.rows.apply(spread_text, axis=1, score=score))
        # Each value once, with the lines beside each other.
        wide = texts.groupby(["value", "line"]).text.agg(", ".join).unstack()
        wide = wide[swept.lines].fillna("-")
        cells = [(f"{value:g}", *row) for value, row in wide.iterrows()]
        cells += [(row.setting, *[spread_text(row, score)] * len(swept.lines))
                  for _, row in swept.beside.iterrows()]  # fmt: skip
        title = f"{score_name(score)} by {swept.setting}"
        print_table(console, columns=[swept.name, *swept.lines], rows=cells, title=title)


def write_swept(folder: Path, swept: Swept) -> Path:
    """Write a CSV row for each score, value and line."""
    rows = pd.concat([swept.rows, swept.beside.assign(line=swept.beside.setting)])
    rows = rows.rename(columns={"value": swept.setting, "finished": "seeds"})
    figures = {"mean": "", "std": "_std", "error": "_error"}
    table = pd.concat(
        rows.assign(score=score, **{name: rows.get(score + end) for name, end in figures.items()})
        for score in swept.scores
    )
    columns = ["score", swept.setting, "line", *figures, "seeds"]
    table = table.dropna(subset="mean")[columns].round(6)
    return tables.write_csv(table, path=folder / SWEPT_FILE, float_format="{:g}".format)


def compare(results: Results) -> None:
    """Print the settings that differ between sweeps, and compare rows with the same label."""
    first, *others = results.sweeps
    # Settings that a sweep varies by itself are not what tells it from another.
    shared = {}  # the settings that all runs of a sweep have
    for sweep in results.sweeps:
        own = [run.settings for run in results.runs if run.sweep == sweep]
        # Those that all runs of a sweep have alike.
        shared[sweep] = {key: own[0][key] for key in own[0].keys() - set(varying(own))}
    for sweep in others:
        found = differences(shared[first], other=shared[sweep]).items()
        both = [f"  {key}: {old} | {new}" for key, (old, new) in found
                if key in shared[first] and key in shared[sweep]]  # fmt: skip
        heading = "settings that differ" if both else "no common setting differs"
        say("\n".join([f"{first} | {sweep}: {heading}", *both[:MAX_DIFFERENCES]]))
    scored = results.rows[results.rows.score.notna()]
    # The first sweep is the reference.
    bases = scored[scored.sweep == first].drop_duplicates("setting").set_index("setting")
    others_scored = scored[scored.sweep != first]
    for _, row in others_scored[others_scored.setting.isin(bases.index)].iterrows():
        base = bases.loc[row.setting]
        more = score_text(row.score, value=row[row.score] - base[row.score])
        sign = "" if more.startswith("-") else "+"
        line = f"{row.setting}: {row.sweep} against {first}: {sign}{more}"
        # NaN where one of them has no step time.
        if pd.notna(slower := row.step_time_s / base.step_time_s):
            line += f", step time x{slower:.2f}"
            if drift := drift_of(row, other=base):
                line += f", but {drift}"
        say(line)


# Pages.


def write_sweep_site(results: Results, files: Sequence[Path], title: str, folder: Path) -> Path:
    """The sweep as pages that need no server: a front page with pictures and the table, and a page
    a setting with its runs and the command of each. Returns the index. Pictures are copied."""
    cells = cells_of(results)
    links = [
        # A number in front: two settings may be alike once marks are taken out.
        f"{number}-{re.sub(r'[^A-Za-z0-9]+', '-', setting).strip('-')[:60]}"
        for number, setting in enumerate(cells.setting)
    ]
    settings = Table(
        title="Settings, best first", cells=cells, links=[f"{link}.html" for link in links]
    )
    shown = [Picture(file=p, text=p.stem.replace("_", " ")) for p in files if p.suffix == ".png"]
    pages = [
        _setting_page(link, results, runs=results.of_row[number])
        for link, number in zip(links, results.rows.index, strict=True)
    ]
    return write_site(
        Page(
            name="index",
            title=title,
            pictures=shown,
            tables=[settings],
            notes=[*remarks_of(results)],
        ),
        studies=pages,
        folder=folder,
    )


def _setting_page(name: str, results: Results, runs: Sequence[PointResult]) -> Page:
    settings = runs[0].settings
    entry = read_points(runs[0].run_dir.parent)
    differing = [key for key in varying([r.settings for r in results.runs]) if key != "seed"]
    # A setting that only others have is none of this row's.
    own = [key for key in differing if settings.get(key) is not None]  # others have the rest
    what = pd.DataFrame({"setting": own, "value": [str(settings[key]) for key in own]})
    points = results.points.loc[[results.runs.index(run) for run in runs]]
    points = points.dropna(axis="columns", how="all")
    points = points.drop(columns=[*differing, "sweep", "label", "identity"], errors="ignore")
    first = [column for column in _FIRST_OF_A_RUN if column in points]
    # Those first that a reader looks for, then the figures in their order.
    points = points[[*first, *points.columns.difference(first, sort=False)]]
    made = entry.get(runs[0].run_dir.name)  # sweep.json may not know it
    command = shlex.join(["python", "run.py", *made["overrides"]]) if made else ""
    tables = [Table(title="What differs", cells=what)] * bool(own) + [
        Table(title="Runs", cells=points)
    ]
    return Page(
        name,
        title=runs[0].label,
        facts=(),
        command=command,
        pictures=(),
        tables=tables,
        up="All settings",
    )


def columns_of(settings: Sequence[PointSettings]) -> list[str]:
    """Settings that differ, for MLflow's table. One that only some points have is shown only if it
    is a number that varies (a compressor's rate); the label covers the rest."""
    shown = []
    for key in varying(settings):
        values = [s[key] for s in settings if s.get(key) is not None]
        # A text that only some have would leave most of a column empty.
        is_swept = all(map(is_number, values)) and len(set(map(str, values))) > 1
        if is_swept or len(values) == len(settings):
            shown.append(key)
    shown.sort(key=lambda key: key == "seed")  # after what a reader compares
    return ["label", *shown[:MAX_PARAMS]]


def page_in_mlflow(
    sweep: str,
    tracker: Tracker,
    settings: Sequence[PointSettings],
    score: str = "bleu",
    files: Sequence[Path] = (),
) -> list[str]:
    """Write a sweep's page in MLflow, which never fails the sweep; returns lines with its links.
    files: the tables and pictures to log as artifacts."""
    if tracker.store is None:
        return []
    try:
        prepare_environment()
        metrics = (score, *COSTS)
        params = columns_of(settings)
        return list(tracker.store.show_sweep(sweep, metrics, params, files=files))
    # The sweep has its results; a tracker that fails is only a remark.
    except Exception as error:  # MLflow may be down or refuse; the sweep continues.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return [f"MLflow: no page could be prepared: {reason}"]
