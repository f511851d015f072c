"""loss_curves.png: training loss in one cloud and across clouds, one over the other ([N] fig. 5).

[N] Pan, Hou, Yang, Yu, Xiang, ZTE Technology Journal 2023(4), section 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from xcloud.record.curves import read_curves
from xcloud.record.events import EVENTS_FILE
from xcloud.report.picture_style import DPI, INK
from xcloud.report.pictures import running_mean
from xcloud.sweep.points import varying, workload_key
from xcloud.sweep.results import ONE_CLOUD, Row

LOSS_CURVES = "loss_curves.png"

LINE_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("--", ":", "-.")
_SMOOTH_OVER = 1 / 50  # of the run, as in a run's loss.png
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Loss of a row over steps, by seed: [num steps] each."""

    label: str
    in_one_cloud: bool
    work: str
    by_seed: dict[object, tuple[NDArray[np.int64], Values]]


def curves_of(rows: Sequence[Row]) -> list[Curve]:
    """Of the rows of each workload that ran on several clusters; the single cloud first."""
    clusters: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        clusters.setdefault(_work(row), set()).add(row.cluster)
    shown = [row for row in rows if len(clusters[_work(row)]) > 1]
    shown.sort(key=lambda row: row.cluster != ONE_CLOUD)
    several_works = len({_work(row) for row in shown}) > 1
    curves = []
    for row in shown:
        by_seed = {}
        for result in row.results:
            found = read_curves(result.run_dir / EVENTS_FILE)
            loss = np.asarray(found.loss)
            known = np.isfinite(loss)
            if result.status == "finished" and known.any():
                seed = result.settings.get("seed")
                by_seed[seed] = (np.asarray(found.step)[known], loss[known])
        if by_seed:
            name = row.label if several_works else _name(row, shown)
            curves.append(Curve(name, row.cluster == ONE_CLOUD, "@".join(_work(row)), by_seed))
    return curves if len(curves) > 1 else []


def write_loss_curves(folder: Path, curves: Sequence[Curve], title: str) -> Path:
    """Above the losses; below, where there is one cloud to compare with, the difference to it."""
    alone = {curve.work: curve for curve in reversed(curves) if curve.in_one_cloud}
    compared = [c for c in curves if c.work in alone and alone[c.work] is not c]
    figure = Figure(figsize=(8, 6.2 if compared else 4.6), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}: training loss by cluster", fontsize=11)
    heights = [2, 1] if compared else [1]
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    panels = panels[:, 0]
    for index, curve in enumerate(curves):
        style = _style(index - len(alone), curve)
        _draw(panels[0], list(curve.by_seed.values()), style, curve.label)
        if curve in compared:
            _draw(panels[1], _differences(curve, alone[curve.work]), style)
    seeds = max(len(curve.by_seed) for curve in curves)
    panels[0].set_ylabel("training loss" + (f"\n(mean, ± std of {seeds} seeds)" * (seeds > 1)))
    panels[0].legend(frameon=False, fontsize=8.5)
    if compared:
        panels[1].axhline(0, color=INK, linewidth=0.8, zorder=0)
        panels[1].set_ylabel("minus one cloud,\nsame seed")
        largest = max(
            float(np.abs(d).max()) for c in compared for _, d in _differences(c, alone[c.work])
        )
        text = "equal at every step" if largest == 0 else f"largest of a step: {largest:.2g}"
        panels[1].text(0.99, 0.95, text, ha="right", va="top", fontsize=8,
                       transform=panels[1].transAxes)  # fmt: skip
    panels[-1].set_xlabel("step")
    for axes in panels:
        axes.grid(axis="y", color="#EEEEEE")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / LOSS_CURVES)
    return folder / LOSS_CURVES


def _differences(curve: Curve, alone: Curve) -> list[tuple[NDArray[np.int64], Values]]:
    """Loss minus that in one cloud, at the steps both have, of each seed both have."""
    found = []
    for seed, (step, loss) in curve.by_seed.items():
        if seed in alone.by_seed:
            other_step, other = alone.by_seed[seed]
            both, here, there = np.intersect1d(step, other_step, return_indices=True)
            if len(both):
                found.append((both, loss[here] - other[there]))
    return found


def _draw(
    axes: Axes,
    runs: Sequence[tuple[NDArray[np.int64], Values]],
    style: dict[str, Any],
    label: str | None = None,
) -> None:
    """Smoothed mean over runs, and a band of their standard deviation, at the steps all have."""
    if not runs:
        return
    steps = runs[0][0]
    for step, _ in runs[1:]:
        steps = np.intersect1d(steps, step)
    if not len(steps):
        return
    window = max(1, round(len(steps) * _SMOOTH_OVER))
    smooth = np.stack(
        [running_mean(loss[np.searchsorted(step, steps)], window) for step, loss in runs]
    )
    mean = smooth.mean(axis=0)
    axes.plot(steps, mean, label=label, **style)
    if len(runs) > 1:
        std = smooth.std(axis=0, ddof=1)
        colour = str(style["color"])
        axes.fill_between(steps, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)


def _style(index: int, curve: Curve) -> dict[str, Any]:
    """One cloud broad and pale below, the others thin and broken over it: equal ones both show."""
    if curve.in_one_cloud:
        return {"color": "#B5B5B5", "linewidth": 4.5}
    colour = LINE_COLOURS[index % len(LINE_COLOURS)]
    return {"color": colour, "linewidth": 1.6, "linestyle": STYLES[index % len(STYLES)]}


def _work(row: Row) -> tuple[str, str]:
    return row.sweep, workload_key(row.settings)


def _name(row: Row, shown: Sequence[Row]) -> str:
    """The cluster, and how it compresses where that varies."""
    varies = any(key.startswith("compression") for key in varying([r.settings for r in shown]))
    return f"{row.cluster}, {row.compression}" if varies else row.cluster
