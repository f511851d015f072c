"""A sweep as tables, on the screen and as CSV: table.csv by setting, points.csv by run, and
quality_over_setting.csv where a number varies by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from xcloud.base.units import (
    UNKNOWN,
    human_percent,
    human_seconds,
    score_name,
    score_text,
    shown_scores,
)
from xcloud.report.tables import WIDTH_OF_A_FILE, Column, console_of, print_table
from xcloud.sweep.results import Results, Swept, plus_minus

if TYPE_CHECKING:
    from rich.console import Console

TABLE_FILE, POINTS_FILE, SWEPT_FILE = "table.csv", "points.csv", "quality_over_setting.csv"
PAPER = "paper: "  # prefix of headings of published figures
WIDTH_OF_A_SWEEP = 200  # in a file: a wrapped label cannot be searched for
_NUM_RANKS = re.compile(r"cluster\.clouds\.[^.]+\.num_ranks")
_BESIDE = ["settings", "published", "reference", "workload", "score", "cluster"]
_PUBLISHED = ("quality", "share", "ratio", "of_one_cloud")


def print_sweep(results: Results, console: Console | None = None) -> None:
    console = console or console_of(WIDTH_OF_A_SWEEP)
    cells = cells_of(results)
    heads = [
        Column(heading, right=i > 0, wraps=i == 0, dim=heading.startswith(PAPER))
        for i, heading in enumerate(cells)
    ]
    console.print()
    print_table(console, heads, cells.itertuples(index=False))
    width = min(console.width, WIDTH_OF_A_FILE)
    for line in remarks_of(results):
        console.print(line, style="dim", width=width, markup=False, highlight=False)


def cells_of(results: Results) -> pd.DataFrame:
    """Texts: a column for each figure that any setting has, a line for each setting."""
    cells = pd.DataFrame(dict(_columns(results)), index=results.rows.index)
    return cells.loc[:, [any(cells[heading]) for heading in cells]]


def _columns(results: Results) -> Iterator[tuple[str, list[str]]]:
    """Headings with a cell for each row."""
    rows = [row for _, row in results.rows.iterrows()]

    def paper(name: str) -> list[str]:
        return [row.published.get(name, "") for row in rows]

    yield "setting", [row.setting for row in rows]
    if len(results.sweeps) > 1:
        yield "sweep", [row.sweep for row in rows]
    counts = [f"{row.finished} of " * (row.finished != row.runs) + str(row.runs) for row in rows]
    yield "runs", counts
    for index, name in enumerate(shown_scores(results.scores)):
        yield score_name(name), [spread_text(row, name) for row in rows]
        if index == 0:
            yield f"{PAPER}{score_name(name)}", paper("quality")
    yield "step time", [_spread(row, "step_time_s", human_seconds) for row in rows]
    if _compares(results):
        yield "share", [_spread(row, "share", human_percent) for row in rows]
    yield f"{PAPER}share", paper("share")
    if rate := _rate(results):
        heading = rate.replace("_per_s", "/s")
        yield heading, [_spread(row, rate, "{:,.0f}".format) for row in rows]
        alone = [known(row, f"{rate}_share_of_one_cloud") for row in rows]
        yield "of one cloud", [human_percent(share, 1) for share in alone]
        yield f"{PAPER}of one cloud", paper("of_one_cloud")
    ratios = [known(row, "compression_ratio") for row in rows]
    yield "ratio", [UNKNOWN if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
    yield f"{PAPER}ratio", paper("ratio")


def known(row: Any, name: str) -> float | None:
    """A figure of a row; None where there is none."""
    value = row.get(name)
    return None if value is None or pd.isna(value) else float(value)


def spread_text(row: Any, name: str) -> str:
    """A score as 41.92 ± 0.31."""
    return _spread(row, name, lambda value: score_text(name, value))


def _spread(row: Any, name: str, text: Callable[[float], str]) -> str:
    """Mean ± standard deviation, of a single run's score its error; the unit once: 450 ± 71 ms."""
    mean, std = known(row, name), known(row, f"{name}_std")
    std = known(row, f"{name}_error") if std is None else std
    if mean is None:
        return UNKNOWN
    if std is None:
        return text(mean)
    number, _, unit = text(mean).partition(" ")
    if unit in ("ms", "s"):
        digits = len(number.partition(".")[2])
        return f"{number} ± {std * (1000 if unit == 'ms' else 1):.{digits}f} {unit}"
    return f"{number} ± {text(std)}"


