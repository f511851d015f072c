"""A sweep in pictures: quality against step time and against compression ratio, where the step
time goes, quality over a setting that varies, and training losses with their differences to the
reference, seed by seed. The reference is the single cloud, else the setting without compression.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from xcloud.base.units import LESS_IS_BETTER, score_name
from xcloud.record.events import EVENTS_FILE
from xcloud.record.summary import read_run
from xcloud.show.canvas import (
    DASHES,
    INK,
    LINES,
    MARKERS,
    PARTS,
    canvas,
    column,
    legend_columns,
    over_steps,
    plain,
    save,
    smoothed,
    stacked,
)
from xcloud.study.points import UNCOMPRESSED
from xcloud.study.results import ONE_CLOUD, PointResult, Results, Swept, plus_minus, spread_text

STEP_TIME = "step_time.png"
LOSSES = "losses.png"
SWEPT_PICTURE = "quality_over_setting.png"
SCATTERS = {  # cost -> file, title, axis
    "step_time_s": ("quality_and_step_time.png", "step time", "step time, median (s)"),
    "compression_ratio": (
        "quality_and_ratio.png", "compression", "compression ratio (FP32 bytes / bytes sent)"
    ),
    "bytes_per_token": (
        "quality_and_bytes.png", "bytes a token", "bytes sent between clouds, a token"
    ),
}  # fmt: skip

MAX_CURVES = 8  # of losses; more cannot be told apart
BANDS = ("#B9B9B9", "#C9B8D8", "#B5D3C2", "#E0C9A6")  # for the best rows; the table has all
_LEGEND: dict[str, Any] = {"loc": "outside lower center", "fontsize": 8.5, "frameon": False}
Curves = Mapping[str, pd.DataFrame]  # by label: losses, a line for each step, a column a seed


def write_pictures(folder: Path, results: Results, title: str) -> list[Path]:
    """Draw what there is to draw of costs; returns the files."""
    written = []
    for cost, (name, what, label) in SCATTERS.items():
        if len(marks := marks_of(results, cost=cost)):
            # A legend below the picture, so it needs room for its lines.
            figure = canvas(
                f"{title}: quality and {what}", width_in=8, height_in=5.5 + 0.1 * len(marks)
            )
            axes = figure.subplots()
            draw_scatter(axes, marks, cost, score=results.scores[0])
            axes.set_xlabel(label)
            figure.legend(ncols=legend_columns(marks.label), **_LEGEND)
            written.append(save(figure, path=folder / name))
    if _clouds(results.rows):
        written.append(_write_step_time(folder / STEP_TIME, results, title))
    return written


def front(costs: pd.Series, qualities: pd.Series) -> pd.DataFrame:
    """The Pareto front, sorted: no other point has a lower cost and a higher quality."""
    points = pd.DataFrame({"cost": costs, "quality": qualities})
    points = points.sort_values(["cost", "quality"], ascending=[True, False])
    # Kept are points whose quality is above all that cost less.
    return points[~(points.quality <= points.quality.cummax().shift())]


def marks_of(results: Results, cost: str) -> pd.DataFrame:
    """The rows that have the main score and the cost, with label, colour and shape: in the colour
    of their sweep; of a single sweep each in its own."""
    if not results.scores or results.rows.empty or cost not in results.rows:
        return results.rows[:0]
    marks = results.rows.dropna(subset=[results.scores[0], cost])
    if len(results.sweeps) > 1:
        # Several sweeps: one colour each, so that shapes have to tell rows apart.
        colours = marks.sweep.map(results.sweeps.index)
        shapes = np.arange(len(marks))
    else:  # the number of a setting, so that it has one colour in all pictures
        colours = marks.index
        shapes = marks.index // len(LINES)
    labels = results.labels[marks.index]
    # Computed at another speed than its reference.
    if cost == "step_time_s":
        labels = labels + marks.share_left_out.notna().map({True: " (!)", False: ""})
    # From the start again where there are not as many.
    return marks.assign(
        label=labels,
        colour=[LINES[number % len(LINES)] for number in colours],
        shape=[MARKERS[number % len(MARKERS)] for number in shapes],
    )


def draw_scatter(axes: Axes, marks: pd.DataFrame, cost: str, score: str) -> None:
    spread = plus_minus(marks, score)
    for number, mark in marks.iterrows():
        axes.errorbar(
            mark[cost], mark[score], xerr=mark[f"{cost}_std"], yerr=spread[number],
            fmt=mark["shape"], color=mark.colour, ecolor=(mark.colour, 0.6), elinewidth=0.9,
            capsize=2.5, markersize=6, label=mark.label,
        )  # fmt: skip
    plain(axes, grid="both")
    axes.margins(0.12)
    # Whole range from zero, unless a score can be negative.
    if marks[score].min() >= 0 > axes.get_ylim()[0]:
        axes.set_ylim(bottom=0)  # no score is below
    shown = ""
    if marks[f"{score}_std"].notna().any():
        shown = " (mean ± std over seeds)"
    elif spread.notna().any():
        shown = " (± standard error)"
    axes.set_ylabel(f"{score_name(score)}, test set{shown}")
    if cost == "step_time_s":
        # As a step line from its first point to its last; a single point is no trade-off.
        sign = -1 if score in LESS_IS_BETTER else 1
        # The front is of quality where more is better.
        best = front(marks.step_time_s, qualities=sign * marks[score])
        if marks.share_left_out.notna().any():
            note = "(!) computed at another speed: no trade-off front"  # it would show the machine
            axes.set_title(note, fontsize=8.5, color=INK, loc="left")
        elif len(best) > 1:
            axes.step(
                best.cost, sign * best.quality, "--", where="post", color=INK, lw=1.1, zorder=1,
                label="trade-off front: nothing is faster and better",
            )  # fmt: skip
    # Ratios of 1 to 100 need a logarithmic axis.
    elif marks[cost].max() > 8 * marks[cost].min():
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())


def _clouds(rows: pd.DataFrame) -> list[str]:
    prefix = "compute_s_"
    return sorted(name.removeprefix(prefix) for name in rows
                  if name.startswith(prefix) and not name.endswith("_std"))  # fmt: skip


def _write_step_time(path: Path, results: Results, title: str) -> Path:
    """A bar for each setting and cloud: how its ranks' main thread spent a step."""
    rows = results.rows.assign(label=results.labels).sort_values("step_time_s", kind="stable")
    bars = [(row, cloud) for _, row in rows.iterrows() for cloud in _clouds(rows)
            if pd.notna(row[f"compute_s_{cloud}"])]  # fmt: skip
    figure = canvas(
        f"{title}: where a step's time goes", width_in=8, height_in=1.7 + 0.3 * len(bars)
    )
    axes = figure.subplots()
    parts = [
        (name, np.nan_to_num([row.get(f"{kind}_{cloud}", 0.0) for row, cloud in bars]), colour)
        for kind, (name, colour) in PARTS.items()
    ]
    stacked(axes, labels=[f"{row.label}  {cloud}" for row, cloud in bars], parts=parts)
    medians = [row.step_time_s for row, _ in bars]
    axes.plot(medians, range(len(bars)), "|", color=INK, ms=14, label="step time, median")
    axes.set_xlabel("seconds in a step, mean over steps, ranks of the cloud and seeds")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(ncols=5, **_LEGEND)
    return save(figure, path=path)


