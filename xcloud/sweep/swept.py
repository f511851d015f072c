"""Quality over a setting that a sweep varied: a line for each combination of the other varied
settings, beside the rows without the setting (e.g. the unsplit model). As a table, CSV and
quality_over_setting.png, where these rows are bands.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from xcloud.base.units import LESS_IS_BETTER, score_name, shown_scores
from xcloud.report.figures import DASHES, LINES, MARKERS, canvas, column, plain, save
from xcloud.report.tables import Column, console_of, print_table
from xcloud.sweep.points import deciding, is_number, varying
from xcloud.sweep.results import Results, plus_minus
from xcloud.sweep.table import WIDTH_OF_A_SWEEP, known, spread_text

if TYPE_CHECKING:
    from rich.console import Console

SWEPT_FILE = "quality_over_setting.csv"
SWEPT_PICTURE = "quality_over_setting.png"

BANDS = ("#B9B9B9", "#C9B8D8", "#B5D3C2", "#E0C9A6")  # for the best rows; the table has all
LEGEND_WIDTH = 115  # characters per row
MANY_TIMES = 50  # largest / smallest value from which the axis is logarithmic
_APART, _AT_MOST = 0.04, 0.2  # of the distance between values, so that whiskers do not overlap


@dataclass(frozen=True)
class Swept:
    """setting: its dotted name. scores: those to show, the task's main score first. rows: those
    of the results, each with its `value` of the setting and its `line`, which says what else
    varies. beside: the rows without the setting, best first."""

    setting: str
    scores: list[str]
    rows: pd.DataFrame
    beside: pd.DataFrame

    @property
    def name(self) -> str:
        return _short(self.setting)

    @property
    def lines(self) -> list[str]:
        return list(self.rows.line.unique())

    @property
    def values(self) -> list[float]:
        return sorted(self.rows.value.unique())

    @property
    def num_seeds(self) -> str:
        """3, or 1 to 3 where some runs are missing."""
        counts = pd.concat([self.rows, self.beside]).finished
        few, many = counts.min(), counts.max()
        return str(few) if few == many else f"{few} to {many}"


def swept_of(results: Results) -> Swept | None:
    """Choose the numeric setting with the most values while everything else is equal; None if
    there is none."""
    scored = results.rows[results.rows.score.notna()]
    keys = [key for key in varying(list(scored.settings)) if key != "seed"]
    lines = [[deciding(settings).get(key) for key in keys] for settings in scored.settings]
    values = pd.DataFrame(lines, scored.index, keys, dtype=object)
    words = values.map(repr).assign(sweep=scored.sweep)
    # For each setting, of the rows that have it as a number: those that differ in it alone.
    groups = {
        key: [list(group.index) for _, group in words[values[key].map(is_number)].groupby(
            [name for name in words if name != key], sort=False)]
        for key in keys
    }  # fmt: skip
    setting = max(keys, key=lambda key: max(map(len, groups[key]), default=0), default="")
    if not setting or max(map(len, groups[setting]), default=0) < 2:
        return None
    shown = scored.loc[[number for group in groups[setting] for number in group]]
    others = [key for key in varying(list(shown.settings)) if key not in ("seed", setting)]
    shown = shown.assign(
        value=values.loc[shown.index, setting].astype(float),
        line=[_label(row, setting, others, shown.sweep.nunique() > 1) for _, row in
              shown.iterrows()],
    )  # fmt: skip
    shown = shown.sort_values("line", key=lambda labels: labels.map(_natural), kind="stable")
    names = shown_scores(name for name in results.scores if shown[name].notna().any())
    return Swept(setting, names, shown, scored.drop(shown.index))


def print_swept(swept: Swept, console: Console | None = None) -> None:
    """Print a table for each score: a row per value, a column per line."""
    console = console or console_of(WIDTH_OF_A_SWEEP)
    heads = [Column(name) for name in (swept.name, *swept.lines)]
    for score in swept.scores:
        cells = [(value, *cells) for value, cells in table_of(swept, score)]
        print_table(console, heads, cells, f"{score_name(score)} by {swept.setting}")


def table_of(swept: Swept, score: str) -> list[tuple[str, list[str]]]:
    """(value, a cell per line), then the rows without the setting, repeated for every line."""
    texts = swept.rows.assign(text=swept.rows.apply(spread_text, axis=1, name=score))
    wide = texts.pivot(index="value", columns="line", values="text")[swept.lines].fillna("-")
    beside = [(row.setting, [spread_text(row, score)] * len(swept.lines))
              for _, row in swept.beside.iterrows()]  # fmt: skip
    return [(f"{value:g}", list(cells)) for value, cells in wide.iterrows()] + beside


def write_swept(folder: Path, swept: Swept) -> Path:
    """Write a CSV row for each score, value and line."""
    rows = pd.concat([swept.rows, swept.beside.assign(line=swept.beside.setting)])
    parts = [
        rows.assign(score=score, **{
            name: rows.get(f"{score}{end}")
            for name, end in (("mean", ""), ("std", "_std"), ("error", "_error"))
        })
        for score in swept.scores
    ]  # fmt: skip
    table = pd.concat(parts).dropna(subset="mean").round(6)
    table = table.rename(columns={"value": swept.setting, "finished": "seeds"})
    folder.mkdir(parents=True, exist_ok=True)
    columns = ["score", swept.setting, "line", "mean", "std", "error", "seeds"]
    table.to_csv(folder / SWEPT_FILE, columns=columns, index=False, float_format="{:g}".format)
    return folder / SWEPT_FILE


def _label(row: Any, setting: str, others: Sequence[str], several: bool) -> str:
    settings, parts = deciding(row.settings), []
    for key in others:
        head, value = key.split(".")[0], settings.get(key)
        if head in ("compression", "cluster") and head != setting.split(".")[0]:
            parts.append(row[head])
        elif value is not None:
            parts.append(f"{_short(key)}={value}")
    return " ".join(dict.fromkeys([*parts, *([f"@{row.sweep}"] if several else [])])) or "runs"


def _short(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def _natural(label: str) -> str:
    """rank=8 before rank=16."""
    return re.sub(r"\d+\.?\d*", lambda number: f"{float(number[0]):020.6f}", label)


def write_swept_picture(folder: Path, swept: Swept, title: str) -> Path:
    figure = canvas(f"{title}: quality by {swept.name}", 8, 1.3 + 3.9 * len(swept.scores))
    panels = column(figure, [1] * len(swept.scores))
    for axes, score in zip(panels, swept.scores, strict=True):
        _draw(axes, swept, score)
    panels[-1].set_xlabel(swept.setting)
    handles = [Line2D([], [], label=line, **_style(index))
               for index, line in enumerate(swept.lines)]  # fmt: skip
    for (_, row), colour in zip(swept.beside.iterrows(), BANDS, strict=False):
        label = f"{row.setting}: {spread_text(row, swept.scores[0])}"
        handles.append(Line2D([], [], color=colour, linewidth=5, label=label))
    longest = max(len(str(handle.get_label())) for handle in handles)
    figure.legend(
        handles=handles, loc="outside lower center", fontsize=8.5, frameon=False,
        ncols=max(1, min(4, len(handles), LEGEND_WIDTH // (longest + 8))),
    )  # fmt: skip
    return save(figure, folder / SWEPT_PICTURE)


def _draw(axes: Axes, swept: Swept, score: str) -> None:
    for (_, row), colour in zip(swept.beside.iterrows(), BANDS, strict=False):
        if (mean := known(row, score)) is not None:
            end = plus_minus(swept.beside, score).fillna(0.0)[row.name]
            axes.axhspan(mean - end, mean + end, color=colour, alpha=0.4, linewidth=0, zorder=0)
            axes.axhline(mean, color=colour, linewidth=1.4, zorder=1)
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
        rows = swept.rows[swept.rows.line == line].dropna(subset=score).sort_values("value")
        axes.errorbar(
            rows.value + shift, rows[score], yerr=plus_minus(rows, score).fillna(0.0),
            elinewidth=0.9, capsize=2.5, markersize=5, linewidth=1.5, **_style(index),
        )  # fmt: skip
    of = ", less is better" if score in LESS_IS_BETTER else ", test set"
    seeds = "" if swept.num_seeds == "1" else f"\n(mean ± std over {swept.num_seeds} seeds)"
    if not seeds and plus_minus(swept.rows, score).notna().any():
        seeds = "\n(± standard error)"
    axes.set_ylabel(f"{score_name(score)}{of}{seeds}")
    plain(axes, "both")


def _style(index: int) -> dict[str, Any]:
    """A colour and marker for each line; another dash style once these are used up."""
    number = index % len(LINES)
    dash = DASHES[index // len(LINES) % len(DASHES)]
    return {"color": LINES[number], "marker": MARKERS[number], "linestyle": dash}
