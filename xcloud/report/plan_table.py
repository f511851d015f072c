"""Print what was planned: the ranked plans, where compressors pay, the best number of
micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xcloud.base.units import human_bandwidth, human_bytes, human_seconds
from xcloud.plan.report import Report
from xcloud.plan.search import AtCount, Crossing
from xcloud.report.run_table import epochs_text
from xcloud.report.tables import WIDTH_OF_A_FILE, Column, console_of, print_table, say

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = WIDTH_OF_A_FILE + 60
_LEFT = ("strategy", "split", "m", "schedule", "compression")
NAMES: list[Column | str] = [Column(""), *(Column(name, right=False) for name in _LEFT)]


def print_plans(report: Report, console: Console | None = None) -> None:
    console = console_of(WIDTH) if console is None else console
    profile, ranked = report.pricer.profile, report.ranked
    say(
        console,
        f"{ranked.num_plans:,} plans, {ranked.num_simulated:,} simulated in "
        f"{report.search_s:.1f} s; profile: {profile.measured_on}",
    )
    for why in report.stale:
        say(console, f"the profile may not hold: {why}", "yellow")
    rows = [(str(i + 1), row) for i, row in enumerate(report.rows)]
    rows.append(("yours", report.row(ranked.own, ranked.advice_to_own)))
    last = [Column(name, right=False, wraps=True) for name in ("bound by", "next")]
    columns: list[Column | str] = [*NAMES, "step", "bubble", "bytes", "memory", *last]
    print_table(console, columns, [_cells(name, row) for name, row in rows])
    for line in _notes(report, rows):
        say(console, line)


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    starred = [
        row[key] + "*" * (key in row["touches_quality"]) for key in ("strategy", "compression")
    ]
    return [
        name, starred[0], row["split"], str(row["micro_batches"]), row["schedule"], starred[1],
        human_seconds(row["predicted_step_time_s"]), f"{row['bubble_ratio']:.2f}",
        human_bytes(row["bytes_per_step"]), human_bytes(max(row["memory_bytes"].values())),
        row["bound"], row["change_next"],
    ]  # fmt: skip


def _notes(report: Report, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    own = report.ranked.own.plan.strategy
    place = next((name for name, row in rows if row["strategy"] == own), "yours")
    if place not in ("1", "yours"):
        yield f"same strategy as yours ({own}): best is row {place}"
    yield "* changes what is learned, too; quality is not predicted (docs/planning.md)"
    for name, row in rows:
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
        for crossing in report.crossings:
            yield f"  {crossing.compression:<12} {bandwidth_text(crossing)}"
    if report.over_micro_batches:
        yield best_m(report.over_micro_batches)


def bandwidth_text(crossing: Crossing) -> str:
    if math.isinf(crossing.pays_below):
        return "any bandwidth"
    if not crossing.pays_below:
        return "none: it never pays"
    return human_bandwidth(crossing.pays_below)


def best_m(counted: Sequence[AtCount]) -> str:
    """One line: the best number of micro-batches. The paper's formulas are in plan.json."""
    best = min(counted, key=lambda entry: entry.step_s)
    others = ", ".join(f"{e.micro_batches}: {human_seconds(e.step_s)}" for e in counted)
    return (
        f"best m = {best.micro_batches}: bubble {best.bubble_ratio:.3f}; "
        f"step by m, with the best pipeline's other settings: {others}"
    )
