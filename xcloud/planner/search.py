"""Find the best plans of a space.

Of a space that takes seconds every plan is simulated. Of a larger one a quick estimate says which
cuts and numbers of micro-batches are worth it. Also finds where compressors begin to pay, and sets
the paper's formulas beside the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations, islice, product
from typing import NamedTuple

from xcloud.pipeline.schedule import GPipe, Schedule
from xcloud.planner.settings import variants_of, with_micro_batches
from xcloud.simulator import formulas
from xcloud.simulator.costs import ModelPiece
from xcloud.simulator.plan import NO_COMPRESSION, Arranged, Plan, Priced
from xcloud.simulator.pricing import Pricer

MAX_SPLITS = 5000
MAX_WORK = 50_000  # stages times micro-batches of all plans that are simulated: some 2 s
TRIES = 24
REFINED = 4  # of a search; see fastest
NEAR = 12  # plans that differ from the job's own in one thing
WORTH = 0.98  # a change that leaves more of a step is no advice
BANDWIDTHS = [10 ** (4 + n / 4) for n in range(33)]  # 10 kbit/s to 1 Tbit/s
REMEDIES = {
    "compute of": "more ranks or faster ones there",
    "codec": "a cheaper compressor",
    "link": "a stronger compressor, or a faster line",
    "latency": "more in flight, or fewer and larger messages",
    "averaging over": "fewer merges, or a stronger compressor",
}
"""By how the name of what bounds a step begins."""


@dataclass(frozen=True)
class Space:
    """The plans that are searched.

    own: the plan that the job's settings are.
    splits: the splits to try with each strategy.
    micro_batches: the counts to try.
    schedules: the schedules to try with any of these counts, each in its variants.
    varies: the dimensions of settings.DIMENSIONS that may differ from `own`.
    allows: a function that tells if the job may run with a strategy, a compression and a schedule,
        however the model is split.
    """

    own: Plan
    splits: Mapping[str, Sequence[tuple[int, ...]]]
    micro_batches: Sequence[int]
    compressions: Sequence[str]
    varies: Sequence[str]
    schedules: Sequence[Schedule] = ()
    allows: Callable[[str, str, Schedule], bool] = lambda *given: True

    def groups(self, arranged: Mapping[str, Arranged]) -> Iterator[Plan]:
        """Yield every plan, with the schedule of `own`, that the job may run with GPipe."""
        varies = self.varies
        own = self.own
        strategies = list(self.splits) if "strategy" in varies else [own.strategy]
        for strategy in strategies:
            splits = self.splits[strategy]
            counts = self.counts(arranged[strategy])
            compresses = "compression" in varies and arranged[strategy].layout.crosses_clouds
            names = self.compressions if compresses else [own.compression]
            if "split" not in varies and len(own.ends) == len(splits[0]):
                splits = [own.ends]
            allowed = [
                (with_micro_batches(own.schedule, number=m), name)
                for m, name in product(counts, names)
                if self.allows(strategy, name, GPipe(m))
            ]
            for ends, (schedule, compression) in product(splits, allowed):
                yield Plan(strategy, ends, schedule, compression)

    def counts(self, arranged: Arranged) -> list[int]:
        """Return the numbers of micro-batches that suit a strategy's clouds."""
        min_count = arranged.layout.min_micro_batches()
        replicas = arranged.layout.num_replicas
        # Replicas take equal numbers of micro-batches.
        return [m for m in self.micro_batches if m >= min_count and m % replicas == 0]

    def schedules_for(
        self, num_stages: int, num_micro_batches: int, num_lanes: int = 1
    ) -> list[Schedule]:
        """Return every one to be tried, whether or not the job allows it."""
        if "schedule" not in self.varies or num_stages == 1:
            return [with_micro_batches(self.own.schedule, number=num_micro_batches)]
        kinds = [*self.schedules, self.own.schedule]
        each = (variants_of(kind, num_stages, num_micro_batches, num_lanes) for kind in kinds)
        return list(dict.fromkeys(chain.from_iterable(each)))


