"""What-if plans as a printed table, and as plain containers for JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.what_if.planning import Planned, WhatIfPlan
from xcloud.base.units import human_bytes, human_duration, human_seconds
from xcloud.planner.plan_report import NAMES
from xcloud.show.tables import Column, console_of, print_table, say

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
    console = console_of()
    numbers = ["step", "tokens/s", "busy", "bubble", "egress/Mtok", "memory"]
    costs = ["cost/Mtok"] if has_prices else []
    columns: list[Column | str] = [*NAMES, *numbers, *costs, Column("bound by", right=False)]
    cells = []
    for number, row in enumerate(rows):
        priced, (bound, share) = row.priced, row.bound
        cells.append([
            str(number + 1), row.name, row.split, str(row.plan.micro_batches),
            row.plan.schedule_label, row.plan.compression, human_seconds(priced.step_s),
            f"{row.tokens_per_s:,.0f}", f"{row.busy:.0%}", f"{priced.bubble_ratio:.2f}",
            human_bytes(row.egress_bytes), human_bytes(max(priced.memory.values())),
            *([f"{row.cost:.3g}"] if has_prices else []), f"{bound} {share:.0%}",
        ])  # fmt: skip
    print_table(console, columns, cells)
    for note in (
        f"{planned.num_plans:,} plans, {planned.num_simulated:,} simulated, in {took_s:.1f} s; "
        "the best that an approximate search found of each strategy and compressor",
        "inside: stages over which a cloud's ranks are spread; busy: share of all ranks' time "
        "that computes; Mtok: a million tokens; compression and local updates touch what is "
        "learned, which is not predicted",
        *(f"left out: {name}: {why}" for name, why in planned.left_out.items()),
    ):
        say(console, note)


def total_of(row: WhatIfPlan, tokens: float, has_prices: bool) -> str:
    """Say what the first plan takes for all tokens of a run."""
    millions = tokens / 1e6
    took = human_duration(tokens / row.tokens_per_s)
    sent = human_bytes(millions * row.egress_bytes)
    cost = f", cost {millions * row.cost:,.3g}" * has_prices
    return f"{millions:,g} Mtok with plan 1: {took}, {sent} leave clouds{cost}"


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
