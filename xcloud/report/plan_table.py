"""Print what was planned: the ranked plans, where compressors pay, the paper's formulas."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xcloud.base.units import human_bandwidth, human_bytes, human_seconds
from xcloud.plan.report import Report
from xcloud.plan.search import AtCount, Crossing
from xcloud.report.run_table import epochs_text
from xcloud.report.tables import WIDTH_OF_A_FILE

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = WIDTH_OF_A_FILE + 60


def print_plans(report: Report, console: Console | None = None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if console is None:
        console = Console(width=None if sys.stdout.isatty() else WIDTH)

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    profile, ranked = report.pricer.profile, report.ranked
    say(
        f"{ranked.num_plans:,} plans, {ranked.num_simulated:,} simulated in "
        f"{report.search_s:.1f} s; profile: {profile.measured_on}"
    )
    for why in report.stale:
        say(f"the profile may not hold: {why}", "yellow")
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("", "strategy", "split", "m", "schedule", "compression"):
        table.add_column(heading, no_wrap=True)
    for heading in ("step", "bubble", "bytes", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bound by")
    table.add_column("next")
    rows = [(str(i + 1), row) for i, row in enumerate(report.rows)]
    rows.append(("yours", report.row(ranked.own, ranked.advice_to_own)))
    for name, row in rows:
        starred = ["strategy", "compression"]
        cells = [row["strategy"], row["split"], str(row["micro_batches"]), row["schedule"],
                 row["compression"]]  # fmt: skip
        for index, key in ((0, starred[0]), (4, starred[1])):
            cells[index] += "*" * (key in row["touches_quality"])
        table.add_row(
            name, *map(Text, cells),
            human_seconds(row["predicted_step_time_s"]), f"{row['bubble_ratio']:.2f}",
            human_bytes(row["bytes_per_step"]), human_bytes(max(row["memory_bytes"].values())),
            row["bound"], row["change_next"],
        )  # fmt: skip
    console.print(table)
    own = ranked.own.plan.strategy
    place = next((name for name, row in rows if row["strategy"] == own), "yours")
    if place not in ("1", "yours"):
        say(f"same strategy as yours ({own}): best is row {place}")
    say("* changes what is learned, too; quality is not predicted (docs/planning.md)")
    for name, row in rows:
        if epochs := row["over_epochs"]:
            said = "yours" if name == "yours" else f"plan {name}"
            say(f"{said}: {human_seconds(epochs['mean_s'])} on average over the run, "
                f"{epochs_text(epochs)}")  # fmt: skip
    for name, why in report.not_planned.items():
        say(f"{name} is not planned: {why}")
    if report.crossings:
        say("a step takes less with this compressor, at the best plan's other settings, on a line "
            "of less than")  # fmt: skip
        for crossing in report.crossings:
            say(f"  {crossing.compression:<12} {bandwidth_text(crossing)}")
    if report.over_micro_batches:
        say(best_m(report.over_micro_batches))


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
