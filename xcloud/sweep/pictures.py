"""A sweep in pictures: quality against step time, quality against compression ratio, where the
step time goes; and the training losses of its settings with their differences to the reference,
seed by seed. The reference is the single cloud, else the setting without compression.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from xcloud.base.units import LESS_IS_BETTER, score_name
from xcloud.record.events import EVENTS_FILE
from xcloud.record.summary import read_run
from xcloud.report.figures import (
    DASHES,
    INK,
    LINES,
    MARKERS,
    PARTS,
    canvas,
    column,
    over_steps,
    plain,
    save,
    smoothed,
)
from xcloud.sweep.points import UNCOMPRESSED
from xcloud.sweep.results import ONE_CLOUD, Result, Results, plus_minus

STEP_TIME = "step_time.png"
LOSSES = "losses.png"
SCATTERS = {  # cost -> file, title, axis
    "step_time_s": ("quality_and_step_time.png", "step time", "step time, median (s)"),
    "compression_ratio": (
        "quality_and_ratio.png", "compression", "compression ratio (FP32 bytes / bytes sent)"
    ),
}  # fmt: skip

MOST_CURVES = 8  # of losses; more cannot be told apart
Curves = Mapping[str, pd.DataFrame]  # by label: losses, a line for each step, a column a seed


def write_pictures(folder: Path, results: Results, title: str) -> list[Path]:
    """Draw what there is to draw; returns the files."""
    written = []
    for cost, (name, what, label) in SCATTERS.items():
        if len(marks := marks_of(results, cost)):
            heading = f"{title}: quality and {what}"
            score = results.scores[0]
            written.append(write_scatter(folder / name, marks, heading, cost, label, score))
    if _clouds(results.rows):
        written.append(_write_step_time(folder / STEP_TIME, results, title))
    return written


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto front, sorted: no other point has a lower cost and a higher quality."""
    best: list[tuple[float, float]] = []
    for cost, quality in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or quality > best[-1][1]:
            best.append((cost, quality))
    return best


def marks_of(results: Results, cost: str) -> pd.DataFrame:
    """The rows that have the main score and the cost, with label, colour and shape: in the colour
    of their sweep; of a single sweep each in its own."""
    if not results.scores or results.rows.empty:
        return results.rows[:0]
    marks = results.rows.dropna(subset=[results.scores[0], cost])
    several, places = len(results.sweeps) > 1, range(len(marks))
    colours = [results.sweeps.index(sweep) for sweep in marks.sweep] if several else places
    shapes = places if several else [place // len(LINES) for place in places]
    return marks.assign(
        label=_labels(marks, several),
        colour=[LINES[number % len(LINES)] for number in colours],
        shape=[MARKERS[number % len(MARKERS)] for number in shapes],
    )


def _labels(rows: pd.DataFrame, several: bool) -> pd.Series:
    return rows.setting + " @" + rows.sweep if several else rows.setting


def write_scatter(
    path: Path, marks: pd.DataFrame, title: str, cost: str, x_label: str, score: str
) -> Path:
    figure = canvas(title, 8, 5.5 + 0.1 * len(marks))
    axes = figure.subplots()
    plain(axes, "both")
    draw_scatter(axes, marks, cost, score)
    axes.set_xlabel(x_label)
    if cost == "step_time_s":
        draw_front(axes, marks, score)
    elif marks[cost].max() > 8 * marks[cost].min():
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return save(figure, path)


def draw_scatter(axes: Axes, marks: pd.DataFrame, cost: str, score: str) -> None:
    spread = plus_minus(marks, score)
    for number, mark in marks.iterrows():
        axes.errorbar(
            mark[cost], mark[score], xerr=mark[f"{cost}_std"], yerr=spread[number],
            fmt=mark["shape"], color=mark.colour, ecolor=(mark.colour, 0.6), elinewidth=0.9,
            capsize=2.5, markersize=6, label=mark.label,
        )  # fmt: skip
    axes.margins(0.12)
    is_mean = marks[f"{score}_std"].notna().any()
    shown = " (mean ± std over seeds)" if is_mean else " (± standard error)"
    axes.set_ylabel(f"{score_name(score)}, test set{shown * bool(spread.notna().any())}")


def draw_front(axes: Axes, marks: pd.DataFrame, score: str) -> None:
    """As a step line from its first point to its last; a single point is no trade-off."""
    sign = -1 if score in LESS_IS_BETTER else 1
    best = front(list(zip(marks.step_time_s, sign * marks[score], strict=True)))
    if len(best) > 1:
        costs, qualities = [cost for cost, _ in best], [sign * quality for _, quality in best]
        label = "trade-off front: nothing is faster and better"
        axes.step(costs, qualities, "--", where="post", label=label, color=INK, lw=1.1, zorder=1)


def _clouds(rows: pd.DataFrame) -> list[str]:
    prefix = "compute_s_"
    return sorted(name.removeprefix(prefix) for name in rows
                  if name.startswith(prefix) and not name.endswith("_std"))  # fmt: skip


def _write_step_time(path: Path, results: Results, title: str) -> Path:
    """A bar for each setting and cloud: how its ranks' main thread spent a step."""
    rows = results.rows.assign(label=_labels(results.rows, len(results.sweeps) > 1))
    rows = rows.sort_values("step_time_s", kind="stable")
    bars = [(row, cloud) for _, row in rows.iterrows() for cloud in _clouds(results.rows)
            if pd.notna(row[f"compute_s_{cloud}"])]  # fmt: skip
    num_clouds = Counter(row.name for row, _ in bars)
    figure = canvas(f"{title}: where a step's time goes", 8,
                    1.6 + 0.28 * len(bars) + 0.12 * len(num_clouds))  # fmt: skip
    axes = figure.subplots()
    heights, ticks, height = [], [], 0.0
    for index, (row, cloud) in enumerate(bars):
        height += 1.4 if index and row.name != bars[index - 1][0].name else 1.0
        heights.append(height)
        ticks.append(f"{row.label}  {cloud}" if num_clouds[row.name] > 1 else row.label)
    left = np.zeros(len(bars))
    for kind, (name, colour) in PARTS.items():
        widths = np.array([row.get(f"{kind}_{cloud}", 0.0) for row, cloud in bars], float)
        widths = np.nan_to_num(widths)
        axes.barh(heights, widths, 0.85, left, color=colour, edgecolor="white", lw=0.4, label=name)
        left += widths
    for (row, _), at in zip(bars, heights, strict=True):
        axes.plot([row.step_time_s] * 2, [at - 0.42, at + 0.42], color=INK, lw=1.4)
    axes.plot([], [], color=INK, lw=1.4, label="step time, median")
    axes.set_yticks(heights, ticks, fontsize=8.5)
    axes.set_ylim(heights[-1] + 0.7, heights[0] - 0.7)
    axes.set_xlabel("seconds in a step, mean over steps, ranks of the cloud and seeds")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8.5, frameon=False)
    return save(figure, path)