def _compares(results: Results) -> bool:
    """Whether a share compares a row with another row."""
    return bool((results.rows.share.dropna() != 1.0).any())


def _rate(results: Results) -> str:
    """Of those that compare with one cloud: tokens per second if every row has them, else
    samples; empty without any."""
    shares = {name: results.rows.get(f"{name}_share_of_one_cloud", pd.Series(dtype=float)).count()
              for name in ("tokens_per_s", "samples_per_s")}  # fmt: skip
    return max(shares, key=lambda name: shares[name]) if any(shares.values()) else ""


def remarks_of(results: Results) -> Iterator[str]:
    rows = results.rows
    if (rows.finished > 1).any():
        yield "± is the standard deviation over seeds."
    if any(plus_minus(rows[rows[f"{s}_std"].isna()], s).notna().any() for s in results.scores):
        yield "± of a score of a single run is its standard error over the test samples."
    if _compares(results):
        yield "share: of the step time of the uncompressed runs of the same sweep."
        yield (
            "Points run one after another, so their step times differ by the noise of the machine "
            "too: python -m benchmarks.in_turns times them in turns."
        )
    if rate := _rate(results):
        yield "of one cloud: throughput / that of the same work with cluster=one_cloud."
        compared = rows[rows[f"{rate}_share_of_one_cloud"].notna()]
        counts = dict(zip(compared.cluster, map(_num_ranks, compared.settings), strict=True))
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{cluster} has {count}" for cluster, count in counts.items())
            yield f"Numbers of ranks differ, so the share is not due to the link alone: {listed}."
    if (crowd := max((run.at_once for run in results.runs), default=1)) > 1:
        yield f"{crowd} points ran at once and slowed each other down: do not compare step times."
    if len(commits := {str(commit) for commit in results.points.commit.dropna()}) > 1:
        yield f"These runs are of different code: {', '.join(sorted(commits))}."
    yield from dict.fromkeys(note for known in rows.published for note in known["notes"])


def _num_ranks(settings: dict[str, object]) -> int:
    counts = (value for key, value in settings.items() if _NUM_RANKS.fullmatch(key))
    return sum(count for count in counts if isinstance(count, int))


def write_csv(folder: Path, results: Results) -> list[Path]:
    """Write table.csv, a row per setting, and points.csv, a row per run, failed ones included."""
    table = results.rows.drop(columns=_BESIDE).round(6)
    table = table.rename(columns={"share": "share_of_uncompressed_step_time"})
    for name in _PUBLISHED:
        table[f"paper_{name}"] = [known.get(name) for known in results.rows.published]
    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / TABLE_FILE, index=False)
    results.points.to_csv(folder / POINTS_FILE, index=False)
    return [folder / TABLE_FILE, folder / POINTS_FILE]


def print_swept(swept: Swept, console: Console | None = None) -> None:
    """Print a table for each score: a row per value, a column per line; then the rows without the
    setting, repeated for every line."""
    console = console or console_of(WIDTH_OF_A_SWEEP)
    for score in swept.scores:
        texts = swept.rows.assign(text=swept.rows.apply(spread_text, axis=1, name=score))
        wide = texts.pivot(index="value", columns="line", values="text")[swept.lines].fillna("-")
        cells = [(f"{value:g}", *row) for value, row in wide.iterrows()]
        cells += [(row.setting, *[spread_text(row, score)] * len(swept.lines))
                  for _, row in swept.beside.iterrows()]  # fmt: skip
        title = f"{score_name(score)} by {swept.setting}"
        print_table(console, [swept.name, *swept.lines], cells, title)


def write_swept(folder: Path, swept: Swept) -> Path:
    """Write a CSV row for each score, value and line."""
    rows = pd.concat([swept.rows, swept.beside.assign(line=swept.beside.setting)])
    parts = [
        rows.assign(score=score, mean=rows[score], std=rows[f"{score}_std"],
                    error=rows.get(f"{score}_error"))
        for score in swept.scores
    ]  # fmt: skip
    table = pd.concat(parts).dropna(subset="mean").round(6)
    table = table.rename(columns={"value": swept.setting, "finished": "seeds"})
    folder.mkdir(parents=True, exist_ok=True)
    columns = ["score", swept.setting, "line", "mean", "std", "error", "seeds"]
    table.to_csv(folder / SWEPT_FILE, columns=columns, index=False, float_format="{:g}".format)
    return folder / SWEPT_FILE
