"""What holds of every price and simulation, with kept rows and exchanges of replicas too."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import StringIO
from itertools import pairwise, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.nightly import first_daily
from tests.plan_pieces import COMPRESSORS, EIGHT, codec, drawn, every_plan, piece
from tests.replicas import connected, exchange
from xcloud.comm.compressor import Chain
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.features.activation_cache.price import over_epochs
from xcloud.features.replicas.averaging import Terms, averager_for
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.features.replicas.merging import Median, weighted_sum
from xcloud.job.strategy import Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.link_profile import LinkProfile
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, ZeroBubble
from xcloud.pipeline.schedule import GPipe, Schedule
from xcloud.planner.plan_report import Report, print_plans, row_cells, write_plan
from xcloud.planner.search import Ranked, Space, fastest, search
from xcloud.planner.settings import DIMENSIONS, with_micro_batches
from xcloud.record.run_record import epochs_text
from xcloud.record.timeline import predicted_of
from xcloud.simulator.codec_timer import MAX_REPEATS, median_s
from xcloud.simulator.costs import (
    FREE,
    AveragingCodec,
    BoundaryCodec,
    CompressorCosts,
    Costs,
    Curve,
    Direction,
    DirectionCurves,
    Profile,
    Update,
    lines_of,
)
from xcloud.simulator.formulas import ExchangeCost, PieceWork, exchange_of, memory_of
from xcloud.simulator.plan import NO_COMPRESSION, Arranged, Plan
from xcloud.simulator.prediction import Simulator
from xcloud.simulator.pricing import OverEpochs, Pricer, alike

SEEDS = first_daily(range(8), 2)


def some_plans(pricer: Pricer, space: Space, seed: int, most: int = 12) -> list[Plan]:
    plans = every_plan(pricer, space)
    return random.Random(seed).sample(plans, min(most, len(plans)))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_step_goes_into_adds_up_and_a_price_is_its_step(seed: int) -> None:
    pricer, space = drawn(seed)
    for plan in some_plans(pricer, space, seed):
        price = pricer.price(plan)
        assert price.step_s == pricer.step_s(plan)
        assert sum(price.spent_s.values()) == pytest.approx(price.step_s)
        assert list(price.spent_s.values()) == sorted(price.spent_s.values(), reverse=True)
        assert price.bubble_ratio > -1e-9 and price.compute_s > 0
        assert min(price.bytes_between.values()) > 0 and price.bytes_per_step > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_dearer_pieces_and_calls_make_no_step_shorter(seed: int) -> None:
    pricer, space = drawn(seed)
    profile, draw = pricer.profile, random.Random(seed)
    which = draw.randrange(len(profile.pieces))
    one = profile.pieces[which]
    longer = Curve([(b, 1.5 * s) for b, s in one.backward_s.points])
    pieces = [*profile.pieces[:which], replace(one, backward_s=longer),
              *profile.pieces[which + 1 :]]  # fmt: skip
    call = Curve([(1, 0.003), (2, 0.003)])
    dearer = replace(pricer, profile=replace(profile, pieces=pieces))
    called = replace(pricer, profile=replace(profile, stage_forward_s=call))
    for plan in some_plans(pricer, space, seed):
        if isinstance(plan.schedule, ZeroBubble):
            continue  # its order is fixed, and a longer backward may well fill a gap of another
        assert dearer.step_s(plan) >= pricer.step_s(plan) - 1e-9
        assert called.step_s(plan) >= pricer.step_s(plan) - 1e-9
        calls_s = 0.003 * plan.micro_batches * len(plan.ends)  # of ranks up to twice as slow
        more_s = called.price(plan).compute_s - pricer.price(plan).compute_s
        assert calls_s - 1e-9 <= more_s <= 2 * calls_s + 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_a_share_of_the_samples_that_crosses_lies_between_all_and_none(seed: int) -> None:
    pricer, space = drawn(seed)
    shares = [replace(pricer, crossing={0: share}) for share in (0.0, 0.5, 1.0)]
    for plan in some_plans(pricer, space, seed):
        if plan.strategy != "pipeline" or isinstance(plan.schedule, ZeroBubble):
            continue
        none_s, half_s, all_s = (priced.step_s(plan) for priced in shares)
        assert none_s <= half_s + 1e-9 and half_s <= all_s + 1e-9
        assert all_s == pytest.approx(pricer.step_s(plan))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_of_several_steps_is_a_step_that_stands_alone(seed: int) -> None:
    """A program is repeated with tokens and parcels of its own, so nothing comes too early."""
    draw = random.Random(seed)
    p, m = draw.choice([2, 3, 4]), draw.choice([1, 2, 5, 8])
    clouds = {f"c{i}": Cloud() for i in range(p)}
    layout = ClusterLayout(clouds, LinkProfile(10 ** draw.uniform(5, 7), draw.uniform(0, 0.05)))
    ways = [
        [Direction(draw.randrange(100, 9000), 1e-3, 2e-3) for _ in range(p - 1)] for _ in range(2)
    ]
    costs = Costs(
        [draw.uniform(0.01, 0.04) for _ in range(p)], [draw.uniform(0.02, 0.08) for _ in range(p)],
        *ways, [Update(1e-3, 0.0, 2e-3, 3e-3)] * p, weights_s=[0.01] * p,
    )  # fmt: skip
    schedules: list[Schedule] = [GPipe(m), OneForwardOneBackward(m), ZeroBubble(m)]
    for schedule in schedules:
        alone, several = (
            Simulator(schedule, layout, agrees=True, num_steps=n).run(costs) for n in (1, 3)
        )
        for first, mine in zip(alone.moments.begin_s, several.moments.begin_s, strict=True):
            assert len(mine) == 3 * len(first)
            assert mine[: len(first)] == pytest.approx(first)
            assert mine == sorted(mine), "in order"
        assert len(several.moments.passages) == 3 * len(alone.moments.passages)
        assert several.step_s <= alone.step_s + 1e-9, "what is hidden behind the next step"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_with_more_bandwidth_is_never_slower_nor_with_less_latency(seed: int) -> None:
    pricer, space = drawn(seed)
    ladder = [pricer.at_bandwidth(10**n) for n in (5.0, 6.3, 7.1, 8.0, 9.5, 11.0)]
    for plan in some_plans(pricer, space, seed):
        steps = [priced.step_s(plan) for priced in ladder]
        assert all(fast <= slow + 1e-9 for slow, fast in pairwise(steps)), plan
        assert ladder[0].price(plan).bytes_between == ladder[-1].price(plan).bytes_between
    lines = [{"*": LinkProfile(2e7, latency_s)} for latency_s in (0.2, 0.03, 0.0)]
    near = [replace(pricer, profile=replace(pricer.profile, lines=line)) for line in lines]
    for plan in some_plans(pricer, space, seed):
        steps = [priced.step_s(plan) for priced in near]
        assert all(short <= far + 1e-9 for far, short in pairwise(steps)), plan


@pytest.mark.parametrize("seed", SEEDS)
def test_more_micro_batches_never_cost_less_bytes(seed: int) -> None:
    """Every message has a frame beside its samples."""
    pricer, space = drawn(seed)
    draw = random.Random(seed)
    head, each = draw.randrange(50, 500), draw.randrange(1000, 10**6)
    way = DirectionCurves(Curve([(1, head + each), (2, head + 2 * each)]))
    costs = {name: replace(of, boundaries=[BoundaryCodec(way, way)])
             for name, of in pricer.profile.compressors.items()}  # fmt: skip
    framed = replace(pricer, profile=replace(pricer.profile, compressors=costs))
    for plan in some_plans(framed, space, seed):
        counts = space.counts(framed.arranged[plan.strategy])
        sizes = [
            framed.price(plan._replace(schedule=with_micro_batches(plan.schedule, m)))
            .bytes_per_step for m in counts
        ]  # fmt: skip
        assert sizes == sorted(sizes)
        if plan.strategy == "pipeline":
            assert sizes[-1] > sizes[0], "so many frames more"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_search_that_simulates_all_finds_what_pricing_all_finds(seed: int) -> None:
    """The quick estimate decides only what is simulated."""
    pricer, space = drawn(seed)
    draw = random.Random(seed)
    dimensions = [name for name in DIMENSIONS if draw.random() < 0.7]
    space = replace(space, varies=dimensions, micro_batches=draw.sample(space.micro_batches, 3))

    found = fastest(pricer, space, keep=3, tries=10**6, refined=10**6)

    every = every_plan(pricer, space)
    steps = {plan: pricer.step_s(plan) for plan in every}
    assert found.num_plans == len(every) and found.num_simulated == len(steps)
    if every:
        assert steps[found.best[0]] == min(steps.values())
        told = [steps[plan] for plan in found.best]
        assert told == sorted(told) and len({*found.best}) == len(found.best)
    for name in {"strategy", "compression"} - {*dimensions}:  # stay the job's own
        assert {getattr(plan, name) for plan in every} <= {getattr(space.own, name)}


@pytest.mark.parametrize("seed", SEEDS)
def test_of_the_plans_that_fit_the_fastest_is_found_and_no_other(seed: int) -> None:
    pricer, space = drawn(seed)
    every = every_plan(pricer, space)
    sizes = {plan: max(pricer.memory(plan).values()) for plan in every}
    limit = sorted(sizes.values())[len(every) // 3]

    found = fastest(
        pricer, space, 5, tries=10**6, refined=10**6, fits=lambda plan: sizes[plan] <= limit
    )

    assert all(sizes[plan] <= limit for plan in found.best)
    fitting = [plan for plan in every if sizes[plan] <= limit]
    assert pricer.step_s(found.best[0]) == min(map(pricer.step_s, fitting))


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_grows_with_what_is_in_flight_and_never_with_smaller_micro_batches(
    seed: int,
) -> None:
    pricer, space = drawn(seed)
    layout = pricer.arranged["pipeline"].layout
    for ends in space.splits["pipeline"]:

        def fullest(schedule: Schedule, ends: tuple[int, ...] = ends) -> int:
            plan = Plan("pipeline", ends, schedule, NO_COMPRESSION)
            return max(pricer.memory(plan).values())

        more = replace(pricer, profile=replace(pricer.profile, other_bytes=1000))
        plan = Plan("pipeline", ends, GPipe(8), NO_COMPRESSION)
        assert max(more.memory(plan).values()) == fullest(GPipe(8)) + 1000
        flights = [fullest(OneForwardOneBackward(8, k)) for k in range(1, 9)]
        assert flights == sorted(flights) and flights[-1] <= fullest(GPipe(8))
        assert fullest(ZeroBubble(8, 3, 1)) <= fullest(ZeroBubble(8, 3, 3)) <= fullest(
            ZeroBubble(8, 3, 8))  # fmt: skip
        m = 2 * layout.min_micro_batches()
        assert fullest(OneForwardOneBackward(2 * m, 2)) <= fullest(OneForwardOneBackward(m, 2))


@pytest.mark.parametrize("seed", SEEDS)
def test_an_average_takes_what_is_not_hidden_and_rarer_ones_take_less(seed: int) -> None:
    draw = random.Random(seed)
    clouds = draw.randint(2, 5)
    layout = ClusterLayout({f"c{i}": Cloud(stages=[0], replica=i) for i in range(clouds)})
    names = ["-".join(pair) for pair in permutations(layout.clouds, 2)]
    lines = {n: LinkProfile(10 ** draw.uniform(6, 9), draw.uniform(0, 0.1)) for n in names}
    costs = AveragingCodec(draw.randrange(10**4, 10**7), draw.uniform(0, 1), draw.uniform(0, 1))
    own_s, before_s = draw.uniform(0.1, 3.0), math.inf
    for every in (2, 5, 20):
        found = exchange_of(layout, LocalUpdates(every=every), costs, [1.0], lines)
        took_s = found.step_s(own_s)
        assert own_s < took_s <= before_s
        assert took_s == pytest.approx(own_s + (found.codec_s + found.wire_s) / every)
        before_s = took_s
        hidden = exchange_of(layout, LocalUpdates(every=every, overlap=1), costs, [1.0], lines)
        waits_s = max(0.0, found.wire_s - own_s)
        assert hidden.step_s(own_s) == pytest.approx(own_s + (found.codec_s + waits_s) / every)
        total = sum(found.bytes_per_step.values()) * every
        # Two send each other all; of more each part goes to its merger and back.
        parts = 2 if clouds == 2 else 2 * (clouds - 1)
        assert total == pytest.approx(parts * costs.num_bytes)


@pytest.mark.parametrize("seed", SEEDS)
def test_kept_rows_make_later_epochs_no_longer_the_more_of_them_fit(seed: int) -> None:
    pricer, space = drawn(seed)
    frozen = {
        name: replace(of, boundaries=[BoundaryCodec(of.boundaries[0].forward)])
        for name, of in pricer.profile.compressors.items()
    }
    silent = replace(pricer, profile=replace(pricer.profile, compressors=frozen))
    for plan in some_plans(silent, space, seed, 6):
        if isinstance(plan.schedule, ZeroBubble):
            continue
        epochs = [over_epochs(silent, plan, n * 10**7, 64, 100) for n in (0, 1, 3, 99)]
        if plan.strategy != "pipeline":
            assert epochs == [None] * 4
            continue
        later = [found.later_epochs_s for found in epochs if found is not None]
        assert len(later) == 4 and all(b <= a + 1e-9 for a, b in pairwise(later))
        for found in filter(None, epochs):
            assert found.later_epochs_s - 1e-9 <= found.mean_s <= found.first_epoch_s + 1e-9
            assert found.first_epoch_share == pytest.approx(64 / (16 * 100))


@pytest.mark.parametrize("seed", SEEDS)
def test_replicas_that_are_alike_are_priced_as_if_each_were_looked_at(seed: int) -> None:
    draw = random.Random(seed)
    clouds = {
        f"c{i}": Cloud(draw.choice([1, 2]), slowdown=draw.choice([1.0, 3.0]))
        for i in range(draw.choice([4, 6]))
    }
    hybrid = Strategy("hybrid", len(clouds) // 2, GradientAveraging())
    layout = hybrid.arrange(ClusterLayout(clouds, LinkProfile(3e7, 0.01)))
    pricer = Pricer(EIGHT, {"hybrid": Arranged(hybrid, layout)}, 48)
    for m in (len(clouds) * 2, len(clouds) * 2 + 1):
        plan = Plan("hybrid", (3, 8), GPipe(m), "int4")
        each = [pricer.predict(plan, replica) for replica in range(layout.num_replicas)]
        slowest_s = max(step.step_s for step in each)
        price = pricer.price(plan)
        assert price.step_s >= slowest_s - 1e-12
        assert price.step_s == pricer.step_s(plan)
        assert price.compute_s == pytest.approx(sum(u.compute_s for s in each for u in s.ranks))
        groups = alike(pricer.arranged["hybrid"].replicas, lines_of(layout, {}))
        assert sorted(n for own in groups.values() for n in own) == [*range(layout.num_replicas)]


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 8), (4, 4)])
def test_the_bubble_that_a_price_shows_is_that_of_the_paper_on_a_free_line(p: int, m: int) -> None:
    """Formula (1): idle / computing = (p - 1) / m. Optimizers of no length."""
    pieces = [replace(piece(f"block {i}"), optimizer_s=0.0) for i in range(p - 1)]
    pieces.append(replace(piece("head", boundary=None), optimizer_s=0.0))
    free = {NO_COMPRESSION: CompressorCosts("none+none", [codec(1.0)])}
    layout = ClusterLayout({f"c{i}": Cloud() for i in range(p)}, "free")
    arranged = {"pipeline": Arranged(Strategy(), Strategy().arrange(layout))}
    pricer = Pricer(Profile(pieces, free), arranged, m)
    plan = Plan("pipeline", tuple(range(1, p + 1)), GPipe(m), NO_COMPRESSION)

    assert pricer.price(plan).bubble_ratio == pytest.approx((p - 1) / m, rel=1e-3)


def test_waits_of_averaging_are_in_no_bubble_of_a_price_as_in_none_of_a_run() -> None:
    """A run counts them under "averaging"."""
    line = LinkProfile(1e6, 0.02)
    layout = ClusterLayout({"a": Cloud(), "b": Cloud()}, line)
    strategy = Strategy("data_parallel", None, GradientAveraging())
    arranged = {"data_parallel": Arranged(strategy, strategy.arrange(layout))}
    plan = Plan("data_parallel", (8,), GPipe(2), NO_COMPRESSION)
    price = Pricer(EIGHT, arranged, 8).price(plan)

    assert any("averaging over link" in name and s > 0 for name, s in price.spent_s.items())
    assert price.spent_s["update"] == pytest.approx(sum(p.optimizer_s for p in EIGHT.pieces))
    assert price.bubble_ratio == 0


ADVICE = {  # the step of one plan with another count of micro-batches, over that of the job's own
    0.7: "micro-batches 4: 30% less",
    0.97: "micro-batches 4: 3% less",
    0.99: "a stronger compressor, or a faster line",
    1.3: "a stronger compressor, or a faster line",
}


@pytest.mark.parametrize("share", ADVICE)
def test_only_a_change_that_makes_a_step_clearly_shorter_is_advice(share: float) -> None:
    pricer, _ = drawn(0)
    own = Plan("pipeline", (1, len(pricer.profile.pieces)), GPipe(2), NO_COMPRESSION)
    other = own._replace(schedule=GPipe(4))
    priced = replace(pricer.price(own), step_s=2.0, spent_s={"link a-b": 1.5})
    ranked = Ranked([priced], priced, (2.0 * share, other), 2, 2)

    assert ranked.advice(None) == ADVICE[share]


TWO = ClusterLayout({"a": Cloud(), "b": Cloud()}, LinkProfile(100e6, 0.01))
FROZEN = BoundaryCodec(codec(1e6).forward)


def pricer(costs: CompressorCosts, layout: ClusterLayout = TWO) -> Pricer:
    ways = [Strategy(), Strategy("data_parallel", None, GradientAveraging())]
    arranged = {way.name: Arranged(way, way.arrange(layout)) for way in ways}
    return Pricer(replace(EIGHT, compressors={NO_COMPRESSION: costs}), arranged, 16)


def test_kept_rows_make_steps_of_later_epochs_shorter_by_what_fits() -> None:
    """EIGHT in two halves, the first one frozen: of 16 samples it computes 0.64 s, the other half
    1.92 s; 1 MB of each sample crosses, 0.08 s on the line."""
    costs = CompressorCosts("none", [FROZEN], AveragingCodec(32_000))
    slow = replace(TWO, wan=LinkProfile(4e6, 0.01))
    priced = pricer(costs, slow)
    plan = Plan("pipeline", (4, 8), GPipe(4), NO_COMPRESSION)

    def found(megabytes: int, num_steps: int = 50) -> OverEpochs:
        told = over_epochs(priced, plan, megabytes * 10**6, 200, num_steps)
        assert told is not None
        return told

    nothing, half, all_kept = found(0), found(100), found(200)
    assert [one.kept_share for one in (nothing, half, all_kept)] == [0.0, 0.5, 1.0]
    first_s = priced.step_s(plan)
    assert nothing.first_epoch_s == all_kept.first_epoch_s == first_s
    assert nothing.later_epochs_s == pytest.approx(first_s)
    # The line is what bounds it: 16 samples of 2 s each, of which half cross; and then none.
    assert first_s > 32 and 16 < half.later_epochs_s < first_s - 15
    assert all_kept.later_epochs_s == pytest.approx(1.92, abs=0.05)
    assert half.first_epoch_share == 0.25
    assert half.mean_s == pytest.approx(0.25 * first_s + 0.75 * half.later_epochs_s)
    short = found(200, num_steps=5)
    assert short.mean_s == first_s and short.at_the_end is priced
    assert all_kept.at_the_end.step_s(plan) == all_kept.later_epochs_s
    whole = Plan("data_parallel", (8,), GPipe(4), NO_COMPRESSION)
    assert over_epochs(priced, whole, 1, 200, 50) is None
    assert over_epochs(pricer(COMPRESSORS[NO_COMPRESSION]), plan, 1, 200, 50) is None


def test_a_plan_that_keeps_rows_is_told_by_its_average_over_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    priced = pricer(CompressorCosts("none", [FROZEN]))
    plan = Plan("pipeline", (4, 8), GPipe(4), NO_COMPRESSION)
    space = Space(plan, {"pipeline": [plan.ends]}, [4], [NO_COMPRESSION], ["schedule"])
    ranked = search(priced, space, 1)
    epochs = over_epochs(priced, ranked.best[0].plan, 10**9, 200, 50)
    assert epochs is not None
    report = Report(priced, space, ranked, 0.1, over_epochs={ranked.best[0].plan: epochs})

    print_plans(report)
    write_plan(tmp_path, report, ranked.best[0])

    text = epochs_text(epochs.as_table())
    said = capsys.readouterr().out
    assert f"on average over the run, {text}" in said and "plan 1: " in said
    assert "in later ones with 100% of the samples kept" in text
    assert "program" not in said, "it was not measured"
    told = predicted_of(tmp_path)
    assert told["predicted_step_time_s"] == pytest.approx(epochs.mean_s, abs=1e-6)
    assert told["predicted_over_epochs"]["later_epochs_s"] < told["predicted_step_time_s"]


def test_a_plan_has_a_star_where_it_changes_what_is_learned() -> None:
    row = {"strategy": "pipeline", "compression": "int8", "touches_quality": ["compression"]}
    rest = {"split": "", "micro_batches": 4, "schedule": "", "predicted_step_time_s": 1.0,
            "bubble_ratio": 0.0, "bytes_per_step": 1, "memory_bytes": {"a": 1}, "bound": "",
            "change_next": ""}  # fmt: skip
    cells = row_cells("1", row=row | rest)
    assert "pipeline" in cells and "int8*" in cells


SHAPES = {"weight": torch.Size((12, 10)), "bias": torch.Size((37,))}
TENSORS = [torch.ones(shape) for shape in SHAPES.values()]
NUM_VALUES = 157


def test_what_is_planned_of_an_exchange_is_what_it_sends_and_encodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worked = {"encode": 0, "decode": 0}  # values, of all replicas

    def new_codec(shapes: Mapping[str, torch.Size]) -> TensorCodec:
        return TensorCodec(shapes, lambda name, shape: Chain(), 7, True)

    def counted(name: str) -> Callable[..., object]:
        own = getattr(TensorCodec, name)

        def count(codec: TensorCodec, *given: object, **named: object) -> object:
            worked[name] += codec.raw_bytes // 4
            return own(codec, *given, **named)

        return count

    for name in worked:
        monkeypatch.setattr(TensorCodec, name, counted(name))
    for num_replicas, merge in ((2, None), (3, None), (5, None), (3, Median()), (5, Median())):
        worked |= {"encode": 0, "decode": 0}
        layout = ClusterLayout({f"c{i}": Cloud(1, (0, 1), replica=i) for i in range(num_replicas)})
        links = connected(num_replicas)
        exchange(
            [averager_for(own, SHAPES, new_codec, Terms(merge or weighted_sum)) for own in links],
            1,
            [TENSORS] * num_replicas,
        )

        lines = dict.fromkeys((f"{a}-{b}" for a, b in permutations(layout.clouds, 2)), FREE)
        costs = AveragingCodec(4 * NUM_VALUES, NUM_VALUES, NUM_VALUES)  # a second for each value
        averaging = GradientAveraging(merge=merge)
        planned = exchange_of(layout, averaging, costs, [1.0], lines)

        of_one = planned.bytes_per_step
        sent = sum(size for pair, size in of_one.items() if pair.startswith("c0-"))
        rounds = 1 if num_replicas == 2 or merge is not None else 2
        weights = 8 * (num_replicas - 1) * rounds
        assert sum(own.num_bytes for own in links) / num_replicas == pytest.approx(sent + weights)
        assert sum(worked.values()) / num_replicas == pytest.approx(planned.codec_s)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_contributions_that_a_robust_merge_looks_at_are_counted_in_memory(
    num_ranks: int,
) -> None:
    """Each of three replicas decodes all of them; the ranks of a cloud share a stage out."""
    clouds = {f"c{i}": Cloud(num_ranks, (0,), replica=i) for i in range(3)}
    work = PieceWork(*[0.0] * len(PieceWork._fields))._replace(trained_bytes=600)
    plan = Plan("data_parallel", (1,), schedule=GPipe(6), compression="none")
    memory = {}
    for merge in (None, Median()):
        strategy = Strategy("data_parallel", None, averaging=GradientAveraging(merge=merge))
        arranged = Arranged(strategy, ClusterLayout(clouds))
        memory[merge] = memory_of(plan, arranged, works=[work], messages={})["c0"]

    mean, robust = memory.values()
    assert robust - mean == 3 * 600 / num_ranks


def test_an_exchange_costs_a_step_its_share_and_only_what_later_steps_do_not_hide() -> None:
    """Of two steps one has an exchange of 3 s of codec and 10 s of line."""
    own_s, found = 4.0, ExchangeCost(3.0, 10.0, {"a-b": 600.0}, per_step=0.5, hides_steps=0.0)
    assert found.step_s(own_s) == 4.0 + 0.5 * (3.0 + 10.0)
    assert replace(found, hides_steps=2.0).step_s(own_s) == 4.0 + 0.5 * (3.0 + 10.0 - 8.0)
    assert replace(found, hides_steps=3.0).step_s(own_s) == 4.0 + 0.5 * 3.0
    assert found.bytes_per_step == {"a-b": 300.0}


@pytest.mark.parametrize(
    ("took_s", "median"),
    [
        ([9.0, 0.25, 0.5], 0.375),  # the first call is no measurement, two others always are
        ([9.0, 0.03, 0.04, 0.09], 0.04),  # until a tenth of a second has been measured
        ([9.0, *(n / 1e4 for n in range(1, MAX_REPEATS + 1))], 3e-4),
    ],
)
def test_a_codec_is_timed_by_the_median_of_a_few_calls(
    took_s: list[float], median: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, left = [0.0], [*took_s]

    def once() -> None:
        clock[0] += left.pop(0)

    monkeypatch.setattr("xcloud.simulator.codec_timer.OTHER_BYTES", 8)
    monkeypatch.setattr("xcloud.simulator.codec_timer.time.perf_counter", lambda: clock[0])
    assert median_s(once, torch.device("cpu")) == pytest.approx(median) and not left


def row_of(strategy: str, **changed: Any) -> dict[str, Any]:
    return {
        "strategy": strategy, "split": "3 | 5", "micro_batches": 4, "schedule": "GPipe",
        "compression": "int8", "touches_quality": ["compression"], "bubble_ratio": 0.256,
        "predicted_step_time_s": 0.5, "bytes_per_step": 2000, "bound": "line a-b",
        "memory_bytes": {"a": 1e6, "b": 3e6}, "change_next": "compression", "over_epochs": None,
        **changed,
    }  # fmt: skip


def test_a_plan_is_printed_with_all_that_qualifies_it() -> None:
    over = {"first_epoch_s": 1.0, "later_epochs_s": 0.5, "kept_share": 0.75, "mean_s": 0.6}
    profile = SimpleNamespace(measured_on="this machine", other_bytes=2e6)
    best = SimpleNamespace(micro_batches=8, step_s=0.25, bubble_ratio=0.1)
    report: Any = SimpleNamespace(
        pricer=SimpleNamespace(profile=profile), search_s=1.26, stale=["torch is newer"],
        ranked=SimpleNamespace(num_plans=12345, num_simulated=67),
        rows=[row_of("hybrid"), row_of("pipeline", over_epochs=over)],
        own_row=row_of("pipeline", touches_quality=[]), not_planned={"late": "nobody knows when"},
        crossings={"int8": 2e6, "int4": math.inf, "none": 0.0}, best_count=best,
        over_micro_batches=[SimpleNamespace(micro_batches=4, step_s=0.5), best],
    )  # fmt: skip
    shown = StringIO()
    print_plans(report, Console(file=shown, width=300))
    lines = [line.rstrip() for line in shown.getvalue().splitlines()]
    assert lines[:2] == [
        "12,345 plans, 67 simulated in 1.3 s; profile: this machine",
        "the profile may not hold: torch is newer",
    ]
    figures = "3 | 5 4 GPipe {} 500 ms 0.26 2.00 kB 3.00 MB line a-b compression"
    rows = [" ".join(line.split()) for line in lines]
    assert [row for row in rows if "GPipe" in row] == [
        f"1 hybrid {figures.format('int8*')}",
        f"2 pipeline {figures.format('int8*')}",
        f"yours pipeline {figures.format('int8')}",
    ]
    notes = lines[lines.index("same strategy as yours (pipeline): best is row 2") :]
    assert notes == [
        "same strategy as yours (pipeline): best is row 2",
        "memory: weights, gradients, moments, activations and messages of the fullest rank, and "
        "2.00 MB of program and work space, as in the trial",
        "bubble: waiting / computing, without the waits of averaging, as in the table of a run; "
        "bytes: that leave clouds in a step, all kinds together",
        "* changes what is learned, too; quality is not predicted (docs/planning.md)",
        "plan 2: 600 ms on average over the run, 1.00 s in the first epoch, 500 ms in later ones "
        "with 75% of the samples kept",
        "late is not planned: nobody knows when",
        "a step takes less with this compressor, at the best plan's other settings, on a line of "
        "less than",
        "  int8         2 Mbit/s",
        "  int4         any bandwidth",
        "  none         none: it never pays",
        "best m = 8: bubble 0.100; step by m, with the best pipeline's other settings: "
        "4: 500 ms, 8: 250 ms",
    ]
    report.rows, report.best_count, report.crossings = report.rows[1:], None, {}
    shown.truncate(0)
    print_plans(report, Console(file=shown, width=300))
    assert "same strategy" not in shown.getvalue() and "best m" not in shown.getvalue()
    assert "a step takes less" not in shown.getvalue()


def test_a_profile_differs_by_what_both_name_and_value_otherwise() -> None:
    profile = replace(EIGHT, of={"machine": "a", "torch": "1"})
    assert profile.differs_from({"machine": "a", "torch": "2", "model": "m"}) == [
        "torch was '1', now '2'"
    ]
    assert profile.differs_from(profile.of) == []
