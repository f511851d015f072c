"""A sweep as a table on the screen and as CSV: table.csv by setting, points.csv by run."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xcloud.report_table import (
    SCORE_NAMES,
    UNKNOWN,
    WIDTH_WITHOUT_TERMINAL,
    human_seconds,
)
from xcloud.sweep.points import identity, varying
from xcloud.sweep.published import DIFFERENCE_NOTE, NOTE, published_for
from xcloud.sweep.results import Result, Row, Spread
from xcloud.tracked_values import final_metrics

if TYPE_CHECKING:
    from rich.console import Console

TABLE_FILE, POINTS_FILE = "table.csv", "points.csv"


def print_table(rows: Sequence[Row], console: Console | None = None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if console is None:
        width = None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
        console = Console(width=width)
    several = len({row.sweep for row in rows}) > 1
    published = [published_for(row) for row in rows]
    shares = any(row.share is not None for row in rows)
    scores = list(dict.fromkeys(name for row in rows for name in row.quality))[:1]

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("setting", overflow="fold")
    if several:
        table.add_column("sweep", overflow="fold")
    table.add_column("runs", justify="right")
    for name in scores:
        table.add_column(SCORE_NAMES.get(name, name), justify="right", no_wrap=True)
    if any(published):
        table.add_column("paper", justify="right", style="dim")
    table.add_column("step time", justify="right", no_wrap=True)
    if shares:
        table.add_column("share", justify="right")
    if any(entry and entry.share for entry in published):
        table.add_column("paper", justify="right", style="dim")
    table.add_column("ratio", justify="right", no_wrap=True)
    for row, known in zip(rows, published, strict=True):
        cells: list[str] = [row.label]
        cells += [row.sweep] if several else []
        cells.append(_runs(row))
        cells += [_score(name, row.quality.get(name)) for name in scores]
        cells += [known.quality if known else ""] if any(published) else []
        cells.append(_seconds(row.step_time_s))
        cells += [_percent(row.share)] if shares else []
        if any(entry and entry.share for entry in published):
            cells.append(_percent(known.share) if known and known.share else "")
        cells.append(f"{row.compression_ratio.mean:.2f}x" if row.compression_ratio else UNKNOWN)
        table.add_row(*(Text(cell) for cell in cells))
    console.print()
    console.print(table)
    for line in _remarks(rows):
        console.print(Text(line, style="dim"))


def write_csv(folder: Path, rows: Sequence[Row], results: Sequence[Result]) -> list[Path]:
    """table.csv: a line for each setting; points.csv: a line for each run, failed ones too."""
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
    yield "sweep", row.sweep
    yield "setting", row.label
    yield "compression", row.compression
    yield "runs", len(row.results)
    yield "finished", row.num_finished
    spreads = {
        **row.quality,
        "step_time_s": row.step_time_s,
        "compression_ratio": row.compression_ratio,
    }
    for name, spread in spreads.items():
        yield name, round(spread.mean, 6) if spread else None
        yield f"{name}_std", round(spread.std, 6) if spread and spread.std is not None else None
    yield "share_of_uncompressed_step_time", round(row.share, 4) if row.share else None
    for kind in ("compute_s", "codec_s", "waiting_s", "sync_s"):
        for cloud, value in row.parts_s(kind).items():
            yield f"{kind}_{cloud}", round(value, 6)
    known = published_for(row)
    yield "paper_quality", known.quality if known else None
    yield "paper_share", known.share if known else None


def _remarks(rows: Sequence[Row]) -> Iterator[str]:
    results = [result for row in rows for result in row.results]
    if any(row.num_finished > 1 for row in rows):
        yield "± is the standard deviation over seeds."
    if any(row.share is not None for row in rows):
        yield "share: of the step time of the uncompressed runs of the same sweep."
    if (crowd := max((result.at_once for result in results), default=1)) > 1:
        yield f"{crowd} points ran at once: their step times hold that, compare none of them."
    if len(commits := {str(r.summary["commit"]) for r in results if "commit" in r.summary}) > 1:
        yield f"Runs of different code are side by side: {', '.join(sorted(commits))}."
    published = [known for row in rows if (known := published_for(row))]
    if published:
        yield NOTE
    if any(known.quality.startswith("−") for known in published):
        yield DIFFERENCE_NOTE


def _runs(row: Row) -> str:
    missing = row.num_finished < len(row.results)
    return f"{row.num_finished} of {len(row.results)}" if missing else str(row.num_finished)


def score_text(name: str, value: float) -> str:
    """41.92 for what goes to 100, 0.9223 for a share."""
    return f"{value:.{2 if name in SCORE_NAMES else 4}f}"


def _score(name: str, spread: Spread | None) -> str:
    if spread is None:
        return UNKNOWN
    text = score_text(name, spread.mean)
    return text if spread.std is None else f"{text} ± {score_text(name, spread.std)}"


def _seconds(spread: Spread | None) -> str:
    if spread is None:
        return UNKNOWN
    text = human_seconds(spread.mean)
    if spread.std is None:
        return text
    number, unit = text.split()
    digits = len(number.partition(".")[2])
    return f"{number} ± {spread.std * (1000 if unit == 'ms' else 1):.{digits}f} {unit}"


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.0f} %"