def curves_of(results: Results) -> tuple[str, Curves]:
    """The label of the reference, "" if there is none; and the losses of the settings, the
    reference first, then the best ones. Empty if no two have a loss. Made from events.jsonl, which
    MLflow does not store."""
    rows = results.rows
    alone = rows.cluster == ONE_CLOUD
    plain = rows.compression == UNCOMPRESSED
    # All ranks in one cloud, else no compression: the first that there is.
    chosen = [*rows.index[alone], *rows.index[plain]][:1]
    curves = {}
    reference = ""
    for number in [*chosen, *rows.index.drop(chosen)]:
        row = rows.loc[number]
        if not (losses := _losses(results.of_row[number])).empty:
            label = _label_of_curve(row, results)
            curves[label] = losses
            if number in chosen:
                reference = label
        # The reference is one more.
        if len(curves) - bool(reference) == MAX_CURVES:
            break
    # One curve has nothing to be compared with.
    if len(curves) < 2:
        return "", {}
    return reference, curves


def _label_of_curve(row: Any, results: Results) -> str:
    if row.cluster in row.setting or results.rows.cluster.nunique() == 1:
        return str(row.setting)
    return f"{row.setting}, {row.cluster}"


def colours_of_curves(results: Results) -> dict[str, str]:
    """Return the colour of each setting, which it has in the other pictures too, by the label of
    its curve."""
    return {
        _label_of_curve(row, results): LINES[int(number) % len(LINES)]
        for number, row in results.rows.iterrows()
    }


def _losses(runs: Sequence[PointResult]) -> pd.DataFrame:
    """Return the losses of the finished runs, a column for each seed."""
    by_seed = {}
    for run in runs:
        if run.status == "finished":
            steps = read_run(run.run_dir / EVENTS_FILE).steps
            by_seed[run.settings.get("seed")] = pd.Series(steps["loss"], steps.step, dtype=float)
    # A loss that is not finite is no point of a curve.
    losses = pd.DataFrame(by_seed).replace([np.inf, -np.inf], np.nan)
    return losses.dropna(how="all").dropna(axis="columns", how="all")


