"""What was planned: a table in the terminal, plan.json and plan.png. Searches nothing itself."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, ScalarFormatter

from xcloud.base.units import human_bandwidth, human_bytes, human_seconds
from xcloud.planner.search import (
    BANDWIDTHS,
    AtCount,
    Ranked,
    Space,
    StepAt,
    crossings,
    over_micro_batches,
    step_at,
)
from xcloud.record.run_record import epochs_text
from xcloud.record.timeline import PLAN_FILE
from xcloud.show.canvas import (
    DASHES,
    FAINT,
    INK,
    LINES,
    TITLE_POINTS,
    canvas,
    plain,
    save,
    wrapped,
)
from xcloud.show.tables import Column, console_of, print_table, say
from xcloud.simulator.plan import NO_COMPRESSION, Plan, Priced
from xcloud.simulator.pricing import OverEpochs, Pricer

if TYPE_CHECKING:
    from rich.console import Console

_LEFT = ("strategy", "split", "m", "schedule", "compression")
NAMES: list[Column | str] = [Column(""), *(Column(heading=name, right=False) for name in _LEFT)]
FORMULAS = (("free", "(1): a free link"), ("overlapped", "(2'): transfers overlap"),
            ("blocking", "(2): transfers block"))  # fmt: skip


@dataclass(frozen=True)
class Report:
    """The report of a search: everything that is shown of it.

    search_s: the seconds that the search took.
    stale: the reasons why the profile may not hold.
    not_planned: the strategies that were left out, each with the reason.
    over_epochs: the seconds over epochs of plans that keep rows of frozen parts. The prices of
        such plans are those of the first epoch.
    """

    pricer: Pricer
    space: Space
    ranked: Ranked
    search_s: float = 0.0
    stale: Sequence[str] = ()
    not_planned: Mapping[str, str] = field(default_factory=dict)
    over_epochs: Mapping[Plan, OverEpochs] = field(default_factory=dict)

    @property
    def best(self) -> Plan:
        return self.ranked.best[0].plan

    @property
    def pipeline(self) -> Plan | None:
        """The first plan shown that cuts the model; None if none does."""
        # The job's own plan counts, too: all before it may hold whole models.
        shown = (*self.ranked.best, self.ranked.own)
        return next((one.plan for one in shown if len(one.plan.ends) > 1), None)

    @cached_property
    def over_micro_batches(self) -> list[AtCount]:
        """The step of `pipeline` at every number of micro-batches."""
        if self.pipeline is None:
            return []
        counts = self.space.counts(self.pricer.arranged[self.pipeline.strategy])
        return over_micro_batches(self.pricer, plan=self.pipeline, counts=counts)

    @cached_property
    def crossings(self) -> dict[str, float]:
        return crossings(*self._over_lines)

    @cached_property
    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """The points (bandwidth, step) of each compressor."""
        step_s, names = self._over_lines
        # Fewer than are searched for crossings: 100 kbit/s to 100 Gbit/s.
        rates = [rate for rate in BANDWIDTHS if 1e5 <= rate <= 1e11]
        return {name: [(rate, step_s(name, rate)) for rate in rates] for name in names}

    @cached_property
    def _over_lines(self) -> tuple[StepAt, Sequence[str]]:
        """The step over bandwidth, and the compressors to show; none where there is no line."""
        has_lines = self.pricer.arranged[self.best.strategy].layout.crosses_clouds
        shown = self.space.compressions if has_lines else ()
        return step_at(self.pricer, plan=self.best), shown

    def split(self, plan: Plan) -> str:
        """Return a plan's cut in words: "3 | 5 blocks", or "whole" where every rank has all."""
        if len(plan.ends) == 1:
            return "whole"
        counts = self.counts(plan)
        if counts:
            return f"{' | '.join(map(str, counts))} blocks"
        return " | ".join(map(str, plan.ends))

    def counts(self, plan: Plan) -> list[int]:
        """Return the blocks of each stage; empty for a model that is not cut freely."""
        pieces = self.pricer.profile.pieces
        blocks = [sum(piece.blocks for piece in pieces[a:b]) for a, b in plan.spans]
        if not all(piece.blocks for piece in pieces):
            return []
        return blocks

    def row(self, priced: Priced, advice: str) -> dict[str, Any]:
        plan = priced.plan
        epochs = self.over_epochs.get(plan)
        averaging = self.pricer.arranged[plan.strategy].strategy.averaging
        changes = averaging is not None and averaging.traits.changes_results
        touches = {"compression": plan.compression != NO_COMPRESSION, "strategy": changes}
        return {
            "strategy": plan.strategy,
            "split": self.split(plan),
            "micro_batches": plan.micro_batches,
            "schedule": plan.schedule_label,
            "compression": plan.compression,
            "predicted_step_time_s": priced.step_s,
            "over_epochs": None if epochs is None else epochs.as_table(),
            "bubble_ratio": priced.bubble_ratio,
            "bytes_per_step": round(priced.bytes_per_step),
            "memory_bytes": dict(priced.memory),
            "bound": priced.bound,
            "spent_s": dict(priced.spent_s),
            "change_next": advice,
            "touches_quality": [name for name, does in touches.items() if does],
        }

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        best = self.ranked.best
        return [self.row(priced, advice=self.ranked.advice(i)) for i, priced in enumerate(best)]

    @cached_property
    def own_row(self) -> dict[str, Any]:
        return self.row(self.ranked.own, advice=self.ranked.advice(None))

    @property
    def best_count(self) -> AtCount | None:
        """The entry with the fastest step over the numbers of micro-batches."""
        return min(self.over_micro_batches, key=lambda entry: entry.step_s, default=None)

    def as_table(self, chosen: Priced | None) -> dict[str, Any]:
        """Return what plan.json holds; "always" and "never" stand for an infinite or no bandwidth.

        chosen: the plan that is run; None if none is.
        """
        profile = self.pricer.profile
        best_count = self.best_count
        # With rows that are kept a step gets shorter after the first epoch.
        mean_s = None
        if chosen is not None:
            epochs = self.over_epochs.get(chosen.plan)
            mean_s = chosen.step_s if epochs is None else epochs.mean_s
        return {
            "predicted_step_time_s": mean_s,
            "chosen": None if chosen is None else self.row(chosen, advice=""),
            "own": self.own_row,
            "plans": self.rows,
            "num_plans": self.ranked.num_plans,
            "num_simulated": self.ranked.num_simulated,
            "search_s": self.search_s,
            "profile": {"of": dict(profile.of), "measured_at_s": profile.measured_at_s,
                        "other_bytes": profile.other_bytes, "stale": list(self.stale)},
            "pays_below_bits_per_s": {
                name: "always" if math.isinf(rate) else rate or "never"
                for name, rate in self.crossings.items()
            },
            "step_time_over_bandwidth": {n: [list(p) for p in c] for n, c in self.curves.items()},
            "over_micro_batches": [entry._asdict() for entry in self.over_micro_batches],
            "best_micro_batches": None if best_count is None else best_count.micro_batches,
            "not_planned": dict(self.not_planned),
        }  # fmt: skip


