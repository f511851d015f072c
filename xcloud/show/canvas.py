"""Canvas, colours and habits that all pictures share.

Figures are made without pyplot, whose state is global: runs of a sweep may end concurrently.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

# Okabe and Ito's colours, safe for colour-blind readers (jfly.uni-koeln.de/color); light where a
# rank is, or may be, idle: averaging begins with waiting for the other ranks of the stage.
COLOURS = {
    "forward": "#0072B2",
    "backward": "#E69F00",
    "weights": "#F0E442",
    "codec": "#CC79A7",
    "waiting": "#E3E3E3",
    "averaging": "#8FD3BE",
    "optimizer": "#6B4C3B",
    "other": "#FFFFFF",
}
# What the main thread of a rank did in a step.
PARTS = {
    "compute_s": ("computing", COLOURS["forward"]),
    "codec_s": ("compressing", COLOURS["codec"]),
    "waiting_s": ("waiting", COLOURS["waiting"]),
    "sync_s": ("averaging", COLOURS["averaging"]),
}
# For lines and marks that stand for settings.
LINES = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#6B4C3B")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", ":", "-.")
INK = "#222222"
FAINT = "#8A8A8A"
TITLE_POINTS = 10
MAX_LABEL = 50  # characters, some 43 % of the width of a picture


def canvas(title: str, width_in: float, height_in: float) -> Figure:
    # "constrained" leaves room for legends and long labels.
    figure = Figure(figsize=(width_in, height_in), dpi=110, layout="constrained")
    if title:
        figure.suptitle(wrapped(title, width_in), fontsize=TITLE_POINTS)
    return figure


def column(figure: Figure, heights: Sequence[float]) -> list[Axes]:
    """Panels below each other, of these relative heights, with one x axis."""
    ratios: dict[str, Any] = {"height_ratios": list(heights)}
    return list(figure.subplots(len(heights), sharex=True, squeeze=False, **ratios)[:, 0])


def save(figure: Figure, path: Path) -> Path:
    """Write a picture, with labels in its legends that leave room for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Here and not where labels are made, as every picture is saved by this.
    # figure.findobj would make every tick of every axis, which takes as long as drawing them.
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    for legend in filter(None, legends):
        for text in legend.get_texts():
            text.set_text(clipped(text.get_text()))
            text.set_parse_math(False)  # a "$" in somebody's name begins no formula
    figure.savefig(path)
    return path


def legend_columns(labels: Sequence[str]) -> int:
    """Return how many columns of a legend fit below a picture of eight inches: 115 characters."""
    longest = max(len(clipped(label)) for label in labels)
    # A label takes its characters and some for its mark; four columns at most can be followed with
    # the eye.
    return max(1, min(4, len(labels), 115 // (longest + 8)))


def clipped(label: str) -> str:
    """Return a label of a setting, or its beginning and its end: settings differ in either.

    A label of 300 characters, which a path gives, leaves no room for what is drawn.
    """
    if len(label) <= MAX_LABEL:
        return label
    return f"{label[: MAX_LABEL // 2]} … {label[-MAX_LABEL // 2 :]}"


def plain(axes: Axes, grid: Any = "y") -> None:
    """Faint lines behind what is drawn, no box. grid: across "x", "y" or "both"."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#EEEEEE")
    axes.set_axisbelow(True)


def over_steps(axes: Axes) -> None:
    """Steps along x are whole numbers."""
    plain(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def stacked(
    axes: Axes, labels: Sequence[str], parts: Sequence[tuple[str, NDArray[np.float64], str]]
) -> list[tuple[BarContainer, NDArray[np.float64]]]:
    """A bar for each label, the first at the top, of these parts: name, lengths, colour. Returns
    what was drawn of each part, and its lengths."""
    drawn = []
    # Each part begins where the one before has ended.
    ends = np.zeros(len(labels))
    edge: dict[str, Any] = {"edgecolor": FAINT, "lw": 0.5}
    for name, lengths, colour in parts:
        bars = axes.barh(range(len(labels)), lengths, 0.7, ends, color=colour, label=name, **edge)
        drawn.append((bars, lengths))
        ends = ends + lengths
    axes.set_yticks(range(len(labels)), [clipped(label) for label in labels])
    # The first label at the top, as in a table.
    axes.invert_yaxis()
    return drawn


def ink_on(colour: str) -> str:
    """Black or white, whichever is more legible on `colour` ("#RRGGBB")."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    # Green looks brightest and blue darkest: the usual weights of luminance.
    if 0.3 * red + 0.59 * green + 0.11 * blue > 140:
        return INK
    return "#FFFFFF"


def wrapped(title: str, width_in: float) -> str:
    """Return a text in lines of 11.5 characters an inch, at TITLE_POINTS."""
    return "\n".join(textwrap.wrap(title, int(11.5 * width_in)))


def smoothed(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    """Mean over a fiftieth of a run around each step, and how many steps that is."""
    # A fiftieth of the steps.
    window = max(1, round(len(values) / 50))
    return running_mean(values, window), window


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Centred mean over `window` values, fewer at the ends."""
    whole = np.ones(window)
    ones = np.ones(len(values))
    # At both ends fewer values lie in the window; divided by how many there are.
    return np.convolve(values, whole, "same") / np.convolve(ones, whole, "same")
