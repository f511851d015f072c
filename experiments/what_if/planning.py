"""What-if plans: what every way to use the clouds of a file would take and cost. Numbers only:
nothing is measured, nothing runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from experiments.what_if.file import WhatIf
from xcloud.base.errors import ConfigError
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.job.strategy import WHOLE_MODEL, Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward
from xcloud.pipeline.schedule import GPipe, Schedule
from xcloud.planner.search import Space, fastest, splits_of
from xcloud.simulator.costs import Profile
from xcloud.simulator.plan import Arranged, Plan, Priced
from xcloud.simulator.pricing import Pricer

MAX_CUTS = 16  # ways to cut; of more only the most even one and its neighbours
MAX_ACTIONS = 1 << 14  # stages x micro-batches of a pipeline that is simulated
TRIES = 2  # cuts and counts of micro-batches that are simulated, see fastest
HOUR_S = 3600.0


class WhatIfPlan(NamedTuple):
    """A plan and what it comes to. busy: share of all ranks' time that computes. mfu: share of the
    ranks' best rate that the model's operations reach; None where that rate is not known.
    egress_bytes, compute_cost, egress_cost: per million tokens."""

    name: str
    plan: Plan
    split: str
    priced: Priced
    tokens_per_s: float
    busy: float
    mfu: float | None
    egress_bytes: float
    compute_cost: float
    egress_cost: float

    @property
    def cost(self) -> float:
        return self.compute_cost + self.egress_cost

    @property
    def bound(self) -> tuple[str, float]:
        """What the largest share of the step goes into, all links, stages … taken together."""
        shares: dict[str, float] = {}
        for what, seconds in self.priced.spent_s.items():
            kind = "averaging" if what.startswith("averaging") else what.split()[0]
            shares[kind] = shares.get(kind, 0.0) + seconds
        kind = max(shares, key=lambda name: shares[name])
        return kind, shares[kind] / self.priced.step_s


@dataclass(frozen=True)
class Planned:
    """rows: the best of each strategy and compressor, the fastest first. left_out: what is not
    among them, and why."""

    rows: list[WhatIfPlan]
    left_out: Mapping[str, str]
    num_plans: int
    num_simulated: int


def plan_what_if(what_if: WhatIf, profile: Profile) -> Planned:
    """Raises ConfigError if nothing can be planned."""
    arranged, left_out = _arranged(what_if)
    pricer = Pricer(profile, arranged, what_if.batch_size, steps=1)
    most = {n: 1e9 * c.memory_gb for n, c in what_if.clouds.items() if c.memory_gb}

    def fits(plan: Plan) -> bool:
        """Whether the ranks of all clouds have the memory."""
        needed = pricer.memory(plan) if most else {}
        return all(size <= most.get(name, size) for name, size in needed.items())

    rows: list[WhatIfPlan] = []
    num_plans = num_simulated = 0
    names = [name for name in what_if.search.compressors if name in profile.compressors]
    for name, found in arranged.items():
        space, why = _space(what_if, profile, name, found, names)
        if space is None:
            left_out[name] = why
            continue
        best = fastest(pricer, space, len(names), TRIES, refined=0, fits=fits)
        num_plans += best.num_plans
        num_simulated += best.num_simulated
        if not best.best:
            left_out[name] = _too_large(pricer, space, arranged)
        rows += [_row(what_if, profile, pricer, plan) for plan in best.best]
    if not rows:
        whys = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise ConfigError(f"nothing of this can be planned. {whys}")
    return Planned(
        sorted(rows, key=lambda row: row.priced.step_s), left_out, num_plans, num_simulated
    )


# The space.


def _arranged(what_if: WhatIf) -> tuple[dict[str, Arranged], dict[str, str]]:
    """Every strategy with its clouds, by name; and those that they do not suit."""
    num_clouds = len(what_if.clouds)
    found, left_out = dict[str, Arranged](), dict[str, str]()
    for inside in what_if.search.stages_inside or _stages_inside(what_if):
        more = f", {inside} inside" if inside > 1 else ""
        odd = [name for name, cloud in what_if.clouds.items() if cloud.ranks % inside]
        if odd:
            left_out[f"stages_inside {inside}"] = f"{odd[0]} cannot deal its ranks to them evenly"
            continue
        for strategy, name in _strategies(what_if):
            replicas = num_clouds if strategy.replicas is None else strategy.replicas
            if num_clouds % replicas:
                left_out[name] = f"{num_clouds} clouds cannot be dealt to {replicas} replicas"
            elif strategy.averaging is not None and replicas == 1:
                left_out[name] = "there is one cloud, so nothing is averaged"
            else:
                found[name + more] = Arranged(strategy, _layout(what_if, replicas, inside))
    return found, left_out


def _stages_inside(what_if: WhatIf) -> list[int]:
    each = math.gcd(*(cloud.ranks for cloud in what_if.clouds.values()))
    most = each if what_if.model is None else what_if.model.layers // len(what_if.clouds)
    return [2**n for n in range(each.bit_length()) if each % 2**n == 0 and 2**n <= max(1, most)]


def _strategies(what_if: WhatIf) -> Iterator[tuple[Strategy, str]]:
    asked, num_clouds = what_if.search, len(what_if.clouds)
    for kind in asked.strategies:
        if kind == "pipeline":
            yield Strategy(), kind
        elif kind == "data_parallel":
            yield Strategy(kind, None, GradientAveraging()), kind
        elif kind == "local_updates":
            for every in asked.every:
                yield Strategy(kind, None, LocalUpdates(every=every)), f"{kind} every {every}"
        else:
            counts = asked.replicas
            if counts is None:
                counts = [r for r in range(2, num_clouds) if num_clouds % r == 0]
            for count in counts:
                yield Strategy(kind, count, GradientAveraging()), f"{kind} of {count}"


def _layout(what_if: WhatIf, replicas: int, inside: int) -> ClusterLayout:
    per_replica, clouds = len(what_if.clouds) // replicas, {}
    for k, (name, cloud) in enumerate(what_if.clouds.items()):
        first = inside * (k % per_replica)
        stages = tuple(range(first, first + inside))
        if per_replica == inside == 1:
            stages = WHOLE_MODEL
        clouds[name] = Cloud(
            cloud.ranks, stages, inside > 1, slowdown=cloud.slowdown, replica=k // per_replica
        )
    return ClusterLayout(clouds, "free", name="what if")


def _space(
    what_if: WhatIf, profile: Profile, name: str, found: Arranged, compressors: Sequence[str]
) -> tuple[Space | None, str]:
    """Of one strategy, and why there is none."""
    layout, p = found.layout, found.num_stages
    free = all(piece.blocks for piece in profile.pieces)
    max_stages = 1 + sum(piece.boundary is not None for piece in profile.pieces[:-1])
    if p > max_stages or (not free and p not in (1, max_stages)):
        return None, f"{p} stages, and the model can be cut into {max_stages}"
    splits = splits_of(profile.pieces, p, MAX_CUTS, found.slowness)
    replicas = layout.num_replicas
    counts = what_if.search.micro_batches
    fewest = replicas * -(-layout.min_micro_batches() // replicas)
    if counts is None:
        counts = [fewest * 2**n for n in range(8)]
        if p > 1:
            counts = [m for m in counts if m == fewest or p * m // replicas <= MAX_ACTIONS]
    counts = sorted({m for m in counts if m <= what_if.batch_size})
    if not any(m >= layout.min_micro_batches() and m % replicas == 0 for m in counts):
        return None, (
            f"batch_size {what_if.batch_size} is less than the {layout.min_micro_batches()} "
            "micro-batches that give every rank work"
            if what_if.search.micro_batches is None
            else f"search.micro_batches has no multiple of {replicas} from "
            f"{layout.min_micro_batches()} to batch_size on"
        )
    own = Plan(name, splits[0], GPipe(counts[0]), compressors[0])
    # Where GPipe fits into memory, 1F1B gains nothing on a steady line; else with as many in
    # flight as keep all ranks of the largest stage at work.
    schedules: list[Schedule] = [
        GPipe(1),
        *(OneForwardOneBackward(1, k * fewest) for k in (2 * p, p)),
    ]
    varies = ("split", "compression", "schedule")
    return Space(own, {name: splits}, counts, compressors, varies, schedules), ""


def _too_large(pricer: Pricer, space: Space, arranged: Mapping[str, Arranged]) -> str:
    groups = space.groups(arranged)
    least = min(max(pricer.memory(plan).values()) for plan in groups)
    return f"its fullest rank needs {least / 1e9:.3g} GB or more"


# What comes of it.


def _row(what_if: WhatIf, profile: Profile, pricer: Pricer, plan: Plan) -> WhatIfPlan:
    priced = pricer.price(plan)
    tokens = what_if.batch_size * profile.tokens_per_sample
    per_million = 1e6 / tokens
    rank_s = what_if.num_ranks * priced.step_s
    mfu, model = None, what_if.model
    if model is not None and model.flop_per_s is not None:
        best = sum(c.ranks / c.slowdown for c in what_if.clouds.values()) * model.flop_per_s
        mfu = what_if.batch_size * model.step_flop / (best * priced.step_s)
    hours = {name: cloud.ranks * priced.step_s / HOUR_S for name, cloud in what_if.clouds.items()}
    egress = 0.0
    for here, there in permutations(what_if.clouds, 2):
        size = priced.bytes_between.get(f"{here}-{there}", 0.0)
        egress += size / 1e9 * what_if.prices.egress_of(here, there)
    return WhatIfPlan(
        plan.strategy,
        plan,
        _split(plan),
        priced,
        tokens / priced.step_s,
        priced.compute_s / rank_s,
        mfu,
        priced.bytes_per_step * per_million,
        per_million * sum(hours[name] * what_if.prices.hour_of(name) for name in hours),
        per_million * egress,
    )


def _split(plan: Plan) -> str:
    """Such as "20 | 12"; "16 x 5" for 16 stages of 5; "whole"."""
    if len(plan.ends) == 1:
        return "whole"
    counts = [end - start for start, end in plan.spans]
    if len(set(counts)) == 1:
        return f"{len(counts)} x {counts[0]}"
    if len(counts) <= 6:
        return " | ".join(map(str, counts))
    return f"{len(counts)} stages of {min(counts)} to {max(counts)}"
