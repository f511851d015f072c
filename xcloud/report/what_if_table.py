"""What was planned in a what-if plan, as a table for people and as one for JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xcloud.base.units import human_bytes, human_seconds
from xcloud.plan.what_if import Planned, WhatIfPlan
from xcloud.report.plan_table import WIDTH

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
