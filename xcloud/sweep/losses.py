"""losses.png: training losses of a sweep's settings, and below their differences to the reference,
seed by seed. The reference is the single cloud, else the setting without compression. Made from
events.jsonl, which MLflow does not store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from xcloud.record.events import EVENTS_FILE
from xcloud.record.summary import read_run
from xcloud.report.figures import INK, LINES, canvas, column, over_steps, save, smoothed
from xcloud.sweep.points import UNCOMPRESSED
from xcloud.sweep.results import ONE_CLOUD, Row

LOSSES = "losses.png"

MOST_CURVES = 8  # more cannot be told apart
STYLES = ("--", ":", "-.")
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Loss of a row at steps, by seed: [num steps] each."""

    label: str
    by_seed: Mapping[object, tuple[NDArray[np.int64], Values]]

    def minus(self, other: Curve) -> dict[object, tuple[NDArray[np.int64], Values]]:
        """Differences at common steps, for each common seed."""
        found = {}
        for seed in self.by_seed.keys() & other.by_seed.keys():
            (step, loss), (there, base) = self.by_seed[seed], other.by_seed[seed]
            both, i, j = np.intersect1d(step, there, return_indices=True)
            if len(both):
                found[seed] = (both, loss[i] - base[j])
        return found


def curves_of(rows: Sequence[Row]) -> tuple[Curve | None, list[Curve]]:
    """The reference, if there is one, and the other settings, best first; empty if no two have
    a loss."""
    chosen = _reference(rows)
    reference, others = None, []
    for row in sorted(rows, key=lambda row: row is not chosen):
        by_seed = {}
        for result in row.results:
            steps = read_run(result.run_dir / EVENTS_FILE).steps
            step, loss = np.asarray(steps.step), np.asarray(steps["loss"])
            known = np.isfinite(loss)
            if result.status == "finished" and known.any():
                by_seed[result.settings.get("seed")] = step[known], loss[known]
        if by_seed and row is chosen:
            reference = Curve(_name(row, rows), by_seed)
        elif by_seed:
            others.append(Curve(_name(row, rows), by_seed))
        if len(others) == MOST_CURVES:
            break
    return (reference, others) if len(others) + (reference is not None) > 1 else (None, [])


def write_losses(
    folder: Path, reference: Curve | None, others: Sequence[Curve], title: str
) -> Path:
    figure = canvas(f"{title}: training loss", 8, 6.2 if reference else 4.6)
    panels = column(figure, [2, 1] if reference else [1])
    if reference:
        # Broad and pale, so that it stays visible under an equal curve.
        pale = {"color": "#B5B5B5", "linewidth": 4.5}
        _draw(panels[0], reference.by_seed, pale, reference.label)
        panels[1].axhline(0, color=INK, linewidth=0.8, zorder=0)
        panels[1].set_ylabel(f"minus {reference.label},\nsame seed")
    for index, curve in enumerate(others):
        style = {"color": LINES[index % len(LINES)], "linewidth": 1.6,
                 "linestyle": STYLES[index % len(STYLES)]}  # fmt: skip
        label = curve.label
        if reference and (differences := curve.minus(reference)):
            _draw(panels[1], differences, style)
            largest = max(float(np.abs(values).max()) for _, values in differences.values())
            label += ": equal at every step" if largest == 0 else f": differs by ≤ {largest:.2g}"
        _draw(panels[0], curve.by_seed, style, label)
    seeds = max(len(curve.by_seed) for curve in others)
    panels[0].set_ylabel("training loss" + (f"\n(mean, ± std of {seeds} seeds)" * (seeds > 1)))
    panels[0].legend(frameon=False, fontsize=8.5)
    panels[-1].set_xlabel("step")
    for axes in panels:
        over_steps(axes)
    return save(figure, folder / LOSSES)


def _draw(
    axes: Axes,
    by_seed: Mapping[object, tuple[NDArray[np.int64], Values]],
    style: dict[str, Any],
    label: str | None = None,
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


def _name(row: Row, rows: Sequence[Row]) -> str:
    """The label, plus the cluster if there are several and the label does not name it."""
    is_clear = row.cluster in row.label or len({other.cluster for other in rows}) == 1
    return row.label if is_clear else f"{row.label}, {row.cluster}"


def _reference(rows: Sequence[Row]) -> Row | None:
    alone = [row for row in rows if row.cluster == ONE_CLOUD]
    plain = [row for row in rows if row.compression == UNCOMPRESSED]
    return next(iter([*alone, *plain]), None)