def curves_of(results: Results) -> tuple[str, Curves]:
    """The label of the reference, "" if there is none; and the losses of the settings, the
    reference first, then the best ones. Empty if no two have a loss. Made from events.jsonl, which
    MLflow does not store."""
    rows = results.rows
    chosen = rows[rows.cluster == ONE_CLOUD].index.append(
        rows[rows.compression == UNCOMPRESSED].index
    )[:1]
    curves, reference = {}, ""
    for number in [*chosen, *rows.index.drop(chosen)]:
        row = rows.loc[number]
        if not (losses := _losses(results.of_row[number])).empty:
            # The label, plus the cluster if there are several and the label does not name it.
            is_clear = row.cluster in row.setting or rows.cluster.nunique() == 1
            label = row.setting if is_clear else f"{row.setting}, {row.cluster}"
            curves[label] = losses
            reference = label if number in chosen else reference
        if len(curves) - bool(reference) == MOST_CURVES:
            break
    return (reference, curves) if len(curves) > 1 else ("", {})


def _losses(runs: Sequence[Result]) -> pd.DataFrame:
    """Of the finished runs."""
    by_seed = {}
    for run in runs:
        steps = read_run(run.run_dir / EVENTS_FILE).steps
        loss = pd.Series(steps["loss"], steps.step, dtype=float)
        loss = loss[np.isfinite(loss)]
        if run.status == "finished" and len(loss):
            by_seed[run.settings.get("seed")] = loss
    return pd.DataFrame(by_seed)


def write_losses(folder: Path, reference: str, curves: Curves, title: str) -> Path:
    figure = canvas(f"{title}: training loss", 8, 6.2 if reference else 4.6)
    panels = column(figure, [2, 1] if reference else [1])
    others = {label: losses for label, losses in curves.items() if label != reference}
    if reference:
        # Broad and pale, so that it stays visible under an equal curve.
        pale = {"color": "#B5B5B5", "linewidth": 4.5}
        _draw_losses(panels[0], curves[reference], pale, reference)
        panels[1].axhline(0, color=INK, linewidth=0.8, zorder=0)
        panels[1].set_ylabel(f"minus {reference},\nsame seed")
    for index, (label, losses) in enumerate(others.items()):
        style = {"color": LINES[index % len(LINES)], "linewidth": 1.6,
                 "linestyle": DASHES[1 + index % (len(DASHES) - 1)]}  # fmt: skip
        if reference and (differences := losses - curves[reference]).notna().any(axis=None):
            _draw_losses(panels[1], differences.dropna(axis="columns", how="all"), style)
            largest = differences.abs().max(axis=None)
            label += f": differs by ≤ {largest:.2g}" if largest else ": equal at every step"
        _draw_losses(panels[0], losses, style, label)
    seeds = max(len(losses.columns) for losses in others.values())
    panels[0].set_ylabel("training loss" + (f"\n(mean, ± std of {seeds} seeds)" * (seeds > 1)))
    panels[0].legend(frameon=False, fontsize=8.5)
    panels[-1].set_xlabel("step")
    for axes in panels:
        over_steps(axes)
    return save(figure, folder / LOSSES)


def _draw_losses(
    axes: Axes, losses: pd.DataFrame, style: dict[str, Any], label: str | None = None
) -> None:
    """Smoothed mean over seeds with a band of one standard deviation, at common steps."""
    smooth = losses.dropna().apply(lambda loss: smoothed(loss.to_numpy())[0])
    if smooth.empty:
        return
    mean, std = smooth.mean(axis="columns"), smooth.std(axis="columns")
    axes.plot(mean.index, mean, label=label, **style)
    if len(losses.columns) > 1:
        colour = str(style["color"])
        low, high = mean - std, mean + std
        axes.fill_between(mean.index, low, high, color=colour, alpha=0.15, linewidth=0)
