"""The picture of a record: its figures by row, with standard errors over seeds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from xcloud.claims.claims import Claim, Drawn, Estimate, Figure
from xcloud.claims.reproduce import Record
from xcloud.report.figures import LINES, canvas, plain, save

NUMBERED = re.compile(r"(.*), (\w+) (\d+)")  # "svd r8, block 3"


def draw(claim: Claim, record: Record, path: Path) -> bool:
    """The figures by row, means and standard errors over seeds; False if no row has them."""
    shown = claim.picture or Drawn(claim.rules[0].figure.column, where=claim.rules[0].figure.where)
    names = list(dict.fromkeys(row["row"] for row in record.rows))
    ys, xs = (
        {name: Figure(name, column, where=shown.where).of(record.rows) for name in names}
        for column in (shown.y, shown.x or shown.y)
    )
    points = {n: (x, y) for n in names if (x := xs[n]) is not None and (y := ys[n]) is not None}
    if not points:
        return False
    figure = canvas("", 7.2, 4.0)
    axes = figure.subplots()
    if shown.x:
        _scatter(axes, points, shown)
    elif any(map(NUMBERED.fullmatch, points)):
        _lines(axes, {name: y for name, (_, y) in points.items()})
        axes.set_ylabel(shown.y)
    else:
        means = [y.mean for _, y in points.values()]
        errors = [y.error or 0.0 for _, y in points.values()]
        axes.errorbar(means, list(points), xerr=errors, fmt="o", color=LINES[1], capsize=3)
        axes.margins(y=0.25)
        axes.invert_yaxis()
        axes.set_xlabel(shown.y)
    plain(axes, "both")
    save(figure, path)
    return True


def _scatter(axes: Axes, points: Mapping[str, tuple[Estimate, Estimate]], shown: Drawn) -> None:
    """Numbered points, named beside the axes from the lowest y to the highest."""
    in_order = sorted(points.items(), key=lambda point: point[1][1].mean)
    for number, (_, (x, y)) in enumerate(in_order, 1):
        axes.errorbar(x.mean, y.mean, xerr=x.error, yerr=y.error, fmt="o", color=LINES[1], ms=4)
        axes.annotate(
            str(number), (x.mean, y.mean), (4, 3), textcoords="offset points", fontsize=8
        )
    axes.set(xlabel=shown.x, ylabel=shown.y, xscale="log" if shown.log else "linear")
    names = [f"{number}  {name}" for number, (name, _) in enumerate(in_order, 1)]
    axes.legend(
        [Line2D([], [], linestyle="none")] * len(names), names, fontsize=7, loc="center left",
        bbox_to_anchor=(1.0, 0.5), handlelength=0, handletextpad=0, frameon=False,
    )  # fmt: skip


def _lines(axes: Axes, points: Mapping[str, Estimate]) -> None:
    """A line through rows whose names differ in the number at their end; level where without."""
    lines: dict[str, list[tuple[int, Estimate]]] = {}
    for name, found in points.items():
        if numbered := NUMBERED.fullmatch(name):
            line, counted, number = numbered.groups()
            lines.setdefault(line, []).append((int(number), found))
            axes.set_xlabel(counted)
        else:
            axes.axhline(found.mean, color="gray", linestyle="--", label=name)
    for colour, (line, marks) in zip(cycle(LINES), lines.items()):
        numbers, estimates = zip(*sorted(marks, key=lambda mark: mark[0]), strict=True)
        axes.errorbar(
            numbers, [e.mean for e in estimates], yerr=[e.error or 0.0 for e in estimates],
            marker="o", color=colour, capsize=3, label=line,
        )  # fmt: skip
    axes.legend(fontsize=7)
