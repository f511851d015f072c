"""A sweep as a table on the screen and as CSV: table.csv by setting, points.csv by run."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xcloud.base.units import (
    UNKNOWN,
    human_percent,
    human_seconds,
    score_name,
    score_text,
    shown_scores,
)
from xcloud.record.events import TIMES
from xcloud.record.tracking import final_metrics
from xcloud.report.tables import WIDTH_OF_A_FILE, Column, console_of, print_table
from xcloud.sweep.points import identity, varying
from xcloud.sweep.results import Published, Result, Row, Spread, published_for

if TYPE_CHECKING:
    from rich.console import Console

TABLE_FILE, POINTS_FILE = "table.csv", "points.csv"
PAPER = "paper: "  # prefix of headings of published figures
WIDTH_OF_A_SWEEP = 200  # in a file: a wrapped label cannot be searched for


def print_sweep(rows: Sequence[Row], console: Console | None = None) -> None:
    console = console or console_of(WIDTH_OF_A_SWEEP)
    # A column without a figure is left out.
    columns = [(heading, cells) for heading, cells in _columns(rows) if any(cells)]
    heads = [
        Column(heading, right=i > 0, wraps=i == 0, dim=heading.startswith(PAPER))
        for i, (heading, _) in enumerate(columns)
    ]
    console.print()
    print_table(console, heads, zip(*(cells for _, cells in columns), strict=True))
    width = min(console.width, WIDTH_OF_A_FILE)
    for line in _remarks(rows):
        console.print(line, style="dim", width=width, markup=False, highlight=False)


def _columns(rows: Sequence[Row]) -> Iterator[tuple[str, list[str]]]:
    """Headings with a cell for each row."""
    published = [published_for(row) or Published() for row in rows]
    yield "setting", [row.label for row in rows]
    if len({row.sweep for row in rows}) > 1:
        yield "sweep", [row.sweep for row in rows]
    yield "runs", [_runs(row) for row in rows]
    for index, name in enumerate(shown_scores(name for row in rows for name in row.quality)):
        yield score_name(name), [spread_text(name, row.quality.get(name)) for row in rows]
        if index == 0:
            yield f"{PAPER}{score_name(name)}", [known.quality for known in published]
    yield "step time", [_seconds(row.step_time_s) for row in rows]
    if any(row.step_ratio for row in rows):
        yield "step time ratio", [str(row.step_ratio or UNKNOWN) for row in rows]
    if _compares(rows):
        heading = "share" if _are_timed_together(rows) else "share, one after another"
        yield heading, [_share(row) for row in rows]
    yield f"{PAPER}share", [_percent(known.share) for known in published]
    if any(row.share_of_one_cloud for row in rows):
        name, heading = _rate(rows)
        yield heading, [_rate_text(row.rates.get(name)) for row in rows]
        alone = [row.share_of_one_cloud.get(name) for row in rows]
        yield "of one cloud", [human_percent(share, 1) for share in alone]
        yield f"{PAPER}of one cloud", [_percent(known.of_one_cloud) for known in published]
    ratios = [row.compression_ratio for row in rows]
    yield "ratio", [f"{ratio.mean:.2f}x" if ratio else UNKNOWN for ratio in ratios]
    yield f"{PAPER}ratio", [f"{known.ratio:g}x" if known.ratio else "" for known in published]


def _percent(share: float | None) -> str:
    """Of a published figure, empty where there is none."""
    return "" if share is None else human_percent(share)


def _compares(rows: Sequence[Row]) -> bool:
    """Whether a share compares a row with another row."""
    return any(row.share is not None and row.share != 1.0 for row in rows)


def _are_timed_together(rows: Sequence[Row]) -> bool:
    """Whether noise of the machine was the same for all shares."""
    return all(row.step_ratio for row in rows if row.share is not None)


def _rate(rows: Sequence[Row]) -> tuple[str, str]:
    """Tokens per second if every row has them, else samples."""
    compared = [row for row in rows if row.share_of_one_cloud]
    tokens = all("tokens_per_s" in row.share_of_one_cloud for row in compared)
    return ("tokens_per_s", "tokens/s") if tokens else ("samples_per_s", "samples/s")


def write_csv(folder: Path, rows: Sequence[Row], results: Sequence[Result]) -> list[Path]:
    """Write table.csv, a row per setting, and points.csv, a row per run, failed ones included."""
    table = [dict(_flat_row(row)) for row in rows]
    keys = varying([result.settings for result in results])
    points = [
        {
            "sweep": result.sweep,
            "label": result.label,
            "seed": result.settings.get("seed"),
            "status": result.status,
            "commit": result.summary.get("commit"),
            "identity": identity(result.settings),
            **{key: result.settings.get(key) for key in keys if key != "seed"},
            **final_metrics(result.summary),
            "cause": result.summary.get("cause"),
            "folder": str(result.run_dir),
        }
        for result in results
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in ((TABLE_FILE, table), (POINTS_FILE, points)):
        columns = list(dict.fromkeys(key for line in lines for key in line))
        with open(folder / name, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="")
            writer.writeheader()
            writer.writerows(lines)
    return [folder / TABLE_FILE, folder / POINTS_FILE]


def _flat_row(row: Row) -> Iterator[tuple[str, object]]:
    def spread(name: str, value: Spread | None, digits: int) -> Iterator[tuple[str, object]]:
        yield name, round(value.mean, digits) if value else None
        yield f"{name}_std", rounded(value.std if value else None, digits)
        if value and value.error is not None:
            yield f"{name}_error", round(value.error, digits)

    def rounded(value: float | None, digits: int = 4) -> float | None:
        return None if value is None else round(value, digits)

    yield "sweep", row.sweep
    yield "setting", row.label
    yield "compression", row.compression
    yield "runs", len(row.results)
    yield "finished", row.num_finished
    spreads = {**row.quality, "step_time_s": row.step_time_s,
               "compression_ratio": row.compression_ratio}  # fmt: skip
    for name, value in spreads.items():
        yield from spread(name, value, 6)
    yield "share_of_uncompressed_step_time", rounded(row.share)
    yield "share_std", rounded(row.share_std)
    if (ratio := row.step_ratio) is not None:
        figures = {"": ratio.ratio, "_low": ratio.low, "_high": ratio.high}
        yield from ((f"step_time_ratio{end}", round(figure, 4)) for end, figure in figures.items())
        yield "step_time_ratio_to", ratio.to
    for name, rate in row.rates.items():
        yield from spread(name, rate, 3)
        yield f"{name}_share_of_one_cloud", rounded(row.share_of_one_cloud.get(name))
    for kind in TIMES:
        for cloud, seconds in row.parts_s(kind).items():
            yield f"{kind}_{cloud}", round(seconds, 6)
    known = published_for(row) or Published()
    yield "paper_quality", known.quality or None
    yield "paper_share", known.share
    yield "paper_ratio", known.ratio
    yield "paper_share_of_one_cloud", known.of_one_cloud


def _remarks(rows: Sequence[Row]) -> Iterator[str]:
    results = [result for row in rows for result in row.results]
    if any(row.num_finished > 1 for row in rows):
        yield "± is the standard deviation over seeds."
    if any(row.score and row.score.std is None and row.score.error is not None for row in rows):
        yield "± of a score of a single run is its standard error over the test samples."
    if _compares(rows):
        yield "share: of the step time of the uncompressed runs of the same sweep."
        if not _are_timed_together(rows):
            yield (
                "Points that are timed one after another differ by the noise of the machine too: "
                "hydra.launcher.timing=together times them in turns."
            )
    for name in dict.fromkeys(row.step_ratio.to for row in rows if row.step_ratio):
        yield f"step time ratio: to {name}, in turns; in brackets the 95 % interval."
    if any(row.share_of_one_cloud for row in rows):
        yield "of one cloud: throughput / that of the same work with cluster=one_cloud."
        counts = {row.cluster: row.num_ranks for row in rows if row.share_of_one_cloud}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{cluster} has {count}" for cluster, count in counts.items())
            yield f"Numbers of ranks differ, so the share is not due to the link alone: {listed}."
    if (crowd := max((result.at_once for result in results), default=1)) > 1:
        yield f"{crowd} points ran at once and slowed each other down: do not compare step times."
    if len(commits := {str(r.summary["commit"]) for r in results if "commit" in r.summary}) > 1:
        yield f"These runs are of different code: {', '.join(sorted(commits))}."
    published = [known for row in rows if (known := published_for(row))]
    yield from dict.fromkeys(note for known in published for note in known.notes)


def _runs(row: Row) -> str:
    missing = row.num_finished < len(row.results)
    return f"{row.num_finished} of {len(row.results)}" if missing else str(row.num_finished)


def spread_text(name: str, spread: Spread | None) -> str:
    """A score as 41.92 ± 0.31."""
    if spread is None:
        return UNKNOWN
    return _plus_minus(spread, lambda value: score_text(name, value))


def _rate_text(rate: Spread | None) -> str:
    return UNKNOWN if rate is None else _plus_minus(rate, lambda value: f"{value:,.0f}")


def _plus_minus(spread: Spread, text: Callable[[float], str]) -> str:
    mean = text(spread.mean)
    return mean if spread.plus_minus is None else f"{mean} ± {text(spread.plus_minus)}"


def _seconds(spread: Spread | None) -> str:
    if spread is None:
        return UNKNOWN
    text = human_seconds(spread.mean)
    if spread.std is None:
        return text
    number, unit = text.split()
    digits = len(number.partition(".")[2])
    return f"{number} ± {spread.std * (1000 if unit == 'ms' else 1):.{digits}f} {unit}"


def _share(row: Row) -> str:
    text = human_percent(row.share)
    return text if row.share_std is None else f"{text[:-2]} ± {human_percent(row.share_std)}"
