"""Quality over a setting that a sweep varied: a line for each combination of the other varied
settings, beside the rows without the setting (e.g. the unsplit model). As a table, CSV and
quality_over_setting.png, where these rows are bands.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from xcloud.base.units import LESS_IS_BETTER, score_name, shown_scores
from xcloud.report.figures import DASHES, LINES, MARKERS, canvas, column, plain, save
from xcloud.report.tables import Column, console_of, print_table
from xcloud.sweep.points import deciding, is_number, varying
from xcloud.sweep.results import Row
from xcloud.sweep.table import WIDTH_OF_A_SWEEP, spread_text

if TYPE_CHECKING:
    from rich.console import Console

SWEPT_FILE = "quality_over_setting.csv"
SWEPT_PICTURE = "quality_over_setting.png"

BANDS = ("#B9B9B9", "#C9B8D8", "#B5D3C2", "#E0C9A6")  # for the best rows; the table has all
LEGEND_WIDTH = 115  # characters per row
MANY_TIMES = 50  # largest / smallest value from which the axis is logarithmic
_APART, _AT_MOST = 0.04, 0.2  # of the distance between values, so that whiskers do not overlap


@dataclass(frozen=True)
class Line:
    """Rows that differ only in the setting, by its value. label: what they have in common."""

    label: str
    rows: dict[float, Row]


@dataclass(frozen=True)
class Swept:
    """setting: its dotted name. scores: those to show, the task's main score first. beside: the
    rows without the setting, best first."""

    setting: str
    scores: list[str]
    lines: list[Line]
    beside: list[Row]

    @property
    def name(self) -> str:
        return _short(self.setting)

    @property
    def values(self) -> list[float]:
        return sorted({value for line in self.lines for value in line.rows})

    @property
    def num_seeds(self) -> str:
        """3, or 1 to 3 where some runs are missing."""
        rows = [row for line in self.lines for row in line.rows.values()] + self.beside
        counts = sorted({row.num_finished for row in rows})
        return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def swept_of(rows: Sequence[Row]) -> Swept | None:
    """Choose the numeric setting with the most values while everything else is equal; None if
    there is none."""
    scored = [row for row in rows if row.score]
    keys = [key for key in varying([row.settings for row in scored]) if key != "seed"]
    grouped = {key: _groups(scored, key, keys) for key in keys}
    most = {key: max(map(len, groups.values()), default=0) for key, groups in grouped.items()}
    setting = max(keys, key=lambda key: most[key], default=None)
    if setting is None or most[setting] < 2:
        return None
    groups = list(grouped[setting].values())
    shown = [row for group in groups for row in group.values()]
    others = [key for key in varying([row.settings for row in shown])
              if key not in ("seed", setting)]  # fmt: skip
    several = len({row.sweep for row in shown}) > 1
    lines = [Line(_label(next(iter(group.values())), setting, others, several), group)
             for group in groups]  # fmt: skip
    return Swept(
        setting,
        scores=shown_scores(name for row in shown for name in row.quality),
        lines=sorted(lines, key=lambda line: _natural(line.label)),
        beside=[row for row in scored if not any(row is other for other in shown)],
    )


def print_swept(swept: Swept, console: Console | None = None) -> None:
    """Print a table for each score: a row per value, a column per line."""
    console = console or console_of(WIDTH_OF_A_SWEEP)
    heads = [Column(name) for name in (swept.name, *(line.label for line in swept.lines))]
    for score in swept.scores:
        cells = [(value, *cells) for value, cells in table_of(swept, score)]
        print_table(console, heads, cells, f"{score_name(score)} by {swept.setting}")


def table_of(swept: Swept, score: str) -> list[tuple[str, list[str]]]:
    """(value, a cell per line), then the rows without the setting, repeated for every line."""
    cells = [
        (f"{value:g}", [_cell(score, line.rows.get(value)) for line in swept.lines])
        for value in swept.values
    ]
    return cells + [(row.label, [_cell(score, row)] * len(swept.lines)) for row in swept.beside]


def write_swept(folder: Path, swept: Swept) -> Path:
    """Write a CSV row for each score, value and line."""
    path = folder / SWEPT_FILE
    folder.mkdir(parents=True, exist_ok=True)
    rows = [(value, line.label, row) for line in swept.lines for value, row in line.rows.items()]
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["score", swept.setting, "line", "mean", "std", "error", "seeds"])
        for score in swept.scores:
            for value, label, row in [*rows, *(("", row.label, row) for row in swept.beside)]:
                if spread := row.quality.get(score):
                    both = ("" if x is None else round(x, 6) for x in (spread.std, spread.error))
                    mean = round(spread.mean, 6)
                    writer.writerow([score, value, label, mean, *both, spread.num])
    return path


def _groups(rows: Sequence[Row], key: str, keys: Sequence[str]) -> dict[object, dict[float, Row]]:
    """Rows with a numeric `key`, by all other varied settings, then by its value."""
    groups: dict[object, dict[float, Row]] = {}
    for row in rows:
        settings = deciding(row.settings)
        value = settings.get(key)
        if is_number(value):
            rest = tuple(repr(settings.get(other)) for other in keys if other != key)
            groups.setdefault((row.sweep, rest), {})[value] = row
    return groups


def _label(row: Row, setting: str, others: Sequence[str], several: bool) -> str:
    settings, parts = deciding(row.settings), []
    for key in others:
        head, value = key.split(".")[0], settings.get(key)
        if head in ("compression", "cluster") and head != setting.split(".")[0]:
            parts.append(row.compression if head == "compression" else row.cluster)
        elif value is not None:
            parts.append(f"{_short(key)}={value}")
    return " ".join(dict.fromkeys([*parts, *([f"@{row.sweep}"] if several else [])])) or "runs"


def _short(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def _natural(label: str) -> list[tuple[bool, float, str]]:
    """rank=8 before rank=16."""
    parts = re.split(r"(\d+\.?\d*)", label)
    return [(p[:1].isdigit(), float(p) if p[:1].isdigit() else 0.0, p) for p in parts]


def _cell(score: str, row: Row | None) -> str:
    return spread_text(score, row.quality.get(score) if row else None)


def write_swept_picture(folder: Path, swept: Swept, title: str) -> Path:
    figure = canvas(f"{title}: quality by {swept.name}", 8, 1.3 + 3.9 * len(swept.scores))
    panels = column(figure, [1] * len(swept.scores))
    for axes, score in zip(panels, swept.scores, strict=True):
        _draw(axes, swept, score)
    panels[-1].set_xlabel(swept.setting)
    handles = [Line2D([], [], label=line.label, **_style(index))
               for index, line in enumerate(swept.lines)]  # fmt: skip
    for row, colour in zip(swept.beside, BANDS, strict=False):
        label = f"{row.label}: {spread_text(swept.scores[0], row.score)}"
        handles.append(Line2D([], [], color=colour, linewidth=5, label=label))
    longest = max(len(str(handle.get_label())) for handle in handles)
    figure.legend(
        handles=handles, loc="outside lower center", fontsize=8.5, frameon=False,
        ncols=max(1, min(4, len(handles), LEGEND_WIDTH // (longest + 8))),
    )  # fmt: skip
    return save(figure, folder / SWEPT_PICTURE)


def _draw(axes: Axes, swept: Swept, score: str) -> None:
    for row, colour in zip(swept.beside, BANDS, strict=False):
        if spread := row.quality.get(score):
            low, high = (spread.mean + sign * (spread.plus_minus or 0) for sign in (-1, 1))
            axes.axhspan(low, high, color=colour, alpha=0.4, linewidth=0, zorder=0)
            axes.axhline(spread.mean, color=colour, linewidth=1.4, zorder=1)
    values = swept.values
    if values[0] > 0 and values[-1] >= MANY_TIMES * values[0]:
        axes.set_xscale("log")
        apart = 0.0
    else:
        gap = min(high - low for low, high in pairwise(values))
        apart = gap * min(_APART, _AT_MOST / len(swept.lines))
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set_xticks([], minor=True)
    for index, line in enumerate(swept.lines):
        shift = apart * (index - (len(swept.lines) - 1) / 2)
        points = [(value + shift, spread) for value, row in sorted(line.rows.items())
                  if (spread := row.quality.get(score))]  # fmt: skip
        axes.errorbar(
            [x for x, _ in points],
            [spread.mean for _, spread in points],
            yerr=[spread.plus_minus or 0.0 for _, spread in points],
            elinewidth=0.9,
            capsize=2.5,
            markersize=5,
            linewidth=1.5,
            **_style(index),
        )
    of = ", less is better" if score in LESS_IS_BETTER else ", test set"
    seeds = "" if swept.num_seeds == "1" else f"\n(mean ± std over {swept.num_seeds} seeds)"
    if not seeds and any(spread.error is not None for _, spread in points):
        seeds = "\n(± standard error)"
    axes.set_ylabel(f"{score_name(score)}{of}{seeds}")
    plain(axes, "both")


def _style(index: int) -> dict[str, Any]:
    """A colour and marker for each line; another dash style once these are used up."""
    number = index % len(LINES)
    dash = DASHES[index // len(LINES) % len(DASHES)]
    return {"color": LINES[number], "marker": MARKERS[number], "linestyle": dash}
