"""quality_over_setting.png: the lines of swept.py; rows without the setting as bands."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from xcloud.record.scores import LESS_IS_BETTER, score_name
from xcloud.report.figures import LINES, canvas, column, plain, save
from xcloud.sweep.swept import Swept
from xcloud.sweep.table import spread_text

SWEPT_PICTURE = "quality_over_setting.png"

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = ("-", "--", ":", "-.")
BANDS = ("#B9B9B9", "#C9B8D8", "#B5D3C2", "#E0C9A6")  # for the best rows; the table has all
LEGEND_WIDTH = 115  # characters per row
MANY_TIMES = 50  # largest / smallest value from which the axis is logarithmic
_APART, _AT_MOST = 0.04, 0.2  # of the distance between values, so that whiskers do not overlap


def write_swept_picture(folder: Path, found: Swept, title: str) -> Path:
    figure = canvas(f"{title}: quality by {found.name}", 8, 1.3 + 3.9 * len(found.scores))
    panels = column(figure, [1] * len(found.scores))
    for axes, score in zip(panels, found.scores, strict=True):
        _draw(axes, found, score)
    panels[-1].set_xlabel(found.setting)
    handles = [Line2D([], [], label=line.label, **_style(index))
               for index, line in enumerate(found.lines)]  # fmt: skip
    for row, colour in zip(found.beside, BANDS, strict=False):
        label = f"{row.label}: {spread_text(found.scores[0], row.score)}"
        handles.append(Line2D([], [], color=colour, linewidth=5, label=label))
    longest = max(len(str(handle.get_label())) for handle in handles)
    figure.legend(
        handles=handles, loc="outside lower center", fontsize=8.5, frameon=False,
        ncols=max(1, min(4, len(handles), LEGEND_WIDTH // (longest + 8))),
    )  # fmt: skip
    return save(figure, folder / SWEPT_PICTURE)


def _draw(axes: Axes, found: Swept, score: str) -> None:
    for row, colour in zip(found.beside, BANDS, strict=False):
        if spread := row.quality.get(score):
            low, high = spread.mean - (spread.std or 0), spread.mean + (spread.std or 0)
            axes.axhspan(low, high, color=colour, alpha=0.4, linewidth=0, zorder=0)
            axes.axhline(spread.mean, color=colour, linewidth=1.4, zorder=1)
    values = found.values
    if values[0] > 0 and values[-1] >= MANY_TIMES * values[0]:
        axes.set_xscale("log")
        apart = 0.0
    else:
        gap = min(high - low for low, high in pairwise(values))
        apart = gap * min(_APART, _AT_MOST / len(found.lines))
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set_xticks([], minor=True)
    for index, line in enumerate(found.lines):
        shift = apart * (index - (len(found.lines) - 1) / 2)
        points = [(value + shift, spread) for value, row in sorted(line.rows.items())
                  if (spread := row.quality.get(score))]  # fmt: skip
        axes.errorbar(
            [x for x, _ in points],
            [spread.mean for _, spread in points],
            yerr=[spread.std or 0.0 for _, spread in points],
            elinewidth=0.9,
            capsize=2.5,
            markersize=5,
            linewidth=1.5,
            **_style(index),
        )
    of = ", less is better" if score in LESS_IS_BETTER else ", test set"
    seeds = "" if found.num_seeds == "1" else f"\n(mean ± std over {found.num_seeds} seeds)"
    axes.set_ylabel(f"{score_name(score)}{of}{seeds}")
    plain(axes, "both")


def _style(index: int) -> dict[str, Any]:
    """A colour and marker for each line; another dash style once these are used up."""
    number = index % len(LINES)
    dash = STYLES[index // len(LINES) % len(STYLES)]
    return {"color": LINES[number], "marker": MARKERS[number], "linestyle": dash}
