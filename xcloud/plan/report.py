"""What was planned, as a plain table that plan.json holds and others show. Searches nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xcloud.plan.kept import OverEpochs
from xcloud.plan.plans import Plan, Priced
from xcloud.plan.pricing import Pricer
from xcloud.plan.recorded import PLAN_FILE
from xcloud.plan.search import AtCount, Crossing, Ranked, touches_quality


@dataclass(frozen=True)
class Report:
    """Everything that is shown of a search. search_s: what the search took. stale: why the profile
    may not hold. not_planned: strategies, and why. curves: by compressor, bandwidth and step.
    pipeline: the plan of over_micro_batches. over_epochs: of plans that keep rows of frozen
    parts; their prices are those of the first epoch."""

    pricer: Pricer
    ranked: Ranked
    search_s: float
    crossings: Sequence[Crossing]
    over_micro_batches: Sequence[AtCount]
    curves: Mapping[str, Sequence[tuple[float, float]]]
    pipeline: Plan | None = None
    stale: Sequence[str] = ()
    not_planned: Mapping[str, str] = field(default_factory=dict)
    over_epochs: Mapping[Plan, OverEpochs] = field(default_factory=dict)

    def split(self, plan: Plan) -> str:
        """Such as "3 | 5 blocks"; "whole" where every rank has all."""
        if len(plan.ends) == 1:
            return "whole"
        counts = self.counts(plan)
        return " | ".join(map(str, counts or plan.ends)) + (" blocks" if counts else "")

    def counts(self, plan: Plan) -> list[int]:
        """Blocks of each stage; empty for a model that is not cut freely."""
        pieces = self.pricer.profile.pieces
        starts = (0, *plan.ends[:-1])
        found = [sum(p.blocks for p in pieces[a:b])
                 for a, b in zip(starts, plan.ends, strict=True)]  # fmt: skip
        return found if all(piece.blocks for piece in pieces) else []

    def row(self, priced: Priced, advice: str) -> dict[str, Any]:
        plan = priced.plan
        epochs = self.over_epochs.get(plan)
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
            "touches_quality": touches_quality(plan, self.pricer),
        }

    @property
    def rows(self) -> list[dict[str, Any]]:
        best = self.ranked.best
        return [self.row(priced, self.ranked.advice(i)) for i, priced in enumerate(best)]

    def as_table(self, chosen: Priced | None) -> dict[str, Any]:
        """chosen: the plan that is run; None if none is."""
        profile = self.pricer.profile
        epochs = None if chosen is None else self.over_epochs.get(chosen.plan)
        mean_s = None if chosen is None else chosen.step_s
        if epochs is not None:
            mean_s = epochs.mean_s
        counted = self.over_micro_batches
        return {
            "predicted_step_time_s": mean_s,
            "chosen": None if chosen is None else self.row(chosen, ""),
            "own": self.row(self.ranked.own, self.ranked.advice_to_own),
            "plans": self.rows,
            "num_plans": self.ranked.num_plans,
            "num_simulated": self.ranked.num_simulated,
            "search_s": self.search_s,
            "profile": {"of": dict(profile.of), "measured_at_s": profile.measured_at_s,
                        "stale": list(self.stale)},
            "pays_below_bits_per_s": {c.compression: c.pays_below for c in self.crossings},
            "step_time_over_bandwidth": {n: [list(p) for p in c] for n, c in self.curves.items()},
            "over_micro_batches": [entry._asdict() for entry in counted],
            "best_micro_batches": min(counted, key=lambda e: e.step_s).micro_batches
            if counted else None,
            "not_planned": dict(self.not_planned),
        }  # fmt: skip


def write_plan(folder: Path, report: Report, chosen: Priced | None) -> Path:
    """plan.json. "always" and "never" in place of an infinite or no bandwidth."""
    table = report.as_table(chosen)
    table["pays_below_bits_per_s"] = {
        name: "always" if math.isinf(value) else value or "never"
        for name, value in table["pays_below_bits_per_s"].items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PLAN_FILE
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return path