@dataclass(frozen=True)
class Ranked:
    """The result of a search, with prices.

    best: the fastest first.
    own: the job's plan.
    near_own: the fastest plan that differs from `own` in one thing, and its seconds.
    num_plans: plans in the space.
    num_simulated: plans that were simulated.
    """

    best: list[Priced]
    own: Priced
    near_own: tuple[float, Plan] | None
    num_plans: int
    num_simulated: int

    def advice(self, place: int | None) -> str:
        """Return the one change that makes a plan fastest, else a remedy for what bounds it.

        place: the plan's place in `best`; None: the job's own plan.
        """
        if place is None:
            mine = self.own
            others = [] if self.near_own is None else [self.near_own]
        else:
            mine = self.best[place]
            others = [(faster.step_s, faster.plan) for faster in self.best[:place]]
        # The fastest that differs in one thing comes first.
        for step_s, other in others:
            changed = _changes(mine.plan, other)
            if len(changed) == 1 and step_s < WORTH * mine.step_s:
                return f"{changed[0]}: {1 - step_s / mine.step_s:.0%} less"
        remedies = (text for begins, text in REMEDIES.items() if mine.bound.startswith(begins))
        return next(remedies, "-")


def splits_of(
    pieces: Sequence[ModelPiece], num_stages: int, max_splits: int = MAX_SPLITS,
    slowness: Sequence[float] = (),
) -> list[tuple[int, ...]]:  # fmt: skip
    """Return the ways of splitting a model into so many stages.

    max_splits: the largest number of ways to return in full. If there are more, only the one whose
        slowest stage is fastest and those beside it are returned.
    slowness: the factor by which each stage computes the same work more slowly; equal if empty.
    """
    last = len(pieces)
    if num_stages == 1:
        return [(last,)]
    cuts = [i + 1 for i, piece in enumerate(pieces[:-1]) if piece.boundary is not None]
    if math.comb(len(cuts), num_stages - 1) <= max_splits:
        return [(*chosen, last) for chosen in combinations(cuts, num_stages - 1)]
    even = even_split(pieces, cuts, slowness=slowness or [1.0] * num_stages)
    # Too many to list: the balanced one, and each of its cuts moved by one piece.
    splits = {(*even, last)}
    for place, cut in enumerate(even):
        for moved in (cut - 1, cut + 1):
            near = (*even[:place], moved, *even[place + 1 :])
            if moved in cuts and list(near) == sorted(set(near)):
                splits.add((*near, last))
    return sorted(splits)


def even_split(
    pieces: Sequence[ModelPiece], cuts: Sequence[int], slowness: Sequence[float]
) -> tuple[int, ...]:  # fmt: skip
    """Return the cuts whose slowest stage is fastest, at one sample: by dynamic programming."""
    work = [0.0]
    for piece in pieces:
        work.append(work[-1] + piece.forward_s.at(1.0) + piece.backward_s.at(1.0))

    @cache
    def best(stage: int, end: int) -> tuple[float, tuple[int, ...]]:
        """Return the seconds of the slowest stage up to this one, and the cuts between them."""
        if stage == 0:
            return slowness[0] * work[end], ()
        return min(
            (
                # The slowest stage sets the pace: the least of the largest, over all last cuts.
                (max(slowest, slowness[stage] * (work[end] - work[cut])), (*before, cut))
                for cut in cuts
                if cut < end
                for slowest, before in [best(stage - 1, cut)]
            ),
            default=(math.inf, ()),
        )

    return best(len(slowness) - 1, len(pieces))[1]


_Timed = tuple[float, int, str, str, Plan]  # seconds, and what comes first if they are equal


class Fastest(NamedTuple):
    """The fastest plans of a space.

    best: the fastest first.
    num_plans: plans in the space.
    num_simulated: plans that were simulated.
    """

    best: list[Plan]
    num_plans: int
    num_simulated: int