def write_losses(
    folder: Path, reference: str, curves: Curves, title: str, colours: Mapping[str, str]
) -> Path:
    heights = [1]
    height_in = 4.6
    if reference:  # a second panel shows the differences to it
        heights = [2, 1]
        height_in = 6.2
    figure = canvas(f"{title}: training loss", width_in=8, height_in=height_in)
    panels = column(figure, heights)
    others = {label: losses for label, losses in curves.items() if label != reference}
    if reference:
        # Broad and pale, so that it stays visible under an equal curve.
        pale = {"color": colours[reference], "linewidth": 4.5, "alpha": 0.35}
        _draw_losses(panels[0], losses=curves[reference], style=pale, label=reference)
        panels[1].axhline(0, color=INK, linewidth=0.8, zorder=0)
        panels[1].set_ylabel(f"minus {reference},\nsame seed")
    for index, (setting, losses) in enumerate(others.items()):
        label = setting
        style = {"color": colours[setting], "linewidth": 1.6,
                 "linestyle": DASHES[1 + index % (len(DASHES) - 1)]}  # fmt: skip
        # Seed by seed, as the seed moves a loss more than most compressors do.
        differences = losses - curves[reference] if reference else losses.iloc[:0]
        if differences.notna().any(axis=None):
            _draw_losses(
                panels[1], losses=differences.dropna(axis="columns", how="all"), style=style
            )
            largest = differences.abs().max(axis=None)
            # Equal to the bit is a result, which a line at zero does not show.
            if largest:
                label += f": differs by ≤ {largest:.2g}"
            else:
                label += ": equal at every step"
        _draw_losses(panels[0], losses, style, label=label)
    seeds = max(len(losses.columns) for losses in others.values())
    loss = "training loss"
    if seeds > 1:
        loss += f"\n(mean, ± std of {seeds} seeds)"
    panels[0].set_ylabel(loss)
    panels[0].legend(frameon=False, fontsize=8.5)
    panels[-1].set_xlabel("step")
    for axes in panels:
        over_steps(axes)
    return save(figure, path=folder / LOSSES)


def _draw_losses(
    axes: Axes, losses: pd.DataFrame, style: dict[str, Any], label: str | None = None
) -> None:
    """Smoothed mean over seeds with a band of one standard deviation, at common steps."""
    # Only steps that all seeds have.
    smooth = losses.dropna().apply(lambda loss: smoothed(loss.to_numpy())[0])
    if smooth.empty:
        return
    mean = smooth.mean(axis="columns")
    std = smooth.std(axis="columns")
    axes.plot(mean.index, mean, label=label, **style)
    # A single seed has no band.
    if len(losses.columns) > 1:
        low = mean - std
        high = mean + std
        axes.fill_between(mean.index, low, high, color=style["color"], alpha=0.15, linewidth=0)


def write_swept_picture(folder: Path, swept: Swept, title: str) -> Path:
    """Quality over the setting; the rows without it are bands."""
    figure = canvas(
        f"{title}: quality by {swept.name}", width_in=8, height_in=1.3 + 3.9 * len(swept.scores)
    )
    panels = column(figure, heights=[1] * len(swept.scores))
    for axes, score in zip(panels, swept.scores, strict=True):
        _draw_swept(axes, swept, score)
    panels[-1].set_xlabel(swept.setting)
    handles = [Line2D([], [], label=line, **_style(n)) for n, line in enumerate(swept.lines)]
    for (_, row), colour in zip(swept.beside.iterrows(), BANDS, strict=False):
        label = f"{row.setting}: {spread_text(row, score=swept.scores[0])}"
        handles.append(Line2D([], [], color=colour, linewidth=5, label=label))
    num_columns = legend_columns([str(handle.get_label()) for handle in handles])
    figure.legend(handles=handles, ncols=num_columns, **_LEGEND)
    return save(figure, path=folder / SWEPT_PICTURE)


def _draw_swept(axes: Axes, swept: Swept, score: str) -> None:
    beside = swept.beside.dropna(subset=score)
    ends = plus_minus(beside, score).fillna(0.0)
    for (number, row), colour in zip(beside.iterrows(), BANDS, strict=False):
        low = row[score] - ends[number]
        high = row[score] + ends[number]
        axes.axhspan(low, high, color=colour, alpha=0.4, linewidth=0, zorder=0)
        axes.axhline(row[score], color=colour, linewidth=1.4, zorder=1)
    values = sorted(swept.rows.value.unique())
    apart = 0.0
    if values[0] > 0 and values[-1] >= 50 * values[0]:
        axes.set_xscale("log")
    else:  # whiskers do not overlap
        apart = min(np.diff(values)) * min(0.04, 0.2 / len(swept.lines))
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
    counts = pd.concat([swept.rows, swept.beside]).finished
    num_seeds = " to ".join(map(str, dict.fromkeys((counts.min(), counts.max()))))
    seeds = ""
    if num_seeds != "1":
        seeds = f"\n(mean ± std over {num_seeds} seeds)"
    elif plus_minus(swept.rows, score).notna().any():
        seeds = "\n(± standard error)"
    axes.set_ylabel(f"{score_name(score)}{of}{seeds}")
    plain(axes, grid="both")


def _style(index: int) -> dict[str, Any]:
    """A colour and marker for each line; another dash style once these are used up."""
    number = index % len(LINES)
    dash = DASHES[index // len(LINES) % len(DASHES)]
    return {"color": LINES[number], "marker": MARKERS[number], "linestyle": dash}
