"""Plans on paper: what every way to use the clouds of a file would take and cost. Numbers only:
nothing is measured, nothing runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from xcloud.base.errors import ConfigError
from xcloud.cluster.layout import Cloud, ClusterLayout
from xcloud.parallel.gradient_averaging import GradientAveraging
from xcloud.parallel.local_updates import LocalUpdates
from xcloud.parallel.strategy import WHOLE_MODEL, Strategy
from xcloud.plan.paper_file import Paper
from xcloud.plan.plans import Arranged, Plan, Priced
from xcloud.plan.pricing import Pricer
from xcloud.plan.profile import Profile
from xcloud.plan.search import Space, fastest, splits_of

MOST_CUTS = 16  # ways to cut; of more only the most even one and its neighbours
MOST_ACTIONS = 1 << 14  # stages x micro-batches of a pipeline that is simulated
TOLERANCE, TRIES = 0.05, 2  # of the search
HOUR_S = 3600.0


class OnPaper(NamedTuple):
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
class _Space(Space):
    """lanes: of the largest stage, over all replicas."""

    lanes: int = 1

    def schedules(self, plan: Plan) -> list[Plan]:
        """GPipe, and 1F1B with as many in flight as keep every lane at work, or twice that."""
        p = len(plan.ends)
        counts = [k * self.lanes for k in (p, 2 * p) if k * self.lanes < plan.micro_batches]
        return [plan._replace(in_flight=k) for k in (None, *(counts if p > 1 else ()))]

    def worth_pricing(self, plan: Plan, fits: Callable[[Plan], bool]) -> list[Plan]:
        """Where GPipe fits into memory, 1F1B gains nothing on a steady line."""
        return [plan] if fits(plan) else super().worth_pricing(plan, fits)


@dataclass(frozen=True)
class Planned:
    """rows: the best of each strategy and compressor, the fastest first. left_out: what is not
    among them, and why."""

    rows: list[OnPaper]
    left_out: Mapping[str, str]
    num_plans: int
    num_simulated: int


def plan_on_paper(paper: Paper, profile: Profile) -> Planned:
    """Raises ConfigError if nothing can be planned."""
    arranged, left_out = _arranged(paper)
    pricer = Pricer(
        profile, arranged, paper.batch_size,
        memory_bytes={n: 1e9 * c.memory_gb for n, c in paper.clouds.items() if c.memory_gb},
        steps=1,
    )  # fmt: skip
    rows: list[OnPaper] = []
    num_plans = num_simulated = 0
    names = [name for name in paper.search.compressors if name in profile.compressors]
    for name, found in arranged.items():
        space, why = _space(paper, profile, name, found, names)
        if space is None:
            left_out[name] = why
            continue
        best = fastest(pricer, space, len(names), TOLERANCE, TRIES)
        num_plans += best.num_plans
        num_simulated += best.num_simulated
        if not best.best:
            left_out[name] = _too_large(pricer, space, arranged)
        rows += [_on_paper(paper, profile, pricer, plan) for plan in best.best]
    if not rows:
        whys = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise ConfigError(f"nothing of this can be planned. {whys}")
    return Planned(
        sorted(rows, key=lambda row: row.priced.step_s), left_out, num_plans, num_simulated
    )


# The space.


def _arranged(paper: Paper) -> tuple[dict[str, Arranged], dict[str, str]]:
    """Every strategy with its clouds, by name; and those that they do not suit."""
    num_clouds = len(paper.clouds)
    found, left_out = dict[str, Arranged](), dict[str, str]()
    for inside in paper.search.stages_inside or _stages_inside(paper):
        more = f", {inside} inside" if inside > 1 else ""
        odd = [name for name, cloud in paper.clouds.items() if cloud.ranks % inside]
        if odd:
            left_out[f"stages_inside {inside}"] = f"{odd[0]} cannot deal its ranks to them evenly"
            continue
        for strategy, name in _strategies(paper):
            replicas = num_clouds if strategy.replicas is None else strategy.replicas
            if num_clouds % replicas:
                left_out[name] = f"{num_clouds} clouds cannot be dealt to {replicas} replicas"
            elif strategy.averaging is not None and replicas == 1:
                left_out[name] = "there is one cloud, so nothing is averaged"
            else:
                found[name + more] = Arranged(strategy, _layout(paper, replicas, inside))
    return found, left_out


def _stages_inside(paper: Paper) -> list[int]:
    each = math.gcd(*(cloud.ranks for cloud in paper.clouds.values()))
    most = each if paper.model is None else paper.model.layers // len(paper.clouds)
    return [2**n for n in range(each.bit_length()) if each % 2**n == 0 and 2**n <= max(1, most)]


def _strategies(paper: Paper) -> Iterator[tuple[Strategy, str]]:
    asked, num_clouds = paper.search, len(paper.clouds)
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


def _layout(paper: Paper, replicas: int, inside: int) -> ClusterLayout:
    per_replica, clouds = len(paper.clouds) // replicas, {}
    for k, (name, cloud) in enumerate(paper.clouds.items()):
        first = inside * (k % per_replica)
        stages = tuple(range(first, first + inside))
        if per_replica == inside == 1:
            stages = WHOLE_MODEL
        clouds[name] = Cloud(
            cloud.ranks, stages, inside > 1, slowdown=cloud.slowdown, replica=k // per_replica
        )
    return ClusterLayout(clouds, "free", name="on paper")


def _space(
    paper: Paper, profile: Profile, name: str, found: Arranged, compressors: Sequence[str]
) -> tuple[Space | None, str]:
    """Of one strategy, and why there is none."""
    layout, p = found.layout, found.num_stages
    free = all(piece.blocks for piece in profile.pieces)
    most_stages = 1 + sum(piece.boundary is not None for piece in profile.pieces[:-1])
    if p > most_stages or (not free and p not in (1, most_stages)):
        return None, f"{p} stages, and the model can be cut into {most_stages}"
    slowness = [
        layout.clouds[layout.stage_cloud(stage)].slowdown / len(layout.ranks_of(stage))
        for stage in range(p)
    ]
    splits = splits_of(profile.pieces, p, MOST_CUTS, slowness)
    replicas = layout.num_replicas
    counts = paper.search.micro_batches
    fewest = replicas * -(-layout.min_micro_batches() // replicas)
    if counts is None:
        counts = [fewest * 2**n for n in range(8)]
        if p > 1:
            counts = [m for m in counts if m == fewest or p * m // replicas <= MOST_ACTIONS]
    counts = sorted({m for m in counts if m <= paper.batch_size})
    if not any(m >= layout.min_micro_batches() and m % replicas == 0 for m in counts):
        return None, (
            f"batch_size {paper.batch_size} is less than the {layout.min_micro_batches()} "
            "micro-batches that give every rank work"
            if paper.search.micro_batches is None
            else f"search.micro_batches has no multiple of {replicas} from "
            f"{layout.min_micro_batches()} to batch_size on"
        )
    own = Plan(name, splits[0], counts[0], None, compressors[0])
    return _Space(
        own, {name: splits}, counts, compressors, ("split", "compression"), lanes=fewest
    ), ""


def _too_large(pricer: Pricer, space: Space, arranged: Mapping[str, Arranged]) -> str:
    groups = space.groups(arranged)
    least = min(max(pricer.memory(plan).values()) for plan in groups)
    return f"its fullest rank needs {least / 1e9:.3g} GB or more"


# What comes of it.


def _on_paper(paper: Paper, profile: Profile, pricer: Pricer, plan: Plan) -> OnPaper:
    priced = pricer.price(plan)
    tokens = paper.batch_size * profile.tokens_per_sample
    per_million = 1e6 / tokens
    rank_s = paper.num_ranks * priced.step_s
    mfu = None
    if paper.model is not None and paper.model.flop_per_s is not None:
        best = sum(c.ranks / c.slowdown for c in paper.clouds.values()) * paper.model.flop_per_s
        mfu = paper.batch_size * paper.model.step_flop / (best * priced.step_s)
    hours = {name: cloud.ranks * priced.step_s / HOUR_S for name, cloud in paper.clouds.items()}
    egress = 0.0
    for here, there in permutations(paper.clouds, 2):
        size = priced.bytes_between.get(f"{here}-{there}", 0.0)
        egress += size / 1e9 * paper.prices.egress_of(here, there)
    return OnPaper(
        plan.strategy,
        plan,
        _split(plan, profile),
        priced,
        tokens / priced.step_s,
        priced.compute_s / rank_s,
        mfu,
        priced.bytes_per_step * per_million,
        per_million * sum(hours[name] * paper.prices.hour_of(name) for name in hours),
        per_million * egress,
    )


def _split(plan: Plan, profile: Profile) -> str:
    """Such as "20 | 12"; "16 x 5" for 16 stages of 5; "whole"."""
    if len(plan.ends) == 1:
        return "whole"
    starts = (0, *plan.ends[:-1])
    counts = [b - a for a, b in zip(starts, plan.ends, strict=True)]
    if len(set(counts)) == 1:
        return f"{len(counts)} x {counts[0]}"
    if len(counts) <= 6:
        return " | ".join(map(str, counts))
    return f"{len(counts)} stages of {min(counts)} to {max(counts)}"