def fastest(
    pricer: Pricer, space: Space, keep: int, tries: int = TRIES, refined: int = REFINED,
    fits: Callable[[Plan], bool] = lambda plan: True,
) -> Fastest:  # fmt: skip
    """Return the fastest plans that fit, as into the memory of a what-if question.

    Where strategy or compression vary, they are the best one of each pair of them. Of a space
    beyond MAX_WORK only the `tries` cuts and numbers of micro-batches of each pair with the least
    estimates are simulated with the first schedule that fits, and the fastest `refined` of them
    with all.
    """

    shapes = cache(space.schedules_for)

    @cache
    def allowed(strategy: str, compression: str, num_stages: int, m: int) -> list[Schedule]:
        every = shapes(num_stages, m, pricer.arranged[strategy].layout.num_lanes)
        return [schedule for schedule in every if space.allows(strategy, compression, schedule)]

    def allowed_for(plan: Plan) -> list[Schedule]:
        return allowed(plan.strategy, plan.compression, len(plan.ends), plan.micro_batches)

    def options(plan: Plan) -> Iterator[Plan]:
        """Return the plan with all schedules that fit."""
        return filter(fits, (plan._replace(schedule=one) for one in allowed_for(plan)))

    def order(plan: Plan) -> _Timed:
        """Return a key that sorts by seconds, then by fewer micro-batches."""
        label = plan.schedule.label
        return pricer.step_s(plan), plan.micro_batches, plan.compression, label, plan

    pairs: dict[tuple[str, str], list[Plan]] = {}
    for plan in space.groups(pricer.arranged):
        pairs.setdefault((plan.strategy, plan.compression), []).append(plan)
    work = sum(
        len(plan.ends) * plan.micro_batches * len(allowed_for(plan))
        for groups in pairs.values()
        for plan in groups
    )
    # An ordinary space: everything is simulated, and the estimate only orders.
    if work <= MAX_WORK:
        tries = refined = work
    found: list[_Timed] = []
    num_plans = num_simulated = 0
    for groups in pairs.values():
        num_plans += sum(len(allowed_for(plan)) for plan in groups)
        # Lazily, best estimate first: of a large space only the first `tries` are looked at.
        likely = (next(options(plan), None) for plan in sorted(groups, key=pricer.estimate_s))
        firsts = list(islice(filter(None, likely), tries))
        timed = sorted(map(order, firsts))
        others = dict.fromkeys(other for *_, plan in timed[:refined] for other in options(plan))
        timed += [order(plan) for plan in others if plan not in firsts]
        num_simulated += len(timed)
        best: dict[object, _Timed] = {}
        for entry in sorted(timed):  # one for each cut and number of micro-batches
            best.setdefault((entry[-1].ends, entry[1]), entry)
        # With several strategies or compressors each shows its best.
        found += [*best.values()][: 1 if len(pairs) > 1 else keep]
    return Fastest(
        best=[plan for *_, plan in sorted(found)[:keep]],
        num_plans=num_plans,
        num_simulated=num_simulated,
    )


def search(pricer: Pricer, space: Space, keep: int) -> Ranked:
    """Return the fastest plans, and the job's own among them."""
    result = fastest(pricer, space, keep)
    # What the row of the job's own plan advises: one change, and how much it brings.
    near = [
        plan
        for plan in space.groups(pricer.arranged)
        if len(_changes(space.own, other=plan)) == 1
        and space.allows(plan.strategy, plan.compression, plan.schedule)
    ]
    steps = [(pricer.step_s(plan), plan) for plan in sorted(near, key=pricer.estimate_s)[:NEAR]]
    return Ranked(
        best=[pricer.price(plan) for plan in result.best],
        own=pricer.price(space.own),
        near_own=min(steps, key=lambda entry: entry[0], default=None),
        num_plans=result.num_plans,
        num_simulated=result.num_simulated,
    )


StepAt = Callable[[str, float], float]
"""Step time with a compressor over lines of a bandwidth, everything else as in one plan."""


def step_at(pricer: Pricer, plan: Plan) -> StepAt:
    there = cache(pricer.at_bandwidth)
    return cache(lambda name, rate: there(rate).step_s(plan._replace(compression=name)))


