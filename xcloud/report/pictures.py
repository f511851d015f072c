"""The pictures of a run: loss.png, step_time.png and, with timeline_picture.py, timeline.png."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from xcloud.record.events import OWN
from xcloud.record.summary import RunStatistics, num_warmup_steps
from xcloud.record.timeline import Timeline
from xcloud.report.figures import (
    COLOURS,
    FAINT,
    INK,
    canvas,
    column,
    ink_on,
    over_steps,
    save,
    smoothed,
)
from xcloud.report.timeline_picture import write_timeline

LOSS_PICTURE = "loss.png"
STEP_TIME_PICTURE = "step_time.png"
TIMELINE_PICTURE = "timeline.png"
PARTS = {
    "compute_s": ("computing", COLOURS["forward"]),
    "codec_s": ("compressing", COLOURS["codec"]),
    "waiting_s": ("waiting", COLOURS["waiting"]),
    "sync_s": ("averaging", COLOURS["averaging"]),
}
_MAX_POINTS = 2000


def write_pictures(
    run_dir: Path,
    run: RunStatistics,
    timeline: Timeline | None,
    title: str,
    predicted: Timeline | None = None,
) -> list[Path]:
    """Draw what there is to draw; returns the files. predicted: by the plan that is run."""
    written = []
    if timeline is not None:
        written.append(
            write_timeline(run_dir / TIMELINE_PICTURE, timeline, title, predicted=predicted)
        )
    if write_loss(run_dir / LOSS_PICTURE, run, title):
        written.append(run_dir / LOSS_PICTURE)
    if write_step_time(run_dir / STEP_TIME_PICTURE, run, title):
        written.append(run_dir / STEP_TIME_PICTURE)
    return written


def write_loss(path: Path, run: RunStatistics, title: str) -> bool:
    """Loss over steps, raw and smoothed; dev quality below it. False if there is no loss yet."""
    step, loss = np.asarray(run.steps.step), np.asarray(run.steps["loss"])
    known = np.isfinite(loss)
    if not known.any():
        return False
    step, loss = step[known], loss[known]
    quality = run.dev_quality()
    figure = canvas(title, 8, 6.4 if quality else 4.2)
    panels = column(figure, [2, 1] if quality else [1])
    mean, window = smoothed(loss)
    if window > 1:
        panels[0].plot(step, loss, color="#9CC3DD", linewidth=0.6, label="each step")
        label = f"mean of {window} steps"
        panels[0].plot(step, mean, color=COLOURS["forward"], label=label)
        panels[0].legend(frameon=False)
    else:
        panels[0].plot(step, loss, color=COLOURS["forward"], marker=".", linewidth=1)
    panels[0].set_ylabel("training loss")
    if quality:
        kinds = ("forward", "backward", "codec", "optimizer")
        panels[1].set_prop_cycle(color=[COLOURS[kind] for kind in kinds])
        for metric, points in quality.items():
            panels[1].plot(*zip(*points, strict=True), marker="o", markersize=3, label=metric)
        panels[1].set_ylabel("dev quality")
        panels[1].legend(frameon=False)
    panels[-1].set_xlabel("step")
    for axes in panels:
        over_steps(axes)
    save(figure, path)
    return True


def write_step_time(path: Path, run: RunStatistics, title: str) -> bool:
    """How each cloud spent a step, and step time over the run. False without steps."""
    if not run.num_steps:
        return False
    skip = num_warmup_steps(run.num_steps)
    step, step_s = np.asarray(run.steps.step)[skip:], np.asarray(run.steps["step_s"])[skip:]
    figure = canvas(title, 11, 3.2 + 0.4 * len(run.clouds))
    left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
    unit, per_s = ("ms", 1e3) if np.median(step_s) < 1 else ("s", 1.0)
    _draw_parts(left, run, skip, per_s)
    left.set_xlabel(f"{unit} of a step (mean of {len(step)} steps, ranks of a cloud)")
    _draw_times(right, step, per_s * step_s, unit)
    top = right.get_ylim()[1]
    for event in run.events("autopilot"):
        after, text = event["step"] + 0.5, f" {event['choice']}"
        right.axvline(after, color=INK, linewidth=0.8, linestyle=":")
        right.text(after, 0.02 * top, text, fontsize=7, rotation=90, va="bottom")
    save(figure, path)
    return True


def _draw_times(
    axes: Axes, step: NDArray[np.int64], taken: NDArray[np.float64], unit: str
) -> None:
    """Step time over the run. taken: by step, in `unit`."""
    every = math.ceil(len(step) / _MAX_POINTS)
    axes.plot(step, taken, ".", markersize=4, markevery=every, color=INK, alpha=0.5)
    low, median, high = np.percentile(taken, [10, 50, 90])
    axes.axhline(median, color=COLOURS["forward"], label=f"median {short(median)} {unit}")
    spread = f"10 % to 90 %: {short(low)} to {short(high)} {unit}"
    axes.axhspan(low, high, color=COLOURS["forward"], alpha=0.12, linewidth=0, label=spread)
    # One hiccup of a minute must not flatten everything else; it is noted in the corner.
    top = 1.25 * max(np.percentile(taken, 99), high)
    axes.set_ylim(0, top)
    if num_above := int((taken > top).sum()):
        text = f"{num_above} above, up to {short(taken.max())} {unit}"
        corner = axes.transAxes
        axes.text(0.99, 0.99, text, ha="right", va="top", fontsize=8, transform=corner)
    axes.set_xlabel("step")
    axes.set_ylabel(f"step time in {unit}")
    axes.legend(ncols=2, frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
    over_steps(axes)


def _draw_parts(axes: Axes, run: RunStatistics, skip: int, per_s: float) -> None:
    """A bar for each cloud, as long as its ranks' steps; "other" is the unaccounted rest."""

    def mean(kind: str) -> NDArray[np.float64]:
        seconds, ranks = (run.steps.sums(name, first=skip) for name in (kind, "num_ranks"))
        return per_s * np.array([seconds[cloud] / ranks[cloud] for cloud in run.clouds])

    whole, ends = mean(OWN), np.zeros(len(run.clouds))
    parts = [(label, mean(kind), colour) for kind, (label, colour) in PARTS.items()]
    rest = whole - sum(values for _, values, _ in parts)
    for label, values, colour in (*parts, ("other", np.maximum(rest, 0), COLOURS["other"])):
        bars = axes.barh(
            range(len(values)), values, left=ends, height=0.62, color=colour, label=label,
            edgecolor=FAINT, linewidth=0.5,
        )  # fmt: skip
        texts = [short(value) if value > 0.08 * whole.max() else "" for value in values]
        axes.bar_label(bars, texts, label_type="center", fontsize=8, color=ink_on(colour))
        ends = ends + values
    axes.set_yticks(range(len(whole)), run.clouds)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.005 * whole.max())  # room for the edge of the last box
    axes.legend(ncols=5, frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1),
                handlelength=1, columnspacing=1, borderaxespad=0.2)  # fmt: skip
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def short(value: float) -> str:
    """Three digits, without exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
