"""A sweep in pictures: quality against step time, quality against compression ratio, where the
step time goes; and the training losses of its settings with their differences to the reference,
seed by seed. The reference is the single cloud, else the setting without compression.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import NDArray

from xcloud.base.units import LESS_IS_BETTER, score_name
from xcloud.record.events import EVENTS_FILE
from xcloud.record.summary import read_run
from xcloud.report.figures import (
    COLOURS,
    DASHES,
    INK,
    LINES,
    MARKERS,
    canvas,
    column,
    over_steps,
    plain,
    save,
    smoothed,
)
from xcloud.sweep.points import UNCOMPRESSED
from xcloud.sweep.results import ONE_CLOUD, Row, Spread

QUALITY_AND_TIME = "quality_and_step_time.png"
QUALITY_AND_RATIO = "quality_and_ratio.png"
STEP_TIME = "step_time.png"
LOSSES = "losses.png"

MOST_CURVES = 8  # of losses; more cannot be told apart
PARTS = {
    "compute_s": ("computing", "#4C8DBF"),
    "codec_s": ("compressing", COLOURS["codec"]),
    "sync_s": ("averaging", COLOURS["averaging"]),
    "waiting_s": ("waiting", COLOURS["waiting"]),
}
Values = NDArray[np.float64]
BySeed = Mapping[object, tuple[NDArray[np.int64], Values]]  # seed -> steps, losses


@dataclass(frozen=True)
class Mark:
    """One setting in a scatter plot."""

    label: str
    x: Spread
    y: Spread
    colour: str
    shape: str


def write_pictures(folder: Path, rows: Sequence[Row], title: str) -> list[Path]:
    """Draw what there is to draw; returns the files."""
    score = next((name for row in rows for name in row.quality), None)
    sweeps = list(dict.fromkeys(row.sweep for row in rows))
    written = []
    if score and (marks := _marks(rows, score, "step_time_s", sweeps)):
        label, path = "step time, median (s)", folder / QUALITY_AND_TIME
        written.append(write_scatter(path, marks, f"{title}: quality and step time", label, score))
    if score and (marks := _marks(rows, score, "compression_ratio", sweeps)):
        label, path = "compression ratio (FP32 bytes / bytes sent)", folder / QUALITY_AND_RATIO
        written.append(
            write_scatter(path, marks, f"{title}: quality and compression", label, score)
        )
    if any(row.parts_s("compute_s") for row in rows):
        written.append(_write_step_time(folder / STEP_TIME, rows, title, len(sweeps) > 1))
    return written


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto front, sorted: no other point has a lower cost and a higher quality."""
    best: list[tuple[float, float]] = []
    for cost, quality in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or quality > best[-1][1]:
            best.append((cost, quality))
    return best