def crossings(step_s: StepAt, compressions: Sequence[str]) -> dict[str, float]:
    """Return the bits per second up to which a step takes less with a compressor than without.

    They are infinite where it pays on every line, 0 where on none; the highest of several.
    """

    def gain_s(rate: float, name: str) -> float:
        return step_s(NO_COMPRESSION, rate) - step_s(name, rate)

    rates = dict[str, float]()
    for name in compressions:
        if name == NO_COMPRESSION:
            continue
        last = max((n for n, rate in enumerate(BANDWIDTHS) if gain_s(rate, name) > 0), default=-1)
        if 0 <= last < len(BANDWIDTHS) - 1:
            # Between two rates of the grid, one of which pays and one not, by halving on a scale
            # of ratios.
            low, high = map(math.log, BANDWIDTHS[last : last + 2])
            while high - low > 1e-3:
                middle = (low + high) / 2
                pays = gain_s(math.exp(middle), name) > 0
                if pays:
                    low = middle
                else:
                    high = middle
            rates[name] = math.exp(low)
        else:
            rates[name] = 0.0 if last < 0 else math.inf
    return rates


class AtCount(NamedTuple):
    """A plan at so many micro-batches, as simulated and as bubble ratios by the paper's formulas.

    free: formula (1).
    blocking: formula (2).
    overlapped: formula (2').
    """

    micro_batches: int
    step_s: float
    bubble_ratio: float
    free: float
    blocking: float
    overlapped: float


def over_micro_batches(pricer: Pricer, plan: Plan, counts: Sequence[int]) -> list[AtCount]:
    """Return the simulated step beside the paper's formulas, for every count.

    The formulas take equal stages: here the mean of the stages and of all transfers. Empty for a
    plan without a pipeline over clouds.
    """
    if len(plan.ends) == 1:
        return []
    entries = []
    for m in counts:
        at_m = plan._replace(schedule=with_micro_batches(plan.schedule, number=m))
        step = pricer.predict(at_m)
        layout = step.step.layout
        costs = step.costs
        p = len(plan.ends)
        own_m = step.step.schedule.num_micro_batches
        # The formulas' letters: t_f and t_b a stage's forward and backward of a micro-batch, t_t a
        # transfer.
        tf, tb = (sum(part) / p for part in (costs.forward_s, costs.backward_s))
        sent_s = list[float]()
        latency_s = 0.0
        for boundary, ways in enumerate(zip(costs.forward, costs.backward, strict=True)):
            clouds = layout.stage_cloud(boundary), layout.stage_cloud(boundary + 1)
            for (a, b), way in zip((clouds, clouds[::-1]), ways, strict=True):
                if a != b:
                    line = pricer.line(plan.strategy, here=a, there=b)
                    sent_s.append(line.line_s(way.num_bytes) if way.num_bytes else 0.0)
                    latency_s = max(latency_s, line.beyond_s)
        tt = sum(sent_s) / max(1, len(sent_s))
        whole_s = formulas.step_of_overlapped_transfers(
            p, m=own_m, tf=tf, tb=tb, tt=tt, latency_s=latency_s
        )
        work_s = own_m * (tf + tb)
        entries.append(
            AtCount(
                micro_batches=m, step_s=pricer.step_s(at_m), bubble_ratio=step.bubble_ratio,
                free=formulas.bubble_of_a_free_link(p, m=own_m),
                blocking=formulas.bubble_of_blocking_transfers(p, m=own_m, tf=tf, tb=tb, tt=tt),
                overlapped=whole_s / work_s - 1,
            )
        )  # fmt: skip
    return entries


def _changes(mine: Plan, other: Plan) -> list[str]:
    """Return what differs, in words, but for the schedule, which is the best one for either."""
    changes = [] if mine.ends == other.ends else ["another split"]
    for name in ("strategy", "micro_batches", "compression"):
        if getattr(mine, name) != getattr(other, name):
            changes.append(f"{name.replace('_', '-')} {getattr(other, name)}")
    return changes