def write_plan(folder: Path, report: Report, chosen: Priced | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report.as_table(chosen), indent=2) + "\n"
    (folder / PLAN_FILE).write_text(text, encoding="utf-8")


# In the terminal.


def print_plans(report: Report, console: Console | None = None) -> None:
    console = console_of() if console is None else console
    profile = report.pricer.profile
    ranked = report.ranked
    say(
        console,
        text=f"{ranked.num_plans:,} plans, {ranked.num_simulated:,} simulated in "
        f"{report.search_s:.1f} s; profile: {profile.measured_on}",
    )
    for why in report.stale:
        say(console, text=f"the profile may not hold: {why}", style="yellow")
    rows = {str(i): row for i, row in enumerate(report.rows, 1)} | {"yours": report.own_row}
    last = [Column(name, right=False, wraps=True, spare=4) for name in ("bound by", "next")]
    figures = [Column("bubble", spare=3), Column("bytes", spare=2), Column("memory", spare=1)]
    columns = [*NAMES, Column("step", spare=-1), *figures, *last]
    print_table(console, columns, rows=[row_cells(name, row=row) for name, row in rows.items()])
    for line in _notes(report, rows):
        say(console, text=line)


def row_cells(name: str, row: Mapping[str, Any]) -> list[str]:
    """Return the texts of a plan in the table, with a star where quality is touched."""
    starred = [
        f"{row[key]}*" if key in row["touches_quality"] else row[key]
        for key in ("strategy", "compression")
    ]
    return [
        name, starred[0], row["split"], str(row["micro_batches"]), row["schedule"], starred[1],
        human_seconds(row["predicted_step_time_s"]), f"{row['bubble_ratio']:.2f}",
        human_bytes(row["bytes_per_step"]), human_bytes(max(row["memory_bytes"].values())),
        row["bound"], row["change_next"],
    ]  # fmt: skip