def _marks(rows: Sequence[Row], score: str, x_name: str, sweeps: Sequence[str]) -> list[Mark]:
    """In the colour of their sweep; of a single sweep each in its own."""
    marks: list[Mark] = []
    for row in rows:
        x, place = getattr(row, x_name), len(marks)
        if score in row.quality and x is not None:
            several = len(sweeps) > 1
            label = f"{row.label} @{row.sweep}" if several else row.label
            colour = LINES[(sweeps.index(row.sweep) if several else place) % len(LINES)]
            shape = MARKERS[(place if several else place // len(LINES)) % len(MARKERS)]
            marks.append(Mark(label, x, row.quality[score], colour, shape))
    return marks


def write_scatter(path: Path, marks: Sequence[Mark], title: str, x_label: str, score: str) -> Path:
    figure = canvas(title, 8, 5.5 + 0.1 * len(marks))
    axes = figure.subplots()
    plain(axes, "both")
    _scatter(axes, marks, x_label, score_name(score))
    if path.name == QUALITY_AND_TIME:
        _draw_front(axes, marks, score)
    elif max(m.x.mean for m in marks) > 8 * min(m.x.mean for m in marks):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return save(figure, path)


def _scatter(axes: Axes, marks: Sequence[Mark], x_label: str, score: str) -> None:
    for mark in marks:
        axes.errorbar(
            mark.x.mean, mark.y.mean, xerr=mark.x.std, yerr=mark.y.plus_minus, fmt=mark.shape,
            color=mark.colour, ecolor=(mark.colour, 0.6), elinewidth=0.9, capsize=2.5,
            markersize=6, label=mark.label,
        )  # fmt: skip
    axes.margins(0.12)
    axes.set_xlabel(x_label)
    over_seeds = (
        " (mean ± std over seeds)"
        if any(m.y.std is not None for m in marks)
        else (" (± standard error)" if any(m.y.error is not None for m in marks) else "")
    )
    axes.set_ylabel(f"{score}, test set{over_seeds}")


def _draw_front(axes: Axes, marks: Sequence[Mark], score: str) -> None:
    """As a step line from its first point to its last; a single point is no trade-off."""
    sign = -1 if score in LESS_IS_BETTER else 1
    best = front([(mark.x.mean, sign * mark.y.mean) for mark in marks])
    if len(best) > 1:
        costs, qualities = [cost for cost, _ in best], [sign * quality for _, quality in best]
        label = "trade-off front: nothing is faster and better"
        axes.step(costs, qualities, "--", where="post", label=label, color=INK, lw=1.1, zorder=1)


def _write_step_time(path: Path, rows: Sequence[Row], title: str, several: bool) -> Path:
    """A bar for each setting and cloud: how its ranks' main thread spent a step."""
    shown = [row for row in rows if row.parts_s("compute_s")]
    shown.sort(key=lambda row: row.step_time_s.mean if row.step_time_s else 0.0)
    bars = [(row, cloud) for row in shown for cloud in sorted(row.parts_s("compute_s"))]
    height_in = 1.6 + 0.28 * len(bars) + 0.12 * len(shown)
    figure = canvas(f"{title}: where a step's time goes", 8, height_in)
    axes = figure.subplots()
    heights, ticks, height = [], [], 0.0
    for index, (row, cloud) in enumerate(bars):
        height += 1.4 if index and row is not bars[index - 1][0] else 1.0
        heights.append(height)
        name = f"{row.label} @{row.sweep}" if several else row.label
        ticks.append(f"{name}  {cloud}" if len(row.parts_s("compute_s")) > 1 else name)
    left = [0.0] * len(bars)
    for kind, (name, colour) in PARTS.items():
        widths = [row.parts_s(kind).get(cloud, 0.0) for row, cloud in bars]
        axes.barh(heights, widths, 0.85, left, color=colour, edgecolor="white", lw=0.4, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for (row, _), at in zip(bars, heights, strict=True):
        if row.step_time_s:
            axes.plot([row.step_time_s.mean] * 2, [at - 0.42, at + 0.42], color=INK, lw=1.4)
    axes.plot([], [], color=INK, lw=1.4, label="step time, median")
    axes.set_yticks(heights, ticks, fontsize=8.5)
    axes.set_ylim(heights[-1] + 0.7, heights[0] - 0.7)
    axes.set_xlabel("seconds in a step, mean over steps, ranks of the cloud and seeds")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8.5, frameon=False)
    return save(figure, path)


@dataclass(frozen=True)
class Curve:
    """Losses of a row."""

    label: str
    by_seed: BySeed

    def minus(self, other: Curve) -> BySeed:
        """Differences at common steps, for each common seed."""
        differences = {}
        for seed in self.by_seed.keys() & other.by_seed.keys():
            (step, loss), (there, base) = self.by_seed[seed], other.by_seed[seed]
            both, i, j = np.intersect1d(step, there, return_indices=True)
            if len(both):
                differences[seed] = (both, loss[i] - base[j])
        return differences


def curves_of(rows: Sequence[Row]) -> tuple[Curve | None, list[Curve]]:
    """The reference, if there is one, and the other settings, best first; empty if no two have
    a loss. Made from events.jsonl, which MLflow does not store."""
    alone = [row for row in rows if row.cluster == ONE_CLOUD]
    uncompressed = [row for row in rows if row.compression == UNCOMPRESSED]
    chosen = next(iter([*alone, *uncompressed]), None)
    reference, others = None, []
    for row in sorted(rows, key=lambda row: row is not chosen):
        if by_seed := _losses(row):
            # The label, plus the cluster if there are several and the label does not name it.
            is_clear = row.cluster in row.label or len({other.cluster for other in rows}) == 1
            curve = Curve(row.label if is_clear else f"{row.label}, {row.cluster}", by_seed)
            if row is chosen:
                reference = curve
            else:
                others.append(curve)
        if len(others) == MOST_CURVES:
            break
    return (reference, others) if len(others) + (reference is not None) > 1 else (None, [])


def _losses(row: Row) -> BySeed:
    """Of its finished runs."""
    by_seed = {}
    for result in row.results:
        steps = read_run(result.run_dir / EVENTS_FILE).steps
        step, loss = np.asarray(steps.step), np.asarray(steps["loss"])
        known = np.isfinite(loss)
        if result.status == "finished" and known.any():
            by_seed[result.settings.get("seed")] = step[known], loss[known]
    return by_seed


def write_losses(
    folder: Path, reference: Curve | None, others: Sequence[Curve], title: str
) -> Path:
    figure = canvas(f"{title}: training loss", 8, 6.2 if reference else 4.6)
    panels = column(figure, [2, 1] if reference else [1])
    if reference:
        # Broad and pale, so that it stays visible under an equal curve.
        pale = {"color": "#B5B5B5", "linewidth": 4.5}
        _draw_losses(panels[0], reference.by_seed, pale, reference.label)
        panels[1].axhline(0, color=INK, linewidth=0.8, zorder=0)
        panels[1].set_ylabel(f"minus {reference.label},\nsame seed")
    for index, curve in enumerate(others):
        style = {"color": LINES[index % len(LINES)], "linewidth": 1.6,
                 "linestyle": DASHES[1 + index % (len(DASHES) - 1)]}  # fmt: skip
        label = curve.label
        if reference and (differences := curve.minus(reference)):
            _draw_losses(panels[1], differences, style)
            largest = max(float(np.abs(values).max()) for _, values in differences.values())
            label += ": equal at every step" if largest == 0 else f": differs by ≤ {largest:.2g}"
        _draw_losses(panels[0], curve.by_seed, style, label)
    seeds = max(len(curve.by_seed) for curve in others)
    panels[0].set_ylabel("training loss" + (f"\n(mean, ± std of {seeds} seeds)" * (seeds > 1)))
    panels[0].legend(frameon=False, fontsize=8.5)
    panels[-1].set_xlabel("step")
    for axes in panels:
        over_steps(axes)
    return save(figure, folder / LOSSES)


def _draw_losses(
    axes: Axes, by_seed: BySeed, style: dict[str, Any], label: str | None = None
) -> None:
    """Smoothed mean over seeds with a band of one standard deviation, at common steps."""
    runs = list(by_seed.values())
    steps = runs[0][0]
    for step, _ in runs[1:]:
        steps = np.intersect1d(steps, step)
    if not len(steps):
        return
    smooth = np.stack([smoothed(loss[np.searchsorted(step, steps)])[0] for step, loss in runs])
    mean = smooth.mean(axis=0)
    axes.plot(steps, mean, label=label, **style)
    if len(runs) > 1:
        std = smooth.std(axis=0, ddof=1)
        colour = str(style["color"])
        axes.fill_between(steps, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
