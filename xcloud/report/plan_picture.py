"""plan.png: predicted step time over bandwidth, and the bubble over micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, ScalarFormatter

from xcloud.plan.plans import Plan
from xcloud.plan.report import Report
from xcloud.plan.search import AtCount, Crossing
from xcloud.report.figures import FAINT, INK, LINES, TITLE_POINTS, canvas, save, wrapped
from xcloud.report.plan_table import bandwidth_text

FORMULAS = (("free", "(1): a free link"), ("overlapped", "(2'): transfers overlap"),
            ("blocking", "(2): transfers block"))  # fmt: skip


def write_plan_picture(path: Path, report: Report) -> bool:
    """False if there is nothing to draw: one cloud, and no pipeline."""
    parts = (_over_bandwidth, report.curves), (_over_micro_batches, report.over_micro_batches)
    draws = [draw for draw, has in parts if has]
    if not draws:
        return False
    figure = canvas("", 8, 0.2 + 4.2 * len(draws))
    for axes, draw in zip(figure.subplots(len(draws), 1, squeeze=False)[:, 0], draws, strict=True):
        axes.set_xscale("log")
        axes.set_yscale("log")
        draw(axes, report)
        axes.grid(True, which="major", color="#E3E3E3", linewidth=0.5)
        axes.tick_params(colors=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    save(figure, path)
    return True


def _titled(axes: Axes, text: str, report: Report, plan: Plan) -> None:
    of = f"{text}: {plan.strategy}, {report.split(plan)}"
    axes.set_title(wrapped(of, 8), fontsize=TITLE_POINTS, loc="left")


def _over_bandwidth(axes: Axes, report: Report) -> None:
    """A line for each compressor; a mark where it begins to pay."""
    best = report.ranked.best[0].plan
    _titled(axes, "predicted step time over bandwidth", report, best)
    pays = {crossing.compression: crossing.pays_below for crossing in report.crossings}
    for number, (name, points) in enumerate(report.curves.items()):
        colour = LINES[number % len(LINES)]
        label, at = name, pays.get(name, 0.0)
        if at:
            label += f", pays below {bandwidth_text(Crossing(name, at))}"
        axes.plot(*zip(*points, strict=True), color=colour, label=label)
        if at and points[0][0] < at < points[-1][0]:
            there = report.pricer.at_bandwidth(at)
            axes.plot(at, there.step_s(best._replace(compression=name)), "o", color=colour)
    settings = f"m = {best.micro_batches}, {best.schedule_label}"
    axes.set_xlabel(f"bandwidth between clouds (bit/s); {settings}")
    axes.set_ylabel("step (s)")


def _over_micro_batches(axes: Axes, report: Report) -> None:
    """Simulated and by the formulas; a mark at the m whose step is fastest."""
    counted: Sequence[AtCount] = report.over_micro_batches
    plan = report.pipeline
    assert plan is not None
    _titled(axes, f"bubble over micro-batches, {plan.compression}", report, plan)
    counts = [entry.micro_batches for entry in counted]
    for (name, label), colour in zip(FORMULAS, LINES[1:], strict=False):
        values = [getattr(entry, name) for entry in counted]
        axes.plot(counts, values, "--", color=colour, linewidth=1, label=label)
    axes.plot(counts, [e.bubble_ratio for e in counted], "o", color=LINES[0], markersize=4,
              label="simulated")  # fmt: skip
    best = min(counted, key=lambda entry: entry.step_s)
    axes.axvline(best.micro_batches, color=FAINT, linewidth=0.8, linestyle=":",
                 label=f"fastest step: m = {best.micro_batches}")  # fmt: skip
    axes.set_xticks(counts)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("micro-batches of a step")
    axes.set_ylabel("bubble ratio: idle / computing")