def _notes(report: Report, rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    own = report.own_row["strategy"]
    # Another strategy changes what is learned, so whoever keeps theirs wants the best of it.
    place = next(name for name, row in rows.items() if row["strategy"] == own)
    if place not in ("1", "yours"):
        yield f"same strategy as yours ({own}): best is row {place}"
    memory = "memory: weights, gradients, moments, activations and messages of the fullest rank"
    if other := report.pricer.profile.other_bytes:
        memory += f", and {human_bytes(other)} of program and work space, as in the trial"
    yield memory
    yield (
        "bubble: waiting / computing, without the waits of averaging, as in the table of a run; "
        "bytes: that leave clouds in a step, all kinds together"
    )
    yield "* changes what is learned, too; quality is not predicted (docs/planning.md)"
    for name, row in rows.items():
        if epochs := row["over_epochs"]:
            which = "yours" if name == "yours" else f"plan {name}"
            mean = human_seconds(epochs["mean_s"])
            yield f"{which}: {mean} on average over the run, {epochs_text(epochs)}"
    for name, why in report.not_planned.items():
        yield f"{name} is not planned: {why}"
    if report.crossings:
        yield (
            "a step takes less with this compressor, at the best plan's other settings, on a line "
            "of less than"
        )
        for name, pays_below in report.crossings.items():
            yield f"  {name:<12} {bandwidth_text(pays_below)}"
    if best := report.best_count:  # the paper's formulas are in plan.json
        each = (f"{e.micro_batches}: {human_seconds(e.step_s)}" for e in report.over_micro_batches)
        yield (
            f"best m = {best.micro_batches}: bubble {best.bubble_ratio:.3f}; "
            f"step by m, with the best pipeline's other settings: {', '.join(each)}"
        )


def bandwidth_text(pays_below: float) -> str:
    if math.isinf(pays_below):
        return "any bandwidth"
    if pays_below:
        return human_bandwidth(pays_below)
    return "none: it never pays"


# As a picture.


def write_plan_picture(path: Path, report: Report) -> bool:
    """Draw step time over bandwidth, and the bubble over micro-batches.

    Return False if there is nothing to draw: one cloud, and no pipeline.
    """
    parts = (_over_bandwidth, report.curves), (_over_micro_batches, report.over_micro_batches)
    draws = [draw for draw, has in parts if has]
    if not draws:
        return False
    figure = canvas("", width_in=8, height_in=0.2 + 4.2 * len(draws))
    for axes, draw in zip(figure.subplots(len(draws), 1, squeeze=False)[:, 0], draws, strict=True):
        axes.set(xscale="log", yscale="log")
        # A picture may span less than a decade, and ten labels of one lie on each other.
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        draw(axes, report)
        plain(axes, grid="both")
        axes.legend(frameon=False, fontsize=8)
    save(figure, path=path)
    return True


def _titled(axes: Axes, text: str, report: Report, plan: Plan) -> None:
    of = f"{text}: {plan.strategy}, {report.split(plan)}"
    axes.set_title(wrapped(of, width_in=8), fontsize=TITLE_POINTS, loc="left")


def _over_bandwidth(axes: Axes, report: Report) -> None:
    """Draw a line for each compressor, and a mark where it begins to pay."""
    best = report.best
    _titled(axes, text="predicted step time over bandwidth", report=report, plan=best)
    for number, (name, points) in enumerate(report.curves.items()):
        colour = LINES[number % len(LINES)]
        dash = DASHES[number % len(DASHES)]  # compressors of equal bytes lie on each other
        label = name
        at = report.crossings.get(name, 0.0)
        if at:
            label += f", pays below {bandwidth_text(at)}"
        axes.plot(*zip(*points, strict=True), linestyle=dash, color=colour, label=label)
        if at and points[0][0] < at < points[-1][0]:
            # The mark stands on the compressor's own curve, where both cost the same.
            there = report.pricer.at_bandwidth(at)
            axes.plot(at, there.step_s(best._replace(compression=name)), "o", color=colour)
    for bits_per_s in report.pricer.bandwidths(best.strategy):
        axes.axvline(bits_per_s, color=INK, linewidth=0.8, linestyle=":",
                     label=f"your line, {human_bandwidth(bits_per_s)}")  # fmt: skip
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: human_bandwidth(rate)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda step_s, _: human_seconds(step_s)))
    settings = f"m = {best.micro_batches}, {best.schedule_label}"
    axes.set(xlabel=f"bandwidth between clouds; {settings}", ylabel="step")


def _over_micro_batches(axes: Axes, report: Report) -> None:
    """Draw the bubble as simulated and by the formulas, and a mark where the step is fastest."""
    counted = report.over_micro_batches
    plan = report.pipeline
    best = report.best_count
    assert plan is not None and best is not None
    _titled(axes, text=f"bubble over micro-batches, {plan.compression}", report=report, plan=plan)
    counts = [entry.micro_batches for entry in counted]
    for (name, label), colour in zip(FORMULAS, LINES[1:], strict=False):
        # The paper's formulas as dashed lines beside the simulated points.
        values = [getattr(entry, name) for entry in counted]
        axes.plot(counts, values, "--", color=colour, linewidth=1, label=label)
    axes.plot(counts, [e.bubble_ratio for e in counted], "o", color=LINES[0], markersize=4,
              label="simulated")  # fmt: skip
    axes.axvline(best.micro_batches, color=FAINT, linewidth=0.8, linestyle=":",
                 label=f"fastest step: m = {best.micro_batches}")  # fmt: skip
    axes.set_xticks(counts)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    axes.set(xlabel="micro-batches of a step", ylabel="bubble ratio: idle / computing")
