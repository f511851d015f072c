"""Print what was planned: the ranked plans, where compressors pay, the best number of
micro-batches; and what-if plans, also as a table for JSON.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xcloud.base.units import human_bandwidth, human_bytes, human_seconds
from xcloud.plan.report import Report
from xcloud.plan.search import AtCount, Crossing
from xcloud.plan.what_if import Planned, WhatIfPlan
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


ORDERS: Mapping[str, Callable[[WhatIfPlan], float]] = {
    "step": lambda row: row.priced.step_s,
    "cost": lambda row: row.cost,
    "egress": lambda row: row.egress_bytes,
}


def ranked(planned: Planned, order: str) -> list[WhatIfPlan]:
    return sorted(planned.rows, key=ORDERS[order])


def print_planned(
    rows: Sequence[WhatIfPlan], planned: Planned, has_prices: bool, took_s: float
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else WIDTH + 20)
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("", "strategy", "split", "m", "schedule", "compression"):
        table.add_column(heading, no_wrap=heading != "strategy")
    for heading in ("step", "tokens/s", "busy", "bubble", "egress/Mtok", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    if has_prices:
        table.add_column("cost/Mtok", justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for number, row in enumerate(rows):
        priced, (bound, share) = row.priced, row.bound
        table.add_row(
            str(number + 1), row.name, row.split, str(row.plan.micro_batches),
            row.plan.schedule_label, row.plan.compression, human_seconds(priced.step_s),
            f"{row.tokens_per_s:,.0f}", f"{row.busy:.0%}", f"{priced.bubble_ratio:.2f}",
            human_bytes(row.egress_bytes), human_bytes(max(priced.memory.values())),
            *([f"{row.cost:.3g}"] if has_prices else []), f"{bound} {share:.0%}",
        )  # fmt: skip
    console.print(table)
    notes = [
        f"{planned.num_plans:,} plans, {planned.num_simulated:,} simulated, in {took_s:.1f} s; "
        "the best that an approximate search found of each strategy and compressor",
        "inside: stages that a cloud's ranks are dealt to; busy: share of all ranks' time that "
        "computes; Mtok: a million tokens; compression and local updates touch what is learned, "
        "which is not predicted",
        *(f"left out: {name}: {why}" for name, why in planned.left_out.items()),
    ]
    for note in notes:
        console.print(Text(note), soft_wrap=True)


def as_table(rows: Sequence[WhatIfPlan], planned: Planned) -> dict[str, Any]:
    return {
        "plans": [_row(row) for row in rows],
        "left_out": dict(planned.left_out),
        "num_plans": planned.num_plans,
        "num_simulated": planned.num_simulated,
    }


def _row(row: WhatIfPlan) -> dict[str, Any]:
    plan, priced, (bound, share) = row.plan, row.priced, row.bound
    return {
        "strategy": row.name,
        "split": row.split,
        "ends": list(plan.ends),
        "micro_batches": plan.micro_batches,
        "schedule": plan.schedule_label,
        "compression": plan.compression,
        "step_s": priced.step_s,
        "tokens_per_s": row.tokens_per_s,
        "busy": row.busy,
        "model_flop_utilisation": row.mfu,
        "bubble_ratio": priced.bubble_ratio,
        "egress_bytes_per_million_tokens": row.egress_bytes,
        "memory_bytes": dict(priced.memory),
        "cost_per_million_tokens": {"compute": row.compute_cost, "egress": row.egress_cost},
        "bound": {"by": bound, "share": share},
        "spent_s": dict(priced.spent_s),
    }
