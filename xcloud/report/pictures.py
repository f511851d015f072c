"""The pictures of a run: loss.png, step_time.png and, with timeline_picture.py, timeline.png.

Only the process that follows a run imports this (matplotlib takes half a second), never a worker.
Figures are made without pyplot, whose state is global: runs of a sweep may end concurrently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from xcloud.record.curves import RunCurves
from xcloud.record.summary import num_warmup_steps
from xcloud.record.timeline import Timeline
from xcloud.report.picture_style import COLOURS, DPI, FAINT, INK, TITLE_POINTS, ink_on, wrapped
from xcloud.report.timeline_picture import write_timeline

LOSS_PICTURE = "loss.png"
STEP_TIME_PICTURE = "step_time.png"
TIMELINE_PICTURE = "timeline.png"

_SMOOTH_OVER = 1 / 50  # of the run
_MAX_POINTS = 2000


def write_pictures(
    run_dir: Path,
    curves: RunCurves,
    timeline: Timeline | None,
    title: str,
    predicted: Timeline | None = None,
) -> list[Path]:
    """Draw what there is to draw; returns the files. predicted: by the plan that is run."""
    written = []
    if timeline is not None:
        write_timeline(run_dir / TIMELINE_PICTURE, timeline, title, predicted)
        written.append(run_dir / TIMELINE_PICTURE)
    if write_loss(run_dir / LOSS_PICTURE, curves, title):
        written.append(run_dir / LOSS_PICTURE)
    if write_step_time(run_dir / STEP_TIME_PICTURE, curves, title):
        written.append(run_dir / STEP_TIME_PICTURE)
    return written


def write_loss(path: Path, curves: RunCurves, title: str) -> bool:
    """Loss over steps, raw and smoothed; dev quality below it. False if there is no loss yet."""
    step, loss = np.asarray(curves.step), np.asarray(curves.loss)
    known = np.isfinite(loss)
    if not known.any():
        return False
    step, loss = step[known], loss[known]
    figure = Figure(figsize=(8, 6.4 if curves.dev_quality else 4.2), dpi=DPI, layout="constrained")
    figure.suptitle(wrapped(title, 8), fontsize=TITLE_POINTS)
    rows = 2 if curves.dev_quality else 1
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=[2, 1][:rows])[:, 0]
    window = max(1, round(len(loss) * _SMOOTH_OVER))
    if window > 1:
        axes[0].plot(step, loss, color="#9CC3DD", linewidth=0.6, label="each step")
        label = f"mean of {window} steps"
        axes[0].plot(step, running_mean(loss, window), color=COLOURS["forward"], label=label)
        axes[0].legend(frameon=False)
    else:
        axes[0].plot(step, loss, color=COLOURS["forward"], marker=".", linewidth=1)
    axes[0].set_ylabel("training loss")
    plain(axes[0])
    if curves.dev_quality:
        kinds = ("forward", "backward", "codec", "optimizer")
        axes[1].set_prop_cycle(color=[COLOURS[kind] for kind in kinds])
        for metric, points in curves.dev_quality.items():
            axes[1].plot(*zip(*points, strict=True), marker="o", markersize=3, label=metric)
        axes[1].set_ylabel("dev quality")
        axes[1].legend(frameon=False)
        plain(axes[1])
    axes[-1].set_xlabel("step")
    figure.savefig(path)
    return True


def write_step_time(path: Path, curves: RunCurves, title: str) -> bool:
    """How each cloud spent a step, and step time over the run. False without steps."""
    if not curves.step:
        return False
    skip = num_warmup_steps(len(curves.step))
    step_s = np.asarray(curves.step_s)
    clouds = curves.clouds
    figure = Figure(figsize=(11, 3.2 + 0.4 * len(clouds)), dpi=DPI, layout="constrained")
    figure.suptitle(wrapped(title, 11), fontsize=TITLE_POINTS)
    left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
    unit, per_s = ("ms", 1e3) if np.median(step_s[skip:]) < 1 else ("s", 1.0)

    _draw_breakdown(left, curves, clouds, skip, per_s)
    left.set_xlabel(f"{unit} of a step (mean of {len(step_s) - skip} steps, ranks of a cloud)")

    step, seconds = np.asarray(curves.step)[skip:], per_s * step_s[skip:]
    every = math.ceil(len(step) / _MAX_POINTS)
    right.plot(step, seconds, ".", markersize=4, markevery=every, color=INK, alpha=0.5)
    low, median, high = np.percentile(seconds, [10, 50, 90])
    right.axhline(median, color=COLOURS["forward"], label=f"median {short(median)} {unit}")
    right.axhspan(
        low, high, color=COLOURS["forward"], alpha=0.12, linewidth=0,
        label=f"10 % to 90 %: {short(low)} to {short(high)} {unit}",
    )  # fmt: skip
    # One hiccup of a minute must not flatten everything else; it is noted in the corner.
    top = 1.25 * max(np.percentile(seconds, 99), high)
    right.set_ylim(0, top)
    if num_above := int((seconds > top).sum()):
        longest = short(seconds.max())
        right.text(0.99, 0.99, f"{num_above} above, up to {longest} {unit}", ha="right", va="top",
                   fontsize=8, transform=right.transAxes)  # fmt: skip
    for after, choice in curves.switches:
        right.axvline(after + 0.5, color=INK, linewidth=0.8, linestyle=":")
        right.text(after + 0.5, 0.02 * top, f" {choice}", fontsize=7, rotation=90, va="bottom")
    right.set_xlabel("step")
    right.set_ylabel(f"step time in {unit}")
    right.legend(ncols=2, frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
    plain(right)
    figure.savefig(path)
    return True


def _draw_breakdown(
    axes: Axes, curves: RunCurves, clouds: Sequence[str], skip: int, per_s: float
) -> None:
    """A bar for each cloud, as long as its ranks' steps; "other" is the unaccounted rest."""
    kinds = {
        "computing": ("compute_s", "forward"),
        "compressing": ("codec_s", "codec"),
        "waiting": ("waiting_s", "waiting"),
        "averaging": ("sync_s", "averaging"),
    }
    first = curves.step[skip]
    step = per_s * np.array(
        [
            np.asarray(curves.own_step_s[cloud])[
                np.asarray(curves.own_step[cloud]) >= first
            ].mean()
            for cloud in clouds
        ]
    )
    ends = np.zeros(len(clouds))
    for label, (kind, colour) in kinds.items():
        values = per_s * np.array(
            [np.asarray(curves.seconds[kind][cloud])[skip:].mean() for cloud in clouds]
        )
        _bars(axes, label, values, ends, COLOURS[colour], step.max())
        ends += values
    _bars(axes, "other", np.maximum(step - ends, 0), ends, COLOURS["other"], step.max())
    axes.set_yticks(range(len(clouds)), clouds)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.005 * step.max())  # room for the edge of the last box
    axes.legend(ncols=5, frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1),
                handlelength=1, columnspacing=1, borderaxespad=0.2)  # fmt: skip
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def _bars(
    axes: Axes,
    label: str,
    values: NDArray[np.float64],
    starts: NDArray[np.float64],
    colour: str,
    whole: float,
) -> None:
    bars = axes.barh(
        range(len(values)), values, left=starts, height=0.62, color=colour, label=label,
        edgecolor=FAINT, linewidth=0.5,
    )  # fmt: skip
    texts = [short(value) if value > 0.08 * whole else "" for value in values]
    axes.bar_label(bars, texts, label_type="center", fontsize=8, color=ink_on(colour))


def short(value: float) -> str:
    """Three digits, without exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Centred mean over `window` values, fewer at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    first = np.maximum(index - (window - 1) // 2, 0)
    last = np.minimum(index + window // 2 + 1, len(values))
    return np.asarray((sums[last] - sums[first]) / (last - first))


def plain(axes: Axes) -> None:
    """Steps along x: whole numbers, faint horizontal lines, no box."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#EEEEEE")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
