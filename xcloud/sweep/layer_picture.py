"""layers.png: quality over the layer of the cut, a line for each rank, unsplit as a band.
layers_and_ranks.png: the same as a table. Works nothing out: layers.py does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from xcloud.record.scores import LEAKS, score_name
from xcloud.report.picture_style import DPI, FAINT, INK
from xcloud.sweep.layers import Layers, Line, table_of, unsplit_name
from xcloud.sweep.table import spread_text

PICTURE, TABLE_PICTURE = "layers.png", "layers_and_ranks.png"

RANK_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#6B4C3B")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = ("-", "--", ":", "-.")
BANDS = ("#B9B9B9", "#C9B8D8", "#B5D3C2", "#E0C9A6")
_APART, _AT_MOST = 0.04, 0.2  # of the distance between layers: whiskers stand side by side
LEGEND_WIDTH = 115  # characters that fit side by side


def write_layer_pictures(folder: Path, found: Layers, title: str) -> list[Path]:
    """The lines need two layers; the table does not. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [_write_table(folder / TABLE_PICTURE, found, title)]
    if len(found.layers) > 1:
        written.insert(0, _write_lines(folder / PICTURE, found, title))
    return written


def _write_lines(path: Path, found: Layers, title: str) -> Path:
    height = 1.3 + 3.9 * len(found.scores)
    figure = Figure(figsize=(8, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}: quality by layer of the cut", fontsize=11)
    panels = figure.subplots(len(found.scores), 1, sharex=True, squeeze=False)[:, 0]
    for axes, score in zip(panels, found.scores, strict=True):
        _draw(axes, found, score)
    panels[-1].set_xlabel("layer of the cut (0 is the first block)")
    panels[-1].set_xticks(found.layers)
    handles = _handles(found)
    longest = max(len(str(handle.get_label())) for handle in handles)
    figure.legend(
        handles=handles, loc="outside lower center", fontsize=8.5, frameon=False,
        ncols=max(1, min(4, len(handles), LEGEND_WIDTH // (longest + 8))),
    )  # fmt: skip
    figure.savefig(path)
    return path


def _draw(axes: Axes, found: Layers, score: str) -> None:
    for row, colour in zip(found.unsplit, _repeated(BANDS, len(found.unsplit)), strict=True):
        if spread := row.quality.get(score):
            if spread.std:
                low, high = spread.mean - spread.std, spread.mean + spread.std
                axes.axhspan(low, high, color=colour, alpha=0.4, linewidth=0, zorder=0)
            axes.axhline(spread.mean, color=colour, linewidth=1.4, zorder=1)
    gap = min(high - low for low, high in zip(found.layers, found.layers[1:], strict=False))
    apart = gap * min(_APART, _AT_MOST / len(found.lines))
    for index, line in enumerate(found.lines):
        points = [
            (layer + apart * (index - (len(found.lines) - 1) / 2), spread)
            for layer in found.layers
            if layer in line.rows and (spread := line.rows[layer].quality.get(score))
        ]
        axes.errorbar(
            [layer for layer, _ in points],
            [spread.mean for _, spread in points],
            yerr=[spread.std or 0.0 for _, spread in points],
            elinewidth=0.9,
            capsize=2.5,
            markersize=5,
            linewidth=1.5,
            **_style(found, line),
        )
    of = ", less is better" if score in LEAKS else ", test set"
    seeds = "" if found.num_seeds == "1" else f"\n(mean ± std over {found.num_seeds} seeds)"
    axes.set_ylabel(f"{score_name(score)}{of}{seeds}")
    axes.grid(color="#EEEEEE")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _style(found: Layers, line: Line) -> dict[str, Any]:
    """A colour and marker for each rank, a line style for each variant."""
    rank = found.ranks.index(line.rank)
    return {
        "color": RANK_COLOURS[rank % len(RANK_COLOURS)],
        "marker": MARKERS[rank % len(MARKERS)],
        "linestyle": STYLES[found.variants.index(line.variant) % len(STYLES)],
    }


def _handles(found: Layers) -> list[Line2D]:
    handles = [Line2D([], [], label=line.label, **_style(found, line)) for line in found.lines]
    score = found.scores[0]
    for row, colour in zip(found.unsplit, _repeated(BANDS, len(found.unsplit)), strict=True):
        label = f"{unsplit_name(found, row)}: {spread_text(score, row.quality.get(score))}"
        handles.append(Line2D([], [], color=colour, linewidth=5, label=label))
    return handles


def _write_table(path: Path, found: Layers, title: str) -> Path:
    """A block for each score; layers down, ranks across."""
    blocks = [table_of(found, score) for score in found.scores]
    headings = ["layer", *(line.label for line in found.lines)]
    widths = [
        max(len(heading), *(len((layer, *cells)[i]) for rows in blocks for layer, cells in rows))
        for i, heading in enumerate(headings)
    ]
    lines_in, character_in = 0.26, 0.085
    size_in = (
        max(6.0, character_in * sum(widths) + 0.3 * len(widths) + 0.4),
        0.55 + lines_in * sum(len(rows) + 2.6 for rows in blocks),
    )
    figure = Figure(figsize=size_in, dpi=DPI)
    FigureCanvasAgg(figure)
    seeds = "" if found.num_seeds == "1" else f", mean ± std over {found.num_seeds} seeds"
    figure.suptitle(f"{title}: layer of the cut and rank{seeds}", fontsize=10)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, size_in[0]), ylim=(size_in[1], 0))
    axes.axis("off")
    scale = (size_in[0] - 0.4) / sum(width + 3 for width in widths)
    ends = [0.2 + scale * sum(width + 3 for width in widths[: i + 1]) for i in range(len(widths))]
    y = 0.55
    for score, rows in zip(found.scores, blocks, strict=True):
        axes.text(0.2, y, score_name(score), fontsize=9, color=FAINT, va="center")
        y += lines_in
        _text(axes, ends, y, headings, weight="bold")
        y += 0.6 * lines_in
        axes.plot([0.2, size_in[0] - 0.2], [y, y], color=FAINT, linewidth=0.8)
        for layer, cells in rows:
            y += lines_in if layer != rows[0][0] else 0.6 * lines_in
            _text(axes, ends, y, [layer, *cells])
        y += 1.4 * lines_in
    figure.savefig(path)
    return path


def _text(
    axes: Axes, ends: Sequence[float], y: float, cells: Sequence[str], weight: str = "normal"
) -> None:
    for end, cell in zip(ends, cells, strict=True):
        axes.text(end, y, cell, ha="right", va="center", fontsize=9, color=INK, weight=weight)


def _repeated(colours: Sequence[str], count: int) -> list[str]:
    return [colours[i % len(colours)] for i in range(count)]
